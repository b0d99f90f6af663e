"""Simulation of attention without weights, iterated over the same tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from graphattn.dynamics.arguments import as_tokens
from graphattn.dynamics.scores import participation_ratio
from graphattn.graphs.arguments import as_choice, as_float, as_int
from graphattn.graphs.structures.composites import Parts, Union
from graphattn.graphs.structures.grid_windows import Grid, GridWindows
from graphattn.graphs.structures.structure import GlobalTokens, GraphStructure
from graphattn.graphs.token_graph import TokenGraph, as_token_graph
from graphattn.ops import (
    dot_product_attention,
    elu_features,
    linear_attention,
    rbf_attention,
)

Score = Literal["dot", "rbf", "linear"]
Scaling = Literal["sdp", "sq", "sq_inplace"]


@dataclass(frozen=True)
class AttentionRule:
    """The attention that :func:`simulate` iterates, with its arguments."""

    score: Score = "dot"
    scaling: Scaling = "sdp"
    sigma: float | None = None
    top_k: int | None = None

    def operands(self, x: Tensor, graph: TokenGraph) -> tuple[Tensor, Tensor, float]:
        """Return query and key [N, C], and the scale of their product (1 / sigma^2 for "rbf")."""
        root = math.sqrt(x.shape[1])
        if self.score == "rbf":
            assert self.sigma is not None
            return x, x, self.sigma**-2
        if self.scaling == "sdp":
            return x, x, 1 / root
        scaled = x / root
        if self.scaling == "sq":
            return scaled, x, 1.0
        # Query, key, value and residual are one tensor, so scaling in place scales all of them. The
        # queries of global tokens are scaled a second time.
        twice = global_rows(graph.structure, graph.num_targets, x.device)
        return torch.where(twice[:, None], scaled / root, scaled), scaled, 1.0

    def features(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features of queries and keys for "linear", [N, 1, C].

        Where all numbers are far below 0, all features would be 0. One factor for each query, and
        one for all keys, change no weight and make the largest feature 1.
        """
        top = x.amax(dim=1, keepdim=True)
        features = elu_features(x)
        query = torch.where(top < 0, (x - top).exp(), features)
        key = torch.where(top.max() < 0, (x - top.max()).exp(), features)
        return query[:, None], key[:, None]

    def residual(self, x: Tensor) -> Tensor:
        """Return the state to which the update is added: X, or X / sqrt(C) if scaled in place."""
        return x / math.sqrt(x.shape[1]) if self.scaling == "sq_inplace" else x

    def attend(self, x: Tensor, value: Tensor, graph: TokenGraph) -> Tensor:
        """Average `value` [N, Cv] by the attention among `x` [N, C]."""
        if self.score == "linear":
            query, key = self.features(x)
            return linear_attention(query, key, value[:, None], graph)[:, 0]
        query, key, scale = self.operands(x, graph)
        q, k, v = query[:, None], key[:, None], value[:, None]
        if self.score == "rbf":
            assert self.sigma is not None
            return rbf_attention(q, k, v, graph, self.sigma, top_k=self.top_k)[:, 0]
        return dot_product_attention(q, k, v, graph, scale=scale, top_k=self.top_k)[:, 0]


@dataclass(frozen=True, eq=False)
class Trajectory:
    """The result of :func:`simulate`: T steps of N tokens with C features.

    Attributes:
        states: X before the first step and after every step, [T + 1, N, C].
        updates: the standardised update Zhat of every step, [T, N, C].
        spectra: eigenvalues of the population covariance of X, in descending order, float64
            [T + 1, C].
        graph: the token graph.
        rule: the attention that was iterated, with score, scaling, sigma and top_k.
    """

    states: Tensor
    updates: Tensor
    spectra: Tensor
    graph: TokenGraph
    rule: AttentionRule

    @property
    def num_steps(self) -> int:
        """T, the number of steps."""
        return len(self.updates)

    @property
    def leading_share(self) -> Tensor:
        """The share of the variance along the leading direction, [T + 1]; NaN without variance."""
        return self.spectra[:, 0] / self.spectra.sum(dim=1)

    @property
    def participation_ratio(self) -> Tensor:
        """The effective number of dimensions, [T + 1] (:func:`participation_ratio`)."""
        return participation_ratio(self.spectra)

    @property
    def max_abs(self) -> Tensor:
        """The largest absolute entry of X at every step, [T + 1]."""
        return self.states.abs().amax(dim=(1, 2))

    def __repr__(self) -> str:
        steps, tokens, features = self.num_steps, *self.states.shape[1:]
        return (
            f"Trajectory(steps={steps}, tokens={tokens}, features={features}, "
            f"score={self.rule.score!r}, scaling={self.rule.scaling!r}, graph={self.graph!r})"
        )


def simulate(
    x: Tensor,
    graph: TokenGraph | Tensor,
    *,
    steps: int,
    score: Score = "dot",
    scaling: Scaling = "sdp",
    sigma: float | None = None,
    top_k: int | None = None,
    progress: bool = False,
) -> Trajectory:
    r"""Simulate attention without parameters, iterated over any token graph.

    .. math::
        Z = A(X), \qquad \hat Z = (Z - \mu) / s, \qquad X \leftarrow X + \hat Z

    Here A is one head of attention whose queries, keys and values are all X, and mu and s are the
    mean and the standard deviation of every feature over the tokens (ddof 0; a feature with s = 0
    becomes 0).

    Source: Attention Clusters, Eq. 1-3, with an **erratum**. The paper says that scaling the
    queries instead of the product widens the spectral gap. But (q / sqrt(C)) . k is
    (q . k) / sqrt(C), so both are the same operator. The paper measured an implementation that
    scales the queries in place. Without projections, queries, keys, values and the residual are the
    same tensor, so all of them are scaled. There are three choices of `scaling`:

    - ``"sdp"`` (scaled dot product): softmax(X X^T / sqrt(C)) X;
    - ``"sq"`` (scaled query): softmax((X / sqrt(C)) X^T) X, which is equal to "sdp" up to rounding;
    - ``"sq_inplace"``: softmax(X X^T / C) applied to the values X / sqrt(C), and
      X <- X / sqrt(C) + Zhat. X stays bounded for C > 1. The query of a global token (in
      Longformer, or the class token of a grid) is scaled twice: its logits are
      x_0 . x_j / C^1.5.

    If the graph is structured (complete, windows, blocks, Longformer, grids), nothing of size N x N
    is stored. For a list of edges, the memory is proportional to the number of edges.

    Args:
        x: the tokens before the first step, [N, C], usually from :func:`standardize`. float64 is
            computed in float64, half precision in float32.
        graph: a graph of one sequence with N tokens, or an edge_index [2, E].
        steps: T >= 0.
        score: "dot"; "rbf" for the logits -||x_i - x_j||^2 / (2 sigma^2) of
            :func:`~graphattn.rbf_attention`; or "linear" for the weights phi(x_i) . phi(x_j) of
            :func:`~graphattn.linear_attention`, phi = elu + 1, which have no softmax.
        scaling: one of the choices above; only for score "dot".
        sigma: the bandwidth of "rbf"; sqrt(C) if None.
        top_k: the number of sources with the largest logits that a token attends to; all if None.
        progress: whether a progress bar is shown.

    Returns:
        A :class:`Trajectory`.

    Raises:
        ValueError: if `x` is empty or not finite, shapes do not fit, the graph is a batch (mean and
            standard deviation are those of one sequence), an option is unknown or not possible with
            the score, or the tokens overflow their dtype.

    Example:
        >>> import torch, graphattn as ga
        >>> x = torch.tensor([[-1.2], [-1.0], [-0.8], [0.9], [1.0], [1.1]], dtype=torch.float64)
        >>> trajectory = ga.dynamics.simulate(x, ga.complete_graph(6), steps=8)
        >>> trajectory.states.shape, trajectory.spectra.shape
        (torch.Size([9, 6, 1]), torch.Size([9, 1]))
        >>> ga.dynamics.cluster(trajectory.updates[-1])  # two groups, each in one point
        tensor([0, 0, 0, 1, 1, 1])
    """
    x = as_tokens("x", x)
    graph = as_token_graph(graph, len(x), len(x))
    if not graph.has_same_tokens:
        raise ValueError(
            "graph must have the same tokens as sources and targets, got sequences with (targets, "
            f"sources) {graph.sizes} and first positions {graph.starts}"
        )
    if len(graph.sizes) > 1:
        raise ValueError(
            f"graph must be one sequence, got a batch of {len(graph.sizes)} sequences: the update "
            "is standardised over the tokens of one sequence, so simulate each one separately"
        )
    rule = as_rule(x, score, scaling, sigma, top_k)
    steps = as_int("steps", steps, 0)
    without_sources = graph.in_degree() == 0
    states, updates = [x], []
    for step in _counted(steps, progress):
        # Attention is an average, so it can be applied to differences from one token. Then an
        # offset of all tokens, or a constant feature, cancels exactly. Tokens without sources have
        # Z = 0.
        centre = x[0]
        z = rule.attend(x, x - centre, graph)
        if without_sources.any():
            z = torch.where(without_sources[:, None], -centre, z)
        update = standardize(z)
        x = rule.residual(x) + update
        if not x.isfinite().all():
            raise ValueError(
                f"x must be so small that {x.dtype} does not overflow, but it overflowed in step "
                f"{step + 1}: scale x down"
            )
        states.append(x)
        updates.append(update)
    trajectory = torch.stack(states)
    return Trajectory(
        states=trajectory,
        updates=torch.stack(updates) if updates else trajectory[:0],
        spectra=torch.stack([covariance_spectrum(state) for state in states]),
        graph=graph,
        rule=rule,
    )


def standardize(x: Tensor) -> Tensor:
    """Standardise every feature to mean 0 and variance 1 over the tokens.

    The statistics are those of the population (ddof 0), as in Eq. 2 of Attention Clusters. A
    constant feature becomes 0. A feature counts as constant if its deviation is at most a few
    roundings, because only noise would be scaled up otherwise.

    Args:
        x: tokens, [N, C], finite.

    Raises:
        ValueError: if `x` is empty or not finite.

    Example:
        >>> import torch, graphattn as ga
        >>> ga.dynamics.standardize(torch.tensor([[1.0, 7.0], [3.0, 7.0], [5.0, 7.0]]))
        tensor([[-1.2247,  0.0000],
                [ 0.0000,  0.0000],
                [ 1.2247,  0.0000]])
    """
    x = as_tokens("x", x)
    centred = x - x.mean(dim=0)
    deviation = centred.square().mean(dim=0).sqrt()
    constant = deviation <= 8 * torch.finfo(x.dtype).eps * x.abs().amax(dim=0)
    return torch.where(constant, 0.0, centred / torch.where(constant, 1.0, deviation))


def covariance_spectrum(x: Tensor) -> Tensor:
    """Compute the eigenvalues of the covariance of x [N, C], in descending order, float64 [C]."""
    centred = x.double() - x.double().mean(dim=0)
    return torch.linalg.eigvalsh(centred.T @ centred / len(x)).flip(0).clamp_min(0).cpu()


def as_rule(
    x: Tensor, score: Score, scaling: Scaling, sigma: float | None, top_k: int | None
) -> AttentionRule:
    """Check the arguments of attention among the tokens x [N, C]."""
    as_choice("score", score, ("dot", "rbf", "linear"))
    as_choice("scaling", scaling, ("sdp", "sq", "sq_inplace"))
    if score != "rbf" and sigma is not None:
        raise ValueError(f"sigma must be None unless score='rbf', got {sigma} with score={score!r}")
    if score != "dot" and scaling != "sdp":
        why = "whose scale is sigma" if score == "rbf" else "which has no scale"
        raise ValueError(f"scaling must be 'sdp' with score={score!r}, {why}, got {scaling!r}")
    if score == "linear" and top_k is not None:
        raise ValueError(
            f"top_k must be None with score='linear', whose weights are never computed, got {top_k}"
        )
    if score == "rbf":
        sigma = math.sqrt(x.shape[1]) if sigma is None else as_float("sigma", sigma, positive=True)
    return AttentionRule(
        score, scaling, sigma, None if top_k is None else as_int("top_k", top_k, 1)
    )


def global_rows(
    structure: GraphStructure | None, num_tokens: int, device: torch.device | None = None
) -> Tensor:
    """Return a bool [N] that says which tokens are global tokens of a structure."""
    rows = torch.zeros(num_tokens, dtype=torch.bool, device=device)
    match structure:
        case GlobalTokens(tokens=tokens):
            rows[list(tokens)] = True
        case Grid(class_token=True) | GridWindows(class_token=True):
            rows[0] = True
        case Union(parts=parts):
            for part in parts:
                rows |= global_rows(part, num_tokens, device)
        case Parts(parts=(only,)):  # a batch of one
            rows |= global_rows(only, num_tokens, device)
    return rows


def _counted(steps: int, progress: bool) -> Iterable[int]:
    if not progress:
        return range(steps)
    from rich.progress import track

    return track(range(steps), description="simulating")

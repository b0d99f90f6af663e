"""Tokens as particles: one consensus, or several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from graphattn.dynamics.arguments import as_tokens
from graphattn.dynamics.clusters import cluster, spread_of
from graphattn.graphs.arguments import as_float, as_int
from graphattn.graphs.builders.neighbors import radius_graph
from graphattn.graphs.builders.windows import complete_graph
from graphattn.graphs.token_graph import TokenGraph, as_token_graph
from graphattn.ops import dot_product_attention, rbf_attention


@dataclass(frozen=True, eq=False)
class ParticleFlow:
    """Result of the particle flows.

    Attributes:
        states: the particles at every step, the first one included, [T + 1, N, C].
    """

    states: Tensor

    @property
    def spread(self) -> Tensor:
        """Root-mean-square distance of the particles from their mean, [T + 1]."""
        centred = self.states - self.states.mean(dim=1, keepdim=True)
        return centred.square().sum(dim=2).mean(dim=1).sqrt()

    def num_clusters(self, step: int = -1, *, tolerance: float = 0.01) -> int:
        """Number of clusters: particles within `tolerance` of each other, in units of the first
        spread (so that a collapsed cloud is one cluster)."""
        spread = spread_of(self.states[0])
        return int(cluster(self.states[step], tolerance=tolerance, spread=spread).max()) + 1

    def __repr__(self) -> str:
        steps, tokens, features = self.states.shape
        return f"ParticleFlow(steps={steps - 1}, tokens={tokens}, features={features})"


def consensus_flow(
    x: Tensor, graph: TokenGraph | Tensor, *, steps: int, step_size: float = 0.5
) -> ParticleFlow:
    r"""Softmax attention as a flow: every particle moves towards the average it attends to.

    .. math:: z_i \leftarrow z_i + h \sum_j a_{ij} (z_j - z_i), \qquad
              a_i = \mathrm{softmax}_j(z_i \cdot z_j / \sqrt C)

    the explicit Euler step of :math:`\dot z_i = \sum_j a_{ij} (z_j - z_i)` (Krause Synchronization
    Transformers writes :math:`\dot z_i = \sum_j a_{ij} V z_j`; with V the identity and the drift
    of the whole cloud removed that is the same flow). Every step is an average, so the particles
    stay in their convex hull; on a complete graph all weights are positive and the hull shrinks to
    one point: the collapse to a single consensus that :func:`krause_flow` avoids. It may take long
    where particles are far apart: weights of exp(-20) are positive, too.

    Args:
        x: particles, [N, C].
        graph: who sees whom, N tokens; a particle without sources stays.
        steps: T >= 0.
        step_size: h, 0 < h <= 1; with 1 a particle jumps to its average.

    Raises:
        ValueError: if sizes disagree or an option is out of its range.

    Example:
        >>> import torch, graphattn as ga
        >>> x = torch.tensor([[-1.0], [-0.9], [0.9], [1.0]], dtype=torch.float64)
        >>> ga.dynamics.consensus_flow(x, ga.complete_graph(4), steps=200).num_clusters()
        1
    """
    x = as_tokens("x", x)
    graph = as_token_graph(graph, len(x), len(x))
    return _flow(x, steps, step_size, lambda z: _average(z, graph))


def krause_flow(
    x: Tensor,
    graph: TokenGraph | Tensor | None = None,
    *,
    radius: float | None = None,
    sigma: float | None = None,
    top_k: int | None = None,
    steps: int,
    step_size: float = 0.5,
) -> ParticleFlow:
    r"""Bounded confidence: every particle moves towards those near it, and no others.

    .. math:: z_i \leftarrow z_i + h \sum_{j \in S(i)} a_{ij} (z_j - z_i), \qquad
              a_{ij} \propto e^{-\lVert z_i - z_j \rVert^2 / 2 \sigma^2}

    Source: Krause Synchronization Transformers ("Distance-RBF", "Local Window + Top-k",
    "Multi-Cluster Synchronization"). S(i) is found anew at every step:

    - with `radius`: all j with ||z_i - z_j|| <= radius, equal weights if `sigma` is None: the
      model of Krause, and of Hegselmann and Krause (2002). Groups whose convex hulls are farther
      apart than `radius` never meet, because every step stays inside the hull of each. (That their
      tokens are is not enough: a ring around a group closes in on it.)
    - with `top_k`: the k nearest of the sources of i in `graph`, itself counted. Groups never meet
      if every token sees k tokens of its own group or more in `graph` (on the complete graph: if
      the group holds k), and if the convex hulls are farther apart than the widest group's
      diameter d (the largest distance in a group): the k nearest are then of the own group, hulls
      only shrink, and so it stays. Smallest distances between tokens of different groups larger
      than sqrt(2) d make the hulls that far apart; larger than d alone does not, nor do k tokens in
      a group where a narrow window shows fewer.

    With `sigma` alone the tails of the kernel couple everybody, and the cloud collapses in the
    end, slowly.

    Args:
        x: particles, [N, C].
        graph: the local window, N tokens; complete if None. Not with `radius`.
        radius: confidence, > 0, in units of `x`.
        sigma: bandwidth > 0 of the kernel; needed without `radius`.
        top_k: sources kept, >= 1. Not with `radius`.
        steps: T >= 0.
        step_size: h, 0 < h <= 1.

    Raises:
        ValueError: if neither `radius` nor `sigma` is given, or `radius` stands beside `graph` or
            `top_k`, or sizes disagree, or an option is out of its range.

    Example:
        >>> import torch, graphattn as ga
        >>> x = torch.tensor([[-1.0], [-0.9], [0.9], [1.0]], dtype=torch.float64)
        >>> ga.dynamics.krause_flow(x, radius=0.5, steps=50).num_clusters()
        2
        >>> ga.dynamics.krause_flow(x, sigma=1.0, top_k=2, steps=50).num_clusters()
        2
    """
    x = as_tokens("x", x)
    if radius is None and sigma is None:
        raise ValueError("radius or sigma must be given, got neither")
    if sigma is not None:
        sigma = as_float("sigma", sigma, positive=True)
    if radius is not None:
        if graph is not None or top_k is not None:
            raise ValueError("radius says who sees whom: it goes with neither graph nor top_k")
        reach = as_float("radius", radius, positive=True)

        def near(z: Tensor) -> Tensor:
            # Logits of 0 are equal weights.
            seen = radius_graph(z, reach, self_loops=True)
            return _average(z, seen, scale=0.0) if sigma is None else _average(z, seen, sigma)

        return _flow(x, steps, step_size, near)
    k = None if top_k is None else as_int("top_k", top_k, 1)
    everyone = complete_graph(len(x)).to(x.device)
    window = everyone if graph is None else as_token_graph(graph, len(x), len(x))
    return _flow(x, steps, step_size, lambda z: _average(z, window, sigma, k))


def _average(
    z: Tensor,
    graph: TokenGraph,
    sigma: float | None = None,
    top_k: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Compute the average that every particle jumps to, [N, C]: itself, where it sees nobody."""
    q = z[:, None]
    if sigma is None:
        average = dot_product_attention(q, q, q, graph, scale=scale)[:, 0]
    else:
        average = rbf_attention(q, q, q, graph, sigma, top_k=top_k)[:, 0]
    return torch.where((graph.in_degree() == 0)[:, None], z, average)


def _flow(
    x: Tensor, steps: int, step_size: float, average: Callable[[Tensor], Tensor]
) -> ParticleFlow:
    steps, h = as_int("steps", steps, 0), as_float("step_size", step_size, positive=True)
    if h > 1:
        raise ValueError(f"step_size must be <= 1 (a particle stays in the hull), got {h}")
    states = [x]
    for _ in range(steps):
        states.append(states[-1] + h * (average(states[-1]) - states[-1]))
    return ParticleFlow(torch.stack(states))

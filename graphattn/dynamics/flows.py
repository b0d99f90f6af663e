"""Flows of tokens as particles, which end in one consensus or in several clusters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from graphattn.dynamics.arguments import as_tokens
from graphattn.dynamics.clusters import cluster, spread_of
from graphattn.graphs.arguments import as_choice, as_float, as_int
from graphattn.graphs.builders.neighbors import radius_graph
from graphattn.graphs.builders.windows import complete_graph
from graphattn.graphs.token_graph import TokenGraph, as_token_graph
from graphattn.ops import dot_product_attention, rbf_attention

Manifold = Literal["euclidean", "sphere", "torus"]


@dataclass(frozen=True, eq=False)
class ParticleFlow:
    """The result of :func:`consensus_flow` and :func:`krause_flow`.

    Attributes:
        states: the particles before the first step and after every step, [T + 1, N, C].
        manifold: where they are, as in :func:`krause_flow`.
    """

    states: Tensor
    manifold: Manifold = "euclidean"

    @property
    def points(self) -> Tensor:
        """The states as points in space, [T + 1, N, C]; [T + 1, N, 2 C] for angles, whose cosines
        and sines they are."""
        if self.manifold != "torus":
            return self.states
        return torch.cat([self.states.cos(), self.states.sin()], dim=-1)

    @property
    def spread(self) -> Tensor:
        """Root-mean-square distance of the :attr:`points` from their mean, [T + 1]."""
        centred = self.points - self.points.mean(dim=1, keepdim=True)
        return centred.square().sum(dim=2).mean(dim=1).sqrt()

    def num_clusters(self, step: int = -1, *, tolerance: float = 0.01) -> int:
        """Count the clusters after a step, by merging near :attr:`points` (:func:`cluster`).

        `tolerance` is in units of the spread at the start, so that collapsed particles are one
        cluster.
        """
        spread = spread_of(self.points[0])
        return int(cluster(self.points[step], tolerance=tolerance, spread=spread).max()) + 1

    def __repr__(self) -> str:
        steps, tokens, features = self.states.shape
        return f"ParticleFlow(steps={steps - 1}, tokens={tokens}, features={features})"


def consensus_flow(
    x: Tensor, graph: TokenGraph | Tensor, *, steps: int, step_size: float = 0.5
) -> ParticleFlow:
    r"""Simulate softmax attention as a flow, in which particles move to the average they attend to.

    .. math:: z_i \leftarrow z_i + h \sum_j a_{ij} (z_j - z_i), \qquad
              a_i = \mathrm{softmax}_j(z_i \cdot z_j / \sqrt C)

    It is the explicit Euler step of :math:`\dot z_i = \sum_j a_{ij} (z_j - z_i)`. (Krause
    Synchronization Transformers writes :math:`\dot z_i = \sum_j a_{ij} V z_j`. If V is the
    identity, and the common drift of all particles is removed, it is the same flow.) Every step is
    an average, so the particles stay in their convex hull. On a complete graph, all weights are
    positive, and the hull shrinks to one point. This is the collapse to a single consensus, which
    :func:`krause_flow` avoids. It takes long if particles are far apart, because weights such as
    exp(-20) are small.

    Args:
        x: particles, [N, C].
        graph: the graph of N tokens that says which particles see which; a particle without sources
            does not move.
        steps: T >= 0.
        step_size: h, 0 < h <= 1; with h = 1, a particle moves to its average in one step.

    Raises:
        ValueError: if shapes do not fit or an option is out of its range.

    Example:
        >>> import torch, graphattn as ga
        >>> x = torch.tensor([[-1.0], [-0.9], [0.9], [1.0]], dtype=torch.float64)
        >>> ga.dynamics.consensus_flow(x, ga.complete_graph(4), steps=200).num_clusters()
        1
    """
    x = as_tokens("x", x)
    graph = as_token_graph(graph, len(x), len(x))
    return _flow(x, steps, step_size, lambda z: _average(z, graph) - z)


def krause_flow(
    x: Tensor,
    graph: TokenGraph | Tensor | None = None,
    *,
    radius: float | None = None,
    sigma: float | None = None,
    top_k: int | None = None,
    value: Tensor | None = None,
    manifold: Manifold = "euclidean",
    steps: int,
    step_size: float = 0.5,
) -> ParticleFlow:
    r"""Simulate bounded confidence, in which particles move only to the average of near particles.

    .. math:: z_i \leftarrow z_i + h \sum_{j \in S(i)} a_{ij} (z_j - z_i), \qquad
              a_{ij} \propto e^{-\lVert z_i - z_j \rVert^2 / 2 \sigma^2}

    Source: Krause Synchronization Transformers ("Distance-RBF", "Local Window + Top-k",
    "Multi-Cluster Synchronization"). S(i) is computed again in every step:

    - With `radius`, it contains all j with ||z_i - z_j|| <= radius. Without `sigma`, their weights
      are equal, which is the model of Krause, and of Hegselmann and Krause (2002). Two groups never
      merge if their convex hulls are farther apart than `radius`, because every step stays inside
      the hull of its group. (It is not enough that the tokens are farther apart: a ring around a
      group contracts to it.)
    - With `top_k`, it contains the k nearest sources of i in `graph`, including i. Groups never
      merge under two conditions. First, every token sees at least k tokens of its own group in
      `graph` (on the complete graph: every group has at least k tokens). Second, the convex hulls
      are farther apart than the diameter d of the widest group (the largest distance in a group).
      Then the k nearest are always in the own group, and the hulls only shrink. The second
      condition holds if tokens of different groups are farther apart than sqrt(2) d; more than d is
      not enough. :func:`persistent_groups` finds such groups.

    With only `sigma`, all particles attract each other a little, and in the end, after a long time,
    they collapse to one point.

    A `value` matrix V replaces z_j - z_i by V (z_j - z_i). This is the paper's :math:`\dot z_i =
    \sum_j a_{ij} V z_j` without the drift V z_i. Particles can then leave their convex hull: if V
    has an eigenvalue with a negative real part, they move apart in its direction.

    On a `manifold`, a step is:

    - "sphere": particles are unit vectors. The paper's velocity :math:`\sum_j a_{ij} V z_j` is
      projected to the tangent space at z_i, and the result of the step is normalised. Distances are
      those in the space around the sphere. With C = 2, the sphere is the circle.
    - "torus": every coordinate is an angle in -pi .. pi, and z_j - z_i is the shorter way around.
      All pairs are computed, so memory grows as N^2 C.

    Args:
        x: particles, [N, C].
        graph: the graph of N tokens; complete if None. It must be None with `radius`.
        radius: the largest distance of particles that see each other, > 0, in units of `x`.
        sigma: bandwidth > 0 of the kernel; it must be given without `radius`.
        top_k: the number of nearest sources, >= 1. It must be None with `radius`.
        value: V, [C, C]; the identity if None.
        manifold: "euclidean", "sphere" or "torus".
        steps: T >= 0.
        step_size: h, 0 < h <= 1.

    Raises:
        ValueError: if neither `radius` nor `sigma` is given, `radius` is given together with
            `graph` or `top_k`, shapes do not fit, an option is out of its range, or a particle is
            not on the sphere.

    Example:
        >>> import torch, graphattn as ga
        >>> x = torch.tensor([[-1.0], [-0.9], [0.9], [1.0]], dtype=torch.float64)
        >>> ga.dynamics.krause_flow(x, radius=0.5, steps=50).num_clusters()
        2
        >>> ga.dynamics.krause_flow(x, sigma=1.0, top_k=2, steps=50).num_clusters()
        2
        >>> angles = torch.tensor([[-3.1], [3.1], [0.1], [0.0]])  # -3.1 and 3.1 are neighbours
        >>> ga.dynamics.krause_flow(angles, radius=0.5, manifold="torus", steps=50).num_clusters()
        2
    """
    eps = torch.finfo(x.dtype).eps if isinstance(x, Tensor) and x.is_floating_point() else 0.0
    x = as_tokens("x", x)
    as_choice("manifold", manifold, ("euclidean", "sphere", "torus"))
    V = _as_value(value, x)
    if radius is None and sigma is None:
        raise ValueError("radius or sigma must be given, got None for both")
    if sigma is not None:
        sigma = as_float("sigma", sigma, positive=True)
    if radius is not None:
        if graph is not None or top_k is not None:
            raise ValueError(
                "graph and top_k must be None if radius is given, because radius determines which "
                f"particles see which, got graph={graph!r} and top_k={top_k!r}"
            )
        radius = as_float("radius", radius, positive=True)
    k = None if top_k is None else as_int("top_k", top_k, 1)
    everyone = complete_graph(len(x)).to(x.device)
    window = everyone if graph is None else as_token_graph(graph, len(x), len(x))
    if manifold == "torus":
        x, mask = _wrapped(x), window.to_mask()

        def turn(z: Tensor) -> Tensor:
            return _turn(z, mask, radius, sigma, k) @ V

        return _flow(x, steps, step_size, turn, _wrapped, manifold)

    def average(z: Tensor) -> Tensor:
        if radius is None:
            return _average(z, window, sigma, k)
        seen = radius_graph(z, radius, self_loops=True)
        # With scale 0, all logits are 0, so the weights are equal.
        return _average(z, seen, scale=0.0) if sigma is None else _average(z, seen, sigma)

    if manifold == "euclidean":
        return _flow(x, steps, step_size, lambda z: (average(z) - z) @ V)
    length = x.norm(dim=1)
    if bool((length - 1).abs().gt(max(1e-4, 4 * eps)).any()):
        i = int((length - 1).abs().argmax())
        raise ValueError(
            f"x must be unit vectors with manifold='sphere', got x[{i}] of length "
            f"{float(length[i]):.6g}: use torch.nn.functional.normalize(x, dim=-1)"
        )

    alone = (window.in_degree() == 0)[:, None]  # without sources, there is no pull

    def velocity(z: Tensor) -> Tensor:
        pull = (average(z) @ V).masked_fill(alone, 0)
        return pull - (pull * z).sum(dim=1, keepdim=True) * z

    def onto_sphere(z: Tensor) -> Tensor:
        return functional.normalize(z, dim=1)

    return _flow(onto_sphere(x), steps, step_size, velocity, onto_sphere, manifold)


def _as_value(value: Any, x: Tensor) -> Tensor:
    """Check V for particles [N, C], and return its transpose."""
    C = x.shape[1]
    if value is None:
        return torch.eye(C, dtype=x.dtype, device=x.device)
    if not isinstance(value, Tensor) or value.shape != (C, C):
        got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"value must be None or a matrix of shape {[C, C]}, got {got}")
    return value.to(x).T


def _wrapped(angles: Tensor) -> Tensor:
    """Return the same angles in -pi .. pi."""
    return torch.remainder(angles + torch.pi, 2 * torch.pi) - torch.pi


def _turn(
    z: Tensor, mask: Tensor, radius: float | None, sigma: float | None, top_k: int | None
) -> Tensor:
    """Compute the average way from every particle to those that it sees, on the torus, [N, C]."""
    way = _wrapped(z - z[:, None])  # from target i to source j
    squared = way.square().sum(dim=-1)
    if radius is not None:
        mask = squared <= radius**2
    if top_k is not None:
        hidden = squared.masked_fill(~mask, torch.inf)
        near = hidden.argsort(dim=1, stable=True)[:, :top_k]
        mask = mask & torch.zeros_like(mask).scatter(1, near, True)
    logit = torch.zeros_like(squared) if sigma is None else -squared / (2 * sigma**2)
    weight = logit.masked_fill(~mask, -torch.inf).softmax(dim=1)
    weight = weight.masked_fill(~mask, 0)  # also of a particle without sources
    return torch.einsum("ij,ijc->ic", weight, way)


def _average(
    z: Tensor,
    graph: TokenGraph,
    sigma: float | None = None,
    top_k: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Compute the average that every particle moves to, [N, C]; its own state without sources."""
    q = z[:, None]
    if sigma is None:
        average = dot_product_attention(q, q, q, graph, scale=scale)[:, 0]
    else:
        average = rbf_attention(q, q, q, graph, sigma, top_k=top_k)[:, 0]
    return torch.where((graph.in_degree() == 0)[:, None], z, average)


def _flow(
    x: Tensor,
    steps: int,
    step_size: float,
    velocity: Callable[[Tensor], Tensor],
    onto_manifold: Callable[[Tensor], Tensor] = lambda z: z,
    manifold: Manifold = "euclidean",
) -> ParticleFlow:
    steps, h = as_int("steps", steps, 0), as_float("step_size", step_size, positive=True)
    if h > 1:
        raise ValueError(
            f"step_size must be <= 1, so that particles stay in their convex hull, got {h}"
        )
    states = [x]
    for _ in range(steps):
        states.append(onto_manifold(states[-1] + h * velocity(states[-1])))
    return ParticleFlow(torch.stack(states), manifold)

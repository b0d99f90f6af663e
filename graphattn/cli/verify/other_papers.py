"""Check claims of the three papers on Krause attention, Gaussian kernels and attention clusters.

(The closed classes of Krause attention are in `closed_classes.py`.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import graphattn as ga
from graphattn.cli.verify.claims import Size, claim
from graphattn.cli.verify.graphs import generator
from graphattn.diagnostics.stable_lr import alpha_max

ROUNDING = 1e-12
KRAUSE = "Krause paper"
GAUSSIAN = "Gaussian kernel paper"
CLUSTERS = "attention clusters paper"


# Krause attention: particles move to averages of near particles.


class ParticleGroups(NamedTuple):
    """Particles of groups along the first coordinate, and their flow, [T + 1, N, C]."""

    name: str
    home: Tensor
    states: Tensor


def _flows(size: Size, **options: Any) -> Iterator[ParticleGroups]:
    """Yield groups of 3 to 8 particles, whose hulls are 1 wide and more than sqrt(C) apart."""
    for seed in range(size.draws):
        draw = generator(seed)
        counts = torch.randint(
            3, 9, (int(torch.randint(2, 5, (), generator=draw)),), generator=draw
        )
        C = 1 + seed % 3
        home = torch.arange(len(counts)).repeat_interleave(counts)
        x = torch.rand(len(home), C, dtype=torch.float64, generator=draw)
        x[:, 0] += (1.1 + C**0.5) * home
        flow = ga.dynamics.krause_flow(x, **options, steps=12, step_size=0.2 + 0.2 * (seed % 5))
        yield ParticleGroups(f"draw {seed}", home, flow.states)


def flows_within_a_radius(size: Size) -> Iterator[ParticleGroups]:
    return _flows(size, radius=1.0)


def flows_of_nearest(size: Size) -> Iterator[ParticleGroups]:
    return _flows(size, sigma=1.0, top_k=3)


def _gap(case: ParticleGroups) -> tuple[float, float]:
    """Compare the smallest gap between hulls along the first coordinate with that at the start."""
    members = [case.states[:, case.home == g, 0] for g in range(int(case.home[-1]) + 1)]
    low = torch.stack([m.amin(1) for m in members])
    high = torch.stack([m.amax(1) for m in members])
    gaps = (low[1:] - high[:-1]).amin(0)  # of every step
    return float((gaps.min() - gaps[0]) / gaps[0]), ROUNDING


@claim("flow within a radius: groups stay apart", KRAUSE, flows_within_a_radius)
def groups_within_a_radius(case: ParticleGroups) -> tuple[float, float]:
    """Groups whose convex hulls are further apart than the radius never come nearer."""
    return _gap(case)


@claim("flow of the k nearest: groups stay apart", KRAUSE, flows_of_nearest)
def groups_of_nearest(case: ParticleGroups) -> tuple[float, float]:
    """Groups of at least k particles never come nearer with top-k, if their hulls are further apart
    than the diameter of the widest."""
    return _gap(case)


@claim("flow: particles stay in their hull", KRAUSE, flows_of_nearest)
def flow_stays_in_its_hull(case: ParticleGroups) -> tuple[float, float]:
    """Every step is an average, so the range of a coordinate never grows."""
    ranges = case.states.amax(1) - case.states.amin(1)
    return float((ranges[:-1] - ranges[1:]).amin() / ranges[0].max()), ROUNDING


# Gaussian kernels.


class RandomHeads(NamedTuple):
    """Queries and keys of one head, [N, 1, D], a graph and a bandwidth."""

    name: str
    query: Tensor
    key: Tensor
    graph: ga.TokenGraph
    sigma: float


def random_heads(size: Size) -> Iterator[RandomHeads]:
    for seed in range(size.draws):
        draw = generator(seed)
        N, D = 5 + seed % 20, 1 + seed % 7
        query, key = torch.randn(2, N, 1, D, dtype=torch.float64, generator=draw)
        graph = (ga.complete_graph(N), ga.causal_graph(N))[seed % 2]
        yield RandomHeads(f"draw {seed}", query, key, graph, 0.3 * 1.5 ** (seed % 6))


@claim("RBF is dot product with a bias", KRAUSE, random_heads, "equation")
def rbf_is_a_dot_product(case: RandomHeads) -> tuple[float, float]:
    """The weights of exp(-|q - k|^2 / 2 sigma^2) are those of the logits (q . k - |k|^2 / 2) /
    sigma^2, because |q|^2 is the same for all keys of a query."""
    q, k = case.query[:, 0], case.key[:, 0]
    logits = (q @ k.T - k.square().sum(1) / 2) / case.sigma**2
    expected = logits.masked_fill(~case.graph.to_mask(), -torch.inf).softmax(1)
    source, target = case.graph.edge_index
    weight = ga.attention_weights(case.query, case.key, case.graph, sigma=case.sigma)[:, 0]
    return -float((weight - expected[target, source]).abs().max()), 1e-11


@claim("Gaussian kernel: eigenvalues in 0 .. 1", GAUSSIAN, random_heads)
def spectrum_of_the_kernel(case: RandomHeads) -> tuple[float, float]:
    """Attention over all pairs by a Gaussian kernel has real eigenvalues between 0 and 1, because
    it is similar to a positive semidefinite matrix."""
    x, N = case.query, len(case.query)
    weight = ga.attention_weights(x, x, ga.complete_graph(N), sigma=case.sigma)
    eigenvalues = torch.linalg.eigvals(weight.reshape(N, N))
    outside = torch.stack([eigenvalues.real, 1 - eigenvalues.real, -eigenvalues.imag.abs()])
    return float(outside.min()), 1e-9


@claim("Gaussian kernel: reversible", GAUSSIAN, random_heads, "equation")
def detailed_balance(case: RandomHeads) -> tuple[float, float]:
    """The weights satisfy d_i a_ij = d_j a_ji, where d_i is the sum of the kernel over j."""
    x, N = case.query, len(case.query)
    weight = ga.attention_weights(x, x, ga.complete_graph(N), sigma=case.sigma).reshape(N, N)
    kernel = torch.exp(-torch.cdist(x[:, 0], x[:, 0]).square() / (2 * case.sigma**2))
    flow = kernel.sum(1)[:, None] * weight
    return -float((flow - flow.T).abs().max() / flow.max()), 1e-9


class Width(NamedTuple):
    """A width, and heads that divide it."""

    name: str
    dim: int
    heads: int


def widths(size: Size) -> Iterator[Width]:
    for dim in range(4, 4 + 4 * min(size.draws, 24), 4):
        for heads in (1, 2, 4):
            yield Width(f"dim {dim}, {heads} heads", dim, heads)


@claim("Gaussian kernel: number of parameters", GAUSSIAN, widths, "equation")
def parameters_of_the_layer(case: Width) -> tuple[float, float]:
    """The layer has D^2 + D + H parameters (one output map, a bandwidth per head), where dot
    products have 4 (D^2 + D)."""
    one_map = case.dim**2 + case.dim
    layers: list[tuple[torch.nn.Module, int]] = [
        (ga.nn.GaussianKernelAttention(case.dim, case.heads), one_map + case.heads),
        (ga.nn.DotProductAttention(case.dim, case.heads), 4 * one_map),
    ]
    count = [sum(p.numel() for p in layer.parameters()) for layer, _ in layers]
    wrong = sum(abs(n - expected) for n, (_, expected) in zip(count, layers, strict=True))
    return -float(wrong), 0.0


# Attention clusters.


class PatternTokens(NamedTuple):
    """Standardised tokens [N, C] and a pattern."""

    name: str
    x: Tensor
    graph: ga.TokenGraph


def random_tokens(size: Size) -> Iterator[PatternTokens]:
    for seed in range(size.draws):
        N, C = 12 + seed % 9, 2 + seed % 4
        x = torch.randn(N, C, dtype=torch.float64, generator=generator(seed))
        graph = (
            ga.complete_graph(N),
            ga.window_path_graph(N, 2, self_loops=True),
            ga.block_window_graph(N, 4),
            ga.longformer_graph(N, 2, [0]),
        )[seed % 4]
        yield PatternTokens(f"draw {seed}", ga.dynamics.standardize(x), graph)


@claim("scaled query is scaled dot product", CLUSTERS, random_tokens, "equation")
def scaled_query(case: PatternTokens) -> tuple[float, float]:
    """Scaled queries and scaled products make the same iteration."""
    sdp, sq = (
        ga.dynamics.simulate(case.x, case.graph, steps=5, scaling=scaling).states[-1]
        for scaling in ("sdp", "sq")
    )
    return -float((sdp - sq).abs().max() / sdp.abs().max()), 1e-9


def without_global_tokens(size: Size) -> Iterator[PatternTokens]:
    for case in random_tokens(size):
        if int((case.graph.in_degree() == len(case.x)).sum()) != 1:
            yield case


@claim("in place: queries, keys, values shrink", CLUSTERS, without_global_tokens, "equation")
def scaled_in_place(case: PatternTokens) -> tuple[float, float]:
    """Scaling queries in place is the iteration of X / sqrt(C) without any scaling, in patterns
    without global tokens (whose queries are scaled twice)."""
    step = ga.dynamics.simulate(case.x, case.graph, steps=1, scaling="sq_inplace").states[-1]
    x = case.x / case.x.shape[1] ** 0.5
    logits = (x @ x.T).masked_fill(~case.graph.to_mask(), -torch.inf)
    z = logits.softmax(1) @ x
    spread = z.std(0, correction=0)
    update = (z - z.mean(0)) / torch.where(spread > 0, spread, 1)
    return -float((step - (x + update)).abs().max()), 1e-9


# Stable learning rates (consensus paper, Eq. 18).


class Bowl(NamedTuple):
    """A quadratic loss x^T A x / 2, a point and a direction of descent."""

    name: str
    A: Tensor
    x: Tensor
    step: Tensor


def bowls(size: Size) -> Iterator[Bowl]:
    for seed in range(size.draws):
        draw, n = generator(seed), 2 + seed % 6
        root, x, tilt = (
            torch.randn(n, m, dtype=torch.float64, generator=draw) for m in (n + 1, 1, 1)
        )
        A = root @ root.T
        step = -(A @ x) + 0.1 * tilt
        if float((A @ x * step).sum()) < 0:
            yield Bowl(f"draw {seed}", A, x, step)


@claim("alpha_max: the loss is as before", "Eq. 18", bowls, "equation")
def largest_stable_rate(case: Bowl) -> tuple[float, float]:
    """A step of size alpha_max along a direction of descent ends at the loss where it began, if the
    loss is quadratic."""
    slope = float((case.A @ case.x * case.step).sum())
    curvature = float((case.step.T @ case.A @ case.step).sum())
    end = case.x + alpha_max(slope, curvature) * case.step
    before, after = (float((p.T @ case.A @ p).sum()) / 2 for p in (case.x, end))
    return -abs(after - before) / before, 1e-9

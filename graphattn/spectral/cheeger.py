"""Bottlenecks of a graph: conductance, and Cheeger's bounds of the smallest conductance."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse
import torch
from numpy.typing import NDArray
from torch import Tensor

from graphattn.graphs import TokenGraph
from graphattn.spectral.arguments import as_edge_weight, as_square_graph
from graphattn.spectral.eigenvalues import (
    BRIEFLY,
    THOROUGHLY,
    WIDE,
    connected_adjacencies,
    lanczos_pair,
    polished,
    ratios_in_float64,
    start_vector,
)
from graphattn.spectral.laplacians.elimination import GroundedLaplacian, elimination_order
from graphattn.spectral.laplacians.laplacian import laplacian_of
from graphattn.spectral.laplacians.operators import component_of, half_edges

Array = NDArray[np.float64]

DENSE = 1000  # tokens up to which a dense solver computes all modes


class CheegerBounds(NamedTuple):
    """Bounds of the smallest conductance of a graph, from :func:`cheeger_bounds`.

    Attributes:
        lower: the lower bound.
        upper: the upper bound.
        sweep_cut: bool [N], a group of tokens with a small conductance.
        conductance: the conductance of `sweep_cut`.

    Example:
        >>> import graphattn as ga
        >>> bounds = ga.spectral.cheeger_bounds(ga.window_path_graph(8, window=1))
        >>> bounds.lower <= bounds.conductance <= bounds.upper, bounds.sweep_cut.sum().item()
        (True, 4)
    """

    lower: float
    upper: float
    sweep_cut: Tensor  # [N], bool
    conductance: float  # of the sweep cut


def conductance(graph: TokenGraph, members: Tensor, edge_weight: Tensor | None = None) -> float:
    r"""Compute the share of a group's weight that is on edges to other tokens.

    .. math:: \phi(S) = \frac{\sum_{i \in S, \, j \notin S} W_{ij}}
        {\min(\operatorname{vol} S, \operatorname{vol} \bar S)}, \qquad
        \operatorname{vol} S = \sum_{i \in S} \sum_j W_{ij}

    Here W are the symmetrised weights of :func:`laplacian`, without self-loops. The conductance is
    0 for a group without edges to other tokens, and 1 for a group without edges inside.

    Source: Chung, Spectral Graph Theory, Section 2.1.

    Args:
        graph: N tokens; direction does not matter.
        members: bool [N], True for the tokens of the group S; neither all tokens nor none.
        edge_weight: weights >= 0 in the order of ``graph.edge_index``, [E]; ones if None.

    Returns:
        A number between 0 and 1. It is also 0.0 if the tokens on one side have no weight at all.

    Raises:
        ValueError: if `members` is not a bool tensor [N] with both True and False, `graph` is not a
            TokenGraph or is bipartite, or `edge_weight` is not as in :func:`laplacian`.

    Example:
        >>> import torch, graphattn as ga
        >>> path = ga.window_path_graph(6, window=1)
        >>> ga.spectral.conductance(path, torch.arange(6) < 3)  # one link of five weights
        0.2
    """
    graph = as_square_graph(graph)
    if edge_weight is not None:
        edge_weight = as_edge_weight(edge_weight, graph.num_edges)
    inside = _as_members(members, graph.num_targets)
    source, target, half = half_edges(graph, edge_weight)
    # The weights are scaled so that sums of tiny or huge weights do not underflow or overflow.
    half = half / half.max(initial=0.0) if half.any() else half
    cut = half[inside[source] != inside[target]].sum()
    inner, others = (
        half[side[source]].sum() + half[side[target]].sum() for side in (inside, ~inside)
    )
    return float(cut / min(inner, others)) if cut > 0 else 0.0


def cheeger_bounds(graph: TokenGraph, edge_weight: Tensor | None = None) -> CheegerBounds:
    r"""Compute bounds of the smallest conductance of any group, and a group between the bounds.

    .. math:: \frac{\lambda}{2} \le h = \min_S \phi(S) \le \phi(\text{sweep cut})
        \le \sqrt{2 \lambda}

    Here lambda is the second-smallest eigenvalue of the symmetric normalised Laplacian (Cheeger's
    inequality). A small h is a bottleneck, across which tokens exchange little. Finding the group
    with the smallest conductance is NP-hard. The sweep cut is the best of N - 1 groups, where group
    k has the k tokens with the smallest entries of the Fiedler vector. Its conductance is proven to
    be between the bounds.

    Source: Chung, Spectral Graph Theory, Theorem 2.2 and Section 2.2 (the sweep); Alon & Milman
    (1985).

    Args:
        graph: N >= 2 tokens; direction does not matter.
        edge_weight: weights >= 0 in the order of ``graph.edge_index``, [E]; ones if None.

    Returns:
        ``(lower, upper, sweep_cut, conductance)``: lambda / 2, sqrt(2 lambda), the group as a bool
        tensor [N] on the graph's device (the side with less weight), and its conductance. For a
        disconnected graph, all numbers are 0.0, and the group is the connected part of token 0.

    Raises:
        ValueError: if there are fewer than two tokens, and in the same cases as
            :func:`fiedler_value`.

    Example:
        >>> import graphattn as ga
        >>> rooms = ga.union(ga.block_window_graph(8, 4), ga.window_path_graph(8, 1))
        >>> bounds = ga.spectral.cheeger_bounds(rooms)
        >>> bounds.sweep_cut.int()  # one of two rooms, with one door of 13 links
        tensor([1, 1, 1, 1, 0, 0, 0, 0], dtype=torch.int32)
        >>> bounds.lower <= bounds.conductance == 1 / 13 <= bounds.upper
        True
    """
    graph = as_square_graph(graph)
    if graph.num_targets < 2:
        raise ValueError(f"graph must have at least 2 tokens, got {graph.num_targets}")
    parts, _ = connected_adjacencies(graph, edge_weight)
    if len(parts) > 1:
        part = component_of(graph, edge_weight)
        first = torch.from_numpy(part == part[0]).to(graph.device)
        return CheegerBounds(0.0, 0.0, first, 0.0)
    (adjacency,) = parts
    degree = np.asarray(adjacency.sum(axis=1)).ravel()
    value, height = _slowest_normalised_pair(adjacency, degree)
    # The sign of an eigenvector is arbitrary. This choice puts token 0 into the group if the two
    # sides are equal.
    height *= -np.sign(height[np.argmax(np.abs(height) > 1e-6 * np.abs(height).max())])
    cut = torch.from_numpy(_sweep(height, degree, adjacency)).to(graph.device)
    sweep_conductance = conductance(graph, cut, edge_weight)
    return CheegerBounds(value / 2, math.sqrt(2 * value), cut, sweep_conductance)


def _as_members(members: Any, num_tokens: int) -> NDArray[np.bool_]:
    if not isinstance(members, Tensor) or members.dtype != torch.bool:
        got = members.dtype if isinstance(members, Tensor) else type(members).__name__
        raise ValueError(f"members must be a bool tensor [{num_tokens}], got {got}")
    if members.shape != (num_tokens,):
        raise ValueError(f"members must have shape [{num_tokens}], got {list(members.shape)}")
    inside = members.cpu().numpy()
    if inside.all() or not inside.any():
        raise ValueError(
            "members must be True for some tokens and False for others, "
            f"got True for {int(inside.sum())} of {num_tokens} tokens"
        )
    return inside


def _slowest_normalised_pair(
    adjacency: scipy.sparse.csr_array, degree: Array
) -> tuple[float, Array]:
    """Compute the second mode of a connected graph's symmetric normalised Laplacian.

    Returns:
        The eigenvalue, and the eigenvector divided by the roots of the degrees, [N].
    """
    num_tokens = len(degree)
    root = np.sqrt(degree)
    kernel = root / np.linalg.norm(root)
    order = elimination_order(adjacency)
    if order.cost > WIDE:
        L = laplacian_of(adjacency, "symmetric")
        pair = lanczos_pair(
            lambda u: L @ u + 2 * kernel * (kernel @ u), num_tokens, "SA", (BRIEFLY,)
        )
        if pair is not None and pair[0] > 1e-6:  # It has an absolute error.
            height = pair[1] / root
            return pair[0], height - (degree @ height) / degree.sum()

    def centred(u: Array) -> Array:
        return u - np.multiply.outer(kernel, kernel @ u)

    with ratios_in_float64(adjacency):
        grounded = GroundedLaplacian.of(adjacency, order)
        size = 1.0

        def pseudo_inverse(u: Array) -> Array:
            return centred((grounded.solve((centred(u).T * root).T).T * root).T / size)

        # The results are scaled to the order of 1, because they are squared.
        size = float(np.abs(pseudo_inverse(start_vector(num_tokens))).max())
        if num_tokens <= DENSE:
            values, vectors = np.linalg.eigh(pseudo_inverse(np.eye(num_tokens)))
            pair = float(values[-1]), vectors[:, -1]
        else:
            pair = lanczos_pair(pseudo_inverse, num_tokens, "LA", THOROUGHLY)
    if pair is None:
        raise RuntimeError(
            "the Lanczos iteration for the second eigenvalue of the normalised Laplacian has not "
            "converged: use a graph whose weights are more even"
        )
    return 1 / (pair[0] * size), polished(pseudo_inverse, pair[1]) / root


def _sweep(height: Array, degree: Array, adjacency: scipy.sparse.csr_array) -> NDArray[np.bool_]:
    """Find the group of smallest conductance among the first k tokens by `height`; bool [N]."""
    order = np.argsort(height, kind="stable")
    place = np.empty(len(height), dtype=np.intp)
    place[order] = np.arange(len(height))
    pairs = scipy.sparse.triu(adjacency, k=1, format="coo")
    start = np.minimum(place[pairs.row], place[pairs.col])
    stop = np.maximum(place[pairs.row], place[pairs.col])
    # The first k + 1 tokens cut a pair if start <= k < stop.
    cut = _sums_over_ranges(start, stop, pairs.data, len(height))[:-1]
    below = np.cumsum(degree[order])[:-1]
    above = np.cumsum(degree[order][::-1])[::-1][1:]
    best = int(np.argmin(cut / np.minimum(below, above)))
    group = place <= best
    return group if below[best] <= above[best] * (1 + 1e-9) else ~group


def _sums_over_ranges(
    start: NDArray[np.intp], stop: NDArray[np.intp], weight: Array, size: int
) -> Array:
    """Sum the weights of all ranges [start, stop) that hold each of the places 0 to size - 1.

    It only adds, because a difference of running sums would lose small sums beside large ones. A
    range is divided into at most two nodes of each level of a binary tree (a segment tree).
    """
    levels: list[Array] = []
    while len(start):
        first, last = start % 2 == 1, stop % 2 == 1
        node = np.concatenate([start[first], stop[last] - 1])
        level = np.bincount(node, np.concatenate([weight[first], weight[last]]), size)
        levels.append(level.astype(np.float64, copy=False))
        start, stop, size = (start + 1) // 2, stop // 2, (size + 1) // 2
        left = start < stop
        start, stop, weight = start[left], stop[left], weight[left]
    sums = levels.pop()
    while levels:
        below = levels.pop()
        sums = below + np.repeat(sums, 2)[: len(below)]
    return sums

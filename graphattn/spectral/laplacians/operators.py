"""Laplacians as operators without a matrix: with shifted slices for windows, or edge by edge.

All results are sums of differences u_i - u_j, so constants give exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse
import torch
from numpy.typing import NDArray
from scipy.sparse.csgraph import connected_components
from scipy.sparse.linalg import LinearOperator
from torch import Tensor

from graphattn.graphs import TokenGraph
from graphattn.graphs.structures.composites import Parts
from graphattn.graphs.structures.grid_windows import Grid
from graphattn.graphs.structures.structure import Band, Blocks, Complete, Cycle, GraphStructure

Array = NDArray[np.float64]
Apply = Callable[[Array], Array]  # u -> L u, [N] or [N, k]


def laplacian_operator(
    graph: TokenGraph, edge_weight: Tensor | None, normalization: str | None
) -> LinearOperator:
    """Make a matrix-free operator of the Laplacian with checked weights [E], [E, C, C] or None."""
    if edge_weight is not None and edge_weight.dim() == 3:
        forward = by_blocks(graph, edge_weight)
        size = graph.num_targets * edge_weight.shape[2]
        return _operator(size, forward, forward)
    structure = graph.structure
    known = None
    if edge_weight is None and structure is not None:
        known = by_structure(structure)
    if known is not None and normalization is None:
        return _operator(graph.num_targets, known, known)
    if known is not None and structure is not None:
        forward, degree = known, _structured_degree(structure)
    else:
        source, target, half = half_edges(graph, edge_weight)
        forward = by_pairs(source, target, half, graph.num_targets)
        degree = _weighted_count(source, half, graph.num_targets)
        degree += _weighted_count(target, half, graph.num_targets)
    if normalization is None:
        return _operator(graph.num_targets, forward, forward)
    share = np.divide(1.0, degree, out=np.zeros(len(degree)), where=degree > 0)
    if normalization == "symmetric":
        symmetric = _scaled(np.sqrt(share), forward, np.sqrt(share))
        return _operator(graph.num_targets, symmetric, symmetric)
    one = np.ones_like(share)
    return _operator(graph.num_targets, _scaled(share, forward, one), _scaled(one, forward, share))


def half_edges(
    graph: TokenGraph, edge_weight: Tensor | None
) -> tuple[NDArray[np.int64], NDArray[np.int64], Array]:
    """Return sources, targets and half the weights of edges, without self-loops and weights 0."""
    source, target = graph.edge_index.cpu().numpy()
    edge = source != target
    if edge_weight is None:
        return source[edge], target[edge], np.full(int(edge.sum()), 0.5)
    weight = edge_weight.detach().to("cpu", torch.float64).numpy()
    edge &= (weight != 0).any(axis=tuple(range(1, weight.ndim)))
    return source[edge], target[edge], weight[edge] / 2


def connections(graph: TokenGraph, edge_weight: Tensor | None) -> scipy.sparse.csr_array:
    """Return [N, N] with 1 for a target and a source if their weight is not 0; no self-loops."""
    source, target, _ = half_edges(graph, edge_weight)
    shape = (graph.num_targets, graph.num_targets)
    ones = np.ones(len(source))
    return scipy.sparse.csr_array(scipy.sparse.coo_array((ones, (target, source)), shape=shape))


def component_of(graph: TokenGraph, edge_weight: Tensor | None) -> NDArray[np.int32]:
    """Number the connected components; [N], the component of every token.

    Edges with weight 0 do not count.
    """
    if graph.num_targets == 0:
        return np.empty(0, dtype=np.int32)
    return connected_components(connections(graph, edge_weight), directed=False)[1]


def by_pairs(
    first: NDArray[np.integer], second: NDArray[np.integer], weight: Array, num_tokens: int
) -> Apply:
    """Return u -> L u for undirected pairs (first, second) [E]; repeated pairs add up."""

    def one_column(u: Array) -> Array:
        difference = weight * (u[second] - u[first])
        out = _weighted_count(second, difference, num_tokens)
        out -= _weighted_count(first, difference, num_tokens)
        return out

    return _column_by_column(one_column)


def by_blocks(graph: TokenGraph, edge_weight: Tensor) -> Apply:
    """Return u -> L u for matrix weights [E, C, C]; u is [N * C], flattened token by token."""
    source, target, half = half_edges(graph, edge_weight)
    num_tokens, channels = graph.num_targets, edge_weight.shape[2]

    def one_column(u: Array) -> Array:
        u = u.reshape(num_tokens, channels)
        difference = np.einsum("eab,eb->ea", half, u[target] - u[source])
        out = np.empty_like(u)
        for c in range(channels):
            out[:, c] = _weighted_count(target, difference[:, c], num_tokens)
            out[:, c] -= _weighted_count(source, difference[:, c], num_tokens)
        return out.reshape(-1)

    return _column_by_column(one_column)


def by_structure(structure: GraphStructure) -> Apply | None:
    """Return u -> L u for weights 1 without listing edges; None for other structures."""
    match structure:
        case Band():
            return _by_slices(structure)
        case Cycle(_, window):

            def around(u: Array) -> Array:
                out = np.zeros_like(u)
                for hop in range(1, window + 1):
                    out += (u - np.roll(u, hop, axis=0)) + (u - np.roll(u, -hop, axis=0))
                return out

            return around
        case Complete(targets, sources) if targets == sources:
            return _by_blocks_of_tokens([0], targets)
        case Blocks():
            block = structure.block_of(torch.arange(structure.num_tokens)).numpy()
            starts = [0, *(1 + np.flatnonzero(np.diff(block)))]
            return _by_blocks_of_tokens(starts, structure.num_tokens)
        case Grid():
            return _by_image(structure)
        case Parts() if structure.target_ptr == structure.source_ptr:
            of_parts = [by_structure(part) for part in structure.parts]
            parts = [part for part in of_parts if part is not None]
            if len(parts) < len(of_parts):
                return None
            inner = structure.target_ptr[1:-1]

            def of_batch(u: Array) -> Array:
                pieces = np.split(u, inner)
                return np.concatenate([part(v) for part, v in zip(parts, pieces, strict=True)])

            return of_batch
    return None


def _by_slices(band: Band) -> Apply:
    last = max(band.num_tokens - 1, 0) // band.dilation  # the largest hop inside the sequence
    before, after = min(band.before, last), min(band.after, last)
    if band.dilation == 1 and {before, after} <= {0, last}:  # complete on one side, or on both
        everyone = _by_blocks_of_tokens([0], band.num_tokens)
        share = ((before == last) + (after == last)) / 2
        return lambda u: share * everyone(u)

    def apply(u: Array) -> Array:
        out = np.zeros_like(u)
        for hop in range(1, max(before, after) + 1):
            move = hop * band.dilation
            difference = ((hop <= before) + (hop <= after)) / 2 * (u[move:] - u[:-move])
            out[move:] += difference
            out[:-move] -= difference
        return out

    return apply


def _by_blocks_of_tokens(starts: list[int], num_tokens: int) -> Apply:
    """Return u -> L u for complete blocks of consecutive tokens: L u = size * (u - mean)."""
    size = np.diff([*starts, num_tokens])

    def apply(u: Array) -> Array:
        if num_tokens == 0:
            return u.copy()
        per_row = (slice(None),) + (None,) * (u.ndim - 1)
        # Subtracting the first token of every block makes constants give exactly 0.
        relative = u - np.repeat(u[starts], size, axis=0)
        total = np.repeat(np.add.reduceat(relative, starts, axis=0), size, axis=0)
        return np.repeat(size, size)[per_row] * relative - total

    return apply


def _by_image(grid: Grid) -> Apply:
    lead = int(grid.class_token)
    down, across = min(grid.radius, grid.height - 1), min(grid.radius, grid.width - 1)
    moves = [
        (dy, dx)
        for dy in range(down + 1)
        for dx in range(-across, across + 1)
        if (dy, dx) > (0, 0)  # counts each pair once
        and (grid.metric == "chebyshev" or dy + abs(dx) <= grid.radius)
    ]

    def apply(u: Array) -> Array:
        out = np.zeros_like(u)
        shape = (grid.height, grid.width, *u.shape[1:])
        image, result = u[lead:].reshape(shape), out[lead:].reshape(shape)
        for dy, dx in moves:
            down, up = slice(dy, None), slice(0, grid.height - dy)
            right = slice(max(dx, 0), grid.width - max(-dx, 0))
            left = slice(max(-dx, 0), grid.width - max(dx, 0))
            difference = image[down, right] - image[up, left]
            result[down, right] += difference
            result[up, left] -= difference
        if lead:
            difference = u[1:] - u[0]
            out[1:] += difference
            out[0] -= difference.sum(axis=0)
        return out

    return apply


def _weighted_count(token: NDArray[np.integer], weight: Array, num_tokens: int) -> Array:
    """Sum the weights of every token, [N]."""
    return np.bincount(token, weight, num_tokens).astype(np.float64, copy=False)


def _structured_degree(structure: GraphStructure) -> Array:
    """Compute the diagonal of the Laplacian with weights 1 for a structure of `by_structure`."""
    flipped = structure.transpose()
    assert flipped is not None
    token = torch.arange(structure.num_targets)
    degree = structure.in_degree() + flipped.in_degree()
    return degree.double().numpy() / 2 - structure.contains(token, token).double().numpy()


def _scaled(left: Array, apply: Apply, right: Array) -> Apply:
    def scaled(u: Array) -> Array:
        per_row = (slice(None),) + (None,) * (u.ndim - 1)
        return left[per_row] * apply(right[per_row] * u)

    return scaled


def _column_by_column(one_column: Apply) -> Apply:
    def apply(u: Array) -> Array:
        if u.ndim == 1:
            return one_column(u)
        columns = [one_column(u[:, k]) for k in range(u.shape[1])]
        return np.stack(columns, axis=1) if columns else np.zeros_like(u)

    return apply


def _operator(size: int, forward: Apply, backward: Apply) -> LinearOperator:
    def of(apply: Apply) -> Callable[[Any], Any]:
        def on(u: Any) -> Any:
            if np.iscomplexobj(u):
                return on(u.real) + 1j * on(u.imag)
            return apply(np.asarray(u, dtype=np.float64))

        return on

    return LinearOperator(
        (size, size),
        matvec=of(forward),
        rmatvec=of(backward),
        matmat=of(forward),
        rmatmat=of(backward),
        dtype=np.float64,
    )

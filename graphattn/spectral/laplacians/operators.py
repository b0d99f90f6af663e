"""Laplacians that are applied, never formed: by shifted slices of a window, or edge by edge.

Everything is a sum of differences u_i - u_j, so constants give exactly 0.
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
from graphattn.graphs.structures.structure import (
    Band,
    Blocks,
    Complete,
    Cycle,
    GraphStructure,
    Grid,
)

Array = NDArray[np.float64]
Apply = Callable[[Array], Array]  # u -> L u, [N] or [N, k]


def laplacian_operator(
    graph: TokenGraph, edge_weight: Tensor | None, normalization: str | None
) -> LinearOperator:
    """The Laplacian of checked weights ([E], [E, C, C] or None) as a matrix-free operator."""
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
        both = _scaled(np.sqrt(share), forward, np.sqrt(share))
        return _operator(graph.num_targets, both, both)
    one = np.ones_like(share)
    return _operator(graph.num_targets, _scaled(share, forward, one), _scaled(one, forward, share))


def half_edges(
    graph: TokenGraph, edge_weight: Tensor | None
) -> tuple[NDArray[np.int64], NDArray[np.int64], Array]:
    """Sources, targets and half the weights of all edges but self-loops and those of weight 0."""
    source, target = graph.edge_index.cpu().numpy()
    edge = source != target
    if edge_weight is None:
        return source[edge], target[edge], np.full(int(edge.sum()), 0.5)
    weight = edge_weight.detach().to("cpu", torch.float64).numpy()
    edge &= (weight != 0).any(axis=tuple(range(1, weight.ndim)))
    return source[edge], target[edge], weight[edge] / 2


def connections(graph: TokenGraph, edge_weight: Tensor | None) -> scipy.sparse.csr_array:
    """[N, N], a 1 from every target to every source it gives a weight that is not 0; no loops."""
    source, target, _ = half_edges(graph, edge_weight)
    shape = (graph.num_targets, graph.num_targets)
    ones = np.ones(len(source))
    return scipy.sparse.csr_array(scipy.sparse.coo_array((ones, (target, source)), shape=shape))


def component_of(graph: TokenGraph, edge_weight: Tensor | None) -> NDArray[np.int32]:
    """Return the connected component of every token, [N]; an edge of weight 0 connects nothing."""
    if graph.num_targets == 0:
        return np.empty(0, dtype=np.int32)
    return connected_components(connections(graph, edge_weight), directed=False)[1]


def by_pairs(
    first: NDArray[np.integer], second: NDArray[np.integer], weight: Array, num_tokens: int
) -> Apply:
    """u -> L u of the undirected pairs (first, second), [E], a pair's weights added up."""

    def one_column(u: Array) -> Array:
        moved = weight * (u[second] - u[first])
        out = _weighted_count(second, moved, num_tokens)
        out -= _weighted_count(first, moved, num_tokens)
        return out

    return _column_by_column(one_column)


def by_blocks(graph: TokenGraph, edge_weight: Tensor) -> Apply:
    """u -> L u of matrix weights [E, C, C]; u [N * C], the C numbers of a token side by side."""
    source, target, half = half_edges(graph, edge_weight)
    num_tokens, channels = graph.num_targets, edge_weight.shape[2]

    def one_column(u: Array) -> Array:
        u = u.reshape(num_tokens, channels)
        moved = np.einsum("eab,eb->ea", half, u[target] - u[source])
        out = np.empty_like(u)
        for c in range(channels):
            out[:, c] = _weighted_count(target, moved[:, c], num_tokens)
            out[:, c] -= _weighted_count(source, moved[:, c], num_tokens)
        return out.reshape(-1)

    return _column_by_column(one_column)


def by_structure(structure: GraphStructure) -> Apply | None:
    """u -> L u of weights 1, no edge listed; None where the structure has no such form here."""
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
            found = [by_structure(part) for part in structure.parts]
            parts = [part for part in found if part is not None]
            if len(parts) < len(found):
                return None
            inner = structure.target_ptr[1:-1]

            def side_by_side(u: Array) -> Array:
                pieces = np.split(u, inner)
                return np.concatenate([part(v) for part, v in zip(parts, pieces, strict=True)])

            return side_by_side
    return None


def _by_slices(band: Band) -> Apply:
    last = max(band.num_tokens - 1, 0) // band.dilation  # hops that can land inside
    before, after = min(band.before, last), min(band.after, last)
    if band.dilation == 1 and {before, after} <= {0, last}:  # complete, from one side or both
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
    """Blocks of consecutive tokens, each complete: L u = size * (u - mean)."""
    size = np.diff([*starts, num_tokens])

    def apply(u: Array) -> Array:
        if num_tokens == 0:
            return u.copy()
        per_row = (slice(None),) + (None,) * (u.ndim - 1)
        first = np.repeat(u[starts], size, axis=0)  # so that constants give exactly 0
        moved = u - first
        total = np.repeat(np.add.reduceat(moved, starts, axis=0), size, axis=0)
        return np.repeat(size, size)[per_row] * moved - total

    return apply


def _by_image(grid: Grid) -> Apply:
    lead = int(grid.class_token)
    moves = [(dy, dx) for dy, dx in grid._moves() if (dy, dx) > (0, 0)]  # each pair once

    def apply(u: Array) -> Array:
        out = np.zeros_like(u)
        shape = (grid.height, grid.width, *u.shape[1:])
        image, moved = u[lead:].reshape(shape), out[lead:].reshape(shape)
        for dy, dx in moves:
            down, up = slice(dy, None), slice(0, grid.height - dy)
            right = slice(max(dx, 0), grid.width - max(-dx, 0))
            left = slice(max(-dx, 0), grid.width - max(dx, 0))
            difference = image[down, right] - image[up, left]
            moved[down, right] += difference
            moved[up, left] -= difference
        if lead:
            difference = u[1:] - u[0]
            out[1:] += difference
            out[0] -= difference.sum(axis=0)
        return out

    return apply


def _weighted_count(token: NDArray[np.integer], weight: Array, num_tokens: int) -> Array:
    """The weights that fall on every token, summed, [N]."""
    return np.bincount(token, weight, num_tokens).astype(np.float64, copy=False)


def _structured_degree(structure: GraphStructure) -> Array:
    """The diagonal of the Laplacian of weights 1, where `by_structure` knows the structure."""
    flipped = structure.transpose()
    assert flipped is not None
    token = torch.arange(structure.num_targets)
    both = structure.in_degree() + flipped.in_degree()
    return both.double().numpy() / 2 - structure.contains(token, token).double().numpy()


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

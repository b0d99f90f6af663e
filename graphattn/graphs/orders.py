"""Orders of tokens in which neighbouring tokens have numbers that differ little."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphattn.graphs.arguments import as_points
from graphattn.graphs.edges.storage import G, StoredGraph
from graphattn.graphs.permutations import items_of, permuted

MOST_AXES = 8  # coordinates that are used to find the place of a point on the curve
MOST_BITS = 52  # bits per coordinate: the precision of float64
KEY_BITS = 62  # bits of a place on the curve, so that the largest int64 can mean "not finite"


def reordered(graph: G, points: Any) -> tuple[G, Tensor]:
    """Implement :meth:`graphattn.TokenGraph.reorder`, which has the description."""
    if not graph.has_same_tokens:
        raise ValueError(
            "reorder() needs a graph whose targets and sources are the same tokens, got one of "
            f"{graph.num_targets} targets and {graph.num_sources} sources that are different "
            "tokens: choose an order for each and use graph.permute((of_targets, of_sources))"
        )
    if points is not None:
        order = order_along_curve(graph, points)
    elif graph.structure is not None:
        return graph, torch.arange(graph.num_tokens, device=graph.device)
    else:
        order = order_of_small_bandwidth(graph)
    return permuted(graph, order)[0], order


def order_of_small_bandwidth(graph: StoredGraph) -> Tensor:
    """Return the reverse Cuthill-McKee order of every sequence: the old number of every new one.

    Every edge counts in both directions.
    """
    import numpy
    from scipy import sparse

    N = graph.num_tokens
    edges = graph.compact_edges.cpu().numpy()
    pairs = numpy.concatenate([edges, edges[::-1]], axis=1)
    ones = numpy.ones(pairs.shape[1], dtype=bool)
    both = sparse.coo_array((ones, (pairs[0], pairs[1])), shape=(N, N)).tocsr()
    order, first = [numpy.empty(0, dtype=numpy.int64)], 0
    # Every sequence is ordered separately, so its order does not depend on the rest of the batch.
    for size, _ in graph.sizes:
        if size:
            rows = both.indptr[first : first + size + 1]
            seen = both.indices[rows[0] : rows[-1]] - first
            adjacency = sparse.csr_array(
                (ones[: len(seen)], seen, rows - rows[0]), shape=(size, size)
            )
            new_order = sparse.csgraph.reverse_cuthill_mckee(adjacency, symmetric_mode=True)
            order.append(new_order.astype(numpy.int64) + first)
        first += size
    return torch.from_numpy(numpy.concatenate(order)).to(graph.device)


def order_along_curve(graph: StoredGraph, points: Any) -> Tensor:
    """Return the order of the points along a Hilbert curve, separately for every sequence."""
    points = as_points("points", points).detach()
    if len(points) != graph.num_tokens or not points.shape[1]:
        raise ValueError(
            f"points must have shape [{graph.num_tokens}, C], one point for every token, with C >= "
            f"1, got {list(points.shape)}"
        )
    item = items_of(graph).to(points.device)
    place = places_on_curve(points[:, :MOST_AXES], item, len(graph.sizes))
    order = place.argsort(stable=True)
    return order[item[order].argsort(stable=True)].to(graph.device)


def places_on_curve(points: Tensor, item: Tensor, num_items: int) -> Tensor:
    """Return the place of every point [N, C] along the curve, int64 [N].

    A point that is not finite gets the largest int64. All coordinates of an item are scaled by the
    same factor, so that distances along all axes count equally.
    """
    C = points.shape[1]
    finite = points.isfinite().all(dim=1)
    halves = points[finite].double() / 2  # differences of half coordinates do not overflow
    item = item[finite]
    column = item[:, None].expand_as(halves)
    lowest = halves.new_zeros(num_items, C).scatter_reduce(
        0, column, halves, "amin", include_self=False
    )
    inside = halves - lowest[item]
    widest = halves.new_zeros(num_items).scatter_reduce(0, item, inside.amax(dim=1), "amax")
    bits = min(KEY_BITS // C, MOST_BITS)
    unit = widest.clamp(min=torch.finfo(torch.float64).tiny)[item, None]
    cell = (inside / unit * 2**bits).long().clamp(max=2**bits - 1)
    place = torch.full((len(points),), torch.iinfo(torch.int64).max, device=points.device)
    place[finite] = hilbert_index(cell, bits)
    return place


def hilbert_index(cell: Tensor, bits: int) -> Tensor:
    """Number every cell [N, C] along a Hilbert curve with ``2 ** bits`` cells per axis; [N].

    The algorithm is that of Skilling (2004), "Programming the Hilbert curve", AIP Conference
    Proceedings 707, 381-387: it undoes the rotations of every subcube, from the largest to the
    smallest, and then applies a Gray code.
    """
    axes = list(cell.long().unbind(1))
    for bit in range(bits - 1, 0, -1):
        below = (1 << bit) - 1
        for a in range(len(axes)):
            flip = ((axes[a] >> bit) & 1) * below
            # If the bit is set, the first axis is mirrored; otherwise the two axes are swapped.
            swap = (axes[0] ^ axes[a]) & (below - flip)
            axes[0] = axes[0] ^ flip ^ swap
            if a:
                axes[a] = axes[a] ^ swap
    for a in range(1, len(axes)):
        axes[a] = axes[a] ^ axes[a - 1]
    turn = torch.zeros_like(axes[-1])
    for bit in range(bits - 1, 0, -1):
        turn = turn ^ ((axes[-1] >> bit) & 1) * ((1 << bit) - 1)
    index = torch.zeros_like(turn)
    for bit in range(bits - 1, -1, -1):
        for axis in axes:
            index = (index << 1) | (((axis ^ turn) >> bit) & 1)
    return index

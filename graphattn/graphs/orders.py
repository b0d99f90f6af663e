"""Orders of tokens in which those that are near each other get near numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphattn.graphs.arguments import as_points
from graphattn.graphs.edges.storage import G, HeldGraph
from graphattn.graphs.permutations import items_of, permuted

MOST_AXES = 8  # coordinates that place a point on the curve
MOST_BITS = 52  # of a coordinate: what float64 tells apart
KEY_BITS = 62  # of a place on the curve, an int64 of which one more value says "nowhere"


def reordered(graph: G, points: Any) -> tuple[G, Tensor]:
    """:meth:`graphattn.TokenGraph.reorder`, which has the description."""
    if not graph.has_same_tokens:
        raise ValueError(
            "reorder() numbers one set of tokens, got a graph of "
            f"{graph.num_targets} targets and {graph.num_sources} sources that are different "
            "tokens: order each side and use graph.permute((of_targets, of_sources))"
        )
    if points is not None:
        order = order_along_curve(graph, points)
    elif graph.structure is not None:
        return graph, torch.arange(graph.num_tokens, device=graph.device)
    else:
        order = order_of_small_bandwidth(graph)
    return permuted(graph, order)[0], order


def order_of_small_bandwidth(graph: HeldGraph) -> Tensor:
    """Reverse Cuthill-McKee order of every part, of edges in either direction: new -> old."""
    import numpy
    from scipy import sparse

    N = graph.num_tokens
    edges = graph.compact_edges.cpu().numpy()
    pairs = numpy.concatenate([edges, edges[::-1]], axis=1)
    ones = numpy.ones(pairs.shape[1], dtype=bool)
    both = sparse.coo_array((ones, (pairs[0], pairs[1])), shape=(N, N)).tocsr()
    order, first = [numpy.empty(0, dtype=numpy.int64)], 0
    for size, _ in graph.sizes:  # each by itself: an order depends on nothing else in the batch
        if size:
            rows = both.indptr[first : first + size + 1]
            seen = both.indices[rows[0] : rows[-1]] - first
            own = sparse.csr_array((ones[: len(seen)], seen, rows - rows[0]), shape=(size, size))
            found = sparse.csgraph.reverse_cuthill_mckee(own, symmetric_mode=True)
            order.append(found.astype(numpy.int64) + first)
        first += size
    return torch.from_numpy(numpy.concatenate(order)).to(graph.device)


def order_along_curve(graph: HeldGraph, points: Any) -> Tensor:
    """The order in which a Hilbert curve through the cube around every part meets its points."""
    points = as_points("points", points).detach()
    if len(points) != graph.num_tokens or not points.shape[1]:
        raise ValueError(
            f"points must have shape [{graph.num_tokens}, C], one for every token and C >= 1, got "
            f"{list(points.shape)}"
        )
    item = items_of(graph).to(points.device)
    place = places_on_curve(points[:, :MOST_AXES], item, len(graph.sizes))
    order = place.argsort(stable=True)
    return order[item[order].argsort(stable=True)].to(graph.device)


def places_on_curve(points: Tensor, item: Tensor, num_items: int) -> Tensor:
    """How far along the curve every point [N, C] stands, int64 [N]; last of all where not finite.

    All coordinates of an item are measured in one unit, so that near stays near.
    """
    C = points.shape[1]
    found = points.isfinite().all(dim=1)
    halves = points[found].double() / 2  # their differences are finite
    item = item[found]
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
    place[found] = hilbert_index(cell, bits)
    return place


def hilbert_index(cell: Tensor, bits: int) -> Tensor:
    """The number of every cell [N, C] along a Hilbert curve of ``2 ** bits`` cells per axis, [N].

    Skilling (2004), "Programming the Hilbert curve", AIP Conference Proceedings 707, 381-387: the
    inverse of the turns of every subcube from the largest to the smallest, then a Gray code.

    Example:
        >>> import torch
        >>> from graphattn.graphs.orders import hilbert_index
        >>> row, column = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")
        >>> hilbert_index(torch.stack([row.flatten(), column.flatten()], dim=1), 2).view(4, 4)
        tensor([[ 0,  3,  4,  5],
                [ 1,  2,  7,  6],
                [14, 13,  8,  9],
                [15, 12, 11, 10]])
    """
    axes = list(cell.long().unbind(1))
    for bit in range(bits - 1, 0, -1):
        below = (1 << bit) - 1
        for a in range(len(axes)):
            flip = ((axes[a] >> bit) & 1) * below
            # Where the bit is set, the first axis is mirrored; otherwise the two change places.
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

"""Lists of edges: sorting, checking, and making them from tables of neighbours or structures.

A structure lists its edges in int64 and makes tables of all candidates, which take several times
the memory of the final list. For a few rows at a time, these tables are small and stay in cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphattn.graphs.arguments import as_int, as_plain_edge_index
from graphattn.graphs.edges.index_width import are_narrow, as_stored
from graphattn.graphs.structures.composites import Parts
from graphattn.graphs.structures.structure import Band, GraphStructure, masked_rows, pieces_of_rows
from graphattn.kernels.cpu.edge_order import (
    BAD_SOURCE,
    BAD_TARGET,
    REPEATED,
    Wrong,
    edges_by_source,
    has_edge_order,
    sorted_edges,
)

AT_ONCE = 1 << 18  # edges of a piece, roughly: a few megabytes including the tables


def edges_of_rows(index: Tensor, first_row: int = 0, *, is_sorted: bool = False) -> Tensor:
    """Make the sorted edge list [2, E] of a table of neighbours [N, k], in its dtype.

    Row 0 is the target `first_row`, and -1 stands for no source. On a GPU this waits for the
    device, because the number of edges has to be read.
    """
    if not is_sorted:
        index = index.sort(dim=1).values
    is_source = index >= 0
    last = first_row + len(index)
    row = torch.arange(first_row, last, dtype=index.dtype, device=index.device)
    if is_source.all():  # This is the usual case, and several times faster than selecting entries.
        edges = index.new_empty((2, *index.shape))
        edges[0], edges[1] = index, row[:, None]
        return edges.flatten(1)
    return masked_rows(index, row, is_source)


def sorted_edge_list(
    edge_index: Any, num_targets: int, num_sources: int, *, return_permutation: bool = True
) -> tuple[Tensor, Any]:
    """Check and sort an edge list; return it with the permutation that sorts the caller's edges.

    The list is a new tensor in the width in which a graph stores it
    (:mod:`~graphattn.graphs.edges.index_width`). The permutation is a LongTensor [E]; without
    `return_permutation` it may be None.
    """
    edge_index = as_plain_edge_index(edge_index)
    num_targets = as_int("num_targets", num_targets, 0)
    num_sources = as_int("num_sources", num_sources, 0)
    sizes = num_targets, num_sources, edge_index.shape[1]
    if has_edge_order(edge_index) and are_narrow(edge_index.device, *sizes):
        in_order = sorted_edges(edge_index, *sizes[:2], permutation=return_permutation)
    else:
        in_order = _sorted_by_key(edge_index, *sizes[:2])
    if not isinstance(in_order, Wrong):
        return in_order
    if in_order.kind == REPEATED:
        assert isinstance(in_order.place, tuple)
        j, i = in_order.place
        raise ValueError(
            f"edge_index must have every edge once, but it has the edge (source {j}, target {i}) "
            "more than once: torch_geometric.utils.coalesce merges duplicates"
        )
    assert isinstance(in_order.place, int)
    row = int(in_order.kind == BAD_TARGET)
    name, count = ("source", "target")[row], (num_sources, num_targets)[row]
    place = in_order.place
    raise ValueError(
        f"edge_index[{row}, {place}] = {int(edge_index[row, place])} is not a {name}: "
        f"the {name}s are 0 .. {count - 1}"
        if count
        else f"edge_index has edges, but there are no {name}s: it must be empty"
    )


def order_by_source(rowptr: Tensor, source: Tensor, num_sources: int) -> Tensor:
    """Return the order [E] by source, then target, of edges that are sorted by target."""
    # A stable sort by source keeps the order of targets within each source.
    if has_edge_order(source) and rowptr.dtype == source.dtype:
        return edges_by_source(rowptr.contiguous(), source.contiguous(), num_sources)[2]
    return source.argsort(stable=True)


def _sorted_by_key(
    edge_index: Tensor, num_targets: int, num_sources: int
) -> tuple[Tensor, Tensor] | Wrong:
    """Sort edges by one number per edge, with torch operations, on any device."""
    edge_index = edge_index.long()
    for row, count in ((0, num_sources), (1, num_targets)):
        bad = (edge_index[row] < 0) | (edge_index[row] >= count)
        if bad.any():
            return Wrong((BAD_SOURCE, BAD_TARGET)[row], int(bad.nonzero()[0]))
    key = edge_index[1] * num_sources + edge_index[0]
    key, permutation = key.sort(stable=True)
    repeated = key[1:] == key[:-1]
    if repeated.any():
        j, i = edge_index[:, permutation[int(repeated.nonzero()[0])]].tolist()
        return Wrong(REPEATED, (j, i))
    return as_stored(edge_index[:, permutation], num_targets, num_sources), permutation


def edges_of_structure(structure: GraphStructure, device: torch.device) -> Tensor:
    """List all edges [2, E] in order; int32 for large structures on a CPU, int64 for others."""
    if torch.compiler.is_compiling() or device.type != "cpu" or not structure.lists_rows:
        return structure.edges(device)
    with device:
        count = structure.num_edges()
    if count <= AT_ONCE or not are_narrow(
        device, structure.num_targets, structure.num_sources, count
    ):
        return structure.edges(device)
    edges = torch.empty((2, count), dtype=torch.int32, device=device)
    _fill(structure, edges)
    return edges


def _fill(structure: GraphStructure, edges: Tensor) -> None:
    """Write all edges of a structure into the tensor `edges` [2, E]."""
    if isinstance(structure, Parts):
        _fill_parts(structure, edges)
    elif isinstance(structure, Band):
        structure.write_edges(edges)
    else:
        count, first = edges.shape[1], 0
        for piece in pieces_of_rows(structure, count, AT_ONCE, edges.device):
            edges[:, first : first + piece.shape[1]] = piece
            first += piece.shape[1]
        assert first == count, (structure, first, count)


def _fill_parts(parts: Parts, edges: Tensor) -> None:
    first = 0
    for part, t0, s0 in parts.placed():
        part_edges = edges[:, first : first + part.num_edges()]
        if part_edges.shape[1] > AT_ONCE:
            _fill(part, part_edges)
        else:
            part_edges.copy_(part.edges(edges.device))
        part_edges[0] += s0
        part_edges[1] += t0
        first += part_edges.shape[1]

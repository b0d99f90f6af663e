"""Lists of edges: sorting, checking, and making them from tables of neighbours."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from graphattn.graphs.arguments import as_int, as_plain_edge_index
from graphattn.graphs.edges.index_width import are_narrow, as_stored
from graphattn.graphs.structures.structure import masked_rows
from graphattn.kernels.cpu.edge_order import (
    BAD_SOURCE,
    BAD_TARGET,
    REPEATED,
    Wrong,
    edges_by_source,
    has_edge_order,
    sorted_edges,
)


def edges_of_rows(index: Tensor, first_row: int = 0, *, is_sorted: bool = False) -> Tensor:
    """Make the sorted edge list [2, E] of a table of neighbours [N, k], in its dtype.

    On a GPU this waits for the device, because the number of edges has to be read.

    Args:
        index: the sources of every row in any order (unless `is_sorted`); -1 stands for no source.
        first_row: the target of row 0.
        is_sorted: whether every row is in ascending order already.

    Example:
        >>> import torch
        >>> from graphattn.graphs.edges.lists import edges_of_rows
        >>> edges_of_rows(torch.tensor([[2, 1], [-1, -1], [0, -1]]))
        tensor([[1, 2, 0],
                [0, 0, 2]])
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


@overload
def sorted_edge_list(
    edge_index: Any, num_targets: int, num_sources: int, *, return_permutation: Literal[True] = True
) -> tuple[Tensor, Tensor]: ...


@overload
def sorted_edge_list(
    edge_index: Any, num_targets: int, num_sources: int, *, return_permutation: bool
) -> tuple[Tensor, Tensor | None]: ...


def sorted_edge_list(
    edge_index: Any, num_targets: int, num_sources: int, *, return_permutation: bool = True
) -> tuple[Tensor, Tensor | None]:
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
    """Return the order [E] by source, then target, of edges that are sorted by target.

    Example:
        >>> import torch
        >>> from graphattn.graphs.edges.lists import order_by_source
        >>> order_by_source(torch.tensor([0, 2, 3]), torch.tensor([1, 2, 1]), num_sources=3)
        tensor([0, 2, 1])
    """
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

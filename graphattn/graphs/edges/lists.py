"""Lists of edges: sorted and checked, or made from tables of neighbours."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from graphattn.graphs.arguments import as_int, as_plain_edge_index
from graphattn.graphs.edges.index_width import are_narrow, as_held
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
    """The sorted edge list [2, E] of a neighbour table [N, k], -1 meaning none, in its dtype.

    How many edges there are stands on the device: this waits for it.

    Args:
        index: the sources of every row; in any order, unless `is_sorted`.
        first_row: the target of row 0.
        is_sorted: whether every row ascends already.

    Example:
        >>> import torch
        >>> from graphattn.graphs.edges.lists import edges_of_rows
        >>> edges_of_rows(torch.tensor([[2, 1], [-1, -1], [0, -1]]))
        tensor([[1, 2, 0],
                [0, 0, 2]])
    """
    if not is_sorted:
        index = index.sort(dim=1).values
    found = index >= 0
    last = first_row + len(index)
    row = torch.arange(first_row, last, dtype=index.dtype, device=index.device)
    if found.all():  # as nearly always; several times faster than to look for every entry
        edges = index.new_empty((2, *index.shape))
        edges[0], edges[1] = index, row[:, None]
        return edges.flatten(1)
    return masked_rows(index, row, found)


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
    """A checked edge list in sorted order, and the permutation that sorts the caller's edges.

    The list is as a graph holds it (:mod:`~graphattn.graphs.edges.index_width`), and never the
    caller's own; the permutation is a LongTensor [E], or None where nobody asks for it.
    """
    edge_index = as_plain_edge_index(edge_index)
    num_targets = as_int("num_targets", num_targets, 0)
    num_sources = as_int("num_sources", num_sources, 0)
    sizes = num_targets, num_sources, edge_index.shape[1]
    if has_edge_order(edge_index) and are_narrow(edge_index.device, *sizes):
        found = sorted_edges(edge_index, *sizes[:2], permutation=return_permutation)
    else:
        found = _sorted_by_key(edge_index, *sizes[:2])
    if not isinstance(found, Wrong):
        return found
    if found.kind == REPEATED:
        assert isinstance(found.place, tuple)
        j, i = found.place
        raise ValueError(
            f"edge_index holds the edge (source {j}, target {i}) more than once: "
            "edges are a set (torch_geometric.utils.coalesce merges duplicates)"
        )
    assert isinstance(found.place, int)
    row = int(found.kind == BAD_TARGET)
    name, count = ("source", "target")[row], (num_sources, num_targets)[row]
    raise ValueError(
        f"edge_index[{row}, {found.place}] = {int(edge_index[row, found.place])} is not a {name}: "
        f"allowed are 0 .. {count - 1}"
        if count
        else f"edge_index has edges, but there are no {name}s"
    )


def order_by_source(rowptr: Tensor, source: Tensor, num_sources: int) -> Tensor:
    """The order by source, then target, of edges that are sorted by target, [E].

    Example:
        >>> import torch
        >>> from graphattn.graphs.edges.lists import order_by_source
        >>> order_by_source(torch.tensor([0, 2, 3]), torch.tensor([1, 2, 1]), num_sources=3)
        tensor([0, 2, 1])
    """
    # By source alone: that it is stable does the rest.
    if has_edge_order(source) and rowptr.dtype == source.dtype:
        return edges_by_source(rowptr.contiguous(), source.contiguous(), num_sources)[2]
    return source.argsort(stable=True)


def _sorted_by_key(
    edge_index: Tensor, num_targets: int, num_sources: int
) -> tuple[Tensor, Tensor] | Wrong:
    """Sort edges by one key in operations of torch, on every device: by one number per edge."""
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
    return as_held(edge_index[:, permutation], num_targets, num_sources), permutation

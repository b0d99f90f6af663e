"""Lists of edges: sorted and checked, or made from tables of neighbours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphattn.graphs.arguments import as_edge_index, as_int


def edges_of_rows(index: Tensor, first_row: int = 0, *, is_sorted: bool = False) -> Tensor:
    """The sorted edge list [2, E] of a neighbour table [N, k], -1 meaning none.

    How many edges there are stands on the device: this waits for it.

    Args:
        index: the sources of every row; in any order, unless `is_sorted`.
        first_row: the target of row 0.
        is_sorted: whether every row ascends already.

    Example:
        >>> import torch
        >>> from graphattn.graphs.edge_lists import edges_of_rows
        >>> edges_of_rows(torch.tensor([[2, 1], [-1, -1], [0, -1]]))
        tensor([[1, 2, 0],
                [0, 0, 2]])
    """
    if not is_sorted:
        index = index.sort(dim=1).values
    found = index >= 0
    if found.all():  # as nearly always; several times faster than to look for every entry
        row = torch.arange(first_row, first_row + len(index), device=index.device)
        return torch.stack([index.flatten(), row.repeat_interleave(index.shape[1])])
    row, slot = found.nonzero().T
    return torch.stack([index[row, slot], row + first_row])


def sorted_edge_list(edge_index: Any, num_targets: int, num_sources: int) -> tuple[Tensor, Tensor]:
    """A checked edge list in sorted order, and the permutation that sorts the caller's edges."""
    edge_index = as_edge_index(edge_index)
    num_targets = as_int("num_targets", num_targets, 0)
    num_sources = as_int("num_sources", num_sources, 0)
    for row, name, count in ((0, "source", num_sources), (1, "target", num_targets)):
        bad = (edge_index[row] < 0) | (edge_index[row] >= count)
        if bad.any():
            e = int(bad.nonzero()[0])
            raise ValueError(
                f"edge_index[{row}, {e}] = {int(edge_index[row, e])} is not a {name}: "
                f"allowed are 0 .. {count - 1}"
                if count
                else f"edge_index has edges, but there are no {name}s"
            )
    key = edge_index[1] * num_sources + edge_index[0]
    key, permutation = key.sort(stable=True)
    repeated = key[1:] == key[:-1]
    if repeated.any():
        e = permutation[int(repeated.nonzero()[0])]
        j, i = edge_index[:, e].tolist()
        raise ValueError(
            f"edge_index holds the edge (source {j}, target {i}) more than once: "
            "edges are a set (torch_geometric.utils.coalesce merges duplicates)"
        )
    return edge_index[:, permutation], permutation

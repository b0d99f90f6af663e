"""Lists of edges in order by compiled code, `edge_order.cpp`: counted into rows, which are sorted.

Numbers of tokens and of edges must be less than 2^31; who calls sees to that.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from graphattn.kernels.cpu import library
from graphattn.kernels.shared.launch import is_transformed, untraced
from graphattn.kernels.shared.stored import makes_fakes

DTYPES = (torch.int32, torch.int64)

# What `found` of edge_order.cpp says.
BAD_SOURCE, BAD_TARGET, REPEATED = 1, 2, 3


class Wrong(NamedTuple):
    """Fault of a list of edges.

    Attributes:
        kind: `BAD_SOURCE`, `BAD_TARGET` or `REPEATED`.
        place: the first edge out of range, or (source, target) of the first that is repeated.
    """

    kind: int
    place: int | tuple[int, int]


def has_edge_order(edge_index: Tensor) -> bool:
    """Whether there is compiled code for a list like this, and nobody looks into its steps."""
    if edge_index.device.type != "cpu" or edge_index.dtype not in DTYPES:
        return False
    if torch.compiler.is_compiling() or is_transformed():
        return False
    # What a subclass or a mode makes of a tensor need not lie in memory.
    if torch._C._len_torch_dispatch_stack() > 0 or makes_fakes():
        return False
    is_plain = type(edge_index).__torch_dispatch__ is Tensor.__torch_dispatch__
    return is_plain and untraced(library.library)() is not None


def sorted_edges(
    edge_index: Tensor, num_targets: int, num_sources: int, *, permutation: bool
) -> tuple[Tensor, Tensor | None] | Wrong:
    """The edges by target, then source, int32 [2, E]; or what is wrong with them.

    With `permutation` also the number that every edge had before, int64 [E].
    """
    loaded = library.library()
    assert loaded is not None
    num_edges = edge_index.shape[1]
    # Not on torch's default device, which may be another.
    edges = torch.empty((2, num_edges), dtype=torch.int32, device="cpu")
    order = torch.empty(num_edges, dtype=torch.int64, device="cpu") if permutation else None
    rowptr = torch.empty(num_targets + 1, dtype=torch.int32, device="cpu")
    mistake = torch.zeros(3, dtype=torch.int64, device="cpu")
    ends = [*edge_index, *edges, order, rowptr, mistake]
    source, target, *written = (ctypes.c_void_p(None if x is None else x.data_ptr()) for x in ends)
    numbers = (edge_index.stride(1), num_edges, num_sources, num_targets)
    library.check(
        loaded.graphattn_sort_edges(
            source,
            target,
            *(ctypes.c_int64(n) for n in numbers),
            *written,
            ctypes.c_int32(edge_index.dtype == torch.int32),
        )
    )
    kind, *place = mistake.tolist()
    if kind:
        return Wrong(kind, (place[0], place[1]) if kind == REPEATED else place[0])
    return edges, order


def edges_by_source(
    rowptr: Tensor, source: Tensor, num_sources: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return where the edges of every source begin [M + 1], and the target and number of each, [E].

    All as wide as `rowptr` [N + 1] and `source` [E], both int32 or both int64, and contiguous.
    """
    loaded = library.library()
    assert loaded is not None
    colptr = rowptr.new_empty(num_sources + 1)
    target, edge = torch.empty_like(source), torch.empty_like(source)
    library.check(
        loaded.graphattn_edges_by_source(
            ctypes.c_int64(len(rowptr) - 1),
            ctypes.c_int64(num_sources),
            *(ctypes.c_void_p(x.data_ptr()) for x in (rowptr, source, colptr, target, edge)),
            ctypes.c_int32(source.dtype == torch.int32),
        )
    )
    return colptr, target, edge

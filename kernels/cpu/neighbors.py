"""Nearest neighbours by compiled code: rounded distances propose, float64 decides.

Points of few coordinates stand in blocks, of which most are too far to be looked at
(`neighbor_blocks.cpp`); those of many coordinates are multiplied with each other, in registers
(`neighbor_products.cpp`). Both find the same, whatever the points, the threads and the build.
"""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from graphattn.kernels.cpu import library
from graphattn.kernels.cpu.tensors import as_it_lies
from graphattn.kernels.shared.launch import is_transformed, untraced
from graphattn.kernels.shared.stored import makes_fakes

DTYPES = {torch.float32: "float", torch.float64: "double"}
# Candidates from which on blocks are faster than products, up to so many coordinates: as measured
# with normally distributed points and 16 neighbours of each.
WIDEST = ((0, 4), (1 << 13, 6), (1 << 16, 8))
EDGES = 64  # of a point, for which memory is laid by; more are looked for once again

_Given = Tensor | int | ctypes.c_int32 | ctypes.c_double


def has_neighbors(x: Tensor) -> bool:
    """Whether there is compiled code for points like these, and nobody looks into its steps."""
    is_read = x.device.type == "cpu" and x.dtype in DTYPES and not is_transformed()
    return is_read and untraced(_is_there)(x)


def _is_there(x: Tensor) -> bool:
    """Whether a library is there, and the numbers are: fake tensors and wrapped ones have none.

    Nor does it run in a trace, which would not see what it writes.
    """
    is_plain = type(x).__torch_dispatch__ is Tensor.__torch_dispatch__
    is_traced = torch._C._get_tracing_state() is not None
    return not makes_fakes() and is_plain and not is_traced and library.library() is not None


def has_nearest(*points: Tensor) -> bool:
    """Whether the compiled searches take points like these."""
    return all(x.shape[1] >= 1 and len(x) < 2**31 and has_neighbors(x) for x in points)


def nearest(
    points: Tensor,
    candidates: Tensor,
    k: int,
    to_self: bool,
    self_loops: bool,
    reach: float = math.inf,
) -> Tensor:
    """The k nearest candidates of every point, int64 [N, k]; -1 where fewer are within reach.

    By squared distances in float64; of equal ones the smaller index is nearer. Points that hold NaN
    or infinity are no neighbours and have none.

    Args:
        points, candidates: [N, C] and [M, C] in one dtype, C >= 1.
        k: at least 1.
        to_self: whether the points are the candidates.
        self_loops: whether they are then their own first neighbours, or none of their neighbours.
        reach: the largest squared distance of a neighbour.
    """
    points = as_it_lies(points)
    candidates = points if to_self else as_it_lies(candidates)
    rows, width = _sizes(points)
    index = points.new_empty((rows, k), dtype=torch.int64)
    given: list[_Given] = [points, candidates, rows, len(candidates), width, k]
    given += [ctypes.c_int32(to_self), ctypes.c_int32(self_loops)]
    widest = max(most for count, most in WIDEST if len(candidates) >= count)
    if width <= widest or reach < math.inf:
        _call("nearest_by_blocks", points.dtype, *given, ctypes.c_double(reach), index)
    else:
        _call("nearest_by_products", points.dtype, *given, index)
    return index


def edges_within(
    points: Tensor, candidates: Tensor, reach: float, to_self: bool, self_loops: bool
) -> Tensor:
    """The edges [2, E] to points from candidates within reach, by target, then by source.

    Args:
        points, candidates: [N, C] and [M, C] in one dtype, C >= 1; those that hold NaN or infinity
            have no edges.
        reach: the largest squared distance, >= 0.
        to_self: whether the points are the candidates.
        self_loops: whether points then have edges to themselves.
    """
    points = as_it_lies(points)
    candidates = points if to_self else as_it_lies(candidates)
    N, width = _sizes(points)
    given: list[_Given] = [points, candidates, N, len(candidates), width]
    given += [ctypes.c_int32(to_self), ctypes.c_int32(self_loops), ctypes.c_double(reach)]
    start, count = points.new_empty((2, N), dtype=torch.int64)
    total = points.new_zeros(1, dtype=torch.int64)
    room, edges = min(EDGES, len(candidates)) * N, -1
    while edges < 0 or edges > room:
        room = max(room, edges)
        sources = points.new_empty(room, dtype=torch.int32)  # touched as far as it is needed
        _call("within_radius", points.dtype, *given, room, sources, start, count, total)
        edges = int(total)
    edge_index = points.new_empty((2, edges), dtype=torch.int64)
    _call("edges_of_lists", None, sources, start, count, N, edges, edge_index)
    return edge_index


def squared_distances(points: Tensor, candidates: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Compute squared distances from point row[i] to candidate column[i], float64 [pairs]; infinite
    where that is -1.

    Args:
        points, candidates: [*, C], in one dtype.
        row, column: int64 [pairs].
    """
    points, candidates, row, column = map(as_it_lies, (points, candidates, row, column))
    squared = points.new_empty(len(row), dtype=torch.float64)
    sizes = _sizes(points)[1], len(row)
    _call("squared_distances", points.dtype, points, candidates, *sizes, row, column, squared)
    return squared


def _sizes(points: Tensor) -> tuple[int, int]:
    """Rows and coordinates as plain numbers: of what torch.jit traces, sizes are tensors."""
    rows, width = points.shape
    return int(rows), int(width)


def _call(name: str, dtype: torch.dtype | None, *arguments: _Given) -> None:
    """A function of the library: tensors by their addresses, numbers as int64; threads at last."""
    loaded = library.library()
    assert loaded is not None
    given: list[ctypes.c_int32 | ctypes.c_int64 | ctypes.c_double | ctypes.c_void_p] = []
    for x in arguments:
        if isinstance(x, Tensor):
            given.append(ctypes.c_void_p(x.data_ptr()))
        else:
            given.append(ctypes.c_int64(x) if isinstance(x, int) else x)
    function = loaded[f"graphattn_{name}" + (f"_{DTYPES[dtype]}" if dtype else "")]
    library.check(function(*given, ctypes.c_int32(torch.get_num_threads())))

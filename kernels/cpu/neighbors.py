"""Nearest neighbours by compiled code, `neighbors.cpp`: rounded distances propose, exact decide."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch
from torch import Tensor

from graphattn.kernels.cpu import library
from graphattn.kernels.launch import is_looked_into, untraced

DTYPES = {torch.float32: "float", torch.float64: "double"}
VECTOR = 16  # numbers of the widest vector


def has_neighbors(x: Tensor) -> bool:
    """Whether there is compiled code for points like these, and nobody looks into its steps."""
    is_read = x.device.type == "cpu" and x.dtype in DTYPES and not is_looked_into()
    return is_read and untraced(library.library)() is not None


class SmallestOfRows:
    """What may be among the k smallest numbers of a row, as pieces of a matrix come by.

    Numbers are known up to rounding, so all that exceed the k-th smallest by no more than the
    slack of their row are kept.

    Args:
        slack: [rows], >= 0, in the dtype of the numbers.
        k: at least 1.
        room: how many numbers of a row can be kept, more than k.
    """

    def __init__(self, slack: Tensor, k: int, room: int) -> None:
        rows, room = len(slack), room + VECTOR
        self.k, self.slack = k, slack.contiguous()
        self.kept = slack.new_empty((rows, room))
        self.column = torch.empty((rows, room), dtype=torch.int64)
        self.count = torch.zeros(rows, dtype=torch.int64)
        self.limit = slack.new_full((rows,), torch.finfo(slack.dtype).max)

    def take(self, numbers: Tensor, first: int, *, is_last: bool) -> None:
        """Looks at columns `first` and after, [rows, columns], which are never NaN."""
        rows, columns = numbers.shape
        _call(
            "keep_smallest",
            numbers.dtype,
            [numbers, rows, columns, numbers.stride(0), first, self.k, self.slack],
            [self.kept.shape[1], self.kept, self.column, self.count, self.limit],
            [ctypes.c_int32(is_last)],
        )

    @property
    def has_all(self) -> bool:
        """Whether there was room for all that had to be kept."""
        return not bool((self.count < 0).any())

    def nearest(
        self, points: Tensor, candidates: Tensor, own: int | None, self_loops: bool
    ) -> Tensor:
        """The k nearest of the candidates that were kept, int64 [rows, k]; -1 where none is left.

        By squared distances in float64; of equal ones the smaller index is nearer.

        Args:
            points, candidates: [rows, C] and [columns, C], contiguous.
            own: the candidate that the first row is itself, the next row the next; or None.
            self_loops: whether they are their own first neighbours, or none of their neighbours.
        """
        index = torch.empty((len(points), self.k), dtype=torch.int64)
        _call(
            "nearest",
            points.dtype,
            [points, candidates, *points.shape, -1 if own is None else own],
            [ctypes.c_int32(self_loops), self.k, self.kept.shape[1], self.column, self.count],
            [index],
        )
        return index


def squared_distances(points: Tensor, candidates: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """From point row[i] to candidate column[i], float64 [pairs]; infinite where that is -1.

    Args:
        points, candidates: [*, C], in one dtype.
        row, column: int64 [pairs].
    """
    points, candidates, row, column = (x.contiguous() for x in (points, candidates, row, column))
    squared = torch.empty(len(row), dtype=torch.float64)
    places: list[Tensor | int] = [points.shape[1], len(row), row, column]
    _call("squared_distances", points.dtype, [points, candidates, *places, squared])
    return squared


def _call(
    name: str, dtype: torch.dtype, *arguments: Iterable[Tensor | int | ctypes.c_int32]
) -> None:
    """A function of the library: tensors by their addresses, numbers as int64; threads at last."""
    loaded = library.library()
    assert loaded is not None
    given: list[ctypes.c_int32 | ctypes.c_int64 | ctypes.c_void_p] = []
    for some in arguments:
        for x in some:
            if isinstance(x, Tensor):
                given.append(ctypes.c_void_p(x.data_ptr()))
            else:
                given.append(ctypes.c_int64(x) if isinstance(x, int) else x)
    function = loaded[f"graphattn_{name}_{DTYPES[dtype]}"]
    library.check(function(*given, ctypes.c_int32(torch.get_num_threads())))

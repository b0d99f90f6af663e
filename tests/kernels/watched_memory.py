"""Watch interpreted kernels: they use no byte outside their tensors, and programs do not race.

Programs of one launch run in any order on a GPU. The interpreter runs one after another and would
never notice that two write the same number, or that one reads what another writes. (A program may
have read before what it writes itself: it adds to it.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from graphattn.kernels.shared.launch import tensors_in


def _bytes(x: Tensor) -> tuple[int, int]:
    """The addresses that the numbers of a view lie between."""
    if not x.numel():
        return x.data_ptr(), x.data_ptr()
    last = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


class _Memory:
    """Take the place of the interpreter's own memory while one kernel runs."""

    def __init__(self, real: Any, builder: Any, kernel: str, tensors: list[Tensor]) -> None:
        self._real, self._builder, self._kernel = real, builder, kernel
        self._ranges = np.array([_bytes(x) for x in tensors], dtype=np.uint64)
        self._read: list[np.ndarray] = []
        self._written: list[np.ndarray] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self._read.append(self._inside("reads", pointers, mask, np.dtype(dtype).itemsize))
        return self._real.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, value: Any, mask: Any) -> Any:
        self._written.append(self._inside("writes", pointers, mask, value.dtype.itemsize))
        return self._real.store(pointers, value, mask)

    def _inside(self, does: str, pointers: Any, mask: Any, size: int) -> np.ndarray:
        """The addresses that are used, and by which program, [2, n]."""
        used = np.unique(pointers[mask.astype(bool)])
        inside = np.zeros(used.shape, dtype=bool)
        for first, end in self._ranges:
            inside |= (used >= first) & (used + np.uint64(size) <= end)
        assert inside.all(), f"{self._kernel} {does} {(~inside).sum()} numbers outside its tensors"
        x, y, z = self._builder.grid_idx
        return np.stack([used, np.full_like(used, x + (y << 20) + (z << 40))])

    def check(self) -> None:
        nothing = np.empty((2, 0), np.uint64)
        written, writer = np.concatenate([nothing, *self._written], axis=1)
        once, first = np.unique(written, return_index=True)
        assert len(once) == len(written), f"{self._kernel} writes numbers more than once"
        read, reader = np.concatenate([nothing, *self._read], axis=1)
        of_others = np.isin(read, once)
        place = np.searchsorted(once, read[of_others])
        of_itself = writer[first][place] == reader[of_others]
        assert of_itself.all(), f"{self._kernel} reads what another program writes"


@contextmanager
def watched_memory(device: str) -> Iterator[None]:
    """Watch every interpreted kernel within the block; on a GPU watch nothing."""
    if device != "cpu":
        yield
        return
    from triton.runtime import interpreter

    real, run = interpreter._interpreter, interpreter.GridExecutor.__call__

    def watched(self: Any, *arguments: Any, **named: Any) -> Any:
        tensors = list(tensors_in((*arguments, *named.values())))
        builder = interpreter.interpreter_builder
        interpreter._interpreter = memory = _Memory(real, builder, self.fn.__name__, tensors)
        try:
            done = run(self, *arguments, **named)
        finally:
            interpreter._interpreter = real
        memory.check()
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", watched)
        yield

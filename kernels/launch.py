"""One way to start a kernel, so that what is started can also be looked at without a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple


class Launch(NamedTuple):
    """A kernel with everything it is started with."""

    kernel: Any  # a @triton.jit function
    grid: tuple[int, ...]
    arguments: dict[str, Any]  # by name: tensors, numbers, and the constants (tl.constexpr)
    num_warps: int
    num_stages: int


_recorded: ContextVar[list[Launch] | None] = ContextVar("graphattn_launches", default=None)


def launch(
    kernel: Any, grid: tuple[int, ...], *, num_warps: int, num_stages: int, **arguments: Any
) -> None:
    """Starts a kernel on the device of its tensors; under :func:`recording` notes it instead."""
    recorded = _recorded.get()
    if recorded is not None:
        recorded.append(Launch(kernel, grid, arguments, num_warps, num_stages))
    elif 0 not in grid:
        kernel[grid](**arguments, num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=True)


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Within the block nothing runs: launches are listed, also those of tensors on "meta".

    That is how kernels are compiled ahead of time with the very arguments they are started with.
    """
    launches: list[Launch] = []
    token = _recorded.set(launches)
    try:
        yield launches
    finally:
        _recorded.reset(token)

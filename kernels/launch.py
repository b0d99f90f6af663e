"""One way to start a kernel, so that what is started can also be looked at without a device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor


def is_interpreted() -> bool:
    """Whether kernels run on a CPU, slowly, to be checked (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class Launch(NamedTuple):
    """A kernel with everything it is started with."""

    kernel: Any  # a @triton.jit function
    grid: tuple[int, ...]
    arguments: dict[str, Any]  # by name: tensors, numbers, and the constants (tl.constexpr)
    num_warps: int
    num_stages: int


# Not a context variable: on GPUs autograd runs backwards in a thread of its own.
_recorded: list[Launch] | None = None


def launch(
    kernel: Any, grid: tuple[int, ...], *, num_warps: int, num_stages: int, **arguments: Any
) -> None:
    """Starts a kernel on the device of its tensors; under :func:`recording` notes it instead."""
    if _recorded is not None:
        _recorded.append(Launch(kernel, grid, arguments, num_warps, num_stages))
    elif 0 not in grid:
        tensor = next(x for x in arguments.values() if isinstance(x, Tensor))
        with torch.cuda.device_of(tensor):  # Triton starts kernels on the current device
            # Given, because Triton's default may be turned off by an environment variable.
            kernel[grid](
                **arguments, num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=True
            )


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Within the block nothing runs: launches are listed, also those of tensors on "meta".

    That is how kernels are compiled ahead of time with the very arguments they are started with.
    """
    global _recorded
    before, _recorded = _recorded, []
    try:
        yield _recorded
    finally:
        _recorded = before

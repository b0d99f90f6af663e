"""The launches that matter most, at their real sizes, recorded without starting them.

Ahead-of-time compilation and predictions read these (``python -m graphattn.kernels.check``), of
tensors without memory. On a GPU, the same launches are timed (``make gpu STEP=times``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from graphattn.kernels.shared.launch import Launch

SHORT_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class Configuration(NamedTuple):
    """A launch, and how much work it is in all."""

    name: str
    launch: Launch
    main: bool = False  # it must use the device's widest matrix instructions and spill nothing
    flops: float = 0.0  # operations of matrix products, two per multiply-add
    bytes: float = 0.0  # bytes that are read from and written to device memory
    iterations: float = 0.0  # passes through the main loop, over all programs
    target: str = ""  # the speed that is aimed at, for the table of predictions; "" for none
    gathered: float = 0.0  # bytes that are read again and again, at best from the cache
    # Passes through each innermost loop with products, in the order of the code. Loops beyond these
    # are not run: they are for values that are rare, such as NaN.
    passes: tuple[float, ...] = ()
    programs: float = 0.0  # how often the code outside of those loops is run; 0: once a program
    table: float = 0.0  # bytes over which what is gathered is spread; 0: they fit in the cache
    lookups: float = 0.0  # passes that wait for rows that are anywhere in memory
    groups: int = 1  # groups of the launch's warps that do the work of a program, not in step


def made(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    """Make a tensor for a launch: normal numbers, or True for masks; on "meta" it has no values."""
    if device == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    if dtype == torch.bool:
        return torch.ones(shape, dtype=dtype, device=device)
    return torch.randn(shape, device=device).to(dtype)


def made_indices(*shape: int, below: int, device: str) -> Tensor:
    """Make random indices, of tokens; on "meta" they have no values."""
    if device == "meta":
        return torch.empty(shape, dtype=torch.int64, device=device)
    return torch.randint(below, shape, device=device)


def scales(heads: int, device: str) -> Tensor:
    """Make the scale of every head, with which logits of normal tokens are of usual size."""
    return torch.full((heads,), 0.125, device=device)

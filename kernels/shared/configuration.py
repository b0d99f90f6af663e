"""The launches that matter most, at their real sizes, recorded without a device.

Ahead-of-time compilation and predictions read these (``python -m graphattn.kernels.check``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from graphattn.kernels.shared.launch import Launch

SHORT_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class Configuration(NamedTuple):
    """A launch, and how much work it is in all."""

    name: str
    launch: Launch
    main: bool  # it must use the widest matrix instructions of the device and spill nothing
    flops: float  # operations of matrix products, two per multiply-add
    bytes: float  # bytes that are read from and written to device memory
    iterations: float  # passes through the main loop, over all programs
    target: str  # the speed that is aimed at, for the table of predictions; "" for none
    gathered: float = 0.0  # bytes that are read again and again, at best from the cache
    passes: tuple[float, ...] = ()  # passes through each innermost loop with products, in order
    programs: float = 0.0  # with `passes`: how often the code outside of those loops is run

"""The launches that matter most, at their real sizes, recorded without a device.

Ahead-of-time compilation and predictions read these (``python -m graphattn.kernels.check``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from graphattn.kernels.shared.launch import Launch

SHORT_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class Configuration(NamedTuple):
    """A launch, and what it has to do in all."""

    name: str
    launch: Launch
    main: bool  # it must use the widest matrix instructions there are and spill nothing
    flops: float  # of matrix products, two operations per multiply-add
    bytes: float  # that device memory must move
    iterations: float  # passes through the main loop, over all programs
    target: str  # what it is for, as the table of targets says; "" for none
    gathered: float = 0.0  # bytes that are read again and again, at best from the cache
    passes: tuple[float, ...] = ()  # through every innermost loop with products, in their order
    programs: float = 0.0  # with `passes`: how often all that is outside of those loops is done

"""A step of a transformer block by C++ code: the newest token of every text passes through it.

The code is `kernels/cpu/block_steps.cpp`. Products with few rows take the time of reading the
weights, so one call takes less time than the calls of torch that it replaces.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from graphattn.kernels.cpu import library
from graphattn.kernels.cpu.tensors import KINDS, address, packer
from graphattn.ops.attention.native.steps import CacheCall

# With more tokens, products of torch are faster.
MOST_ROWS = {torch.float32: 16, torch.float64: 16, torch.bfloat16: 8, torch.float16: 8}
LAYER_NORM, RMS_NORM, GELU, SQUARED_RELU = 0, 1, 0, 1  # those of `block_steps.h`


class NormOfRows(ctypes.Structure):
    """A norm, as ``kernels/cpu/block_steps.h`` has it."""

    _fields_ = (
        ("kind", ctypes.c_int64),
        ("eps", ctypes.c_double),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    )


class LinearMap(ctypes.Structure):
    """A linear map; without a weight it gives what it is given."""

    _fields_ = (("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p))


class BlockStepCall(ctypes.Structure):
    """One call; the fields are those of ``kernels/cpu/block_steps.h``, in their order."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "dim", "kind", "threads")),
        *((name, ctypes.c_void_p) for name in ("x", "mixed", "out", "attention")),
        ("mixer_norm", NormOfRows),
        ("values_are_keys", ctypes.c_int64),
        *((name, LinearMap) for name in ("query", "key", "value", "output")),
        ("hidden", ctypes.c_int64),
        ("mlp_norm", NormOfRows),
        *((name, LinearMap) for name in ("up", "down")),
        ("activation", ctypes.c_int64),
    )


_LIBRARY = library.library()
_PACKER = packer(BlockStepCall)
_NO_ATTENTION = 0, 0.0, 0, 0, 0, *(0,) * 8


def block_step(
    x: Tensor,
    mixed: Tensor | None,
    attention: CacheCall | None,
    of_mixer: tuple[Any, ...] | None,
    of_perceptron: tuple[Any, ...],
) -> Tensor:
    """Run a block for contiguous tokens [*, dim].

    Args:
        x: the tokens.
        mixed: what the mixer made of the normalised tokens, contiguous; or None.
        attention: if so, the call of the mixer's step.
        of_mixer: the fields of :class:`BlockStepCall` from `mixer_norm` to `output`.
        of_perceptron: the fields from `hidden` on.
    """
    out = torch.empty_like(x)
    call = _PACKER.pack(
        x.numel() // x.shape[-1],
        x.shape[-1],
        KINDS.get(x.dtype, 0),
        torch.get_num_threads(),
        x.data_ptr(),
        address(mixed),
        out.data_ptr(),
        0 if attention is None else attention.address,
        *(of_mixer or _NO_ATTENTION),
        *of_perceptron,
    )
    assert _LIBRARY is not None
    status = _LIBRARY.graphattn_block_step(call, x.dtype == torch.float64)
    if status:
        library.check(status)
    return out

"""Matrix products of tiles, and how those of float32 numbers keep their digits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphattn.kernels.shared import tuning
from graphattn.kernels.shared.launch import is_interpreted


def product_precision(dtype: torch.dtype) -> str:
    """Return the constant PRECISION of kernels for tiles of `dtype`.

    - "tf32x3": three products of tf32 numbers on NVIDIA's tensor cores, which together are as exact
      as float32.
    - "ieee": float32. Products of half-precision tiles are the same with any precision.
    - "widened": factors become float32 first, because Triton's interpreter multiplies the bits of
      bfloat16 numbers.
    """
    if is_interpreted():
        return "widened"
    return "tf32x3" if dtype == torch.float32 and not tuning.is_amd() else "ieee"


@triton.jit
def product(b_a, b_b, PRECISION: tl.constexpr):
    """a @ b of tiles [m, k] and [k, n]: [m, n], summed up in float32."""
    if PRECISION == "widened":
        b_product = tl.dot(b_a.to(tl.float32), b_b.to(tl.float32), input_precision="ieee")
    else:
        b_product = tl.dot(b_a, b_b, input_precision=PRECISION)
    return b_product


@triton.jit
def add_product(b_sum, b_a, b_b, PRECISION: tl.constexpr):
    """sum + a @ b of tiles [m, n], [m, k] and [k, n]: [m, n], summed up in float32."""
    if PRECISION == "widened":
        b_sum = tl.dot(b_a.to(tl.float32), b_b.to(tl.float32), b_sum, input_precision="ieee")
    else:
        b_sum = tl.dot(b_a, b_b, b_sum, input_precision=PRECISION)
    return b_sum

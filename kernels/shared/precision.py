"""Matrix products of tiles, and how those of float32 numbers keep their digits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphattn.kernels.shared import tuning
from graphattn.kernels.shared.launch import is_interpreted

# Numbers in pieces are stored in PIECES columns, and multiplied in FACTORS: fewer no matrix
# instruction takes.
PIECES = tl.constexpr(8)
FACTORS = tl.constexpr(16)


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


@triton.jit
def pieces(b_x, LEFT: tl.constexpr, COLUMNS: tl.constexpr = FACTORS):
    """Numbers [rows] in float32 as a factor of a product that adds them up, [rows, COLUMNS].

    The product of the pieces of a (LEFT) and those of b, transposed, is a_i + b_j. A number is the
    sum of three numbers in bfloat16, of 8 bits each, so no digit is lost. They stand opposite to
    three ones: x, x, x, 1, 1, 1, 0, ... or, LEFT, 1, 1, 1, x, x, x, 0, ... Infinity and NaN are the
    first piece, and the others are 0.
    """
    b_first = _first_bits(b_x)
    b_rest = tl.where(tl.abs(b_x) < float("inf"), b_x - b_first, 0.0)
    b_second = _first_bits(b_rest)
    # [1, COLUMNS]
    o_column = tl.arange(0, COLUMNS)[None, :]
    o_piece = o_column - 3 if LEFT else o_column
    m_one = (o_column < 6) & ((o_piece < 0) | (o_piece > 2))
    b_pieces = tl.where(o_piece == 0, b_first[:, None], tl.where(m_one, 1.0, 0.0))
    b_pieces = tl.where(o_piece == 1, b_second[:, None], b_pieces)
    b_pieces = tl.where(o_piece == 2, (b_rest - b_second)[:, None], b_pieces)
    return b_pieces.to(tl.bfloat16)


@triton.jit
def _first_bits(b_x):
    """The sign, the exponent and the first 8 bits of numbers in float32, of any shape."""
    return (b_x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)

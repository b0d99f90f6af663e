"""Logits as integers in the same order (ranks), to find the k-th largest by halving intervals.

Tiles may have any shape.
"""

from __future__ import annotations

import triton
import triton.language as tl

NO_EDGE = tl.constexpr(-(1 << 31))  # less than the rank of every number
LARGEST = tl.constexpr((1 << 31) - 1)  # more than every rank
NOT_A_NUMBER = tl.constexpr((1 << 31) - 2)  # the rank of NaN: more than that of infinity


@triton.jit
def ordered_bits(b_bits):
    """The bits of float32 numbers as int32 in the same order; applied twice, the bits again.

    As integers, the bits of negative numbers are in reverse order: all but the sign are flipped.
    """
    return b_bits ^ ((b_bits >> 31) & LARGEST)


@triton.jit
def rank_of(b_logit):
    """Ranks of logits: int32 in the same order. That of NaN is the largest, as in torch."""
    b_rank = ordered_bits((b_logit + 0.0).to(tl.int32, bitcast=True))  # + 0.0 turns -0.0 into 0.0
    return tl.where(b_logit != b_logit, NOT_A_NUMBER, b_rank)


@triton.jit
def logit_of(b_rank):
    """The inverse of :func:`rank_of`, for numbers that are not NaN: logits from ranks."""
    return ordered_bits(b_rank).to(tl.float32, bitcast=True)


@triton.jit
def middle(b_low, b_high):
    """(low + high) / 2, rounded down; their sum may not fit into 32 bits."""
    return (b_low >> 1) + (b_high >> 1) + (b_low & b_high & 1)

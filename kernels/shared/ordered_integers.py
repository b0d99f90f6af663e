"""Logits as whole numbers in the same order, which can be counted and halved exactly."""

from __future__ import annotations

import triton
import triton.language as tl

NO_EDGE = tl.constexpr(-(1 << 31))  # below every number
LARGEST = tl.constexpr((1 << 31) - 1)  # the least upper bound
NOT_A_NUMBER = tl.constexpr((1 << 31) - 2)  # above infinity


@triton.jit
def ordered_bits(b_bits):
    """The bits of float32 numbers as integers in the same order; and back again."""
    return b_bits ^ ((b_bits >> 31) & LARGEST)


@triton.jit
def rank_of(b_logit):
    """Logits as whole numbers in the same order; NaN is the largest, as in torch."""
    b_rank = ordered_bits((b_logit + 0.0).to(tl.int32, bitcast=True))  # -0.0 becomes 0.0, its equal
    return tl.where(b_logit != b_logit, NOT_A_NUMBER, b_rank)


@triton.jit
def logit_of(b_rank):
    """The way back of :func:`rank_of`."""
    return ordered_bits(b_rank).to(tl.float32, bitcast=True)


@triton.jit
def middle(b_low, b_high):
    """(low + high) / 2, rounded down; their sum may not fit into 32 bits."""
    return (b_low >> 1) + (b_high >> 1) + (b_low & b_high & 1)

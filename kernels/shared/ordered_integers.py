"""Logits as integers in the same order (ranks), and the k-th largest of every row of ranks.

The k-th largest rank of a row lies in an interval from `b_low` up to, but without, `b_high`. At
first it holds the ranks of all edges. It is halved, by counting how many ranks reach its middle,
until exactly k ranks reach its lower end, or nothing lies between its ends. At least k ranks reach
`b_low` (all edges do if there are fewer), namely `b_of_low`; fewer reach `b_high`, namely
`b_of_high`. Of ranks that equal the k-th, the first are kept. Callers that hold all ranks call
:func:`largest`; others count, tile by tile, and call the other functions.

Tiles may have any shape, unless a shape is given.
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


@triton.jit
def counted(m_tile):
    """How many of every row [ROWS, columns] are true: [ROWS]."""
    return tl.sum(m_tile.to(tl.int32), axis=1)


@triton.jit
def widened(b_low, b_high, b_of_low, b_rank):
    """The interval at first, `b_low`, `b_high` and `b_of_low` [ROWS], after one more tile.

    `b_rank` [ROWS, columns] are the ranks of the tile. Before any, they are LARGEST, NO_EDGE and 0.
    """
    b_least = tl.min(tl.where(b_rank == NO_EDGE, LARGEST, b_rank), axis=1)
    b_high = tl.maximum(b_high, tl.max(b_rank, axis=1) + 1)
    return tl.minimum(b_low, b_least), b_high, b_of_low + counted(b_rank != NO_EDGE)


@triton.jit
def is_open(b_low, b_high, b_of_low, top_k):
    """Whether some row needs another try: more than `top_k` ranks reach `b_low`, and some rank lies
    between `b_low` and `b_high`; all [ROWS].
    """
    m_open = (b_of_low > top_k) & (b_high - 1 > b_low)
    return tl.max(m_open.to(tl.int32), axis=0) > 0


@triton.jit
def is_wide(b_low, b_high, b_of_low, b_of_high, top_k, few):
    """Whether some row is open (:func:`is_open`) and more than `few` ranks lie in its interval, or
    nothing is known of its upper end; all [ROWS] but the numbers `top_k` and `few`.
    """
    m_many = (b_of_low - b_of_high > few) | (b_high == LARGEST)
    m_wide = (b_of_low > top_k) & (b_high - 1 > b_low) & m_many
    return tl.max(m_wide.to(tl.int32), axis=0) > 0


@triton.jit
def narrowed(b_low, b_high, b_of_low, b_of_high, b_try, b_reach, top_k):
    """The interval in which the k-th largest rank lies, after a try; all arguments are [ROWS].

    `b_reach` ranks are at least `b_try`. At least `top_k` ranks reach `b_low` (if the row has so
    many), namely `b_of_low`; fewer than `top_k` reach `b_high`, namely `b_of_high`. Tries that are
    not within the interval change nothing.
    """
    m_up = (b_reach >= top_k) & (b_try > b_low) & (b_try < b_high)
    m_down = (b_reach < top_k) & (b_try > b_low) & (b_try < b_high)
    b_low, b_of_low = tl.where(m_up, b_try, b_low), tl.where(m_up, b_reach, b_of_low)
    b_high, b_of_high = tl.where(m_down, b_try, b_high), tl.where(m_down, b_reach, b_of_high)
    return b_low, b_high, b_of_low, b_of_high


@triton.jit
def kept_of(b_rank, b_low, b_left):
    """Mark the ranks of a tile [ROWS, columns] that are kept: those above `b_low`, and of those
    that equal it the first `b_left`; and return how many of these are left for the next tile.

    `b_low` and `b_left` are [ROWS]. When the interval is closed, `top_k` - `b_of_high` are left.
    """
    m_equal = b_rank == b_low[:, None]
    m_first = m_equal & (tl.cumsum(m_equal.to(tl.int32), axis=1) <= b_left[:, None])
    return (b_rank > b_low[:, None]) | m_first, b_left - counted(m_equal)


@triton.jit
def largest(b_rank, top_k):
    """Mark the `top_k` largest of every row of ranks [ROWS, columns], or all edges if there are
    fewer."""
    b_of_low = counted(b_rank != NO_EDGE)
    b_low = tl.min(tl.where(b_rank == NO_EDGE, LARGEST, b_rank), axis=1)
    b_high = tl.max(b_rank, axis=1) + 1
    b_of_high = tl.zeros_like(b_of_low)
    while is_open(b_low, b_high, b_of_low, top_k):
        b_try = middle(b_low, b_high)
        b_low, b_high, b_of_low, b_of_high = narrowed(
            b_low, b_high, b_of_low, b_of_high, b_try, counted(b_rank >= b_try[:, None]), top_k
        )
    m_kept, _ = kept_of(b_rank, b_low, top_k - b_of_high)
    return m_kept

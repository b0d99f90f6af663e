"""Tensors as kernels read them, and loads and stores of the features of any tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


def as_bytes(mask: Tensor | None) -> Tensor | None:
    """A bool mask of any shape as kernels read it: uint8, contiguous. None stays None."""
    return None if mask is None else mask.contiguous().view(torch.uint8)


class Valid(NamedTuple):
    """Masks of valid tokens as kernels take them: uint8 [B, N] and [B, M]; None: all are valid."""

    p_target: Tensor | None
    p_source: Tensor | None


def side_by_side(x: Tensor) -> Tensor:
    """x [B, N, H, D] if its features are contiguous and token n of batch b is row b * N + n.

    Otherwise, a contiguous copy.
    """
    if x.stride(-1) == 1 and (x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)):
        return x
    return x.contiguous()


@triton.jit
def pointer_to(x, i_row, i_h):
    """Return where head `i_h` of tokens `i_row`, of any shape, begins; `x` is a
    :class:`~graphattn.kernels.shared.launch.Heads`.

    `i_row` has 64 bits. The number of a head gets them here, because heads may be far apart.
    """
    return x.p + i_row * x.stride_n + i_h.to(tl.int64) * x.stride_h


@triton.jit
def entry_of(p_first, i_entry, size):
    """Return where entry `i_entry` of a tensor of entries of `size` numbers begins.

    `i_entry` has 64 bits. None, for a tensor that is not there, stays None.
    """
    p_entry = p_first
    if p_first is not None:
        p_entry = p_first + i_entry * size
    return p_entry


@triton.jit
def load_rows(p_first, b_row, m_row, i_stride, WIDTH: tl.constexpr):
    """Features of the tokens `b_row` [ROWS], [ROWS, WIDTH rounded up to a power of 2] in float32.

    `i_stride` is the distance of neighbouring tokens in memory. Tokens outside the mask `m_row` and
    features from WIDTH on become zeros.
    """
    o_feature = tl.arange(0, triton.next_power_of_2(WIDTH))
    p_tile = p_first + (b_row * i_stride)[:, None] + o_feature[None, :]
    m_tile = m_row[:, None] & (o_feature < WIDTH)[None, :]
    return tl.load(p_tile, mask=m_tile, other=0.0).to(tl.float32)


@triton.jit
def store_rows(p_first, b_tile, b_row, m_row, i_stride, WIDTH: tl.constexpr):
    """The inverse of :func:`load_rows`: stores a tile, in the dtype of the pointer."""
    o_feature = tl.arange(0, triton.next_power_of_2(WIDTH))
    p_tile = p_first + (b_row * i_stride)[:, None] + o_feature[None, :]
    m_tile = m_row[:, None] & (o_feature < WIDTH)[None, :]
    tl.store(p_tile, b_tile.to(p_first.dtype.element_ty), mask=m_tile)

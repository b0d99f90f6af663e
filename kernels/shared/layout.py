"""Tensors as kernels read them, and loads and stores of the features of any tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def as_bytes(mask: Tensor | None) -> Tensor | None:
    """A bool mask of any shape as kernels read it: uint8, contiguous. None stays None."""
    return None if mask is None else mask.contiguous().view(torch.uint8)


def side_by_side(x: Tensor) -> Tensor:
    """x [B, N, H, D] if its features are contiguous and token n of batch b is row b * N + n.

    Otherwise, a contiguous copy.
    """
    if x.stride(-1) == 1 and (x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)):
        return x
    return x.contiguous()


@triton.jit
def load_rows(p_first, b_row, m_row, i_stride, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Features of the tokens `b_row` [ROWS], [ROWS, BLOCK_WIDTH] in float32.

    `i_stride` is the distance of neighbouring tokens in memory. Tokens outside the mask `m_row` and
    features from WIDTH on become zeros.
    """
    o_feature = tl.arange(0, BLOCK_WIDTH)
    p_tile = p_first + (b_row * i_stride)[:, None] + o_feature[None, :]
    m_tile = m_row[:, None] & (o_feature < WIDTH)[None, :]
    return tl.load(p_tile, mask=m_tile, other=0.0).to(tl.float32)


@triton.jit
def store_rows(
    p_first, b_tile, b_row, m_row, i_stride, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr
):  # fmt: skip
    """The inverse of :func:`load_rows`: stores a tile, in the dtype of the pointer."""
    o_feature = tl.arange(0, BLOCK_WIDTH)
    p_tile = p_first + (b_row * i_stride)[:, None] + o_feature[None, :]
    m_tile = m_row[:, None] & (o_feature < WIDTH)[None, :]
    tl.store(p_tile, b_tile.to(p_first.dtype.element_ty), mask=m_tile)

"""Dot products of two rows of features, for every token and head: squared norms, a backward's
delta."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphattn.kernels.shared.launch import launch
from graphattn.kernels.shared.programs import heads_first

NUMBERS = 2048  # elements of each tensor that one program reads


@triton.jit(do_not_specialize=["N", "H", "factor", "stride_sb", "stride_sn", "stride_sh"])
def row_dots_kernel(
    p_a, p_b, p_subtracted, p_found, N, H, factor,
    stride_an, stride_ah, stride_bn, stride_bh, stride_sb, stride_sn, stride_sh,
    D: tl.constexpr, BLOCK_D: tl.constexpr, TOKENS: tl.constexpr, SUBTRACT: tl.constexpr,
):  # fmt: skip
    """found[b, h, n] = factor * a[b, n, h] . b[b, n, h], and if SUBTRACT - subtracted[b, n, h]."""
    i_b, i_h, i_tile = heads_first((N + TOKENS - 1) // TOKENS, H)
    o_token = i_tile * TOKENS + tl.arange(0, TOKENS)
    o_feature = tl.arange(0, BLOCK_D)
    m_token = o_token < N
    m_tile = m_token[:, None] & (o_feature < D)[None, :]
    o_global = i_b * N + o_token
    p_tile = p_a + i_h.to(tl.int64) * stride_ah + o_global[:, None] * stride_an + o_feature[None, :]
    b_a = tl.load(p_tile, mask=m_tile, other=0.0).to(tl.float32)  # [TOKENS, BLOCK_D]
    p_tile = p_b + i_h.to(tl.int64) * stride_bh + o_global[:, None] * stride_bn + o_feature[None, :]
    b_b = tl.load(p_tile, mask=m_tile, other=0.0).to(tl.float32)
    # [TOKENS]
    b_found = factor * tl.sum(b_a * b_b, axis=1)
    if SUBTRACT:
        o_number = i_b * stride_sb + o_token.to(tl.int64) * stride_sn + i_h.to(tl.int64) * stride_sh
        b_found -= tl.load(p_subtracted + o_number, mask=m_token, other=0.0)
    tl.store(p_found + (i_b * H + i_h) * N + o_token, b_found, mask=m_token)


def row_dots(a: Tensor, b: Tensor, factor: float = 1.0, subtracted: Tensor | None = None) -> Tensor:
    """factor * sum over features of a * b, minus `subtracted` [B, N, H]: [B, H, N] in float32.

    `a` and `b` [B, N, H, D] are laid out as :func:`graphattn.kernels.shared.layout.side_by_side`
    returns tensors.
    """
    B, N, H, D = a.shape
    found = a.new_empty((B, H, N), dtype=torch.float32)
    unread = found
    width = max(triton.next_power_of_2(D), 16)
    tokens = NUMBERS // width
    launch(
        row_dots_kernel,
        (B * H * triton.cdiv(N, tokens),),
        p_a=a,
        p_b=b,
        p_subtracted=unread if subtracted is None else subtracted,
        p_found=found,
        N=N,
        H=H,
        factor=factor,
        stride_an=a.stride(1),
        stride_ah=a.stride(2),
        stride_bn=b.stride(1),
        stride_bh=b.stride(2),
        stride_sb=0 if subtracted is None else subtracted.stride(0),
        stride_sn=0 if subtracted is None else subtracted.stride(1),
        stride_sh=0 if subtracted is None else subtracted.stride(2),
        D=D,
        BLOCK_D=width,
        TOKENS=tokens,
        SUBTRACT=subtracted is not None,
        num_warps=4,
        num_stages=1,
        fp_fusion=False,  # threads that share a sum must hold the same bits of it
    )
    return found

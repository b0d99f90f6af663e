"""Dot products of two rows of features, for every token and head: squared norms, a backward's
delta."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphattn.kernels.shared.launch import Heads, launch
from graphattn.kernels.shared.layout import pointer_to
from graphattn.kernels.shared.precision import PIECES, pieces
from graphattn.kernels.shared.programs import heads_first

NUMBERS = 2048  # elements of each tensor that one program reads


@triton.jit(do_not_specialize=["N", "H", "factor", "stride_sb", "stride_sn", "stride_sh"])
def row_dots_kernel(
    a, b, p_subtracted, p_dots, N, H, factor, stride_sb, stride_sn, stride_sh,
    D: tl.constexpr, TOKENS: tl.constexpr, IN_PIECES: tl.constexpr,
):  # fmt: skip
    """dots[b, h, n] = factor * a[b, n, h] . b[b, n, h] - subtracted[b, n, h].

    `a` and `b` are Heads. `p_subtracted` may be None. Each is stored as one number in float32, or
    IN_PIECES.
    """
    i_b, i_h, i_tile = heads_first((N + TOKENS - 1) // TOKENS, H)
    o_token = i_tile * TOKENS + tl.arange(0, TOKENS)
    m_token = o_token < N
    o_feature = tl.arange(0, triton.next_power_of_2(D if D > 16 else 16))
    m_tile = m_token[:, None] & (o_feature < D)[None, :]
    p_a = pointer_to(a, i_b * N + o_token, i_h)
    p_b = pointer_to(b, i_b * N + o_token, i_h)
    # [TOKENS, features]
    b_a = tl.load(p_a[:, None] + o_feature[None, :], mask=m_tile, other=0.0).to(tl.float32)
    b_b = tl.load(p_b[:, None] + o_feature[None, :], mask=m_tile, other=0.0).to(tl.float32)
    # [TOKENS]
    b_dots = factor * tl.sum(b_a * b_b, axis=1)
    if p_subtracted is not None:
        o_number = i_b * stride_sb + o_token.to(tl.int64) * stride_sn + i_h.to(tl.int64) * stride_sh
        b_dots -= tl.load(p_subtracted + o_number, mask=m_token, other=0.0)
    o_number = (i_b * H + i_h) * N + o_token
    if IN_PIECES:
        p_pieces = p_dots + (o_number * PIECES)[:, None] + tl.arange(0, PIECES)[None, :]
        tl.store(p_pieces, pieces(b_dots, False, PIECES), mask=m_token[:, None])
    else:
        tl.store(p_dots + o_number, b_dots, mask=m_token)


def row_dots(a: Tensor, b: Tensor, factor: float = 1.0, subtracted: Tensor | None = None) -> Tensor:
    """factor * sum over features of a * b, minus `subtracted` [B, N, H]: [B, H, N] in float32.

    `a` and `b` [B, N, H, D] are laid out as :func:`graphattn.kernels.shared.layout.side_by_side`
    returns tensors.
    """
    B, N, H, _ = a.shape
    dots = a.new_empty((B, H, N), dtype=torch.float32)
    _start(a, b, factor, subtracted, dots, in_pieces=False)
    return dots


def half_squares(x: Tensor) -> Tensor:
    """-||x||^2 / 2 of the rows of x [B, N, H, D] in pieces: [B, H, N, PIECES] in bfloat16.

    :func:`graphattn.kernels.shared.precision.pieces` explains them.
    """
    B, N, H, _ = x.shape
    squares = x.new_empty((B, H, N, PIECES.value), dtype=torch.bfloat16)
    _start(x, x, -0.5, None, squares, in_pieces=True)
    return squares


def _start(
    a: Tensor, b: Tensor, factor: float, subtracted: Tensor | None, dots: Tensor, *, in_pieces: bool
) -> None:
    B, N, H, D = a.shape
    tokens = NUMBERS // max(triton.next_power_of_2(D), 16)
    strides = (0, 0, 0) if subtracted is None else subtracted.stride()
    launch(
        row_dots_kernel,
        (B * H * triton.cdiv(N, tokens),),
        a=Heads.of(a),
        b=Heads.of(b),
        p_subtracted=subtracted,
        p_dots=dots,
        N=N,
        H=H,
        factor=factor,
        stride_sb=strides[0],
        stride_sn=strides[1],
        stride_sh=strides[2],
        D=D,
        TOKENS=tokens,
        num_warps=4,
        num_stages=1,
        IN_PIECES=in_pieces,
        fp_fusion=False,  # threads that share a sum must hold the same bits of it
    )

"""Gradients of the sums of a consensus step: every edge's matrix R is computed again.

R is symmetric. So the gradient of the difference d of an edge is R e, where e is the gradient that
comes back to the message of the edge (for energy, from both ends). Only the edge network needs
derivatives of its own. With the raw rows l_k,

    d l_k = (beta / r) [(l_k . e) d + (l_k . d) e - 2 (l_k . d) (l_k . e) l_k / |l_k|^2] / |l_k|^2,

and a second matrix product gives the gradient of the hidden vector. The gradients of
target_hidden and source_hidden are sums of these over edges (`sum_messages`). Gradients of weights
are products of d l_k and hidden vectors, summed over all edges: both factors are written, a piece
of the edges at a time, and multiplied by torch. They are most of what is written for an edge, and
are freed before other sums are formed.

Names and constants are explained where :mod:`graphattn.kernels.consensus.math` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphattn.kernels.consensus.inputs import ConsensusInputs, HeadFeatures, block_of
from graphattn.kernels.consensus.math import (
    EXTRA,
    LOGITS,
    WIDE,
    along,
    combine,
    edge_network,
    gelu,
    gelu_slope,
    hidden_sum,
    inverse_squares,
    load_edges,
    load_features,
    rows_of,
    sigmoid,
    strengths,
)
from graphattn.kernels.consensus.sum_messages import Sum
from graphattn.kernels.shared.precision import product
from graphattn.kernels.shared.programs import tiles_first


class Factors(NamedTuple):
    """Factors of the gradients of the edge network, which the kernel writes for every edge.

    Attributes:
        p_d_rows: gradients of raw rows, then of both logits, [H, B, places, columns + EXTRA].
        p_hidden: its hidden vector, then a one, [H, B, places, BLOCK_XI + EXTRA].
        p_d_hidden: the gradient of the hidden vector before GELU, [H, B, places, XI].
    """

    p_d_rows: Tensor
    p_hidden: Tensor
    p_d_hidden: Tensor


@triton.jit
def row_gradients(
    b_rows, b_d, b_e, b_along_d, b_along_e, b_share, b_inverse, b_scale, D: tl.constexpr
):  # fmt: skip
    """Compute the gradient of e . R d with respect to the raw rows l, [ROWS, RANKS, BLOCK_D].

    This is the formula above for m = s l, times s. `b_along_d` and `b_along_e` are m . d and m . e,
    `b_inverse` is 1 / |m|^2, `b_share` is beta / (r |m|^2) and `b_scale` is s, [ROWS, RANKS] each;
    `b_rows` is l [ROWS, RANKS, BLOCK_D], and `b_d` and `b_e` are [ROWS, BLOCK_D].
    """
    if D == 1:  # the direction of a row of one feature cannot change, so its gradient is exactly 0
        b_d_rows = tl.zeros_like(b_rows)
    else:
        b_back = -2.0 * b_share * b_along_d * b_along_e * b_inverse * b_scale
        b_d_rows = b_back[:, :, None] * b_rows
        b_d_rows += (b_share * b_along_e)[:, :, None] * b_d[:, None, :]
        b_d_rows += (b_share * b_along_d)[:, :, None] * b_e[:, None, :]
        b_d_rows = b_d_rows * b_scale[:, :, None]
    return b_d_rows


@triton.jit(
    do_not_specialize=["B", "N", "M", "H", "first", "count", "num_places", "num_steps", "num_tiles"]
)
def consensus_backward_kernel(
    d_gradient, p_d_degree, p_messages, factors, target_hidden, source_hidden, u, v, weights,
    edges, valid, B, N, M, H, first, count, num_places, num_steps, num_tiles,
    RANK: tl.constexpr, RANKS: tl.constexpr, D: tl.constexpr, XI: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr, ENERGY: tl.constexpr,
):  # fmt: skip
    """R e of every edge, [H, B, places, D], and its :class:`Factors`, which may be None."""
    i_b, i_h, i_tile = tiles_first(B, num_tiles * num_steps)
    i_tile, i_step = i_tile // num_steps, i_tile % num_steps
    BLOCK_D: tl.constexpr = triton.next_power_of_2(D if D > 16 else 16)
    BLOCK_XI: tl.constexpr = (
        (XI + 63) // 64 * 64 if XI >= 64 else triton.next_power_of_2(XI if XI > 16 else 16)
    )
    GROUPS: tl.constexpr = (RANK + RANKS - 1) // RANKS
    COLUMNS: tl.constexpr = RANKS * BLOCK_D
    PART_XI: tl.constexpr = WIDE if BLOCK_XI > WIDE else BLOCK_XI
    NETWORK: tl.constexpr = factors is not None
    HALF: tl.constexpr = u.p.dtype.element_ty != tl.float32
    i_h64 = i_h.to(tl.int64)
    p_shear = weights.shear + i_h64 * (GROUPS * COLUMNS * BLOCK_XI)
    p_shear_bias = weights.shear_bias + i_h64 * (GROUPS * COLUMNS)
    p_logits = weights.logits + i_h64 * (LOGITS * BLOCK_XI)
    o_first = (i_h64 * B + i_b) * num_places
    o_feature = tl.arange(0, BLOCK_D)
    o_column = tl.arange(0, COLUMNS)
    # [ROWS]
    b_place, b_target, b_source, m_edge = load_edges(
        edges, valid, i_b, N, M, first, count, i_tile, i_step, num_steps, ROWS
    )
    p_of_target = rows_of(target_hidden, i_b, i_h, b_target)
    p_of_source = rows_of(source_hidden, i_b, i_h, b_source)
    m_place = b_place >= 0
    o_message = o_first + b_place
    # [ROWS, BLOCK_D]
    b_d = load_features(u, i_b, i_h, b_target, m_edge, D, BLOCK_D)
    b_d -= load_features(v, i_b, i_h, b_source, m_edge, D, BLOCK_D)
    b_e = load_features(d_gradient, i_b, i_h, b_target, m_edge, D, BLOCK_D)
    if ENERGY:
        b_e -= load_features(d_gradient, i_b, i_h, b_source, m_edge, D, BLOCK_D)
    b_d_strength = tl.zeros([ROWS], tl.float32)
    if p_d_degree is not None:
        p_of_head = p_d_degree + (i_b * N * H + i_h)
        b_d_strength += tl.load(p_of_head + b_target.to(tl.int64) * H, mask=m_edge, other=0.0)
        if ENERGY:
            b_d_strength += tl.load(p_of_head + b_source.to(tl.int64) * H, mask=m_edge, other=0.0)

    b_pull = tl.zeros([ROWS, BLOCK_D], tl.float32)
    b_alpha = tl.zeros([ROWS], tl.float32)
    b_d_alpha = tl.zeros([ROWS], tl.float32)
    b_d_beta = tl.zeros([ROWS], tl.float32)
    for i_group in range(GROUPS):
        if GROUPS > 1:  # what other threads have written for the group before is read below
            tl.debug_barrier()
        # [ROWS, RANKS, BLOCK_D], [ROWS, LOGITS]
        b_rows, b_logits = edge_network(
            p_of_target, p_of_source, m_edge,
            p_shear + i_group * (COLUMNS * BLOCK_XI), p_shear_bias + i_group * COLUMNS,
            p_logits, (), (), XI, BLOCK_XI, CHUNK, RANKS, BLOCK_D, False, PRECISION,
        )  # fmt: skip
        b_alpha, b_beta, b_alpha_logit, b_beta_logit = strengths(
            b_logits, weights.logit_bias + 2 * i_h
        )
        b_inverse, b_scale = inverse_squares(b_rows, RANK - i_group * RANKS, RANKS)
        # [ROWS, RANKS], of scaled rows
        b_along_d = b_scale * along(b_rows, b_d)
        b_along_e = b_scale * along(b_rows, b_e)
        b_share = b_inverse * (b_beta / RANK)[:, None]
        # [ROWS, BLOCK_D]
        b_pull += combine(b_rows, b_share * b_along_e * b_scale)
        if NETWORK:
            b_d_beta += tl.sum(b_along_d * b_along_e * b_inverse, axis=1) / RANK
            b_d_rows = row_gradients(
                b_rows, b_d, b_e, b_along_d, b_along_e, b_share, b_inverse, b_scale, D
            )
            # [ROWS, COLUMNS]
            b_d_rows = tl.reshape(b_d_rows, [ROWS, COLUMNS]).to(factors.p_d_rows.dtype.element_ty)
            p_tile = factors.p_d_rows + o_message[:, None] * (GROUPS * COLUMNS + EXTRA)
            p_tile += i_group * COLUMNS + o_column[None, :]
            tl.store(p_tile, b_d_rows, mask=m_place[:, None])
            if i_group == GROUPS - 1:
                b_d_alpha = tl.sum(b_d * b_e, axis=1) + b_d_strength
                b_d_alpha = b_d_alpha * sigmoid(b_alpha_logit)
                b_d_beta = (b_d_beta + b_d_strength) * sigmoid(b_beta_logit)
            p_weight = p_shear + i_group * (COLUMNS * BLOCK_XI)
            for i_x in range(0, BLOCK_XI, PART_XI):
                o_x = i_x + tl.arange(0, PART_XI)
                m_tile = m_place[:, None] & (o_x < XI)[None, :]
                # [COLUMNS, PART_XI], then [ROWS, PART_XI]
                b_shear = tl.load(p_weight + o_column[:, None] * BLOCK_XI + o_x[None, :])
                b_d_x = product(b_d_rows, b_shear, PRECISION)  # d hidden, later d (hidden_sum)
                p_d_x = factors.p_d_hidden + o_message[:, None] * XI + o_x[None, :]
                if GROUPS > 1:  # add the groups before, whose sum is not yet times the slope
                    m_before = m_tile & (i_group > 0)
                    b_d_x += tl.load(p_d_x, mask=m_before, other=0.0).to(tl.float32)
                if i_group == GROUPS - 1:
                    b_weight = tl.load(p_logits + o_x).to(tl.float32)
                    b_d_x += b_d_alpha[:, None] * b_weight[None, :]
                    b_weight = tl.load(p_logits + BLOCK_XI + o_x).to(tl.float32)
                    b_d_x += b_d_beta[:, None] * b_weight[None, :]
                    b_x = hidden_sum(p_of_target, p_of_source, m_edge, i_x, XI, PART_XI)
                    b_d_x = b_d_x * gelu_slope(b_x, HALF)
                    b_hidden = gelu(b_x, HALF).to(factors.p_hidden.dtype.element_ty)
                    p_x = factors.p_hidden + o_message[:, None] * (BLOCK_XI + EXTRA)
                    tl.store(p_x + o_x[None, :], b_hidden, mask=m_place[:, None])
                tl.store(p_d_x, b_d_x.to(factors.p_d_hidden.dtype.element_ty), mask=m_tile)

    p_tile = p_messages + o_message[:, None] * D + o_feature[None, :]
    b_message = (b_alpha[:, None] * b_e + b_pull).to(p_messages.dtype.element_ty)
    tl.store(p_tile, b_message, mask=m_place[:, None] & (o_feature < D)[None, :])
    if NETWORK:
        o_extra = tl.arange(0, EXTRA)[None, :]
        b_d_logits = tl.where(o_extra == 0, b_d_alpha[:, None], 0.0)
        b_d_logits = tl.where(o_extra == 1, b_d_beta[:, None], b_d_logits)
        p_tile = factors.p_d_rows + o_message[:, None] * (GROUPS * COLUMNS + EXTRA)
        p_tile += GROUPS * COLUMNS
        b_d_logits = b_d_logits.to(factors.p_d_rows.dtype.element_ty)
        tl.store(p_tile + o_extra, b_d_logits, mask=m_place[:, None])
        b_one = tl.where(o_extra == 0, 1.0, 0.0) + tl.zeros([ROWS, EXTRA], tl.float32)
        p_tile = factors.p_hidden + o_message[:, None] * (BLOCK_XI + EXTRA) + BLOCK_XI
        b_one = b_one.to(factors.p_hidden.dtype.element_ty)
        tl.store(p_tile + o_extra, b_one, mask=m_place[:, None])


class Gradients(NamedTuple):
    """Gradients of the tensors of :class:`~graphattn.kernels.consensus.inputs.ConsensusInputs`.

    Each has the shape of its tensor. Those of hidden vectors are None if they were not asked for.
    If u and v are one tensor, `u` is the whole gradient and `v` None.
    """

    target_hidden: Tensor | None
    source_hidden: Tensor | None
    u: Tensor
    v: Tensor | None


def backward(
    inputs: ConsensusInputs, d_gradient: Tensor, d_degree: Tensor | None, *, network: Tensor | None
) -> Gradients:
    """Compute gradients from those of g [B, N, H, D] and of the degrees [B, N, H] (None: zero).

    Those of the edge network are added to `network`, from :func:`no_sums`. If it is None, neither
    they nor those of hidden vectors are computed. :func:`unpack` takes `network` apart.
    """
    x = inputs
    B, N, H, D = x.u.shape
    M, size = x.v.shape[1], x.u.element_size()
    widths = (*_packed(x), x.xi) if network is not None else ()  # of Factors
    pieces = x.pieces((D + sum(widths)) * size)
    d_gradient = d_gradient if d_gradient.stride(-1) == 1 else d_gradient.contiguous()
    # The gradient of u_i sums R e at the target, that of v_j sums -R e at the source. If u and v
    # are one tensor, its gradient is both.
    dtype, tokens = x.u.dtype, (B, N, H, D)
    d_u = Sum(x.u, tokens, dtype, (1, -1 if x.shared else 0), pieces)
    d_v = None if x.shared else Sum(x.u, (B, M, H, D), dtype, (0, -1), pieces)
    d_target = Sum(x.u, (B, N, H, x.xi), dtype, (1, 0), pieces) if widths else None
    d_source = Sum(x.u, (B, M, H, x.xi), dtype, (0, 1), pieces) if widths else None
    for piece in pieces:
        messages = x.u.new_empty(H, B, piece.places, D)
        factors = None
        if widths:
            factors = Factors(*(x.u.new_empty(H, B, piece.places, width) for width in widths))
        x.launch_over(
            consensus_backward_kernel,
            "consensus_backward",
            piece,
            steps_each=True,
            d_gradient=HeadFeatures.of(d_gradient),
            p_d_degree=d_degree,
            p_messages=messages,
            factors=factors,
            ENERGY=x.energy,
        )
        d_hidden = None
        if factors is not None and network is not None:
            # [d rows, d alpha, d beta]^T [hidden, 1]: weights and biases of all three.
            network += torch.bmm(factors.p_d_rows.flatten(1, 2).mT, factors.p_hidden.flatten(1, 2))
            d_hidden = factors.p_d_hidden
        del factors
        for total, of_edges in (
            (d_u, messages), (d_v, messages), (d_target, d_hidden), (d_source, d_hidden)
        ):  # fmt: skip
            if total is not None and of_edges is not None:
                total.add(piece, of_edges)
    return Gradients(
        None if d_target is None else d_target.result(),
        None if d_source is None else d_source.result(),
        d_u.result(),
        None if d_v is None else d_v.result(),
    )


def no_sums(x: ConsensusInputs, heads: int) -> Tensor:
    """Zeros, to which gradients of the edge network of `heads` heads are added, packed in float32.

    They are [heads, columns + EXTRA, BLOCK_XI + EXTRA]. One tensor takes those of all calls for one
    network: for other entries of the batch, and in its parts for other heads.
    """
    return x.u.new_zeros((heads, *_packed(x)), dtype=torch.float32)


def _packed(x: ConsensusInputs) -> tuple[int, int]:
    return x.columns + EXTRA.value, x.block_xi + EXTRA.value


def unpack(total: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Gradients of the six parameters, from :func:`no_sums` with all gradients added.

    `sizes` are those of the weights of Lambda, [H, r, D, xi].
    """
    H, r, D, xi = sizes
    columns, block_xi = (size - EXTRA.value for size in total.shape[1:])
    shear = total[:, :columns].view(H, -1, block_of(D), block_xi + EXTRA.value)[:, :r, :D]
    alpha, beta = total[:, columns], total[:, columns + 1]
    return (
        alpha[:, :xi],
        alpha[:, block_xi],
        beta[:, :xi],
        beta[:, block_xi],
        shear[..., :xi],
        shear[..., block_xi],
    )

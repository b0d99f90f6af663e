"""Consensus, forward: the message of every edge, and the sums of messages at both ends of edges.

For a tile of edges of one head, a program does this:

1. It computes hidden vectors gelu(target_hidden_i + source_hidden_j) from the two tokens.
2. Their matrix product with W_Lambda gives the raw rows l_k of Lambda, which stay in registers.
3. It computes the message R d = alpha d + (beta / r) sum_k l_k (l_k . d) / |l_k|^2 for
   d = u_i - v_j (Stabilizing Transformer Training Through Consensus, Eq. 14 and 36, Algorithm 2).

Of an edge, only the message is written, and alpha + beta if degrees are wanted. That is done for a
bounded number of edges at a time; `sum_messages` adds the messages up.

Names and constants are explained where :mod:`graphattn.kernels.consensus.math` says.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphattn.kernels.consensus.inputs import ConsensusInputs
from graphattn.kernels.consensus.math import (
    LOGITS,
    along,
    combine,
    edge_network,
    hold_weights,
    inverse_squares,
    load_edges,
    load_features,
    rows_of,
    strengths,
)
from graphattn.kernels.consensus.sum_messages import Sum
from graphattn.kernels.shared.programs import tiles_first


@triton.jit(
    do_not_specialize=["B", "N", "M", "H", "first", "count", "num_places", "num_steps", "num_tiles"]
)
def consensus_kernel(
    p_messages, p_strength, target_hidden, source_hidden, u, v, weights, edges, valid,
    B, N, M, H, first, count, num_places, num_steps, num_tiles,
    RANK: tl.constexpr, RANKS: tl.constexpr, D: tl.constexpr, XI: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """R d of every edge, [H, B, places, D], and alpha + beta, [H, B, places] or None."""
    i_b, i_h, i_tile = tiles_first(B, num_tiles)
    BLOCK_D: tl.constexpr = triton.next_power_of_2(D if D > 16 else 16)
    BLOCK_XI: tl.constexpr = (
        (XI + 63) // 64 * 64 if XI >= 64 else triton.next_power_of_2(XI if XI > 16 else 16)
    )
    GROUPS: tl.constexpr = (RANK + RANKS - 1) // RANKS
    COLUMNS: tl.constexpr = RANKS * BLOCK_D
    i_h64 = i_h.to(tl.int64)
    p_shear = weights.shear + i_h64 * (GROUPS * COLUMNS * BLOCK_XI)
    p_shear_bias = weights.shear_bias + i_h64 * (GROUPS * COLUMNS)
    p_logits = weights.logits + i_h64 * (LOGITS * BLOCK_XI)
    o_first = (i_h64 * B + i_b) * num_places
    held_shear = hold_weights(p_shear, HELD, BLOCK_XI, CHUNK, COLUMNS)
    held_logits = hold_weights(p_logits, HELD, BLOCK_XI, CHUNK, LOGITS)
    o_feature = tl.arange(0, BLOCK_D)
    for i_step in range(num_steps):
        # [ROWS]
        b_place, b_target, b_source, m_edge = load_edges(
            edges, valid, i_b, N, M, first, count, i_tile, i_step, num_steps, ROWS
        )
        b_message = tl.zeros([ROWS, BLOCK_D], tl.float32)
        b_alpha = tl.zeros([ROWS], tl.float32)
        b_beta = tl.zeros([ROWS], tl.float32)
        for i_group in range(GROUPS):
            # [ROWS, RANKS, BLOCK_D], [ROWS, LOGITS]
            b_rows, b_logits = edge_network(
                rows_of(target_hidden, i_b, i_h, b_target),
                rows_of(source_hidden, i_b, i_h, b_source), m_edge,
                p_shear + i_group * (COLUMNS * BLOCK_XI), p_shear_bias + i_group * COLUMNS,
                p_logits, held_shear, held_logits, XI, BLOCK_XI, CHUNK, RANKS, BLOCK_D, HELD,
                PRECISION,
            )  # fmt: skip
            b_alpha, b_beta, _, _ = strengths(b_logits, weights.logit_bias + 2 * i_h)
            b_inverse, b_scale = inverse_squares(b_rows, RANK - i_group * RANKS, RANKS)
            # [ROWS, BLOCK_D], read only now: during the product there are no registers left for it
            b_d = load_features(u, i_b, i_h, b_target, m_edge, D, BLOCK_D)
            b_d -= load_features(v, i_b, i_h, b_source, m_edge, D, BLOCK_D)
            # [ROWS, RANKS], then [ROWS, BLOCK_D]
            b_share = b_scale * along(b_rows, b_d) * b_inverse * (b_beta / RANK)[:, None] * b_scale
            b_message += combine(b_rows, b_share)
            if i_group == 0:
                b_message += b_alpha[:, None] * b_d

        m_place = b_place >= 0
        p_tile = p_messages + (o_first + b_place)[:, None] * D + o_feature[None, :]
        b_message = b_message.to(p_messages.dtype.element_ty)
        tl.store(p_tile, b_message, mask=m_place[:, None] & (o_feature < D)[None, :])
        if p_strength is not None:
            b_strength = tl.where(m_edge, b_alpha + b_beta, 0.0)
            tl.store(p_strength + o_first + b_place, b_strength, mask=m_place)


def forward(inputs: ConsensusInputs) -> tuple[Tensor, Tensor | None]:
    """g [B, N, H, D] in the dtype of u, and the degrees [B, N, H] in float32 if they are wanted."""
    x = inputs
    B, N, H, D = x.u.shape
    pieces = x.pieces(D * x.u.element_size() + 4 * x.degrees)
    gradient = Sum(x.u, (B, N, H, D), x.u.dtype, (1, -1 if x.energy else 0), pieces)
    degree = None
    if x.degrees:
        degree = Sum(x.u, (B, N, H, 1), torch.float32, (1, 1 if x.energy else 0), pieces)
    for piece in pieces:
        messages = x.u.new_empty(H, B, piece.places, D)
        strength = None
        if degree is not None:
            strength = x.u.new_empty((H, B, piece.places, 1), dtype=torch.float32)
        x.launch_over(
            consensus_kernel,
            "consensus",
            piece,
            steps_each=False,
            HELD=x.holds_weights(x.choice("consensus")),
            p_messages=messages,
            p_strength=strength,
        )
        gradient.add(piece, messages)
        if degree is not None and strength is not None:
            degree.add(piece, strength)
    return gradient.result(), None if degree is None else degree.result().squeeze(-1)

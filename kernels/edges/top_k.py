"""Top-k within rows of edges: of every target, the edges with the largest logits are kept.

The k-th largest logit of a row is found bit by bit, by counting (radix select). Of edges that equal
it, the first are kept, which are those with the smaller sources. The result is a mask that forward
and backward read. They do not choose themselves, because they may add features in another order,
and would then choose differently near a tie.

Names and constants are explained where :mod:`graphattn.kernels.edges.forward` says.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphattn.kernels.edges.inputs import EdgeInputs, launch_over
from graphattn.kernels.edges.math import (
    gather_affinities,
    load_bias,
    load_edges,
    own_segments,
    without_invalid,
)
from graphattn.kernels.shared import tuning
from graphattn.kernels.shared.layout import load_rows
from graphattn.kernels.shared.ordered_integers import rank_of


@triton.jit
def load_ranks(
    b_query, i_scale, p_key, p_bias, p_valid, p_others, p_edge_ids, b_first, b_count, i_slot, heads,
    i_h, stride_kn, D: tl.constexpr, BLOCK_D: tl.constexpr, SLOTS: tl.constexpr,
    RBF: tl.constexpr, BIAS: tl.constexpr, EDGE_IDS: tl.constexpr, VALID: tl.constexpr,
):  # fmt: skip
    """Ranks of the next SLOTS edges of every row: their logits as integers in the same order.

    Ranks are 0 or more, NaN has the largest as in torch.topk, and -1 is no edge. Returns the ranks,
    the mask of edges and the numbers of edges, [ROWS, SLOTS] each.
    """
    # [ROWS, SLOTS]; p_others again, for the pointer to a mask that is only read with KEPT
    b_source, m_edge, b_edge = load_edges(
        p_others, p_edge_ids, p_valid, p_others, b_first, b_count, i_slot, heads, i_h,
        SLOTS, VALID, False, EDGE_IDS,
    )  # fmt: skip
    b_affinity, _ = gather_affinities(b_query, p_key, b_source, m_edge, stride_kn, D, BLOCK_D, RBF)
    b_logit = b_affinity * i_scale
    if BIAS:
        b_logit += load_bias(p_bias, b_edge, m_edge, heads, i_h)
    b_rank = rank_of(b_logit).to(tl.int64) + 0x80000000
    return tl.where(m_edge, b_rank, -1), m_edge, b_edge


@triton.jit(
    do_not_specialize=["N", "M", "E", "H", "num_segments", "num_groups", "num_parts", "top_k"]
)
def edges_select_kernel(
    p_query, p_key, p_value, p_chosen, p_scale, p_bias, p_kept, p_valid_target, p_valid_source,
    p_segments, p_others, p_edge_ids, N, M, E, H, num_segments, num_groups, num_parts, top_k,
    stride_qn, stride_qh, stride_kn, stride_kh, stride_vn, stride_vh,
    REPEATS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr,
    RBF: tl.constexpr, BIAS: tl.constexpr, KEPT: tl.constexpr, EDGE_IDS: tl.constexpr,
    VALID: tl.constexpr, VALID_TARGET: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """chosen [B, E, H]: 1 for the `top_k` edges of every row with the largest logits.

    The ranks of the first SLOTS edges of a row are held in registers. If a row has more, their keys
    are gathered again for every bit.
    """
    i_b, i_h, b_row, b_first, b_count, _ = own_segments(
        p_segments, num_segments, num_groups, H, ROWS
    )
    b_count = without_invalid(b_count, b_row, p_valid_target + i_b * N, VALID_TARGET)
    i_key_head = i_h // REPEATS
    p_query += i_b * N * stride_qn + i_h.to(tl.int64) * stride_qh
    p_key += i_b * M * stride_kn + i_key_head.to(tl.int64) * stride_kh
    p_valid_source += i_b * M
    if BIAS == 2:
        p_bias += i_b * E * H
    # [ROWS, BLOCK_D]
    b_query = load_rows(p_query, b_row, b_row >= 0, stride_qn, D, BLOCK_D)
    i_scale = tl.load(p_scale + i_h)
    i_most = tl.max(b_count, axis=0)

    # [ROWS, SLOTS]
    b_held, _, _ = load_ranks(
        b_query, i_scale, p_key, p_bias, p_valid_source, p_others, p_edge_ids, b_first, b_count, 0,
        H, i_h, stride_kn, D, BLOCK_D, SLOTS, RBF, BIAS, EDGE_IDS, VALID,
    )  # fmt: skip
    b_kth = tl.zeros([ROWS], tl.int64)  # the largest number that top_k ranks reach or exceed
    for i_bit in range(32):
        b_try = b_kth + (tl.full([ROWS], 0x80000000, tl.int64) >> i_bit)
        b_reach = tl.sum((b_held >= b_try[:, None]).to(tl.int32), axis=1)
        for i_slot in range(SLOTS, i_most, SLOTS):
            b_rank, _, _ = load_ranks(
                b_query, i_scale, p_key, p_bias, p_valid_source, p_others, p_edge_ids, b_first,
                b_count, i_slot, H, i_h, stride_kn, D, BLOCK_D, SLOTS, RBF, BIAS, EDGE_IDS, VALID,
            )  # fmt: skip
            b_reach += tl.sum((b_rank >= b_try[:, None]).to(tl.int32), axis=1)
        b_kth = tl.where(b_reach >= top_k, b_try, b_kth)

    b_more = tl.sum((b_held > b_kth[:, None]).to(tl.int32), axis=1)
    for i_slot in range(SLOTS, i_most, SLOTS):
        b_rank, _, _ = load_ranks(
            b_query, i_scale, p_key, p_bias, p_valid_source, p_others, p_edge_ids, b_first,
            b_count, i_slot, H, i_h, stride_kn, D, BLOCK_D, SLOTS, RBF, BIAS, EDGE_IDS, VALID,
        )  # fmt: skip
        b_more += tl.sum((b_rank > b_kth[:, None]).to(tl.int32), axis=1)
    b_left = top_k - b_more  # [ROWS]: how many of those that equal the k-th are kept
    for i_slot in range(0, i_most, SLOTS):
        b_rank, m_edge, b_edge = load_ranks(
            b_query, i_scale, p_key, p_bias, p_valid_source, p_others, p_edge_ids, b_first,
            b_count, i_slot, H, i_h, stride_kn, D, BLOCK_D, SLOTS, RBF, BIAS, EDGE_IDS, VALID,
        )  # fmt: skip
        b_equal = (b_rank == b_kth[:, None]).to(tl.int32)
        m_first = (b_equal > 0) & (tl.cumsum(b_equal, axis=1) <= b_left[:, None])
        m_kept = (b_rank > b_kth[:, None]) | m_first
        tl.store(p_chosen + (i_b * E + b_edge) * H + i_h, m_kept.to(tl.uint8), mask=m_edge)
        b_left -= tl.sum(b_equal, axis=1)


def select(inputs: EdgeInputs, top_k: int) -> Tensor:
    """Uint8 [B, E, H]: 1 for the `top_k` edges of every target and head with the largest logits.

    Of equal logits, those of the smaller sources are chosen. Edges of invalid tokens are not
    chosen. A target with at most `top_k` edges keeps them all.
    """
    x, rows = inputs, inputs.schedule.by_target
    B, H = x.query.shape[0], x.query.shape[2]
    chosen = torch.zeros((B, x.num_edges, H), dtype=torch.uint8, device=x.query.device)
    rows = rows._replace(segments=rows.whole)
    choice = tuning.choose_for_edges("edges_select", x.width, rows.mean_degree)
    launch_over(
        edges_select_kernel,
        choice,
        x,
        rows,
        H,
        per_edge=True,
        fp_fusion=False,
        p_chosen=chosen,
        top_k=top_k,
    )
    return chosen

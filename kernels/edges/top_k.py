"""Top-k within rows of edges: of every target, the edges with the largest logits are kept.

The k-th largest logit of a row is found by halving an interval
(:mod:`graphattn.kernels.shared.ordered_integers`). Of edges that equal it, the first are kept,
which are those with the smaller sources. The result is a mask that forward and backward read. They
do not choose themselves, because they may add features in another order, and would then choose
differently near a tie.

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
    segments_of_program,
    without_invalid,
)
from graphattn.kernels.shared import tuning
from graphattn.kernels.shared.layout import entry_of, load_rows, pointer_to
from graphattn.kernels.shared.ordered_integers import (
    LARGEST,
    NO_EDGE,
    counted,
    is_open,
    kept_of,
    middle,
    narrowed,
    rank_of,
    widened,
)


@triton.jit
def load_ranks(
    b_query, i_scale, p_key, stride_kn, p_bias, p_valid, edges, b_first, b_count, i_slot, heads,
    i_h, D: tl.constexpr, SLOTS: tl.constexpr, RBF: tl.constexpr,
):  # fmt: skip
    """Ranks of the next SLOTS edges of every row: their logits as integers in the same order.

    NaN has the largest rank, as in torch.topk; NO_EDGE is the smallest. Returns the ranks, the mask
    of edges and the numbers of edges, [ROWS, SLOTS] each.
    """
    # [ROWS, SLOTS]
    b_source, m_edge, b_edge = load_edges(
        edges, p_valid, None, b_first, b_count, i_slot, heads, i_h, SLOTS
    )
    b_affinity, _ = gather_affinities(b_query, p_key, b_source, m_edge, stride_kn, D, RBF)
    b_logit = b_affinity * i_scale
    if p_bias is not None:
        b_logit += load_bias(p_bias, b_edge, m_edge, heads, i_h)
    return tl.where(m_edge, rank_of(b_logit), NO_EDGE), m_edge, b_edge


@triton.jit(do_not_specialize=["N", "M", "E", "H", "num_segments", "num_parts", "top_k"])
def edges_select_kernel(
    query, key, value, p_chosen, p_scale, p_bias, p_kept, valid, edges,
    N, M, E, H, num_segments, num_parts, top_k,
    REPEATS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr,
    SLOTS: tl.constexpr, RBF: tl.constexpr, OWN_BIAS: tl.constexpr,
):  # fmt: skip
    """chosen [B, E, H]: 1 for the `top_k` edges of every row with the largest logits.

    The ranks of the first SLOTS edges of a row are held in registers. If a row has more, their keys
    are gathered again for every try.
    """
    i_b, i_h, b_row, b_first, b_count, _ = segments_of_program(
        edges.p_segments, num_segments, H, ROWS
    )
    b_count = without_invalid(b_count, b_row, entry_of(valid.p_target, i_b, N))
    p_valid = entry_of(valid.p_source, i_b, M)
    if OWN_BIAS:
        p_bias = entry_of(p_bias, i_b * E, H)
    p_key = pointer_to(key, i_b * M, i_h // REPEATS)
    # [ROWS, BLOCK_D]
    b_query = load_rows(pointer_to(query, i_b * N, i_h), b_row, b_row >= 0, query.stride_n, D)
    i_scale = tl.load(p_scale + i_h)
    i_most = tl.max(b_count, axis=0)

    # [ROWS, SLOTS]
    b_held, _, _ = load_ranks(
        b_query, i_scale, p_key, key.stride_n, p_bias, p_valid, edges, b_first, b_count, 0, H, i_h,
        D, SLOTS, RBF,
    )  # fmt: skip
    # [ROWS]
    b_low, b_high = tl.full([ROWS], LARGEST, tl.int32), tl.full([ROWS], NO_EDGE, tl.int32)
    b_of_low, b_of_high = tl.zeros([ROWS], tl.int32), tl.zeros([ROWS], tl.int32)
    b_low, b_high, b_of_low = widened(b_low, b_high, b_of_low, b_held)
    for i_slot in range(SLOTS, i_most, SLOTS):
        b_rank, _, _ = load_ranks(
            b_query, i_scale, p_key, key.stride_n, p_bias, p_valid, edges, b_first, b_count,
            i_slot, H, i_h, D, SLOTS, RBF,
        )  # fmt: skip
        b_low, b_high, b_of_low = widened(b_low, b_high, b_of_low, b_rank)
    while is_open(b_low, b_high, b_of_low, top_k):
        b_try = middle(b_low, b_high)
        b_reach = counted(b_held >= b_try[:, None])
        for i_slot in range(SLOTS, i_most, SLOTS):
            b_rank, _, _ = load_ranks(
                b_query, i_scale, p_key, key.stride_n, p_bias, p_valid, edges, b_first, b_count,
                i_slot, H, i_h, D, SLOTS, RBF,
            )  # fmt: skip
            b_reach += counted(b_rank >= b_try[:, None])
        b_low, b_high, b_of_low, b_of_high = narrowed(
            b_low, b_high, b_of_low, b_of_high, b_try, b_reach, top_k
        )
    b_left = top_k - b_of_high
    for i_slot in range(0, i_most, SLOTS):
        b_rank, m_edge, b_edge = load_ranks(
            b_query, i_scale, p_key, key.stride_n, p_bias, p_valid, edges, b_first, b_count,
            i_slot, H, i_h, D, SLOTS, RBF,
        )  # fmt: skip
        m_kept, b_left = kept_of(b_rank, b_low, b_left)
        tl.store(p_chosen + (i_b * E + b_edge) * H + i_h, m_kept.to(tl.uint8), mask=m_edge)


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

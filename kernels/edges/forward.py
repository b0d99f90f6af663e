"""Attention over any edges, forward: target i averages the sources that its row of edges names.

One program takes a few rows of one head, gathers the keys and values at the other ends of their
edges, and keeps a running maximum (online softmax; Milakov and Gimelshein 2018). There is no matrix
product: two targets rarely see the same sources, so a gathered key is used for one row only. RBF
logits are computed from differences q - k, and so do not lose digits if all tokens share an offset.

Rows with more than `schedule.LONGEST_SEGMENT` edges (a class token, hubs) are split. Each part
gives an average of its own. A second kernel merges these by their log-sums, always in one order.

The constants of the kernel (REPEATS, RBF, SLOTS, ...) are explained at
:meth:`graphattn.kernels.edges.inputs.EdgeInputs.common`, and the beginnings of names (``b_`` for
tiles, ``p_`` for pointers, ...) in :mod:`graphattn.kernels`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphattn.kernels.edges.inputs import EdgeInputs, launch_over
from graphattn.kernels.edges.math import (
    gather,
    gather_affinities,
    load_bias,
    load_edges,
    segments_of_program,
    without_invalid,
)
from graphattn.kernels.edges.split_rows import (
    Averages,
    launch_over_split,
    merge_averages_kernel,
    new_parts,
)
from graphattn.kernels.shared import tuning
from graphattn.kernels.shared.exponentials import LN2, LOG2E, level_of
from graphattn.kernels.shared.layout import entry_of, load_rows, pointer_to, store_rows


@triton.jit(do_not_specialize=["N", "M", "E", "H", "num_segments", "num_parts"])
def edges_forward_kernel(
    query, key, value, p_out, p_lse, p_saved, part, start, p_scale, p_bias, p_kept, valid, edges,
    N, M, E, H, num_segments, num_parts,
    REPEATS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr,
    SLOTS: tl.constexpr, RBF: tl.constexpr, OWN_BIAS: tl.constexpr,
):  # fmt: skip
    """Output [B, N, H, DV], log-sums [B, H, N], and base-2 log-sums for the backward.

    `part`: outputs [B, parts, H, DV] and base-2 log-sums [B, parts, H] of the parts of split rows;
    None if no row is split. `start`: outputs and log-sums over other edges of the same rows, to
    which the edges here are added; None if there are none.
    """
    BLOCK_DV: tl.constexpr = triton.next_power_of_2(DV)
    i_b, i_h, b_row, b_first, b_count, b_part = segments_of_program(
        edges.p_segments, num_segments, H, ROWS
    )
    m_row = b_row >= 0
    b_count = without_invalid(b_count, b_row, entry_of(valid.p_target, i_b, N))
    p_valid = entry_of(valid.p_source, i_b, M)
    p_kept = entry_of(p_kept, i_b * E, H)
    if OWN_BIAS:
        p_bias = entry_of(p_bias, i_b * E, H)
    p_key = pointer_to(key, i_b * M, i_h // REPEATS)
    p_value = pointer_to(value, i_b * M, i_h // REPEATS)
    # [ROWS, BLOCK_D]
    b_query = load_rows(pointer_to(query, i_b * N, i_h), b_row, m_row, query.stride_n, D)
    i_scale = tl.load(p_scale + i_h) * LOG2E
    o_number = (i_b * H + i_h) * N + b_row
    m_whole = m_row & (b_part < 0)  # rows that are not split

    b_out = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    b_sum = tl.zeros([ROWS], tl.float32)
    b_max = tl.full([ROWS], float("-inf"), tl.float32)
    if start is not None:
        b_max = tl.load(start.p_lse + o_number, mask=m_whole, other=float("-inf")) * LOG2E
        b_sum = tl.where(b_max == float("-inf"), 0.0, 1.0)
        p_start = start.p_out + (i_b * N * H + i_h) * DV
        b_out = load_rows(p_start, b_row, m_whole, H * DV, DV)
    for i_slot in range(0, tl.max(b_count, axis=0), SLOTS):
        # [ROWS, SLOTS]
        b_source, m_edge, b_edge = load_edges(
            edges, p_valid, p_kept, b_first, b_count, i_slot, H, i_h, SLOTS
        )
        b_affinity, _ = gather_affinities(b_query, p_key, b_source, m_edge, key.stride_n, D, RBF)
        b_logit = b_affinity * i_scale
        if p_bias is not None:
            b_logit += load_bias(p_bias, b_edge, m_edge, H, i_h) * LOG2E
        b_logit = tl.where(m_edge, b_logit, float("-inf"))
        # [ROWS]
        b_larger = tl.maximum(b_max, tl.max(b_logit, axis=1))
        b_level = level_of(b_larger)
        # [ROWS, SLOTS]
        b_weight = tl.exp2(b_logit - b_level[:, None])
        # [ROWS]: what multiplies the sums so far, because they get a new maximum
        b_fade = tl.exp2(b_max - b_level)
        b_sum = b_sum * b_fade + tl.sum(b_weight, axis=1)
        # [ROWS, SLOTS, BLOCK_DV]
        b_value = gather(p_value, b_source, m_edge, value.stride_n, DV)
        # [ROWS, BLOCK_DV]
        b_out = b_out * b_fade[:, None] + tl.sum(b_weight[:, :, None] * b_value, axis=1)
        b_max = b_larger

    m_empty = b_sum == 0
    b_lse = tl.where(m_empty, float("-inf"), b_max + tl.log2(b_sum))
    b_out = tl.where(m_empty[:, None], 0.0, b_out / tl.where(m_empty, 1.0, b_sum)[:, None])
    p_out += (i_b * N * H + i_h) * DV
    store_rows(p_out, b_out, b_row, m_whole, H * DV, DV)
    tl.store(p_lse + o_number, b_lse * LN2, mask=m_whole)
    # The backward subtracts these from logits: +inf leaves an empty row no weight.
    tl.store(p_saved + o_number, tl.where(m_empty, float("inf"), b_lse), mask=m_whole)
    if part is not None:
        m_part = m_row & (b_part >= 0)
        p_part = part.p_out + (i_b * num_parts * H + i_h) * DV
        store_rows(p_part, b_out, b_part, m_part, H * DV, DV)
        tl.store(part.p_lse + (i_b * num_parts + b_part) * H + i_h, b_lse, mask=m_part)


def forward(
    inputs: EdgeInputs, start: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Output [B, N, H, Dv], log-sums [B, H, N], and base-2 log-sums for the backward [B, H, N].

    `start`: output [B, N, H, Dv] and log-sums [B, H, N] of the same targets over other edges, to
    which the edges here are added; None: there are no others.
    """
    x = inputs
    B, N, H, _ = x.query.shape
    DV = x.value.shape[-1]
    out = x.query.new_empty(B, N, H, DV)
    lse = x.query.new_empty((B, H, N), dtype=torch.float32)
    saved = torch.empty_like(lse)
    rows = x.schedule.by_target
    part_out, part_lse = new_parts(rows, lse, B, H, DV), new_parts(rows, lse, B, H)
    tensors: dict[str, Any] = {
        "part": None if part_out is None or part_lse is None else Averages(part_out, part_lse),
        "start": None if start is None else Averages(*start),
        "p_out": out,
        "p_lse": lse,
        "p_saved": saved,
    }
    choice = tuning.choose_for_edges("edges_forward", x.width, rows.mean_degree)
    launch_over(edges_forward_kernel, choice, x, rows, H, **tensors)
    launch_over_split(merge_averages_kernel, rows, out, **tensors)
    return out, lse, saved

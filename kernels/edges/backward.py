"""Gradients of attention over any edges: weights are computed again from logits and log-sums.

With P the weights and delta_i = out_i . d_out_i - d_lse_i, the logits' gradients are
ds_ij = P_ij (d_out_i . v_j - delta_i). One kernel goes over the edges of every target and computes
d_query, and ds itself if edges have biases. Another goes over the edges of every source (the rows
of the transposed graph) and computes d_key and d_value. There are no atomics: the sums of the parts
of a split row are added up in order. This is the backward of FlashAttention-2 (Dao 2023), edge by
edge.

Names and constants are explained where :mod:`graphattn.kernels.edges.forward` says.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphattn.kernels.edges.inputs import EdgeInputs, launch_over, num_groups
from graphattn.kernels.edges.math import (
    gather,
    gather_affinities,
    load_bias,
    load_edges,
    segments_of_program,
    without_invalid,
)
from graphattn.kernels.edges.split_rows import add_parts_kernel, launch_over_split, new_parts
from graphattn.kernels.shared import tuning
from graphattn.kernels.shared.exponentials import LOG2E, weights_from
from graphattn.kernels.shared.launch import Heads
from graphattn.kernels.shared.layout import (
    entry_of,
    load_rows,
    pointer_to,
    side_by_side,
    store_rows,
)
from graphattn.kernels.shared.row_dots import row_dots


@triton.jit(do_not_specialize=["N", "M", "E", "H", "num_segments", "num_parts"])
def edges_d_query_kernel(
    query, key, value, d_out, p_saved, p_delta, p_d_query, p_part, p_d_scale, p_d_bias, p_scale,
    p_bias, p_kept, valid, edges, N, M, E, H, num_segments, num_parts,
    REPEATS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr,
    SLOTS: tl.constexpr, RBF: tl.constexpr, OWN_BIAS: tl.constexpr,
):  # fmt: skip
    """d_query [B, N, H, D] and the sums of parts of split rows [B, parts, H, D]; d_bias [B, E, H],
    and every program's share of d_scale [B, groups, H]. All but d_query may be None."""
    BLOCK_D: tl.constexpr = triton.next_power_of_2(D)
    i_b, i_h, b_row, b_first, b_count, b_part = segments_of_program(
        edges.p_segments, num_segments, H, ROWS
    )
    m_row = b_row >= 0
    b_count = without_invalid(b_count, b_row, entry_of(valid.p_target, i_b, N))
    p_valid = entry_of(valid.p_source, i_b, M)
    p_kept = entry_of(p_kept, i_b * E, H)
    p_key = pointer_to(key, i_b * M, i_h // REPEATS)
    p_value = pointer_to(value, i_b * M, i_h // REPEATS)
    if OWN_BIAS:
        p_bias = entry_of(p_bias, i_b * E, H)
    # [ROWS, BLOCK_D]
    b_query = load_rows(pointer_to(query, i_b * N, i_h), b_row, m_row, query.stride_n, D)
    # [ROWS]
    o_number = (i_b * H + i_h) * N + b_row
    b_saved = tl.load(p_saved + o_number, mask=m_row, other=float("inf"))
    m_row_alive = m_row & (b_saved != float("inf"))  # for rows without edges nothing is read
    b_delta = tl.load(p_delta + o_number, mask=m_row_alive, other=0.0)
    # [ROWS, BLOCK_DV]
    p_d_out = pointer_to(d_out, i_b * N, i_h)
    b_d_out = load_rows(p_d_out, b_row, m_row_alive, d_out.stride_n, DV)
    i_scale = tl.load(p_scale + i_h)

    b_d_query = tl.zeros([ROWS, BLOCK_D], tl.float32)
    b_d_scale = tl.zeros([ROWS], tl.float32)
    for i_slot in range(0, tl.max(b_count, axis=0), SLOTS):
        # [ROWS, SLOTS]
        b_source, m_edge, b_edge = load_edges(
            edges, p_valid, p_kept, b_first, b_count, i_slot, H, i_h, SLOTS
        )
        # [ROWS, SLOTS], and [ROWS, SLOTS, BLOCK_D]
        b_affinity, b_pull = gather_affinities(
            b_query, p_key, b_source, m_edge, key.stride_n, D, RBF
        )
        b_logit = b_affinity * (i_scale * LOG2E) - b_saved[:, None]
        if p_bias is not None:
            b_logit += load_bias(p_bias, b_edge, m_edge, H, i_h) * LOG2E
        b_weight = weights_from(b_logit)
        # [ROWS, SLOTS, BLOCK_DV]
        b_value = gather(p_value, b_source, m_edge, value.stride_n, DV)
        # [ROWS, SLOTS]
        b_d_weight = tl.sum(b_value * b_d_out[:, None, :], axis=2)
        b_d_logit = tl.where(m_edge, b_weight * (b_d_weight - b_delta[:, None]), 0.0)
        if p_d_bias is not None:
            tl.store(p_d_bias + (i_b * E + b_edge) * H + i_h, b_d_logit, mask=m_edge)
        if p_d_scale is not None:
            b_d_scale += tl.sum(tl.where(m_edge, b_d_logit * b_affinity, 0.0), axis=1)
        b_pull = tl.where(m_edge[:, :, None], b_pull, 0.0)
        # [ROWS, BLOCK_D]
        b_d_query += tl.sum(b_d_logit[:, :, None] * b_pull, axis=1)

    b_d_query = b_d_query * i_scale
    p_d_query += (i_b * N * H + i_h) * D
    store_rows(p_d_query, b_d_query, b_row, m_row & (b_part < 0), H * D, D)
    if p_part is not None:
        p_part += (i_b * num_parts * H + i_h) * D
        store_rows(p_part, b_d_query, b_part, m_row & (b_part >= 0), H * D, D)
    if p_d_scale is not None:  # in the order of programs
        tl.store(p_d_scale + tl.program_id(0), tl.sum(b_d_scale, axis=0))


@triton.jit(do_not_specialize=["N", "M", "E", "H", "num_segments", "num_parts"])
def edges_d_source_kernel(
    query, key, value, d_out, p_saved, p_delta, p_d_key, p_d_value, p_part_key, p_part_value,
    p_scale, p_bias, p_kept, valid, edges, N, M, E, H, num_segments, num_parts,
    REPEATS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr,
    SLOTS: tl.constexpr, RBF: tl.constexpr, OWN_BIAS: tl.constexpr,
):  # fmt: skip
    """d_key [B, M, Hk, D] and d_value [B, M, Hk, DV], summed over the query heads of a key head;
    and the sums of parts of split rows, [B, parts, Hk, D] and [B, parts, Hk, DV] in float32, or
    None."""
    BLOCK_D: tl.constexpr = triton.next_power_of_2(D)
    BLOCK_DV: tl.constexpr = triton.next_power_of_2(DV)
    Hk = H // REPEATS
    i_b, i_key_head, b_row, b_first, b_count, b_part = segments_of_program(
        edges.p_segments, num_segments, Hk, ROWS
    )
    m_row = b_row >= 0
    b_count = without_invalid(b_count, b_row, entry_of(valid.p_source, i_b, M))
    p_valid = entry_of(valid.p_target, i_b, N)
    p_kept = entry_of(p_kept, i_b * E, H)
    if OWN_BIAS:
        p_bias = entry_of(p_bias, i_b * E, H)
    # [ROWS, BLOCK_D] and [ROWS, BLOCK_DV]
    m_seen = m_row & (b_count > 0)  # sources that no target sees are not read
    b_key = load_rows(pointer_to(key, i_b * M, i_key_head), b_row, m_seen, key.stride_n, D)
    b_value = load_rows(pointer_to(value, i_b * M, i_key_head), b_row, m_seen, value.stride_n, DV)

    b_d_key = tl.zeros([ROWS, BLOCK_D], tl.float32)
    b_d_value = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    for i_repeat in range(REPEATS):
        i_h = i_key_head * REPEATS + i_repeat
        i_scale = tl.load(p_scale + i_h)
        p_query, p_d_out = pointer_to(query, i_b * N, i_h), pointer_to(d_out, i_b * N, i_h)
        i_numbers = (i_b * H + i_h) * N
        for i_slot in range(0, tl.max(b_count, axis=0), SLOTS):
            # [ROWS, SLOTS]
            b_target, m_edge, b_edge = load_edges(
                edges, p_valid, p_kept, b_first, b_count, i_slot, H, i_h, SLOTS
            )
            o_number = i_numbers + b_target
            b_saved = tl.load(p_saved + o_number, mask=m_edge, other=float("inf"))
            m_edge = m_edge & (b_saved != float("inf"))
            b_delta = tl.load(p_delta + o_number, mask=m_edge, other=0.0)
            # [ROWS, SLOTS], and [ROWS, SLOTS, BLOCK_D]
            b_affinity, b_pull = gather_affinities(
                b_key, p_query, b_target, m_edge, query.stride_n, D, RBF
            )
            b_logit = b_affinity * (i_scale * LOG2E) - b_saved
            if p_bias is not None:
                b_logit += load_bias(p_bias, b_edge, m_edge, H, i_h) * LOG2E
            b_weight = tl.where(m_edge, weights_from(b_logit), 0.0)
            # [ROWS, SLOTS, BLOCK_DV]
            b_d_out = gather(p_d_out, b_target, m_edge, d_out.stride_n, DV)
            # [ROWS, SLOTS]
            b_d_weight = tl.sum(b_d_out * b_value[:, None, :], axis=2)
            b_d_logit = tl.where(m_edge, b_weight * (b_d_weight - b_delta) * i_scale, 0.0)
            # [ROWS, BLOCK_DV] and [ROWS, BLOCK_D]
            b_d_value += tl.sum(b_weight[:, :, None] * b_d_out, axis=1)
            b_pull = tl.where(m_edge[:, :, None], b_pull, 0.0)
            b_d_key += tl.sum(b_d_logit[:, :, None] * b_pull, axis=1)

    m_whole = m_row & (b_part < 0)
    p_d_key += (i_b * M * Hk + i_key_head) * D
    p_d_value += (i_b * M * Hk + i_key_head) * DV
    store_rows(p_d_key, b_d_key, b_row, m_whole, Hk * D, D)
    store_rows(p_d_value, b_d_value, b_row, m_whole, Hk * DV, DV)
    if p_part_key is not None:
        m_part = m_row & (b_part >= 0)
        p_part_key += (i_b * num_parts * Hk + i_key_head) * D
        p_part_value += (i_b * num_parts * Hk + i_key_head) * DV
        store_rows(p_part_key, b_d_key, b_part, m_part, Hk * D, D)
        store_rows(p_part_value, b_d_value, b_part, m_part, Hk * DV, DV)


def backward(
    inputs: EdgeInputs,
    out: Tensor,
    saved: Tensor,
    d_out: Tensor,
    d_lse: Tensor | None,
    *,
    scale_gradient: bool,
    bias_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of query, key, value, scale [H] and bias; the last two None if not asked for.

    `out` and `d_out` are [B, N, H, Dv], `saved` [B, H, N], `d_lse` [B, N, H]. `out` and `saved` are
    from the forward. Where these edges are only some of a graph, `out` is the average over all of
    them, and `saved` are the base-2 log-sums over all of them (+inf for empty rows).
    """
    x = inputs
    B, _, H, D = x.query.shape
    Hk, DV = x.value.shape[-2:]
    d_out = side_by_side(d_out)
    upstream: dict[str, Any] = {
        "p_saved": saved,
        "p_delta": row_dots(out, d_out, 1.0, d_lse),
        "d_out": Heads.of(d_out),
    }
    rows = x.schedule.by_target
    choice = tuning.choose_for_edges("edges_d_query", x.width, rows.mean_degree)
    d_query = torch.empty_like(x.query, memory_format=torch.contiguous_format)
    part = new_parts(rows, saved, B, H, D)
    d_scale = saved.new_empty(B, num_groups(choice, rows), H) if scale_gradient else None
    d_bias = None
    if bias_gradient:
        assert x.bias is not None
        d_bias = saved.new_zeros(B, *x.bias.shape[-2:])
    launch_over(
        edges_d_query_kernel,
        choice,
        x,
        rows,
        H,
        **upstream,
        p_d_query=d_query,
        p_part=part,
        p_d_scale=d_scale,
        p_d_bias=d_bias,
        max_registers=tuning.most_registers(choice, D, DV) if scale_gradient else None,
    )
    launch_over_split(add_parts_kernel, rows, d_query, p_part=part, p_sum=d_query)

    rows = x.schedule.by_source
    choice = tuning.choose_for_edges("edges_d_source", x.width, rows.mean_degree)
    d_key = torch.empty_like(x.key, memory_format=torch.contiguous_format)
    d_value = torch.empty_like(x.value, memory_format=torch.contiguous_format)
    part_key, part_value = new_parts(rows, saved, B, Hk, D), new_parts(rows, saved, B, Hk, DV)
    launch_over(
        edges_d_source_kernel,
        choice,
        x,
        rows,
        Hk,
        **upstream,
        p_d_key=d_key,
        p_d_value=d_value,
        p_part_key=part_key,
        p_part_value=part_value,
    )
    launch_over_split(add_parts_kernel, rows, d_key, p_part=part_key, p_sum=d_key)
    launch_over_split(add_parts_kernel, rows, d_value, p_part=part_value, p_sum=d_value)
    if d_bias is not None and x.bias is not None and x.bias.dim() == 2:
        d_bias = d_bias[0] if B == 1 else d_bias.sum(0)
    return d_query, d_key, d_value, None if d_scale is None else d_scale.sum((0, 1)), d_bias

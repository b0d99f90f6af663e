"""Gradients of attention over bands: weights are computed again from logits and log-sums.

With P the weights and delta_i = out_i . d_out_i - d_lse_i, the logits' gradients are
ds_ij = P_ij (d_out_i . v_j - delta_i). One kernel goes over the sources of a tile of targets and
computes d_query. Another goes over the targets of a tile of sources and computes d_key and d_value.
Together they need seven matrix products where one kernel would need five. But each sum is formed by
one program, without atomics, so two runs agree bit for bit.

For RBF, d_query_i = scale sum_j ds_ij (k_j - q_i). The matrix product gives the sum of ds_ij k_j,
for which ds is rounded to the dtype of the keys. (sum_j ds_ij) q_i is subtracted at the end. Its
sum, `b_pulled`, is that of the rounded ds, so that rounding errors cancel where k_j = q_i.

Names and constants are explained where :mod:`graphattn.kernels.bands.forward` says.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphattn.kernels.bands.inputs import BandInputs
from graphattn.kernels.bands.math import (
    NOWHERE,
    around_center,
    cleaned,
    edges_to,
    half_square,
    is_edge,
    is_kept,
    load_affinities,
    load_bias,
    load_center,
    load_sequence,
    load_tile,
    own_tile,
    part_borders,
    poisoned,
    row_pointers,
    store_tile,
)
from graphattn.kernels.shared import tuning
from graphattn.kernels.shared.exponentials import LOG2E, weights_from
from graphattn.kernels.shared.launch import launch
from graphattn.kernels.shared.layout import side_by_side
from graphattn.kernels.shared.precision import add_product, product
from graphattn.kernels.shared.row_dots import row_dots


@triton.jit
def d_query_tile(
    b_d_query, b_pulled, b_d_scale, b_query, b_d_out, b_saved, b_delta, b_center, i_scale,
    p_key, p_value, p_half_square, p_table, p_kept, p_valid, i_row, i_column, i_h, H, i_origin,
    i_step, stride_kn, stride_vn, n_targets, n_sources, n_before, n_after, n_words, i_hole,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RBF: tl.constexpr, CENTERED: tl.constexpr,
    SQUARES_STORED: tl.constexpr, TABLE: tl.constexpr, KEPT: tl.constexpr, VALID: tl.constexpr,
    HOLES: tl.constexpr, STRIDED: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    SCALE_GRADIENT: tl.constexpr,
):  # fmt: skip
    """Adds the share of the sources i_column, i_column + 1, ... in the gradients of a tile.

    The tile has ROWS targets: b_d_query is [ROWS, BLOCK_D], b_pulled and b_d_scale are [ROWS].
    """
    # [COLUMNS, BLOCK_D] and [ROWS, COLUMNS]
    b_key, b_affinity = load_affinities(
        b_query, b_center, p_key, p_half_square, i_column, i_step, stride_kn, n_sources,
        D, BLOCK_D, COLUMNS, RBF, CENTERED, SQUARES_STORED, STRIDED, MASKED, PRECISION,
    )  # fmt: skip
    o_column = i_column + tl.arange(0, COLUMNS)
    # [ROWS, COLUMNS], here and below: base-2 logits, minus their row's log-sum
    b_logit = b_affinity * (i_scale * LOG2E) - b_saved[:, None]
    o_row = i_row + tl.arange(0, ROWS)
    if MASKED:
        m_edge = edges_to(
            o_row, i_column, i_step, n_sources, n_before, n_after, i_hole, p_valid,
            COLUMNS, VALID, HOLES, STRIDED,
        )  # fmt: skip
        if KEPT:
            m_edge = m_edge & is_kept(
                p_kept, o_row, i_column, i_step, n_targets, n_before, n_words, COLUMNS, 0
            )
    if TABLE:
        m_pair = m_edge if MASKED else (o_row < n_targets)[:, None]
        o_hop = o_column[None, :] - o_row[:, None]
        b_bias = load_bias(p_table, o_hop, m_pair, i_origin, H, i_h)
        b_logit += b_bias * LOG2E
    if MASKED:
        b_logit = tl.where(m_edge, b_logit, float("-inf"))
    b_weight = weights_from(b_logit)
    # [COLUMNS, BLOCK_DV]
    b_value = load_tile(
        p_value, i_column, i_step, stride_vn, n_sources, DV, COLUMNS, BLOCK_DV, STRIDED, MASKED
    )
    # [ROWS, COLUMNS]
    b_d_weight = product(b_d_out, tl.trans(b_value), PRECISION)
    b_d_logit = b_weight * (b_d_weight - b_delta[:, None])
    if MASKED:
        b_d_logit = tl.where(b_logit == float("-inf"), 0.0, b_d_logit)
        if SCALE_GRADIENT:
            b_affinity = tl.where(b_logit == float("-inf"), 0.0, b_affinity)
        b_key, _ = cleaned(b_key)
    b_rounded = b_d_logit.to(b_key.dtype)
    # [ROWS, BLOCK_D]
    b_d_query = add_product(b_d_query, b_rounded, b_key, PRECISION)
    b_wide = b_rounded.to(tl.float32)
    # [ROWS]
    if RBF:
        b_pulled += tl.sum(b_wide, axis=1)
    if SCALE_GRADIENT:
        b_d_scale += tl.sum(b_wide * b_affinity, axis=1)
    return b_d_query, b_pulled, b_d_scale


@triton.jit(do_not_specialize=["N", "M", "H", "num_tiles", "origin", "num_words"])
def d_query_kernel(
    p_query, p_key, p_value, p_saved, p_delta, p_d_out, p_d_query, p_d_scale, p_scale,
    p_half_square, p_center, p_table, p_kept, p_valid_target, p_valid_source, p_tiles, p_sequences,
    N, M, H, num_tiles, origin, num_words, stride_qn, stride_qh, stride_kn, stride_kh, stride_vn,
    stride_vh, stride_on, stride_oh,
    REPEATS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    RBF: tl.constexpr, CENTERED: tl.constexpr, SQUARES_STORED: tl.constexpr, TABLE: tl.constexpr,
    KEPT: tl.constexpr, VALID: tl.constexpr, VALID_TARGET: tl.constexpr, HOLES: tl.constexpr,
    STRIDED: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
    SCALE_GRADIENT: tl.constexpr,
):  # fmt: skip
    """d_query [B, N, H, D], and if SCALE_GRADIENT every tile's share of d_scale [B, tiles, H]."""
    i_b, i_h, i_tile, i_row, p_row = own_tile(p_tiles, p_sequences, num_tiles, H)
    (
        i_first_target, n_targets, i_first_source, n_sources, i_step, n_before, n_after, i_hole,
    ) = load_sequence(p_row)  # fmt: skip
    i_key_head = i_h // REPEATS
    p_query += (i_b * N + i_first_target) * stride_qn + i_h.to(tl.int64) * stride_qh
    p_d_out += (i_b * N + i_first_target) * stride_on + i_h.to(tl.int64) * stride_oh
    p_key += (i_b * M + i_first_source) * stride_kn + i_key_head.to(tl.int64) * stride_kh
    p_value += (i_b * M + i_first_source) * stride_vn + i_key_head.to(tl.int64) * stride_vh
    p_half_square += (i_b * (H // REPEATS) + i_key_head) * M + i_first_source
    p_valid_source += i_b * M + i_first_source
    if KEPT:
        p_kept += ((i_b * H + i_h) * N + i_first_target) * num_words

    # [ROWS, BLOCK_D] and [ROWS, BLOCK_DV]
    b_query = load_tile(
        p_query, i_row, i_step, stride_qn, n_targets, D, ROWS, BLOCK_D, STRIDED, True
    )
    b_d_out = load_tile(
        p_d_out, i_row, i_step, stride_on, n_targets, DV, ROWS, BLOCK_DV, STRIDED, True
    )
    o_row = i_row + tl.arange(0, ROWS)
    m_row = o_row < n_targets
    # [ROWS]
    o_number = (i_b * H + i_h) * N + i_first_target + o_row * i_step
    b_saved = tl.load(p_saved + o_number, mask=m_row, other=float("inf"))
    b_delta = tl.load(p_delta + o_number, mask=m_row, other=0.0)
    # What comes back to an empty row may be NaN, and 0 * NaN is NaN.
    b_delta = tl.where(b_saved == float("inf"), 0.0, b_delta)
    b_d_out = tl.where((b_saved == float("inf"))[:, None], 0.0, b_d_out).to(b_d_out.dtype)
    i_scale = tl.load(p_scale + i_h)
    i_slot = (i_b * num_tiles + i_tile) * (H // REPEATS) + i_key_head
    b_center = load_center(p_center, i_slot, D, BLOCK_D, CENTERED)
    if CENTERED:
        b_query = b_query - b_center[None, :]
        b_saved = around_center(b_saved, b_query, i_scale)

    b_d_query = tl.zeros([ROWS, BLOCK_D], tl.float32)
    b_pulled = tl.zeros([ROWS], tl.float32)
    b_d_scale = tl.zeros([ROWS], tl.float32)
    # Four places among the sources; part 1, the middle one of three, needs no mask.
    i_borders = part_borders(
        i_row, n_targets, n_sources, n_before, n_after, ROWS, COLUMNS, PARTS, KEPT
    )
    for i_part in tl.static_range(PARTS):
        for i_column in range(i_borders[i_part], i_borders[i_part + 1], COLUMNS):
            b_d_query, b_pulled, b_d_scale = d_query_tile(
                b_d_query, b_pulled, b_d_scale, b_query, b_d_out, b_saved, b_delta, b_center,
                i_scale, p_key, p_value, p_half_square, p_table, p_kept, p_valid_source, i_row,
                i_column, i_h, H, origin, i_step, stride_kn, stride_vn, n_targets, n_sources,
                n_before, n_after, num_words, i_hole, D, DV, BLOCK_D, BLOCK_DV, ROWS, COLUMNS, RBF,
                CENTERED, SQUARES_STORED, TABLE, KEPT, VALID, HOLES, STRIDED, i_part != 1,
                PRECISION, SCALE_GRADIENT,
            )  # fmt: skip

    m_alive = m_row & (b_saved != float("inf"))  # rows with edges
    if RBF:
        b_query = b_query.to(tl.float32)
        b_d_query = b_d_query - b_pulled[:, None] * b_query
        b_d_scale = b_d_scale - b_pulled * 0.5 * tl.sum(b_query * b_query, axis=1)
    b_d_query = tl.where(m_alive[:, None], b_d_query * i_scale, 0.0)
    p_d_query += (i_b * N + i_first_target) * H * D + i_h * D
    store_tile(p_d_query, b_d_query, i_row, i_step, H * D, n_targets, D, ROWS, BLOCK_D)
    if SCALE_GRADIENT:
        i_share = tl.sum(tl.where(m_alive, b_d_scale, 0.0), axis=0)
        tl.store(p_d_scale + (i_b * num_tiles + i_tile) * H + i_h, i_share)


@triton.jit
def d_source_tile(
    b_d_key, b_d_value, b_pulled, b_key, b_value, b_half_square, b_center, i_scale, o_column,
    p_query, p_d_out, p_saved, p_delta, p_table, p_kept, i_row, i_column, i_h, H, i_origin, i_step,
    stride_qn, stride_on, n_targets, n_before, n_after, n_words, i_hole,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RBF: tl.constexpr, CENTERED: tl.constexpr,
    TABLE: tl.constexpr, KEPT: tl.constexpr, HOLES: tl.constexpr, STRIDED: tl.constexpr,
    MASKED: tl.constexpr, REPEATS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the share of the targets i_row, i_row + 1, ... in the gradients of a tile of sources.

    Tiles of pairs are transposed here: COLUMNS sources are their rows, ROWS targets their columns.
    b_d_key is [COLUMNS, BLOCK_D], b_d_value [COLUMNS, BLOCK_DV], b_pulled [COLUMNS].
    """
    # [ROWS, BLOCK_D] and [ROWS, BLOCK_DV]
    b_query = load_tile(
        p_query, i_row, i_step, stride_qn, n_targets, D, ROWS, BLOCK_D, STRIDED, MASKED
    )
    b_d_out = load_tile(
        p_d_out, i_row, i_step, stride_on, n_targets, DV, ROWS, BLOCK_DV, STRIDED, MASKED
    )
    o_row = i_row + tl.arange(0, ROWS)
    m_row = o_row < n_targets
    # [ROWS]
    p_rows = row_pointers(p_saved, i_row, i_step, ROWS, STRIDED)
    b_saved = tl.load(p_rows, mask=m_row, other=float("inf"))
    p_rows = row_pointers(p_delta, i_row, i_step, ROWS, STRIDED)
    b_delta = tl.load(p_rows, mask=m_row, other=0.0)
    if CENTERED:
        b_query = b_query - b_center[None, :]
        b_saved = around_center(b_saved, b_query, i_scale)
    # [COLUMNS, ROWS], here and below
    b_affinity = product(b_key, tl.trans(b_query), PRECISION)
    if RBF:
        b_affinity = b_affinity - b_half_square[:, None]
    b_logit = b_affinity * (i_scale * LOG2E) - b_saved[None, :]
    if MASKED:
        # An empty row, whose saved log-sum is +inf, has no edges, also where it holds NaN.
        o_seen = tl.where(m_row & (b_saved != float("inf")), o_row, -NOWHERE)
        m_edge = is_edge(o_seen[None, :], o_column[:, None], n_before, n_after, i_hole, HOLES)
        if KEPT:
            m_edge = m_edge & is_kept(
                p_kept, o_row, i_column, i_step, n_targets, n_before, n_words, COLUMNS, 1
            )
    if TABLE:
        m_pair = m_edge if MASKED else (o_column < NOWHERE)[:, None]
        o_hop = o_column[:, None] - o_row[None, :]
        b_bias = load_bias(p_table, o_hop, m_pair, i_origin, H, i_h)
        b_logit += b_bias * LOG2E
    if MASKED:
        b_logit = tl.where(m_edge, b_logit, float("-inf"))
    b_weight = weights_from(b_logit)
    b_d_weight = product(b_value, tl.trans(b_d_out), PRECISION)
    b_d_logit = b_weight * (b_d_weight - b_delta[None, :])
    if REPEATS > 1:  # each query head of this key head has its own scale
        b_d_logit = b_d_logit * i_scale
    if MASKED:
        b_query, _ = cleaned(b_query)
        b_d_out, m_bad = cleaned(b_d_out)
        b_weight = poisoned(b_weight, b_logit, m_bad)
        b_d_logit = tl.where(b_logit == float("-inf"), 0.0, b_d_logit)
    # [COLUMNS, BLOCK_DV] and [COLUMNS, BLOCK_D]
    b_d_value = add_product(b_d_value, b_weight.to(b_d_out.dtype), b_d_out, PRECISION)
    b_rounded = b_d_logit.to(b_query.dtype)
    b_d_key = add_product(b_d_key, b_rounded, b_query, PRECISION)
    if RBF:
        # [COLUMNS]
        b_pulled += tl.sum(b_rounded.to(tl.float32), axis=1)
    return b_d_key, b_d_value, b_pulled


@triton.jit(do_not_specialize=["N", "M", "H", "num_tiles", "origin", "num_words"])
def d_source_kernel(
    p_query, p_key, p_value, p_saved, p_delta, p_d_out, p_d_key, p_d_value, p_scale, p_center,
    p_table, p_kept, p_valid_target, p_valid_source, p_tiles, p_sequences,
    N, M, H, num_tiles, origin, num_words,
    stride_qn, stride_qh, stride_kn, stride_kh, stride_vn, stride_vh, stride_on, stride_oh,
    REPEATS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    RBF: tl.constexpr, CENTERED: tl.constexpr, TABLE: tl.constexpr, KEPT: tl.constexpr,
    VALID: tl.constexpr, VALID_TARGET: tl.constexpr, HOLES: tl.constexpr, STRIDED: tl.constexpr,
    PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """d_key [B, M, Hk, D] and d_value [B, M, Hk, DV], summed over the query heads of a key head."""
    Hk = H // REPEATS
    i_b, i_key_head, i_tile, i_column, p_row = own_tile(p_tiles, p_sequences, num_tiles, Hk)
    (
        i_first_target, n_targets, i_first_source, n_sources, i_step, n_before, n_after, i_hole,
    ) = load_sequence(p_row)  # fmt: skip
    p_key += (i_b * M + i_first_source) * stride_kn + i_key_head.to(tl.int64) * stride_kh
    p_value += (i_b * M + i_first_source) * stride_vn + i_key_head.to(tl.int64) * stride_vh
    # [COLUMNS, BLOCK_D] and [COLUMNS, BLOCK_DV]
    b_key = load_tile(
        p_key, i_column, i_step, stride_kn, n_sources, D, COLUMNS, BLOCK_D, STRIDED, True
    )
    b_value = load_tile(
        p_value, i_column, i_step, stride_vn, n_sources, DV, COLUMNS, BLOCK_DV, STRIDED, True
    )
    i_slot = (i_b * num_tiles + i_tile) * Hk + i_key_head
    b_center = load_center(p_center, i_slot, D, BLOCK_D, CENTERED)
    if CENTERED:
        b_key = b_key - b_center[None, :]
    b_half_square = half_square(b_key)
    o_column = i_column + tl.arange(0, COLUMNS)
    m_column = o_column < n_sources
    if VALID:
        p_rows = p_valid_source + i_b * M + i_first_source + o_column * i_step
        m_column = m_column & (tl.load(p_rows, mask=m_column, other=0) != 0)
    o_column = tl.where(m_column, o_column, NOWHERE)

    b_d_key = tl.zeros([COLUMNS, BLOCK_D], tl.float32)
    b_d_value = tl.zeros([COLUMNS, BLOCK_DV], tl.float32)
    b_pulled = tl.zeros([COLUMNS], tl.float32)
    # Four places among the targets; seen from a source, before and after change their places.
    i_borders = part_borders(
        i_column, n_sources, n_targets, n_after, n_before, COLUMNS, ROWS, PARTS
    )
    for i_repeat in range(REPEATS):
        i_h = i_key_head * REPEATS + i_repeat
        i_scale = tl.load(p_scale + i_h)
        p_own_query = p_query + (i_b * N + i_first_target) * stride_qn
        p_own_query += i_h.to(tl.int64) * stride_qh
        p_own_d_out = p_d_out + (i_b * N + i_first_target) * stride_on
        p_own_d_out += i_h.to(tl.int64) * stride_oh
        i_numbers = (i_b * H + i_h) * N + i_first_target
        p_own_kept = p_kept
        if KEPT:
            p_own_kept += i_numbers * num_words
        for i_part in tl.static_range(PARTS):
            for i_row in range(i_borders[i_part], i_borders[i_part + 1], ROWS):
                b_d_key, b_d_value, b_pulled = d_source_tile(
                    b_d_key, b_d_value, b_pulled, b_key, b_value, b_half_square, b_center, i_scale,
                    o_column, p_own_query, p_own_d_out, p_saved + i_numbers, p_delta + i_numbers,
                    p_table, p_own_kept, i_row, i_column, i_h, H, origin, i_step, stride_qn,
                    stride_on, n_targets, n_before, n_after, num_words, i_hole, D, DV, BLOCK_D,
                    BLOCK_DV, ROWS, COLUMNS, RBF, CENTERED, TABLE, KEPT, HOLES, STRIDED,
                    i_part != 1, REPEATS, PRECISION,
                )  # fmt: skip
    if RBF:
        b_d_key = b_d_key - b_pulled[:, None] * b_key.to(tl.float32)
    if REPEATS == 1:
        b_d_key = b_d_key * tl.load(p_scale + i_key_head)
    b_d_key = tl.where(m_column[:, None], b_d_key, 0.0)
    b_d_value = tl.where(m_column[:, None], b_d_value, 0.0)
    p_d_key += (i_b * M + i_first_source) * Hk * D + i_key_head * D
    p_d_value += (i_b * M + i_first_source) * Hk * DV + i_key_head * DV
    store_tile(p_d_key, b_d_key, i_column, i_step, Hk * D, n_sources, D, COLUMNS, BLOCK_D)
    store_tile(p_d_value, b_d_value, i_column, i_step, Hk * DV, n_sources, DV, COLUMNS, BLOCK_DV)


def backward(
    inputs: BandInputs,
    out: Tensor,
    saved: Tensor,
    d_out: Tensor,
    d_lse: Tensor | None,
    *,
    scale_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Gradients of query, key, value and scale [H] (None if not asked for), and delta [B, H, N].

    Args:
        inputs: what the forward was given.
        out: the output of the forward, [B, N, H, Dv].
        saved: its base-2 log-sums, [B, H, N].
        d_out: the gradient of the output, [B, N, H, Dv], in the dtype of the query.
        d_lse: the gradient of the log-sums, [B, N, H]; None: zero.
        scale_gradient: whether the gradient of the scale is wanted.

    The gradient of a table of biases (`bias_backward`) needs delta, too.
    """
    x = inputs
    B, _, H, _ = x.query.shape
    d_out = side_by_side(d_out)
    delta = row_dots(out, d_out, 1.0, d_lse)
    d_query = torch.empty_like(x.query, memory_format=torch.contiguous_format)
    d_key = torch.empty_like(x.key, memory_format=torch.contiguous_format)
    d_value = torch.empty_like(x.value, memory_format=torch.contiguous_format)
    upstream: dict[str, Any] = {
        "p_saved": saved,
        "p_delta": delta,
        "p_d_out": d_out,
        "stride_on": d_out.stride(1),
        "stride_oh": d_out.stride(2),
    }
    choice = tuning.choose("d_query", x.query.dtype, x.width, x.bands.window)
    tiles = x.bands.tiles("targets", choice.rows)
    # With top_k's bits, the kernel has no registers left for pointers to stored half squares.
    stored = x.stores_half_squares(choice.rows) and x.kept is None
    shares = x.scale.new_empty(B, len(tiles), H) if scale_gradient else x.unread
    launch(
        d_query_kernel,
        (B * H * len(tiles),),
        **upstream,
        p_d_query=d_query,
        p_d_scale=shares,
        p_half_square=row_dots(x.key, x.key, 0.5) if stored else x.unread,
        p_center=x.centers("targets", tiles, choice.rows),
        p_tiles=tiles,
        num_tiles=len(tiles),
        SQUARES_STORED=stored,
        ROWS=choice.rows,
        COLUMNS=choice.columns,
        PARTS=x.parts(choice.rows, choice.columns),
        SCALE_GRADIENT=scale_gradient,
        num_warps=choice.num_warps,
        num_stages=choice.num_stages,
        **x.common(),
    )
    choice = tuning.choose("d_source", x.query.dtype, x.width, x.bands.window)
    tiles = x.bands.tiles("sources", choice.columns)
    launch(
        d_source_kernel,
        (B * x.key.shape[2] * len(tiles),),
        **upstream,
        p_d_key=d_key,
        p_d_value=d_value,
        p_center=x.centers("sources", tiles, choice.columns),
        p_tiles=tiles,
        num_tiles=len(tiles),
        ROWS=choice.rows,
        COLUMNS=choice.columns,
        PARTS=x.parts(choice.rows, choice.columns),
        num_warps=choice.num_warps,
        num_stages=choice.num_stages,
        **x.common(),
    )
    return d_query, d_key, d_value, shares.sum((0, 1)) if scale_gradient else None, delta

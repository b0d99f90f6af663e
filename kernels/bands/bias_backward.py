"""Gradient of a table of biases by offset: sums along the diagonals of a band's logit gradients.

A tile's rows are rotated so that every diagonal becomes a column, and columns are summed. Every
program has a row of a buffer of its own, and these rows are added up at the end: no atomics. There
are a few long programs instead of many short ones, because that keeps the buffer small.

Names and constants are explained where :mod:`graphattn.kernels.bands.forward` says.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from graphattn.kernels.bands.inputs import BandInputs
from graphattn.kernels.bands.math import (
    NOWHERE,
    around_center,
    edges_to,
    is_kept,
    load_affinities,
    load_bias,
    load_center,
    load_sequence,
    load_tile,
    part_borders,
)
from graphattn.kernels.shared import tuning
from graphattn.kernels.shared.exponentials import LOG2E, weights_from
from graphattn.kernels.shared.launch import launch
from graphattn.kernels.shared.layout import side_by_side
from graphattn.kernels.shared.precision import product
from graphattn.kernels.shared.programs import head_and_rest

PROGRAMS = 64  # per head: rows of the buffer


@triton.jit(
    do_not_specialize=["N", "M", "H", "num_tiles", "num_offsets", "origin", "num_words", "B"]
)
def d_table_kernel(
    p_query, p_key, p_value, p_saved, p_delta, p_d_out, p_partial, p_scale, p_center,
    p_table, p_kept, p_valid_target, p_valid_source, p_tiles, p_sequences,
    B, N, M, H, num_tiles, num_offsets, origin, num_words,
    stride_qn, stride_qh, stride_kn, stride_kh, stride_vn, stride_vh, stride_on, stride_oh,
    REPEATS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    RBF: tl.constexpr, CENTERED: tl.constexpr, TABLE: tl.constexpr, KEPT: tl.constexpr,
    VALID: tl.constexpr, VALID_TARGET: tl.constexpr, HOLES: tl.constexpr, STRIDED: tl.constexpr,
    PRECISION: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """partial [PROGRAMS, H, offsets] += sums over diagonals of logit gradients; ROWS = COLUMNS.

    The programs of a head take the tiles of all batch entries in turn.
    """
    i_h, i_own = head_and_rest(H)
    i_key_head = i_h // REPEATS
    i_scale = tl.load(p_scale + i_h)
    p_partial += (i_own * H + i_h).to(tl.int64) * num_offsets
    o_diagonal = tl.arange(0, COLUMNS)
    for i_work in range(i_own, B * num_tiles, PROGRAMS):
        i_tile = i_work % num_tiles
        i_b = tl.cast(i_work // num_tiles, tl.int64)  # interpreted, loops count in plain int
        i_row = tl.load(p_tiles + 2 * i_tile + 1)
        i_first_target, n_targets, i_first_source, n_sources, i_step, n_before, n_after, i_hole = (
            load_sequence(p_sequences + 8 * tl.load(p_tiles + 2 * i_tile))
        )
        p_own_query = p_query + (i_b * N + i_first_target) * stride_qn
        p_own_query += i_h.to(tl.int64) * stride_qh
        p_own_d_out = p_d_out + (i_b * N + i_first_target) * stride_on
        p_own_d_out += i_h.to(tl.int64) * stride_oh
        p_own_key = p_key + (i_b * M + i_first_source) * stride_kn
        p_own_key += i_key_head.to(tl.int64) * stride_kh
        p_own_value = p_value + (i_b * M + i_first_source) * stride_vn
        p_own_value += i_key_head.to(tl.int64) * stride_vh
        # [ROWS, BLOCK_D] and [ROWS, BLOCK_DV]
        b_query = load_tile(
            p_own_query, i_row, i_step, stride_qn, n_targets, D, ROWS, BLOCK_D, STRIDED, True
        )
        b_d_out = load_tile(
            p_own_d_out, i_row, i_step, stride_on, n_targets, DV, ROWS, BLOCK_DV, STRIDED, True
        )
        o_row = i_row + tl.arange(0, ROWS)
        m_row = o_row < n_targets
        # [ROWS]
        o_number = (i_b * H + i_h) * N + i_first_target + o_row * i_step
        b_saved = tl.load(p_saved + o_number, mask=m_row, other=float("inf"))
        b_delta = tl.load(p_delta + o_number, mask=m_row, other=0.0)
        o_live = tl.where(m_row & (b_saved != float("inf")), o_row, -NOWHERE)
        i_slot = (i_b * num_tiles + i_tile) * (H // REPEATS) + i_key_head
        b_center = load_center(p_center, i_slot, D, BLOCK_D, CENTERED)
        if CENTERED:
            b_query = b_query - b_center[None, :]
            b_saved = around_center(b_saved, b_query, i_scale)
        i_begin, _, _, i_end = part_borders(
            i_row, n_targets, n_sources, n_before, n_after, ROWS, COLUMNS, 1, KEPT
        )
        for i_column in range(i_begin, i_end, COLUMNS):
            # [ROWS, COLUMNS], also of masks, weights and gradients below
            _b_key, b_affinity = load_affinities(
                b_query, b_center, p_own_key, p_own_key, i_column, i_step, stride_kn, n_sources,
                D, BLOCK_D, COLUMNS, RBF, CENTERED, False, STRIDED, True, PRECISION,
            )  # fmt: skip
            o_column = i_column + tl.arange(0, COLUMNS)
            m_edge = edges_to(
                o_live, i_column, i_step, n_sources, n_before, n_after, i_hole,
                p_valid_source + i_b * M + i_first_source, COLUMNS, VALID, HOLES, STRIDED,
            )  # fmt: skip
            if KEPT:
                m_edge = m_edge & is_kept(
                    p_kept + ((i_b * H + i_h) * N + i_first_target) * num_words, o_row, i_column,
                    i_step, n_targets, n_before, num_words, COLUMNS, 0,
                )  # fmt: skip
            o_hop = o_column[None, :] - o_row[:, None]
            b_bias = load_bias(p_table, o_hop, m_edge, origin, H, i_h)
            b_logit = (b_affinity * i_scale + b_bias) * LOG2E - b_saved[:, None]
            # [COLUMNS, BLOCK_DV]
            b_value = load_tile(
                p_own_value, i_column, i_step, stride_vn, n_sources, DV, COLUMNS, BLOCK_DV,
                STRIDED, True,
            )  # fmt: skip
            b_d_weight = product(b_d_out, tl.trans(b_value), PRECISION)
            b_d_logit = weights_from(b_logit) * (b_d_weight - b_delta[:, None])
            b_d_logit = tl.where(m_edge, b_d_logit, 0.0)
            # Row r is rotated left by r places. Column c then holds numbers of diagonal c, and
            # those that were rotated in at the right end, of diagonal c - COLUMNS.
            o_from = o_diagonal[None, :] + tl.arange(0, ROWS)[:, None]
            b_rotated = tl.gather(b_d_logit, o_from % COLUMNS, axis=1)
            m_wrapped = o_from >= COLUMNS
            i_first = i_column - i_row + origin  # the offset of diagonal 0
            # [COLUMNS]
            b_straight = tl.sum(tl.where(m_wrapped, 0.0, b_rotated), axis=0)
            b_wrapped = tl.sum(tl.where(m_wrapped, b_rotated, 0.0), axis=0)
            o_offset = i_first + o_diagonal
            m_offset = (o_offset >= 0) & (o_offset < num_offsets)
            b_before = tl.load(p_partial + o_offset, mask=m_offset, other=0.0)
            tl.store(p_partial + o_offset, b_before + b_straight, mask=m_offset)
            tl.debug_barrier()  # a thread may read next what another has written
            o_offset -= COLUMNS
            m_offset = (o_offset >= 0) & (o_offset < num_offsets)
            b_before = tl.load(p_partial + o_offset, mask=m_offset, other=0.0)
            tl.store(p_partial + o_offset, b_before + b_wrapped, mask=m_offset)
            tl.debug_barrier()


def d_table(inputs: BandInputs, saved: Tensor, delta: Tensor, d_out: Tensor) -> Tensor:
    """Gradient of the table [offsets, H].

    `saved` [B, H, N] is from the forward, `delta` [B, H, N] from :func:`backward`, and `d_out`
    [B, N, H, Dv] is the gradient of the output.
    """
    x = inputs
    assert x.table is not None
    B, _, H, _ = x.query.shape
    d_out = side_by_side(d_out)
    choice = tuning.choose("d_table", x.query.dtype, x.width, x.bands.window)
    tiles = x.bands.tiles("targets", choice.rows)
    programs = max(min(PROGRAMS, B * len(tiles)), 1)
    partial = x.table.new_zeros(programs, H, len(x.table))
    launch(
        d_table_kernel,
        (programs * H if len(tiles) * B else 0,),
        p_saved=saved,
        p_delta=delta,
        p_d_out=d_out,
        p_partial=partial,
        p_center=x.centers("targets", tiles, choice.rows),
        p_tiles=tiles,
        B=B,
        num_tiles=len(tiles),
        num_offsets=len(x.table),
        stride_on=d_out.stride(1),
        stride_oh=d_out.stride(2),
        ROWS=choice.rows,
        COLUMNS=choice.rows,
        PROGRAMS=programs,
        num_warps=choice.num_warps,
        num_stages=choice.num_stages,
        **x.common(),
    )
    return partial.sum(0).T.contiguous()

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

from graphattn.kernels.bands.arguments import PairTables, TokenRows
from graphattn.kernels.bands.inputs import BandInputs
from graphattn.kernels.bands.math import (
    NOWHERE,
    around_center,
    edges_to,
    first_row,
    is_kept,
    load_affinities,
    load_bias,
    load_center,
    load_features,
    part_borders,
    row_and_band,
)
from graphattn.kernels.shared.exponentials import LOG2E, weights_from
from graphattn.kernels.shared.launch import launch
from graphattn.kernels.shared.layout import side_by_side
from graphattn.kernels.shared.precision import product
from graphattn.kernels.shared.programs import head_and_rest

PROGRAMS = 64  # per head: rows of the buffer


@triton.jit(
    do_not_specialize=["B", "N", "M", "H", "num_tiles", "num_offsets", "origin", "num_words"]
)
def d_table_kernel(
    query, key, value, d_out, p_saved, p_delta, p_partial, p_scale, p_center, p_table, p_kept,
    p_valid_target, p_valid_source, bands, B, N, M, H, num_tiles, num_offsets, origin, num_words,
    REPEATS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RBF: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """partial [programs, H, offsets] += sums over diagonals of logit gradients; ROWS = COLUMNS.

    The programs of a head take the tiles of all batch entries in turn.
    """
    i_h, i_program = head_and_rest(H)
    i_key_head = i_h // REPEATS
    i_scale = tl.load(p_scale + i_h)
    p_table += origin * H + i_h
    p_partial += (i_program * H + i_h).to(tl.int64) * num_offsets
    o_diagonal = tl.arange(0, COLUMNS)
    for i_work in range(i_program, B * num_tiles, tl.num_programs(0) // H):
        i_tile = i_work % num_tiles
        i_b = tl.cast(i_work // num_tiles, tl.int64)  # interpreted, loops count in plain int
        i_row, band = row_and_band(bands.p_tiles + 2 * i_tile, bands.p_sequences)
        i_target, i_source = i_b * N + band.i_first_target, i_b * M + band.i_first_source
        i_numbers = (i_b * H + i_h) * N + band.i_first_target
        p_key = first_row(key, i_source, i_key_head)
        p_value = first_row(value, i_source, i_key_head)
        p_valid, p_bits = p_valid_source, p_kept
        if p_valid_source is not None:
            p_valid += i_source
        if p_kept is not None:
            p_bits += i_numbers * num_words
        pairs = PairTables(p_table, H, p_bits, num_words)
        # [ROWS, BLOCK_D] and [ROWS, BLOCK_DV]
        b_query = load_features(
            first_row(query, i_target, i_h), query, i_row, band.i_step, band.n_targets, ROWS,
            bands.STRIDED, True,
        )  # fmt: skip
        b_d_out = load_features(
            first_row(d_out, i_target, i_h), d_out, i_row, band.i_step, band.n_targets, ROWS,
            bands.STRIDED, True,
        )  # fmt: skip
        o_row = i_row + tl.arange(0, ROWS)
        m_row = o_row < band.n_targets
        # [ROWS]
        o_number = i_numbers + o_row * band.i_step
        b_saved = tl.load(p_saved + o_number, mask=m_row, other=float("inf"))
        b_delta = tl.load(p_delta + o_number, mask=m_row, other=0.0)
        o_live = tl.where(m_row & (b_saved != float("inf")), o_row, -NOWHERE)
        b_center = None
        if p_center is not None:
            i_slot = (i_b * num_tiles + i_tile) * (H // REPEATS) + i_key_head
            b_center = load_center(p_center, i_slot, query.WIDTH, query.BLOCK)
            b_query = b_query - b_center[None, :]
            b_saved = around_center(b_saved, b_query, i_scale)
        i_begin, _, _, i_end = part_borders(
            i_row, band.n_targets, band.n_sources, band.n_before, band.n_after, ROWS, COLUMNS, 1,
            p_kept is not None,
        )  # fmt: skip
        for i_column in range(i_begin, i_end, COLUMNS):
            # [ROWS, COLUMNS], also of masks, weights and gradients below
            _b_key, b_affinity = load_affinities(
                b_query, b_center, key, p_key, None, i_column, band, COLUMNS, RBF, bands.STRIDED,
                True, PRECISION,
            )  # fmt: skip
            o_column = i_column + tl.arange(0, COLUMNS)
            m_edge = edges_to(o_live, i_column, band, p_valid, COLUMNS, bands.HOLES, bands.STRIDED)
            if p_kept is not None:
                m_edge = m_edge & is_kept(pairs, o_row, i_column, band, COLUMNS, 0)
            b_bias = load_bias(pairs, o_column[None, :] - o_row[:, None], m_edge)
            b_logit = (b_affinity * i_scale + b_bias) * LOG2E - b_saved[:, None]
            # [COLUMNS, BLOCK_DV]
            b_value = load_features(
                p_value, value, i_column, band.i_step, band.n_sources, COLUMNS, bands.STRIDED, True
            )
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
            tl.debug_barrier()  # all warps have loaded it, before one of them stores
            tl.store(p_partial + o_offset, b_before + b_straight, mask=m_offset)
            tl.debug_barrier()  # a thread may read next what another has written
            o_offset -= COLUMNS
            m_offset = (o_offset >= 0) & (o_offset < num_offsets)
            b_before = tl.load(p_partial + o_offset, mask=m_offset, other=0.0)
            tl.debug_barrier()
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
    choice = x.choose("d_table")
    tiles = x.of_tiles("targets", choice._replace(columns=choice.rows))
    programs = max(min(PROGRAMS, B * tiles["num_tiles"]), 1)
    partial = x.table.new_zeros(programs, H, len(x.table))
    launch(
        d_table_kernel,
        (programs * H if tiles["num_tiles"] * B else 0,),
        d_out=TokenRows.of(side_by_side(d_out)),
        p_saved=saved,
        p_delta=delta,
        p_partial=partial,
        B=B,
        num_offsets=len(x.table),
        **tiles,
        **x.common(),
    )
    return partial.sum(0).T.contiguous()

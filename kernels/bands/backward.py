"""Gradients of attention over bands: weights are computed again from logits and log-sums.

With P the weights and delta_i = out_i . d_out_i - d_lse_i, the logits' gradients are
ds_ij = P_ij (d_out_i . v_j - delta_i). One kernel goes over the sources of a tile of targets and
computes d_query. Another goes over the targets of a tile of sources and computes d_key and d_value.
Together they need seven matrix products where one kernel would need five. But each sum is formed by
one program, without atomics, so two runs agree bit for bit.

For RBF, d_query_i = scale sum_j ds_ij (k_j - q_i). The matrix product gives the sum of ds_ij k_j,
for which ds is rounded to the dtype of the keys. (sum_j ds_ij) q_i is subtracted at the end. Its
sum, `b_pulled`, is that of the rounded ds, so that rounding errors cancel where k_j = q_i.

The gradient of the scale is the sum of ds_ij times affinities. For dot products this is
q_i . sum_j ds_ij k_j, whose second factor is formed for d_query anyway. For RBF that would leave
the sum of ds_ij ||k_j||^2 / 2, which takes as long as the whole.

Names and constants are explained where :mod:`graphattn.kernels.bands.forward` says.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphattn.kernels.bands.arguments import PairTables, Sources, Targets, TokenRows
from graphattn.kernels.bands.inputs import BandInputs
from graphattn.kernels.bands.math import (
    NOWHERE,
    around_center,
    cleaned,
    edges_to,
    first_row,
    half_square,
    is_kept,
    is_unsound,
    load_affinities,
    load_bias,
    load_center,
    load_features,
    part_borders,
    poisoned,
    row_pointers,
    store_features,
    tile_of_program,
    within_reach,
)
from graphattn.kernels.shared import tuning
from graphattn.kernels.shared.exponentials import LOG2E, weights_from
from graphattn.kernels.shared.layout import side_by_side
from graphattn.kernels.shared.precision import PIECES, add_product, product
from graphattn.kernels.shared.row_dots import row_dots


@triton.jit
def d_query_tile(
    b_d_query, b_pulled, b_d_scale, b_query, b_d_out, b_saved, b_delta, b_center, i_scale,
    key, value, sources, pairs, i_row, i_column, band,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RBF: tl.constexpr, HOLES: tl.constexpr,
    STRIDED: tl.constexpr, MASKED: tl.constexpr, CAREFUL: tl.constexpr, PRECISION: tl.constexpr,
    SCALE_GRADIENT: tl.constexpr,
):  # fmt: skip
    """Adds the share of the sources i_column, i_column + 1, ... in the gradients of a tile.

    The tile has ROWS targets: b_d_query is [ROWS, BLOCK_D], b_pulled and b_d_scale are [ROWS]. Both
    are for RBF, and the last is only summed up if SCALE_GRADIENT.
    """
    # [COLUMNS, BLOCK_D] and [ROWS, COLUMNS]
    b_key, b_affinity = load_affinities(
        b_query, b_center, key, sources.p_key, sources.p_pieces, i_column, band,
        COLUMNS, RBF, STRIDED, MASKED, PRECISION,
    )  # fmt: skip
    o_column = i_column + tl.arange(0, COLUMNS)
    # [ROWS, COLUMNS], here and below: base-2 logits, minus their row's log-sum
    b_logit = b_affinity * (i_scale * LOG2E) - b_saved[:, None]
    o_row = i_row + tl.arange(0, ROWS)
    if MASKED:
        m_edge = edges_to(o_row, i_column, band, sources.p_valid, COLUMNS, HOLES, STRIDED)
        if pairs.p_kept is not None:
            m_edge = m_edge & is_kept(pairs, o_row, i_column, band, COLUMNS, 0)
    if pairs.p_table is not None:
        m_pair = m_edge if MASKED else (o_row < band.n_targets)[:, None]
        b_logit += load_bias(pairs, o_column[None, :] - o_row[:, None], m_pair) * LOG2E
    if MASKED:
        b_logit = tl.where(m_edge, b_logit, float("-inf"))
    b_weight = weights_from(b_logit)
    # [COLUMNS, BLOCK_DV]
    b_value = load_features(
        sources.p_value, value, i_column, band.i_step, band.n_sources, COLUMNS, STRIDED, MASKED
    )
    # [ROWS, COLUMNS]
    b_d_weight = product(b_d_out, tl.trans(b_value), PRECISION)
    b_d_logit = b_weight * (b_d_weight - b_delta[:, None])
    if CAREFUL:
        b_d_logit = tl.where(b_logit == float("-inf"), 0.0, b_d_logit)
        if RBF and SCALE_GRADIENT:
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
    query, key, value, d_out, p_saved, p_delta, p_d_query, p_d_scale, p_scale, p_pieces,
    p_center, p_table, p_kept, p_valid_target, p_valid_source, p_again, bands, N, M, H, num_tiles,
    origin, num_words,
    REPEATS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RBF: tl.constexpr,
    PARTS: tl.constexpr, CAREFUL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """d_query [B, N, H, D], and every tile's share of d_scale [B, tiles, H] unless that is None."""
    if CAREFUL:  # noqa: SIM102  # a constant; the inner condition is known at run time
        if tl.load(p_again + tl.program_id(0)) == 0:
            return
    i_b, i_h, i_tile, i_row, band = tile_of_program(bands.p_tiles, bands.p_sequences, num_tiles, H)
    i_key_head = i_h // REPEATS
    i_target, i_source = i_b * N + band.i_first_target, i_b * M + band.i_first_source
    i_numbers = (i_b * H + i_h) * N + band.i_first_target
    if p_pieces is not None:
        p_pieces += ((i_b * (H // REPEATS) + i_key_head) * M + band.i_first_source) * PIECES
    if p_valid_source is not None:
        p_valid_source += i_source
    if p_table is not None:
        p_table += origin * H + i_h
    if p_kept is not None:
        p_kept += i_numbers * num_words
    p_key, p_value = first_row(key, i_source, i_key_head), first_row(value, i_source, i_key_head)
    sources = Sources(p_key, p_value, p_pieces, p_valid_source)
    pairs = PairTables(p_table, H, p_kept, num_words)

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
    # What comes back to an empty row may be NaN, and 0 * NaN is NaN.
    b_delta = tl.where(b_saved == float("inf"), 0.0, b_delta)
    b_d_out = tl.where((b_saved == float("inf"))[:, None], 0.0, b_d_out).to(b_d_out.dtype)
    i_scale = tl.load(p_scale + i_h)
    b_center = None
    if p_center is not None:
        i_slot = (i_b * num_tiles + i_tile) * (H // REPEATS) + i_key_head
        b_center = load_center(p_center, i_slot, query.WIDTH, query.BLOCK)
        b_query = b_query - b_center[None, :]
        b_saved = around_center(b_saved, b_query, i_scale)

    b_d_query = tl.zeros([ROWS, query.BLOCK], tl.float32)
    b_pulled = tl.zeros([ROWS], tl.float32)
    b_d_scale = tl.zeros([ROWS], tl.float32)
    # Four places among the sources; part 1, the middle one of three, needs no mask.
    i_borders = part_borders(
        i_row, band.n_targets, band.n_sources, band.n_before, band.n_after, ROWS, COLUMNS, PARTS,
        p_kept is not None,
    )  # fmt: skip
    for i_part in tl.static_range(PARTS):
        for i_column in range(i_borders[i_part], i_borders[i_part + 1], COLUMNS):
            b_d_query, b_pulled, b_d_scale = d_query_tile(
                b_d_query, b_pulled, b_d_scale, b_query, b_d_out, b_saved, b_delta, b_center,
                i_scale, key, value, sources, pairs, i_row, i_column, band, ROWS, COLUMNS, RBF,
                bands.HOLES, bands.STRIDED, i_part != 1, CAREFUL, PRECISION, p_d_scale is not None,
            )  # fmt: skip
    if p_again is not None and not CAREFUL:
        # Squares of large numbers are infinite, so d_scale may be NaN where d_query is not.
        tl.store(p_again + tl.program_id(0), is_unsound(b_d_query, b_d_scale))

    m_alive = m_row & (b_saved != float("inf"))  # rows with edges
    if RBF:
        b_query = b_query.to(tl.float32)
        b_d_query = b_d_query - b_pulled[:, None] * b_query
        b_d_scale = b_d_scale - b_pulled * 0.5 * tl.sum(b_query * b_query, axis=1)
    elif p_d_scale is not None:
        b_d_scale = tl.sum(b_query.to(tl.float32) * b_d_query, axis=1)
    b_d_query = tl.where(m_alive[:, None], b_d_query * i_scale, 0.0)
    store_features(
        p_d_query, b_d_query, i_target, i_h, H, i_row, band.i_step, band.n_targets, query.WIDTH
    )
    if p_d_scale is not None:
        i_share = tl.sum(tl.where(m_alive, b_d_scale, 0.0), axis=0)
        tl.store(p_d_scale + (i_b * num_tiles + i_tile) * H + i_h, i_share)


@triton.jit
def d_source_tile(
    b_d_key, b_d_value, b_pulled, b_key, b_value, b_half_square, b_center, i_scale, o_column,
    query, d_out, targets, pairs, i_row, i_column, band,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RBF: tl.constexpr, HOLES: tl.constexpr,
    STRIDED: tl.constexpr, MASKED: tl.constexpr, CAREFUL: tl.constexpr, REPEATS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the share of the targets i_row, i_row + 1, ... in the gradients of a tile of sources.

    Tiles of pairs are transposed here: COLUMNS sources are their rows, ROWS targets their columns.
    b_d_key is [COLUMNS, BLOCK_D], b_d_value [COLUMNS, BLOCK_DV], b_pulled [COLUMNS].
    """
    # [ROWS, BLOCK_D] and [ROWS, BLOCK_DV]
    b_query = load_features(
        targets.p_query, query, i_row, band.i_step, band.n_targets, ROWS, STRIDED, MASKED
    )
    b_d_out = load_features(
        targets.p_d_out, d_out, i_row, band.i_step, band.n_targets, ROWS, STRIDED, MASKED
    )
    o_row = i_row + tl.arange(0, ROWS)
    m_row = o_row < band.n_targets
    # [ROWS]
    p_rows = row_pointers(targets.p_saved, i_row, band.i_step, ROWS, STRIDED)
    b_saved = tl.load(p_rows, mask=m_row, other=float("inf"))
    p_rows = row_pointers(targets.p_delta, i_row, band.i_step, ROWS, STRIDED)
    b_delta = tl.load(p_rows, mask=m_row, other=0.0)
    if b_center is not None:
        b_query = b_query - b_center[None, :]
        b_saved = around_center(b_saved, b_query, i_scale)
    # [COLUMNS, ROWS], here and below
    b_affinity = product(b_key, tl.trans(b_query), PRECISION)
    if RBF:
        b_affinity = b_affinity - b_half_square[:, None]
    b_logit = b_affinity * (i_scale * LOG2E) - b_saved[None, :]
    if MASKED:
        # Seen from a source, before and after change their places, and hops their sign.
        m_edge = within_reach(
            o_column, i_row, band.n_targets, band.n_after, band.n_before, -band.i_hole, ROWS, HOLES
        )  # fmt: skip
        if CAREFUL:  # an empty row, whose saved log-sum is +inf, has no edges if it holds NaN
            m_edge = m_edge & (b_saved != float("inf"))[None, :]
        if pairs.p_kept is not None:
            m_edge = m_edge & is_kept(pairs, o_row, i_column, band, COLUMNS, 1)
    if pairs.p_table is not None:
        m_pair = m_edge if MASKED else (o_column < NOWHERE)[:, None]
        b_logit += load_bias(pairs, o_column[:, None] - o_row[None, :], m_pair) * LOG2E
    if MASKED:
        b_logit = tl.where(m_edge, b_logit, float("-inf"))
    b_weight = weights_from(b_logit)
    b_d_weight = product(b_value, tl.trans(b_d_out), PRECISION)
    b_d_logit = b_weight * (b_d_weight - b_delta[None, :])
    if REPEATS > 1:  # each query head of this key head has its own scale
        b_d_logit = b_d_logit * i_scale
    if CAREFUL:
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
    query, key, value, d_out, p_saved, p_delta, p_d_key, p_d_value, p_scale, p_center, p_table,
    p_kept, p_valid_target, p_valid_source, p_again, bands, N, M, H, num_tiles, origin, num_words,
    REPEATS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RBF: tl.constexpr,
    PARTS: tl.constexpr, CAREFUL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """d_key [B, M, Hk, D] and d_value [B, M, Hk, DV], summed over the query heads of a key head."""
    if CAREFUL:  # noqa: SIM102  # a constant; the inner condition is known at run time
        if tl.load(p_again + tl.program_id(0)) == 0:
            return
    Hk = H // REPEATS
    i_b, i_key_head, i_tile, i_column, band = tile_of_program(
        bands.p_tiles, bands.p_sequences, num_tiles, Hk
    )
    i_target, i_source = i_b * N + band.i_first_target, i_b * M + band.i_first_source
    # [COLUMNS, BLOCK_D] and [COLUMNS, BLOCK_DV]
    b_key = load_features(
        first_row(key, i_source, i_key_head), key, i_column, band.i_step, band.n_sources, COLUMNS,
        bands.STRIDED, True,
    )  # fmt: skip
    b_value = load_features(
        first_row(value, i_source, i_key_head), value, i_column, band.i_step, band.n_sources,
        COLUMNS, bands.STRIDED, True,
    )  # fmt: skip
    b_center = None
    if p_center is not None:
        i_slot = (i_b * num_tiles + i_tile) * Hk + i_key_head
        b_center = load_center(p_center, i_slot, key.WIDTH, key.BLOCK)
        b_key = b_key - b_center[None, :]
    b_half_square = half_square(b_key)
    o_column = i_column + tl.arange(0, COLUMNS)
    m_column = o_column < band.n_sources
    if p_valid_source is not None:
        p_rows = p_valid_source + i_source + o_column * band.i_step
        m_column = m_column & (tl.load(p_rows, mask=m_column, other=0) != 0)
    o_column = tl.where(m_column, o_column, NOWHERE)

    b_d_key = tl.zeros([COLUMNS, key.BLOCK], tl.float32)
    b_d_value = tl.zeros([COLUMNS, value.BLOCK], tl.float32)
    b_pulled = tl.zeros([COLUMNS], tl.float32)
    # Four places among the targets; seen from a source, before and after change their places.
    i_borders = part_borders(
        i_column, band.n_sources, band.n_targets, band.n_after, band.n_before, COLUMNS, ROWS, PARTS
    )
    for i_repeat in range(REPEATS):
        i_h = i_key_head * REPEATS + i_repeat
        i_scale = tl.load(p_scale + i_h)
        i_numbers = (i_b * H + i_h) * N + band.i_first_target
        targets = Targets(
            first_row(query, i_target, i_h), first_row(d_out, i_target, i_h),
            p_saved + i_numbers, p_delta + i_numbers,
        )  # fmt: skip
        p_biases, p_bits = p_table, p_kept
        if p_table is not None:
            p_biases += origin * H + i_h
        if p_kept is not None:
            p_bits += i_numbers * num_words
        pairs = PairTables(p_biases, H, p_bits, num_words)
        for i_part in tl.static_range(PARTS):
            for i_row in range(i_borders[i_part], i_borders[i_part + 1], ROWS):
                b_d_key, b_d_value, b_pulled = d_source_tile(
                    b_d_key, b_d_value, b_pulled, b_key, b_value, b_half_square, b_center, i_scale,
                    o_column, query, d_out, targets, pairs, i_row, i_column, band, ROWS, COLUMNS,
                    RBF, bands.HOLES, bands.STRIDED, i_part != 1, CAREFUL, REPEATS, PRECISION,
                )  # fmt: skip
    if p_again is not None and not CAREFUL:
        i_again = tl.maximum(is_unsound(b_d_key), is_unsound(b_d_value))
        tl.store(p_again + tl.program_id(0), i_again)
    if RBF:
        if PARTS == 1:
            b_d_key = b_d_key - b_pulled[:, None] * b_key.to(tl.float32)
        elif i_borders[0] < i_borders[3]:
            # The keys are loaded again, because holding them takes registers, of which three loops
            # leave few, and in a branch, because Triton would keep the first copy otherwise.
            b_key = load_features(
                first_row(key, i_source, i_key_head), key, i_column, band.i_step, band.n_sources,
                COLUMNS, bands.STRIDED, True,
            )  # fmt: skip
            if b_center is not None:
                b_key = b_key - b_center[None, :]
            b_d_key = b_d_key - b_pulled[:, None] * b_key.to(tl.float32)
    if REPEATS == 1:
        b_d_key = b_d_key * tl.load(p_scale + i_key_head)
    b_d_key = tl.where(m_column[:, None], b_d_key, 0.0)
    b_d_value = tl.where(m_column[:, None], b_d_value, 0.0)
    store_features(
        p_d_key, b_d_key, i_source, i_key_head, Hk, i_column, band.i_step, band.n_sources, key.WIDTH
    )
    store_features(
        p_d_value, b_d_value, i_source, i_key_head, Hk, i_column, band.i_step, band.n_sources,
        value.WIDTH,
    )  # fmt: skip


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
    upstream: dict[str, Any] = {"d_out": TokenRows.of(d_out), "p_saved": saved, "p_delta": delta}
    choice = x.choose("d_query")
    tiles = x.of_tiles("targets", choice)
    shares = most_registers = None
    if scale_gradient:
        shares = x.scale.new_empty(B, tiles["num_tiles"], H)
        if x.rbf and x.table is None:
            most_registers = tuning.most_registers(choice, x.query.shape[-1], x.value.shape[-1])
    x.start(
        d_query_kernel,
        B * H * tiles["num_tiles"],
        p_d_query=d_query,
        p_d_scale=shares,
        p_pieces=x.half_squares(),
        max_registers=most_registers,
        PARTS=x.parts(choice.rows, choice.columns),
        **upstream,
        **tiles,
        **x.common(),
    )
    choice = x.choose("d_source")
    tiles = x.of_tiles("sources", choice)
    x.start(
        d_source_kernel,
        B * x.key.shape[2] * tiles["num_tiles"],
        p_d_key=d_key,
        p_d_value=d_value,
        PARTS=x.parts(choice.rows, choice.columns),
        **upstream,
        **tiles,
        **x.common(),
    )
    return d_query, d_key, d_value, None if shares is None else shares.sum((0, 1)), delta

"""Attention over bands, forward: target i averages the sources from i - before to i + after.

One program takes a tile of targets of one head and goes over the sources that any of them sees,
with a running maximum (online softmax; Milakov and Gimelshein 2018, Dao et al. 2022). Tiles of
sources that all these targets see in full need no mask. Output and log-sums are stored, and no
matrix of weights.

Logits are scale * a, plus a bias if there is a table of biases. The affinity a is q . k, or for RBF
attention q . k - ||k||^2 / 2. RBF logits also have the term -||q||^2 / 2. It is the same for a
whole row, so it changes no weight, and is added to the log-sum at the end.

The arguments and constants of the kernel (bands, REPEATS, RBF, ...) are explained at
:meth:`graphattn.kernels.bands.inputs.BandInputs.common`, and the beginnings of names (``b_`` for
tiles, ``p_`` for pointers, ...) in :mod:`graphattn.kernels`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphattn.kernels.bands.arguments import BandTables, PairTables, Sources
from graphattn.kernels.bands.hopper import choice
from graphattn.kernels.bands.inputs import BandInputs
from graphattn.kernels.bands.math import (
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
    store_features,
    tile_of_program,
)
from graphattn.kernels.shared.exponentials import LN2, LOG2E, level_of
from graphattn.kernels.shared.launch import launch
from graphattn.kernels.shared.precision import PIECES, add_product


@triton.jit
def attend_tile(
    b_out, b_sum, b_max, b_query, b_center, i_scale, key, value, sources, pairs, i_row, i_column,
    band, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RBF: tl.constexpr, HOLES: tl.constexpr,
    STRIDED: tl.constexpr, MASKED: tl.constexpr, CAREFUL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the sources i_column, i_column + 1, ... to the running sums of a tile of targets.

    b_out [ROWS, BLOCK_DV] is the sum of weights times values, b_sum [ROWS] that of the weights. In
    both a weight is exp2(i_scale * (x - b_max)), and b_max [ROWS] is the largest x so far. Without
    a table of biases, x is the affinity, so the scale must be positive. With one, x is the base-2
    logit, and the scale in that formula is 1.
    """
    # [ROWS, COLUMNS]
    _, b_affinity = load_affinities(
        b_query, b_center, key, sources.p_key, sources.p_pieces, i_column, band,
        COLUMNS, RBF, STRIDED, MASKED, PRECISION,
    )  # fmt: skip
    o_column = i_column + tl.arange(0, COLUMNS)
    o_row = i_row + tl.arange(0, ROWS)
    if MASKED:
        # [ROWS, COLUMNS]
        m_edge = edges_to(o_row, i_column, band, sources.p_valid, COLUMNS, HOLES, STRIDED)
        if pairs.p_kept is not None:
            m_edge = m_edge & is_kept(pairs, o_row, i_column, band, COLUMNS, 0)
    if pairs.p_table is not None:
        m_pair = m_edge if MASKED else (o_row < band.n_targets)[:, None]
        b_bias = load_bias(pairs, o_column[None, :] - o_row[:, None], m_pair)
        # A bias is not to be multiplied by the scale, so the scale is applied here, once. From here
        # on b_affinity holds logits, and the scale is 1. Without a table the scale is applied
        # below, in one multiply-add with the maximum.
        b_affinity = b_affinity * i_scale + b_bias * LOG2E
        i_scale = 1.0
    if MASKED:
        b_affinity = tl.where(m_edge, b_affinity, float("-inf"))
    # [ROWS]
    b_larger = tl.maximum(b_max, tl.max(b_affinity, axis=1))
    b_level = level_of(b_larger) * i_scale
    # [ROWS, COLUMNS]
    b_weight = tl.exp2(b_affinity * i_scale - b_level[:, None])
    # [ROWS]: what multiplies the sums so far, because they get a new maximum
    b_fade = tl.exp2(b_max * i_scale - b_level)
    b_sum = b_sum * b_fade + tl.sum(b_weight, axis=1)
    # [COLUMNS, BLOCK_DV]
    b_value = load_features(
        sources.p_value, value, i_column, band.i_step, band.n_sources, COLUMNS, STRIDED, MASKED
    )
    if CAREFUL:
        b_value, m_bad = cleaned(b_value)
        b_weight = poisoned(b_weight, b_affinity, m_bad)
    # [ROWS, BLOCK_DV]
    b_out = add_product(b_out * b_fade[:, None], b_weight.to(b_value.dtype), b_value, PRECISION)
    return b_out, b_sum, b_larger


@triton.jit(do_not_specialize=["N", "M", "H", "num_tiles", "origin", "num_words"])
def band_forward_kernel(
    query, key, value, p_out, p_lse, p_saved, p_scale, p_pieces, p_center, p_table, p_kept,
    p_valid_target, p_valid_source, p_again, bands, N, M, H, num_tiles, origin, num_words,
    REPEATS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RBF: tl.constexpr,
    PARTS: tl.constexpr, CAREFUL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Output [B, N, H, DV], log-sums [B, H, N] and base-2 log-sums for the backward [B, H, N].

    The last are +inf for empty rows. For RBF they lack the term -||q||^2 / 2, unless centred.
    """
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

    # [ROWS, BLOCK_D]
    b_query = load_features(
        first_row(query, i_target, i_h), query, i_row, band.i_step, band.n_targets, ROWS,
        bands.STRIDED, True,
    )  # fmt: skip
    b_center = None
    if p_center is not None:
        i_slot = (i_b * num_tiles + i_tile) * (H // REPEATS) + i_key_head
        b_center = load_center(p_center, i_slot, query.WIDTH, query.BLOCK)
        b_query = b_query - b_center[None, :]
    i_scale = tl.load(p_scale + i_h) * LOG2E
    if RBF:
        # Computed before the loop, because the queries would take registers until after it.
        b_half_square = half_square(b_query)
    else:
        # The maximum of a row is taken before the scale is applied, so the scale must be positive:
        # a negative sign is moved to the queries. A scale of 0 becomes a tiny number, because
        # affinities of pairs that are no edges are -inf, and 0 * -inf is NaN.
        i_sign = tl.where(i_scale < 0, -1.0, 1.0)
        b_query = (b_query.to(tl.float32) * i_sign).to(b_query.dtype)
        i_scale = tl.abs(i_scale)
        i_scale = tl.where(i_scale == 0, 1e-30, i_scale)

    b_out = tl.zeros([ROWS, value.BLOCK], tl.float32)
    b_sum = tl.zeros([ROWS], tl.float32)
    b_max = tl.full([ROWS], float("-inf"), tl.float32)
    # Four places among the sources; part 1, the middle one of three, needs no mask.
    i_borders = part_borders(
        i_row, band.n_targets, band.n_sources, band.n_before, band.n_after, ROWS, COLUMNS, PARTS,
        p_kept is not None,
    )  # fmt: skip
    for i_part in tl.static_range(PARTS):
        for i_column in range(i_borders[i_part], i_borders[i_part + 1], COLUMNS):
            b_out, b_sum, b_max = attend_tile(
                b_out, b_sum, b_max, b_query, b_center, i_scale, key, value, sources, pairs, i_row,
                i_column, band, ROWS, COLUMNS, RBF, bands.HOLES, bands.STRIDED, i_part != 1,
                CAREFUL, PRECISION,
            )  # fmt: skip
    if p_again is not None and not CAREFUL:
        tl.store(p_again + tl.program_id(0), is_unsound(b_out))

    o_row = i_row + tl.arange(0, ROWS)
    m_row = o_row < band.n_targets
    m_empty = b_sum == 0  # rows without edges
    if p_valid_target is not None:
        p_rows = p_valid_target + i_target + o_row * band.i_step
        m_empty = m_empty | (tl.load(p_rows, mask=m_row, other=0) == 0)
    # [ROWS]: base-2 log-sums
    if p_table is not None:  # the maximum is one of logits, to which the scale has been applied
        b_saved = b_max + tl.log2(b_sum)
    else:
        b_saved = b_max * i_scale + tl.log2(b_sum)
    b_true = b_saved
    if RBF:
        b_true = b_saved - i_scale * b_half_square
        if (
            p_center is not None
        ):  # b_saved depends on this tile's centre, and the backward has others
            b_saved = b_true
    b_inverse = 1.0 / tl.where(m_empty, 1.0, b_sum)  # one division per row
    b_out = tl.where(m_empty[:, None], 0.0, b_out * b_inverse[:, None])
    store_features(p_out, b_out, i_target, i_h, H, i_row, band.i_step, band.n_targets, value.WIDTH)
    o_number = i_numbers + o_row * band.i_step
    tl.store(p_lse + o_number, tl.where(m_empty, float("-inf"), b_true * LN2), mask=m_row)
    # The backward subtracts these from logits: +inf leaves an empty row no weight.
    tl.store(p_saved + o_number, tl.where(m_empty, float("inf"), b_saved), mask=m_row)


def forward(inputs: BandInputs, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Output [B, N, H, Dv], log-sums [B, H, N], and base-2 log-sums for the backward [B, H, N].

    `dtype` is that of the output; None means that of the inputs. Both log-sums are in float32.
    """
    x = inputs
    if choice.is_chosen(x):
        return _on_hopper(x, dtype)
    B, N, H, _ = x.query.shape
    out = x.query.new_empty((B, N, H, x.value.shape[-1]), dtype=dtype or x.query.dtype)
    lse = x.query.new_empty((B, H, N), dtype=torch.float32)
    saved = torch.empty_like(lse)
    sizes = x.choose("forward")
    tiles = x.of_tiles("targets", sizes)
    x.start(
        band_forward_kernel,
        B * H * tiles["num_tiles"],
        p_out=out,
        p_lse=lse,
        p_saved=saved,
        p_pieces=x.half_squares(),
        PARTS=x.parts(sizes.rows, sizes.columns),
        **tiles,
        **x.common(),
    )
    return out, lse, saved


def _on_hopper(x: BandInputs, dtype: torch.dtype | None) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel for Hopper, and the one above for tiles with NaN, as :meth:`BandInputs.start`."""
    from graphattn.kernels.bands.hopper import forward as hopper

    (out, lse, saved), again = hopper.forward(x, dtype)
    sizes, rows = x.choose("forward"), hopper.ROWS.value
    tiles = x.bands.tiles_in_order(rows)
    launch(
        band_forward_kernel,
        (again.numel(),),
        p_again=again,
        p_out=out,
        p_lse=lse,
        p_saved=saved,
        p_pieces=x.half_squares(),
        p_center=None,
        bands=BandTables.of(x.bands, tiles),
        num_tiles=len(tiles),
        ROWS=rows,
        COLUMNS=sizes.columns,
        PARTS=1,
        CAREFUL=True,
        num_warps=sizes.num_warps,
        num_stages=sizes.num_stages,
        **x.common(),
    )
    return out, lse, saved

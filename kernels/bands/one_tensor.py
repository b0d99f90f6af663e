"""Gaussian kernel attention: query, key and value are one tensor, and every tile is loaded once.

Log-affinities l_ij = -||x_i - x_j||^2 / (2 sigma^2) are at most 0, and 0 for a token and itself. So
if all tokens see themselves, exp never overflows, sums are at least 1, and no running maximum is
needed. If the graph is symmetric, too, one kernel computes the gradient with five matrix products,
where a deterministic backward needs seven:

    G_ij = [K_ij / Z_i (dy_i . x_j - delta_i) + K_ij / Z_j (dy_j . x_i - delta_j)] / sigma^2
    dx_i = sum_j G_ij (x_j - x_i) + K_ij / Z_j dy_j

with K = exp(l), Z its row sums and delta_i = y_i . dy_i (minus the gradient of log Z_i).

Names and constants are explained where :mod:`graphattn.kernels.bands.forward` says. `b_other` and
the like belong to the token at the other end of a pair, x_j, and `b_own_...` to x_i.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphattn.kernels.bands.arguments import TokenRows
from graphattn.kernels.bands.inputs import BandInputs
from graphattn.kernels.bands.math import (
    cleaned,
    edges_to,
    first_row,
    half_square,
    is_unsound,
    load_center,
    load_features,
    load_pieces,
    part_borders,
    poisoned,
    row_pointers,
    store_features,
    tile_of_program,
)
from graphattn.kernels.shared import tuning
from graphattn.kernels.shared.exponentials import LN2, LOG2E
from graphattn.kernels.shared.layout import side_by_side
from graphattn.kernels.shared.precision import PIECES, add_product, pieces, product
from graphattn.kernels.shared.row_dots import row_dots

WIDEST_BACKWARD = 64  # features of a head


@triton.jit
def log_affinities(
    b_x, b_own, b_other, p_pieces, i_scale, i_row, i_column, band,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STRIDED: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """log2 K of a tile of pairs, [ROWS, COLUMNS]: at most 0, however it is rounded.

    `b_x` is [ROWS, BLOCK_D] and `b_other` [COLUMNS, BLOCK_D]; `b_own` are the half squares of
    `b_x`, [ROWS], or with `p_pieces` their pieces; `i_scale` is log2(e) / sigma^2. If EXACT, the
    logarithm of a token with itself is exactly 0, however far from the centre the token is.
    """
    # [ROWS, COLUMNS]
    b_log = product(b_x, tl.trans(b_other), PRECISION)
    if p_pieces is not None:
        b_pieces = load_pieces(p_pieces, i_column, band, COLUMNS, STRIDED, MASKED)
        b_log = add_product(b_log, b_own, tl.trans(b_pieces), PRECISION) * i_scale
    else:
        b_log = b_log * i_scale - (half_square(b_other) * i_scale)[None, :]
        b_log = b_log - (b_own * i_scale)[:, None]
    b_log = tl.minimum(b_log, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if EXACT:  # noqa: SIM102  # EXACT is a constant; the inner condition is known at run time
        if (i_column < i_row + ROWS) & (i_row < i_column + COLUMNS):  # the diagonal is in the tile
            o_row = i_row + tl.arange(0, ROWS)
            o_column = i_column + tl.arange(0, COLUMNS)
            m_self = (o_row[:, None] == o_column[None, :]) & (b_log <= 0.0)  # NaN stays NaN
            b_log = tl.where(m_self, 0.0, b_log)
    return b_log


@triton.jit
def shared_tile(
    b_out, b_sum, b_x, b_own, b_center, i_scale, x, p_x, p_pieces, p_valid,
    i_row, i_column, band,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STRIDED: tl.constexpr, MASKED: tl.constexpr,
    CAREFUL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the tokens i_column, i_column + 1, ... to the sums of a tile of ROWS tokens.

    b_out [ROWS, BLOCK_D] is the sum of weights times tokens, b_sum [ROWS] that of the weights.
    """
    # [COLUMNS, BLOCK_D]
    b_other = load_features(
        p_x, x, i_column, band.i_step, band.n_sources, COLUMNS, STRIDED, MASKED
    )  # fmt: skip
    if b_center is not None:
        b_other = b_other - b_center[None, :]
    # [ROWS, COLUMNS]
    b_log = log_affinities(
        b_x, b_own, b_other, p_pieces, i_scale, i_row, i_column, band,
        ROWS, COLUMNS, STRIDED, MASKED, PRECISION, False,
    )  # fmt: skip
    if MASKED:
        o_row = i_row + tl.arange(0, ROWS)
        m_edge = edges_to(o_row, i_column, band, p_valid, COLUMNS, False, STRIDED)
        b_log = tl.where(m_edge, b_log, float("-inf"))
    if CAREFUL:
        # A token that holds NaN has a weight of NaN at every edge, so its own NaN is not needed.
        b_other, _ = cleaned(b_other)
    # [ROWS, COLUMNS], [ROWS] and [ROWS, BLOCK_D]
    b_weight = tl.exp2(b_log)
    b_sum += tl.sum(b_weight, axis=1)
    b_out = add_product(b_out, b_weight.to(b_other.dtype), b_other, PRECISION)
    return b_out, b_sum


@triton.jit(do_not_specialize=["N", "H", "num_tiles"])
def shared_forward_kernel(
    x, p_out, p_lse, p_saved, p_scale, p_pieces, p_center, p_valid, p_again, bands, N, H,
    num_tiles, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    CAREFUL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Output [B, N, H, D], log Z [B, H, N], and base-2 log-sums for the backward [B, H, N].

    The last are those that :mod:`graphattn.kernels.bands.forward` stores: without the term
    -||x_i||^2 / 2 unless centred, and +inf for rows without edges.
    """
    if CAREFUL:  # noqa: SIM102  # a constant; the inner condition is known at run time
        if tl.load(p_again + tl.program_id(0)) == 0:
            return
    i_b, i_h, i_tile, i_row, band = tile_of_program(bands.p_tiles, bands.p_sequences, num_tiles, H)
    i_token, i_numbers = i_b * N + band.i_first_source, (i_b * H + i_h) * N + band.i_first_source
    if p_pieces is not None:
        p_pieces += i_numbers * PIECES
    if p_valid is not None:
        p_valid += i_token

    # [ROWS, BLOCK_D]
    p_x = first_row(x, i_token, i_h)
    b_x = load_features(p_x, x, i_row, band.i_step, band.n_sources, ROWS, bands.STRIDED, True)
    b_center = None
    if p_center is not None:
        b_center = load_center(p_center, (i_b * num_tiles + i_tile) * H + i_h, x.WIDTH, x.BLOCK)
        b_x = b_x - b_center[None, :]
    b_own_half_square = half_square(b_x)
    b_own = b_own_half_square
    if p_pieces is not None:
        b_own = pieces(-b_own_half_square, True)
    i_scale = tl.load(p_scale + i_h) * LOG2E

    b_out = tl.zeros([ROWS, x.BLOCK], tl.float32)
    b_sum = tl.zeros([ROWS], tl.float32)
    # Four places among the tokens; part 1, the middle one of three, needs no mask.
    i_borders = part_borders(
        i_row, band.n_sources, band.n_sources, band.n_before, band.n_after, ROWS, COLUMNS, PARTS
    )
    for i_part in tl.static_range(PARTS):
        for i_column in range(i_borders[i_part], i_borders[i_part + 1], COLUMNS):
            b_out, b_sum = shared_tile(
                b_out, b_sum, b_x, b_own, b_center, i_scale, x, p_x, p_pieces,
                p_valid, i_row, i_column, band, ROWS, COLUMNS, bands.STRIDED, i_part != 1, CAREFUL,
                PRECISION,
            )  # fmt: skip
    if p_again is not None and not CAREFUL:
        tl.store(p_again + tl.program_id(0), is_unsound(b_out))

    o_row = i_row + tl.arange(0, ROWS)
    m_row = o_row < band.n_sources
    # A token's weight with itself is 1, so the sum is at least 1. Far from the centre, rounding may
    # make it smaller: what is missing is added, times the token itself.
    b_lost = tl.where(b_sum < 1, 1 - b_sum, 0.0)
    if tl.max(b_lost, axis=0) > 0:  # the tile is loaded again, because holding it takes registers
        b_x = load_features(p_x, x, i_row, band.i_step, band.n_sources, ROWS, bands.STRIDED, True)
        if b_center is not None:
            b_x = b_x - b_center[None, :]
        b_out += b_lost[:, None] * b_x.to(tl.float32)
        b_sum += b_lost
    m_empty = ~m_row
    o_number = i_numbers + o_row * band.i_step
    if p_valid is not None:
        p_rows = p_valid + o_row * band.i_step
        m_empty = m_empty | (tl.load(p_rows, mask=m_row, other=0) == 0)
    b_out = b_out * (1.0 / b_sum)[:, None]  # one division per row
    if b_center is not None:
        b_out = b_out + b_center[None, :]
    b_out = tl.where(m_empty[:, None], 0.0, b_out)
    store_features(p_out, b_out, i_token, i_h, H, i_row, band.i_step, band.n_sources, x.WIDTH)
    b_true = tl.log2(b_sum)
    tl.store(p_lse + o_number, tl.where(m_empty, float("-inf"), b_true * LN2), mask=m_row)
    b_saved = b_true
    if p_center is None:  # without -||x_i||^2 / 2, as the kernels for three tensors store it
        b_saved = b_true + i_scale * b_own_half_square
    tl.store(p_saved + o_number, tl.where(m_empty, float("inf"), b_saved), mask=m_row)


@triton.jit
def shared_backward_tile(
    b_d_x, b_pulled, b_d_scale, b_x, b_own, b_d_out, b_inverse, b_delta, b_center,
    i_scale, x, p_x, d_out, p_d_out, p_pieces, p_lse, p_delta, p_valid, i_row, i_column, band,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STRIDED: tl.constexpr, MASKED: tl.constexpr,
    CAREFUL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the share of the pairs with tokens i_column, i_column + 1, ... in a tile's gradient.

    b_d_x is [ROWS, BLOCK_D], b_pulled and b_d_scale are [ROWS]. The two terms of G_ij come from the
    row of i (b_inverse, b_delta) and from the row of j (b_other_inverse, b_other_delta).
    """
    # [COLUMNS, BLOCK_D]
    b_other = load_features(
        p_x, x, i_column, band.i_step, band.n_sources, COLUMNS, STRIDED, MASKED
    )  # fmt: skip
    b_d_other = load_features(
        p_d_out, d_out, i_column, band.i_step, band.n_sources, COLUMNS, STRIDED, MASKED
    )
    o_row = i_row + tl.arange(0, ROWS)
    o_column = i_column + tl.arange(0, COLUMNS)
    m_column = o_column < band.n_sources
    # [COLUMNS]
    p_rows = row_pointers(p_lse, i_column, band.i_step, COLUMNS, STRIDED)
    b_other_lse = tl.load(p_rows, mask=m_column, other=0.0)
    b_other_inverse = tl.exp2(-(b_other_lse * LOG2E))  # 1 / Z_j
    b_other_inverse = tl.where(b_other_lse == float("-inf"), 0.0, b_other_inverse)
    p_rows = row_pointers(p_delta, i_column, band.i_step, COLUMNS, STRIDED)
    b_other_delta = tl.load(p_rows, mask=m_column, other=0.0)
    if b_center is not None:
        b_other = b_other - b_center[None, :]
        b_other_delta -= tl.sum(b_d_other * b_center[None, :], axis=1)
    # [ROWS, COLUMNS]
    b_log = log_affinities(
        b_x, b_own, b_other, p_pieces, i_scale * LOG2E, i_row, i_column, band,
        ROWS, COLUMNS, STRIDED, MASKED, PRECISION, True,
    )  # fmt: skip
    b_there = product(b_d_out, tl.trans(b_other), PRECISION)  # dy_i . x_j
    b_back = product(b_x, tl.trans(b_d_other), PRECISION)  # dy_j . x_i
    if MASKED:
        m_edge = edges_to(o_row, i_column, band, p_valid, COLUMNS, False, STRIDED)
        b_kernel = tl.exp2(tl.where(m_edge, b_log, float("-inf")))
    else:
        b_kernel = tl.exp2(b_log)
    if CAREFUL:
        b_other, _ = cleaned(b_other)
        b_d_other, m_bad = cleaned(b_d_other)
    b_weight = b_kernel * b_other_inverse[None, :]  # K_ij / Z_j
    # sigma^2 G_ij
    b_pull = b_kernel * b_inverse[:, None] * (b_there - b_delta[:, None])
    b_pull = b_pull + b_weight * (b_back - b_other_delta[None, :])
    if CAREFUL:
        b_weight = poisoned(b_weight, tl.where(m_edge, 0.0, float("-inf")), m_bad)
        b_pull = tl.where(m_edge, b_pull, 0.0)
        b_log = tl.where(m_edge, b_log, 0.0)
    b_d_scale += tl.sum(b_pull * b_log, axis=1)
    b_rounded = (b_pull * i_scale).to(b_other.dtype)
    b_pulled += tl.sum(b_rounded.to(tl.float32), axis=1)
    # [ROWS, BLOCK_D]
    b_d_x = add_product(b_d_x, b_rounded, b_other, PRECISION)
    b_d_x = add_product(b_d_x, b_weight.to(b_d_other.dtype), b_d_other, PRECISION)
    return b_d_x, b_pulled, b_d_scale


@triton.jit(do_not_specialize=["N", "H", "num_tiles"])
def shared_backward_kernel(
    x, d_out, p_lse, p_delta, p_d_x, p_d_scale, p_scale, p_pieces, p_center, p_valid, p_again,
    bands, N, H, num_tiles, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    CAREFUL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """d_x [B, N, H, D], and every tile's share of d_scale [B, tiles, H]; symmetric graphs."""
    if CAREFUL:  # noqa: SIM102  # a constant; the inner condition is known at run time
        if tl.load(p_again + tl.program_id(0)) == 0:
            return
    i_b, i_h, i_tile, i_row, band = tile_of_program(bands.p_tiles, bands.p_sequences, num_tiles, H)
    i_token, i_numbers = i_b * N + band.i_first_source, (i_b * H + i_h) * N + band.i_first_source
    if p_pieces is not None:
        p_pieces += i_numbers * PIECES
    if p_valid is not None:
        p_valid += i_token

    # [ROWS, BLOCK_D]
    p_x, p_d_out = first_row(x, i_token, i_h), first_row(d_out, i_token, i_h)
    b_x = load_features(p_x, x, i_row, band.i_step, band.n_sources, ROWS, bands.STRIDED, True)
    b_d_out = load_features(
        p_d_out, d_out, i_row, band.i_step, band.n_sources, ROWS, bands.STRIDED, True
    )
    b_center = None
    if p_center is not None:
        b_center = load_center(p_center, (i_b * num_tiles + i_tile) * H + i_h, x.WIDTH, x.BLOCK)
        b_x = b_x - b_center[None, :]
    b_own_half_square = half_square(b_x)
    b_own = b_own_half_square
    if p_pieces is not None:
        b_own = pieces(-b_own_half_square, True)
    o_row = i_row + tl.arange(0, ROWS)
    m_row = o_row < band.n_sources
    if p_valid is not None:
        p_rows = p_valid + o_row * band.i_step
        m_row = m_row & (tl.load(p_rows, mask=m_row, other=0) != 0)
    # [ROWS]
    o_number = i_numbers + o_row * band.i_step
    b_lse = tl.load(p_lse + o_number, mask=m_row, other=0.0)
    b_inverse = tl.exp2(-(b_lse * LOG2E))
    b_delta = tl.load(p_delta + o_number, mask=m_row, other=0.0)
    if (
        b_center is not None
    ):  # delta belongs to the tokens as they are; here they are measured from a centre
        b_delta -= tl.sum(b_d_out * b_center[None, :], axis=1)
    i_scale = tl.load(p_scale + i_h)

    b_d_x = tl.zeros([ROWS, x.BLOCK], tl.float32)
    b_pulled = tl.zeros([ROWS], tl.float32)
    b_d_scale = tl.zeros([ROWS], tl.float32)
    # Four places among the tokens; part 1, the middle one of three, needs no mask.
    i_borders = part_borders(
        i_row, band.n_sources, band.n_sources, band.n_before, band.n_after, ROWS, COLUMNS, PARTS
    )
    for i_part in tl.static_range(PARTS):
        for i_column in range(i_borders[i_part], i_borders[i_part + 1], COLUMNS):
            b_d_x, b_pulled, b_d_scale = shared_backward_tile(
                b_d_x, b_pulled, b_d_scale, b_x, b_own, b_d_out, b_inverse, b_delta,
                b_center, i_scale, x, p_x, d_out, p_d_out, p_pieces, p_lse + i_numbers,
                p_delta + i_numbers, p_valid, i_row, i_column, band, ROWS, COLUMNS, bands.STRIDED,
                i_part != 1, CAREFUL, PRECISION,
            )  # fmt: skip
    if p_again is not None and not CAREFUL:
        # Squares of large numbers are infinite, so d_scale may be NaN where d_x is not.
        tl.store(p_again + tl.program_id(0), is_unsound(b_d_x, b_d_scale))

    if i_borders[0] < i_borders[PARTS]:
        # The tile is loaded again, because holding it takes registers, and in a branch, because
        # Triton would keep the first copy otherwise.
        b_x = load_features(p_x, x, i_row, band.i_step, band.n_sources, ROWS, bands.STRIDED, True)
        if b_center is not None:
            b_x = b_x - b_center[None, :]
        b_d_x = b_d_x - b_pulled[:, None] * b_x.to(tl.float32)
    b_d_x = tl.where(m_row[:, None], b_d_x, 0.0)
    store_features(p_d_x, b_d_x, i_token, i_h, H, i_row, band.i_step, band.n_sources, x.WIDTH)
    # Both ends of a pair count it, so each takes half. b_log holds the scale, hence the division.
    i_share = tl.sum(tl.where(m_row, b_d_scale, 0.0), axis=0) * 0.5 / (i_scale * LOG2E)
    tl.store(p_d_scale + (i_b * num_tiles + i_tile) * H + i_h, i_share)


def has_shared_forward(inputs: BandInputs, self_loops: bool) -> bool:
    """Whether :func:`shared_forward` computes this: RBF, no biases, every token sees itself.

    The caller makes sure that query, key and value are one tensor.
    """
    x = inputs
    same = x.query.shape == x.value.shape and x.valid_target is x.valid_source
    return x.rbf and self_loops and same and x.table is None


def has_shared_backward(inputs: BandInputs, symmetric: bool) -> bool:
    """Whether :func:`shared_backward` computes the gradient: on symmetric graphs, in narrow heads.

    In wider heads its sums do not fit into registers, and spilling them costs more than the two
    products that it saves.
    """
    return symmetric and inputs.width <= WIDEST_BACKWARD


def shared_forward(inputs: BandInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Output [B, N, H, D], log-sums [B, H, N], and base-2 log-sums for the backward [B, H, N]."""
    x = inputs
    B, N, H, _ = x.query.shape
    out = torch.empty_like(x.query, memory_format=torch.contiguous_format)
    lse = x.query.new_empty((B, H, N), dtype=torch.float32)
    saved = torch.empty_like(lse)
    choice = x.choose("shared_forward")
    x.start(shared_forward_kernel, **_arguments(x, choice), p_out=out, p_lse=lse, p_saved=saved)
    return out, lse, saved


def shared_backward(
    inputs: BandInputs, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of the one tensor [B, N, H, D] and of scale [H], on a symmetric graph.

    `out` [B, N, H, D] and `lse` [B, H, N] are what the forward has returned, `d_out` and `d_lse`
    their gradients; `d_lse` is [B, N, H], or None for zero.
    """
    x = inputs
    B, _, H, _ = x.query.shape
    d_out = side_by_side(d_out)
    d_x = torch.empty_like(x.query, memory_format=torch.contiguous_format)
    choice = x.choose("shared_backward")
    arguments = _arguments(x, choice)
    shares = x.scale.new_empty(B, arguments["num_tiles"], H)
    x.start(
        shared_backward_kernel,
        **arguments,
        d_out=TokenRows.of(d_out),
        p_lse=lse,
        p_delta=row_dots(out, d_out, 1.0, d_lse),
        p_d_x=d_x,
        p_d_scale=shares,
    )
    return d_x, shares.sum((0, 1))


def _arguments(x: BandInputs, choice: tuning.Choice) -> dict[str, Any]:
    """Return the arguments of both kernels."""
    B, _, H, _ = x.query.shape
    common, tiles = x.common(), x.of_tiles("targets", choice)
    return {
        "programs": B * H * tiles["num_tiles"],
        "x": common["query"],
        "p_valid": common["p_valid_source"],
        "p_pieces": x.half_squares(),
        "PARTS": x.parts(choice.rows, choice.columns),
        **tiles,
        **{name: common[name] for name in ("p_scale", "N", "H", "PRECISION")},
    }

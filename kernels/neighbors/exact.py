"""Nearest neighbours by exact distances: the order of candidates, and the search without them.

Squared distances here are sums of squared differences in float64. Of equal distances, the source
with the smaller index is nearer. A token that may be its own neighbour is its own first neighbour.

Constants of the kernels: OWN is 1 if a token is its own first neighbour, 2 if it never is its
neighbour, and 0 if targets and sources are different tokens. KEPT are the candidates of a target,
and CHUNK the features that are read at a time. SLOTS are the neighbours of a target, rounded up to
a power of 2. The beginnings of names are explained in :mod:`graphattn.kernels`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphattn.kernels.bands.math import edges_to, part_borders, tile_of_program
from graphattn.kernels.bands.schedule import BandSchedule
from graphattn.kernels.shared.launch import launch

NONE = tl.constexpr(0x7FFFFFFF)  # larger than every index
OWN_FIRST, OWN_NEVER = 1, 2  # values of OWN
NUMBERS = 4096  # coordinates of candidates held at a time


@triton.jit
def placed(b_squared, o_source, o_token, o_hole, i_hole, OWN: tl.constexpr):
    """Squared distances that make a token its own first neighbour, or never its neighbour.

    All arguments broadcast against each other. `o_source` and `o_token` are indices of source and
    target. `o_hole` is the source in the target's place of the sequence, which is no neighbour if
    the sequence leaves out hop 0. Distances that are NaN become infinite.
    """
    b_squared = tl.where(b_squared < float("inf"), b_squared, float("inf"))
    if OWN != 0:
        b_rank = -1.0 if OWN == 1 else float("inf")
        m_itself = (o_source == o_token) & (b_squared < float("inf"))
        b_squared = tl.where(m_itself, b_rank, b_squared)
    return tl.where((o_source == o_hole) & (i_hole == 0), float("inf"), b_squared)


@triton.jit
def in_order(b_squared, b_index, k, ROWS: tl.constexpr, SLOTS: tl.constexpr):
    """The k nearest of every row, [ROWS, SLOTS] with -1 for none; and the distance of the last.

    `b_squared` are squared distances and `b_index` the sources, [ROWS, SLOTS] each. The distance of
    the last [ROWS] is squared, and infinite if a row has fewer than k.
    """
    o_slot = tl.arange(0, SLOTS)
    b_nearest = tl.full([ROWS, SLOTS], -1, tl.int32)
    b_least = tl.full([ROWS], float("inf"), tl.float64)
    for i_slot in range(k):
        b_least = tl.min(b_squared, axis=1)
        b_first = tl.min(tl.where(b_squared == b_least[:, None], b_index, NONE), axis=1)
        m_slot = (o_slot == i_slot)[None, :] & (b_least < float("inf"))[:, None]
        b_nearest = tl.where(m_slot, b_first[:, None], b_nearest)
        b_squared = tl.where(b_index == b_first[:, None], float("inf"), b_squared)
    return b_nearest, b_least


@triton.jit(do_not_specialize=["num_tiles", "k"])
def order_kernel(
    p_x, p_y, p_candidates, p_bound, p_margin, p_index, p_unsure, p_tiles, p_sequences,
    num_tiles, C, k,
    ROWS: tl.constexpr, KEPT: tl.constexpr, CHUNK: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """Candidates in their exact order, [N, k], and 1 for targets to which a source that is no
    candidate may be nearer, [N]."""
    _, _, _, i_row, band = tile_of_program(p_tiles, p_sequences, num_tiles, 1)
    i_first_target, n_targets, i_first_source, _, i_step, _, _, i_hole = band
    o_row = i_row + tl.arange(0, ROWS)
    o_slot = tl.arange(0, KEPT)
    m_row = o_row < n_targets
    o_token = i_first_target + o_row * i_step
    # [ROWS, KEPT]
    p_kept = p_candidates + o_token[:, None] * KEPT + o_slot[None, :]
    b_kept = tl.load(p_kept, mask=m_row[:, None], other=-1)
    m_kept = b_kept >= 0
    p_rows = p_x + o_token * C
    p_pairs = p_y + tl.where(m_kept, b_kept, 0).to(tl.int64) * C
    b_squared = tl.zeros([ROWS, KEPT], tl.float64)
    for i_chunk in range(0, C, CHUNK):
        o_feature = i_chunk + tl.arange(0, CHUNK)
        m_feature = o_feature < C
        m_x = m_row[:, None] & m_feature[None, :]
        b_x = tl.load(p_rows[:, None] + o_feature[None, :], mask=m_x, other=0.0)
        # [ROWS, KEPT, CHUNK]
        m_y = m_kept[:, :, None] & m_feature[None, None, :]
        b_y = tl.load(p_pairs[:, :, None] + o_feature[None, None, :], mask=m_y, other=0.0)
        b_gap = b_x.to(tl.float64)[:, None, :] - b_y.to(tl.float64)
        # [ROWS, KEPT]
        b_squared += tl.sum(b_gap * b_gap, axis=2)
    b_squared = tl.where(m_kept, b_squared, float("inf"))
    o_hole = i_first_source + o_row * i_step
    b_squared = placed(b_squared, b_kept, o_token[:, None], o_hole[:, None], i_hole, OWN)
    b_nearest, b_last = in_order(b_squared, b_kept, k, ROWS, KEPT)

    b_margin = tl.load(p_margin + o_token, mask=m_row, other=float("inf"))
    b_bound = tl.load(p_bound + o_token, mask=m_row, other=float("inf")).to(tl.float64)
    m_none = b_margin == float("inf")  # a token that holds NaN has no neighbours
    b_nearest = tl.where(m_none[:, None], -1, b_nearest)
    p_nearest = p_index + o_token[:, None] * k + o_slot[None, :]
    tl.store(p_nearest, b_nearest.to(tl.int64), mask=m_row[:, None] & (o_slot < k)[None, :])
    # Either no source was left out, or all that were are farther than the last one found.
    m_all = (b_bound == float("inf")) & (b_margin > float("-inf"))
    m_sure = m_none | m_all | (b_bound + b_margin > b_last)
    tl.store(p_unsure + o_token, tl.where(m_sure, 0, 1).to(tl.int8), mask=m_row)


@triton.jit(do_not_specialize=["num_tiles", "M", "C", "k"])
def search_kernel(
    p_x, p_y, p_index, p_unsure, p_tiles, p_sequences, num_tiles, M, C, k,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SLOTS: tl.constexpr, OWN: tl.constexpr,
    STRIDED: tl.constexpr,
):  # fmt: skip
    """The k nearest [N, k] of the targets that are unsure, among all sources that they see."""
    _, _, _, i_row, band = tile_of_program(p_tiles, p_sequences, num_tiles, 1)
    i_first_target, n_targets, i_first_source, n_sources, i_step, n_before, n_after, i_hole = band
    o_row = i_row + tl.arange(0, ROWS)
    o_token = i_first_target + o_row * i_step
    m_row = o_row < n_targets
    m_row = m_row & (tl.load(p_unsure + o_token, mask=m_row, other=0) != 0)
    if tl.max(m_row.to(tl.int32), axis=0) > 0:
        o_slot = tl.arange(0, SLOTS)
        # [ROWS, SLOTS]: at first, different numbers that are no source's index.
        b_index = tl.zeros([ROWS, SLOTS], tl.int32) + (o_slot + (NONE - SLOTS))[None, :]
        b_kept = tl.full([ROWS, SLOTS], float("inf"), tl.float64)
        b_top = tl.max(b_kept, axis=1)
        i_begin, _i_full, _i_full_end, i_end = part_borders(
            i_row, n_targets, n_sources, n_before, n_after, ROWS, COLUMNS, 1
        )
        for i_column in range(i_begin, i_end, COLUMNS):
            o_column = i_column + tl.arange(0, COLUMNS)
            o_source = i_first_source + o_column * i_step
            m_column = o_column < n_sources
            # [ROWS, COLUMNS]
            b_squared = tl.zeros([ROWS, COLUMNS], tl.float64)
            p_columns = p_y + o_source
            for i_feature in range(C):
                b_x = tl.load(p_x + o_token * C + i_feature, mask=m_row, other=0.0)
                b_y = tl.load(p_columns, mask=m_column, other=0.0)
                p_columns += M  # step by step: C * M may exceed 2^31
                b_gap = b_x.to(tl.float64)[:, None] - b_y.to(tl.float64)[None, :]
                b_squared += b_gap * b_gap
            o_hole = i_first_source + o_row * i_step
            b_squared = placed(
                b_squared, o_source[None, :], o_token[:, None], o_hole[:, None], i_hole, OWN
            )
            m_edge = edges_to(o_row, i_column, band, None, COLUMNS, False, STRIDED)
            b_squared = tl.where(m_edge & m_row[:, None], b_squared, float("inf"))
            b_least = tl.min(b_squared, axis=1)
            # Columns come in order, so of equal distances those already kept have smaller indices.
            while tl.max((b_least < b_top).to(tl.int32), axis=0) > 0:
                m_least = b_squared == b_least[:, None]
                b_column = tl.min(tl.where(m_least, o_column[None, :], NONE), axis=1)
                b_farthest = tl.max(tl.where(b_kept == b_top[:, None], b_index, -1), axis=1)
                m_slot = (b_index == b_farthest[:, None]) & (b_least < b_top)[:, None]
                b_kept = tl.where(m_slot, b_least[:, None], b_kept)
                b_source = (i_first_source + b_column * i_step).to(tl.int32)
                b_index = tl.where(m_slot, b_source[:, None], b_index)
                b_top = tl.max(b_kept, axis=1)
                m_column_taken = o_column[None, :] == b_column[:, None]
                b_squared = tl.where(m_column_taken, float("inf"), b_squared)
                b_least = tl.min(b_squared, axis=1)
        b_nearest, _b_last = in_order(b_kept, b_index, k, ROWS, SLOTS)
        p_nearest = p_index + o_token[:, None] * k + o_slot[None, :]
        tl.store(p_nearest, b_nearest.to(tl.int64), mask=m_row[:, None] & (o_slot < k)[None, :])


def in_exact_order(
    x: Tensor, y: Tensor, candidates: Tensor, bound: Tensor, margin: Tensor, bands: BandSchedule,
    k: int, own_rule: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The k nearest of the candidates, int64 [N, k], and whether there may be nearer, int8 [N].

    Args:
        x, y: targets [N, C] and sources [M, C], float32.
        candidates: int32 [N, kept], -1 for none.
        bound: float32 [N]; the s of every source that was left out is at least this. Infinite if
            none was left out.
        margin: float64 [N]; a squared distance is at least s + margin.
        bands: which sources a target sees.
        k: neighbours of a token, at most `kept` - 2.
        own_rule: OWN_FIRST, OWN_NEVER, or 0 if targets and sources are different tokens.
    """
    N, kept = candidates.shape
    index = candidates.new_empty((N, k), dtype=torch.int64)
    unsure = candidates.new_empty(N, dtype=torch.int8)
    chunk = 16 if kept <= 256 else 8
    rows = NUMBERS // (chunk * kept)
    tiles = bands.tiles("targets", rows)
    launch(
        order_kernel,
        (len(tiles),),
        p_x=x,
        p_y=y,
        p_candidates=candidates,
        p_bound=bound,
        p_margin=margin,
        p_index=index,
        p_unsure=unsure,
        p_tiles=tiles,
        p_sequences=bands.sequences,
        num_tiles=len(tiles),
        C=x.shape[1],
        k=k,
        ROWS=rows,
        KEPT=kept,
        CHUNK=chunk,
        OWN=own_rule,
        num_warps=4,
        num_stages=1,
        fp_fusion=False,
    )
    return index, unsure


def search_again(
    x: Tensor, y: Tensor, index: Tensor, unsure: Tensor, bands: BandSchedule, own_rule: int
) -> None:
    """Overwrites the rows of `index` [N, k] that are `unsure` [N], both from `in_exact_order`."""
    k = index.shape[1]
    slots = triton.next_power_of_2(k)
    rows, columns = (16, 64) if slots <= 128 else (8, 128)
    tiles = bands.tiles("targets", rows)
    launch(
        search_kernel,
        (len(tiles),),
        p_x=x,
        p_y=y.T.contiguous(),  # a feature of neighbouring sources side by side
        p_index=index,
        p_unsure=unsure,
        p_tiles=tiles,
        p_sequences=bands.sequences,
        num_tiles=len(tiles),
        M=len(y),
        C=x.shape[1],
        k=k,
        ROWS=rows,
        COLUMNS=columns,
        SLOTS=slots,
        OWN=own_rule,
        STRIDED=bands.is_strided,
        num_warps=8,
        num_stages=1,
        fp_fusion=False,
    )

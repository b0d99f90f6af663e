"""Sums of messages at the ends of edges: in a fixed order, without atomics.

Another kernel has written one message for every edge, [H, B, places, width]. Here every token adds
up the messages of its own edges: those to it, those from it, or both. `sum_runs_kernel` does this
for windows, whose messages are runs, and `sum_rows_kernel` for lists of edges.
"""

from __future__ import annotations

from functools import cached_property

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphattn.kernels.consensus.schedule import Piece
from graphattn.kernels.edges.inputs import num_groups
from graphattn.kernels.edges.math import segments_of_program
from graphattn.kernels.edges.schedule import Rows
from graphattn.kernels.edges.split_rows import add_parts_kernel, launch_over_split, new_parts
from graphattn.kernels.shared import tuning
from graphattn.kernels.shared.launch import launch
from graphattn.kernels.shared.layout import load_rows, store_rows
from graphattn.kernels.shared.programs import heads_first

NUMBERS = 1024  # elements of a tile of `sum_runs_kernel`


@triton.jit(
    do_not_specialize=[
        "B", "N", "H", "num_places", "first", "count", "low", "high", "num_tiles", "num_runs",
    ]
)  # fmt: skip
def sum_runs_kernel(
    p_total, p_messages, p_moves, B, N, H, num_places, first, count, low, high, num_tiles, num_runs,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr,
    AT_TARGET: tl.constexpr, AT_SOURCE: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """total[b, n, h] = AT_TARGET * messages to n + AT_SOURCE * messages from n, for n = low ..
    high - 1.

    total is [B, N, H, WIDTH]; with ADD, the sum is added to what it holds. A message from n belongs
    to an edge whose source is n. The signs AT_TARGET and AT_SOURCE are 1, -1 or 0.
    """
    BLOCK: tl.constexpr = triton.next_power_of_2(WIDTH)
    i_b, i_h, i_tile = heads_first(num_tiles, H)
    o_token = low + i_tile * TOKENS + tl.arange(0, TOKENS)
    o_feature = tl.arange(0, BLOCK)
    m_token = o_token < high
    m_feature = (o_feature < WIDTH)[None, :]
    p_messages += (i_h.to(tl.int64) * B + i_b) * num_places * WIDTH
    b_total = tl.zeros([TOKENS, BLOCK], tl.float32)
    for i_run in range(num_runs):
        p_run = p_messages + tl.cast(i_run, tl.int64) * count * WIDTH
        if AT_TARGET != 0:
            o_place = (o_token - first).to(tl.int64)
            m_tile = (m_token & (o_place >= 0) & (o_place < count))[:, None] & m_feature
            p_tile = p_run + o_place[:, None] * WIDTH + o_feature[None, :]
            b_total += AT_TARGET * tl.load(p_tile, mask=m_tile, other=0.0).to(tl.float32)
        if AT_SOURCE != 0:
            o_place = o_token - first - tl.load(p_moves + i_run)
            m_tile = (m_token & (o_place >= 0) & (o_place < count))[:, None] & m_feature
            p_tile = p_run + o_place[:, None] * WIDTH + o_feature[None, :]
            b_total += AT_SOURCE * tl.load(p_tile, mask=m_tile, other=0.0).to(tl.float32)
    p_tile = p_total + ((i_b * N + o_token)[:, None] * H + i_h) * WIDTH + o_feature[None, :]
    m_tile = m_token[:, None] & m_feature
    if ADD:
        b_total += tl.load(p_tile, mask=m_tile, other=0.0)
    tl.store(p_tile, b_total.to(p_total.dtype.element_ty), mask=m_tile)


@triton.jit(do_not_specialize=["B", "N", "H", "num_places", "num_segments", "num_parts"])
def sum_rows_kernel(
    p_total, p_part, p_messages, p_segments, p_places,
    B, N, H, num_places, num_segments, num_parts,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr,
    SIGN: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """total[b, n, h] = SIGN * the sum of the messages of row n; with ADD, plus what it holds.

    total is [B, N, H, WIDTH]; sums of parts of split rows are [B, parts, H, WIDTH], or None. The
    places of a row's messages are listed in `p_places`; if that is None, they are consecutive.
    """
    BLOCK: tl.constexpr = triton.next_power_of_2(WIDTH)
    i_b, i_h, b_row, b_first, b_count, b_part = segments_of_program(
        p_segments, num_segments, H, ROWS
    )
    i_most = tl.max(b_count, axis=0)
    if not ADD or i_most > 0:
        p_messages += (i_h.to(tl.int64) * B + i_b) * num_places * WIDTH
        o_feature = tl.arange(0, BLOCK)
        m_feature = o_feature < WIDTH
        b_total = tl.zeros([ROWS, BLOCK], tl.float32)
        for i_slot in range(0, i_most, SLOTS):
            o_slot = i_slot + tl.arange(0, SLOTS)
            # [ROWS, SLOTS]
            m_edge = o_slot[None, :] < b_count[:, None]
            b_place = b_first[:, None] + o_slot[None, :]
            if p_places is not None:
                b_place = tl.load(p_places + b_place, mask=m_edge, other=0)
            # [ROWS, SLOTS, BLOCK]
            p_tile = p_messages + (b_place * WIDTH)[:, :, None] + o_feature[None, None, :]
            m_tile = m_edge[:, :, None] & m_feature[None, None, :]
            # [ROWS, BLOCK]
            b_total += tl.sum(tl.load(p_tile, mask=m_tile, other=0.0).to(tl.float32), axis=1)
        b_total = SIGN * b_total
        m_row = b_row >= 0
        if p_part is not None:
            p_part += (i_b * num_parts * H + i_h) * WIDTH
            store_rows(p_part, b_total, b_part, m_row & (b_part >= 0), H * WIDTH, WIDTH)
        m_row = m_row & (b_part < 0)
        p_total += (i_b * N * H + i_h) * WIDTH
        if ADD:
            b_total += load_rows(p_total, b_row, m_row, H * WIDTH, WIDTH)
        store_rows(p_total, b_total, b_row, m_row, H * WIDTH, WIDTH)


class Sum:
    """A sum over the edges of every token, [B, N, H, width], piece by piece.

    A single piece is written in `dtype` at once. Several are added up in float32 first. Memory for
    the sum is taken when the first piece is added.

    Args:
        like: a tensor on the same device.
        sizes: those of the result, [B, N, H, width]. N counts the tokens at which messages are
            summed up.
        dtype: that of the result.
        at: the sign of a message at its target, and at its source; 0 if it is not added there.
        pieces: all pieces whose messages will be added.
    """

    def __init__(
        self,
        like: Tensor,
        sizes: tuple[int, int, int, int],
        dtype: torch.dtype,
        at: tuple[int, int],
        pieces: list[Piece],
    ) -> None:
        self.at, self.dtype = at, dtype
        self._like, self._sizes = like, sizes
        # If one launch writes every token, the result need not begin with zeros. A list of edges
        # takes one launch for each side.
        self.is_whole = len(pieces) == 1 and not (pieces[0].schedule is not None and all(at))

    @cached_property
    def total(self) -> Tensor:
        """The sum of the pieces so far. It has no values before the first if that is the whole."""
        if self.is_whole:
            return self._like.new_empty(self._sizes, dtype=self.dtype)
        return self._like.new_zeros(self._sizes, dtype=torch.float32)

    def add(self, piece: Piece, messages: Tensor) -> None:
        """Add the messages [H, B, places, width] of a piece."""
        schedule = piece.schedule
        if schedule is None:
            self._add_runs(piece, messages)
            return
        for sign, rows in zip(
            self.at, (lambda: schedule.by_target, lambda: schedule.by_source), strict=True
        ):
            if sign:
                self._add_rows(rows(), messages, sign)

    def result(self) -> Tensor:
        """The sums [B, N, H, width], in their dtype."""
        return self.total.to(self.dtype)

    def _add_runs(self, piece: Piece, messages: Tensor) -> None:
        B, N, H, width = self.total.shape
        low, high = 0, N
        if not self.is_whole:
            # The piece's targets, and where its moves lead from them.
            ends = [0] * bool(self.at[0]) + list(piece.reach) * bool(self.at[1])
            low = max(0, piece.first + min(ends))
            high = min(N, piece.first + piece.count + max(ends))
        tokens = max(1, NUMBERS // max(triton.next_power_of_2(width), 16))
        tiles = triton.cdiv(max(high - low, 0), tokens)
        launch(
            sum_runs_kernel,
            (B * H * tiles,),
            p_total=self.total,
            p_messages=messages,
            p_moves=piece.moves,
            B=B,
            N=N,
            H=H,
            num_places=piece.places,
            first=piece.first,
            count=piece.count,
            low=low,
            high=high,
            num_tiles=tiles,
            num_runs=piece.runs,
            WIDTH=width,
            TOKENS=tokens,
            AT_TARGET=self.at[0],
            AT_SOURCE=self.at[1],
            ADD=not self.is_whole,
            num_warps=4,
            num_stages=1,
        )

    def _add_rows(self, rows: Rows, messages: Tensor, sign: int) -> None:
        B, N, H, width = self.total.shape
        choice = tuning.choose_for_edges("sum_messages", width, rows.mean_degree)
        part = new_parts(rows, messages, B, H, width)
        launch(
            sum_rows_kernel,
            (B * H * num_groups(choice, rows),),
            p_total=self.total,
            p_part=part,
            p_messages=messages,
            p_segments=rows.segments,
            p_places=rows.edge_ids,
            B=B,
            N=N,
            H=H,
            num_places=messages.shape[2],
            num_segments=len(rows.segments),
            num_parts=rows.num_parts,
            WIDTH=width,
            ROWS=choice.rows,
            SLOTS=choice.columns,
            SIGN=sign,
            ADD=not self.is_whole,
            num_warps=choice.num_warps,
            num_stages=choice.num_stages,
        )
        launch_over_split(
            add_parts_kernel, rows, self.total, p_part=part, p_sum=self.total, ADD=not self.is_whole
        )

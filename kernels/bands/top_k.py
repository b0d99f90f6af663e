"""Top-k within windows: of every target, the edges to the sources with the largest logits are kept.

Logits are compared as integers in the same order, called *ranks* here
(:mod:`graphattn.kernels.shared.ordered_integers`). The k-th largest rank of a row lies between its
smallest and its largest. That interval is halved, by counting how many ranks reach its middle,
until exactly k do or nothing lies between its ends. Of sources that equal the k-th, the first are
kept.

The result is a mask of bits that forward and backward read. They do not choose themselves, because
they may add features in another order, and would then choose differently near a tie.

Names and constants are explained where :mod:`graphattn.kernels.bands.forward` says.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphattn.kernels.bands.arguments import PairTables, Sources
from graphattn.kernels.bands.inputs import BandInputs
from graphattn.kernels.bands.math import (
    NOWHERE,
    edges_to,
    first_row,
    first_word,
    load_affinities,
    load_bias,
    load_center,
    load_features,
    own_tile,
)
from graphattn.kernels.shared import tuning
from graphattn.kernels.shared.launch import launch
from graphattn.kernels.shared.ordered_integers import (
    LARGEST,
    NO_EDGE,
    is_open,
    middle,
    narrowed,
    rank_of,
)

WORD = 32  # sources whose bits share one number
WARP = 32  # threads
# If a tile's rows see few sources, all their ranks are held in registers: at most so many a thread,
# by the widest head, because the matrix product takes registers, too. Otherwise the ranks are
# computed again for every try.
OF_HALF = {64: 192, 128: 96, 256: 64}
HELD = {torch.float32: {64: 64}, torch.float16: OF_HALF, torch.bfloat16: OF_HALF}
FEW_ROWS = tuning.Choice(16, 128, 4, 1)  # they see fewer sources together


@triton.jit
def rank_tile(
    b_query, b_center, i_scale, key, sources, pairs, o_live, i_column, own,
    COLUMNS: tl.constexpr, RBF: tl.constexpr, HOLES: tl.constexpr, STRIDED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Ranks of the sources i_column, i_column + 1, ... of a tile of targets, [ROWS, COLUMNS].

    NaN has the largest rank, as in torch; NO_EDGE is the smallest. `o_live` [ROWS] has the targets'
    places, and -NOWHERE for rows after the end.
    """
    # [ROWS, COLUMNS], here and below
    _, b_affinity = load_affinities(
        b_query, b_center, key, sources.p_key, sources.p_half_square, i_column, own,
        COLUMNS, RBF, STRIDED, True, PRECISION,
    )  # fmt: skip
    b_logit = b_affinity * i_scale
    m_edge = edges_to(o_live, i_column, own, sources.p_valid, COLUMNS, HOLES, STRIDED)
    if pairs.p_table is not None:
        o_hop = (i_column + tl.arange(0, COLUMNS))[None, :] - o_live[:, None]
        b_logit += load_bias(pairs, o_hop, m_edge)
    return tl.where(m_edge, rank_of(b_logit), NO_EDGE)


@triton.jit
def counted(b_counts, m_pair):
    """Counts [ROWS, COLUMNS], one more where `m_pair` is true.

    Counts are floats because that takes two instructions: additions of floats can be predicated.
    """
    return tl.where(m_pair, b_counts + 1.0, b_counts)


@triton.jit
def widened(b_low, b_most, b_rank):
    """The smallest and the largest rank of every row's edges [ROWS], including those of a tile.

    `b_low` and `b_most` are those of the tiles before, `b_rank` [ROWS, COLUMNS] is this tile's.
    """
    b_least = tl.min(tl.where(b_rank == NO_EDGE, LARGEST, b_rank), axis=1)
    return tl.minimum(b_low, b_least), tl.maximum(b_most, tl.max(b_rank, axis=1))


@triton.jit
def turns(b_rank, b_low, i_column, COLUMNS: tl.constexpr):
    """Return when the sources of a tile are taken, [ROWS, COLUMNS]: the smaller, the earlier.

    Sources with a rank above `b_low` [ROWS] have -1, those that equal it their column, and those
    below LARGEST, which is never.
    """
    o_column = i_column + tl.arange(0, COLUMNS)
    b_turn = tl.where(b_rank == b_low[:, None], o_column[None, :], LARGEST)
    return tl.where(b_rank > b_low[:, None], -1, b_turn)


@triton.jit
def halved(b_end, b_start, b_try, b_reach, top_k):
    """Bisect for the last source that is kept: the interval after a try, [ROWS] each.

    Taking all sources before `b_end` gives `top_k` or more, all before `b_start` gives fewer;
    `b_reach` sources come before `b_try`.
    """
    m_enough = b_reach >= top_k
    return tl.where(m_enough, b_try, b_end), tl.where(m_enough, b_start, b_try)


@triton.jit
def store_kept(
    pairs, m_kept, o_row, i_column, own, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Writes the mask `m_kept` [ROWS, COLUMNS] as bits, in words of 32 sources (see `select`)."""
    b_bit = tl.full([COLUMNS], 1, tl.int32) << (tl.arange(0, COLUMNS) % 32)
    b_bits = tl.where(m_kept, b_bit[None, :], 0)
    # [ROWS, COLUMNS / 32]
    b_words = tl.sum(tl.reshape(b_bits, [ROWS, COLUMNS // 32, 32]), axis=2)
    o_word = i_column // 32 + tl.arange(0, COLUMNS // 32)[None, :]
    o_word = o_word - first_word(o_row, own.n_before)[:, None]
    m_word = (o_row < own.n_targets)[:, None] & (o_word >= 0) & (o_word < pairs.n_words)
    p_words = pairs.p_kept + (o_row * own.i_step)[:, None] * pairs.n_words + o_word
    tl.store(p_words, b_words, mask=m_word)


@triton.jit(do_not_specialize=["N", "M", "H", "num_tiles", "origin", "num_words", "top_k"])
def band_select_kernel(
    query, key, value, p_scale, p_half_square, p_center, p_table, p_kept, p_valid_target,
    p_valid_source, bands, N, M, H, num_tiles, origin, top_k, num_words,
    REPEATS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RBF: tl.constexpr,
    PRECISION: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """kept [B, H, N, words]: bits of the `top_k` sources of every row with the largest logits.

    With CHUNKS > 0, rows see at most so many tiles, whose ranks are held in registers. With CHUNKS
    0, ranks are computed again for every try, always by the same instructions, so that they never
    differ.
    """
    i_b, i_h, i_tile, i_row, own = own_tile(bands.p_tiles, bands.p_sequences, num_tiles, H)
    i_key_head = i_h // REPEATS
    i_target, i_source = i_b * N + own.i_first_target, i_b * M + own.i_first_source
    if p_half_square is not None:
        p_half_square += (i_b * (H // REPEATS) + i_key_head) * M + own.i_first_source
    if p_valid_source is not None:
        p_valid_source += i_source
    if p_table is not None:
        p_table += origin * H + i_h
    p_kept += ((i_b * H + i_h) * N + own.i_first_target) * num_words
    p_key = first_row(key, i_source, i_key_head)
    sources = Sources(p_key, None, p_half_square, p_valid_source)
    pairs = PairTables(p_table, H, p_kept, num_words)
    # [ROWS, BLOCK_D]
    b_query = load_features(
        first_row(query, i_target, i_h), query, i_row, own.i_step, own.n_targets, ROWS,
        bands.STRIDED, True,
    )  # fmt: skip
    b_center = None
    if p_center is not None:
        i_slot = (i_b * num_tiles + i_tile) * (H // REPEATS) + i_key_head
        b_center = load_center(p_center, i_slot, query.WIDTH, query.BLOCK)
        b_query = b_query - b_center[None, :]
    i_scale = tl.load(p_scale + i_h)
    o_row = i_row + tl.arange(0, ROWS)
    o_live = tl.where(o_row < own.n_targets, o_row, -NOWHERE)
    i_begin = tl.maximum(i_row - own.n_before, 0) // 32 * 32
    i_end = tl.minimum(tl.minimum(i_row + ROWS, own.n_targets) + own.n_after, own.n_sources)

    # At first b_of_low is a bound: no row has more edges than its window has sources. A row with
    # fewer, as next to padding, takes more tries until it is found that all its edges are kept.
    o_first = tl.maximum(o_row - own.n_before, 0)
    o_past = tl.minimum(o_row + own.n_after + 1, own.n_sources)
    b_of_low = tl.where(o_row < own.n_targets, (o_past - o_first).to(tl.float32), 0.0)
    b_of_high = tl.zeros([ROWS], tl.float32)
    b_low = tl.full([ROWS], LARGEST, tl.int32)
    b_most = tl.full([ROWS], NO_EDGE, tl.int32)
    b_end = tl.full([ROWS], 0, tl.int32) + i_end
    if CHUNKS > 0:
        held = ()
        for i_chunk in tl.static_range(CHUNKS):
            b_rank = rank_tile(
                b_query, b_center, i_scale, key, sources, pairs, o_live,
                i_begin + i_chunk * COLUMNS, own, COLUMNS, RBF, bands.HOLES, bands.STRIDED,
                PRECISION,
            )  # fmt: skip
            held = held + (b_rank,)  # type: ignore[assignment]  # noqa: RUF005
            b_low, b_most = widened(b_low, b_most, b_rank)
        b_high = b_most + 1
        while is_open(b_low, b_high, b_of_low, top_k):
            b_try = middle(b_low, b_high)
            b_counts = tl.zeros([ROWS, COLUMNS], tl.float32)
            for i_chunk in tl.static_range(CHUNKS):
                b_counts = counted(b_counts, held[i_chunk] >= b_try[:, None])
            b_reach = tl.sum(b_counts, axis=1)
            b_low, b_high, b_of_low, b_of_high = narrowed(
                b_low, b_high, b_of_low, b_of_high, b_try, b_reach, top_k
            )
        order = ()
        for i_chunk in tl.static_range(CHUNKS):
            b_turn = turns(held[i_chunk], b_low, i_begin + i_chunk * COLUMNS, COLUMNS)
            order = order + (b_turn,)  # type: ignore[assignment]  # noqa: RUF005
        b_start = tl.where(b_of_low > top_k, i_begin, b_end - 1)
        while tl.max(b_end - b_start, axis=0) > 1:
            b_try = (b_start + b_end) // 2
            b_counts = tl.zeros([ROWS, COLUMNS], tl.float32)
            for i_chunk in tl.static_range(CHUNKS):
                b_counts = counted(b_counts, order[i_chunk] < b_try[:, None])
            b_reach = tl.sum(b_counts, axis=1)
            b_end, b_start = halved(b_end, b_start, b_try, b_reach, top_k)
        for i_chunk in tl.static_range(CHUNKS):
            store_kept(
                pairs, order[i_chunk] < b_end[:, None], o_row, i_begin + i_chunk * COLUMNS, own,
                ROWS, COLUMNS,
            )  # fmt: skip
    else:
        b_high, b_start = b_most, b_end
        # Phases: 0 finds the range of ranks, 1 the k-th rank, 2 the last kept source that equals
        # it, and 3 writes the bits. Each pass over all tiles is one try.
        i_phase = 0
        while i_phase < 4:
            # Computing a tile costs more than comparing it with three numbers, so phase 1 tries the
            # middle of the interval and the middles of both halves in one pass.
            b_try, b_upto = middle(b_low, b_high), (b_start + b_end) // 2
            b_below, b_above = middle(b_low, b_try), middle(b_try, b_high)
            b_counts = tl.zeros([ROWS, COLUMNS], tl.float32)
            b_counts_below = tl.zeros([ROWS, COLUMNS], tl.float32)
            b_counts_above = tl.zeros([ROWS, COLUMNS], tl.float32)
            for i_column in range(i_begin, i_end, COLUMNS):
                b_rank = rank_tile(
                    b_query, b_center, i_scale, key, sources, pairs, o_live, i_column, own,
                    COLUMNS, RBF, bands.HOLES, bands.STRIDED, PRECISION,
                )  # fmt: skip
                if i_phase == 0:
                    b_low, b_most = widened(b_low, b_most, b_rank)
                elif i_phase == 1:
                    b_counts = counted(b_counts, b_rank >= b_try[:, None])
                    b_counts_below = counted(b_counts_below, b_rank >= b_below[:, None])
                    b_counts_above = counted(b_counts_above, b_rank >= b_above[:, None])
                else:
                    b_turn = turns(b_rank, b_low, i_column, COLUMNS)
                    if i_phase == 2:
                        b_counts = counted(b_counts, b_turn < b_upto[:, None])
                    else:
                        store_kept(
                            pairs, b_turn < b_end[:, None], o_row, i_column, own, ROWS, COLUMNS
                        )
            b_reach = tl.sum(b_counts, axis=1)
            if i_phase == 0:
                b_high = b_most + 1
            elif i_phase == 1:
                b_low, b_high, b_of_low, b_of_high = narrowed(
                    b_low, b_high, b_of_low, b_of_high, b_try, b_reach, top_k
                )
                b_low, b_high, b_of_low, b_of_high = narrowed(
                    b_low, b_high, b_of_low, b_of_high, b_below, tl.sum(b_counts_below, axis=1),
                    top_k,
                )  # fmt: skip
                b_low, b_high, b_of_low, b_of_high = narrowed(
                    b_low, b_high, b_of_low, b_of_high, b_above, tl.sum(b_counts_above, axis=1),
                    top_k,
                )  # fmt: skip
            elif i_phase == 2:
                b_end, b_start = halved(b_end, b_start, b_upto, b_reach, top_k)
            if i_phase < 2:
                b_start = tl.where(b_of_low > top_k, i_begin, b_end - 1)
                i_phase = tl.where(is_open(b_low, b_high, b_of_low, top_k), 1, 2)
            if i_phase == 3:
                i_phase = 4
            elif i_phase == 2:
                i_phase = tl.where(tl.max(b_end - b_start, axis=0) > 1, 2, 3)


def select(inputs: BandInputs, top_k: int) -> Tensor:
    """Int32 [B, H, N, words]: a bit for every pair, set for the `top_k` edges that are kept.

    These are the edges of a target and head with the largest logits; of equal logits, those of the
    smaller sources. Source c of target i has bit c % 32 of word c // 32 - max(i - before, 0) // 32,
    where i and c are places within the sequence. Bits of pairs that are no edges are arbitrary.
    """
    x = inputs
    B, N, H, _ = x.query.shape
    choice = tuning.choose("band_select", x.query.dtype, x.width, x.bands.window)
    choice = choice._replace(columns=max(choice.columns, WORD))
    chunks = _held(x, choice)
    if chunks == 0 and (chunks := _held(x, FEW_ROWS)):
        choice = FEW_ROWS
    words = triton.cdiv(x.bands.window - 1, WORD) + 1 if x.bands.window else 0
    kept = torch.empty((B, H, N, words), dtype=torch.int32, device=x.query.device)
    tiles = x.of_tiles("targets", choice)
    launch(
        band_select_kernel,
        (B * H * tiles["num_tiles"],),
        p_half_square=x.half_squares(choice.rows, choice.columns),
        top_k=min(top_k, x.bands.window),
        CHUNKS=chunks,
        fp_fusion=False,  # equal keys must have equal squares, whichever lanes add them up
        **tiles,
        **(x.common() | {"p_kept": kept, "num_words": words}),
    )
    return kept


def _held(x: BandInputs, choice: tuning.Choice) -> int:
    """Tiles that the rows of a program see at most, if their ranks fit into registers; else 0."""
    most = next((n for widest, n in HELD[x.query.dtype].items() if x.width <= widest), 0)
    chunks = triton.cdiv(_span(x.bands.on_cpu, choice.rows), choice.columns)
    ranks = chunks * choice.columns * choice.rows
    return chunks if ranks <= most * WARP * choice.num_warps else 0


def _span(sequences: Tensor, rows: int) -> int:
    """The most sources that a tile of `rows` targets goes over, beginning with a whole word."""
    _, targets, _, sources, _, before, after, _ = sequences.unbind(1)
    step = min(rows, WORD)
    # Tiles begin at multiples of their rows, so this is how far their first source is in its word.
    inside = -before % step + WORD - step
    reach = before + after + targets.clamp(max=rows) + inside
    return int(torch.minimum(reach, sources).max()) if len(sequences) else 0

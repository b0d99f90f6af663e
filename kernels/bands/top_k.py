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
    half_square,
    is_edge,
    load_affinities,
    load_bias,
    load_center,
    load_features,
    part_borders,
    tile_of_program,
)
from graphattn.kernels.shared import tuning
from graphattn.kernels.shared.launch import launch
from graphattn.kernels.shared.ordered_integers import (
    LARGEST,
    NO_EDGE,
    NOT_A_NUMBER,
    is_open,
    is_wide,
    logit_of,
    middle,
    narrowed,
    rank_of,
)
from graphattn.kernels.shared.precision import PIECES, product

WORD = 32  # sources whose bits share one number
WARP = 32  # threads
# If a tile's rows see few sources, all their ranks are held in registers: at most so many a thread,
# by the widest head, because the matrix product takes registers, too. Otherwise the ranks are
# computed again for every try.
OF_HALF = {64: 192, 128: 96, 256: 64}
HELD = {torch.float32: {64: 64}, torch.float16: OF_HALF, torch.bfloat16: OF_HALF}
INFINITE = tl.constexpr(0x7F800000)  # the rank of infinity
LOWEST = tl.constexpr(-0x7F800001)  # the rank of minus infinity
SAMPLE = tl.constexpr(128)  # sources of a tile of the sample, which has two tiles
HALVINGS = tl.constexpr(12)  # of the sample's range
MARGIN = tl.constexpr(3.5)  # standard deviations
FIRST_PLACE = tl.constexpr(float(1 << 23))  # its last bits count
PLACE_BITS = tl.constexpr(0x4B000000)  # the bits of FIRST_PLACE
TRIES = tl.constexpr(4)  # of a pass
GUESSES = tl.constexpr(5)  # passes
MOST_CANDIDATES = 128  # of a row
FEW_ROWS = tuning.Choice(16, 128, 4, 1)  # they see fewer sources together


@triton.jit
def logit_tile(
    b_query, b_center, i_scale, key, sources, pairs, o_live, i_column, band,
    COLUMNS: tl.constexpr, RBF: tl.constexpr, HOLES: tl.constexpr, STRIDED: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Logits of the sources i_column, i_column + 1, ... of a tile of targets, and whether there is
    an edge; [ROWS, COLUMNS] each.

    `o_live` [ROWS] has the targets' places, and -NOWHERE for rows after the end. Without MASKED
    every pair is taken for an edge.
    """
    # [ROWS, COLUMNS], here and below
    _, b_affinity = load_affinities(
        b_query, b_center, key, sources.p_key, sources.p_pieces, i_column, band,
        COLUMNS, RBF, STRIDED, MASKED, PRECISION,
    )  # fmt: skip
    b_logit = b_affinity * i_scale
    if MASKED:
        m_edge = edges_to(o_live, i_column, band, sources.p_valid, COLUMNS, HOLES, STRIDED)
    else:
        m_edge = (o_live >= 0)[:, None] & (tl.arange(0, COLUMNS) >= 0)[None, :]
    if pairs.p_table is not None:
        o_hop = (i_column + tl.arange(0, COLUMNS))[None, :] - o_live[:, None]
        b_logit += load_bias(pairs, o_hop, m_edge)
    return b_logit, m_edge


@triton.jit
def rank_tile(
    b_query, b_center, i_scale, key, sources, pairs, o_live, i_column, band,
    COLUMNS: tl.constexpr, RBF: tl.constexpr, HOLES: tl.constexpr, STRIDED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Ranks of the sources i_column, i_column + 1, ... of a tile of targets, [ROWS, COLUMNS].

    NaN has the largest rank, as in torch; NO_EDGE is the smallest. `o_live` is explained at
    :func:`logit_tile`.
    """
    b_logit, m_edge = logit_tile(
        b_query, b_center, i_scale, key, sources, pairs, o_live, i_column, band,
        COLUMNS, RBF, HOLES, STRIDED, True, PRECISION,
    )  # fmt: skip
    return tl.where(m_edge, rank_of(b_logit), NO_EDGE)


@triton.jit
def counted(b_counts, m_pair):
    """Counts [ROWS, COLUMNS], one more where `m_pair` is true, in registers that hold all ranks.

    Counts are floats because that takes two instructions: additions of floats can be predicated.
    """
    return tl.where(m_pair, b_counts + 1.0, b_counts)


@triton.jit
def added(b_counts, m_pair):
    """Counts as in `counted`, where the mask is new: comparisons of floats give 0.0 or 1.0."""
    return b_counts + tl.where(m_pair, 1.0, 0.0)


@triton.jit
def numbered(b_places, m_pair, APART: tl.constexpr):
    """Number the true pairs of every row: the places of a tile's [ROWS, COLUMNS], and `b_places`
    for the next tile.

    In each row of `b_places` [ROWS, COLUMNS] stands the place of its first one, at first. Those of
    neighbours are APART. A matrix product adds up what is before a column faster than threads.
    """
    COLUMNS: tl.constexpr = m_pair.shape[1]
    o_column = tl.arange(0, COLUMNS)
    b_one = tl.where(m_pair, 1.0, 0.0).to(tl.float16)
    m_before = o_column[:, None] < o_column[None, :]
    b_before = tl.where(m_before, APART * 1.0, 0.0).to(tl.float16)
    b_all = tl.full([COLUMNS, COLUMNS], APART, tl.float16)
    return tl.dot(b_one, b_before, b_places), tl.dot(b_one, b_all, b_places)


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
    pairs, m_kept, o_row, i_column, band, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Writes the mask `m_kept` [ROWS, COLUMNS] as bits, in words of 32 sources (see `select`)."""
    b_bit = tl.full([COLUMNS], 1, tl.int32) << (tl.arange(0, COLUMNS) % 32)
    b_bits = tl.where(m_kept, b_bit[None, :], 0)
    # [ROWS, COLUMNS / 32]
    b_words = tl.sum(tl.reshape(b_bits, [ROWS, COLUMNS // 32, 32]), axis=2)
    o_word = i_column // 32 + tl.arange(0, COLUMNS // 32)[None, :]
    o_word = o_word - first_word(o_row, band.n_before)[:, None]
    m_word = (o_row < band.n_targets)[:, None] & (o_word >= 0) & (o_word < pairs.n_words)
    p_words = pairs.p_kept + (o_row * band.i_step)[:, None] * pairs.n_words + o_word
    tl.store(p_words, b_words, mask=m_word)


@triton.jit
def below(b_rank):
    """The logit before those of the ranks `b_rank` [ROWS], as `reaches` takes it."""
    b_before = tl.where(b_rank == 0, -2, b_rank - 1)  # -1 would be -0.0, which equals 0.0
    return logit_of(tl.minimum(b_before, INFINITE))


@triton.jit
def reaches(b_logit, b_below):
    """Whether logits [ROWS, COLUMNS] have at least the rank of `b_below` [ROWS] (`below`).

    Comparing logits takes one instruction, and ranks would have to be formed. NaN is not smaller
    than any number, so it reaches every rank up to its own.
    """
    return ~(b_logit <= b_below[:, None])


@triton.jit
def sample_tile(
    b_query, b_center, i_scale, key, sources, pairs, o_live, i_begin, i_apart, i_end, band,
    RBF: tl.constexpr, HOLES: tl.constexpr, STRIDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Logits of the sources i_begin, i_begin + i_apart, ... of a tile of targets, [ROWS, SAMPLE].

    They are -inf where there is no edge, and may differ from others in their last bits.
    """
    o_source = i_begin + i_apart * tl.arange(0, SAMPLE)
    m_source = o_source < i_end
    o_token = o_source.to(tl.int64) * band.i_step
    o_feature = tl.arange(0, key.BLOCK)
    # [SAMPLE, BLOCK_D]
    b_key = tl.load(
        sources.p_key + (o_token * key.stride_n)[:, None] + o_feature[None, :],
        mask=m_source[:, None] & (o_feature < key.WIDTH)[None, :],
        other=0.0,
    )
    if b_center is not None:
        b_key = b_key - b_center[None, :]
    # [ROWS, SAMPLE], here and below
    b_logit = product(b_query, tl.trans(b_key), PRECISION)
    if RBF:
        b_logit = b_logit - half_square(b_key)[None, :]
    b_logit = b_logit * i_scale
    if sources.p_valid is not None:
        m_source = m_source & (tl.load(sources.p_valid + o_token, mask=m_source, other=0) != 0)
    o_seen = tl.where(m_source, o_source, NOWHERE)
    m_edge = is_edge(o_live[:, None], o_seen[None, :], band, HOLES)
    if pairs.p_table is not None:
        b_logit += load_bias(pairs, o_source[None, :] - o_live[:, None], m_edge)
    return tl.where(m_edge, b_logit, float("-inf"))


@triton.jit
def quantile(b_first, b_second, b_number):
    """Return a rank of every row [ROWS], roughly that of the `b_number`-th largest of its logits in
    two tiles [ROWS, SAMPLE]; -inf is none."""
    b_least = tl.minimum(tl.where(b_first == float("-inf"), float("inf"), b_first),
                         tl.where(b_second == float("-inf"), float("inf"), b_second))  # fmt: skip
    b_low = rank_of(tl.min(b_least, axis=1))
    b_high = rank_of(tl.max(tl.maximum(b_first, b_second), axis=1))
    for _ in range(HALVINGS):
        b_try = middle(b_low, b_high)
        b_below = below(b_try)
        b_counts = tl.where(reaches(b_first, b_below), 1.0, 0.0)
        b_reach = tl.sum(added(b_counts, reaches(b_second, b_below)), axis=1)
        b_low = tl.where(b_reach >= b_number, b_try, b_low)
        b_high = tl.where(b_reach >= b_number, b_high, b_try)
    # One that is there, so that equal ones are met.
    b_below = below(b_low)
    b_least = tl.minimum(tl.where(reaches(b_first, b_below), b_first, float("inf")),
                         tl.where(reaches(b_second, b_below), b_second, float("inf")))  # fmt: skip
    return rank_of(tl.min(b_least, axis=1))


@triton.jit
def guess_from_sample(
    b_query, b_center, i_scale, key, sources, pairs, o_live, i_begin, i_end, band, b_edges, top_k,
    RBF: tl.constexpr, HOLES: tl.constexpr, STRIDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Two ranks of every row [ROWS] that the `top_k`-th is likely to lie between.

    They are ranks of a sample of the sources from `i_begin` to `i_end`, which are taken at equal
    distances. `b_edges` [ROWS] are the edges of every row. Nothing but speed depends on the guess.
    """
    i_apart = tl.maximum((i_end - i_begin) // (2 * SAMPLE), 1)
    b_first = sample_tile(
        b_query, b_center, i_scale, key, sources, pairs, o_live, i_begin, 2 * i_apart, i_end, band,
        RBF, HOLES, STRIDED, PRECISION,
    )  # fmt: skip
    b_second = sample_tile(
        b_query, b_center, i_scale, key, sources, pairs, o_live, i_begin + i_apart, 2 * i_apart,
        i_end, band, RBF, HOLES, STRIDED, PRECISION,
    )  # fmt: skip
    b_counts = tl.where(b_first != float("-inf"), 1.0, 0.0)
    b_sampled = tl.sum(added(b_counts, b_second != float("-inf")), axis=1)
    # [ROWS]: how many of the sample the k-th largest is expected to be, and how far that may be off
    b_share = tl.minimum(top_k / tl.maximum(b_edges, 1.0), 1.0)
    b_number = b_share * b_sampled
    b_margin = MARGIN * tl.sqrt(b_number * (1.0 - b_share)) + 1.0
    b_from = quantile(b_first, b_second, b_number + b_margin)
    b_to = quantile(b_first, b_second, tl.maximum(b_number - b_margin, 1.0))
    return b_from, b_to + 1


@triton.jit
def one_of_tries(b_from, b_to, i_try: tl.constexpr):
    """Try `i_try` of TRIES at equal distances, from `b_from` to `b_to`; all [ROWS]."""
    if i_try == TRIES - 1:
        b_try = b_to
    else:
        b_try = b_from + i_try * (b_to // (TRIES - 1) - b_from // (TRIES - 1))
    return b_try


@triton.jit
def guess_between(b_low, b_high, b_of_low, b_of_high, i_width, top_k):
    """Two ranks that the k-th is likely to lie between; [ROWS].

    `b_low` to `b_of_high` are explained at :mod:`graphattn.kernels.shared.ordered_integers`, and
    logits are taken to be spread evenly in that interval. If one of its ends is not known yet, the
    guess begins at the other, and is `i_width` wide.
    """
    b_from, b_to = logit_of(b_low), logit_of(b_high)
    b_inside = tl.maximum(b_of_low - b_of_high, 1.0)
    b_place = tl.minimum(tl.maximum((b_of_low - top_k + 0.5) / b_inside, 0.0), 1.0)
    b_margin = 2 * MARGIN * tl.sqrt(b_place * (1.0 - b_place) / b_inside)
    b_first = rank_of(b_from + tl.maximum(b_place - b_margin, 0.0) * (b_to - b_from))
    b_last = rank_of(b_from + tl.minimum(b_place + b_margin, 1.0) * (b_to - b_from))
    m_no_low, m_no_high = b_low == LOWEST, b_high == LARGEST
    b_first = tl.where(m_no_low, b_high - i_width, tl.where(m_no_high, b_low, b_first))
    b_last = tl.where(m_no_low, b_high, tl.where(m_no_high, b_low + i_width, b_last))
    return b_first, b_last


@triton.jit
def few_between(b_low, b_high, b_of_low, b_of_high, top_k, few):
    """Two ranks that the k-th is likely to lie between, and with it fewer than `few` ranks; [ROWS].

    The rest is explained at :func:`guess_between`.
    """
    b_from, b_to = logit_of(b_low), logit_of(b_high)
    b_inside = tl.maximum(b_of_low - b_of_high, 1.0)
    b_place, b_margin = (b_of_low - top_k + 0.5) / b_inside, 0.3 * few / b_inside
    b_first = rank_of(b_from + (b_place - b_margin) * (b_to - b_from))
    b_last = rank_of(b_from + (b_place + b_margin) * (b_to - b_from))
    m_all = b_inside <= few
    b_first = tl.where(m_all | (b_place < b_margin), b_low, tl.maximum(b_first, b_low))
    b_last = tl.where(m_all | (b_place + b_margin > 1), b_high, tl.minimum(b_last, b_high))
    return tl.minimum(b_first, b_last), b_last


@triton.jit
def words_of(o_place, i_words, i_apart, STRIDED: tl.constexpr):
    """Words of a tile's bits, from their places among all its words.

    A row has `i_words` words, and `i_apart` words lie between the beginnings of two rows.
    """
    if STRIDED:
        o_word = o_place // i_words * i_apart + o_place % i_words
    else:
        o_word = o_place
    return o_word


@triton.jit
def select_streamed(
    b_query, b_center, i_scale, key, sources, pairs, o_row, o_live, i_row, band, b_of_low, top_k,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RBF: tl.constexpr, HOLES: tl.constexpr,
    STRIDED: tl.constexpr, PARTS: tl.constexpr, CANDIDATES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes the bits of a tile of targets that see so many sources that logits are computed anew
    whenever they are needed. `b_of_low` [ROWS] are the most edges that each may have.

    A sample gives a first guess of the k-th largest logit, and a pass over all sources counts how
    many reach each of some tries. When few logits of every row are left between its tries, another
    pass writes those near the k-th down, at most CANDIDATES, in the memory that the bits will have.
    If it turns out that the k-th is not among them, counting goes on. Otherwise their interval is
    halved until it is known which are kept. The last pass writes the bits.

    Logits of the same pair are the same in every pass, because every pass computes them by the same
    instructions. Those of the sample need not be.
    """
    i_borders = part_borders(
        i_row, band.n_targets, band.n_sources, band.n_before, band.n_after, ROWS, COLUMNS, PARTS,
        True,
    )  # fmt: skip
    if HOLES or sources.p_valid is not None:  # edges are counted
        b_edges = tl.zeros([ROWS, COLUMNS], tl.float32)
        for i_column in range(i_borders[0], i_borders[3], COLUMNS):
            b_edges = added(
                b_edges, edges_to(o_live, i_column, band, sources.p_valid, COLUMNS, HOLES, STRIDED)
            )
        b_of_low = tl.sum(b_edges, axis=1)
    b_of_high = tl.zeros([ROWS], tl.float32)
    b_low, b_high = tl.full([ROWS], LOWEST, tl.int32), tl.full([ROWS], LARGEST, tl.int32)
    b_from, b_to = guess_from_sample(
        b_query, b_center, i_scale, key, sources, pairs, o_live, i_borders[0], i_borders[3], band,
        b_of_low, top_k, RBF, HOLES, STRIDED, PRECISION,
    )  # fmt: skip
    m_row = o_row < band.n_targets  # rows after the end keep nothing
    # Where the words of the rows are.
    p_words = pairs.p_kept + i_row * band.i_step * pairs.n_words
    i_few = tl.minimum(band.n_targets - i_row, ROWS) * pairs.n_words // ROWS
    i_few = tl.minimum(i_few, CANDIDATES)
    i_apart = band.i_step * pairs.n_words  # in 64 bits, because i_step has 64
    i_pass = 0
    i_more = is_wide(b_low, b_high, b_of_low, b_of_high, top_k, 0).to(tl.int32)
    while i_more > 0:
        b_first, b_last = guess_between(
            b_low, b_high, b_of_low, b_of_high, 1 << tl.minimum(19 + 2 * i_pass, 30), top_k
        )
        # After some passes, the logits are not spread as guesses suppose.
        b_middle = middle(b_low, b_high)
        b_first = tl.where(i_pass < GUESSES, b_first, middle(b_low, b_middle))
        b_last = tl.where(i_pass < GUESSES, b_last, middle(b_middle, b_high))
        b_from = tl.where(i_pass == 0, b_from, b_first)
        b_to = tl.where(i_pass == 0, b_to, b_last)
        counts = ()
        for _ in tl.static_range(TRIES):
            counts = counts + (tl.zeros([ROWS, COLUMNS], tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
        for i_part in tl.static_range(PARTS):
            for i_column in range(i_borders[i_part], i_borders[i_part + 1], COLUMNS):
                b_logit, m_edge = logit_tile(
                    b_query, b_center, i_scale, key, sources, pairs, o_live, i_column, band,
                    COLUMNS, RBF, HOLES, STRIDED, i_part != 1, PRECISION,
                )  # fmt: skip
                if i_part != 1:
                    b_logit = tl.where(m_edge, b_logit, float("-inf"))
                more = ()
                for i_try in tl.static_range(TRIES):
                    m_pair = reaches(b_logit, below(one_of_tries(b_from, b_to, i_try)))
                    more = more + (added(counts[i_try], m_pair),)  # type: ignore[assignment]  # noqa: RUF005
                counts = more
        for i_try in tl.static_range(TRIES):
            b_reach = tl.where(m_row, tl.sum(counts[i_try], axis=1), 0.0)
            b_low, b_high, b_of_low, b_of_high = narrowed(
                b_low, b_high, b_of_low, b_of_high, one_of_tries(b_from, b_to, i_try), b_reach,
                top_k,
            )  # fmt: skip
        i_pass += 1
        i_more = is_wide(b_low, b_high, b_of_low, b_of_high, top_k, 4 * i_few).to(tl.int32)
        # The next pass is over nothing if there are too many. Of rows that are done, nothing is
        # written down.
        m_open = (b_of_low > top_k) & (b_high - 1 > b_low)
        b_from, b_to = few_between(b_low, b_high, b_of_low, b_of_high, top_k, i_few)
        b_from = tl.where(m_open & (i_more == 0), b_from, b_high)
        b_to = tl.where(m_open & (i_more == 0), b_to, b_high)
        tl.debug_barrier()  # what is there may be from an earlier pass
        b_above = tl.zeros([ROWS, COLUMNS], tl.float32)
        b_first = FIRST_PLACE + tl.arange(0, ROWS).to(tl.float32)
        b_places = b_first[:, None] + tl.zeros([ROWS, COLUMNS], tl.float32)
        for i_part in tl.static_range(PARTS):
            i_stop = tl.where(i_more == 0, i_borders[i_part + 1], i_borders[i_part])
            for i_column in range(i_borders[i_part], i_stop, COLUMNS):
                b_logit, m_edge = logit_tile(
                    b_query, b_center, i_scale, key, sources, pairs, o_live, i_column, band,
                    COLUMNS, RBF, HOLES, STRIDED, i_part != 1, PRECISION,
                )  # fmt: skip
                if i_part != 1:
                    b_logit = tl.where(m_edge, b_logit, float("-inf"))
                m_above = reaches(b_logit, below(b_to))
                m_inside = reaches(b_logit, below(b_from)) & ~m_above
                if i_part != 1:
                    m_inside = m_inside & m_edge
                b_above = added(b_above, m_above)
                b_place, b_places = numbered(b_places, m_inside, ROWS)
                o_place = tl.where(m_inside, b_place.to(tl.int32, bitcast=True), LARGEST)
                o_place = o_place - PLACE_BITS
                o_word = words_of(o_place, pairs.n_words, i_apart, STRIDED)
                b_bits = b_logit.to(tl.int32, bitcast=True)
                tl.store(p_words + o_word, b_bits, mask=o_place < i_few * ROWS)
        b_reach = tl.where(m_row, tl.sum(b_above, axis=1), 0.0)
        b_written = tl.where(m_row, (tl.max(b_places, axis=1) - b_first) / ROWS, 0.0)
        b_low, b_high, b_of_low, b_of_high = narrowed(
            b_low, b_high, b_of_low, b_of_high, b_from, b_reach + b_written, top_k
        )
        b_low, b_high, b_of_low, b_of_high = narrowed(
            b_low, b_high, b_of_low, b_of_high, b_to, b_reach, top_k
        )
        m_missed = (b_low != b_from) | (b_high != b_to) | (b_written > i_few)
        i_more = tl.maximum(i_more, tl.max((m_open & m_missed).to(tl.int32), axis=0))

    tl.debug_barrier()  # threads read what others have written
    # [ROWS, CANDIDATES]
    o_candidate = tl.arange(0, CANDIDATES)[None, :]
    m_open = (b_of_low > top_k) & (b_high - 1 > b_low)
    b_inside = tl.where(m_open, b_of_low - b_of_high, 0.0)
    m_word = o_candidate < b_inside.to(tl.int32)[:, None]
    o_place = o_candidate * ROWS + tl.arange(0, ROWS)[:, None]
    o_word = words_of(o_place, pairs.n_words, i_apart, STRIDED)
    b_bits = tl.load(p_words + o_word, mask=m_word, other=0)
    b_rank = tl.where(m_word, rank_of(b_bits.to(tl.float32, bitcast=True)), NO_EDGE)
    b_of_all = b_of_high
    while is_open(b_low, b_high, b_of_low, top_k):
        b_try = middle(b_low, b_high)
        b_reach = b_of_all + tl.sum(tl.where(b_rank >= b_try[:, None], 1.0, 0.0), axis=1)
        b_low, b_high, b_of_low, b_of_high = narrowed(
            b_low, b_high, b_of_low, b_of_high, b_try, b_reach, top_k
        )
    tl.debug_barrier()  # before bits are written there

    b_below_low, b_below_next = below(b_low), below(b_low + 1)
    if tl.max((b_of_low > top_k).to(tl.int32), axis=0) > 0:
        # Of the sources that equal the k-th largest, so many are kept, the first.
        b_left = tl.where(b_of_low > top_k, top_k - b_of_high, float("inf"))
        m_number = b_low != NOT_A_NUMBER  # nothing is larger
        b_places = tl.zeros([ROWS, COLUMNS], tl.float32)
        for i_column in range(i_borders[0], i_borders[3], COLUMNS):
            b_logit, m_edge = logit_tile(
                b_query, b_center, i_scale, key, sources, pairs, o_live, i_column, band,
                COLUMNS, RBF, HOLES, STRIDED, True, PRECISION,
            )  # fmt: skip
            m_above = reaches(b_logit, b_below_next) & m_number[:, None]
            m_equal = reaches(b_logit, b_below_low) & ~m_above & m_edge
            b_place, b_places = numbered(b_places, m_equal, 1)
            m_kept = m_above | (m_equal & (b_place < b_left[:, None]))
            store_kept(pairs, m_kept, o_row, i_column, band, ROWS, COLUMNS)
    else:
        for i_part in tl.static_range(PARTS):
            for i_column in range(i_borders[i_part], i_borders[i_part + 1], COLUMNS):
                b_logit, m_edge = logit_tile(
                    b_query, b_center, i_scale, key, sources, pairs, o_live, i_column, band,
                    COLUMNS, RBF, HOLES, STRIDED, i_part != 1, PRECISION,
                )  # fmt: skip
                m_kept = reaches(b_logit, b_below_low)
                store_kept(pairs, m_kept, o_row, i_column, band, ROWS, COLUMNS)


@triton.jit(do_not_specialize=["N", "M", "H", "num_tiles", "origin", "num_words", "top_k"])
def band_select_kernel(
    query, key, value, p_scale, p_pieces, p_center, p_table, p_kept, p_valid_target,
    p_valid_source, bands, N, M, H, num_tiles, origin, top_k, num_words,
    REPEATS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RBF: tl.constexpr,
    PRECISION: tl.constexpr, CHUNKS: tl.constexpr, PARTS: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """kept [B, H, N, words]: bits of the `top_k` sources of every row with the largest logits.

    With CHUNKS > 0, rows see at most so many tiles, whose ranks are held in registers. With CHUNKS
    0, logits are computed anew in every pass (:func:`select_streamed`).
    """
    i_b, i_h, i_tile, i_row, band = tile_of_program(bands.p_tiles, bands.p_sequences, num_tiles, H)
    i_key_head = i_h // REPEATS
    i_target, i_source = i_b * N + band.i_first_target, i_b * M + band.i_first_source
    if p_pieces is not None:
        p_pieces += ((i_b * (H // REPEATS) + i_key_head) * M + band.i_first_source) * PIECES
    if p_valid_source is not None:
        p_valid_source += i_source
    if p_table is not None:
        p_table += origin * H + i_h
    p_kept += ((i_b * H + i_h) * N + band.i_first_target) * num_words
    p_key = first_row(key, i_source, i_key_head)
    sources = Sources(p_key, None, p_pieces, p_valid_source)
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
    i_scale = tl.load(p_scale + i_h)
    o_row = i_row + tl.arange(0, ROWS)
    o_live = tl.where(o_row < band.n_targets, o_row, -NOWHERE)
    i_begin = tl.maximum(i_row - band.n_before, 0) // 32 * 32
    i_end = tl.minimum(tl.minimum(i_row + ROWS, band.n_targets) + band.n_after, band.n_sources)

    # At first b_of_low is a bound: no row has more edges than its window has sources. A row with
    # fewer, as next to padding, takes more tries until it is found that all its edges are kept.
    o_first = tl.maximum(o_row - band.n_before, 0)
    o_past = tl.minimum(o_row + band.n_after + 1, band.n_sources)
    b_of_low = tl.where(o_row < band.n_targets, (o_past - o_first).to(tl.float32), 0.0)
    b_of_high = tl.zeros([ROWS], tl.float32)
    b_low = tl.full([ROWS], LARGEST, tl.int32)
    b_most = tl.full([ROWS], NO_EDGE, tl.int32)
    b_end = tl.full([ROWS], 0, tl.int32) + i_end
    if CHUNKS > 0:
        held = ()
        for i_chunk in tl.static_range(CHUNKS):
            b_rank = rank_tile(
                b_query, b_center, i_scale, key, sources, pairs, o_live,
                i_begin + i_chunk * COLUMNS, band, COLUMNS, RBF, bands.HOLES, bands.STRIDED,
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
                pairs, order[i_chunk] < b_end[:, None], o_row, i_begin + i_chunk * COLUMNS, band,
                ROWS, COLUMNS,
            )  # fmt: skip
    else:
        select_streamed(
            b_query, b_center, i_scale, key, sources, pairs, o_row, o_live, i_row, band, b_of_low,
            top_k, ROWS, COLUMNS, RBF, bands.HOLES, bands.STRIDED, PARTS, CANDIDATES, PRECISION,
        )  # fmt: skip


def select(inputs: BandInputs, top_k: int) -> Tensor:
    """Int32 [B, H, N, words]: a bit for every pair, set for the `top_k` edges that are kept.

    These are the edges of a target and head with the largest logits; of equal logits, those of the
    smaller sources. Source c of target i has bit c % 32 of word c // 32 - max(i - before, 0) // 32,
    where i and c are places within the sequence. Bits of pairs that are no edges are arbitrary.
    """
    x = inputs
    B, N, H, _ = x.query.shape
    choice = x.choose("band_select")
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
        p_pieces=x.half_squares(),
        top_k=min(top_k, x.bands.window),
        CHUNKS=chunks,
        PARTS=1 if x.is_centered else x.parts(choice.rows, choice.columns),
        CANDIDATES=min(1 << max(words.bit_length() - 1, 0), MOST_CANDIDATES),
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

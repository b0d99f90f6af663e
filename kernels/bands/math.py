"""Arithmetic of every band kernel on a tile, and nothing else."""

from __future__ import annotations

import triton
import triton.language as tl

from graphattn.kernels.bands.arguments import BandRow
from graphattn.kernels.shared.exponentials import LOG2E
from graphattn.kernels.shared.precision import FACTORS, PIECES, add_product, pieces, product
from graphattn.kernels.shared.programs import heads_first

NOWHERE = tl.constexpr(1 << 30)  # a place so far away that no window reaches it


@triton.jit
def load_band(p_row):
    """A sequence, from a row of `BandSchedule.sequences`.

    Tokens are i_first + 0 * i_step, i_first + 1 * i_step, ...
    """
    return BandRow(
        tl.load(p_row),
        tl.load(p_row + 1).to(tl.int32),
        tl.load(p_row + 2),
        tl.load(p_row + 3).to(tl.int32),
        tl.load(p_row + 4),
        tl.load(p_row + 5).to(tl.int32),
        tl.load(p_row + 6).to(tl.int32),
        tl.load(p_row + 7).to(tl.int32),
    )


@triton.jit
def first_row(x, i_token, i_h):
    """Pointer to the features `x` of a token, one of those of all batch entries, and of a head."""
    return x.p + (i_token * x.stride_n + i_h.to(tl.int64) * x.stride_h)


@triton.jit
def load_tile(
    p_first, i_row, i_step, i_stride, n_rows,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
    STRIDED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Rows i_row, i_row + 1, ... of a sequence that begins at `p_first`, [BLOCK, BLOCK_WIDTH].

    `i_stride` is the distance of neighbouring tokens in memory. Beyond WIDTH features, and if
    MASKED beyond `n_rows` rows, there are zeros. The pointer to the first row is computed in 64
    bits, and if STRIDED offsets within the tile, too.
    """
    o_row = tl.arange(0, BLOCK)
    o_feature = tl.arange(0, BLOCK_WIDTH)
    p_base = p_first + i_row * (i_step * i_stride)  # in 64 bits, because i_step has 64
    if STRIDED:
        p_tile = p_base + o_row[:, None] * (i_step * i_stride) + o_feature[None, :]
    else:
        p_tile = p_base + o_row[:, None] * i_stride + o_feature[None, :]
    if MASKED:
        m_row = i_row + o_row < n_rows
        if BLOCK_WIDTH != WIDTH:
            b_tile = tl.load(p_tile, mask=m_row[:, None] & (o_feature < WIDTH)[None, :], other=0.0)
        else:
            b_tile = tl.load(p_tile, mask=m_row[:, None], other=0.0)
    elif BLOCK_WIDTH != WIDTH:
        b_tile = tl.load(p_tile, mask=(o_feature < WIDTH)[None, :], other=0.0)
    else:
        b_tile = tl.load(p_tile)
    return b_tile


@triton.jit
def load_features(
    p_first, x, i_row, i_step, n_rows,
    BLOCK: tl.constexpr, STRIDED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Features `x` of the tokens i_row, i_row + 1, ... of a sequence, [BLOCK, x.BLOCK].

    `p_first` points to those of its first token, see :func:`first_row`; the rest is explained at
    :func:`load_tile`.
    """
    return load_tile(
        p_first, i_row, i_step, x.stride_n, n_rows, x.WIDTH, BLOCK, x.BLOCK,
        STRIDED or x.FAR, MASKED,
    )  # fmt: skip


@triton.jit
def store_features(p_x, b_tile, i_first, i_h, heads, i_row, i_step, n_rows, WIDTH: tl.constexpr):
    """Stores a tile [rows, BLOCK] in a contiguous tensor [tokens, heads, WIDTH], in its dtype.

    Its rows are the tokens i_row, i_row + 1, ... of the sequence that begins with token `i_first`.
    Rows from `n_rows` on and features from WIDTH on are not stored.
    """
    o_row = i_row + tl.arange(0, b_tile.shape[0])
    o_feature = tl.arange(0, b_tile.shape[1])
    p_row = p_x + i_first * heads * WIDTH + i_h * WIDTH + o_row * (i_step * (heads * WIDTH))
    m_tile = (o_row < n_rows)[:, None] & (o_feature < WIDTH)[None, :]
    tl.store(p_row[:, None] + o_feature[None, :], b_tile.to(p_x.dtype.element_ty), mask=m_tile)


@triton.jit
def row_pointers(p_first, i_row, i_step, BLOCK: tl.constexpr, STRIDED: tl.constexpr):
    """Return pointers to numbers of the tokens i_row, i_row + 1, ..., [BLOCK].

    There is one number for each token (a log-sum, a flag), and `p_first` points to the first.
    """
    o_row = tl.arange(0, BLOCK)
    if STRIDED:
        p_rows = p_first + (i_row + o_row) * i_step
    else:
        p_rows = p_first + i_row * i_step + o_row
    return p_rows


@triton.jit
def half_square(b_x):
    """||x||^2 / 2 of every row of a tile [rows, BLOCK_D]: [rows], in float32."""
    b_wide = b_x.to(tl.float32)
    return 0.5 * tl.sum(b_wide * b_wide, axis=1)


@triton.jit
def load_pieces(
    p_pieces, i_column, band, COLUMNS: tl.constexpr, STRIDED: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """-||k||^2 / 2 of a tile of keys in pieces, [COLUMNS, FACTORS], from those that are stored."""
    return load_tile(
        p_pieces, i_column, band.i_step, PIECES, band.n_sources, PIECES, COLUMNS, FACTORS, STRIDED,
        MASKED,
    )  # fmt: skip


@triton.jit
def load_affinities(
    b_query, b_center, key, p_key, p_pieces, i_column, band,
    COLUMNS: tl.constexpr, RBF: tl.constexpr, STRIDED: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys of the sources i_column, i_column + 1, ..., [COLUMNS, BLOCK_D], and affinities with
    them, [ROWS, COLUMNS], of a tile of queries [ROWS, BLOCK_D].

    An affinity is q . k, or q . k - ||k||^2 / 2 if RBF. A logit is the scale times an affinity,
    plus a bias: callers apply both. Keys are measured from `b_center` [BLOCK_D], unless it is None.
    """
    b_key = load_features(
        p_key, key, i_column, band.i_step, band.n_sources, COLUMNS, STRIDED, MASKED
    )  # fmt: skip
    if b_center is not None:
        b_key = b_key - b_center[None, :]
    b_affinity = product(b_query, tl.trans(b_key), PRECISION)
    if p_pieces is not None:
        b_pieces = load_pieces(p_pieces, i_column, band, COLUMNS, STRIDED, MASKED)
        b_nothing = pieces(tl.zeros([b_query.shape[0]], tl.float32), True)
        b_affinity = add_product(b_affinity, b_nothing, tl.trans(b_pieces), PRECISION)
    elif RBF:
        b_affinity = b_affinity - half_square(b_key)[None, :]
    return b_key, b_affinity


@triton.jit
def load_bias(pairs, o_hop, m_pair):
    """Biases of pairs by their hop, source minus target: the shape of `o_hop`; 0 outside `m_pair`.

    `m_pair` is the mask of edges. Where a tile has none because all pairs are edges, it must still
    leave out tokens after the end of the sequence, because the last tile may go beyond it.
    """
    return tl.load(pairs.p_table + o_hop * pairs.heads, mask=m_pair, other=0.0)


@triton.jit
def load_center(p_center, i_slot, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load the center that a tile is measured from, [BLOCK]."""
    o_feature = tl.arange(0, BLOCK)
    return tl.load(p_center + i_slot * WIDTH + o_feature, mask=o_feature < WIDTH, other=0.0)


@triton.jit
def cleaned(b_x):
    """A tile [rows, BLOCK] with zeros in place of NaN and infinity, and which rows had some [rows].

    A matrix product multiplies every pair of a tile, also pairs that are no edges, whose weight is
    0; and 0 * NaN is NaN.
    """
    b_wide = b_x.to(tl.float32)
    m_sound = tl.abs(b_wide) < float("inf")  # NaN is not smaller, either
    m_bad = tl.sum(tl.where(m_sound, 0, 1), axis=1) > 0
    return tl.where(m_sound, b_x, 0.0).to(b_x.dtype), m_bad


@triton.jit
def is_unsound(b_x, b_number=0.0):
    """Whether a tile [rows, columns], or a number of a row, [rows], is NaN or infinite: 1 or 0."""
    b_zero = tl.sum(b_x * 0.0, axis=1) + b_number * 0.0
    return tl.max((b_zero != 0.0).to(tl.int32), axis=0)


@triton.jit
def poisoned(b_weight, b_logit, m_bad):
    """Weights with NaN at edges whose second end is in `m_bad`, from :func:`cleaned`.

    `b_weight` and `b_logit` are [rows, columns], `m_bad` is [columns]. Bad values are rare, so this
    is first asked for the whole tile. A logit is -inf where there is no edge: comparing it is
    cheaper than keeping the mask of edges until here.
    """
    if tl.max(m_bad.to(tl.int32), axis=0) > 0:
        m_seen = (b_logit != float("-inf")) & m_bad[None, :]
        b_weight = tl.where(m_seen, float("nan"), b_weight)
    return b_weight


@triton.jit
def is_edge(o_target, o_source, band, HOLES: tl.constexpr):
    """Whether pairs are edges; `o_target` and `o_source` broadcast against each other.

    -before <= hop <= after is one unsigned comparison, 0 <= hop + before <= before + after, because
    negative numbers become large ones. Callers place tokens that have no edges at NOWHERE.
    """
    o_hop = o_source - o_target
    m_edge = (o_hop + band.n_before).to(tl.uint32) <= (band.n_before + band.n_after).to(tl.uint32)
    if HOLES:
        m_edge = m_edge & (2 * o_hop + band.i_hole != 0)  # i_hole: -2 * hop, or 1 for none
    return m_edge


@triton.jit
def within_reach(
    o_token, i_other, n_other, n_before, n_after, i_hole, COUNT: tl.constexpr, HOLES: tl.constexpr
):  # fmt: skip
    """Whether tokens `o_token` [TOKENS] have edges with i_other, i_other + 1, ...: [TOKENS, COUNT].

    They have edges with those from `n_before` places before them to `n_after` after them, which are
    fewer than `n_other`; those that have none are at NOWHERE, or -NOWHERE. What :func:`is_edge`
    says of a pair is said of a row here, so that a pair takes one addition and one comparison of
    unsigned numbers: a row has `n_row` edges from `o_first` on. `i_hole` is -2 times a hop that is
    left out (the other token minus the own one), or odd.
    """
    o_first = tl.maximum(o_token - n_before, 0)
    n_row = tl.maximum(tl.minimum(o_token + n_after + 1, n_other) - o_first, 0)
    o_place = (i_other - o_first)[:, None] + tl.arange(0, COUNT)[None, :]
    m_edge = o_place.to(tl.uint32) < n_row.to(tl.uint32)[:, None]
    if HOLES:
        m_edge = m_edge & (2 * o_place != (2 * (o_token - o_first) - i_hole)[:, None])
    return m_edge


@triton.jit
def edges_to(
    o_row, i_column, band, p_valid,
    COLUMNS: tl.constexpr, HOLES: tl.constexpr, STRIDED: tl.constexpr,
):  # fmt: skip
    """Whether targets `o_row` [ROWS] see sources i_column, i_column + 1, ...: [ROWS, COLUMNS]."""
    m_edge = within_reach(
        o_row, i_column, band.n_sources, band.n_before, band.n_after, band.i_hole, COLUMNS, HOLES
    )  # fmt: skip
    if p_valid is not None:
        m_column = i_column + tl.arange(0, COLUMNS) < band.n_sources
        p_rows = row_pointers(p_valid, i_column, band.i_step, COLUMNS, STRIDED)
        m_edge = m_edge & (tl.load(p_rows, mask=m_column, other=0) != 0)[None, :]
    return m_edge


@triton.jit
def first_word(o_row, n_before):
    """The first word of 32 sources for which targets `o_row` have bits: the shape of `o_row`."""
    return tl.maximum(o_row - n_before, 0) // 32


@triton.jit
def is_kept(pairs, o_row, i_column, band, COLUMNS: tl.constexpr, ROW_AXIS: tl.constexpr):
    """Whether top-k has chosen sources i_column, i_column + 1, ... for targets `o_row` [ROWS].

    The result is [ROWS, COLUMNS], or [COLUMNS, ROWS] with ROW_AXIS 1; for pairs that are no edges
    it is arbitrary. `i_column` is a multiple of 32, or of COLUMNS. The bits are described at
    :func:`graphattn.kernels.bands.top_k.select`.
    """
    o_source = tl.arange(0, COLUMNS)
    o_word = i_column // 32 - first_word(o_row, band.n_before)
    p_words = pairs.p_kept + (o_row * band.i_step) * pairs.n_words + o_word
    if COLUMNS < 32:
        o_bit = i_column % 32 + o_source
    else:
        o_bit = o_source % 32
    b_bit = tl.full([COLUMNS], 1, tl.int32) << o_bit
    m_word = (o_row < band.n_targets) & (o_word >= 0) & (o_word < pairs.n_words)
    b_words = tl.expand_dims(tl.load(p_words, mask=m_word, other=0), 1 - ROW_AXIS)
    for i_word in tl.static_range(1, (COLUMNS + 31) // 32):
        m_word = (
            (o_row < band.n_targets) & (o_word + i_word >= 0) & (o_word + i_word < pairs.n_words)
        )
        b_next = tl.expand_dims(tl.load(p_words + i_word, mask=m_word, other=0), 1 - ROW_AXIS)
        b_words = tl.where(tl.expand_dims(o_source >= 32 * i_word, ROW_AXIS), b_next, b_words)
    return (b_words & tl.expand_dims(b_bit, ROW_AXIS)) != 0


@triton.jit
def around_center(b_saved, b_query, i_scale):
    """Base-2 log-sums of -||q - k||^2 / 2, as log-sums of q . k - ||k||^2 / 2, [ROWS].

    Those two differ by ||q||^2 / 2, which depends on the center that q [ROWS, BLOCK_D] is measured
    from. +inf, which marks an empty row, stays.
    """
    b_around = b_saved + i_scale * LOG2E * half_square(b_query)
    return tl.where(b_saved == float("inf"), b_saved, b_around)


@triton.jit
def tile_of_program(p_tiles, p_sequences, num_tiles, heads):
    """Return the tile that a program takes: batch, head, tile, first row, sequence.

    Tiles are the rows of `BandSchedule.tiles`.
    """
    i_b, i_h, i_tile = heads_first(num_tiles, heads)
    i_row, band = row_and_band(p_tiles + 2 * i_tile, p_sequences)
    return i_b, i_h, i_tile, i_row, band


@triton.jit
def row_and_band(p_tile, p_sequences):
    """The first row of a tile, and its sequence."""
    return tl.load(p_tile + 1), load_band(p_sequences + 8 * tl.load(p_tile))


@triton.jit
def part_borders(
    i_row, n_rows, n_other, n_before, n_after,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, KEPT: tl.constexpr = False,
):  # fmt: skip
    """Borders of the PARTS of a loop over tiles of the other side: four places, in ascending order.

    The tile itself has the tokens i_row, i_row + 1, ... [ROWS] of `n_rows`; those of the other side
    come COLUMNS at a time, and `n_other` is their number. Part p goes from border p to border
    p + 1. With three PARTS, the tiles of part 1 are whole: all rows see all their tokens, so they
    need no mask. With one, part 0 goes to the end; if KEPT it begins where a word of bits does.
    """
    i_last = tl.minimum(i_row + ROWS, n_rows) - 1
    i_begin = tl.maximum(i_row - n_before, 0)
    if KEPT:
        i_begin = i_begin // 32 * 32
    i_end = tl.minimum(i_last + n_after + 1, n_other)
    i_full, i_full_end = i_end, i_end  # where the tiles that need no mask begin and end
    if PARTS == 3:
        # From the first token that the last row sees, to the last that the first row sees.
        i_common = tl.maximum(i_last - n_before - i_begin, 0)
        i_full = tl.minimum(i_begin + (i_common + COLUMNS - 1) // COLUMNS * COLUMNS, i_end)
        i_common_end = tl.minimum(i_row + n_after + 1, n_other)
        i_full_end = i_full + tl.maximum(i_common_end - i_full, 0) // COLUMNS * COLUMNS
    return i_begin, i_full, i_full_end, i_end

"""Arithmetic of the consensus kernels on a tile of edges, and nothing else.

A tile is ROWS edges of one head. `b_rows` holds raw rows of Lambda, [ROWS, RANKS, BLOCK_D]: for
each edge as many of its rows as fit into registers at a time.

The constants (RANKS, CHUNK, HELD, ...) are explained at
:meth:`graphattn.kernels.consensus.inputs.ConsensusInputs.common`, and the beginnings of names
(``b_`` for tiles, ``p_`` for pointers, ...) in :mod:`graphattn.kernels`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphattn.kernels.shared.exponentials import LN2, LOG2E
from graphattn.kernels.shared.precision import add_product

LOGITS = tl.constexpr(16)  # columns of a product, at least 16: alpha's and beta's, then zeros
EXTRA = tl.constexpr(8)  # columns after those of Lambda and of hidden vectors; 8 keeps rows aligned
WIDE = tl.constexpr(64)  # hidden features at a time on the way back
SMALLEST_SQUARE = tl.constexpr(2.0**-40)  # squares of rows from this to the next are in range
LARGEST_SQUARE = tl.constexpr(2.0**40)
# In half precision GELU is a fit, x * sigmoid(1.594696 x + 0.074391 x^3 - 0.000766 x^5), for
# |x| <= BORDER. It differs by 5e-5, far less than half precision can tell, and takes a third of the
# instructions of erf. A, B and C are minus these coefficients, for a power of 2 instead of e.
A = tl.constexpr(-1.594696 * LOG2E.value)
B = tl.constexpr(-0.074391 * LOG2E.value)
C = tl.constexpr(0.000766 * LOG2E.value)
BORDER = tl.constexpr(5.0)
SQRT_HALF = tl.constexpr(0.7071067811865476)
INVERSE_SQRT_2PI = tl.constexpr(0.3989422804014327)


@triton.jit
def load_edges(
    edges, valid, i_b, N, M, first, count, i_tile, i_step, num_steps, ROWS: tl.constexpr
):  # fmt: skip
    """The edges of a step of a program, [ROWS] each: the place of the message (-1: none), target,
    source, and whether there is such an edge, of two valid tokens.

    If edges are listed, the steps of a program are consecutive tiles of a list of `count` edges.
    Otherwise all steps share the tile `i_tile` of the targets first .. first + count - 1. Step
    `i_step` takes the edges to source = target + moves[i_step], whose places begin at i_step *
    count.
    """
    LISTED: tl.constexpr = edges.p_targets is not None
    if LISTED:
        i_tile = i_tile * num_steps + i_step
    o_place = i_tile * ROWS + tl.arange(0, ROWS)
    m_edge = o_place < count
    if LISTED:
        b_place = tl.where(m_edge, o_place, -1)
        b_target = tl.load(edges.p_targets + o_place, mask=m_edge, other=0).to(tl.int32)
        b_source = tl.load(edges.p_sources + o_place, mask=m_edge, other=-1).to(tl.int32)
        m_edge = b_source >= 0  # a table of neighbours has empty entries
    else:
        b_place = tl.where(m_edge, i_step * count + o_place, -1)
        b_target = first + o_place
        b_source = b_target + tl.load(edges.p_moves + i_step).to(tl.int32)
        m_edge = m_edge & (b_source >= 0) & (b_source < M)
        if edges.p_sequence is not None:
            b_sequence = tl.load(edges.p_sequence + b_target, mask=m_edge, other=0)
            b_other = tl.load(edges.p_sequence + b_source, mask=m_edge, other=-1)
            m_edge = m_edge & (b_other == b_sequence)
    if valid.p_target is not None:
        p_valid = valid.p_target + i_b * N
        m_edge = m_edge & (tl.load(p_valid + b_target, mask=m_edge, other=0) != 0)
    if valid.p_source is not None:
        p_valid = valid.p_source + i_b * M
        m_edge = m_edge & (tl.load(p_valid + b_source, mask=m_edge, other=0) != 0)
    return b_place, b_target, b_source, m_edge


@triton.jit
def rows_of(x, i_b, i_h, b_token):
    """Return pointers to the first feature of tokens `b_token` [ROWS], [ROWS]; `x` is a
    :class:`~graphattn.kernels.consensus.inputs.HeadFeatures`."""
    p_first = x.p + (i_b * x.stride_b + i_h.to(tl.int64) * x.stride_h)
    return p_first + b_token.to(tl.int64) * x.stride_n


@triton.jit
def load_features(x, i_b, i_h, b_token, m_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Features of tokens `b_token` [ROWS] in float32, [ROWS, BLOCK]; `x` is as in `rows_of`."""
    p_rows = rows_of(x, i_b, i_h, b_token)
    o_feature = tl.arange(0, BLOCK)
    m_tile = m_row[:, None] & (o_feature < WIDTH)[None, :]
    return tl.load(p_rows[:, None] + o_feature[None, :], mask=m_tile, other=0.0).to(tl.float32)


@triton.jit
def hidden_sum(p_target, p_source, m_edge, i_x, XI: tl.constexpr, CHUNK: tl.constexpr):
    """target_hidden_i + source_hidden_j, CHUNK features from `i_x` on, [ROWS, CHUNK] in float32."""
    o_x = i_x + tl.arange(0, CHUNK)
    m_tile = m_edge[:, None] & (o_x < XI)[None, :]
    b_target = tl.load(p_target[:, None] + o_x[None, :], mask=m_tile, other=0.0).to(tl.float32)
    b_source = tl.load(p_source[:, None] + o_x[None, :], mask=m_tile, other=0.0).to(tl.float32)
    return b_target + b_source


@triton.jit
def gelu_parts(b_x):
    """x clipped at -BORDER, x clipped on both sides, the square of that, and rsqrt(1 + e^-p), where
    p is the polynomial above. The last is the square root of the sigmoid: a root takes one
    instruction, a division five."""
    b_x = tl.maximum(b_x, -BORDER, propagate_nan=tl.PropagateNan.ALL)
    b_inner = tl.minimum(b_x, BORDER)
    b_square = b_inner * b_inner
    b_power = b_inner * (A + b_square * (B + b_square * C))
    return b_x, b_inner, b_square, tl.rsqrt(1.0 + tl.exp2(b_power))


@triton.jit
def gelu(b_x, HALF: tl.constexpr):
    """GELU of a tile of any shape: exact in float32, to 5e-5 if HALF."""
    if HALF:
        b_x, _, _, b_root = gelu_parts(b_x)
        b_gelu = b_x * b_root * b_root
    else:
        b_gelu = b_x * (0.5 + 0.5 * tl.math.erf(b_x * SQRT_HALF))
    return b_gelu


@triton.jit
def gelu_slope(b_x, HALF: tl.constexpr):
    """Return the derivative of GELU, of a tile of any shape."""
    if HALF:
        b_x, b_inner, b_square, b_root = gelu_parts(b_x)
        b_share = b_root * b_root
        b_rise = b_inner * (A + b_square * (3.0 * B + b_square * (5.0 * C))) * (-1.0 * LN2)
        b_rise = tl.where(b_x > BORDER, 0.0, b_rise)
        b_slope = b_share + b_share * (1.0 - b_share) * b_rise
    else:
        b_slope = 0.5 + 0.5 * tl.math.erf(b_x * SQRT_HALF)
        b_slope += b_x * INVERSE_SQRT_2PI * tl.exp2(b_x * b_x * (-0.5 * LOG2E))
    return b_slope


@triton.jit
def softplus(b_x):
    """log(1 + e^x), with all digits also where the result is small."""
    b_power = tl.exp2(-tl.abs(b_x) * LOG2E)
    b_series = b_power * (
        1 - b_power * (1 / 2 - b_power * (1 / 3 - b_power * (1 / 4 - b_power / 5)))
    )
    b_log = tl.where(b_power < 0.03125, b_series, tl.log(1.0 + b_power))
    return tl.maximum(b_x, 0.0, propagate_nan=tl.PropagateNan.ALL) + b_log


@triton.jit
def sigmoid(b_x):
    """The derivative of softplus."""
    return 1.0 / (1.0 + tl.exp2(b_x * (-1.0 * LOG2E)))


@triton.jit
def hold_weights(
    p_weight, HELD: tl.constexpr, BLOCK_XI: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Weights [COLUMNS, BLOCK_XI] as a tuple of tiles [CHUNK, COLUMNS] if HELD; otherwise ().

    The tiles stay on chip, in registers or shared memory.
    """
    held = ()
    if HELD:
        o_column = tl.arange(0, COLUMNS)
        for i_chunk in tl.static_range(BLOCK_XI // CHUNK):
            o_x = i_chunk * CHUNK + tl.arange(0, CHUNK)
            b_weight = tl.load(p_weight + o_column[None, :] * BLOCK_XI + o_x[:, None])
            held = held + (b_weight,)  # type: ignore[assignment]  # noqa: RUF005
    return held


@triton.jit
def edge_network(
    p_target, p_source, m_edge, p_shear, p_shear_bias, p_logits, held_shear, held_logits,
    XI: tl.constexpr, BLOCK_XI: tl.constexpr, CHUNK: tl.constexpr,
    RANKS: tl.constexpr, BLOCK_D: tl.constexpr, HELD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Raw rows of Lambda [ROWS, RANKS, BLOCK_D], and logits [ROWS, LOGITS]: alpha's, beta's, zeros.

    Both are products of the edges' hidden vectors with weights, CHUNK hidden features at a time.
    Hidden features are computed from both tokens when they are needed. `p_shear` points to weights
    [RANKS * BLOCK_D, BLOCK_XI] and `p_logits` to weights [LOGITS, BLOCK_XI], padded with zeros.
    """
    ROWS: tl.constexpr = m_edge.shape[0]
    HALF: tl.constexpr = p_shear.dtype.element_ty != tl.float32
    o_column = tl.arange(0, RANKS * BLOCK_D)
    o_logit = tl.arange(0, LOGITS)
    b_rows = tl.zeros([ROWS, RANKS * BLOCK_D], tl.float32)
    b_logits = tl.zeros([ROWS, LOGITS], tl.float32)
    if HELD:
        for i_chunk in tl.static_range(BLOCK_XI // CHUNK):
            # [ROWS, CHUNK]
            b_hidden = gelu(
                hidden_sum(p_target, p_source, m_edge, i_chunk * CHUNK, XI, CHUNK), HALF
            )
            b_hidden = b_hidden.to(p_shear.dtype.element_ty)
            b_rows = add_product(b_rows, b_hidden, held_shear[i_chunk], PRECISION)
            b_logits = add_product(b_logits, b_hidden, held_logits[i_chunk], PRECISION)
    else:
        for i_x in range(0, BLOCK_XI, CHUNK):
            o_x = i_x + tl.arange(0, CHUNK)
            # [ROWS, CHUNK]
            b_hidden = gelu(hidden_sum(p_target, p_source, m_edge, i_x, XI, CHUNK), HALF)
            b_hidden = b_hidden.to(p_shear.dtype.element_ty)
            # [CHUNK, RANKS * BLOCK_D], then [CHUNK, LOGITS]
            b_shear = tl.load(p_shear + o_column[None, :] * BLOCK_XI + o_x[:, None])
            b_rows = add_product(b_rows, b_hidden, b_shear, PRECISION)
            b_weight = tl.load(p_logits + o_logit[None, :] * BLOCK_XI + o_x[:, None])
            b_logits = add_product(b_logits, b_hidden, b_weight, PRECISION)
    b_rows += tl.load(p_shear_bias + o_column)[None, :]
    return tl.reshape(b_rows, [ROWS, RANKS, BLOCK_D]), b_logits


@triton.jit
def strengths(b_logits, p_logit_bias):
    """alpha, beta, and their logits, of which they are the softplus; [ROWS] each."""
    o_logit = tl.arange(0, LOGITS)[None, :]
    b_alpha_logit = tl.sum(tl.where(o_logit == 0, b_logits, 0.0), axis=1) + tl.load(p_logit_bias)
    b_beta_logit = tl.sum(tl.where(o_logit == 1, b_logits, 0.0), axis=1) + tl.load(p_logit_bias + 1)
    return softplus(b_alpha_logit), softplus(b_beta_logit), b_alpha_logit, b_beta_logit


@triton.jit
def inverse_squares(b_rows, n_rows, RANKS: tl.constexpr):
    """1 / |s l|^2 of every raw row l (0 for a zero row), and s, [ROWS, RANKS] each.

    The projection of d on l is s l (s l . d) / |s l|^2 for any s, so callers multiply by s twice.
    s is 1, except for rows whose squares would overflow or underflow. These are rare. s is chosen
    for each row alone, so that no edge changes the rounding of another. Rows from `n_rows` on are
    padding.
    """
    b_square = tl.sum(b_rows * b_rows, axis=2)
    b_scale = tl.full(b_square.shape, 1.0, tl.float32)
    m_usual = (b_square >= SMALLEST_SQUARE) & (b_square <= LARGEST_SQUARE)
    m_usual = m_usual | (tl.arange(0, RANKS) >= n_rows)[None, :]
    if tl.min(tl.min(m_usual.to(tl.int32), axis=1), axis=0) == 0:
        b_largest = tl.max(tl.abs(b_rows), axis=2)
        b_scale = tl.where(m_usual | (b_largest == 0), 1.0, 1.0 / b_largest)
        b_scaled = b_rows * b_scale[:, :, None]
        b_square = tl.sum(b_scaled * b_scaled, axis=2)
    return tl.where(b_square == 0, 0.0, 1.0 / b_square), b_scale


@triton.jit
def along(b_rows, b_d):
    """l . d for all rows l of `b_rows` [ROWS, RANKS, BLOCK_D], d [ROWS, BLOCK_D]: [ROWS, RANKS]."""
    return tl.sum(b_rows * b_d[:, None, :], axis=2)


@triton.jit
def combine(b_rows, b_share):
    """The sum over RANKS of rows times their shares [ROWS, RANKS]: [ROWS, BLOCK_D]."""
    return tl.sum(b_rows * b_share[:, :, None], axis=1)

"""Arithmetic of every edge kernel on its rows of edges, and nothing else.

A program takes ROWS rows and goes over their edges, SLOTS of each at a time: tiles of pairs are
[ROWS, SLOTS], gathered features [ROWS, SLOTS, width].
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphattn.kernels.shared.programs import heads_first


@triton.jit
def segments_of_program(p_segments, num_segments, heads, ROWS: tl.constexpr):
    """Return the segments that a program takes (rows of `Rows.segments`).

    These are batch, head, and of every segment [ROWS]: its row, which is the number of a token, its
    first edge, the number of its edges, and the number of its part. The row is -1 if there is no
    such segment. The part is -1 if the row is not split.
    """
    i_b, i_h, i_group = heads_first((num_segments + ROWS - 1) // ROWS, heads)
    o_segment = i_group * ROWS + tl.arange(0, ROWS)
    m_segment = o_segment < num_segments
    p_segment = p_segments + 4 * o_segment.to(tl.int64)
    b_row = tl.load(p_segment, mask=m_segment, other=-1)
    b_first = tl.load(p_segment + 1, mask=m_segment, other=0)
    b_count = tl.load(p_segment + 2, mask=m_segment, other=0).to(tl.int32)
    b_part = tl.load(p_segment + 3, mask=m_segment, other=-1)
    return i_b, i_h, b_row, b_first, b_count, b_part


@triton.jit
def without_invalid(b_count, b_row, p_valid):
    """Numbers of edges [ROWS], made 0 for tokens that are not valid; `p_valid` may be None."""
    if p_valid is not None:
        b_valid = tl.load(p_valid + b_row, mask=b_row >= 0, other=0)
        b_count = tl.where(b_valid != 0, b_count, 0)
    return b_count


@triton.jit
def load_edges(
    edges, p_valid, p_kept, b_first, b_count, i_slot, heads, i_h, SLOTS: tl.constexpr
):  # fmt: skip
    """The next SLOTS edges of every row, from edge `i_slot` of the row on; [ROWS, SLOTS] each.

    These are the token at the other end, whether there is an edge, and the number of the edge in
    the graph. That is its place among all rows' edges, or what `edges.p_edge_ids` has there. Edges
    to tokens that `p_valid` does not mark are no edges here, nor are those that `p_kept` does not.
    """
    o_slot = i_slot + tl.arange(0, SLOTS)
    m_edge = o_slot[None, :] < b_count[:, None]
    o_place = b_first[:, None] + o_slot[None, :]
    b_other = tl.load(edges.p_others + o_place, mask=m_edge, other=-1).to(tl.int64)
    m_edge = b_other >= 0  # tables have empty entries
    if p_valid is not None:
        m_edge = m_edge & (tl.load(p_valid + b_other, mask=m_edge, other=0) != 0)
    b_edge = o_place
    if edges.p_edge_ids is not None:
        b_edge = tl.load(edges.p_edge_ids + o_place, mask=m_edge, other=0)
    if p_kept is not None:
        m_edge = m_edge & (tl.load(p_kept + b_edge * heads + i_h, mask=m_edge, other=0) != 0)
    return b_other, m_edge, b_edge


@triton.jit
def gather(p_first, b_token, m_pair, i_stride, WIDTH: tl.constexpr):
    """Features of tokens `b_token` [ROWS, SLOTS]: [ROWS, SLOTS, width] in float32.

    The width is WIDTH, rounded up to a power of 2. Tokens outside the mask `m_pair` are not read
    and become zeros, so it does not matter if they hold NaN.
    """
    o_feature = tl.arange(0, triton.next_power_of_2(WIDTH))
    p_tile = p_first + (b_token * i_stride)[:, :, None] + o_feature[None, None, :]
    m_tile = m_pair[:, :, None] & (o_feature < WIDTH)[None, None, :]
    return tl.load(p_tile, mask=m_tile, other=0.0).to(tl.float32)


@triton.jit
def gather_affinities(
    b_own, p_first, b_token, m_pair, i_stride, D: tl.constexpr, RBF: tl.constexpr
):  # fmt: skip
    """Affinities of the rows' own tokens `b_own` [ROWS, BLOCK_D] with those at the other ends.

    Returns the affinities [ROWS, SLOTS]: own . other, or -||own - other||^2 / 2 if RBF; and their
    derivatives with respect to `own` [ROWS, SLOTS, BLOCK_D]: other, or other - own if RBF.
    """
    b_other = gather(p_first, b_token, m_pair, i_stride, D)
    if RBF:
        b_other = b_other - b_own[:, None, :]
        b_affinity = tl.sum(b_other * b_other, axis=2) * -0.5
    else:
        b_affinity = tl.sum(b_other * b_own[:, None, :], axis=2)
    return b_affinity, b_other


@triton.jit
def load_bias(p_bias, b_edge, m_edge, heads, i_h):
    """Biases of edges, [ROWS, SLOTS]; 0 where there is no edge."""
    return tl.load(p_bias + b_edge * heads + i_h, mask=m_edge, other=0.0)

"""Nearest neighbours, exactly, in three kernels: candidates, their exact order, and proof.

A program of the first kernel takes a tile of targets and goes over the sources that any of them
sees. For every target it keeps the sources with the smallest rounded distances, its candidates: a
few more than are asked for. No matrix of distances is stored. The other kernels, in `exact`, order
the candidates by exact distances and prove that rounding has hidden no nearer source. For rows
where they cannot prove it, they search again.

Rounded distances are :math:`s_{ij} = |b_j|^2 - 2 a_i \\cdot b_j` of centred tokens, which ranks the
sources of a row as :math:`|a_i - b_j|^2` does.

Constants of the kernel: WIDTH are the features of a token, with padding, and BLOCK_C those that are
multiplied at once. ROWS and COLUMNS are the targets and sources of a tile, KEPT the candidates of a
target. LOW has as many low bits as numbers of columns and candidates need. STRIDED and PRECISION
are those of :meth:`graphattn.kernels.bands.inputs.BandInputs.common`. The beginnings of names are
explained in :mod:`graphattn.kernels`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphattn.kernels.bands.math import (
    edges_to,
    load_tile,
    part_borders,
    row_pointers,
    tile_of_program,
)
from graphattn.kernels.bands.schedule import BandSchedule
from graphattn.kernels.neighbors.exact import OWN_FIRST, OWN_NEVER, in_exact_order, search_again
from graphattn.kernels.shared import tuning
from graphattn.kernels.shared.launch import launch
from graphattn.kernels.shared.ordered_integers import LARGEST, ordered_bits
from graphattn.kernels.shared.precision import add_product, product, product_precision

SPARE = 6  # candidates beyond the k asked for and two that may turn out to be no edges
WHOLE = 64  # tokens of at most so many features are multiplied at once,
CHUNK = 32  # and others so many features at a time
INFINITE = tl.constexpr(0x7F800000)  # the bits of infinity
# Terms of the bound on the error of s_ij, in units of eps (|a_i| + max |b|)^2; see `Centred`.
ROUNDING = {"ieee": (1, 8), "widened": (1, 8), "tf32x3": (4, 32)}


@triton.jit
def merge(b_kept, b_index, b_top, b_key, i_column, LOW: tl.constexpr):
    """Puts the smallest keys of a tile in place of the largest that are kept.

    `b_key` [ROWS, COLUMNS] are the tile's keys, `b_kept` and `b_index` [ROWS, KEPT] the candidates'
    keys and places, and `b_top` [ROWS] is the largest of `b_kept`. The last three are returned.

    A key is an s as an integer in the same order, but its low bits are its place: its column in the
    tile, or its slot among the candidates. So no two keys of a row are equal, and the least key
    says where it is. Without those bits an s is rounded down: every source that is left out has an
    s of at least the largest that is kept, rounded in this way.
    """
    o_slot = tl.arange(0, b_kept.shape[1])
    b_least = tl.min(b_key, axis=1)
    # Except in the first tiles, few keys are small enough: most tiles take a round or two.
    while tl.max((b_least < (b_top & ~LOW)).to(tl.int32), axis=0) > 0:
        m_slot = (b_kept == b_top[:, None]) & (b_least < (b_top & ~LOW))[:, None]
        b_kept = tl.where(m_slot, (b_least & ~LOW)[:, None] | o_slot[None, :], b_kept)
        b_place = i_column + (b_least & LOW)
        b_index = tl.where(m_slot, b_place[:, None], b_index)
        b_top = tl.max(b_kept, axis=1)
        b_key = tl.where(b_key == b_least[:, None], LARGEST, b_key)
        b_least = tl.min(b_key, axis=1)
    return b_kept, b_index, b_top


@triton.jit(do_not_specialize=["num_tiles"])
def candidates_kernel(
    p_a, p_b, p_square, p_index, p_bound, p_tiles, p_sequences, num_tiles,
    WIDTH: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    KEPT: tl.constexpr, LOW: tl.constexpr, STRIDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sources with the smallest s, [N, KEPT], -1 if there are fewer; and a bound [N].

    Sources that a target sees and that are not among its candidates have an s of at least `bound`.
    """
    _, _, _, i_row, band = tile_of_program(p_tiles, p_sequences, num_tiles, 1)
    i_first_target, n_targets, i_first_source, n_sources, i_step, n_before, n_after, _ = band
    p_a += i_first_target * WIDTH
    p_b += i_first_source * WIDTH
    p_square += i_first_source
    o_row = i_row + tl.arange(0, ROWS)
    o_slot = tl.arange(0, KEPT)
    # [ROWS, KEPT]
    b_kept = tl.zeros([ROWS, KEPT], tl.int32) + (o_slot + INFINITE)[None, :]
    b_index = tl.full([ROWS, KEPT], -1, tl.int32)
    b_top = tl.max(b_kept, axis=1)
    i_begin, i_full, i_full_end, i_end = part_borders(
        i_row, n_targets, n_sources, n_before, n_after, ROWS, COLUMNS, 3
    )
    if WIDTH == BLOCK_C:
        # [ROWS, BLOCK_C]
        b_a = load_tile(p_a, i_row, i_step, WIDTH, n_targets, BLOCK_C, ROWS, BLOCK_C, STRIDED, True)
        # [COLUMNS, BLOCK_C]: each tile is loaded while the one before it is merged.
        b_b = load_tile(
            p_b, i_begin, i_step, WIDTH, n_sources, BLOCK_C, COLUMNS, BLOCK_C, STRIDED, True
        )
    for i_column in range(i_begin, i_end, COLUMNS):
        m_column = i_column + tl.arange(0, COLUMNS) < n_sources
        p_squares = row_pointers(p_square, i_column, i_step, COLUMNS, STRIDED)
        # [COLUMNS]
        b_square = tl.load(p_squares, mask=m_column, other=float("inf"))
        if WIDTH == BLOCK_C:
            # [ROWS, COLUMNS]
            b_dot = product(b_a, tl.trans(b_b), PRECISION)
            b_b = load_tile(
                p_b, i_column + COLUMNS, i_step, WIDTH, n_sources, BLOCK_C, COLUMNS, BLOCK_C,
                STRIDED, True,
            )  # fmt: skip
        else:
            # [ROWS, COLUMNS]
            b_dot = tl.zeros([ROWS, COLUMNS], tl.float32)
            for i_chunk in range(0, WIDTH, BLOCK_C):
                b_a = load_tile(
                    p_a + i_chunk, i_row, i_step, WIDTH, n_targets, BLOCK_C, ROWS, BLOCK_C,
                    STRIDED, True,
                )  # fmt: skip
                b_b = load_tile(
                    p_b + i_chunk, i_column, i_step, WIDTH, n_sources, BLOCK_C, COLUMNS, BLOCK_C,
                    STRIDED, True,
                )  # fmt: skip
                b_dot = add_product(b_dot, b_a, tl.trans(b_b), PRECISION)
        # [ROWS, COLUMNS]
        b_s = b_square[None, :] - 2 * b_dot
        o_place = tl.arange(0, COLUMNS)
        b_key = (ordered_bits(b_s.to(tl.int32, bitcast=True)) & ~LOW) | o_place[None, :]
        if (i_column < i_full) | (i_column >= i_full_end):  # otherwise all rows see all sources
            m_edge = edges_to(o_row, i_column, band, None, COLUMNS, False, STRIDED)
            b_key = tl.where(m_edge, b_key, LARGEST)
        b_kept, b_index, b_top = merge(b_kept, b_index, b_top, b_key, i_column, LOW)

    m_row = o_row < n_targets
    o_token = i_first_target + o_row * i_step
    b_nearest = tl.where(b_index >= 0, (i_first_source + b_index * i_step).to(tl.int32), -1)
    tl.store(p_index + o_token[:, None] * KEPT + o_slot[None, :], b_nearest, mask=m_row[:, None])
    b_bound = ordered_bits(b_top & ~LOW).to(tl.float32, bitcast=True)
    tl.store(p_bound + o_token, b_bound, mask=m_row)


class Sizes(NamedTuple):
    """Sizes of the tiles of `candidates_kernel`, and of the candidates it keeps of every target."""

    rows: int
    columns: int
    num_warps: int
    kept: int


def choose(k: int, width: int) -> Sizes:
    """Choose by instructions and registers of kernels compiled ahead of time.

    Other sizes have not been measured on a GPU. Two programs of 4 warps share a multiprocessor: one
    multiplies while the other merges. Where that spills, one program has 8.
    """
    kept = max(16, triton.next_power_of_2(k + 2 + SPARE))
    if kept > 128:
        return Sizes(32 if kept == 256 and not tuning.is_amd() else 16, 128, 8, kept)
    if tuning.architecture() in ("sm_100", "sm_103"):
        return Sizes(64, 64, 8, kept)
    if kept <= 32 and (tuning.architecture() == "sm_90" or tuning.is_amd()):
        return Sizes(64, 128 if width <= WHOLE else 64, 4, kept)
    return Sizes(64, 128, 8, kept)


class Centred(NamedTuple):
    r"""Tokens as `candidates_kernel` reads them, and what rounding may do.

    Sources that are not finite have an infinite square: they are never candidates.

    Rounding changes :math:`s_{ij}` by at most
    :math:`E_i = (m C + n) \, \epsilon \, (|a_i| + \max_j |b_j|)^2`, plus C of the smallest numbers:
    a product of C terms in float32 is off by at most C eps / 2 of the product of norms (Higham,
    *Accuracy and Stability of Numerical Algorithms*, 3.1), twice, and centring, the norms and a
    few eps more make m = 1, n = 8. tf32x3 splits a number in two parts of 11 bits. It leaves out
    the product of the two small parts, :math:`2^{-22}` of the product of norms, and hardware cuts
    off what the small parts have beyond their 11 bits, :math:`2^{-21}` of it on each side: 10 eps
    (eps is :math:`2^{-23}`). Its sums, of three terms a feature, are cut off rather than rounded:
    an eps or less for each. As :math:`2 |a_i| |b_j|` is at most half of the square above, that is
    (5 + 1.5 C) eps, and m = 4, n = 32 leave more than twice as much.
    """

    a: Tensor  # [N, WIDTH], with zeros after the C features
    b: Tensor  # [M, WIDTH]; one tensor with `a` where targets are the sources
    square: Tensor  # [M]
    margin: Tensor  # float64 [N]; see `in_exact_order`


def centred(x: Tensor, y: Tensor, precision: str) -> Centred:
    """Targets x [N, C] and sources y [M, C], measured from the mean of the sources.

    Without a bound on rounding (products may overflow) the margin is minus infinity: nothing can
    be proved. For targets that are not finite it is infinite: there is nothing to prove.
    """
    C = x.shape[1]
    width = max(triton.next_power_of_2(C), 16) if C <= WHOLE else triton.cdiv(C, CHUNK) * CHUNK
    finite = y.isfinite().all(dim=1)
    count = finite.sum().clamp(min=1)
    center = y.where(finite[:, None], 0.0).sum(dim=0, dtype=torch.float64) / count
    center = center.to(y.dtype)

    def from_center(tokens: Tensor, are_finite: Tensor) -> Tensor:
        padded = tokens.new_zeros(len(tokens), width)
        padded[:, :C] = (tokens - center).where(are_finite[:, None], 0.0)
        return padded

    b = from_center(y, finite)
    known = finite if x is y else x.isfinite().all(dim=1)
    a = b if x is y else from_center(x, known)
    norm_of_b = torch.linalg.vector_norm(b, dim=1, dtype=torch.float64)
    norm_of_a = norm_of_b if x is y else torch.linalg.vector_norm(a, dim=1, dtype=torch.float64)
    reach = (norm_of_a + norm_of_b.amax()).square()
    of_width, more = ROUNDING[precision]
    finfo = torch.finfo(torch.float32)
    rounding = (of_width * C + more) * finfo.eps * reach + C * finfo.tiny
    # E_i would be enough. It is doubled for the rounding errors of float64.
    margin = (norm_of_a.square() - 2 * rounding).where(4 * reach < finfo.max, -torch.inf)
    square = norm_of_b.square().to(torch.float32).where(finite, torch.inf)
    return Centred(a, b, square, margin.where(known, torch.inf))


def nearest(
    x: Tensor, y: Tensor, bands: BandSchedule, k: int, *, to_self: bool, self_loops: bool
) -> Tensor:
    """The k nearest sources of every target, int64 [N, k], nearest first; -1 if there are fewer.

    Args:
        x: targets, [N, C], float32.
        y: sources, [M, C], float32; `x` itself if targets and sources are the same tokens.
        bands: which sources a target sees.
        k: 1 <= k <= 256.
        to_self: whether target i and source i are one token.
        self_loops: whether it is then its own first neighbour, or never one.

    Example::

        x = torch.randn(1000, 3, device="cuda")
        complete = BandSchedule(torch.tensor([[0, 1000, 0, 1000, 1, 999, 999, 1]]), x.device)
        index = nearest(x, x, complete, 16, to_self=True, self_loops=False)
    """
    one = y is x
    x = x.contiguous()
    y = x if one else y.contiguous()  # one tensor stays one: it is then centred once
    own_rule = (OWN_FIRST if self_loops else OWN_NEVER) if to_self else 0
    tokens = centred(x, y, precision := product_precision(x.dtype))
    width = tokens.a.shape[1]
    sizes = choose(k, width)
    candidates = x.new_empty((len(x), sizes.kept), dtype=torch.int32)
    bound = x.new_empty(len(x))
    tiles = bands.tiles("targets", sizes.rows)
    launch(
        candidates_kernel,
        (len(tiles),),
        p_a=tokens.a,
        p_b=tokens.b,
        p_square=tokens.square,
        p_index=candidates,
        p_bound=bound,
        p_tiles=tiles,
        p_sequences=bands.sequences,
        num_tiles=len(tiles),
        WIDTH=width,
        BLOCK_C=width if width <= WHOLE else CHUNK,
        ROWS=sizes.rows,
        COLUMNS=sizes.columns,
        KEPT=sizes.kept,
        LOW=max(sizes.columns, sizes.kept) - 1,
        STRIDED=bands.is_strided,
        PRECISION=precision,
        num_warps=sizes.num_warps,
        num_stages=1,
    )
    index, unsure = in_exact_order(x, y, candidates, bound, tokens.margin, bands, k, own_rule)
    search_again(x, y, index, unsure, bands, own_rule)
    return index

"""Arguments of band kernels that belong together, as named tuples: one in place of several.

Triton keeps the constants of a tuple (names in capitals) while a kernel passes it on as it is. In a
tuple that a kernel makes itself, and in one that a function returns, they would become numbers that
are only known at run time, so those tuples have none: :class:`BandRow`, :class:`Sources`,
:class:`Targets` and :class:`PairTables`. Triton 3.4 cannot return None from a function, so every
kernel moves its own pointers to the tokens of its sequence, in the same lines as the others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from graphattn.kernels.bands.schedule import BandSchedule

LONGEST_TILE = 256  # rows


class TokenRows(NamedTuple):
    """Features of tokens by head, [B, N, H, WIDTH].

    Element [b, n, h, f] lies at ``p + (b * N + n) * stride_n + h * stride_h + f`` if `x` is laid
    out as :func:`graphattn.kernels.shared.layout.side_by_side` returns tensors. BLOCK is WIDTH,
    rounded up to the power of 2 that tiles need. If FAR, tokens are so far apart in memory that
    offsets within a tile need 64 bits.
    """

    p: Tensor
    stride_n: int
    stride_h: int
    WIDTH: Any
    BLOCK: Any
    FAR: Any

    @classmethod
    def of(cls, x: Tensor) -> TokenRows:
        """The argument for a tensor `x` [B, N, H, D]."""
        width, stride = x.shape[-1], x.stride(1)
        constants = width, max(triton.next_power_of_2(width), 16), LONGEST_TILE * stride >= 2**31
        return cls(x, stride, x.stride(2), *map(tl.constexpr, constants))


class BandTables(NamedTuple):
    """Tiles and sequences of a graph, the rows of `BandSchedule.tiles` and `.sequences`.

    HOLES: in some sequence one hop is left out, such as hop 0 without self-loops. STRIDED: in some
    sequence neighbouring tokens are more than one place apart, as in dilated windows.
    """

    p_tiles: Tensor
    p_sequences: Tensor
    HOLES: Any
    STRIDED: Any

    @classmethod
    def of(cls, bands: BandSchedule, tiles: Tensor) -> BandTables:
        """The argument for `bands` and its `tiles` of some side and size."""
        flags = map(tl.constexpr, (bands.has_holes, bands.is_strided))
        return cls(tiles, bands.sequences, *flags)


class BandRow(NamedTuple):
    """A row of `BandSchedule.sequences`, which explains it.

    Places of tokens and the step have 64 bits, numbers of tokens and the hole 32.
    """

    i_first_target: Any
    n_targets: Any
    i_first_source: Any
    n_sources: Any
    i_step: Any
    n_before: Any
    n_after: Any
    i_hole: Any


class Sources(NamedTuple):
    """Pointers to the first source of a sequence, for one key head.

    `p_pieces` are stored -||k||^2 / 2, in pieces; `p_valid` says which sources are valid. Both may
    be None.
    """

    p_key: Any
    p_value: Any
    p_pieces: Any
    p_valid: Any


class Targets(NamedTuple):
    """Pointers to the first target of a sequence, for one query head.

    `p_saved` are the base-2 log-sums of the forward, `p_delta` is explained at `backward`.
    """

    p_query: Any
    p_d_out: Any
    p_saved: Any
    p_delta: Any


class PairTables(NamedTuple):
    """Biases and top-k bits of pairs of tokens of a sequence, for one query head.

    `p_table` points to the bias of hop 0 in a table of `heads` columns, `p_kept` to the first of
    `n_words` words of the first target's bits; both may be None.
    """

    p_table: Any
    heads: Any
    p_kept: Any
    n_words: Any

"""Dropout of edges: a hash of seed, batch entry, head, target and source.

A hash replaces a stream of random numbers. Backends visit edges in different orders, and a backward
pass that computes weights again visits them twice, yet all must drop the same edges. The hash uses
integer arithmetic, which C++ and kernels can repeat to the bit. Numbers are unsigned, products and
sums are taken modulo 2^64 or 2^32, and ``>>`` shifts in zeros:

.. code-block:: text

    mix(z)      z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9          64 bits, SplitMix64's
                z = (z ^ (z >> 27)) * 0x94D049BB133111EB
                z ^ (z >> 31)
    next(s, n)  mix(s + (n + 1) * 0x9E3779B97F4A7C15)

    start       next(0, seed)
    row         next(next(next(start, b), h), i)                  64 bits: a high and a low word
    column      the low word of next(~start, j)                   32 bits
    x           ((low word of row) ^ column) * 0x85EBCA6B
    x           (x ^ (x >> 15)) * ((high word of row) | 1)
    dropped     x, read as a signed number, < min(floor(p * 2^32), 2^32 - 1) - 2^31

where b is the number of the entry in the leading dimensions (the last dimension is fastest), h is
the query head, and i and j are target and source in the graph of the call. Rows and columns are
mixed well, but only once per token; an edge needs just two products of 32 bits. The first product
breaks the pattern of ``row ^ column``, in which three of the four edges between two targets and two
sources decide the fourth. The second has a factor of the row's own: among a million rows some have
equal low words, and they still drop different sources.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphattn.graphs.token_graph import TokenGraph

EDGE_FACTOR = 0x85EBCA6B - (1 << 32)  # the int32 with the same bits
SEEDS = 1 << 62


class Dropout(NamedTuple):
    """Dropout of one call, or of some of its targets and sources.

    ``rows`` are hashes of targets, int64 [B, N, H]; ``columns`` of sources, int32 [M].
    """

    p: float
    rows: Tensor
    columns: Tensor

    def some(self, targets: Any, sources: Any) -> Dropout:
        """Restrict dropout to some targets and sources, given as slices or index tensors."""
        return Dropout(self.p, self.rows[:, targets], self.columns[sources])

    def kept_edges(self, source: Tensor, target: Tensor, batch: torch.Size) -> Tensor:
        """Mark the edges that are not dropped, bool [*, E, H]."""
        rows, columns = self.rows.index_select(1, target), self.columns[source][:, None]
        # An operator, because the code that Inductor (torch 2.11) makes of it corrupts the heap.
        if torch.compiler.is_compiling():
            kept: Tensor = torch.ops.graphattn.dropout_keeps(rows, columns, self.p)
        else:
            kept = keeps(self.p, rows, columns)
        return kept.reshape(*batch, *kept.shape[1:])


class Kept(NamedTuple):
    """Edges that dropout keeps.

    Attributes:
        p: the share of edges that is dropped.
        edges: bool in the shape of the weights, True where an edge is kept.
    """

    p: float
    edges: Tensor

    def weights(self, weights: Tensor) -> Tensor:
        """Set dropped weights to 0 and divide the others by 1 - p, so that their mean stays."""
        return weights.masked_fill(~self.edges, 0) / (1 - self.p)

    def among(self, keep: Tensor | None) -> Tensor:
        """The edges of the mask `keep` that are not dropped; of all edges if None."""
        return self.edges if keep is None else self.edges & keep


def draw_seed(generator: Any, device: torch.device, graph: TokenGraph | None = None) -> Tensor:
    """A seed, int64 [], from `generator`, or from torch's default generator of the CPU if None.

    A tensor, so that a compiled function draws anew in every call. Parts of one graph on several
    ranks take different seeds, also if their generators have the same state.
    """
    rank, ranks = (0, 1) if graph is None else graph.rank_of_part
    if generator is None:
        seed = torch.randint(SEEDS, (ranks,))[rank]
    elif isinstance(generator, torch.Generator):
        seed = torch.randint(SEEDS, (ranks,), generator=generator, device=generator.device)[rank]
    else:
        raise ValueError(
            f"generator must be a torch.Generator or None, got {type(generator).__name__}"
        )
    return seed.to(device)


def dropout_of_call(p: float, seed: Tensor, query: Tensor, graph: TokenGraph) -> Dropout:
    """The hashes of all rows and columns of a call with a query [*, N, H, D]."""
    batch, heads = query.shape[:-3].numel(), query.shape[-2]
    sizes = batch, heads, graph.num_targets, graph.num_sources
    if torch.compiler.is_compiling():
        return Dropout(p, *torch.ops.graphattn.dropout_hashes(seed, *sizes))
    return Dropout(p, *_hashes(seed, *sizes))


def _hashes(
    seed: Tensor, batch: int, heads: int, num_targets: int, num_sources: int
) -> tuple[Tensor, Tensor]:
    """Hash rows, int64 [B, N, H], and columns, int32 [M]."""
    device = seed.device
    b, h, i, j = (torch.arange(n, device=device) for n in (batch, heads, num_targets, num_sources))
    start = _next(torch.zeros_like(seed), seed)
    rows = _next(_next(_next(start, b)[:, None, None], h), i[:, None])
    return rows, _next(~start, j).to(torch.int32)


def keeps(p: float, rows: Tensor, columns: Tensor) -> Tensor:
    """Whether edges are kept, bool, from hashes of targets and sources that broadcast."""
    x = (rows.to(torch.int32) ^ columns) * EDGE_FACTOR
    x = (x ^ _shifted(x, 15, 32)) * ((rows >> 32).to(torch.int32) | 1)
    return x >= min(int(p * (1 << 32)), (1 << 32) - 1) - (1 << 31)


def _next(state: Tensor, number: Tensor) -> Tensor:
    """Combine a hash and a number to a new hash, int64."""
    z = state + (number + 1) * _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shifted(z, 31)


def _signed(number: int) -> int:
    """The int64 with the same bits as an unsigned number."""
    return number - (1 << 64) if number >= 1 << 63 else number


def _shifted(x: Tensor, by: int, bits: int = 64) -> Tensor:
    """x >> by for unsigned numbers; torch's own shift copies the sign bit."""
    return (x >> by) & ((1 << (bits - by)) - 1)


# Operators for torch.compile.


@torch.library.custom_op("graphattn::dropout_hashes", mutates_args=())
def _dropout_hashes(
    seed: Tensor, batch: int, heads: int, num_targets: int, num_sources: int
) -> tuple[Tensor, Tensor]:
    return _hashes(seed, batch, heads, num_targets, num_sources)


@_dropout_hashes.register_fake
def _(
    seed: Tensor, batch: int, heads: int, num_targets: int, num_sources: int
) -> tuple[Tensor, Tensor]:
    rows = seed.new_empty((batch, num_targets, heads))
    return rows, seed.new_empty((num_sources,), dtype=torch.int32)


@torch.library.custom_op("graphattn::dropout_keeps", mutates_args=())
def _dropout_keeps(rows: Tensor, columns: Tensor, p: float) -> Tensor:
    return keeps(p, rows, columns)


@_dropout_keeps.register_fake
def _(rows: Tensor, columns: Tensor, p: float) -> Tensor:
    return rows.new_empty(torch.broadcast_shapes(rows.shape, columns.shape), dtype=torch.bool)

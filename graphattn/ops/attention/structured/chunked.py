"""Attention over one graph, a chunk at a time: of tiles, or of listed edges.

Memory beside inputs and outputs is that of a chunk, or of one row where a single row is larger.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from graphattn.graphs.structures.bands import bands_of
from graphattn.graphs.structures.grid_blocks import GridBlocks, block_order
from graphattn.graphs.structures.structure import GraphStructure
from graphattn.kernels.shared.stored import kept_for_training, stores_results
from graphattn.ops.attention.calls import Inputs
from graphattn.ops.attention.logits.score import Score
from graphattn.ops.attention.merge import are_moderate
from graphattn.ops.attention.structured.chunks import Chunk, ChunkAttention, Whole, scatter
from graphattn.ops.attention.structured.recompute import (
    Gradients,
    Plan,
    PlanOptions,
    unused_rows,
    zeros_like,
)
from graphattn.ops.inputs import full_precision

PAIRS = 1 << 21  # the most logits of a chunk: 8 megabytes of float32
FEATURES = 1 << 20  # the most numbers of the keys of a chunk


@dataclass
class _Chunked(Plan):
    """See :class:`~.recompute.Plan`."""

    options: PlanOptions

    def chunks(self, inputs: Inputs) -> Iterator[Chunk]:
        """Chunks that hold every edge exactly once, and every target with edges exactly once."""
        raise NotImplementedError

    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """Output, log-sums, and the log-sums again."""
        query, value = inputs.query, inputs.value
        out = query.new_zeros((*query.shape[:-1], value.shape[-1]))
        lse = query.new_full(query.shape[:-1], -torch.inf)
        with full_precision(query.device):
            finite = products_are_finite(inputs)
            for chunk in self.chunks(inputs):
                part, part_lse = ChunkAttention(self.options, chunk, inputs, finite).attend()
                scatter(out, chunk.targets, part)
                scatter(lse[..., None], chunk.targets, part_lse[..., None])
        return out, lse, lse

    def backward(
        self, inputs: Inputs, out: Tensor, saved: Tensor, d_out: Tensor, d_lse: Tensor | None
    ) -> Gradients:
        """Gradients of the five inputs; the logits of every chunk are computed again."""
        return self._gradients(inputs, d_out, d_lse, None)

    def backward_from_log_sums(
        self, inputs: Inputs, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor
    ) -> Gradients | None:
        """Gradients from outputs and log-sums over more edges than the plan has.

        The result is None with top_k, with dropout, with a score of your own, which only autograd
        differentiates, and for numbers that this is not exact for.
        """
        options = self.options
        if options.top_k is not None or options.drops:
            return None
        empty = lse == -torch.inf
        if isinstance(options.score, Score) or not are_moderate(
            (*inputs[:4], out, d_out, d_lse), (lse.masked_fill(empty, 0),)
        ):
            return None
        delta = (out * d_out).sum(-1) - d_lse
        whole = lse.masked_fill(empty, torch.inf), delta
        return self._gradients(inputs, d_out, d_lse, whole)

    def _gradients(
        self, inputs: Inputs, d_out: Tensor, d_lse: Tensor | None, whole: Whole | None
    ) -> Gradients:
        sums = zeros_like(inputs)
        finite = products_are_finite(inputs, d_out, d_lse)
        unused = None if finite else unused_rows(d_out, d_lse)
        for chunk in self.chunks(inputs):
            attention = ChunkAttention(self.options, chunk, inputs, finite, unused, whole)
            attention.add_gradients(sums, d_out, d_lse)
        return sums

    def by_autograd(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Output and log-sums in operations that can be differentiated any number of times."""
        query, value = inputs.query, inputs.value
        out = query.new_zeros((*query.shape[:-1], value.shape[-1]))
        lse = query.new_full((*query.shape[:-1], 1), -torch.inf)
        finite = products_are_finite(inputs)
        places, outs, sums = [], [], []
        for chunk in self.chunks(inputs):
            part, part_lse = self._attend_again(chunk, inputs, finite)
            places.append(chunk.targets.flatten())
            outs.append(part.flatten(2, 3).transpose(1, 2))
            sums.append(part_lse.flatten(2).transpose(1, 2)[..., None])
        if places:
            where = torch.cat(places)
            out = out.index_copy(1, where, torch.cat(outs, dim=1))
            lse = lse.index_copy(1, where, torch.cat(sums, dim=1))
        else:  # without edges, all gradients are zeros, which can be differentiated again
            nothing = sum(x.flatten()[:0].sum() for x in inputs[:5] if x is not None)
            out, lse = out + nothing, lse + nothing
        return out, lse[..., 0]

    def _attend_again(self, chunk: Chunk, inputs: Inputs, finite: bool) -> tuple[Tensor, Tensor]:
        """Attend within a chunk, in operations of torch that autograd differentiates.

        With a score of your own, the pairs of the chunk are computed again in the backward pass.
        """

        def attend() -> tuple[Tensor, Tensor]:
            return ChunkAttention(self.options, chunk, inputs, finite).attend()

        if not isinstance(self.options.score, Score):
            return attend()
        results: tuple[Tensor, Tensor] = checkpoint(attend, use_reentrant=False)
        return results

    @property
    def forms_features(self) -> bool:
        """Whether the score has no `pairs`, so that a pair needs memory for all its features."""
        score = self.options.score
        return isinstance(score, Score) and type(score).pairs is Score.pairs


@dataclass
class TilePlan(_Chunked):
    """Attention over tiles; a bias belongs to offsets, or on a complete graph to pairs."""

    structure: GraphStructure

    def chunks(self, inputs: Inputs) -> Iterator[Chunk]:
        (B, _, H, D), (_, M, _, Dv) = inputs.query.shape, inputs.value.shape
        tiles = tiles_of(self.structure, inputs.query.device)
        assert tiles is not None
        per_pair = D if self.forms_features else 1
        for targets, sources, edges, offsets in tiles:
            (n, m), width = (targets.shape[1], sources.shape[1]), max(B * H, 1) * per_pair
            height = min(max(PAIRS // (width * m), 1), n)
            most = min(PAIRS // (width * m * height), FEATURES // (width * m * max(D, Dv, 1)))
            few = zip(targets.split(max(most, 1)), sources.split(max(most, 1)), strict=True)
            for i, j in few:
                for start in range(0, n, height):
                    rows = slice(start, start + height)
                    entries = None
                    if self.options.bias == "offsets" and offsets is not None:
                        entries = offsets[:, rows]
                    elif self.options.bias == "pairs":
                        entries = i[:, rows, None] * M + j[:, None]
                    yield Chunk(i[:, rows], j, None if edges is None else edges[:, rows], entries)


@dataclass
class RowPlan(_Chunked):
    """Attention over listed edges: the sources of every target are gathered.

    Targets are sorted by degree, so that rows of a chunk are about equally long and need little
    padding. A target with very many sources is a chunk of its own. A bias is [E, H] or [B, E, H],
    or with `index` [E] a table, of which edge e reads row index[e]. Lists keep the integer dtype
    that the graph stores, and are converted to int64 chunk by chunk.
    """

    rowptr: Tensor  # [N + 1]
    source: Tensor  # [E]
    index: Tensor | None = None

    @cached_property
    def degree(self) -> Tensor:
        """Sources of every target, [N]."""
        with kept_for_training():
            return self.rowptr.diff()

    @cached_property
    def order(self) -> Tensor:
        """Targets with the most sources first."""
        with kept_for_training():
            return self.degree.argsort(descending=True, stable=True)

    def chunks(self, inputs: Inputs) -> Iterator[Chunk]:
        (B, _, H, D), Dv = inputs.query.shape, inputs.value.shape[-1]
        width = max(B * H * max(D, Dv), 1)
        ordered = self.degree[self.order].tolist()
        start = 0
        while start < len(ordered) and ordered[start]:
            longest = ordered[start]
            stop = min(start + max(FEATURES // (width * longest), 1), len(ordered))
            targets = self.order[start:stop, None]
            slot = torch.arange(longest, device=targets.device)
            present = slot < self.degree[targets]
            edges = torch.where(present, self.rowptr[targets] + slot, 0)  # padding reads edge 0
            entries = edges if self.index is None else self.index[edges]
            yield Chunk(targets, self.source[edges].long(), present[:, None], entries[:, None])
            start = stop


def products_are_finite(inputs: Inputs, *upstream: Tensor | None) -> bool:
    """Whether all numbers are finite, and so small that no product of two overflows.

    A bias of -inf is allowed: it only removes an edge. The answer is False on other devices than a
    CPU, where to read the numbers would wait for the device.
    """
    scale, bias = inputs.scale, inputs.bias
    if scale.device.type != "cpu":
        return False
    limit = torch.finfo(scale.dtype).max ** 0.5 / 1e3
    if bias is not None and bias.numel() and not bool(bias.detach().amax() <= limit):
        return False
    ranges = [x.detach().aminmax() for x in (*inputs[:3], *upstream) if x is not None and x.numel()]
    return all(bool(-limit <= low) and bool(high <= limit) for low, high in ranges)


# Tiles. In bands, blocks and complete graphs, and in batches of them, a block of neighbouring
# targets sees one run of neighbouring sources. So attention is a product of matrices, and edges are
# not listed.


class Tiles(NamedTuple):
    """T equal tiles of n targets and m sources.

    Attributes:
        targets, sources: the indices of the tokens, [T, n] and [T, m].
        edges: which pairs are edges, bool [1, n, m], the same in all tiles; all if None.
        offsets: the row of a table of offsets that a pair reads, [1, n, m], any row for a pair that
            is no edge; None if the graph has no such table.
    """

    targets: Tensor
    sources: Tensor
    edges: Tensor | None
    offsets: Tensor | None


@stores_results(64)
def tiles_of(structure: GraphStructure, device: torch.device) -> tuple[Tiles, ...] | None:
    """Tiles that hold every edge once; None if a graph has no tiles. The result is cached."""
    if isinstance(structure, GridBlocks):
        return tuple(_blocks_of_grid(structure, device))
    bands = bands_of(structure)
    if bands is None:
        return None
    table, last = structure.offset_table, (structure.num_offsets or 1) - 1
    origins = torch.zeros_like(bands.shifts)
    if table is not None:
        assert table[0] == "sequence"
        origins = -table[1] - bands.shifts
    return tuple(_equal(*_cut(bands.sequences, origins), last, device))


def _cut(sequences: Tensor, origins: Tensor) -> tuple[Tensor, Tensor]:
    """The kind of every tile, [T, 8], and its first target and source, [T, 2].

    A kind is: the number of targets, the number of sources, the position of the first source minus
    that of the first target, and from `sequences` the step, before, after, what is left out, and
    the origin of the table.
    """
    target, n, source, m, step, before, after, left_out = sequences.unbind(1)
    # With more targets in a tile, more pairs are no edges; with fewer, sources are copied more.
    # These sizes are the fastest that were measured.
    window = (before + after + 1).clamp(max=2 * m)
    rows = torch.where(window <= 64, 32, torch.where(window <= 128, 64, 128))
    count = (n + rows - 1) // rows
    of = torch.repeat_interleave(count)
    first = rows[of] * (torch.arange(len(of)) - (count.cumsum(0) - count)[of])
    height = torch.minimum(rows[of], n[of] - first)
    low = torch.minimum((first - before[of]).clamp(min=0), m[of])
    high = torch.maximum(torch.minimum(first + height + after[of], m[of]), low)
    kinds = height, high - low, low - first, *(x[of] for x in (step, before, after, left_out))
    starts = target[of] + first * step[of], source[of] + low * step[of]
    return torch.stack([*kinds, origins[of]], dim=1), torch.stack(starts, dim=1)


def _equal(kinds: Tensor, starts: Tensor, last: int, device: torch.device) -> Iterator[Tiles]:
    """Group tiles of one kind; `last` is the last row of a table."""
    different, which, counts = kinds.unique(dim=0, return_inverse=True, return_counts=True)
    members = starts[which.argsort(stable=True)].split(counts.tolist())
    for kind, first in zip(different.tolist(), members, strict=True):
        n, m, shift, step, before, after, left_out, origin = kind
        if m == 0:
            continue
        target, source = first.to(device).unbind(1)
        i, j = (torch.arange(x, device=device) for x in (n, m))
        hops = shift + j - i[:, None]
        edges = (hops >= -before) & (hops <= after)
        if left_out != 1:  # -2 times a hop
            edges &= -2 * hops != left_out
        yield Tiles(
            target[:, None] + step * i,
            source[:, None] + step * j,
            None if bool(edges.all()) else edges[None],
            (origin + hops).clamp(0, last)[None],
        )


def _blocks_of_grid(grid: GridBlocks, device: torch.device) -> Iterator[Tiles]:
    """Group blocks of one shape; within a block, offsets are those of a small grid."""
    blocks, tokens, _ = block_order(grid, device)
    for equal in blocks:
        size = equal.height * equal.width
        block, i = GridBlocks(equal.height, equal.width, grid.block), torch.arange(size)
        members = tokens[equal.start : equal.start + equal.count * size].view(-1, size)
        yield Tiles(members, members, None, block.offset_index(i[:, None], i).to(device)[None])

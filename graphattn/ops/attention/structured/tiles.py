"""Tiles of the edges of a graph: blocks of neighbouring targets x runs of sources.

In bands, blocks and complete graphs, and in batches of them, a block of neighbouring targets sees
one run of neighbouring sources. So attention is a product of matrices, and no edge is listed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from graphattn.graphs.structures.bands import bands_of
from graphattn.graphs.structures.grid_blocks import GridBlocks, block_order
from graphattn.graphs.structures.structure import GraphStructure
from graphattn.kernels.shared.stored import stores_results


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
    found, which, counts = kinds.unique(dim=0, return_inverse=True, return_counts=True)
    members = starts[which.argsort(stable=True)].split(counts.tolist())
    for kind, own in zip(found.tolist(), members, strict=True):
        n, m, shift, step, before, after, left_out, origin = kind
        if m == 0:
            continue
        target, source = own.to(device).unbind(1)
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
        own, i = GridBlocks(equal.height, equal.width, grid.block), torch.arange(size)
        found = tokens[equal.start : equal.start + equal.count * size].view(-1, size)
        yield Tiles(found, found, None, own.offset_index(i[:, None], i).to(device)[None])

"""Where the edges of a graph lie in contiguous tiles: blocks of targets x runs of sources.

The sources that a block of neighbouring targets sees are one run of neighbours in every band,
block and complete graph, and in batches of them, so a mechanism works on slices and products and
never gathers. This file only counts; what happens inside a tile is in fused.py and explicit.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from graphattn.graphs.composites import Parts
from graphattn.graphs.grid_blocks import EqualBlocks, GridBlocks
from graphattn.graphs.sections import Section
from graphattn.graphs.structure import Band, Blocks, Complete, Structure

Run = tuple[int, int]  # from, and up to but not including


@dataclass(frozen=True)
class Tiles:
    """`count` equal tiles: `rows` targets each, and the `columns` sources they may see.

    `target` and `source` say where the first tile begins among all tokens, (i, j) where that is in
    its own sequence, to which `structure` belongs; the next one begins `step` targets and sources
    later, or else all begin where `starts` says. With a `stride`, all this holds of every stride-th
    token, as in a dilated band.
    """

    structure: Structure
    target: int
    source: int
    rows: int
    columns: int
    i: int = 0
    j: int = 0
    count: int = 1
    step: tuple[int, int] = (0, 0)
    stride: int = 1
    starts: tuple[tuple[int, int], ...] | None = None

    def allowed(self, device: torch.device) -> Tensor | None:
        """Bool [rows, columns]: which pairs are edges, the same in every tile; None: all."""
        if isinstance(self.structure, Complete | Blocks | GridBlocks):
            return None  # a tile never spans two blocks
        i = torch.arange(self.i, self.i + self.rows, device=device)
        j = torch.arange(self.j, self.j + self.columns, device=device)
        return self.structure.contains(i[:, None], j)

    def offsets(self, device: torch.device) -> Tensor:
        """Which row of a table of offsets every pair reads, [rows, columns]; any for no edge."""
        i = torch.arange(self.i, self.i + self.rows, device=device)
        j = torch.arange(self.j, self.j + self.columns, device=device)
        last = (self.structure.num_offsets or 1) - 1
        return self.structure.offset_index(i[:, None], j).clamp(0, last)

    @property
    def common_columns(self) -> tuple[int, int]:
        """The first of a run of columns that every row sees, and how many they are.

        Where a band's tiles are no longer than its window, all rows see from the last one's first
        source to the first one's last. Without self-loops none sees its own: the rows' own columns
        split that run, and the longer piece is taken.
        """
        if not isinstance(self.structure, Band):
            return 0, self.columns
        i, before, after = self.i - self.j, self.structure.before, self.structure.after
        first, end = max(0, i + self.rows - 1 - before), min(i + after + 1, self.columns)
        if not self.structure.self_loops:
            pieces = (first, min(end, i)), (max(first, i + self.rows), end)
            first, end = max(pieces, key=lambda piece: piece[1] - piece[0])
        return first, max(end - first, 0)

    @property
    def is_whole_causal(self) -> bool:
        """One complete causal sequence, which fused attention knows without a mask."""
        s = self.structure
        return (
            isinstance(s, Band)
            and s.after == 0
            and s.self_loops
            and self.rows == self.columns == s.num_tokens <= s.before + 1
        )

    def groups(self, most: int) -> Iterator[Tiles]:
        """The same tiles, at most `most` at a time."""
        most = max(most, 1)
        if self.count <= most:
            yield self
            return
        for first in range(0, self.count, most):
            starts = None if self.starts is None else self.starts[first : first + most]
            yield replace(
                self,
                target=self.target + first * self.step[0] * self.stride,
                source=self.source + first * self.step[1] * self.stride,
                count=min(most, self.count - first),
                starts=starts,
            )

    def moved(self, targets: int, sources: int) -> Tiles:
        """The same tiles so many tokens later."""
        starts = self.starts and tuple((t + targets, s + sources) for t, s in self.starts)
        return replace(
            self, target=self.target + targets, source=self.source + sources, starts=starts
        )

    def begins(self) -> list[tuple[int, int]]:
        """Where every tile begins, targets and sources."""
        if self.starts is not None:
            return list(self.starts)
        (t, s), k = self.step, self.stride
        return [(self.target + n * t * k, self.source + n * s * k) for n in range(self.count)]

    def pieces(self, rows: int) -> Iterator[Tiles]:
        """The same edges in single tiles of at most `rows` targets, with no source to spare."""
        for target, source in self.begins():
            tile = replace(self, target=target, source=source, count=1, starts=None)
            for first in range(0, tile.rows, rows):
                height = min(rows, tile.rows - first)
                i, skip, columns = tile.i + first, 0, tile.columns
                if isinstance(tile.structure, Band):
                    skip = max(0, i - tile.structure.before - tile.j)
                    columns = min(columns, i + height + tile.structure.after - tile.j) - skip
                yield replace(
                    tile,
                    target=tile.target + first * tile.stride,
                    source=tile.source + skip * tile.stride,
                    rows=height,
                    columns=max(columns, 0),
                    i=i,
                    j=tile.j + skip,
                )


@lru_cache(maxsize=64)
def tiles_of(
    structure: Structure, most_rows: int = 128, least_rows: int = 1
) -> tuple[Tiles, ...] | None:
    """Tiles that hold every target and every edge once; None where a graph has no tiles.

    A band's have at most `most_rows` targets, and no more than its window has sources, so that all
    of them have a source in common; unless `least_rows` says that more are better than that.
    """
    found = _tiles(structure, (least_rows, most_rows))
    return None if found is None else tuple(found)


def _tiles(structure: Structure, rows: tuple[int, int]) -> list[Tiles] | None:
    if isinstance(structure, Parts):
        found: list[Tiles] = []
        for part, t0, s0 in zip(
            structure.parts, structure.target_ptr, structure.source_ptr, strict=False
        ):
            tiles = _tiles(part, rows)
            if tiles is None:
                return None
            found += [tile.moved(t0, s0) for tile in tiles]
        return _gathered(found)
    everyone = 0, structure.num_targets
    match structure:
        case Complete():
            N, M = structure.num_targets, structure.num_sources
            return [Tiles(structure, 0, 0, N, M)] if N else []
        case Blocks():
            return _block_tiles(structure, everyone, everyone)
        case Band(dilation=1):
            return _band_tiles(structure, rows, everyone, everyone)
        case Band():
            return _gathered(_dilated_tiles(structure, rows, everyone, everyone))
        case Section():
            return _section_tiles(structure, rows)
    return None


def tiles_of_blocks(grid: GridBlocks, blocks: tuple[EqualBlocks, ...]) -> tuple[Tiles, ...]:
    """Blocks of a grid whose tokens stand in their order: a tile each, as a grid of its own."""
    found = []
    for equal in blocks:
        own, size = GridBlocks(equal.height, equal.width, grid.block), equal.height * equal.width
        tile = Tiles(own, equal.start, equal.start, size, size)
        several = equal.count > 1
        found.append(replace(tile, count=equal.count, step=(size, size)) if several else tile)
    return tuple(found)


def _section_tiles(section: Section, rows: tuple[int, int]) -> list[Tiles] | None:
    """The whole's tiles, cut where the section is: (i, j) stay those of the whole."""
    whole, targets = section.whole, (section.start, section.stop)
    sources = section.source_start, section.source_stop
    match whole:
        case Complete():
            n, m = section.num_targets, section.num_sources
            return [Tiles(whole, 0, 0, n, m, section.start, section.source_start)] if n else []
        case Blocks():
            return _block_tiles(whole, targets, sources)
        case Band(dilation=1):
            return _band_tiles(whole, rows, targets, sources)
        case Band():
            return _gathered(_dilated_tiles(whole, rows, targets, sources))
    return None


def _gathered(tiles: list[Tiles]) -> list[Tiles]:
    """Tiles of many sequences, those that are alike together, wherever they lie.

    Tiles of bands are alike where targets and sources lie alike, whatever their sequence's length.
    """
    alike: dict[Tiles, list[Tiles]] = {}
    for tile in tiles:
        own = tile.structure
        if isinstance(own, Band) and not tile.is_whole_causal:
            own = replace(own, num_tokens=sys.maxsize)
        kind = replace(
            tile, structure=own, target=0, source=0, i=tile.i - tile.j, j=0,
            count=1, step=(0, 0), starts=None,
        )  # fmt: skip
        alike.setdefault(kind, []).append(tile)
    found = []
    for kind, members in alike.items():
        starts = tuple(start for tile in members for start in tile.begins())
        if len(members) == 1:
            found += members
        elif kind.stride == 1 and (steps := _even_steps(starts, kind)):
            (target, source), count = starts[0], len(starts)
            found.append(replace(kind, target=target, source=source, count=count, step=steps))
        else:
            found.append(replace(kind, count=len(starts), starts=starts))
    return found


def _even_steps(starts: tuple[tuple[int, int], ...], kind: Tiles) -> tuple[int, int] | None:
    """The step of tiles that stand side by side: equal sequences."""
    step = kind.rows, kind.columns
    even = all((b[0] - a[0], b[1] - a[1]) == step for a, b in pairwise(starts))
    return step if even and 0 not in step else None


def _block_tiles(blocks: Blocks, targets: Run, sources: Run) -> list[Tiles]:
    found: list[Tiles] = []
    start, size = targets[0], blocks._size
    while start < targets[1]:
        border = start + ((blocks.shift - start) % size or size)
        height = min(border, targets[1]) - start
        low = min(max(border - size, sources[0]), sources[1])
        high = max(min(border, sources[1]), low)
        tile = Tiles(blocks, start - targets[0], low - sources[0], height, high - low, start, low)
        if height == size == high - low:
            full = (min(targets[1], sources[1]) - start) // size
            tile = replace(tile, count=full, step=(size, size) if full > 1 else (0, 0))
        found.append(tile)
        start += height * tile.count
    return found


def _band_tiles(band: Band, rows: tuple[int, int], targets: Run, sources: Run) -> list[Tiles]:
    """Border tiles one by one, with the sources that exist; those between, all alike, at once."""
    N, is_whole = band.num_tokens, targets == sources == (0, band.num_tokens)
    before, after = band._reach(band.before), band._reach(band.after)
    if is_whole and before + after >= N - 1 and band.after == 0 and band.self_loops:
        return [Tiles(band, 0, 0, N, N)] if N else []
    full = min(max(_rows(before + after + 1), rows[0]), rows[1])
    if not is_whole and full == 128 and band.after == 0 and before >= N - 1:
        full = 256  # rows of a causal graph, whose tiles are wide: measured, too
    found = []
    start = targets[0]
    while start < targets[1]:
        height = min(full, targets[1] - start)
        low = min(max(start - before, sources[0]), sources[1])
        high = max(min(start + height + after, sources[1]), low)
        tile = Tiles(band, start - targets[0], low - sources[0], height, high - low, start, low)
        if height == full and low == start - before and high == start + full + after:
            count = (min(targets[1], sources[1] - after) - start) // full
            tile = replace(tile, count=count, step=(full, full))
        found.append(tile)
        start += height * tile.count
    return found


def _dilated_tiles(band: Band, rows: tuple[int, int], targets: Run, sources: Run) -> list[Tiles]:
    """The tokens of every remainder modulo the dilation are a band of their own."""
    d, found = band.dilation, []
    for first in range(min(d, band.num_tokens)):
        own = replace(band, num_tokens=len(range(first, band.num_tokens, d)), dilation=1)
        # Of each side: the first token of this remainder, and which of its band those tokens are.
        (target, rows_here), (source, seen) = (
            _of_remainder(first, run, d) for run in (targets, sources)
        )
        for tile in _band_tiles(own, rows, rows_here, seen):
            place = tile.moved(tile.target * (d - 1) + target, tile.source * (d - 1) + source)
            found.append(replace(place, stride=d))
    return found


def _of_remainder(remainder: int, run: Run, d: int) -> tuple[int, Run]:
    """The first token of a run, counted from its start, with this remainder modulo d; which run of
    that remainder's tokens the run holds."""
    first = (remainder - run[0]) % d
    place = (run[0] + first) // d
    return first, (place, place + len(range(first, run[1] - run[0], d)))


def _rows(window: int) -> int:
    """Targets of a tile: more waste products, fewer copy sources more often. Measured on a CPU."""
    return min(window, 32) if window <= 64 else 64 if window <= 128 else 128

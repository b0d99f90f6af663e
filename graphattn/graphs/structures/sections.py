"""Sections: a run of targets and a run of sources of a structure, as a rectangular graph.

Examples are the queries of a prompt with the keys of a cache, a shard with its halo, and a chunk of
rows for checkpointing. A section of a graph in closed form is known in closed form as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphattn.graphs.structures.structure import (
    Band,
    Blocks,
    Complete,
    Cycle,
    Device,
    GlobalTokens,
    GraphStructure,
    Grid,
    OffsetTable,
    RowsOfCells,
    masked_rows,
    sort_edges,
)

AT_ONCE = 1 << 20  # edges of a piece


@dataclass(frozen=True)
class Section(GraphStructure):
    """Targets start .. stop - 1 and sources source_start .. source_stop - 1 of `whole`.

    Both are numbered from 0 again. Edges to other sources are left out.
    """

    whole: GraphStructure
    start: int
    stop: int
    source_start: int
    source_stop: int

    @property
    def num_targets(self) -> int:
        return self.stop - self.start

    @property
    def num_sources(self) -> int:
        return self.source_stop - self.source_start

    @property
    def place(self) -> tuple[int, int, int, int]:
        """The four fields that say where the section is in the whole."""
        return self.start, self.stop, self.source_start, self.source_stop

    @property
    def shift(self) -> int:
        """The number such that target i is the same token as source i + shift."""
        return self.start - self.source_start

    @property
    def is_causal(self) -> bool:
        """Whether the whole is causal; the numbers of tokens in the section do not matter."""
        return self.whole.is_causal

    @property
    def has_causal_part(self) -> bool:
        return self.whole.has_causal_part and max(self.num_targets, self.num_sources) > 1

    @property
    def offset_table(self) -> OffsetTable | None:
        return self.whole.offset_table

    def offset_index(self, target: Tensor, source: Tensor) -> Tensor:
        return self.whole.offset_index(target + self.start, source + self.source_start)

    def num_edges(self) -> int:
        match self.whole:
            case Complete():
                return self.num_targets * self.num_sources
            case Band(dilation=1) as band:
                return self._edges_of_band(band)
        return int(self.in_degree().sum())

    def _edges_of_band(self, band: Band) -> int:
        """Count the pairs between two diagonals of a rectangle, without missing self-loops."""
        n, m, shift = self.num_targets, self.num_sources, self.shift
        last, before_first = shift + band.after, shift - band.before - 1
        total = pairs_up_to(n, m, last) - pairs_up_to(n, m, before_first)
        if not band.self_loops:
            total -= max(0, min(self.stop, self.source_stop) - max(self.start, self.source_start))
        return total

    def in_degree(self, device: Device = None) -> Tensor:
        match self.whole:
            case Complete():
                return torch.full((self.num_targets,), self.num_sources, device=device)
            case Band() as band:
                return self._in_degree_of_band(band, device)
            case GlobalTokens(tokens=tokens):
                seen = [j for j in tokens if self.source_start <= j < self.source_stop]
                degree = torch.full((self.num_targets,), len(seen), device=device)
                own = [i - self.start for i in tokens if self.start <= i < self.stop]
                degree[torch.tensor(own, dtype=torch.int64, device=device)] = self.num_sources
                return degree
        return torch.bincount(self.edges(device)[1], minlength=self.num_targets)

    def _in_degree_of_band(self, band: Band, device: Device) -> Tensor:
        i = torch.arange(self.start, self.stop, device=device)
        step, before, after = band._stride, band._reach(band.before), band._reach(band.after)
        first = torch.div(self.source_start - i + step - 1, step, rounding_mode="floor")
        last = torch.div(self.source_stop - 1 - i, step, rounding_mode="floor")
        first, last = first.clamp(min=-before), last.clamp(max=after)
        degree = (last - first + 1).clamp(min=0)
        return degree if band.self_loops else degree - ((first <= 0) & (last >= 0)).long()

    def contains(self, target: Tensor, source: Tensor) -> Tensor:
        return self.whole.contains(target + self.start, source + self.source_start)

    def edges(self, device: Device = None) -> Tensor:
        if isinstance(self.whole, Complete):
            return Complete(self.num_targets, self.num_sources).edges(device)
        return self._inside(edges_of_rows(self.whole, self.start, self.stop, device))

    def pieces(self, device: Device = None) -> Iterator[Tensor]:
        match self.whole:
            case Complete():
                yield from Complete(self.num_targets, self.num_sources).pieces(device)
            case Band() as band:
                for hop in range(-band._reach(band.before), band._reach(band.after) + 1):
                    move = hop * band._stride
                    low = max(self.start, self.source_start - move)
                    high = min(self.stop, self.source_stop - move)
                    if low < high and (hop or band.self_loops):
                        target = torch.arange(low, high, device=device)
                        yield torch.stack(
                            [target + (move - self.source_start), target - self.start]
                        )
            case whole:
                rows = max(1, AT_ONCE * self.num_targets // max(whole.num_edges(), 1))
                for start in range(self.start, self.stop, rows):
                    stop = min(start + rows, self.stop)
                    yield self._inside(edges_of_rows(whole, start, stop, device))

    def _inside(self, edge_index: Tensor) -> Tensor:
        """Select the edges of the whole that are in the section, and renumber them."""
        source, target = edge_index
        inside = (target >= self.start) & (target < self.stop)
        inside &= (source >= self.source_start) & (source < self.source_stop)
        if not inside.all():
            source, target = source[inside], target[inside]
        return torch.stack([source - self.source_start, target - self.start])

    def transpose(self) -> Section | None:
        flipped = self.whole.transpose()
        if flipped is None:
            return None
        return Section(flipped, self.source_start, self.source_stop, self.start, self.stop)


def section_of_band(section: Any) -> Band | None:
    """Return the band of which this is a section; None if it is not a section of a band."""
    return (
        section.whole if isinstance(section, Section) and isinstance(section.whole, Band) else None
    )


def edges_of_rows(whole: GraphStructure, start: int, stop: int, device: Device = None) -> Tensor:
    """List the edges of targets start .. stop - 1, with the numbers and in the order of the whole.

    Other edges are not listed, if the class of the structure can list single rows.
    """
    i = torch.arange(start, stop, device=device)
    match whole:
        case Band():
            step = whole._stride
            before = min(whole._reach(whole.before), max(stop - 1, 0) // step)
            after = min(whole._reach(whole.after), max(whole.num_tokens - 1 - start, 0) // step)
            offsets = torch.arange(-before, after + 1, device=device) * step
            offsets = offsets if whole.self_loops else offsets[offsets != 0]
            return whole._border_edges(start, stop, offsets)
        case Blocks():
            first, last = whole._bounds(i)
            size = min(whole._size, whole.num_tokens)
            source = first[:, None] + torch.arange(size, device=device)
            return masked_rows(source, i, source < last[:, None])
        case Cycle(N, w):
            hops = torch.arange(1, w + 1, device=device)
            source = ((i[:, None] + torch.cat([-hops, hops])) % N).sort(dim=1).values
            return torch.stack([source.flatten(), i.repeat_interleave(2 * w)])
        case Complete(_, sources):
            source = torch.arange(sources, device=device).repeat(len(i))
            return torch.stack([source, i.repeat_interleave(sources)])
        case GlobalTokens(N):
            tokens = whole._tokens(device)
            is_global = torch.isin(i, tokens)
            lists = [
                torch.stack([seen.repeat(len(own)), own.repeat_interleave(len(seen))])
                for seen, own in (
                    (tokens, i[~is_global]),
                    (torch.arange(N, device=device), i[is_global]),
                )
            ]
            return sort_edges(torch.cat(lists, dim=1), N) if is_global.any() else lists[0]
        case Grid():
            return _edges_of_cells(whole, start, stop, device)
    if isinstance(whole, RowsOfCells):
        return whole.edges_of_rows(start, stop, device)
    source, target = whole.edges(device)
    inside = (target >= start) & (target < stop)
    return torch.stack([source[inside], target[inside]])


def _edges_of_cells(grid: Grid, start: int, stop: int, device: Device) -> Tensor:
    lead = int(grid.class_token)
    first = max(start - lead, 0)
    cell = torch.arange(first, max(stop - lead, first), device=device)
    dy, dx = torch.tensor(grid._moves(), dtype=torch.int64, device=device).view(-1, 2).T
    y, x = cell[:, None] // grid.width + dy, cell[:, None] % grid.width + dx
    inside = (y >= 0) & (y < grid.height) & (x >= 0) & (x < grid.width)
    source = y * grid.width + x + lead
    if lead:  # Token 0 is first in every row,
        source = torch.cat([torch.zeros_like(source[:, :1]), source], dim=1)
        inside = torch.cat([torch.ones_like(inside[:, :1]), inside], dim=1)
    found = masked_rows(source, cell + lead, inside)
    if start < lead and start < stop:  # and its own row has all tokens.
        everyone = torch.arange(grid.num_targets, device=device)
        found = torch.cat([torch.stack([everyone, torch.zeros_like(everyone)]), found], dim=1)
    return found


def pairs_up_to(n: int, m: int, k: int) -> int:
    """Count the pairs (i, j) with i < n, j < m and j - i <= k."""

    def summed(v: int) -> int:  # the sum of min(max(w, 0), m) over all integers w <= v
        inside = min(max(v, 0), m)
        return inside * (inside + 1) // 2 + m * max(v - m, 0)

    return summed(k + n) - summed(k)

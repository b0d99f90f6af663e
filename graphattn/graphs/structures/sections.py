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
    AT_ONCE,
    Band,
    Complete,
    Device,
    GlobalTokens,
    GraphStructure,
    OffsetTable,
    pieces_of_rows,
)


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
                rows = [i - self.start for i in tokens if self.start <= i < self.stop]
                degree[torch.tensor(rows, dtype=torch.int64, device=device)] = self.num_sources
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

    @property
    def lists_rows(self) -> bool:
        return self.whole.lists_rows

    def edges(self, device: Device = None) -> Tensor:
        return self.edges_of_rows(0, self.num_targets, device)

    def edges_of_rows(self, start: int, stop: int, device: Device = None) -> Tensor:
        if isinstance(self.whole, Complete):
            everything = Complete(self.num_targets, self.num_sources)
            return everything.edges_of_rows(start, stop, device)
        rows = self.whole.edges_of_rows(self.start + start, self.start + stop, device)
        source, target = rows - rows.new_tensor([[self.source_start], [self.start]])
        inside = (source >= 0) & (source < self.num_sources)
        if not inside.all():
            source, target = source[inside], target[inside]
        return torch.stack([source, target])

    def pieces(self, device: Device = None) -> Iterator[Tensor]:
        # Counting the edges of the whole is cheap; those of a section may have to be listed.
        yield from pieces_of_rows(self, self.whole.num_edges(), AT_ONCE, device)

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


def pairs_up_to(n: int, m: int, k: int) -> int:
    """Count the pairs (i, j) with i < n, j < m and j - i <= k."""

    def summed(v: int) -> int:  # the sum of min(max(w, 0), m) over all integers w <= v
        inside = min(max(v, 0), m)
        return inside * (inside + 1) // 2 + m * max(v - m, 0)

    return summed(k + n) - summed(k)

"""Intervals: graphs in which every target sees a run of neighbouring sources.

Target i of an interval sees the sources from i + first to i + last. Complete, causal and window
graphs are one interval, or two if a token does not see itself. Blocks and batches are several, side
by side. Linear attention needs no list of their edges.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from graphattn.graphs.structures.composites import Parts, Section, pairs_up_to
from graphattn.graphs.structures.structure import Band, Blocks, Complete, GraphStructure


class Interval(NamedTuple):
    """Target i of `targets` sees the sources i + first .. i + last, if they exist."""

    targets: int
    sources: int
    first: int
    last: int

    @property
    def is_linear(self) -> bool:
        """Whether one running sum is enough: targets see all sources before or after a point."""
        return self.first + self.targets <= 1 or self.last >= self.sources - 1

    def num_edges(self) -> int:
        if self.last < self.first:
            return 0
        up_to_last = pairs_up_to(self.targets, self.sources, self.last)
        return up_to_last - pairs_up_to(self.targets, self.sources, self.first - 1)

    def transpose(self) -> Interval:
        return Interval(self.sources, self.targets, -self.last, -self.first)


class IntervalRun(NamedTuple):
    """`times` equal parts of a graph, one after another; the intervals of a part share no edge."""

    times: int
    intervals: tuple[Interval, ...]

    def transpose(self) -> IntervalRun:
        return IntervalRun(self.times, tuple(interval.transpose() for interval in self.intervals))


def runs_of(structure: GraphStructure | None) -> tuple[IntervalRun, ...] | None:
    """The runs of which a graph consists, in order; None if it does not consist of intervals."""
    parts: list[tuple[Interval, ...]] = []
    for part in _parts(structure):
        intervals = _intervals(part)
        if intervals is None:
            return None
        parts.append(intervals)
    return tuple(IntervalRun(len([*same]), intervals) for intervals, same in groupby(parts))


def _parts(structure: GraphStructure | None) -> Iterator[GraphStructure | None]:
    match structure:
        case Parts(parts):
            for part in parts:
                yield from _parts(part)
        case Blocks(num_tokens, block_size, shift):
            start, stop = 0, min(shift or block_size, num_tokens)
            while start < num_tokens:
                yield Complete(stop - start, stop - start)
                start, stop = stop, min(stop + block_size, num_tokens)
        case _:
            yield structure


def _intervals(part: GraphStructure | None) -> tuple[Interval, ...] | None:
    match part:
        case Complete(targets, sources):
            return (Interval(targets, sources, -targets, sources),)
        case Band(dilation=1) as band:
            return _of_band(band, band.num_tokens, band.num_tokens, 0)
        case Section(whole=Complete()):
            targets, sources = part.num_targets, part.num_sources
            return (Interval(targets, sources, -targets, sources),)
        case Section(whole=Band(dilation=1) as band):
            return _of_band(band, part.num_targets, part.num_sources, part.shift)
    return None


def _of_band(band: Band, targets: int, sources: int, shift: int) -> tuple[Interval, ...]:
    """The intervals of a band in which target i has the position of source i + shift."""
    first, last = shift - band.before, shift + band.after
    # Beyond the ends there are no sources: cut, so that equal intervals have equal numbers.
    first, last = max(first, -targets), min(last, sources)
    if band.self_loops:
        return (Interval(targets, sources, first, last),)
    sides = (first, shift - 1), (shift + 1, last)
    return tuple(Interval(targets, sources, low, high) for low, high in sides)

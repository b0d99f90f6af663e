"""Structures made of other structures: random sources, unions, packed sequences, and sections."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from graphattn.graphs.edges.index_width import are_narrow
from graphattn.graphs.structures.structure import (
    AT_ONCE,
    Band,
    Complete,
    Device,
    GlobalTokens,
    GraphStructure,
    OffsetTable,
    is_padding,
    masked_rows,
    pieces_of_rows,
    sort_edges,
)
from graphattn.kernels.cpu.edge_order import Wrong, has_edge_order, sorted_edges


@dataclass(frozen=True)
class RandomSources(GraphStructure):
    """`num_random` random sources per target, drawn without replacement outside `base` (BigBird).

    They depend only on the fields, and are the same on every device. A target with fewer sources
    left sees all of them.
    """

    base: GraphStructure
    num_random: int
    seed: int

    @property
    def num_targets(self) -> int:
        return self.base.num_targets

    def in_degree(self, device: Device = None) -> Tensor:
        left = self.num_sources - self.base.in_degree(device)
        return left.clamp(max=self.num_random)

    def contains(self, target: Tensor, source: Tensor) -> Tensor:
        keys = self._keys.to(target.device)
        return torch.isin(target * self.num_sources + source, keys)

    @cached_property
    def _keys(self) -> Tensor:
        source, target = self.edges()
        return target * self.num_sources + source

    def edges(self, device: Device = None) -> Tensor:
        base_source, base_target = self.base.edges()
        degree = self.base.in_degree()
        rowptr = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
        left = self.num_sources - degree
        # Floyd's algorithm for all targets at once: `num_random` distinct ranks among the sources
        # that are left.
        generator = torch.Generator().manual_seed(self.seed)
        uniform = torch.rand(
            (self.num_random, self.num_targets), generator=generator, dtype=torch.float64
        )
        ranks = torch.full((self.num_targets, self.num_random), -1, dtype=torch.int64)
        count = left.clamp(max=self.num_random)
        for draw in range(self.num_random):
            bound = left - count + draw  # candidates 0 .. bound, inclusive
            rank = (uniform[draw] * (bound + 1)).long().clamp(max=bound.clamp(min=0))
            taken = (ranks == rank[:, None]).any(dim=1)
            rank = torch.where(taken, bound, rank)
            ranks[:, draw] = torch.where(draw < count, rank, -1)
        ranks = ranks.sort(dim=1).values
        # The r-th source outside `base` is r plus the number of base sources before it.
        position = torch.arange(len(base_source)) - rowptr[base_target]
        stride = self.num_sources + 1
        keys = base_target * stride + base_source - position
        i = torch.arange(self.num_targets)[:, None]
        before = torch.searchsorted(keys, i * stride + ranks, right=True) - rowptr[i]
        return masked_rows(ranks + before, i[:, 0], ranks >= 0).to(device)

    def transpose(self) -> None:
        return None


@dataclass(frozen=True)
class Composite(GraphStructure):
    """Base class of structures that are made of parts."""

    parts: tuple[GraphStructure, ...]

    @property
    def lists_rows(self) -> bool:
        return all(part.lists_rows for part in self.parts)

    def transpose(self) -> GraphStructure | None:
        parts = [flipped for part in self.parts if (flipped := part.transpose()) is not None]
        return type(self)(tuple(parts)) if len(parts) == len(self.parts) else None


@dataclass(frozen=True)
class Union(Composite):
    """The union of structures of one size; an edge of several counts for the first of them."""

    @property
    def num_targets(self) -> int:
        return self.parts[0].num_targets

    @property
    def num_sources(self) -> int:
        return self.parts[0].num_sources

    @property
    def is_causal(self) -> bool:
        return all(part.is_causal for part in self.parts)

    @property
    def has_causal_part(self) -> bool:
        return all(part.has_causal_part for part in self.parts)

    @cached_property
    def _counted_edges(self) -> int:
        return int(self.in_degree().sum())

    def num_edges(self) -> int:
        return self._counted_edges

    def in_degree(self, device: Device = None) -> Tensor:
        degree = self.parts[0].in_degree(device)
        for k in range(1, len(self.parts)):
            part, earlier = self.parts[k], union_of(self.parts[:k])
            degree = degree + part.in_degree(device)
            if not (isinstance(part, RandomSources) and part.base == earlier):
                degree -= _shared_in_degree(part, earlier, device)
        return degree

    def contains(self, target: Tensor, source: Tensor) -> Tensor:
        inside = self.parts[0].contains(target, source)
        for part in self.parts[1:]:
            inside = inside | part.contains(target, source)
        return inside

    def edges_of_rows(self, start: int, stop: int, device: Device = None) -> Tensor:
        lists = [
            self._not_earlier(k, part.edges_of_rows(start, stop, device))
            for k, part in enumerate(self.parts)
        ]
        edges = torch.cat(lists, dim=1)
        if not has_edge_order(edges) or not are_narrow(edges.device, stop, self.num_sources):
            return sort_edges(edges, self.num_sources)
        edges[1] -= start
        in_order = sorted_edges(edges, stop - start, self.num_sources, permutation=False)
        assert not isinstance(in_order, Wrong), in_order
        edges = in_order[0].long()
        edges[1] += start
        return edges

    def pieces(self, device: Device = None) -> Iterator[Tensor]:
        for k, part in enumerate(self.parts):
            for piece in part.pieces(device):
                yield self._not_earlier(k, piece)

    def _not_earlier(self, k: int, edge_index: Tensor) -> Tensor:
        """Select the edges of part k that no earlier part has."""
        source, target = edge_index
        new = torch.ones_like(source, dtype=torch.bool)
        for earlier in self.parts[:k]:
            new &= ~earlier.contains(target, source)
        return edge_index[:, new]


def union_of(parts: list[GraphStructure] | tuple[GraphStructure, ...]) -> GraphStructure:
    """Return the union of parts, or the part itself if there is only one."""
    return parts[0] if len(parts) == 1 else Union(tuple(parts))


def intersection_of(a: GraphStructure, b: GraphStructure) -> GraphStructure | None:
    """Return the structure of the edges that both have; None if it is not known."""
    match a, b:
        case (Complete(), _):
            return b
        case (_, Complete()):
            return a
        case (Band(), Band()):
            step = math.lcm(a.dilation, b.dilation)
            before = min(a.before * a.dilation, b.before * b.dilation) // step
            after = min(a.after * a.dilation, b.after * b.dilation) // step
            return Band(a.num_tokens, before, after, step, a.self_loops and b.self_loops)
        case (Section(), Section()) if a.place == b.place:
            both = intersection_of(a.whole, b.whole)
            return None if both is None else Section(both, *a.place)
    return None


def _shared_in_degree(a: GraphStructure, b: GraphStructure, device: Device) -> Tensor:
    """Count the edges per target that both have, [N], in closed form or piece by piece."""
    both = intersection_of(a, b)
    if both is not None:
        return both.in_degree(device)
    few, many = (a, b) if a.num_edges() <= b.num_edges() else (b, a)
    shared = torch.zeros(a.num_targets, dtype=torch.int64, device=device)
    for source, target in few.pieces(device):
        shared.index_add_(0, target, many.contains(target, source).long())
    return shared


@dataclass(frozen=True)
class Parts(Composite):
    """A batch of packed sequences: structures without edges between them."""

    @cached_property
    def target_ptr(self) -> list[int]:
        return list(accumulate((part.num_targets for part in self.parts), initial=0))

    @cached_property
    def source_ptr(self) -> list[int]:
        return list(accumulate((part.num_sources for part in self.parts), initial=0))

    def placed(self) -> Iterator[tuple[GraphStructure, int, int]]:
        """Yield every part with the numbers of its first target and its first source."""
        return zip(self.parts, self.target_ptr, self.source_ptr, strict=False)

    # These two add up sizes instead of reading the cached lists above, because torch.compile does
    # not support cached_property.

    @property
    def num_targets(self) -> int:
        return sum(part.num_targets for part in self.parts)

    @property
    def num_sources(self) -> int:
        return sum(part.num_sources for part in self.parts)

    @property
    def is_causal(self) -> bool:
        return all(part.is_causal for part in self._without_padding())

    @property
    def has_causal_part(self) -> bool:
        return any(part.has_causal_part for part in self._without_padding())

    def _without_padding(self) -> list[GraphStructure]:
        """Leave out padding, which has no order and reads no row of a table of offsets."""
        return [part for part in self.parts if not is_padding(part)]

    @property
    def offset_table(self) -> OffsetTable | None:
        shared = {part.offset_table for part in self._without_padding() or self.parts}
        return shared.pop() if len(shared) == 1 else None

    def offset_index(self, target: Tensor, source: Tensor) -> Tensor:
        index = torch.empty_like(target)
        for part, t0, s0 in self.placed():
            in_part = (target >= t0) & (target < t0 + part.num_targets)
            index[in_part] = part.offset_index(target[in_part] - t0, source[in_part] - s0)
        return index

    def num_edges(self) -> int:
        return sum(part.num_edges() for part in self.parts)

    def in_degree(self, device: Device = None) -> Tensor:
        return torch.cat([part.in_degree(device) for part in self.parts])

    def contains(self, target: Tensor, source: Tensor) -> Tensor:
        target, source = torch.broadcast_tensors(target, source)
        inside = torch.zeros_like(target, dtype=torch.bool)
        for part, t0, s0 in self.placed():
            in_part = (target >= t0) & (target < t0 + part.num_targets)
            in_part &= (source >= s0) & (source < s0 + part.num_sources)
            inside[in_part] = part.contains(target[in_part] - t0, source[in_part] - s0)
        return inside

    def edges(self, device: Device = None) -> Tensor:
        return torch.cat([part.edges(device) + o for part, o in self._shifted(device)], dim=1)

    def pieces(self, device: Device = None) -> Iterator[Tensor]:
        for part, offset in self._shifted(device):
            for piece in part.pieces(device):
                yield piece + offset

    def _shifted(self, device: Device) -> Iterator[tuple[GraphStructure, Tensor]]:
        """Yield every part with the first source and target, to be added to its edges [2, E]."""
        for part, t0, s0 in self.placed():
            yield part, torch.tensor([[s0], [t0]], device=device)


@dataclass(frozen=True)
class Section(GraphStructure):
    """Targets start .. stop - 1 and sources source_start .. source_stop - 1 of `whole`.

    Both are numbered from 0 again. Edges to other sources are left out. Examples are the queries of
    a prompt with the keys of a cache, and a shard with its halo.
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

"""Structures: graphs that are known in closed form.

A structure says which edges a graph has without listing them. Building one costs O(1), and fast
implementations read it instead of the edges. Every class has methods for the number of edges, the
number of sources per target, whether a pair is an edge, and the sorted list of edges.

An edge (source j, target i) means that target i sees source j. Papers write this pair as (i, j).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

Device = torch.device | str | None
AT_ONCE = 1 << 20  # edges of a piece


class GridOffsets(NamedTuple):
    """A relative-position table of a grid, with a row for every combination of hops, row-major.

    Along axis a, hops go from ``first[a]`` to ``last[a]``, and a hop is ``step[a]`` tokens.
    """

    first: tuple[int, ...]
    last: tuple[int, ...]
    step: tuple[int, ...]


# ("sequence", first, last, step): one row per displacement, (source - target) / step.
# ("image", -radius, radius, 1): one row per displacement (down, right), row-major.
OffsetTable = tuple[str, int, int, int] | GridOffsets


class GraphStructure:
    """Base class of structures: edges between `num_sources` sources and `num_targets` targets."""

    def __getstate__(self) -> dict[str, Any]:
        """Return only the fields, because cached values can be computed again."""
        return {field.name: getattr(self, field.name) for field in fields(cast(Any, self))}

    @property
    def num_targets(self) -> int:
        raise NotImplementedError

    @property
    def num_sources(self) -> int:
        return self.num_targets

    @property
    def is_causal(self) -> bool:
        """Whether no target sees a source after it."""
        return False

    @property
    def has_causal_part(self) -> bool:
        """Whether at least one sequence with two tokens or more is causal."""
        return self.is_causal and self.num_targets > 1

    @property
    def offset_table(self) -> OffsetTable | None:
        """The kind of relative-position table of this structure; None if it has none."""
        return None

    @property
    def num_offsets(self) -> int | None:
        """The number of rows of the relative-position table; None if there is none."""
        match self.offset_table:
            case ("sequence", first, last, _):
                return last - first + 1
            case ("image", first, last, _):
                return (last - first + 1) ** 2
            case GridOffsets(firsts, lasts):
                return math.prod([b - a + 1 for a, b in zip(firsts, lasts, strict=True)])
        return None

    def offset_index(self, target: Tensor, source: Tensor) -> Tensor:
        """Return the row of the relative-position table for every edge."""
        match self.offset_table:
            case ("sequence", first, _, step):
                return torch.div(source - target, step, rounding_mode="floor") - first
        raise NotImplementedError(
            f"offset_index() is not defined for {type(self).__name__}: it has no table of offsets"
        )

    def num_edges(self) -> int:
        return int(self.in_degree().sum())

    def in_degree(self, device: Device = None) -> Tensor:
        """Count the sources of every target, [N]."""
        raise NotImplementedError

    def contains(self, target: Tensor, source: Tensor) -> Tensor:
        """Say elementwise whether a pair is an edge (bool)."""
        raise NotImplementedError

    @property
    def lists_rows(self) -> bool:
        """Whether :meth:`edges_of_rows` lists no other edges on the way."""
        return False

    # Each of the next two methods calls the other one, so every class defines one of them.

    def edges(self, device: Device = None) -> Tensor:
        """List all edges [2, E]; row 0 = source, row 1 = target, sorted by target, then source."""
        return self.edges_of_rows(0, self.num_targets, device)

    def edges_of_rows(self, start: int, stop: int, device: Device = None) -> Tensor:
        """List the edges of targets start .. stop - 1, in the order of :meth:`edges`."""
        source, target = self.edges(device)
        inside = (target >= start) & (target < stop)
        return torch.stack([source[inside], target[inside]])

    def pieces(self, device: Device = None) -> Iterator[Tensor]:
        """Yield all edges in any order, in pieces [2, n] of bounded size, for counting."""
        yield self.edges(device)

    def transpose(self) -> GraphStructure | None:
        """Return the structure with sources and targets exchanged; None if there is none."""
        raise NotImplementedError


def pieces_of_rows(
    structure: GraphStructure, num_edges: int, at_once: int, device: Device = None
) -> Iterator[Tensor]:
    """Yield all edges in order, in pieces of whole rows with about `at_once` edges each."""
    N = structure.num_targets
    rows = max(at_once * N // max(num_edges, 1), 1)
    for start in range(0, N, rows):
        yield structure.edges_of_rows(start, min(start + rows, N), device)


class StructureByRows(GraphStructure):
    """Base class of structures that can list the edges of a few targets alone."""

    @property
    def lists_rows(self) -> bool:
        return True

    def pieces(self, device: Device = None) -> Iterator[Tensor]:
        yield from pieces_of_rows(self, self.num_edges(), AT_ONCE, device)


@dataclass(frozen=True)
class SequenceStructure(StructureByRows):
    """Base class of structures of one sequence, whose tokens are targets and sources."""

    num_tokens: int

    @property
    def num_targets(self) -> int:
        return self.num_tokens


def masked_rows(source: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """Make the edge list of targets [n] with ascending candidate sources [n, k] and a mask."""
    selected = source.masked_select(mask)  # takes half the time of source[mask]
    degree = mask.sum(1)
    return torch.stack([selected, target.repeat_interleave(degree, output_size=len(selected))])


@dataclass(frozen=True)
class Band(SequenceStructure):
    """A band: target i sees sources i + dilation * o for all offsets o in [-before, after].

    A causal graph has after = 0. Without `self_loops`, the offset 0 is left out.
    """

    before: int
    after: int
    dilation: int = 1
    self_loops: bool = True

    @property
    def is_causal(self) -> bool:
        return self.after == 0

    @property
    def offset_table(self) -> OffsetTable:
        return ("sequence", -self.before, self.after, self.dilation)

    @property
    def _stride(self) -> int:
        """The dilation, or the length of the sequence if that is smaller."""
        return min(self.dilation, max(self.num_tokens, 1))

    def _reach(self, hops: int) -> int:
        """Limit a number of hops to the largest number inside the sequence."""
        return min(hops, max(self.num_tokens - 1, 0) // self.dilation)

    def num_edges(self) -> int:
        total = self.num_tokens if self.self_loops else 0
        for hops in (self._reach(self.before), self._reach(self.after)):
            total += hops * self.num_tokens - self.dilation * hops * (hops + 1) // 2
        return total

    def in_degree(self, device: Device = None) -> Tensor:
        i = torch.arange(self.num_tokens, device=device)
        before = (i // self._stride).clamp(max=self.before)
        after = ((self.num_tokens - 1 - i) // self._stride).clamp(max=self.after)
        return before + after + int(self.self_loops)

    def contains(self, target: Tensor, source: Tensor) -> Tensor:
        distance = source - target
        before, after = self._reach(self.before), self._reach(self.after)
        inside = (distance >= -before * self.dilation) & (distance <= after * self.dilation)
        if self.dilation > 1:
            inside &= distance % self._stride == 0
        return inside if self.self_loops else inside & (distance != 0)

    def edges(self, device: Device = None) -> Tensor:
        edges = torch.empty((2, self.num_edges()), dtype=torch.int64, device=device)
        self.write_edges(edges)
        return edges

    def write_edges(self, edges: Tensor) -> None:
        """Write all edges into a tensor [2, E] of any integer dtype.

        Targets in the interior have all neighbours, so their edges are one broadcast sum. Only
        targets near the two ends need a mask. 16 million edges take a fraction of a second.
        """
        before, after = self._reach(self.before), self._reach(self.after)
        offsets = torch.arange(-before, after + 1, dtype=edges.dtype, device=edges.device)
        offsets = self._stride * (offsets if self.self_loops else offsets[offsets != 0])
        N = self.num_tokens
        first, last = before * self._stride, N - after * self._stride
        if first >= last:  # every target is near an end
            first = last = N
        head = self.edges_of_rows(0, first, edges.device)
        tail = self.edges_of_rows(last, N, edges.device)
        a, b = head.shape[1], edges.shape[1] - tail.shape[1]
        edges[:, :a], edges[:, b:] = head, tail
        i = torch.arange(first, last, dtype=edges.dtype, device=edges.device)[:, None]
        source, target = (row.view(last - first, len(offsets)) for row in edges[:, a:b])
        torch.add(i, offsets, out=source)
        target.copy_(i.expand_as(target))

    def edges_of_rows(self, start: int, stop: int, device: Device = None) -> Tensor:
        N, step = self.num_tokens, self._stride
        before = min(self._reach(self.before), max(stop - 1, 0) // step)
        after = min(self._reach(self.after), max(N - 1 - start, 0) // step)
        offsets = torch.arange(-before, after + 1, device=device) * step
        if not self.self_loops:
            offsets = offsets[offsets != 0]
        i = torch.arange(start, stop, device=device)
        source = i[:, None] + offsets
        return masked_rows(source, i, (source >= 0) & (source < N))

    def transpose(self) -> Band:
        return Band(self.num_tokens, self.after, self.before, self.dilation, self.self_loops)


def no_edges(num_tokens: int) -> Band:
    """Return a structure without edges, which represents padding."""
    return Band(num_tokens, 0, 0, 1, self_loops=False)


def is_padding(structure: GraphStructure) -> bool:
    """Whether a structure is from :func:`no_edges`, or has only targets or only sources."""
    if isinstance(structure, Complete):
        return (structure.targets == 0) != (structure.sources == 0)
    return (
        isinstance(structure, Band)
        and not structure.self_loops
        and structure.before == structure.after == 0
    )


@dataclass(frozen=True)
class Cycle(SequenceStructure):
    """A ring: target i sees i +- 1, ..., i +- window modulo num_tokens (Remark 4.1).

    It requires 2 * window < num_tokens.
    """

    window: int

    def in_degree(self, device: Device = None) -> Tensor:
        return torch.full((self.num_tokens,), 2 * self.window, device=device)

    def num_edges(self) -> int:
        return 2 * self.window * self.num_tokens

    def contains(self, target: Tensor, source: Tensor) -> Tensor:
        hops = (source - target) % self.num_tokens
        hops = torch.minimum(hops, self.num_tokens - hops)
        return (hops >= 1) & (hops <= self.window)

    def edges_of_rows(self, start: int, stop: int, device: Device = None) -> Tensor:
        hops = torch.arange(1, self.window + 1, device=device)
        i = torch.arange(start, stop, device=device)
        source = (i[:, None] + torch.cat([-hops, hops])) % self.num_tokens
        source = source.sort(dim=1).values
        return torch.stack([source.flatten(), i.repeat_interleave(2 * self.window)])

    def transpose(self) -> Cycle:
        return self


@dataclass(frozen=True)
class Complete(StructureByRows):
    """A complete graph: every target sees every source."""

    targets: int
    sources: int

    @property
    def num_targets(self) -> int:
        return self.targets

    @property
    def num_sources(self) -> int:
        return self.sources

    @property
    def offset_table(self) -> OffsetTable | None:
        last = max(self.targets - 1, 0)
        return ("sequence", -last, last, 1) if self.targets == self.sources else None

    def num_edges(self) -> int:
        return self.targets * self.sources

    def in_degree(self, device: Device = None) -> Tensor:
        return torch.full((self.targets,), self.sources, device=device)

    def contains(self, target: Tensor, source: Tensor) -> Tensor:
        return torch.ones_like(target - source, dtype=torch.bool)

    def edges_of_rows(self, start: int, stop: int, device: Device = None) -> Tensor:
        source = torch.arange(self.sources, device=device).repeat(stop - start)
        target = torch.arange(start, stop, device=device).repeat_interleave(self.sources)
        return torch.stack([source, target])

    def transpose(self) -> Complete:
        return Complete(self.sources, self.targets)


@dataclass(frozen=True)
class Blocks(SequenceStructure):
    """Complete blocks of consecutive tokens; if `shift` is not 0, the first block ends there."""

    block_size: int
    shift: int = 0

    @property
    def is_causal(self) -> bool:
        return self.block_size == 1

    @property
    def offset_table(self) -> OffsetTable:
        return ("sequence", 1 - self.block_size, self.block_size - 1, 1)

    @property
    def _size(self) -> int:
        """The block size, or a smaller number if the sequence is shorter than that."""
        return min(self.block_size, max(self.num_tokens, self.shift + 1))

    def block_of(self, token: Tensor) -> Tensor:
        """Return the block of every token; with `shift`, the first block has the number -1."""
        return torch.div(token - self.shift, self._size, rounding_mode="floor")

    def _bounds(self, i: Tensor) -> tuple[Tensor, Tensor]:
        start = self.block_of(i) * self._size + self.shift
        return start.clamp(min=0), (start + self._size).clamp(max=self.num_tokens)

    def in_degree(self, device: Device = None) -> Tensor:
        start, stop = self._bounds(torch.arange(self.num_tokens, device=device))
        return stop - start

    def contains(self, target: Tensor, source: Tensor) -> Tensor:
        return self.block_of(target) == self.block_of(source)

    def edges_of_rows(self, start: int, stop: int, device: Device = None) -> Tensor:
        i = torch.arange(start, stop, device=device)
        first, last = self._bounds(i)
        size = min(self._size, self.num_tokens)
        source = first[:, None] + torch.arange(size, device=device)
        return masked_rows(source, i, source < last[:, None])

    def transpose(self) -> Blocks:
        return self


@dataclass(frozen=True)
class GlobalTokens(SequenceStructure):
    """Global tokens: they see all tokens and are seen by all tokens, including themselves."""

    tokens: tuple[int, ...]

    def _tokens(self, device: Device) -> Tensor:
        return torch.tensor(self.tokens, dtype=torch.int64, device=device)

    def in_degree(self, device: Device = None) -> Tensor:
        degree = torch.full((self.num_tokens,), len(self.tokens), device=device)
        degree[self._tokens(device)] = self.num_tokens
        return degree

    def num_edges(self) -> int:
        return len(self.tokens) * (2 * self.num_tokens - len(self.tokens))

    def contains(self, target: Tensor, source: Tensor) -> Tensor:
        tokens = self._tokens(target.device)
        return torch.isin(target, tokens) | torch.isin(source, tokens)

    def edges_of_rows(self, start: int, stop: int, device: Device = None) -> Tensor:
        tokens, i = self._tokens(device), torch.arange(start, stop, device=device)
        is_global = torch.isin(i, tokens)
        everyone = torch.arange(self.num_tokens, device=device)
        edges = _all_pairs(tokens, i[~is_global]), _all_pairs(everyone, i[is_global])
        return sort_edges(torch.cat(edges, dim=1), self.num_tokens)

    def pieces(self, device: Device = None) -> Iterator[Tensor]:
        everyone = torch.arange(self.num_tokens, device=device)
        others = everyone[~torch.isin(everyone, self._tokens(device))]
        for token in self.tokens:
            yield torch.stack([everyone, torch.full_like(everyone, token)])
            yield torch.stack([torch.full_like(others, token), others])

    def transpose(self) -> GlobalTokens:
        return self


def _all_pairs(sources: Tensor, targets: Tensor) -> Tensor:
    """List the edges from all of some sources to all of some targets, by target."""
    return torch.stack([sources.repeat(len(targets)), targets.repeat_interleave(len(sources))])


def sort_edges(edge_index: Tensor, num_sources: int) -> Tensor:
    """Sort edges by target, then source."""
    return edge_index[:, (edge_index[1] * num_sources + edge_index[0]).argsort()]

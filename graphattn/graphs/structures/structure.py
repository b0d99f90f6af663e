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
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

Device = torch.device | str | None


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

    def edges(self, device: Device = None) -> Tensor:
        """List all edges [2, E]; row 0 = source, row 1 = target, sorted by target, then source."""
        raise NotImplementedError

    def pieces(self, device: Device = None) -> Iterator[Tensor]:
        """Yield all edges in any order, in pieces [2, n] of bounded size, for counting."""
        yield self.edges(device)

    def transpose(self) -> GraphStructure | None:
        """Return the structure with sources and targets exchanged; None if there is none."""
        raise NotImplementedError


class RowsOfCells(GraphStructure):
    """Base class of structures of a grid that can list single rows."""

    def edges(self, device: Device = None) -> Tensor:
        return self.edges_of_rows(0, self.num_targets, device)

    def edges_of_rows(self, start: int, stop: int, device: Device = None) -> Tensor:
        """List the edges of targets start .. stop - 1, sorted."""
        raise NotImplementedError


def masked_rows(source: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """Make the edge list of rows of candidate sources.

    Args:
        source: candidate sources of every row, [n, k], in ascending order.
        target: the target of every row, [n].
        mask: which candidates are edges, bool [n, k].
    """
    found = source.masked_select(mask)  # takes half the time of source[mask]
    return torch.stack([found, target.repeat_interleave(mask.sum(1), output_size=len(found))])


@dataclass(frozen=True)
class Band(GraphStructure):
    """A band: target i sees sources i + dilation * o for all offsets o in [-before, after].

    A causal graph has after = 0. Without `self_loops`, the offset 0 is left out.
    """

    num_tokens: int
    before: int
    after: int
    dilation: int = 1
    self_loops: bool = True

    @property
    def num_targets(self) -> int:
        return self.num_tokens

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
        # Targets in the interior have all neighbours, so their edges are one broadcast sum. Only
        # targets near the two ends need a mask. 16 million edges take a fraction of a second.
        before, after = self._reach(self.before), self._reach(self.after)
        offsets = torch.arange(-before, after + 1, device=device) * self.dilation
        if not self.self_loops:
            offsets = offsets[offsets != 0]
        first = before * self.dilation
        last = self.num_tokens - after * self.dilation
        if first >= last:  # every target is near an end
            return self._border_edges(0, self.num_tokens, offsets)
        head = self._border_edges(0, first, offsets)
        tail = self._border_edges(last, self.num_tokens, offsets)
        num_head, num_inside = head.shape[1], (last - first) * len(offsets)
        edge_index = torch.empty(
            (2, num_head + num_inside + tail.shape[1]), dtype=torch.int64, device=device
        )
        edge_index[:, :num_head] = head
        edge_index[:, num_head + num_inside :] = tail
        source, target = (
            row[num_head : num_head + num_inside].view(last - first, len(offsets))
            for row in edge_index
        )
        i = torch.arange(first, last, device=device)[:, None]
        torch.add(i, offsets, out=source)
        target.copy_(i.expand_as(target))
        return edge_index

    def _border_edges(self, start: int, stop: int, offsets: Tensor) -> Tensor:
        i = torch.arange(start, stop, device=offsets.device)
        source = i[:, None] + offsets
        return masked_rows(source, i, (source >= 0) & (source < self.num_tokens))

    def pieces(self, device: Device = None) -> Iterator[Tensor]:
        for hop in range(-self._reach(self.before), self._reach(self.after) + 1):
            if hop or self.self_loops:
                move = hop * self.dilation
                target = torch.arange(max(0, -move), self.num_tokens - max(0, move), device=device)
                yield torch.stack([target + move, target])

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
class Cycle(GraphStructure):
    """A ring: target i sees i +- 1, ..., i +- window modulo num_tokens (Remark 4.1).

    It requires 2 * window < num_tokens.
    """

    num_tokens: int
    window: int

    @property
    def num_targets(self) -> int:
        return self.num_tokens

    def in_degree(self, device: Device = None) -> Tensor:
        return torch.full((self.num_tokens,), 2 * self.window, device=device)

    def num_edges(self) -> int:
        return 2 * self.window * self.num_tokens

    def contains(self, target: Tensor, source: Tensor) -> Tensor:
        hops = (source - target) % self.num_tokens
        hops = torch.minimum(hops, self.num_tokens - hops)
        return (hops >= 1) & (hops <= self.window)

    def edges(self, device: Device = None) -> Tensor:
        hops = torch.arange(1, self.window + 1, device=device)
        i = torch.arange(self.num_tokens, device=device)[:, None]
        source = ((i + torch.cat([-hops, hops])) % self.num_tokens).sort(dim=1).values
        return torch.stack([source.reshape(-1), i.expand_as(source).reshape(-1)])

    def pieces(self, device: Device = None) -> Iterator[Tensor]:
        target = torch.arange(self.num_tokens, device=device)
        for move in range(1, self.window + 1):
            yield torch.stack([(target + move) % self.num_tokens, target])
            yield torch.stack([(target - move) % self.num_tokens, target])

    def transpose(self) -> Cycle:
        return self


@dataclass(frozen=True)
class Complete(GraphStructure):
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

    def edges(self, device: Device = None) -> Tensor:
        source = torch.arange(self.sources, device=device).repeat(self.targets)
        target = torch.arange(self.targets, device=device).repeat_interleave(self.sources)
        return torch.stack([source, target])

    def pieces(self, device: Device = None) -> Iterator[Tensor]:
        target = torch.arange(self.targets, device=device)
        for source in range(self.sources):
            yield torch.stack([torch.full_like(target, source), target])

    def transpose(self) -> Complete:
        return Complete(self.sources, self.targets)


@dataclass(frozen=True)
class Blocks(GraphStructure):
    """Complete blocks of consecutive tokens; if `shift` is not 0, the first block ends there."""

    num_tokens: int
    block_size: int
    shift: int = 0

    @property
    def num_targets(self) -> int:
        return self.num_tokens

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

    def edges(self, device: Device = None) -> Tensor:
        i = torch.arange(self.num_tokens, device=device)
        start, stop = self._bounds(i)
        size = min(self._size, self.num_tokens)
        source = start[:, None] + torch.arange(size, device=device)
        return masked_rows(source, i, source < stop[:, None])

    def pieces(self, device: Device = None) -> Iterator[Tensor]:
        i = torch.arange(self.num_tokens, device=device)
        start, stop = self._bounds(i)
        for place in range(min(self._size, self.num_tokens)):
            inside = start + place < stop
            yield torch.stack([(start + place)[inside], i[inside]])

    def transpose(self) -> Blocks:
        return self


@dataclass(frozen=True)
class Grid(GraphStructure):
    """Tokens of an image in row-major order; each sees the tokens within `radius` of it.

    With `class_token`, token 0 sees and is seen by all, and the image starts at token 1.
    """

    height: int
    width: int
    radius: int
    metric: Literal["chebyshev", "manhattan"] = "chebyshev"
    class_token: bool = False

    @property
    def num_targets(self) -> int:
        return self.height * self.width + int(self.class_token)

    @property
    def offset_table(self) -> OffsetTable | None:
        return None if self.class_token else ("image", -self.radius, self.radius, 1)

    def offset_index(self, target: Tensor, source: Tensor) -> Tensor:
        dy, dx = self._displacement(target, source)
        return (dy + self.radius) * (2 * self.radius + 1) + dx + self.radius

    def _displacement(self, target: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
        lead = int(self.class_token)
        target, source = target - lead, source - lead
        dy = torch.div(source, self.width, rounding_mode="floor") - torch.div(
            target, self.width, rounding_mode="floor"
        )
        return dy, source % self.width - target % self.width

    def _half_width(self, dy: int) -> int:
        """How many tokens a window reaches to each side in a row that is `dy` rows away."""
        return self.radius if self.metric == "chebyshev" else self.radius - abs(dy)

    def in_degree(self, device: Device = None) -> Tensor:
        y = torch.arange(self.height, device=device)[:, None]
        x = torch.arange(self.width, device=device)
        degree = torch.zeros((self.height, self.width), dtype=torch.int64, device=device)
        reach = min(self.radius, self.height - 1)
        for dy in range(-reach, reach + 1):
            half = self._half_width(dy)
            across = x.clamp(max=half) + (self.width - 1 - x).clamp(max=half) + 1
            degree += ((y + dy >= 0) & (y + dy < self.height)) * across
        degree = degree.reshape(-1)
        if self.class_token:
            degree = torch.cat([degree.new_tensor([self.num_targets]), degree + 1])
        return degree

    def contains(self, target: Tensor, source: Tensor) -> Tensor:
        dy, dx = self._displacement(target, source)
        if self.metric == "chebyshev":
            inside = torch.maximum(dy.abs(), dx.abs()) <= self.radius
        else:
            inside = dy.abs() + dx.abs() <= self.radius
        return inside | (target == 0) | (source == 0) if self.class_token else inside

    def _moves(self) -> list[tuple[int, int]]:
        """List the displacements (down, right) of a window, in the order of sources."""
        down, right = min(self.radius, self.height - 1), min(self.radius, self.width - 1)
        return [
            (dy, dx)
            for dy in range(-down, down + 1)
            for dx in range(-right, right + 1)
            if abs(dx) <= self._half_width(dy)
        ]

    def edges(self, device: Device = None) -> Tensor:
        dy, dx = torch.tensor(self._moves(), device=device).T
        cell = torch.arange(self.height * self.width, device=device)
        y, x = cell[:, None] // self.width + dy, cell[:, None] % self.width + dx
        inside = (y >= 0) & (y < self.height) & (x >= 0) & (x < self.width)
        if not self.class_token:
            return masked_rows(y * self.width + x, cell, inside)
        # Token 0 is first in every row, and its own row has all tokens.
        always = torch.ones_like(inside[:, :1])
        source = torch.cat([torch.zeros_like(cell)[:, None], y * self.width + x + 1], dim=1)
        grid = masked_rows(source, cell + 1, torch.cat([always, inside], dim=1))
        everyone = torch.arange(self.num_targets, device=device)
        return torch.cat([torch.stack([everyone, torch.zeros_like(everyone)]), grid], dim=1)

    def pieces(self, device: Device = None) -> Iterator[Tensor]:
        cell = torch.arange(self.height * self.width, device=device)
        y, x = cell // self.width, cell % self.width
        lead = int(self.class_token)
        for dy, dx in self._moves():
            inside = (y + dy >= 0) & (y + dy < self.height)
            inside &= (x + dx >= 0) & (x + dx < self.width)
            target = cell[inside]
            yield torch.stack([target + dy * self.width + dx, target]) + lead
        if self.class_token:
            everyone = torch.arange(self.num_targets, device=device)
            yield torch.stack([torch.zeros_like(everyone), everyone])
            yield torch.stack([everyone[1:], torch.zeros_like(everyone[1:])])

    def transpose(self) -> Grid:
        return self


@dataclass(frozen=True)
class GlobalTokens(GraphStructure):
    """Global tokens: they see all tokens and are seen by all tokens, including themselves."""

    num_tokens: int
    tokens: tuple[int, ...]

    @property
    def num_targets(self) -> int:
        return self.num_tokens

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

    def edges(self, device: Device = None) -> Tensor:
        tokens, i = self._tokens(device), torch.arange(self.num_tokens, device=device)
        others = i[~torch.isin(i, tokens)]
        columns = torch.stack([tokens.repeat(len(others)), others.repeat_interleave(len(tokens))])
        rows = torch.stack([i.repeat(len(tokens)), tokens.repeat_interleave(self.num_tokens)])
        return sort_edges(torch.cat([columns, rows], dim=1), self.num_tokens)

    def pieces(self, device: Device = None) -> Iterator[Tensor]:
        everyone = torch.arange(self.num_tokens, device=device)
        others = everyone[~torch.isin(everyone, self._tokens(device))]
        for token in self.tokens:
            yield torch.stack([everyone, torch.full_like(everyone, token)])
            yield torch.stack([torch.full_like(others, token), others])

    def transpose(self) -> GlobalTokens:
        return self


def sort_edges(edge_index: Tensor, num_sources: int) -> Tensor:
    """Sort edges by target, then source."""
    return edge_index[:, (edge_index[1] * num_sources + edge_index[0]).argsort()]

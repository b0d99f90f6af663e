"""What is known of a graph in closed form.

A structure says which edges a graph has without listing them: building one costs O(1), and fast
paths read it instead of the edges. Each class answers the same few questions: how many edges, how
many per target, is this pair an edge, and, only when somebody asks, the sorted edge list.

An edge is (source j, target i): target i looks at source j. Papers write that pair as (i, j).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

Device = torch.device | str | None


class Structure:
    """Base of all structures: a set of edges between `num_sources` and `num_targets` tokens."""

    @property
    def num_targets(self) -> int:
        raise NotImplementedError

    @property
    def num_sources(self) -> int:
        return self.num_targets

    @property
    def is_causal(self) -> bool:
        """No target sees a source after it."""
        return False

    @property
    def num_offsets(self) -> int | None:
        """Rows of a relative-position table over this structure; None where there is none."""
        return None

    def offset_index(self, target: Tensor, source: Tensor) -> Tensor:
        """The row of a relative-position table that an edge reads."""
        raise NotImplementedError(f"{type(self).__name__} has no table of offsets")

    def num_edges(self) -> int:
        return int(self.in_degree().sum())

    def in_degree(self, device: Device = None) -> Tensor:
        """Number of sources of every target, [N]."""
        raise NotImplementedError

    def contains(self, target: Tensor, source: Tensor) -> Tensor:
        """Whether each pair is an edge (elementwise, bool)."""
        raise NotImplementedError

    def edges(self, device: Device = None) -> Tensor:
        """All edges, [2, E], row 0 = source, row 1 = target, sorted by target, then source."""
        raise NotImplementedError

    def transpose(self) -> Structure | None:
        """The same edges with sources and targets exchanged; None if not known in closed form."""
        raise NotImplementedError


def _masked_rows(source: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """Edge list of rows of candidate sources [n, k] (ascending) of `target` [n]."""
    return torch.stack([source[mask], target[:, None].expand_as(mask)[mask]])


@dataclass(frozen=True)
class Band(Structure):
    """j = i + dilation * o for offsets o in [-before, after]; a causal graph has after = 0."""

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
    def num_offsets(self) -> int:
        return self.before + self.after + 1

    def offset_index(self, target: Tensor, source: Tensor) -> Tensor:
        return torch.div(source - target, self.dilation, rounding_mode="floor") + self.before

    def _reach(self, hops: int) -> int:
        """Hops that can land inside the sequence at all."""
        return min(hops, max(self.num_tokens - 1, 0) // self.dilation)

    def num_edges(self) -> int:
        total = self.num_tokens if self.self_loops else 0
        for hops in (self._reach(self.before), self._reach(self.after)):
            total += hops * self.num_tokens - self.dilation * hops * (hops + 1) // 2
        return total

    def in_degree(self, device: Device = None) -> Tensor:
        i = torch.arange(self.num_tokens, device=device)
        before = (i // self.dilation).clamp(max=self.before)
        after = ((self.num_tokens - 1 - i) // self.dilation).clamp(max=self.after)
        return before + after + int(self.self_loops)

    def contains(self, target: Tensor, source: Tensor) -> Tensor:
        distance = source - target
        inside = (distance >= -self.before * self.dilation) & (
            distance <= self.after * self.dilation
        )
        if self.dilation > 1:
            inside &= distance % self.dilation == 0
        return inside if self.self_loops else inside & (distance != 0)

    def edges(self, device: Device = None) -> Tensor:
        # Interior targets have every neighbour, so their edges are one broadcast sum; only the
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
        return _masked_rows(source, i, (source >= 0) & (source < self.num_tokens))

    def transpose(self) -> Band:
        return Band(self.num_tokens, self.after, self.before, self.dilation, self.self_loops)


@dataclass(frozen=True)
class Cycle(Structure):
    """j = i +- 1, ..., +- window modulo num_tokens, 2 * window < num_tokens (Remark 4.1)."""

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

    def transpose(self) -> Cycle:
        return self


@dataclass(frozen=True)
class Complete(Structure):
    """Every target sees every source (self included where they are the same tokens)."""

    targets: int
    sources: int

    @property
    def num_targets(self) -> int:
        return self.targets

    @property
    def num_sources(self) -> int:
        return self.sources

    @property
    def num_offsets(self) -> int | None:
        return 2 * self.targets - 1 if self.targets == self.sources else None

    def offset_index(self, target: Tensor, source: Tensor) -> Tensor:
        return source - target + self.targets - 1

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

    def transpose(self) -> Complete:
        return Complete(self.sources, self.targets)


@dataclass(frozen=True)
class Blocks(Structure):
    """Non-overlapping blocks of consecutive tokens, each complete; the first ends at `shift`."""

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
    def num_offsets(self) -> int:
        return 2 * self.block_size - 1

    def offset_index(self, target: Tensor, source: Tensor) -> Tensor:
        return source - target + self.block_size - 1

    def block_of(self, token: Tensor) -> Tensor:
        """The block every token belongs to."""
        lead = self.block_size - self.shift if self.shift else 0
        return torch.div(token + lead, self.block_size, rounding_mode="floor")

    def _bounds(self, i: Tensor) -> tuple[Tensor, Tensor]:
        lead = self.block_size - self.shift if self.shift else 0
        start = self.block_of(i) * self.block_size - lead
        return start.clamp(min=0), (start + self.block_size).clamp(max=self.num_tokens)

    def in_degree(self, device: Device = None) -> Tensor:
        start, stop = self._bounds(torch.arange(self.num_tokens, device=device))
        return stop - start

    def contains(self, target: Tensor, source: Tensor) -> Tensor:
        return self.block_of(target) == self.block_of(source)

    def edges(self, device: Device = None) -> Tensor:
        i = torch.arange(self.num_tokens, device=device)
        start, stop = self._bounds(i)
        size = min(self.block_size, self.num_tokens)
        source = start[:, None] + torch.arange(size, device=device)
        return _masked_rows(source, i, source < stop[:, None])

    def transpose(self) -> Blocks:
        return self


@dataclass(frozen=True)
class Grid(Structure):
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
    def num_offsets(self) -> int | None:
        return None if self.class_token else (2 * self.radius + 1) ** 2

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
        """How far a window reaches sideways, `dy` rows away."""
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

    def edges(self, device: Device = None) -> Tensor:
        reach_y = min(self.radius, self.height - 1)
        reach_x = min(self.radius, self.width - 1)
        moves = [
            (dy, dx)
            for dy in range(-reach_y, reach_y + 1)
            for dx in range(-reach_x, reach_x + 1)
            if abs(dx) <= self._half_width(dy)
        ]
        dy, dx = torch.tensor(moves, device=device).T
        cell = torch.arange(self.height * self.width, device=device)
        y, x = cell[:, None] // self.width + dy, cell[:, None] % self.width + dx
        inside = (y >= 0) & (y < self.height) & (x >= 0) & (x < self.width)
        if not self.class_token:
            return _masked_rows(y * self.width + x, cell, inside)
        # Token 0 stands first in every row, and its own row holds everything.
        always = torch.ones_like(inside[:, :1])
        source = torch.cat([torch.zeros_like(cell)[:, None], y * self.width + x + 1], dim=1)
        grid = _masked_rows(source, cell + 1, torch.cat([always, inside], dim=1))
        everyone = torch.arange(self.num_targets, device=device)
        return torch.cat([torch.stack([everyone, torch.zeros_like(everyone)]), grid], dim=1)

    def transpose(self) -> Grid:
        return self


@dataclass(frozen=True)
class GlobalTokens(Structure):
    """The given tokens see everything and are seen by everything (themselves included)."""

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
        return _sorted_edges(torch.cat([columns, rows], dim=1), self.num_tokens)

    def transpose(self) -> GlobalTokens:
        return self


@dataclass(frozen=True)
class RandomSources(Structure):
    """`num_random` sources per target, drawn without replacement outside `base` (BigBird).

    A function of the seed alone, the same on every device; a target with fewer sources left
    takes them all.
    """

    base: Structure
    num_random: int
    seed: int

    @property
    def num_targets(self) -> int:
        return self.base.num_targets

    def in_degree(self, device: Device = None) -> Tensor:
        left = self.num_sources - self.base.in_degree(device)
        return left.clamp(max=self.num_random)

    def contains(self, target: Tensor, source: Tensor) -> Tensor:
        own_source, own_target = self.edges(target.device)
        keys = own_target * self.num_sources + own_source
        return torch.isin(target * self.num_sources + source, keys)

    def edges(self, device: Device = None) -> Tensor:
        base_source, base_target = self.base.edges()
        degree = self.base.in_degree()
        rowptr = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
        left = self.num_sources - degree
        # Floyd's algorithm, all targets at once: `num_random` distinct ranks among those left.
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
        # The r-th source outside `base`: r plus the base sources that stand before it.
        position = torch.arange(len(base_source)) - rowptr[base_target]
        stride = self.num_sources + 1
        keys = base_target * stride + base_source - position
        i = torch.arange(self.num_targets)[:, None]
        before = torch.searchsorted(keys, i * stride + ranks, right=True) - rowptr[i]
        return _masked_rows(ranks + before, i[:, 0], ranks >= 0).to(device)

    def transpose(self) -> None:
        return None


@dataclass(frozen=True)
class Union(Structure):
    """The set union of structures of one size; a shared edge belongs to the first that has it."""

    parts: tuple[Structure, ...]

    @property
    def num_targets(self) -> int:
        return self.parts[0].num_targets

    @property
    def num_sources(self) -> int:
        return self.parts[0].num_sources

    @property
    def is_causal(self) -> bool:
        return all(part.is_causal for part in self.parts)

    def disjoint_edges(self, device: Device = None) -> list[Tensor]:
        """The edges of every part, without those an earlier part already has."""
        edge_lists = []
        for k, part in enumerate(self.parts):
            source, target = edge_index = part.edges(device)
            new = torch.ones_like(source, dtype=torch.bool)
            for earlier in self.parts[:k]:
                new &= ~earlier.contains(target, source)
            edge_lists.append(edge_index[:, new])
        return edge_lists

    @cached_property
    def _counted_edges(self) -> int:
        return sum(edges.shape[1] for edges in self.disjoint_edges())

    def num_edges(self) -> int:
        match self.parts:
            # Longformer: window edges at a global token are the only ones counted twice.
            case (GlobalTokens() as hubs, Band() as band):
                tokens = torch.tensor(hubs.tokens, dtype=torch.int64)
                shared = band.in_degree()[tokens].sum() + band.transpose().in_degree()[tokens].sum()
                shared -= band.contains(tokens[:, None], tokens).sum()
                return hubs.num_edges() + band.num_edges() - int(shared)
            case (*rest, RandomSources() as drawn) if drawn.base == union_of(rest):
                return drawn.base.num_edges() + drawn.num_edges()
        return self._counted_edges

    def in_degree(self, device: Device = None) -> Tensor:
        return torch.bincount(self.edges(device)[1], minlength=self.num_targets)

    def contains(self, target: Tensor, source: Tensor) -> Tensor:
        inside = self.parts[0].contains(target, source)
        for part in self.parts[1:]:
            inside = inside | part.contains(target, source)
        return inside

    def edges(self, device: Device = None) -> Tensor:
        return _sorted_edges(torch.cat(self.disjoint_edges(device), dim=1), self.num_sources)

    def transpose(self) -> Structure | None:
        parts = [flipped for part in self.parts if (flipped := part.transpose()) is not None]
        return union_of(parts) if len(parts) == len(self.parts) else None


@dataclass(frozen=True)
class Parts(Structure):
    """Structures side by side, without edges between them: a batch of packed sequences."""

    parts: tuple[Structure, ...]

    @cached_property
    def target_ptr(self) -> list[int]:
        return _running_sum([part.num_targets for part in self.parts])

    @cached_property
    def source_ptr(self) -> list[int]:
        return _running_sum([part.num_sources for part in self.parts])

    @property
    def num_targets(self) -> int:
        return self.target_ptr[-1]

    @property
    def num_sources(self) -> int:
        return self.source_ptr[-1]

    @property
    def is_causal(self) -> bool:
        return all(part.is_causal for part in self.parts)

    @property
    def num_offsets(self) -> int | None:
        shared = {part.num_offsets for part in self.parts}
        return shared.pop() if len(shared) == 1 else None

    def offset_index(self, target: Tensor, source: Tensor) -> Tensor:
        index = torch.empty_like(target)
        for part, t0, s0 in zip(self.parts, self.target_ptr, self.source_ptr, strict=False):
            own = (target >= t0) & (target < t0 + part.num_targets)
            index[own] = part.offset_index(target[own] - t0, source[own] - s0)
        return index

    def num_edges(self) -> int:
        return sum(part.num_edges() for part in self.parts)

    def in_degree(self, device: Device = None) -> Tensor:
        return torch.cat([part.in_degree(device) for part in self.parts])

    def contains(self, target: Tensor, source: Tensor) -> Tensor:
        target, source = torch.broadcast_tensors(target, source)
        inside = torch.zeros_like(target, dtype=torch.bool)
        for part, t0, s0 in zip(self.parts, self.target_ptr, self.source_ptr, strict=False):
            own = (target >= t0) & (target < t0 + part.num_targets)
            own &= (source >= s0) & (source < s0 + part.num_sources)
            inside[own] = part.contains(target[own] - t0, source[own] - s0)
        return inside

    def edges(self, device: Device = None) -> Tensor:
        offsets = zip(self.source_ptr, self.target_ptr, strict=True)
        return torch.cat(
            [
                part.edges(device) + torch.tensor(offset, device=device)[:, None]
                for part, offset in zip(self.parts, offsets, strict=False)
            ],
            dim=1,
        )

    def transpose(self) -> Structure | None:
        parts = [flipped for part in self.parts if (flipped := part.transpose()) is not None]
        return Parts(tuple(parts)) if len(parts) == len(self.parts) else None


def union_of(parts: list[Structure] | tuple[Structure, ...]) -> Structure:
    """The union of parts; one part stands for itself."""
    return parts[0] if len(parts) == 1 else Union(tuple(parts))


def _running_sum(sizes: list[int]) -> list[int]:
    total = [0]
    for size in sizes:
        total.append(total[-1] + size)
    return total


def _sorted_edges(edge_index: Tensor, num_sources: int) -> Tensor:
    """Edges sorted by target, then source."""
    return edge_index[:, (edge_index[1] * num_sources + edge_index[0]).argsort()]

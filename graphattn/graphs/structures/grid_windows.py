"""Windows on a grid with any number of axes, which may be dilated, causal or shifted inside.

The window of a token is the product of its windows along all axes. So everything is computed for
each axis (:class:`AxisWindow`) and multiplied.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from graphattn.graphs.structures.structure import (
    AT_ONCE,
    Device,
    GridOffsets,
    OffsetTable,
    StructureByRows,
    masked_rows,
    pieces_of_rows,
)

SMALL_TABLES = 1 << 18  # entries of tables that may be computed again for every piece


@dataclass(frozen=True)
class AxisWindow:
    """The window along one axis, which says which places a place sees.

    The places with the same remainder modulo `dilation` form a line. On a line of L places, place q
    shares a window with the `stride` places of its group (only with itself if stride is 1). One of
    the group is its leader. Place q sees

    - with windows that are cut at the border: the places from leader - before to q + after, where
      the leader is the last of the group;
    - with windows that are shifted inside (``shift``): the places from centre - before to
      centre + after, where the leader is the middle of the group, and the centre is the place
      nearest to the leader for which the whole window is inside. This is NATTEN's rule (Hassani et
      al., 2023; 2025 for strides).
    """

    size: int
    before: int
    after: int
    dilation: int
    stride: int
    shift: bool

    @property
    def step(self) -> int:
        """The dilation, or the size of the axis if that is smaller."""
        return min(self.dilation, self.size)

    @property
    def offsets(self) -> tuple[int, int]:
        """The smallest and the largest hop of an edge, if the stride is at most the window."""
        window = self.before + self.after
        return (-window, window) if self.shift else (-self.before, self.after)

    def bounds(self, place: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first and the last place that each place sees, counted along its line."""
        q, last = place // self.step, (self.size - 1 - place % self.step) // self.step
        before, after = min(self.before, self.size), min(self.after, self.size)
        group = q // self.stride * self.stride
        if self.shift:
            leader = torch.minimum(group + self.stride // 2, last)
            centre = torch.minimum(leader.clamp(min=before), last - after)
            return (centre - before).clamp(min=0), torch.minimum(centre + after, last)
        leader = torch.minimum(group + (self.stride - 1), last)
        return (leader - before).clamp(min=0), torch.minimum(q + after, last)

    def contains(self, target: Tensor, source: Tensor) -> Tensor:
        """Whether `target` sees `source`, elementwise."""
        first, last = self.bounds(target)
        hop = source // self.step
        return (hop >= first) & (hop <= last) & ((source - target) % self.step == 0)

    def num_edges(self) -> int:
        """Count the pairs in closed form."""
        longer = self.size % self.step  # the number of lines that have one place more than others
        length = self.size // self.step
        return longer * self._on_line(length + 1) + (self.step - longer) * self._on_line(length)

    def _on_line(self, length: int) -> int:
        if self.shift:
            return length * min(self.before + self.after + 1, length)
        # The sum of (last place seen - first place seen + 1) over all places.
        after = min(self.after, length - 1)
        lasts = (length - after) * (after + length - 1) // 2 + after * (length - 1)
        full, rest = divmod(length, self.stride)  # groups of places that share a window
        start = max((self.before + 1 - self.stride) // self.stride + 1, 0)  # first uncut group
        groups = max(full - start, 0)
        leaders = self.stride * (groups * (start + full + 1) // 2) - groups * (self.before + 1)
        firsts = self.stride * leaders + rest * max(length - 1 - self.before, 0)
        return lasts - firsts + length

    def by_distance(self, most: int) -> list[int]:
        """Count the pairs that are 0, 1, ..., `most` hops apart, for windows that are cut."""
        pairs = [max(self.size - hops * self.step, 0) for hops in range(most + 1)]
        sides = [(hops <= self.before) + (hops <= self.after) for hops in range(most + 1)]
        return [pairs[0], *(n * k for n, k in zip(pairs[1:], sides[1:], strict=True))]

    def degree(self, device: Device, *, transposed: bool) -> Tensor:
        """Count the places that every place sees or, if `transposed`, is seen by; [size]."""
        place = torch.arange(self.size, device=device)
        first, last = self.bounds(place)
        if not transposed:
            return last - first + 1
        # Add +1 where a window begins, and -1 after its last place; the running sum is the count.
        line, lines = place % self.step, -(-self.size // self.step) + 1
        change = torch.zeros(lines * self.step, dtype=torch.int64, device=device)
        change.index_add_(0, line + first * self.step, torch.ones_like(place))
        change.index_add_(0, line + (last + 1) * self.step, -torch.ones_like(place))
        return change.view(lines, self.step).cumsum(0).view(-1)[: self.size]

    def table(self, device: Device, *, transposed: bool) -> tuple[Tensor, Tensor]:
        """List what each place sees or, if `transposed`, is seen by, with a mask; [size, most]."""
        place = torch.arange(self.size, device=device)
        first, last = self.bounds(place)
        slot = torch.arange(int((last - first).max()) + 1, device=device)
        source = place[:, None] % self.step + (first[:, None] + slot) * self.step
        present = slot <= (last - first)[:, None]
        if not transposed:
            return source, present
        target, source = place[:, None].expand_as(source)[present], source[present]
        source, order = source.sort(stable=True)
        degree = torch.bincount(source, minlength=self.size)
        begin = degree.cumsum(0) - degree
        slot = torch.arange(int(degree.max()), device=device)
        seen_by = torch.zeros((self.size, len(slot)), dtype=torch.int64, device=device)
        rank = torch.arange(len(source), device=device) - begin[source]
        seen_by[source, rank] = target[order]
        return seen_by, slot < degree[:, None]


@dataclass(frozen=True)
class GridWindows(StructureByRows):
    """Tokens of a grid in row-major order; each sees the product of its windows along all axes.

    `before`, `after`, `dilation`, `stride` and `shift` have an entry per axis, the fields of
    :class:`AxisWindow`. With ``metric="manhattan"``, the sum of hops over all axes is limited to
    the reach, too; windows are then cut, strides are 1, and the reach is the same on all axes. With
    `class_token`, token 0 sees all tokens and is seen by all, and the grid starts at token 1.
    """

    shape: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    dilation: tuple[int, ...]
    stride: tuple[int, ...]
    shift: tuple[bool, ...]
    metric: Literal["chebyshev", "manhattan"] = "chebyshev"
    class_token: bool = False
    transposed: bool = False

    @property
    def axes(self) -> tuple[AxisWindow, ...]:
        """The window along every axis."""
        fields = (self.shape, self.before, self.after, self.dilation, self.stride, self.shift)
        return tuple(AxisWindow(*of_axis) for of_axis in zip(*fields, strict=True))

    @property
    def num_targets(self) -> int:
        return math.prod(self.shape) + int(self.class_token)

    @property
    def is_causal(self) -> bool:
        """Whether no axis looks ahead; then no source is after its target in row-major order."""
        ahead = zip(self.axes, self._offsets().last, strict=True)
        return not self.class_token and all(
            last == 0 or axis.size <= axis.dilation for axis, last in ahead
        )

    @property
    def offset_table(self) -> GridOffsets | None:
        return None if self.class_token else self._offsets()

    def _offsets(self) -> GridOffsets:
        first, last = zip(*(axis.offsets for axis in self.axes), strict=True)
        if self.transposed:
            first, last = tuple(-hop for hop in last), tuple(-hop for hop in first)
        return GridOffsets(first, last, self.dilation)

    def offset_index(self, target: Tensor, source: Tensor) -> Tensor:
        first, last, _ = self._offsets()
        index = torch.zeros_like(source - target)
        pairs = zip(self._places(target), self._places(source), strict=True)
        for axis, (i, j), low, high in zip(self.axes, pairs, first, last, strict=True):
            index = index * (high - low + 1) + (j - i) // axis.step - low
        return index

    def _places(self, token: Tensor) -> list[Tensor]:
        """Return the places of tokens along every axis."""
        token, places = token - int(self.class_token), []
        for size in reversed(self.shape):
            places.append(token % size)
            token = token // size
        return places[::-1]

    @property
    def _reach(self) -> int:
        """The reach of a diamond, or the largest number of hops inside the grid if smaller."""
        farthest = sum((axis.size - 1) // axis.step for axis in self.axes)
        return min(max(*self.before, *self.after), farthest)

    def num_edges(self) -> int:
        if self.metric == "chebyshev":
            pairs = math.prod(axis.num_edges() for axis in self.axes)
        else:
            by_distance = [1] + [0] * self._reach
            for axis in self.axes:
                of_axis = axis.by_distance(self._reach)
                by_distance = [
                    sum(by_distance[m] * of_axis[k - m] for m in range(k + 1))
                    for k in range(self._reach + 1)
                ]
            pairs = sum(by_distance)
        return pairs + (2 * self.num_targets - 1 if self.class_token else 0)

    def in_degree(self, device: Device = None) -> Tensor:
        if self.metric == "chebyshev":
            degree = torch.ones(1, dtype=torch.int64, device=device)
            for axis in self.axes:
                of_axis = axis.degree(device, transposed=self.transposed)
                degree = (degree[:, None] * of_axis).view(-1)
        else:
            degree = self._degree_of_diamonds(device)
        if self.class_token:
            degree = torch.cat([degree.new_tensor([self.num_targets]), degree + 1])
        return degree

    def _degree_of_diamonds(self, device: Device) -> Tensor:
        """Count the sources of every token in a diamond; [tokens].

        Each axis in turn extends a table [reach + 1, tokens] of sources by their number of hops.
        """
        reach = self._reach
        degree = torch.zeros((reach + 1, 1), dtype=torch.int64, device=device)
        degree[0] = 1
        for axis in self.axes:
            place = torch.arange(axis.size, device=device)
            left, right = place // axis.step, (axis.size - 1 - place) // axis.step
            hops = torch.arange(reach + 1, device=device)[:, None]
            of_axis = ((hops <= left) & (hops <= axis.before)).long()
            of_axis += (hops <= right) & (hops <= axis.after)
            of_axis[0] = 1
            both = [
                sum(degree[m][:, None] * of_axis[k - m] for m in range(k + 1))
                for k in range(reach + 1)
            ]
            degree = torch.stack(both).flatten(1)  # type: ignore[arg-type]
        return degree.sum(0)

    def contains(self, target: Tensor, source: Tensor) -> Tensor:
        inside = torch.ones_like(target - source, dtype=torch.bool)
        hops = torch.zeros_like(target - source)
        pairs = zip(self._places(target), self._places(source), strict=True)
        for axis, (i, j) in zip(self.axes, pairs, strict=True):
            inside &= axis.contains(j, i) if self.transposed else axis.contains(i, j)
            hops += (j - i).abs() // axis.step
        if self.metric == "manhattan":
            inside &= hops <= self._reach
        return inside | (target == 0) | (source == 0) if self.class_token else inside

    @property
    def lists_rows(self) -> bool:
        return self._table_size <= SMALL_TABLES

    @property
    def _table_size(self) -> int:
        """Number of entries of the tables of all axes, or more."""
        windows = zip(self.shape, self.before, self.after, strict=True)
        return sum(size * (before + after + 1) for size, before, after in windows)

    def edges_of_rows(self, start: int, stop: int, device: Device = None) -> Tensor:
        lead = int(self.class_token)
        first = max(start, lead)
        cell = torch.arange(first, max(stop, first), device=device)
        source, present = self._rows(cell - lead, self._tables(device))
        if not lead:
            return masked_rows(source, cell, present)
        # Token 0 is first in every row, and its own row has all tokens.
        always = torch.ones_like(present[:, :1])
        source = torch.cat([torch.zeros_like(source[:, :1]), source + 1], dim=1)
        grid = masked_rows(source, cell, torch.cat([always, present], dim=1))
        if start > 0 or stop == 0:
            return grid
        everyone = torch.arange(self.num_targets, device=device)
        return torch.cat([torch.stack([everyone, torch.zeros_like(everyone)]), grid], dim=1)

    def pieces(self, device: Device = None) -> Iterator[Tensor]:
        # Every piece computes the tables again, so it should not be smaller than these.
        at_once = max(AT_ONCE, self._table_size)
        yield from pieces_of_rows(self, self.num_edges(), at_once, device)

    def _tables(self, device: Device) -> list[tuple[Tensor, Tensor]]:
        return [axis.table(device, transposed=self.transposed) for axis in self.axes]

    def _rows(self, cell: Tensor, tables: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return candidate sources of some cells in ascending order, [n, most], with a mask.

        The class token is not counted in the numbers of cells.
        """
        source = torch.zeros_like(cell)[:, None]
        hops, present = torch.zeros_like(source), torch.ones_like(source, dtype=torch.bool)
        places = self._places(cell + int(self.class_token))
        for axis, place, (table, inside) in zip(self.axes, places, tables, strict=True):
            seen = table[place]
            source = (source[:, :, None] * axis.size + seen[:, None]).flatten(1)
            present = (present[:, :, None] & inside[place][:, None]).flatten(1)
            if self.metric == "manhattan":
                away = (seen - place[:, None]).abs() // axis.step
                hops = (hops[:, :, None] + away[:, None]).flatten(1)
        if self.metric == "manhattan":
            present = present & (hops <= self._reach)
        return source, present

    def transpose(self) -> GridWindows:
        if any(self.shift) or any(stride > 1 for stride in self.stride):
            return replace(self, transposed=not self.transposed)
        return replace(self, before=self.after, after=self.before)


@dataclass(frozen=True)
class Grid(StructureByRows):
    """Tokens of an image in row-major order; each sees the tokens within `radius` of it.

    With `class_token`, token 0 sees and is seen by all, and the image starts at token 1. It is a
    :class:`GridWindows`, but its table of offsets is that of an image.
    """

    height: int
    width: int
    radius: int
    metric: Literal["chebyshev", "manhattan"] = "chebyshev"
    class_token: bool = False

    @property
    def windows(self) -> GridWindows:
        """The windows of the image, with the same edges."""
        reach, one = (self.radius, self.radius), (1, 1)
        shape, shift = (self.height, self.width), (False, False)
        return GridWindows(shape, reach, reach, one, one, shift, self.metric, self.class_token)

    @property
    def num_targets(self) -> int:
        return self.height * self.width + int(self.class_token)

    @property
    def lists_rows(self) -> bool:
        return self.windows.lists_rows

    @property
    def offset_table(self) -> OffsetTable | None:
        return None if self.class_token else ("image", -self.radius, self.radius, 1)

    def offset_index(self, target: Tensor, source: Tensor) -> Tensor:
        return self.windows.offset_index(target, source)

    def num_edges(self) -> int:
        return self.windows.num_edges()

    def in_degree(self, device: Device = None) -> Tensor:
        return self.windows.in_degree(device)

    def contains(self, target: Tensor, source: Tensor) -> Tensor:
        return self.windows.contains(target, source)

    def edges_of_rows(self, start: int, stop: int, device: Device = None) -> Tensor:
        return self.windows.edges_of_rows(start, stop, device)

    def pieces(self, device: Device = None) -> Iterator[Tensor]:
        return self.windows.pieces(device)

    def transpose(self) -> Grid:
        return self

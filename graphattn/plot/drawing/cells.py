"""Number of edges in every cell of a coarse adjacency matrix, mostly without listing the edges."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from graphattn.graphs import TokenGraph
from graphattn.graphs.structures.composites import (
    Parts,
    RandomSources,
    Section,
    Union,
    intersection_of,
    union_of,
)
from graphattn.graphs.structures.grid_windows import Grid
from graphattn.graphs.structures.structure import (
    Band,
    Blocks,
    Complete,
    Cycle,
    GlobalTokens,
    GraphStructure,
)

# Edges, or entries of a tile of rows, that are processed in one step: some tens of megabytes.
AT_ONCE = 1 << 22


class Cut(NamedTuple):
    """Tokens start .. stop - 1, divided into `number` cells that differ by at most one token."""

    start: int
    stop: int
    number: int

    def bounds(self) -> Tensor:
        """Return the first token of every cell, and the end of the last cell: [number + 1]."""
        cell = torch.arange(self.number + 1)
        return self.start + cell * (self.stop - self.start) // self.number

    def cell(self, token: Tensor) -> Tensor:
        """Return the number of each token's cell, counted from 0; for `stop` it is `number`."""
        return ((token - self.start + 1) * self.number - 1) // (self.stop - self.start)

    def rows(self, length: int, first: int) -> Tensor:
        """Return which of the tokens from `first` on are in cells, counted from `first`."""
        low, high = max(0, self.start - first), min(length, self.stop - first)
        return torch.arange(low, max(low, high))


def edge_counts(graph: TokenGraph, rows: Cut, columns: Cut) -> Tensor:
    """Count the edges in every cell, with targets divided into `rows` and sources into `columns`.

    For a graph with a structure, most edges are counted as runs of consecutive sources, so that the
    cost depends on the number of tokens and cells and not on the number of edges. Lists of edges
    and tables of neighbors are read a part at a time.

    Returns:
        LongTensor [rows.number, columns.number], on the CPU.

    Example:
        >>> import graphattn as ga
        >>> from graphattn.plot.drawing.cells import Cut, edge_counts
        >>> edge_counts(ga.causal_graph(1_000_000), *[Cut(0, 1_000_000, 2)] * 2)
        tensor([[125000250000,            0],
                [250000000000, 125000250000]])
    """
    counter = _Counter(rows, columns)
    if graph.structure is not None:
        counter.add(graph.structure)
    elif (table := graph.compact_neighbors) is not None:
        for first in range(rows.start, rows.stop, chunk := max(1, AT_ONCE // max(1, len(table.T)))):
            part = table[first : first + chunk].cpu().long()
            target = torch.arange(first, first + len(part))[:, None].expand_as(part)
            counter.add_edges(target[part >= 0], part[part >= 0])
    else:
        for part in graph.compact_edges.split(AT_ONCE, dim=1):
            source, target = part.cpu().long()
            counter.add_edges(target, source)
    return counter.total()


class _Counter:
    """Counts edges per cell; edges are added singly or as runs of consecutive sources.

    The run of sources start .. stop - 1 of one target is the difference of two runs that begin at
    the first column: the run up to `stop` is added and the run up to `start` is subtracted. Each of
    these fills all cells before the cell of its end, and a part of that cell. A run of any length
    thus costs two additions, and :meth:`total` takes one cumulative sum over all of them.
    """

    def __init__(self, rows: Cut, columns: Cut) -> None:
        self.row_cut, self.columns = rows, columns
        self.single = torch.zeros(rows.number * columns.number, dtype=torch.int64)
        # A run may end where the last cell ends, so there is one more column for ends.
        self.ends = torch.zeros(rows.number * (columns.number + 1), dtype=torch.int64)
        self.filled = torch.zeros_like(self.ends)

    def total(self) -> Tensor:
        """Return the number of edges in every cell, [rows, columns]."""
        R, C = self.row_cut.number, self.columns.number
        ends, filled = self.ends.view(R, C + 1), self.filled.view(R, C + 1)
        later = ends.flip(1).cumsum(1).flip(1) - ends  # the number of ends in later cells
        return self.single.view(R, C) + filled[:, :C] + self.columns.bounds().diff() * later[:, :C]

    def add_edges(self, target: Tensor, source: Tensor, sign: int = 1) -> None:
        """Add single edges (subtract them if `sign` is -1)."""
        rows, columns = self.row_cut, self.columns
        inside = (target >= rows.start) & (target < rows.stop)
        inside &= (source >= columns.start) & (source < columns.stop)
        cell = rows.cell(target[inside]) * columns.number + columns.cell(source[inside])
        self.single += sign * torch.bincount(cell, minlength=len(self.single))

    def add_runs(self, target: Tensor, start: Tensor, stop: Tensor, sign: int = 1) -> None:
        """Add the edges from sources start .. stop - 1 to every target (or subtract them)."""
        rows, columns = self.row_cut, self.columns
        start = start.clamp(columns.start, columns.stop)
        stop = stop.clamp(columns.start, columns.stop)
        inside = (target >= rows.start) & (target < rows.stop) & (start < stop)
        row, bounds = rows.cell(target[inside]), columns.bounds()
        for end, end_sign in ((stop[inside], sign), (start[inside], -sign)):
            column = columns.cell(end)
            cell = row * (columns.number + 1) + column
            self.ends += end_sign * torch.bincount(cell, minlength=len(self.ends))
            # These are sums of integers far below 2^53, so float64 is exact.
            part = (end - bounds[column]).double()
            filled = torch.bincount(cell, weights=part, minlength=len(self.filled))
            self.filled += end_sign * filled.long()

    def add(self, structure: GraphStructure, t0: int = 0, s0: int = 0, sign: int = 1) -> None:
        """Add all edges of a structure whose first target is token `t0` and first source `s0`."""
        i = self.row_cut.rows(structure.num_targets, t0)
        if not len(i):
            return
        match structure:
            case Complete():
                zero = torch.zeros_like(i)
                self.add_runs(i + t0, zero + s0, zero + s0 + structure.sources, sign)
            case Band(dilation=1):
                N = structure.num_tokens
                start = (i - min(structure.before, N)).clamp(min=0)
                stop = (i + min(structure.after, N) + 1).clamp(max=N)
                self.add_runs(i + t0, start + s0, stop + s0, sign)
                if not structure.self_loops:
                    self.add_edges(i + t0, i + s0, -sign)
            case Band():
                self._add_dilated(structure, i, t0, s0, sign)
            case Section(whole=Complete()):
                zero = torch.zeros_like(i)
                self.add_runs(i + t0, zero + s0, zero + s0 + structure.num_sources, sign)
            case Section(whole=Band(dilation=1) as band):
                self._add_section(structure, band, i, t0, s0, sign)
            case Cycle(num_tokens=N, window=w):
                for lap in (-N, 0, N):
                    start, stop = (i - w + lap).clamp(0, N), (i + w + 1 + lap).clamp(0, N)
                    self.add_runs(i + t0, start + s0, stop + s0, sign)
                self.add_edges(i + t0, i + s0, -sign)
            case Blocks(num_tokens=N, shift=shift):
                size = min(structure.block_size, max(N, shift + 1))
                start = (i - shift).div(size, rounding_mode="floor") * size + shift
                stop = (start + size).clamp(max=N)
                self.add_runs(i + t0, start.clamp(min=0) + s0, stop + s0, sign)
            case Grid():
                self._add_grid(structure, i, t0, s0, sign)
            case GlobalTokens(num_tokens=N, tokens=tokens):
                global_tokens = torch.tensor(tokens, dtype=torch.int64)
                zero = torch.zeros_like(global_tokens)
                self.add_runs(global_tokens + t0, zero + s0, zero + s0 + N, sign)
                # All other targets see the global tokens only.
                others = self._per_row(i + t0) - self._per_row(global_tokens + t0)
                source = global_tokens + s0
                source = source[(source >= self.columns.start) & (source < self.columns.stop)]
                columns = torch.bincount(self.columns.cell(source), minlength=self.columns.number)
                self.single += sign * torch.outer(others, columns).view(-1)
            case Parts():
                pairs = zip(structure.target_ptr, structure.source_ptr, strict=True)
                for part, (t, s) in zip(structure.parts, pairs, strict=False):
                    self.add(part, t0 + t, s0 + s, sign)
            case Union():
                self._add_union(structure, t0, s0, sign)
            case _:
                for source, target in structure.pieces():
                    self.add_edges(target + t0, source + s0, sign)

    def _per_row(self, token: Tensor) -> Tensor:
        """Return how many of these tokens are in every row of cells."""
        rows = self.row_cut
        inside = token[(token >= rows.start) & (token < rows.stop)]
        return torch.bincount(rows.cell(inside), minlength=rows.number)

    def _add_section(
        self, section: Section, band: Band, i: Tensor, t0: int, s0: int, sign: int
    ) -> None:
        """Add the edges of a part of a band: shifted runs, cut off at the part's sources."""
        N, M, position = band.num_tokens, section.num_sources, i + section.shift
        start = (position - min(band.before, N)).clamp(0, M)
        stop = (position + min(band.after, N) + 1).clamp(0, M)
        self.add_runs(i + t0, start + s0, stop + s0, sign)
        if not band.self_loops:
            is_source = (position >= 0) & (position < M)
            self.add_edges(i[is_source] + t0, position[is_source] + s0, -sign)

    def _add_dilated(self, band: Band, i: Tensor, t0: int, s0: int, sign: int) -> None:
        """Add the edges of a dilated band, where each target sees every d-th source.

        A band with few hops is added hop by hop. For one with many hops, the sources before every
        column border are counted.
        """
        N, d = band.num_tokens, min(band.dilation, max(band.num_tokens, 1))
        before, after = (min(hops, max(N - 1, 0) // d) for hops in (band.before, band.after))
        if before + after <= self.columns.number:
            for hop in range(-before, after + 1):
                if hop or band.self_loops:
                    j = i + hop * d
                    inside = (j >= 0) & (j < N)
                    self.add_edges(i[inside] + t0, j[inside] + s0, sign)
            return
        # Columns outside 0 .. N - 1 have no source of this band.
        border = (self.columns.bounds() - s0).clamp(0, N)
        single = self.single.view(self.row_cut.number, self.columns.number)
        for tile in i.split(max(1, AT_ONCE // len(border))):
            hops = (border - 1 - tile[:, None]).div(d, rounding_mode="floor")
            counts = hops.clamp(-before - 1, after).diff(dim=1)
            single.index_add_(0, self.row_cut.cell(tile + t0), sign * counts)
        if not band.self_loops:
            self.add_edges(i + t0, i + s0, -sign)

    def _add_grid(self, grid: Grid, i: Tensor, t0: int, s0: int, sign: int) -> None:
        """Add the edges of windows on an image: one run for each row of pixels in a window."""
        lead, W = int(grid.class_token), grid.width
        pixel = i[i >= lead] - lead
        y, x = pixel // W, pixel % W
        reach = min(grid.radius, grid.height - 1)
        for dy in range(-reach, reach + 1):
            half = min(W, grid.radius if grid.metric == "chebyshev" else grid.radius - abs(dy))
            line = (y + dy) * W + lead + s0
            inside = (y + dy >= 0) & (y + dy < grid.height)
            start, stop = line + (x - half).clamp(min=0), line + (x + half + 1).clamp(max=W)
            target = pixel + lead + t0
            self.add_runs(target[inside], start[inside], stop[inside], sign)
        if lead:
            self.add_edges(pixel + lead + t0, torch.full_like(pixel, s0), sign)
            row = torch.tensor([t0])
            self.add_runs(row, row - t0 + s0, row - t0 + s0 + grid.num_targets, sign)

    def _add_union(self, union: Union, t0: int, s0: int, sign: int) -> None:
        """Add every part, and subtract the edges that an earlier part already has."""
        for k, part in enumerate(union.parts):
            self.add(part, t0, s0, sign)
            if k == 0:
                continue
            earlier = union_of(union.parts[:k])
            if isinstance(part, RandomSources) and part.base == earlier:
                continue  # These random edges are drawn outside the earlier parts.
            shared = intersection_of(part, earlier)
            if shared is not None:
                self.add(shared, t0, s0, -sign)
                continue
            smaller, larger = sorted((part, earlier), key=lambda either: either.num_edges())
            for source, target in smaller.pieces():
                in_both = larger.contains(target, source)
                self.add_edges(target[in_both] + t0, source[in_both] + s0, -sign)

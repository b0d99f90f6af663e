"""Complete blocks of a grid: the windows of Swin, shifted or not.

A block is a run of rows times a run of columns. So each axis has
:class:`~graphattn.graphs.structures.structure.Blocks`, and all results here are computed from the
blocks of the two axes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from graphattn.graphs.structures.structure import (
    Blocks,
    Device,
    GridOffsets,
    StructureByRows,
    masked_rows,
)
from graphattn.kernels.shared.stored import stores_results


@dataclass(frozen=True)
class GridBlocks(StructureByRows):
    """Tokens of a grid in row-major order; each sees its block of `block` (down, right) tokens.

    If `shift` is not 0, the first block along that axis ends at `shift`. The first and the last
    block may be cut.
    """

    height: int
    width: int
    block: tuple[int, ...]
    shift: tuple[int, ...] = (0, 0)

    @property
    def axes(self) -> tuple[Blocks, Blocks]:
        """The blocks down and across."""
        (tall, wide), (down, right) = self.block, self.shift
        return Blocks(self.height, tall, down), Blocks(self.width, wide, right)

    @property
    def num_targets(self) -> int:
        return self.height * self.width

    @property
    def offset_table(self) -> GridOffsets:
        tall, wide = self.block
        return GridOffsets((1 - tall, 1 - wide), (tall - 1, wide - 1), (1, 1))

    def offset_index(self, target: Tensor, source: Tensor) -> Tensor:
        tall, wide = self.block
        down = source // self.width - target // self.width
        right = source % self.width - target % self.width
        return (down + tall - 1) * (2 * wide - 1) + right + wide - 1

    def num_edges(self) -> int:
        down, across = (_pairs(axis) for axis in self.axes)
        return down * across

    def in_degree(self, device: Device = None) -> Tensor:
        down, across = (axis.in_degree(device) for axis in self.axes)
        return (down[:, None] * across).view(-1)

    def contains(self, target: Tensor, source: Tensor) -> Tensor:
        down, across = self.axes
        same = down.contains(target // self.width, source // self.width)
        return same & across.contains(target % self.width, source % self.width)

    def edges_of_rows(self, start: int, stop: int, device: Device = None) -> Tensor:
        cell = torch.arange(start, stop, device=device)
        (y, tall), (x, wide) = self._sources(cell)
        source = (y[:, :, None] * self.width + x[:, None]).flatten(1)
        return masked_rows(source, cell, (tall[:, :, None] & wide[:, None]).flatten(1))

    def _sources(self, cell: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the rows and the columns that cells may see, [n, most], each with a mask."""
        per_axis = []
        for axis, place in zip(self.axes, (cell // self.width, cell % self.width), strict=True):
            first, stop = axis._bounds(place)
            size = min(axis._size, axis.num_tokens)
            seen = first[:, None] + torch.arange(size, device=cell.device)
            per_axis.append((seen, seen < stop[:, None]))
        return per_axis

    def transpose(self) -> GridBlocks:
        return self


def _pairs(axis: Blocks) -> int:
    """Count the pairs of places on an axis that are in the same block."""
    size = axis.block_size
    first = min(axis.shift, axis.num_tokens)
    rest = axis.num_tokens - first
    full, last = rest // size, rest % size  # torch.compile has no divmod of symbolic sizes
    return first * first + full * size * size + last * last


@dataclass(frozen=True)
class EqualBlocks:
    """Blocks of one shape.

    Attributes:
        height, width: the size of each block.
        start: the place of the first token of the first block in the order of blocks.
        count: the number of blocks.
    """

    height: int
    width: int
    start: int
    count: int


class BlockOrder(NamedTuple):
    """An order of tokens in which every block is a run, and blocks of one shape are adjacent.

    Attributes:
        blocks: the blocks of every shape.
        tokens: [N], the token at every place.
        places: [N], the place of every token.
    """

    blocks: tuple[EqualBlocks, ...]
    tokens: Tensor
    places: Tensor


@stores_results(64)
def block_order(grid: GridBlocks, device: torch.device) -> BlockOrder:
    """Compute the order of tokens for operations on whole blocks; cached."""
    down, across = (_runs(axis) for axis in grid.axes)
    blocks, tokens_of_blocks, start = [], [], 0
    for height, tops in down.items():
        for width, lefts in across.items():
            y = torch.tensor(tops, device=device)[:, None, None, None]
            y = y + torch.arange(height, device=device)[:, None]
            x = torch.tensor(lefts, device=device)[:, None, None]
            x = x + torch.arange(width, device=device)
            tokens = (y * grid.width + x).flatten()  # [down, across, height, width]
            blocks.append(EqualBlocks(height, width, start, len(tops) * len(lefts)))
            tokens_of_blocks.append(tokens)
            start += len(tokens)
    tokens = torch.cat(tokens_of_blocks)
    return BlockOrder(tuple(blocks), tokens, tokens.argsort())


def _runs(axis: Blocks) -> dict[int, list[int]]:
    """List the first places of the blocks of one axis, by the length of the blocks."""
    borders = [0, *range(axis.shift or axis.block_size, axis.num_tokens, axis.block_size)]
    first_places: dict[int, list[int]] = {}
    for first, stop in zip(borders, [*borders[1:], axis.num_tokens], strict=True):
        first_places.setdefault(stop - first, []).append(first)
    return first_places

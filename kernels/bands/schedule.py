"""Schedule of the tiles and sequences of a band kernel's programs: index arrays, made once."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from graphattn.kernels.shared.stored import copied, stored

Side = Literal["targets", "sources"]


class BandSchedule:
    """The bands of a graph on one device.

    Args:
        sequences: [S, 8], int64, on the CPU: first target, number of targets, first source, number
            of sources, step, before, after, and hole. Target i of a sequence sees its sources from
            i - before to i + after; either may be negative. The hole is -2 times a hop (source
            minus target) that is left out: 0 where tokens do not see themselves. It is 1, which is
            odd and therefore no hop, where nothing is left out.
        device: where the kernels run; "meta" to look at launches without a device.
        origin: the row of a table of offsets that target i reads for source i.

    Example:
        >>> import torch
        >>> from graphattn.kernels.bands.schedule import BandSchedule
        >>> window = torch.tensor([[0, 40, 0, 40, 1, 8, 8, 1]])  # 40 tokens, 8 on each side
        >>> bands = BandSchedule(window, "cpu")
        >>> bands.tiles("targets", 16)  # sequence, first row
        tensor([[ 0, 16],
                [ 0,  0],
                [ 0, 32]], dtype=torch.int32)
        >>> bands.tile_pairs(16, 16)  # 24, 32 and 16 sources, 16 at a time
        5
    """

    def __init__(
        self, sequences: Tensor, device: torch.device | str, *, origin: int | None = None
    ) -> None:
        self.on_cpu, self.device, self.origin = sequences, torch.device(device), origin
        self.sequences = copied(sequences, self.device)
        self._tiles: dict[tuple[Side, int], Tensor] = {}
        self._ordered: dict[int, Tensor] = {}
        self._nearby_sources: dict[tuple[Side, int], Tensor] = {}
        _, targets, _, sources, step, before, after, hole = sequences.unbind(1)
        self.is_strided = bool((step != 1).any())
        self.has_holes = bool((hole != 1).any())
        sees_all = (before >= targets - 1) & (after >= sources - 1)
        self.is_complete = bool(sees_all.all()) and not self.has_holes
        # The most tokens of one side that a token of the other can have edges with.
        reach = torch.minimum(before + after + 1, torch.maximum(targets, sources))
        self.window = int(reach.max()) if len(reach) else 0

    def tiles(self, side: Side, rows: int) -> Tensor:
        """Int32 [tiles, 2], sequence and first row; the tiles with most to do come first."""

        def make() -> Tensor:
            return copied(self._in_order(side, rows).to(torch.int32), self.device)

        return stored(self._tiles, (side, rows), self.device, make)

    def tiles_in_order(self, rows: int) -> Tensor:
        """Tiles of targets, as :meth:`tiles`, but in the order of the sequences."""

        def make() -> Tensor:
            return copied(self._list_tiles("targets", rows)[0].to(torch.int32), self.device)

        return stored(self._ordered, rows, self.device, make)

    def nearby_sources(self, side: Side, rows: int) -> Tensor:
        """A source near every tile, and the first source of its sequence, int64 [2, tiles].

        Both are numbers of tokens among all M sources. For a tile of sources, the source is the
        tile's first. For a tile of targets it is a source that all of them see, if the window is
        long enough. It never comes after the last source that the tile's first target sees (if that
        sees any), so in a causal graph the rounding of a result does not depend on later tokens.
        """

        def make() -> Tensor:
            sequence, first = self._in_order(side, rows).unbind(1)
            _, count, start, others, step, before, after, _ = self.on_cpu[sequence].unbind(1)
            if side == "targets":
                last = torch.minimum(first + rows, count) - 1
                first = torch.minimum(torch.maximum(first, last - before), first + after)
                first = torch.minimum(first, others - 1).clamp(min=0)
            return copied(torch.stack([start + first * step, start]), self.device)

        return stored(self._nearby_sources, (side, rows), self.device, make)

    def tile_pairs(self, rows: int, columns: int, side: Side = "targets") -> int:
        """Number of pairs of a tile of one side and a tile of the other that kernels go over."""
        _, work = self._list_tiles(side, rows)
        return int(((work + columns - 1) // columns).sum())

    def part_pairs(self, rows: int, columns: int, side: Side = "targets") -> tuple[int, int, int]:
        """Number of pairs of tiles before, among and after those that need no mask.

        In these, all `rows` of the tile see all `columns`; `part_borders` of
        `kernels/bands/math.py` computes the same on the device.

        >>> window = torch.tensor([[0, 64, 0, 64, 1, 31, 0, 1]])  # causal: itself and 31 before
        >>> BandSchedule(window, "cpu").part_pairs(16, 16)  # 1, 2, 3 and 3 tiles of sources
        (2, 3, 4)
        """
        table, _ = self._list_tiles(side, rows)
        tokens, others, before, after = self._seen_from(side)
        sequence, first = table.unbind(1)
        tokens, others, before, after = (x[sequence] for x in (tokens, others, before, after))
        last = torch.minimum(first + rows, tokens) - 1
        begin = (first - before).clamp(min=0)
        end = torch.minimum(last + after + 1, others)

        def whole(count: Tensor) -> Tensor:  # tiles
            return (count.clamp(min=0) + columns - 1) // columns

        masked = torch.minimum(whole(last - before - begin), whole(end - begin))
        common_end = torch.minimum(first + after + 1, others)
        unmasked = (common_end - begin - masked * columns).clamp(min=0) // columns
        rest = whole(end - begin) - masked - unmasked
        return int(masked.sum()), int(unmasked.sum()), int(rest.sum())

    def _in_order(self, side: Side, rows: int) -> Tensor:
        table, work = self._list_tiles(side, rows)
        return table[work.argsort(descending=True, stable=True)]

    def _list_tiles(self, side: Side, rows: int) -> tuple[Tensor, Tensor]:
        """Tiles [tiles, 2], and how many tokens of the other side each has edges with [tiles]."""
        tokens, others, before, after = self._seen_from(side)
        count = (tokens + rows - 1) // rows
        sequence = torch.arange(len(tokens)).repeat_interleave(count)
        start = (count.cumsum(0) - count).repeat_interleave(count)
        first = (torch.arange(len(sequence)) - start) * rows
        last = torch.minimum(first + rows, tokens[sequence]) - 1
        low = (first - before[sequence]).clamp(min=0)
        high = torch.minimum(last + after[sequence] + 1, others[sequence])
        return torch.stack([sequence, first], dim=1), (high - low).clamp(min=0)

    def _seen_from(self, side: Side) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens of a side and of the other, and how far back and ahead it sees, [sequences]."""
        _, targets, _, sources, _, before, after, _ = self.on_cpu.unbind(1)
        if side == "targets":
            return targets, sources, before, after
        return sources, targets, after, before  # a source is seen from j - after to j + before

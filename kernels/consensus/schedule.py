"""The edges of a graph as the consensus kernels go over them: a bounded piece at a time.

Every edge has a message, and a place among the messages of its piece. In a window all targets have
the same moves (source minus target). The messages of one move are a run: its targets are
consecutive, and so are its sources, and no edge has to be listed. In other graphs a piece is a
stretch of the list of edges.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from graphattn.kernels.edges.schedule import EdgeSchedule
from graphattn.kernels.shared.stored import copied, stored


@dataclass
class Piece:
    """Some edges of a graph: `runs` runs of `count` places each.

    Without a list, each run has the targets first .. first + count - 1 and one of the `moves`.

    Attributes:
        targets, sources: int64 [count], the ends of listed edges (a source of -1 is no edge).
        moves: int64 [runs], source minus target, on the device.
        reach: the least and the largest of the moves.
        schedule: the listed edges by target and by source, for the sums at both ends.
    """

    count: int
    runs: int = 1
    first: int = 0
    targets: Tensor | None = None
    sources: Tensor | None = None
    moves: Tensor | None = None
    reach: tuple[int, int] = (0, 0)
    schedule: EdgeSchedule | None = None

    @property
    def places(self) -> int:
        """Number of messages of the piece."""
        return self.count * self.runs


@dataclass
class ConsensusSchedule:
    """A graph of N targets and M sources: either `moves` or `edge_index` is given.

    Args:
        num_targets, num_sources: N and M.
        moves: source minus target of the edges of every token, in ascending order.
        sequence: int32 [N], the sequence of a batch that each token is in; None: all are in one.
        edge_index: [2, E], int64: sources and targets, sorted by target; -1 is no source.
        device: where the kernels run.

    Example:
        >>> from graphattn.kernels.consensus.schedule import ConsensusSchedule
        >>> window = ConsensusSchedule(10, 10, moves=(-1, 1), device="cpu")
        >>> [(piece.first, piece.count, piece.runs) for piece in window.pieces(12)]
        [(0, 3, 2), (3, 3, 2), (6, 4, 2)]
    """

    num_targets: int
    num_sources: int
    device: torch.device | str
    moves: tuple[int, ...] = ()
    sequence: Tensor | None = None
    edge_index: Tensor | None = None
    _pieces: dict[int, Any] = field(default_factory=dict, repr=False)

    @property
    def places(self) -> int:
        """Number of messages of all edges."""
        if self.edge_index is not None:
            return self.edge_index.shape[1]
        return len(self.moves) * self.num_targets

    def pieces(self, places: int) -> list[Piece]:
        """All edges, in pieces of at most `places` messages if they can be cut so small."""
        # Pieces are stored by their size, which is that of the whole graph or a power of 2. So few
        # sizes are stored, whatever batches and dtypes the graph is used with.
        fits = places >= self.places
        places = self.places if fits else 1 << (max(places, 1).bit_length() - 1)

        def make() -> list[Piece]:
            return list(self._cut(places)) if self.places else []

        return stored(self._pieces, places, torch.device(self.device), make)

    def _cut(self, places: int) -> Iterator[Piece]:
        if self.edge_index is not None:
            for start, stop in _runs(self.edge_index.shape[1], places):
                part = self.edge_index[:, start:stop]
                schedule = EdgeSchedule(self.num_targets, self.num_sources, edge_index=part)
                yield Piece(stop - start, targets=part[1], sources=part[0], schedule=schedule)
            return
        if not self.moves:
            return
        for few in _runs(len(self.moves), places):  # some moves at a time if there are too many
            moves = self.moves[slice(*few)]
            on_device = copied(torch.tensor(moves), torch.device(self.device))
            for start, stop in _runs(self.num_targets, max(1, places // len(moves))):
                yield Piece(
                    stop - start, len(moves), start, moves=on_device, reach=(moves[0], moves[-1])
                )


def _runs(length: int, most: int) -> Iterator[tuple[int, int]]:
    """Borders of runs of at most `most` numbers, about equally long, that make up 0 .. length."""
    count = -(-length // most)
    for i in range(count):
        yield length * i // count, length * (i + 1) // count

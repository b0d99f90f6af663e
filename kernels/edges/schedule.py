"""Schedule of the edges that programs of an edge kernel take: index arrays, made on the device.

Nothing here waits for the device. Sizes follow from shapes, or are bounded by them: there are at
most E // LONGEST_SEGMENT more segments than rows, and rows of a table that are not needed are -1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphattn.kernels.shared.stored import stored

LONGEST_SEGMENT = 512  # edges of a segment; rows with more are split


class Rows(NamedTuple):
    """The edges of every token of one side, in rows (CSR), and the segments they are cut into.

    Attributes:
        others: [E], int32: the token at the other end of each edge (CSR's indices); -1 for none.
        edge_ids: [E], int64: which edge of the graph each is; None: the one at this place.
        whole: [rows, 4], int64: row, first edge, number of edges, -1; those with most come first.
        segments: [S, 4], int64: row, first edge, number of edges, and for rows that are split the
            number of the part, else -1. A row that does not exist is -1.
        split: [R, 3], int64: the rows that are split (or -1), their first part, and how many.
        num_parts: how many parts there may be.
        mean_degree: edges of a row.
    """

    others: Tensor
    edge_ids: Tensor | None
    whole: Tensor
    segments: Tensor
    split: Tensor
    num_parts: int
    mean_degree: float


class EdgeSchedule:
    """A graph as its kernels read it: by target, and for gradients of sources by source.

    Args:
        num_targets: N.
        num_sources: M.
        edge_index: [2, E], int64: sources and targets, sorted by target.
        neighbors: in place of it (exactly one is given) a table [N, k], int64: the sources of every
            target, -1 for none.

    Example:
        >>> import torch
        >>> from graphattn.kernels.edges.schedule import EdgeSchedule
        >>> schedule = EdgeSchedule(3, 2, edge_index=torch.tensor([[0, 1, 1], [0, 0, 2]]))
        >>> schedule.by_target.whole  # row, first edge, number of edges
        tensor([[ 0,  0,  2, -1],
                [ 2,  2,  1, -1],
                [ 1,  2,  0, -1]])
        >>> schedule.by_source.others
        tensor([0, 0, 2], dtype=torch.int32)
    """

    def __init__(
        self,
        num_targets: int,
        num_sources: int,
        *,
        edge_index: Tensor | None = None,
        neighbors: Tensor | None = None,
    ) -> None:
        self.num_targets, self.num_sources = num_targets, num_sources
        self.edge_index, self.neighbors = edge_index, neighbors
        self._stored: dict[str, Any] = {}

    @property
    def num_edges(self) -> int:
        """Entries of the list or table, E."""
        return self._sources.numel()

    @property
    def device(self) -> torch.device:
        """The device of the edges, and of all tables."""
        return self._sources.device

    @property
    def _sources(self) -> Tensor:
        if self.neighbors is not None:
            return self.neighbors.flatten()
        assert self.edge_index is not None
        return self.edge_index[0]

    @property
    def by_target(self) -> Rows:
        """The edges by target: row i has the sources that target i sees."""
        return stored(self._stored, "by_target", self.device, self._by_target)

    @property
    def by_source(self) -> Rows:
        """The edges by source: row j has the targets that see source j."""
        return stored(self._stored, "by_source", self.device, self._by_source)

    @property
    def _edge_ids(self) -> Tensor | None:
        """Return the number of the edge of a table's entries, [E]: empty ones take none. None: an
        edge's id is its place.
        """
        return stored(self._stored, "edge_ids", self.device, self._counted)

    def _counted(self) -> Tensor | None:
        return None if self.neighbors is None else (self._sources >= 0).cumsum(0) - 1

    def _by_target(self) -> Rows:
        N, device = self.num_targets, self._sources.device
        if self.neighbors is not None:
            k = self.neighbors.shape[1]
            count = torch.full((N,), k, device=device)
            first = torch.arange(N, device=device) * k
            return _rows(self._sources, self._edge_ids, first, count, longest=k)
        assert self.edge_index is not None
        first = torch.searchsorted(self.edge_index[1], torch.arange(N + 1, device=device))
        longest = min(self.num_edges, self.num_sources)
        return _rows(self._sources, self._edge_ids, first[:-1], first.diff(), longest=longest)

    def _by_source(self) -> Rows:
        sources = self._sources
        if self.neighbors is not None:
            k = max(self.neighbors.shape[1], 1)
            targets = torch.arange(self.num_edges, device=sources.device) // k
        else:
            assert self.edge_index is not None
            targets = self.edge_index[1]
        sources, order = sources.sort(stable=True)  # empty entries (-1) come first, in no row
        first = torch.searchsorted(
            sources, torch.arange(self.num_sources + 1, device=sources.device)
        )
        longest = min(self.num_edges, self.num_targets)
        ids = self._edge_ids
        edges = order if ids is None else ids[order]
        return _rows(targets[order], edges, first[:-1], first.diff(), longest=longest)


def _rows(
    others: Tensor, edges: Tensor | None, first: Tensor, count: Tensor, *, longest: int
) -> Rows:
    """Rows from others [E], edge ids [E], and every row's first edge and number of edges [rows].

    No row has more than `longest` edges.
    """
    rows, E = len(count), len(others)
    order = count.argsort(descending=True, stable=True)
    first, count = first[order], count[order]
    whole = torch.stack([order, first, count, torch.full_like(order, -1)], dim=1)
    segments, split, num_parts = whole, whole[:0, :3], 0
    if longest > LONGEST_SEGMENT and rows:
        segments, split = _split(
            order, first, count, rows + E // LONGEST_SEGMENT, E // LONGEST_SEGMENT
        )
        # A split row has at least one full part, and at most one that is not full.
        num_parts = 2 * (E // LONGEST_SEGMENT)
    mean = E / rows if rows else 0.0
    return Rows(others.to(torch.int32), edges, whole, segments, split, num_parts, mean)


def _split(
    row: Tensor, first: Tensor, count: Tensor, most_segments: int, most_split: int
) -> tuple[Tensor, Tensor]:
    """Segments of at most LONGEST_SEGMENT edges of rows, longest first; and which rows are cut."""
    parts = ((count + LONGEST_SEGMENT - 1) // LONGEST_SEGMENT).clamp(min=1)
    end = parts.cumsum(0)
    segment = torch.arange(most_segments, device=row.device)
    place = torch.searchsorted(end, segment, right=True)
    beyond, place = place >= len(row), place.clamp(max=len(row) - 1)
    done = (segment - (end - parts)[place]) * LONGEST_SEGMENT
    # Rows come longest first, so the segments of split rows come first, and the number of such a
    # segment can be the number of its part.
    segments = torch.stack(
        [
            torch.where(beyond, -1, row[place]),
            first[place] + done,
            torch.where(beyond, 0, (count[place] - done).clamp(max=LONGEST_SEGMENT)),
            torch.where((parts[place] > 1) & ~beyond, segment, -1),
        ],
        dim=1,
    )
    split = torch.stack([torch.where(parts > 1, row, -1), end - parts, parts], dim=1)
    return segments, split[:most_split]

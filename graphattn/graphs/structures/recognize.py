"""Recognition of structures from rows that are runs of sources: windows, blocks, batches."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from graphattn.graphs.structures.composites import Parts, Union
from graphattn.graphs.structures.structure import Band, Blocks, Complete, GraphStructure

MOST_PARTS = 4096  # the most sequences of a batch that is recognised


@dataclass(frozen=True)
class ListedRows:
    """Rows of a graph: row i has every `step`-th source from ``first[i]`` to ``last[i]``.

    The row is empty if ``last[i] < first[i]``. Without `loops`, no token sees itself.
    """

    first: Tensor
    last: Tensor
    step: int
    loops: bool
    num_sources: int

    @classmethod
    def all_of(cls, num_targets: int, num_sources: int, device: torch.device) -> ListedRows:
        """Make rows in which every target sees every source."""
        first = torch.zeros(num_targets, dtype=torch.int64, device=device)
        return cls(first, torch.full_like(first, num_sources - 1), 1, True, num_sources)

    def of(self, rows: Tensor) -> Tensor:
        """Make the mask of some rows, bool [n, M]."""
        first, last = self.first[rows, None], self.last[rows, None]
        source = torch.arange(self.num_sources, device=rows.device)
        inside = (source >= first) & (source <= last)
        if self.step > 1:
            inside &= source % self.step == first % self.step  # slow, so only if it is needed
        return inside if self.loops else inside & (source != rows[:, None])


def structure_of_rows(rows: ListedRows) -> GraphStructure | None:
    """Find the structure with exactly these rows; None if no known structure has them."""
    N, M = len(rows.first), rows.num_sources
    everything = bool((rows.first == 0).all() and (rows.last == M - 1).all())
    if everything and rows.step == 1 and rows.loops and max(N, M) > 1:
        return Complete(N, M)
    if N != M:
        return None
    structure = _one_sequence(rows.first, rows.last, rows)
    if structure is None and rows.step == 1 and rows.loops:
        structure = _blocks(rows.first, rows.last)
    return _side_by_side(rows) if structure is None else structure


def _one_sequence(first: Tensor, last: Tensor, rows: ListedRows) -> GraphStructure | None:
    """Recognise a band, a complete graph, no edges, or a prefix that all see and causal tokens."""
    N, step = len(first), rows.step
    i = torch.arange(N, device=first.device)
    if bool((last < first).all()):
        return Band(N, 0, 0, 1, self_loops=False)
    before, after = (int((x // step).max()) for x in (i - first, last - i))
    left, right = i // step, (N - 1 - i) // step
    if before >= 0 and after >= 0:
        same = (first == i - step * left.clamp(max=before)).all()
        if bool(same and (last == i + step * right.clamp(max=after)).all()):
            # A single token is not complete but causal.
            if step == 1 and rows.loops and before == after == N - 1 > 0:
                return Complete(N, N)
            return Band(N, before, after, step, rows.loops)
    prefix = int(last[0]) + 1
    if (
        step == 1
        and rows.loops
        and bool((first == 0).all() and (last == i.clamp(min=prefix - 1)).all())
    ):
        everything = Complete(prefix, prefix), Band(N - prefix, 0, 0)
        return Union((Band(N, N - 1, 0), Parts(everything)))
    return None


def _blocks(first: Tensor, last: Tensor) -> GraphStructure | None:
    """Recognise blocks of one size, of which the first and the last may be cut."""
    N = len(first)
    size = int((last - first).max()) + 1
    shift = (int(last[0]) + 1) % size
    blocks = Blocks(N, size, shift)
    start, stop = blocks._bounds(torch.arange(N, device=first.device))
    return blocks if bool((first == start).all() and (last == stop - 1).all()) else None


def _side_by_side(rows: ListedRows) -> GraphStructure | None:
    """Recognise sequences without edges between them; consecutive empty rows are one sequence."""
    N = len(rows.first)
    i = torch.arange(N, device=rows.first.device)
    empty = rows.last < rows.first
    first, last = torch.where(empty, i, rows.first), torch.where(empty, i, rows.last)
    # There is a border before token c if no token before c sees c or a later one, and no token
    # from c on sees one before c.
    ahead = last.cummax(0).values[:-1]
    back = first.flip(0).cummin(0).values.flip(0)[1:]
    border = (ahead < i[1:]) & (back >= i[1:]) & ~(empty[1:] & empty[:-1])
    starts = [0, *(border.nonzero()[:, 0] + 1).tolist(), N]
    if len(starts) - 1 > MOST_PARTS or len(starts) < 3:
        return None
    parts: list[GraphStructure] = []
    for start, stop in pairwise(starts):
        part = _one_sequence(rows.first[start:stop] - start, rows.last[start:stop] - start, rows)
        if part is None:
            return None
        parts.append(part)
    return Parts(tuple(parts))

"""Runs of tokens of all ranks at once, as three tensors: no loop over ranks, no matrix of ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from graphattn.distributed.seen import Run


class RunTable(NamedTuple):
    """Run k of rank ``rank[k]`` has the tokens start[k] .. stop[k] - 1; all are LongTensors [n].

    Example:
        >>> from graphattn.distributed.planning.run_tables import RunTable
        >>> table = RunTable.of_runs([(1, (0, 4)), (0, (7, 9)), (1, (4, 6))])
        >>> table.joined(10).by_rank()
        [(0, [(7, 9)]), (1, [(0, 6)])]
        >>> table.counted(2)
        tensor([2, 6])
    """

    rank: Tensor
    start: Tensor
    stop: Tensor

    @classmethod
    def of_runs(cls, runs: Iterable[tuple[int, Run]]) -> RunTable:
        """Make a table of pairs of a rank and a run."""
        rows = [(rank, start, stop) for rank, (start, stop) in runs]
        return cls(*torch.tensor(rows, dtype=torch.int64).view(-1, 3).T.contiguous())

    @classmethod
    def of_tokens(cls, rank: Tensor, token: Tensor) -> RunTable:
        """Make a table of pairs of a rank and a token; consecutive tokens become one run."""
        first = torch.ones(len(rank), dtype=torch.bool)
        first[1:] = (rank.diff() != 0) | (token.diff() != 1)
        return cls(rank[first], token[first], token[_lasts(first)] + 1)

    @classmethod
    def concatenated(cls, tables: Iterable[RunTable]) -> RunTable:
        """Put the runs of several tables into one, in which they may overlap."""
        return cls(*map(torch.cat, zip(*tables, strict=True)))

    def joined(self, num_tokens: int) -> RunTable:
        """Join what overlaps or touches; runs are then disjoint, in order of ranks and tokens."""
        # Every rank gets a line of tokens of its own, so one running maximum serves all of them.
        line = self.rank * (num_tokens + 1)
        start, order = (self.start + line).sort()
        stop = (self.stop + line)[order].cummax(0).values
        first = torch.ones(len(start), dtype=torch.bool)
        first[1:] = start[1:] > stop[:-1]
        rank = self.rank[order][first]
        line = rank * (num_tokens + 1)
        return RunTable(rank, start[first] - line, stop[_lasts(first)] - line)

    def cut(self, low: Tensor | int, high: Tensor | int) -> RunTable:
        """Keep of run k the tokens low[k] .. high[k] - 1, and leave out runs without tokens."""
        start, stop = self.start.clamp(min=low), self.stop.clamp(max=high)
        kept = start < stop
        return RunTable(self.rank[kept], start[kept], stop[kept])

    def without(self, low: Tensor, high: Tensor) -> RunTable:
        """Take the tokens low[k] .. high[k] - 1 out of run k."""
        return RunTable.concatenated(
            [self.cut(0, low), self.cut(high, torch.iinfo(torch.int64).max)]
        )

    def counted(self, ranks: int) -> Tensor:
        """Count the tokens of every rank, with repetitions, [ranks]."""
        return torch.zeros(ranks, dtype=torch.int64).index_add(0, self.rank, self.stop - self.start)

    def counted_between(self, borders: Tensor) -> Tensor:
        """Count the tokens between consecutive borders, over all runs, [len(borders) - 1]."""
        return (_sum_of_steps(self.start, borders) - _sum_of_steps(self.stop, borders)).diff()

    def by_rank(self) -> list[tuple[int, list[Run]]]:
        """List the ranks that have runs, each with its runs."""
        runs: dict[int, list[Run]] = {}
        for rank, start, stop in zip(*(column.tolist() for column in self), strict=True):
            runs.setdefault(rank, []).append((start, stop))
        return list(runs.items())


def _lasts(first: Tensor) -> Tensor:
    """Return the places of the last items of groups, given where each group begins (bool)."""
    starts = first.nonzero().flatten()
    return torch.cat([starts[1:], starts.new_tensor([len(first)])[: len(starts)]]) - 1


def _sum_of_steps(at: Tensor, borders: Tensor) -> Tensor:
    """Sum max(border - at[k], 0) over k, for every border."""
    at = at.sort().values
    count = torch.searchsorted(at, borders)
    sums = torch.cat([at.new_zeros(1), at.cumsum(0)])
    return count * borders - sums[count]

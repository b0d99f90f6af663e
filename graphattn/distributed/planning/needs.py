"""Rows that ranks need, and numbers of their edges, read from a graph.

The runs of all ranks stand in tables of three tensors: no loop over ranks, no matrix of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from graphattn.distributed.layout import Layout
from graphattn.distributed.seen import Run, seen_by, without
from graphattn.graphs.structures.composites import Parts, Section, Union
from graphattn.graphs.structures.structure import (
    Band,
    Blocks,
    Complete,
    Cycle,
    GlobalTokens,
    GraphStructure,
)
from graphattn.graphs.token_graph import TokenGraph


class RunTable(NamedTuple):
    """Run k of rank ``rank[k]`` has the tokens start[k] .. stop[k] - 1; all are LongTensors [n].

    Example:
        >>> from graphattn.distributed.planning.needs import RunTable
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


def remote_runs(
    graph: TokenGraph,
    targets: Layout,
    sources: Layout,
    both: bool,
    left_out: tuple[int, ...] = (),
) -> RunTable:
    """Return the runs of sources that every rank needs and does not own, joined.

    If `both`, a rank also needs the targets that see its sources. No sources travel for the targets
    that are `left_out`.
    """
    # An empty table comes first, since there may be no edges at all.
    tables = [RunTable.of_runs([]), *_seen(graph, targets, sources, both, left_out)]
    needs = RunTable.concatenated(tables).joined(graph.num_sources)
    needs = without_own(needs, torch.arange(sources.ranks), sources, sources.borders())
    return needs.joined(graph.num_sources)


def without_own(table: RunTable, rank: Tensor, sources: Layout, borders: Tensor) -> RunTable:
    """Take what a rank owns itself out of the runs of every item of a table.

    Args:
        table: runs of tokens, or of whatever else lies in chunks; `table.rank` counts its items.
        rank: LongTensor, the rank of every item.
        sources: who owns the chunks.
        borders: LongTensor [chunks + 1], where the chunks begin, in the numbers of the runs.
    """
    for numbers in (rank, sources.num_chunks - 1 - rank) if sources.zigzag else (rank,):
        chunk = numbers[table.rank]
        table = table.without(borders[chunk], borders[chunk + 1])
    return table


def edges_per_rank(graph: TokenGraph, targets: Layout) -> Tensor:
    """Count the edges that lead to the targets of every rank, a LongTensor [ranks]."""
    return targets.per_rank(_edges_before(graph, targets.borders()).diff())


def _seen(
    graph: TokenGraph, targets: Layout, sources: Layout, both: bool, left_out: tuple[int, ...]
) -> Iterator[RunTable]:
    """Yield runs that together are all sources that every rank needs, some of them its own."""
    structure = graph.structure
    for part in structure.parts if isinstance(structure, Union) else (structure,):
        if part is not None and _has_runs(part):
            flipped = part.transpose() if both else part
            for seen in (part, flipped) if flipped != part else (part,):
                assert seen is not None  # A structure with runs has a transpose.
                whole = TokenGraph(structure=seen)
                yield RunTable.of_runs(
                    (rank, sources_seen)
                    for rank in range(targets.ranks)
                    for run in without(targets.runs(rank), left_out)
                    for sources_seen in seen_by(whole, run.start, run.stop)
                )
            continue
        for source, target in _pieces(graph, part):
            receiver, sender = targets.owner(target), sources.owner(source)
            remote = receiver != sender
            if left_out:
                remote &= ~torch.isin(target, torch.tensor(left_out))
            yield RunTable.of_tokens(receiver[remote], source[remote])
            if both:
                yield RunTable.of_tokens(sender[remote], target[remote])


def _has_runs(structure: GraphStructure) -> bool:
    """Whether :func:`seen_by` lists no edges of this structure."""
    match structure:
        case Section():
            return _has_runs(structure.whole)
        case Union() | Parts():
            return all(map(_has_runs, structure.parts))
    return isinstance(structure, Band | Blocks | Complete | Cycle | GlobalTokens)


def _pieces(graph: TokenGraph, part: GraphStructure | None) -> Iterator[Tensor]:
    """Yield the edges of a part of a graph, or of a graph without a structure, in pieces."""
    if part is not None:
        yield from part.pieces()
    elif (table := graph.compact_neighbors) is not None:
        table = table.cpu().long()
        target, place = (table >= 0).nonzero().T
        yield torch.stack([table[target, place], target])
    else:
        yield graph.compact_edges.cpu().long()


def _edges_before(graph: TokenGraph, targets: Tensor) -> Tensor:
    """Count the edges of the targets before each of some targets."""
    structure = graph.structure
    match structure:
        case Complete() | Band(dilation=1):  # in closed form
            stops, M = targets.tolist(), graph.num_sources
            return torch.tensor([Section(structure, 0, stop, 0, M).num_edges() for stop in stops])
    if structure is not None:
        degree = structure.in_degree()
    elif (table := graph.compact_neighbors) is not None:
        degree = (table >= 0).sum(1).cpu()
    else:
        return graph.compact_rowptr.cpu().long()[targets]
    return torch.cat([degree.new_zeros(1), degree.cumsum(0)])[targets]

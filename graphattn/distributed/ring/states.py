"""States that linear attention sends in place of rows, and who needs which of them.

A state is what a target takes from a run of sources that it sees as a whole: the sums of
k_j v_j^T and of k_j (Transformers are RNNs, Eq. 5-6; LASP-2 gathers such states). Where a border
between ranks cuts a causal or complete graph, or a batch of those, each target of one rank sees
either all of a run of sources of another rank, or nothing of it. Such a run is a *piece* here: the
sources of one sequence in one chunk of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphattn.distributed.exchange import RowExchange
from graphattn.distributed.layout import Layout
from graphattn.distributed.planning.needs import without_own
from graphattn.distributed.planning.run_tables import RunTable
from graphattn.distributed.seen import Run, common, count, joined
from graphattn.graphs.builders.windows import bipartite_complete_graph
from graphattn.graphs.edges.stored_values import made_for_training
from graphattn.graphs.token_graph import TokenGraph
from graphattn.ops.linear_attention.intervals import runs_of


class StateGroup(NamedTuple):
    """Targets start .. stop - 1 of a rank, which see the same states.

    `rows` are the places of these states among those that arrive, a LongTensor.
    """

    start: int
    stop: int
    rows: Tensor


@dataclass(frozen=True, eq=False)
class StatesOfRank:
    """The states that one rank computes and exchanges.

    Attributes:
        pieces: runs among the sources of the rank whose states others need. A single empty run
            stands for none.
        exchange: sends these states, and receives those of others.
        groups: all targets of the rank, in order.
    """

    pieces: tuple[Run, ...]
    exchange: RowExchange
    groups: tuple[StateGroup, ...]
    _graphs: dict[int, tuple[TokenGraph, ...]] = field(default_factory=dict)

    def graphs(self, features: int) -> tuple[TokenGraph, ...]:
        """Return, for every group, the graph in which its targets see all features of a state."""
        if features not in self._graphs:
            self._make_graphs(features)
        return self._graphs[features]

    @made_for_training
    def _make_graphs(self, features: int) -> None:
        self._graphs[features] = tuple(
            bipartite_complete_graph(stop - start, features).to(rows.device)
            for start, stop, rows in self.groups
        )


@dataclass(frozen=True, eq=False)
class StatePlan:
    """Plan of the states that all ranks exchange; :func:`plan_of_states` makes it.

    Attributes:
        targets, sources: who owns the targets and the sources.
        pieces: runs of sources in ascending order, each with its owner.
        groups: runs of targets, each with its owner. The same targets may occur twice.
        seen: LongTensors, the first piece that a group sees, and the one after the last. Those of
            its own rank do not travel.
        needs: for every rank, the pieces whose states it receives.
    """

    targets: Layout
    sources: Layout
    pieces: RunTable
    groups: RunTable
    seen: tuple[Tensor, Tensor]
    needs: RunTable

    @cached_property
    def borders(self) -> Tensor:
        """The first piece of every chunk of sources, and the number of pieces."""
        return torch.searchsorted(self.pieces.start, self.sources.borders())

    @cached_property
    def received(self) -> Tensor:
        """How many states each rank receives, a LongTensor [ranks]."""
        return self.needs.counted(self.sources.ranks)

    @cached_property
    def sent(self) -> Tensor:
        """How many states each rank sends, a LongTensor [ranks]; one counts for every receiver."""
        return self.sources.per_rank(self.needs.counted_between(self.borders))

    def of_rank(self, rank: int, group: Any, device: torch.device) -> StatesOfRank:
        """Return the part of one rank.

        Args:
            rank: the rank.
            group: the process group.
            device: the device of its tokens.
        """
        ranks, needs = self.sources.ranks, dict(self.needs.by_rank())
        owned = [self._owned(other) for other in range(ranks)]
        leaving = [common(needs.get(other, []), owned[rank]) for other in range(ranks)]
        arriving = [common(needs.get(rank, []), owned[other]) for other in range(ranks)]
        asked = _numbers(joined(run for runs in leaving for run in runs))
        place = {piece: i for i, piece in enumerate(asked)}
        there = {piece: i for i, piece in enumerate(p for runs in arriving for p in _numbers(runs))}
        exchange = RowExchange(
            group=group,
            send=_long([place[piece] for runs in leaving for piece in _numbers(runs)], device),
            sent=tuple(map(count, leaving)),
            received=tuple(map(count, arriving)),
            total=int(self.received.sum()),
        )
        pieces = [
            _among(self.sources.runs(rank), (int(self.pieces.start[p]), int(self.pieces.stop[p])))
            for p in asked
        ]
        return StatesOfRank(tuple(pieces) or ((0, 0),), exchange, self._groups(rank, there, device))

    def _owned(self, rank: int) -> list[range]:
        """Return the pieces of a rank, one run per chunk."""
        chunks, borders = self.sources.num_chunks, self.borders
        own = (rank, chunks - 1 - rank) if self.sources.zigzag else (rank,)
        return [range(int(borders[chunk]), int(borders[chunk + 1])) for chunk in own]

    def _groups(
        self, rank: int, there: dict[int, int], device: torch.device
    ) -> tuple[StateGroup, ...]:
        """Return the groups of a rank, and between them the targets that see no other rank."""
        rows: dict[Run, list[int]] = {}
        of_rank = (self.groups.rank == rank).nonzero().flatten()
        columns = (self.groups.start, self.groups.stop, *self.seen)
        for start, stop, first, last in zip(*(x[of_rank].tolist() for x in columns), strict=True):
            places = rows.setdefault((start, stop), [])
            places += [there[piece] for piece in range(first, last) if piece in there]
        groups = []
        for run in self.targets.runs(rank):
            at = run.start
            for start, stop in (*sorted(common(sorted(rows), (run,))), (run.stop, run.stop)):
                between: Run = at, start
                for part in (between, (start, stop)):
                    if part[0] < part[1]:
                        own = _among(self.targets.runs(rank), part)
                        groups.append(StateGroup(*own, _long(rows.get(part, []), device)))
                at = stop
        return tuple(groups)


def plan_of_states(graph: TokenGraph, targets: Layout, sources: Layout) -> StatePlan | None:
    """Plan the states that ranks exchange, from the structure of the graph; no edge is listed.

    The result is None if some targets of one rank see parts of a piece of another rank, as in
    windows, or if the graph does not consist of intervals.

    Example:
        >>> import graphattn as ga
        >>> from graphattn.distributed.layout import Layout
        >>> from graphattn.distributed.ring.states import plan_of_states
        >>> thirds = Layout(300, ranks=3)
        >>> plan_of_states(ga.causal_graph(300), thirds, thirds).received
        tensor([0, 1, 2])
        >>> plan_of_states(ga.causal_window_graph(300, 8), thirds, thirds) is None
        True
    """
    runs = graph.derived(runs_of, lambda: runs_of(graph.structure))
    if runs is None:
        return None
    rows = [(run.times, *run.intervals[0][:2]) for run in runs]
    times, n, m = torch.tensor(rows, dtype=torch.int64).view(-1, 3).T
    n, m = n.repeat_interleave(times), m.repeat_interleave(times)
    t0, s0 = n.cumsum(0) - n, m.cumsum(0) - m  # where the sequences begin
    crossing = _crosses(t0, n, s0, m, targets, sources)
    n, m, t0, s0 = n[crossing], m[crossing], t0[crossing], s0[crossing]
    _, chunk, start, stop = sources.cut_at_chunks(s0, s0 + m)
    pieces = RunTable(sources.rank_of(chunk), start, stop)
    borders = torch.searchsorted(start, sources.borders())

    sequence, chunk, start, stop = targets.cut_at_chunks(t0, t0 + n)
    rank = targets.rank_of(chunk)
    groups, seen = [RunTable.of_runs([])], [RunTable.of_runs([])]
    for number in range(max((len(run.intervals) for run in runs), default=0)):
        ends = [(*run.intervals, (0, 0, 0, -1))[min(number, len(run.intervals))] for run in runs]
        bounds = torch.tensor([end[2:] for end in ends], dtype=torch.int64).view(-1, 2)
        low, high = bounds.repeat_interleave(times, dim=0)[crossing][sequence].T
        a, b = start - t0[sequence], stop - 1 - t0[sequence]  # the first and the last target
        before, after = s0[sequence], s0[sequence] + m[sequence] - 1
        # The sources that any target of a group sees, and those that all of them see.
        any_low, any_high = _clamped(a + low, b + high, before, after)
        all_low, all_high = _clamped(b + low, a + high, before, after)
        first = torch.searchsorted(pieces.stop, any_low, right=True)
        last = torch.searchsorted(pieces.start, any_high, right=True)
        whole_first = torch.searchsorted(pieces.start, all_low).clamp(max=last)
        whole_last = torch.searchsorted(pieces.stop, all_high + 1, right=True).maximum(first)
        some = (low <= high) & (any_low <= any_high)
        item = torch.arange(len(rank))[some]
        sides = [
            RunTable(item, first[some], whole_first[some]),
            RunTable(item, whole_last[some], last[some]),
        ]
        partly = RunTable.concatenated(side.cut(0, len(pieces.start)) for side in sides)
        if len(without_own(partly, rank, sources, borders).rank):
            return None
        is_seen = some & (whole_first < whole_last)
        groups.append(RunTable(rank[is_seen], start[is_seen], stop[is_seen]))
        seen.append(RunTable(rank[is_seen], whole_first[is_seen], whole_last[is_seen]))
    of_ranks = RunTable.concatenated(seen)
    needs = of_ranks.joined(len(pieces.start))
    needs = without_own(needs, torch.arange(sources.ranks), sources, borders).joined(
        len(pieces.start)
    )
    return StatePlan(
        targets=targets,
        sources=sources,
        pieces=pieces,
        groups=RunTable.concatenated(groups),
        seen=(of_ranks.start, of_ranks.stop),
        needs=needs,
    )


def _crosses(
    t0: Tensor, n: Tensor, s0: Tensor, m: Tensor, targets: Layout, sources: Layout
) -> Tensor:
    """Mark the sequences that have tokens in more than one chunk, or on more than one rank."""
    there = (n > 0) & (m > 0)
    ends = [targets.chunk_of(x) for x in (t0, t0 + n - 1)]
    ends += [sources.chunk_of(x) for x in (s0, s0 + m - 1)]
    first_rank, second_rank = targets.rank_of(ends[0]), sources.rank_of(ends[2])
    return there & ((ends[0] != ends[1]) | (ends[2] != ends[3]) | (first_rank != second_rank))


def _clamped(low: Tensor, high: Tensor, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """Number sources of a sequence as those of the graph, and cut to before .. after."""
    return (low + before).maximum(before), (high + before).minimum(after)


def _numbers(runs: list[Run]) -> list[int]:
    return [number for start, stop in runs for number in range(start, stop)]


def _among(own: tuple[range, ...], run: Run) -> Run:
    """Number the tokens of a run as a rank numbers those that it owns."""
    before = 0
    for of_chunk in own:
        if of_chunk.start <= run[0] < of_chunk.stop:
            break
        before += len(of_chunk)
    return run[0] - of_chunk.start + before, run[1] - of_chunk.start + before


def _long(numbers: list[int], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device)

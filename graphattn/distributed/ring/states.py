"""States that linear attention sends in place of rows: who needs which of them, and their sums.

A state is what a target takes from a run of sources that it sees as a whole: the sums of
k_j v_j^T and of k_j (Transformers are RNNs, Eq. 5-6; LASP-2 gathers such states). Where a border
between ranks cuts a causal or complete graph, or a batch of those, each target of one rank sees
either all of a run of sources of another rank, or nothing of it. Such a run is a *piece* here: the
sources of one sequence in one chunk of tokens.

The states that a group of targets sees add up to one, and a product of their queries with it gives
what all sources of other ranks add. Edges within a rank are computed as on a ring. Everything is
differentiated by autograd, so there are second derivatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphattn.distributed.exchange import RowExchange
from graphattn.distributed.layout import Layout
from graphattn.distributed.planning.needs import RunTable, without_own
from graphattn.distributed.ring.operations import Given, LinearParts, Tensors
from graphattn.distributed.ring.passes import in_order, over_own_sources
from graphattn.distributed.ring.rounds import RingRound
from graphattn.distributed.seen import Run, common, count, joined
from graphattn.graphs.builders.windows import bipartite_complete_graph
from graphattn.graphs.edges.stored_values import made_for_training
from graphattn.graphs.token_graph import TokenGraph
from graphattn.ops.inputs import clear_invalid, full_precision, repeat_heads
from graphattn.ops.linear_attention.api import by_head
from graphattn.ops.linear_attention.intervals import runs_of
from graphattn.ops.linear_attention.operators import linear_sums


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
        """Return the part of one rank, whose tokens are on a device."""
        ranks, needs = self.sources.ranks, dict(self.needs.by_rank())
        owned = [self._owned(other) for other in range(ranks)]
        leaving = [common(needs.get(other, []), owned[rank]) for other in range(ranks)]
        arriving = [common(needs.get(rank, []), owned[other]) for other in range(ranks)]
        asked = _numbers(joined(run for runs in leaving for run in runs))
        place = {piece: i for i, piece in enumerate(asked)}
        there = {piece: i for i, piece in enumerate(p for runs in arriving for p in _numbers(runs))}
        send = [_long([place[piece] for piece in _numbers(runs)], device) for runs in leaving]
        received, total = [*map(count, arriving)], int(self.received.sum())
        exchange = RowExchange.of_lists(send, received, total, group=group, device=device)
        pieces = [
            _among(self.sources.runs(rank), (int(self.pieces.start[p]), int(self.pieces.stop[p])))
            for p in asked
        ]
        return StatesOfRank(tuple(pieces) or ((0, 0),), exchange, self._groups(rank, there, device))

    def _owned(self, rank: int) -> list[range]:
        """Return the pieces of a rank, one run per chunk."""
        chunks, borders = self.sources.num_chunks, self.borders
        numbers = (rank, chunks - 1 - rank) if self.sources.zigzag else (rank,)
        return [range(int(borders[chunk]), int(borders[chunk + 1])) for chunk in numbers]

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
                        within = _among(self.targets.runs(rank), part)
                        groups.append(StateGroup(*within, _long(rows.get(part, []), device)))
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


def _among(runs: tuple[range, ...], run: Run) -> Run:
    """Number the tokens of a run as a rank numbers those that it owns."""
    before = 0
    for of_chunk in runs:
        if of_chunk.start <= run[0] < of_chunk.stop:
            break
        before += len(of_chunk)
    return run[0] - of_chunk.start + before, run[1] - of_chunk.start + before


def _long(numbers: list[int], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device)


# Sums.


def linear_with_states(
    states: StatesOfRank, rounds: Sequence[RingRound], targets: Given, sources: Given
) -> Tensors:
    """Return the numerators [*, N, H, Dv] and denominators [*, N, H, 1] over all sources.

    Args:
        states: what this rank exchanges.
        rounds: this rank's rounds on a ring, of which only the first one is computed.
        targets: features of queries [*, N, H, D], rotated ones or None, and a mask or None.
        sources: features of keys [*, M, Hk, D], values [*, M, Hk, Dv], rotated features of keys or
            None, and a mask or None.
    """
    query, turned_query, of_targets = targets
    key, value, turned_key, of_sources = sources
    turned_query = query if turned_query is None else turned_query
    turned_key = key if turned_key is None else turned_key
    with full_precision(query.device):
        key, value, turned_key = (clear_invalid(x, of_sources) for x in (key, value, turned_key))
        computed = [_state(key, value, turned_key, run) for run in states.pieces]
        sent = [torch.stack(computed, dim=-3)]
        on_their_way = states.exchange.start(sent, [-3])
    within = over_own_sources(LinearParts(), rounds, targets, sources)
    with full_precision(query.device):
        (arrived,) = states.exchange.finish(on_their_way, sent, [-3])
        others = in_order(
            [
                _products(query, turned_query, arrived, group, graph)
                for group, graph in zip(states.groups, states.graphs(query.shape[-1]), strict=True)
            ]
        )
    return tuple(x + clear_invalid(y, of_targets) for x, y in zip(within, others, strict=True))


def _state(key: Tensor, value: Tensor, turned_key: Tensor, run: Run) -> Tensor:
    """Return the state of a run of sources, [*, Hk, D * (Dv + 1)]: first all k v^T, then all k."""
    key, value, turned_key = (
        x.narrow(-3, run[0], run[1] - run[0]) for x in (key, value, turned_key)
    )
    products = turned_key.movedim(-3, -1) @ value.transpose(-3, -2)
    return torch.cat([products.flatten(-2), key.sum(-3)], dim=-1)


def _products(
    query: Tensor, turned_query: Tensor, arrived: Tensor, group: StateGroup, graph: TokenGraph
) -> Tensors:
    """Return what states of other ranks add to the numerators and denominators of a group.

    Each feature of a state is taken for a source that all targets see, whose key is a unit vector.
    So NaN spreads, and stays out of gradients, as it does within a rank.
    """
    heads, width = query.shape[-2:]
    total = arrived.index_select(-3, group.rows).sum(-3, keepdim=True)
    state = repeat_heads(total, heads).squeeze(-3)  # [*, H, D * (Dv + 1)]
    above, below = state.split([state.shape[-1] - width, width], dim=-1)
    units = torch.eye(width, dtype=state.dtype, device=state.device)
    units = units.expand(*state.shape[:-1], width, width)
    sums = []
    for rows, matrix in ((turned_query, above), (query, below)):
        rows = rows.narrow(-3, group.start, group.stop - group.start)
        if not len(group.rows):  # these targets see nothing, but gradients of states travel
            rows = torch.zeros_like(rows)
        sums.append(linear_sums(by_head(rows), units, matrix.unflatten(-1, (width, -1)), graph))
    return tuple(x.transpose(-3, -2) for x in sums)

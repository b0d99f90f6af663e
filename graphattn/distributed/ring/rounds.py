"""Blocks of edges whose results are merged: the rounds of a ring, and global tokens.

Global tokens see all others, so their owner would have to fetch the rows of all tokens. In place of
that, their queries go to all ranks, and partial results come back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from graphattn.distributed.exchange import RowExchange, head_token_dim, in_places_of
from graphattn.distributed.layout import Layout
from graphattn.distributed.local_graph import LocalPart, edges_between
from graphattn.distributed.seen import Run, Runs, common, count, joined, seen_by, tokens_of
from graphattn.graphs.builders.windows import bipartite_complete_graph
from graphattn.graphs.token_graph import TokenGraph

End = Literal["targets", "sources", "both"]


class RingBlock(NamedTuple):
    """The edges from some of the rows that arrive in a round to some of a rank's targets.

    Attributes:
        number: the number of the block among all blocks of the rank.
        run: which of this rank's runs of targets it belongs to.
        targets: this run among its targets: the first one, and the one after the last.
        sources: a run of the rows of the round, or a LongTensor.
        tokens: LongTensor, the tokens of these rows, in ascending order.
        graph: the edges.
        offsets: LongTensor [E], the row of the whole graph's table of offsets for every edge. None
            if `graph` has the table itself, or the whole graph has none.
        ends: which ends of the edges are this rank's targets: "targets"; or, for an operation that
            moves both ends, also "sources", where `graph` is transposed, or "both".
    """

    number: int
    run: int
    targets: Run
    sources: Run | Tensor
    tokens: Tensor
    graph: TokenGraph
    offsets: Tensor | None = None
    ends: End = "targets"


class RingRound(NamedTuple):
    """One round: the rows that travel, and the blocks of edges that are then computed.

    The exchange of the first round is None: a rank has its own rows.
    """

    exchange: RowExchange | None
    blocks: tuple[RingBlock, ...]


class RingPlan:
    """Plan of a ring: rows that every rank sends in every round, and the edges that it computes.

    In round d, a rank gets rows from the rank d places before it, and sends rows to the rank d
    places after it: those that are needed there, and no others.

    Args:
        graph: the graph of all tokens.
        targets, sources: who owns its targets and its sources.
        group: the process group.
        both: whether both ends of an edge move. A rank then also gets the rows of targets that see
            its tokens, and computes an edge between two of its runs, or two ranks, at each end.
    """

    def __init__(
        self,
        graph: TokenGraph,
        targets: Layout,
        sources: Layout,
        group: Any,
        *,
        both: bool = False,
    ) -> None:
        self.graph, self.targets, self.sources, self.group = graph, targets, sources, group
        self.sides = (graph, graph.transpose()) if both else (graph,)
        # For every rank and side, the sources that each run of its targets sees; and all of them.
        self.by_run = [
            [
                [seen_by(side, run.start, run.stop) for run in targets.runs(rank)]
                for side in self.sides
            ]
            for rank in range(targets.ranks)
        ]
        self.needed = [
            joined(seen for by_run in by_side for runs in by_run for seen in runs)
            for by_side in self.by_run
        ]

    def rounds(self, rank: int) -> tuple[RingRound, ...]:
        """Return the rounds of a rank."""
        rounds = []
        for sender, exchange, arrived in self.arrivals(rank):
            blocks = [
                block
                for side in range(len(self.sides))
                for block in self._blocks(rank, sender, arrived, side)
            ]
            rounds.append(RingRound(exchange, tuple(blocks)))
        return tuple(rounds)

    def arrivals(self, rank: int) -> Iterator[tuple[int, RowExchange | None, Tensor]]:
        """Yield the sender, the exchange and the tokens of every round; first the rank's own."""
        for d in range(self.targets.ranks):
            sender = (rank - d) % self.targets.ranks
            arriving = common(self.needed[rank], self.sources.runs(sender))
            if d == 0:
                arriving = [(run.start, run.stop) for run in self.sources.runs(rank)]
            exchange = self._exchange(rank, d, count(arriving)) if d else None
            yield sender, exchange, tokens_of(arriving)

    def _travelling(self, sender: int, receiver: int) -> Runs:
        """Return the tokens of one rank that another one needs."""
        return common(self.needed[receiver], self.sources.runs(sender))

    def _exchange(self, rank: int, d: int, arriving: int) -> RowExchange:
        """Return the exchange of round d, in which `arriving` rows reach this rank."""
        ranks, device = self.targets.ranks, self.graph.device
        sender, receiver = (rank - d) % ranks, (rank + d) % ranks
        leaving = tokens_of(self._travelling(rank, receiver))
        send = [leaving[:0]] * ranks
        send[receiver] = torch.searchsorted(self.sources.tokens(rank), leaving)
        received = [arriving if other == sender else 0 for other in range(ranks)]
        total = sum(count(self._travelling((other - d) % ranks, other)) for other in range(ranks))
        return RowExchange.of_lists(send, received, total, group=self.group, device=device)

    def _blocks(
        self, rank: int, sender: int, arrived: Tensor, which_side: int
    ) -> Iterator[RingBlock]:
        """Yield the blocks of edges from the rows of one rank to the targets of another."""
        start, both, side = 0, len(self.sides) > 1, self.sides[which_side]
        end: End = "sources" if which_side else "targets"
        runs = zip(self.targets.runs(rank), self.by_run[rank][which_side], strict=True)
        for which, (run, seen) in enumerate(runs):
            parts: list[tuple[Runs, End]] = []
            for chunk in self.sources.runs(sender):
                if both and chunk == run:  # edges among these tokens are in one block only
                    parts += [] if which_side else [([(run.start, run.stop)], "both")]
                elif part := common(seen, (chunk,)):
                    parts.append((part, end))
            if not parts and sender == rank and not both:
                parts = [([], end)]  # a target without sources needs a result, too
            for part, ends in parts:
                tokens = tokens_of(part)
                rows = torch.searchsorted(arrived, tokens)
                first = int(rows[0]) if len(rows) else 0
                is_run = torch.equal(rows, torch.arange(first, first + len(rows)))
                graph = edges_between(side, run, tokens)
                offsets = None
                whole = side.structure
                if graph.structure is None and whole is not None and whole.num_offsets:
                    source, target = graph.edge_index
                    place = tokens.to(graph.device)[source]
                    offsets = whole.offset_index(target + run.start, place)
                yield RingBlock(
                    run=which,
                    targets=(start, start + len(run)),
                    sources=(first, first + len(rows)) if is_run else rows.to(graph.device),
                    tokens=tokens.to(graph.device),
                    graph=graph,
                    offsets=offsets,
                    number=run.start * self.sources.num_tokens + (int(tokens[0]) if part else 0),
                    ends=ends,
                )
            start += len(run)


class GlobalTargets(NamedTuple):
    """The targets of one rank without global tokens, and the global tokens of all ranks.

    Attributes:
        others: the graph and the exchange of this rank's other targets.
        rows: LongTensor, these targets among this rank's own.
        queries: gives every rank the tensors of all global tokens.
        block: the edges from the sources of this rank to all global tokens.
        results: sends the partial results of global tokens to their owners.
        owned: LongTensor, the global tokens of this rank among all of them.
        place: LongTensor, this rank's targets in [other targets, global tokens].
    """

    others: LocalPart
    rows: Tensor
    queries: RowExchange
    block: RingBlock
    results: RowExchange
    owned: Tensor
    place: Tensor

    def computed(
        self, operation: Any, targets: Sequence[Any], sources: Sequence[Any]
    ) -> tuple[Tensor, ...]:
        """Return the results of this rank's global tokens over the sources of all ranks.

        Targets and sources are this rank's tensors [*, tokens, heads, features], or masks [*,
        tokens]; some may be None.
        """
        there = [x for x in targets if x is not None]
        queries = self.queries(*there, dims=[head_token_dim(x) for x in there])
        parts = operation.part(in_places_of(targets, queries), sources, self.block)
        dims = [-3] * len(parts)
        arrived = self.results.finish(self.results.start(parts, dims), parts, dims)
        whole: tuple[Tensor, ...] = tuple(x.index_select(-3, self.owned) for x in parts)
        count = len(self.owned)
        for other in range(sum(self.results.received) // count if count else 0):
            part = tuple(x.narrow(-3, other * count, count) for x in arrived)
            whole = operation.merge(whole, part)
        if not count:  # gradients must reach the exchange on every rank
            whole = tuple(torch.cat([x, y], dim=-3) for x, y in zip(whole, arrived, strict=True))
        return whole


def global_block(tokens: Sequence[int], num_sources: int, rank: int, device: Any) -> RingBlock:
    """Return the edges from the sources of a rank to all global tokens."""
    return RingBlock(
        number=rank,
        run=0,
        targets=(0, len(tokens)),
        sources=(0, num_sources),
        tokens=torch.arange(num_sources, device=device),
        graph=bipartite_complete_graph(len(tokens), num_sources).to(device),
    )


def results_exchange(
    tokens: Sequence[int], layout: Layout, rank: int, group: Any, device: Any
) -> tuple[RowExchange, Tensor]:
    """Return the exchange of partial results, and which global tokens are this rank's own."""
    owner = layout.owner(torch.tensor(tokens))
    owned = (owner == rank).nonzero().flatten()
    send = [(owner == other).nonzero().flatten() for other in range(layout.ranks)]
    send[rank] = owned[:0]
    received = [0 if other == rank else len(owned) for other in range(layout.ranks)]
    total = len(tokens) * (layout.ranks - 1)
    exchange = RowExchange.of_lists(send, received, total, group=group, device=device)
    return exchange, owned.to(device)

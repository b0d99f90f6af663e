"""The part of a graph that one rank computes: its own targets, and all sources that they see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphattn.distributed.exchange import RowExchange
from graphattn.distributed.layout import Layout
from graphattn.distributed.seen import Runs, common, count, runs_of, tokens_of
from graphattn.graphs.edges.storage import StoredGraph
from graphattn.graphs.targets import block_of
from graphattn.graphs.token_graph import TokenGraph


class LocalGraph(TokenGraph):
    """A graph of one rank. Results over whole sequences take the other ranks into account.

    Attributes:
        rank, ranks: the place of this rank among all of them.
        over_ranks: the maximum of a tensor over all ranks, elementwise; None if ranks share no
            sequence.
        owned: the tokens of this rank among the targets of this graph.
        sequence: LongTensor, for every target the number of its sequence in the whole graph.
        sequences: how many sequences the whole graph has.
    """

    rank: int = 0
    ranks: int = 1
    over_ranks: Callable[[Tensor], Tensor] | None = None
    owned: slice | Tensor = slice(None)
    sequence: Tensor | None = None
    sequences: int = 1

    @property
    def rank_of_part(self) -> tuple[int, int]:
        return self.rank, self.ranks

    def maximum_per_sequence(self, degree: Tensor) -> Tensor:
        """Return the maximum over all tokens of every sequence, on whatever rank they are."""
        if self.over_ranks is None or self.sequence is None:
            return super().maximum_per_sequence(degree)
        owned, sequence = degree[..., self.owned, :], self.sequence[self.owned]
        shape = *degree.shape[:-2], self.sequences, degree.shape[-1]
        index = sequence[:, None].expand(owned.shape)
        largest = degree.new_zeros(shape).scatter_reduce(-2, index, owned, "amax")
        return self.over_ranks(largest).index_select(-2, self.sequence)


class LocalPart(NamedTuple):
    """A graph of one rank, and the exchange of rows that makes its sources.

    Attributes:
        graph: the edges that this rank computes.
        exchange: the rows that travel.
        owned: the tokens of this rank among the targets of the graph, in case there are others.
        context: LongTensor, the tokens that are the sources of the graph.
    """

    graph: LocalGraph
    exchange: RowExchange
    owned: slice | Tensor
    context: Tensor


class InsideFirst(NamedTuple):
    """The targets of one rank in two parts.

    Attributes:
        inside: targets that see no other rank; nothing travels for them.
        outside: the others, and the exchange of their sources.
        lengths: the targets of the rank are so many of `outside`, of `inside` and of `outside`, and
            so on for a second run.
    """

    inside: LocalPart
    outside: LocalPart
    lengths: tuple[int, ...]

    def split(self, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """Return the rows of `inside` and of `outside`."""
        pieces = x.split(self.lengths, dim=dim)
        outside = [piece for i, piece in enumerate(pieces) if i % 3 != 1]
        inside = pieces[1::3]
        return torch.cat(inside, dim) if len(inside) > 1 else inside[0], torch.cat(outside, dim)

    def merge(self, inside: Tensor, outside: Tensor, dim: int) -> Tensor:
        """Return the rows of the rank, from those that :meth:`split` gives."""
        of_inside = self.lengths[1::3]
        of_outside = [length for i, length in enumerate(self.lengths) if i % 3 != 1]
        inner, outer = iter(inside.split(of_inside, dim)), iter(outside.split(of_outside, dim))
        order = (next(inner if i % 3 == 1 else outer) for i in range(len(self.lengths)))
        return torch.cat([*order], dim)


class EdgeExchange(NamedTuple):
    """The exchange of values of edges between two ranks, for layers that move both ends.

    Attributes:
        exchange: sends the values of the edges to its targets that start at another rank.
        place: LongTensor, for every edge of the graph of both ends its row in [rows that arrive,
            its own rows, a row of zeros]. Edges between two tokens of others get zeros.
    """

    exchange: RowExchange
    place: Tensor

    def __call__(self, values: Tensor) -> Tensor:
        """Return the values [*, E, F] of the graph of both ends, from those of its own targets."""
        arrived = self.exchange.finish(self.exchange.start([values], [-2]), [values], [-2])
        zeros = values.new_zeros(*values.shape[:-2], 1, values.shape[-1])
        return torch.cat([*arrived, values, zeros], dim=-2).index_select(-2, self.place)


def exchange_of(
    needed: Sequence[Runs],
    layout: Layout,
    rank: int,
    context: Tensor,
    *,
    group: Any,
    device: torch.device,
) -> RowExchange:
    """Return the exchange that makes the context of a rank.

    `needed` are for every rank the tokens that it needs, its own included or not. `context` are
    those of this rank, a LongTensor in any order; they may repeat.
    """
    owned_runs, owned = layout.runs(rank), layout.tokens(rank)
    send, total = [], 0
    for other, runs in enumerate(needed):
        total += count(runs) - count(common(runs, layout.runs(other)))
        rows = [] if other == rank else common(runs, owned_runs)
        send.append(torch.searchsorted(owned, tokens_of(rows)))
    arriving = [
        tokens_of([] if other == rank else common(needed[rank], layout.runs(other)))
        for other in range(layout.ranks)
    ]
    kept = tokens_of(common(needed[rank], owned_runs))
    return context_exchange(send, arriving, kept, total, owned, context, group, device)


def context_exchange(
    send: Sequence[Tensor],
    arriving: Sequence[Tensor],
    kept: Tensor,
    total: int,
    owned: Tensor,
    context: Tensor,
    group: Any,
    device: torch.device,
) -> RowExchange:
    """Return the exchange that makes the context of a rank, from what arrives and what it keeps.

    Args:
        send: for every rank, the places of rows among those of this one that it gets.
        arriving: for every rank, the tokens whose rows come from it, in ascending order.
        kept: the tokens of this rank that are in the context.
        total: how many rows all ranks send together.
        owned: the tokens of this rank.
        context: the context, tokens in any order that may repeat.
        group, device: the process group, and the device of the rows.
    """
    there = torch.cat([*arriving, kept])
    arrived = len(there) - len(kept)
    order = there.argsort()
    place = order[torch.searchsorted(there[order], context)]
    before = int((there[:arrived] < kept[0]).sum()) if len(kept) else arrived
    plain = [torch.arange(before), torch.arange(arrived, len(there)), torch.arange(before, arrived)]
    places = torch.searchsorted(owned, kept)
    first = int(places[0]) if len(kept) else 0
    is_run = torch.equal(places, torch.arange(first, first + len(kept)))
    return RowExchange.of_lists(
        send,
        [len(tokens) for tokens in arriving],
        total,
        group=group,
        device=device,
        kept=slice(first, first + len(kept)) if is_run else places.to(device),
        place=None if torch.equal(place, torch.cat(plain)) else place.to(device),
        before=before,
    )


def rows_of_targets(graph: TokenGraph, run: range, context: Tensor) -> TokenGraph:
    """Return the rows of a run of targets, with the sources `context`, in ascending order.

    The result has a structure if the context is one run. Otherwise it is a list of edges or a
    table of neighbours.
    """
    part, seen = graph.targets(run.start, run.stop)
    if len(context) == len(seen) and (not len(seen) or int(context[0]) == seen.start):
        return part
    context = context.to(graph.device)

    def renumbered(source: Tensor) -> Tensor:
        return torch.searchsorted(context, source.long() + seen.start)

    neighbors = edges = None
    if part.compact_neighbors is not None:
        table = part.compact_neighbors
        neighbors = torch.where(table < 0, -1, renumbered(table.clamp(min=0)))
    else:
        source, target = part.compact_edges
        edges = torch.stack([renumbered(source), target.long()])
    return TokenGraph(
        edge_index=edges,
        neighbors=neighbors,
        num_targets=part.num_targets,
        num_sources=len(context),
        sizes=_sizes_within(part, context - seen.start),
        starts=part.starts,
        is_causal=graph.is_causal,
        has_causal_part=graph.has_causal_part,
        positions=(part.positions, graph.source_positions[context]),
    )


def among_context(graph: TokenGraph, owned: Tensor, context: Tensor) -> TokenGraph:
    """Return the edges that touch a token of a rank, over the tokens `context`.

    If the context is one run, the result has a structure, and also the edges between other tokens
    of the context.
    """
    device = graph.device
    context = context.to(device)
    first, last = int(context[0]), int(context[-1]) + 1
    if last - first == len(context):
        among = block_of(graph, (first, last), (first, last))
        if among is not None:
            return among
    lists = []
    for side in (graph, graph.transpose()):
        for low, high in runs_of(owned):
            part, seen = side.targets(low, high)
            ends = part.compact_edges.long() + torch.tensor([[seen.start], [low]], device=device)
            lists.append(ends if side is graph else ends.flip(0))
    source, target = torch.searchsorted(context, torch.cat(lists, dim=1))
    key = (target * len(context) + source).unique()
    edges = torch.stack([key % len(context), key // len(context)])
    positions = graph.positions[context], graph.source_positions[context]
    return TokenGraph(
        edge_index=edges,
        num_targets=len(context),
        num_sources=len(context),
        is_causal=graph.is_causal,
        has_causal_part=graph.has_causal_part,
        positions=positions,
    )


def edge_exchange_of(part: LocalPart, layout: Layout, rank: int, group: Any) -> EdgeExchange:
    """Return the exchange of values of edges for the graph of both ends of a rank."""
    source, target = part.context[part.graph.edge_index.cpu()]
    from_rank, to_rank = layout.owner(source), layout.owner(target)
    owned = (to_rank == rank).nonzero().flatten()
    arriving = ((from_rank == rank) & (to_rank != rank)).nonzero().flatten()
    arriving = arriving[to_rank[arriving].argsort(stable=True)]
    leaving = (from_rank[owned] != rank).nonzero().flatten()
    receivers = from_rank[owned][leaving]
    order = receivers.argsort(stable=True)
    place = torch.full_like(source, len(arriving) + len(owned))
    place[arriving] = torch.arange(len(arriving))
    place[owned] = torch.arange(len(owned)) + len(arriving)
    ranks, device = layout.ranks, part.graph.device
    exchange = RowExchange(
        group=group,
        send=leaving[order].to(device),
        sent=tuple(torch.bincount(receivers, minlength=ranks).tolist()),
        received=tuple(torch.bincount(to_rank[arriving], minlength=ranks).tolist()),
        total=ranks - 1,  # all ranks take part
    )
    return EdgeExchange(exchange, place.to(device))


def edges_between(graph: TokenGraph, run: range, tokens: Tensor) -> TokenGraph:
    """Return the edges from some sources, in ascending order, to a run of targets.

    The sources are numbered from 0 in this order. The result has a structure if the graph has one
    and the sources are one run.
    """
    if len(tokens) and int(tokens[-1]) - int(tokens[0]) + 1 == len(tokens):
        sources = int(tokens[0]), int(tokens[-1]) + 1
        block = block_of(graph, (run.start, run.stop), sources)
        if block is not None:
            return block
    part, seen = graph.targets(run.start, run.stop)
    source, target = part.edge_index
    tokens = tokens.to(graph.device)
    place = torch.searchsorted(tokens, source + seen.start)
    if len(tokens):
        inside = tokens[place.clamp(max=len(tokens) - 1)] == source + seen.start
    else:
        inside = torch.zeros_like(source, dtype=torch.bool)
    return TokenGraph(
        edge_index=torch.stack([place[inside], target[inside]]),
        num_targets=len(run),
        num_sources=len(tokens),
    )


def as_local(graph: StoredGraph, rank: int, ranks: int) -> LocalGraph:
    """Return a copy of a graph as a LocalGraph, which shares its edges."""
    local = LocalGraph.__new__(LocalGraph)
    vars(local).update(vars(graph))
    local._forget()
    local._code = graph.code
    local.rank, local.ranks = rank, ranks
    return local


def unlike_edges(table: Tensor, graph: TokenGraph) -> Tensor:
    """Return a table per offset, in a form that cannot be taken for one value per edge.

    If the graph has as many edges as offsets, it becomes values per edge, [1, E, H].
    """
    if graph.structure is None or len(table) != graph.num_edges:
        return table
    source, target = graph.edge_index
    return table.index_select(0, graph.structure.offset_index(target, source))[None]


def sequences_of(graph: TokenGraph, tokens: Tensor) -> Tensor:
    """Return the sequence, in a batch, of some targets; all 0 for a single graph."""
    ends = torch.tensor([targets for targets, _ in graph.sizes]).cumsum(0)
    return torch.searchsorted(ends, tokens.cpu(), right=True).to(graph.device)


def _sizes_within(part: TokenGraph, kept: Tensor) -> tuple[tuple[int, int], ...]:
    """Return the sizes of the sequences, if only some of the sources are kept."""
    ends = torch.tensor([sources for _, sources in part.sizes]).cumsum(0)
    upto = torch.searchsorted(kept.cpu(), ends)
    counts = torch.cat([upto[:1], upto.diff()]).tolist()
    return tuple((n, m) for (n, _), m in zip(part.sizes, counts, strict=True))

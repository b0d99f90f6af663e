"""Neighbours among tokens that are divided among ranks: the search, and the edges that it finds.

The coordinates of all ranks travel on a ring, and every rank keeps the nearest of the blocks so
far. Distances are those of a search in one process, and equal ones are ordered by the number of the
token in the whole graph, so the edges are the same. A rank then knows the edges of its own targets,
and asks the other ranks for the rows that these need.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphattn.distributed.exchange import RowExchange, counts_of_all_ranks, rows_of_rounds
from graphattn.distributed.layout import Layout
from graphattn.distributed.local_graph import context_exchange
from graphattn.distributed.planning.plans import CommunicationPlan, planned
from graphattn.distributed.ring.rounds import RingPlan
from graphattn.graphs.arguments import as_float, as_int
from graphattn.graphs.builders.neighbors import radius_graph
from graphattn.graphs.search.distances import exact_squared_distances, place_self
from graphattn.graphs.search.nearest_neighbors import nearest_in_items
from graphattn.graphs.structures.composites import Parts
from graphattn.graphs.structures.structure import Complete
from graphattn.graphs.token_graph import TokenGraph


class Neighbors(NamedTuple):
    """The edges to the targets of one rank, sorted by target, then source; LongTensors [E].

    Attributes:
        target: the target, counted among those of this rank.
        source: the source, a token of the whole graph.
        width: the largest number of sources per target; None if there is none.
    """

    target: Tensor
    source: Tensor
    width: int | None

    def graph(self, num_targets: int, context: Tensor, positions: Any) -> TokenGraph:
        """Return the graph of these edges, whose sources are the tokens `context`, ascending."""
        source = torch.searchsorted(context, self.source)
        given: dict[str, Any] = {}
        if self.width is None:
            given["edge_index"] = torch.stack([source, self.target])
        else:  # as in one process, missing neighbours come first
            count = torch.bincount(self.target, minlength=num_targets)
            slot = torch.arange(len(source), device=source.device) + self.width
            slot -= count.cumsum(0)[self.target]
            table = source.new_full((num_targets, self.width), -1)
            table[self.target, slot] = source
            given["neighbors"] = table
        return TokenGraph(
            **given, num_targets=num_targets, num_sources=len(context), positions=positions
        )


class Nearest(NamedTuple):
    """A search for the k nearest sources, with arguments of :func:`graphattn.knn_graph`."""

    k: int
    self_loops: bool
    backend: str

    def checked(self, possible: Sequence[int]) -> Nearest:
        """Check k against the number of possible sources in each sequence, as one process does."""
        k, most = as_int("k", self.k, 1), max(possible)
        if len(possible) == 1 and k > most:
            raise ValueError(f"k must be <= {most}, the number of possible sources, got {k}")
        return self._replace(k=max(min(k, most), 1))

    @property
    def limit(self) -> int:
        return self.k

    def pairs(self, x: Tensor, source: Tensor | None, batch: Any, sizes: Any) -> Tensor:
        """Find the sources of every target in a block, as edges [2, E]."""
        loops = self.self_loops and source is None
        index = nearest_in_items(x, self.k, source, sizes, loops, self.backend)
        target, slot = (index >= 0).nonzero().T
        return torch.stack([index[target, slot], target])


class Within(NamedTuple):
    """A search within a radius, with arguments of :func:`graphattn.radius_graph`."""

    radius: float
    max_neighbors: int | None
    self_loops: bool

    def checked(self, possible: Sequence[int]) -> Within:
        """Check the radius and the limit."""
        most = self.max_neighbors
        return self._replace(
            radius=as_float("radius", self.radius, positive=False),
            max_neighbors=None if most is None else as_int("max_neighbors", most, 1),
        )

    @property
    def limit(self) -> int | None:
        return self.max_neighbors

    def pairs(self, x: Tensor, source: Tensor | None, batch: Any, sizes: Any) -> Tensor:
        """Find the sources of every target in a block, as edges [2, E]."""
        return radius_graph(
            x,
            self.radius,
            source=source,
            max_neighbors=self.max_neighbors,
            self_loops=self.self_loops and source is None,
            batch=batch[0] if source is None else batch,
        ).edge_index


class Candidates(NamedTuple):
    """The ring on which the coordinates of all sources of a target's sequence travel.

    Attributes:
        plan: the plan of the ring.
        rank: this rank.
        arrivals: of every round the sender, the exchange and the tokens, first this rank's own.
    """

    plan: CommunicationPlan
    rank: int
    arrivals: tuple[tuple[int, RowExchange | None, Tensor], ...]


def candidates_of(
    graph: TokenGraph, targets: Layout, sources: Layout, rank: int, group: Any
) -> Candidates:
    """Return the ring for the sequences of a graph, whose edges do not matter."""
    parts = [Complete(*sizes) for sizes in graph.sizes]
    structure = parts[0] if len(parts) == 1 else Parts(tuple(parts))
    complete = TokenGraph(structure=structure, sizes=graph.sizes, device=graph.device)
    ring = RingPlan(complete, targets, sources, group)
    plan = planned(complete, targets, sources, "targets", ("ring", ()))
    return Candidates(plan, rank, tuple(ring.arrivals(rank)))


def search(
    wanted: Nearest | Within, candidates: Candidates, x: Tensor, source: Tensor | None
) -> Neighbors:
    """Search the sources of all ranks for the neighbours of this rank's targets.

    Args:
        wanted: what is searched for.
        candidates: the ring.
        x: coordinates of this rank's targets, [N, C].
        source: coordinates of its sources, [M, C]; None if they are the targets.
    """
    x = _without_nan(x.detach())
    sources = x if source is None else _without_nan(source.detach())
    plan, rank, arrivals = candidates
    ends = torch.tensor(plan.graph.sizes).cumsum(0).T.contiguous()
    of_targets = torch.searchsorted(ends[0], plan.target_layout.tokens(rank), right=True)
    blocks = rows_of_rounds([exchange for _, exchange, _ in arrivals], [sources[:, None]])
    edges, squared = x.new_empty((2, 0), dtype=torch.int64), x.new_empty(0, dtype=torch.float64)
    wide = torch.promote_types(x.dtype, torch.float32)
    for (sender, _, tokens), (rows,) in zip(arrivals, blocks, strict=True):
        if not len(tokens):
            continue
        others, to_self = rows[:, 0], source is None and sender == rank
        of_sources = torch.searchsorted(ends[1], tokens, right=True)
        counts = [torch.bincount(of, minlength=len(ends[0])) for of in (of_targets, of_sources)]
        sizes = tuple(zip(*(count.tolist() for count in counts), strict=True))
        batch = of_targets.to(x.device), of_sources.to(x.device)
        found = wanted.pairs(x, None if to_self else others, batch, sizes)
        distance = exact_squared_distances(x.to(wide), others.to(wide), found[1], found[0])
        if to_self:
            place_self(distance, found[0] == found[1], wanted.self_loops)
        found[0] = tokens.to(x.device)[found[0]]
        edges, squared = torch.cat([edges, found], 1), torch.cat([squared, distance])
        if wanted.limit is not None:
            edges, squared = _nearest(edges, squared, len(x), wanted.limit)
    order = edges[0].argsort(stable=True)
    order = order[edges[1][order].argsort(stable=True)]
    width = wanted.limit if isinstance(wanted, Nearest) else None
    return Neighbors(edges[1][order], edges[0][order], width)


def _without_nan(x: Tensor) -> Tensor:
    """Return points with infinity in place of those that hold NaN, which have no neighbours."""
    return x.masked_fill(x.isnan().any(1, keepdim=True), torch.inf)


def _nearest(edges: Tensor, squared: Tensor, num_targets: int, k: int) -> tuple[Tensor, Tensor]:
    """Keep the k nearest sources of every target, the smaller ones of equally near ones."""
    order = edges[0].argsort(stable=True)
    order = order[squared[order].argsort(stable=True)]
    order = order[edges[1][order].argsort(stable=True)]
    edges, squared = edges[:, order], squared[order]
    count = torch.bincount(edges[1], minlength=num_targets)
    place = torch.arange(len(order), device=edges.device) - (count.cumsum(0) - count)[edges[1]]
    return edges[:, place < k], squared[place < k]


def asking_exchange(
    context: Tensor, num_edges: int, layout: Layout, rank: int, group: Any, device: torch.device
) -> tuple[RowExchange, Tensor, Tensor]:
    """Ask the other ranks for the rows of a context that this rank does not own.

    Args:
        context: tokens of the whole graph, in ascending order.
        num_edges: a number that all ranks get of this one.
        layout: who owns the tokens.
        rank, group, device: this rank, its group, and the device of the rows.

    Returns:
        The exchange that makes the context, the rows [ranks, ranks] that every rank receives from
        every other one, and the numbers of edges of all ranks.
    """
    owner, owned = layout.owner(context), layout.tokens(rank)
    remote = context[owner != rank]
    by_owner = owner[owner != rank].argsort(stable=True)
    counts = torch.bincount(owner[owner != rank], minlength=layout.ranks).tolist()
    table = counts_of_all_ranks(torch.tensor([*counts, num_edges], device=device), group).cpu()
    rows, total = table[:, :-1], int(table[:, :-1].sum())
    asked = _sent_by_owner(remote, by_owner, rows, rank, group, device)
    exchange = context_exchange(
        send=torch.searchsorted(owned, asked).split(rows[:, rank].tolist()),
        arriving=remote[by_owner].split(counts),
        kept=context[owner == rank],
        total=total,
        owned=owned,
        context=context,
        group=group,
        device=device,
    )
    return exchange, rows, table[:, -1]


def edges_of_both_ends(
    neighbors: Neighbors, layout: Layout, rank: int, group: Any, device: torch.device
) -> Tensor:
    """Return all edges [2, E] that touch a token of this rank, as tokens of the whole graph."""
    edges = torch.stack([neighbors.source.cpu(), layout.tokens(rank)[neighbors.target.cpu()]])
    owner = layout.owner(edges[0])
    leaving, owner = edges[:, owner != rank], owner[owner != rank]
    counts = torch.bincount(owner, minlength=layout.ranks).to(device)
    table = counts_of_all_ranks(counts, group).cpu()
    arrived = _sent_by_owner(leaving, owner.argsort(stable=True), table, rank, group, device)
    return torch.cat([edges, arrived], dim=1)


def _sent_by_owner(
    values: Tensor, order: Tensor, counts: Tensor, rank: int, group: Any, device: torch.device
) -> Tensor:
    """Send integers [*, n], in an order, to the ranks of which `counts` says how many they get."""
    exchange = RowExchange(
        group=group,
        send=order.to(device),
        sent=tuple(counts[rank].tolist()),
        received=tuple(counts[:, rank].tolist()),
        total=int(counts.sum()),
    )
    values = values.to(device)
    (arrived,) = exchange.finish(exchange.start([values], [-1]), [values], [-1])
    return arrived.cpu()

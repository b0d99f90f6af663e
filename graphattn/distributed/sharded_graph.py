"""A graph whose tokens are divided among the ranks of a process group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor

from graphattn.distributed.agreement import (
    OpenFacts,
    agree,
    agree_on_call,
    calling,
    describe,
    described,
    facts_of_call,
    tracing,
)
from graphattn.distributed.exchange import RowExchange, gathered, maximum_over_ranks
from graphattn.distributed.layout import Layout
from graphattn.distributed.local_graph import (
    EdgeExchange,
    InsideFirst,
    LocalGraph,
    LocalPart,
    among_context,
    as_local,
    edge_exchange_of,
    exchange_of,
    rows_of_targets,
    sequences_of,
    unlike_edges,
)
from graphattn.distributed.neighbors import (
    Candidates,
    Nearest,
    Neighbors,
    Within,
    asking_exchange,
    candidates_of,
    edges_of_both_ends,
    search,
)
from graphattn.distributed.own_first import OwnFirst, own_first_of
from graphattn.distributed.planning.needs import RunTable
from graphattn.distributed.planning.neighbor_plans import NeighborPlan
from graphattn.distributed.planning.plans import CommunicationPlan, planned
from graphattn.distributed.ring.rounds import (
    GlobalTargets,
    RingPlan,
    RingRound,
    global_block,
    results_exchange,
)
from graphattn.distributed.ring.states import StatesOfRank
from graphattn.distributed.seen import (
    Runs,
    joined,
    seen_by,
    seen_by_runs,
    tokens_of,
    without,
)
from graphattn.graphs.arguments import as_choice, as_points, as_sources
from graphattn.graphs.builders.combine import batch
from graphattn.graphs.edges.stored_values import made_for_training
from graphattn.graphs.nearby import nearby_edges
from graphattn.graphs.token_graph import TokenGraph
from graphattn.ops.inputs import ValidPair
from graphattn.ops.library.numbered import numbered

Side = Literal["targets", "sources", "edges"]
SIDES = ("targets", "sources", "edges")
# The kinds of edge_bias, as the ranks that have different ones read it.
TABLE = "a table per offset (for one value per edge, give edge_bias[None])"
VALUES = "values per edge"
# Edges per row from which merging takes a tenth longer at most: a row takes as long as 50 edges.
MERGING = 500


class Share(NamedTuple):
    """The part of the tokens that a rank owns."""

    targets: Layout
    sources: Layout
    rank: int

    def __str__(self) -> str:
        layout = self.targets
        return (
            f"{layout.size(self.rank)} of {layout.num_tokens} tokens on rank {self.rank} of "
            f"{layout.ranks}{' (zigzag)' * layout.zigzag}"
        )


class ShardedGraph:
    """One rank's part of a graph, and what this rank must exchange with the others.

    :func:`shard` makes it. Layers take it in the place of a graph, with the tokens of this rank.

    Attributes:
        plan: the plan of what all ranks exchange; ``print(shard.plan)`` shows it.
        whole: the graph of all tokens.
        rank, ranks: the place of this rank in the group, and the size of the group.
        group: the process group; None if there is only one rank.
        num_targets, num_sources: how many targets and sources this rank owns: ``x`` and a
            ``context`` have so many tokens.
        exchange: "rows" if all rows that a rank needs are fetched at once, "ring" if it computes
            with those of one rank at a time.
        broadcast: global tokens whose queries attention sends to all ranks; () if their owner
            fetches all rows, as that of any other target.
    """

    def __init__(self, plan: CommunicationPlan, rank: int, group: Any) -> None:
        self.plan, self.rank, self.group = plan, rank, group
        self.whole, self.ranks = plan.graph, plan.ranks
        self.exchange, self.broadcast = plan.exchange, plan.broadcast
        self._targets, self._sources = plan.target_layout, plan.source_layout
        self.num_targets, self.num_sources = self._targets.size(rank), self._sources.size(rank)
        self._number = numbered(self)  # by which operators find it
        self._nearby: dict[int, ShardedGraph] = {}

    # What this rank owns.

    @property
    def device(self) -> torch.device:
        """The device of the graph."""
        return self.whole.device

    @cached_property
    @made_for_training
    def tokens(self) -> TokenGraph:
        """The targets and sources of this rank, without any edges; for their positions."""
        same = self.whole.has_same_tokens
        of_targets = self._positions_of(self.whole, self._targets)
        of_sources = of_targets
        if not same:
            of_sources = self._positions_of(self.whole.transpose(), self._sources)
        return TokenGraph(
            edge_index=torch.empty((2, 0), dtype=torch.int64, device=self.device),
            num_targets=len(of_targets),
            num_sources=len(of_sources),
            # Different starts, unless targets and sources are the same tokens.
            starts=((0, 0),) if same else ((0, 1),),
            positions=(of_targets, of_sources),
        )

    def _positions_of(self, graph: TokenGraph, layout: Layout) -> Tensor:
        runs = layout.runs(self.rank)
        return torch.cat([graph.targets(run.start, run.stop)[0].positions for run in runs])

    @property
    def positions(self) -> Tensor:
        """LongTensor, the positions of the targets of this rank."""
        return self.tokens.positions

    @property
    def source_positions(self) -> Tensor:
        """LongTensor, the positions of the sources of this rank."""
        return self.tokens.source_positions

    @property
    def share(self) -> Share:
        """The part of the tokens that this rank owns; its text counts them."""
        return Share(self._targets, self._sources, self.rank)

    # What this rank computes.

    @property
    def graph(self) -> TokenGraph:
        """The edges of the targets of this rank.

        Their sources are all tokens that these targets see, in ascending order, whichever rank they
        are on. Values per edge are in the order of ``shard.graph.edge_index``.
        """
        return self.by_targets.graph

    @cached_property
    @made_for_training
    def by_targets(self) -> LocalPart:
        """The graph of this rank's targets, and the exchange that fetches their sources."""
        return self._part([[*self._targets.runs(rank)] for rank in range(self.ranks)])

    def _part(self, runs: list[list[range]]) -> LocalPart:
        """Return the graph of some runs of targets of this rank; `runs` are those of all ranks."""
        needed = [seen_by_runs(self.whole, of_rank) for of_rank in runs]
        owned = runs[self.rank] or [range(0)]  # a rank may own nothing but global tokens
        contexts = [tokens_of(seen_by(self.whole, run.start, run.stop)) for run in owned]
        parts = [
            rows_of_targets(self.whole, run, context)
            for run, context in zip(owned, contexts, strict=True)
        ]
        graph = as_local(parts[0] if len(parts) == 1 else batch(parts), self.rank, self.ranks)
        context = torch.cat(contexts)
        exchange = self._exchange(needed, context)
        return LocalPart(graph, exchange, slice(0, graph.num_targets), context)

    @cached_property
    @made_for_training
    def global_targets(self) -> GlobalTargets:
        """The global tokens of all ranks, and the graph of this rank's other targets."""
        tokens, layout, device = self.broadcast, self._targets, self.device
        owned = layout.tokens(self.rank)
        is_global = torch.isin(owned, torch.tensor(tokens))
        rows, of_globals = (~is_global).nonzero().flatten(), is_global.nonzero().flatten()
        others = [without(layout.runs(rank), tokens) for rank in range(self.ranks)]
        everywhere = [[(token, token + 1) for token in tokens]] * self.ranks
        results, place = results_exchange(tokens, layout, self.rank, self.group, device)
        return GlobalTargets(
            others=self._part(others),
            rows=rows.to(device),
            queries=exchange_of(
                everywhere, layout, self.rank, torch.tensor(tokens), group=self.group, device=device
            ),
            block=global_block(tokens, self.num_sources, self.rank, device),
            results=results,
            owned=place,
            place=torch.cat([rows, of_globals]).argsort().to(device),
        )

    @cached_property
    @made_for_training
    def inside_first(self) -> InsideFirst:
        """The graph of this rank's targets in two parts, if :attr:`has_inside`.

        Those that see no other rank are computed while the sources of the others travel.
        """
        inside: list[range] = []
        outside: list[range] = []
        lengths: list[int] = []
        start, stop = self.plan.inside[1:]
        for run in self._targets.runs(self.rank):
            chunk = int(self._targets.chunk_of(torch.tensor(run.start)))
            first, last = int(start[chunk]), int(stop[chunk])
            inside.append(range(first, last))
            outside += [range(run.start, first), range(last, run.stop)]
            lengths += [first - run.start, last - first, run.stop - last]
        runs = [[*self._targets.runs(rank)] for rank in range(self.ranks)]
        runs[self.rank] = [run for run in outside if run]
        nothing: list[list[range]] = [[] for _ in runs]
        nothing[self.rank] = [run for run in inside if run]
        return InsideFirst(self._part(nothing), self._part(runs), tuple(lengths))

    @cached_property
    @made_for_training
    def has_inside(self) -> bool:
        """Whether :attr:`inside_first` is worth it, as the plan says; equal on all ranks."""
        return self.group is not None and self.plan.has_inside

    @cached_property
    @made_for_training
    def most_received(self) -> int:
        """How many rows the rank receives that receives most."""
        return int(self.plan.received_rows.max())

    @cached_property
    @made_for_training
    def own_first(self) -> OwnFirst:
        """The edges of :attr:`by_targets`: those from this rank's own tokens, and the others."""
        return own_first_of(self.by_targets, self.num_sources, both=False)

    @cached_property
    @made_for_training
    def own_first_of_others(self) -> OwnFirst | None:
        """The edges of targets beside global tokens; None if merging their results takes long."""
        split = own_first_of(self.global_targets.others, self.num_sources, both=False)
        return split if MERGING * len(split.rows) <= split.own.num_edges else None

    @cached_property
    @made_for_training
    def own_first_of_both_ends(self) -> OwnFirst:
        """The edges of :attr:`by_both_ends`: those among this rank's own tokens, and the others."""
        return own_first_of(self.by_both_ends, self.num_targets, both=True)

    @cached_property
    @made_for_training
    def by_both_ends(self) -> LocalPart:
        """The graph of all edges that touch a token of this rank, for layers that move both ends.

        Its tokens are those of this rank and all that share an edge with them.
        """
        layout, owned = self._targets, self._targets.tokens(self.rank)
        needed = []
        sides = self.whole, self.whole.transpose()
        for rank in range(self.ranks):
            runs = layout.runs(rank)
            seen = [run for side in sides for run in seen_by_runs(side, runs)]
            needed.append(joined([*seen, *((run.start, run.stop) for run in runs)]))
        context = tokens_of(needed[self.rank])
        exchange = self._exchange(needed, context)
        among = among_context(self.whole, owned, context)
        return self._with_both_ends(among, exchange, context)

    def _with_both_ends(
        self, among: TokenGraph, exchange: RowExchange, context: Tensor
    ) -> LocalPart:
        """Return a graph of edges that touch a token of this rank, with what it needs to know."""
        owned = self._targets.tokens(self.rank)
        graph = as_local(among, self.rank, self.ranks)
        graph._points_backward = self.whole.points_backward
        places = torch.searchsorted(context, owned)
        first = int(places[0])
        is_run = int(places[-1]) - first + 1 == len(owned)
        graph.owned = slice(first, first + len(owned)) if is_run else places.to(self.device)
        graph.sequence = sequences_of(self.whole, context)
        graph.sequences = len(self.whole.sizes)
        if self.ranks > 1:
            graph.over_ranks = partial(maximum_over_ranks, group=self.group)
        return LocalPart(graph, exchange, graph.owned, context)

    # Graphs of neighbours.

    def knn_graph(
        self,
        x: Tensor,
        k: int,
        *,
        source: Tensor | None = None,
        self_loops: bool = False,
        backend: str = "auto",
    ) -> NeighborShard:
        """Every token sees its `k` nearest sources, on whatever rank they are.

        The edges are those of :func:`graphattn.knn_graph` of the tokens of all ranks. The
        sequences are those of this graph, whose edges do not matter: tokens of different sequences
        do not see each other. Coordinates travel on a ring: a rank stores those of one other rank
        at a time. The choice of neighbours has no gradient.

        Args:
            x: coordinates or features of the targets of this rank, [N, C].
            k: sources per token.
            source: those of its sources, [M, C]; `x` if None.
            self_loops: whether a token counts as its own first neighbour.
            backend: as in :func:`graphattn.knn`.

        Returns:
            A :class:`ShardedGraph` for layers. ``graph.plan.search_bytes(dtype, coordinates)`` are
            the bytes of the search, and ``graph.plan.bytes(dtype, features)`` those of a layer.

        Raises:
            ValueError: in the same cases as :func:`graphattn.knn_graph`, or if ranks give other
                arguments.
            RankFailure: if another rank raised an error here.

        Example:
            In a layer, over the tokens of all ranks::

                shard = ga.distributed.shard(ga.complete_graph(4096))
                x = shard.split(torch.randn(4096, 64))
                near = shard.knn_graph(x, k=16)  # or ga.knn_graph(x, 16, shard=shard)
                y = ga.nn.DotProductAttention(64, heads=4)(x, near)
        """
        return self._neighbors("x", x, source, Nearest(k, bool(self_loops), backend))

    def radius_graph(
        self,
        positions: Tensor,
        radius: float,
        *,
        source: Tensor | None = None,
        max_neighbors: int | None = None,
        self_loops: bool = False,
    ) -> NeighborShard:
        """Every token sees the sources within a radius, on whatever rank they are.

        The edges are those of :func:`graphattn.radius_graph` of the tokens of all ranks; all else
        is as for :meth:`knn_graph`.

        Args:
            positions: coordinates of the targets of this rank, [N, C].
            radius: the largest distance.
            source: coordinates of its sources, [M, C]; `positions` if None.
            max_neighbors: the largest number of sources per token; None for no limit.
            self_loops: whether a token sees itself.

        Raises:
            ValueError: in the same cases as :func:`graphattn.radius_graph`, or if ranks give other
                arguments.
            RankFailure: if another rank raised an error here.
        """
        wanted = Within(radius, max_neighbors, bool(self_loops))
        return self._neighbors("positions", positions, source, wanted)

    @made_for_training
    def _neighbors(
        self, name: str, x: Tensor, source: Tensor | None, wanted: Nearest | Within
    ) -> NeighborShard:
        """Search over all ranks, after these have agreed on it."""
        facts = {"search": repr(wanted), name: described(x, -2), "source": described(source, -2)}
        with nullcontext() if self.group is None else calling(self.group, facts):
            points = as_points(name, x)
            self.check_tokens(name, x, self.num_targets)
            as_sources(source, points, wanted.self_loops, name=name)
            if source is not None:
                self.check_tokens("source", source, self.num_sources)
            elif not self.whole.has_same_tokens:
                raise ValueError(
                    f"source must be coordinates of the {self.num_sources} sources of rank "
                    f"{self.rank}, because the targets of this graph are other tokens, got None"
                )
            if x.device != self.device:
                raise ValueError(f"{name} must be on {self.device}, got {x.device}")
            alone = source is None and not wanted.self_loops
            wanted = wanted.checked([max(m - alone, 0) for _, m in self.whole.sizes])
            if self.group is not None:
                agree_on_call(self.group)
        return NeighborShard(self, search(wanted, self._candidates, x, source))

    @cached_property
    @made_for_training
    def _candidates(self) -> Candidates:
        return candidates_of(self.whole, self._targets, self._sources, self.rank, self.group)

    def nearby(self, window: int) -> ShardedGraph:
        """Return the edges (i, j) whose positions are less than `window` apart, divided alike."""
        if window not in self._nearby:
            self._nearby[window] = self._of_nearby(window)
        return self._nearby[window]

    @made_for_training
    def _of_nearby(self, window: int) -> ShardedGraph:
        return shard_like(self, nearby_edges(self.whole, window))

    def _exchange(self, needed: list[Runs], context: Tensor) -> RowExchange:
        return exchange_of(
            needed, self._sources, self.rank, context, group=self.group, device=self.device
        )

    @cached_property
    @made_for_training
    def rounds(self) -> tuple[RingRound, ...]:
        """The rounds of a ring, in which this rank computes with the rows of one rank at a time."""
        plan = RingPlan(self.whole, self._targets, self._sources, self.group)
        return plan.rounds(self.rank)

    @cached_property
    @made_for_training
    def rounds_of_both_ends(self) -> tuple[RingRound, ...]:
        """The rounds of a ring for layers that move both ends of an edge."""
        plan = RingPlan(self.whole, self._targets, self._sources, self.group, both=True)
        return plan.rounds(self.rank)

    @cached_property
    @made_for_training
    def sequences(self) -> LocalGraph:
        """The tokens of this rank without edges; maxima over sequences are those of all ranks."""
        graph = as_local(self.tokens, self.rank, self.ranks)
        graph.sequence = sequences_of(self.whole, self._targets.tokens(self.rank))
        graph.sequences = len(self.whole.sizes)
        graph.over_ranks = partial(maximum_over_ranks, group=self.group)
        return graph

    @cached_property
    @made_for_training
    def states(self) -> StatesOfRank:
        """The states that this rank exchanges, for linear attention if :meth:`sends_states`."""
        states = self.plan.states
        assert states is not None
        return states.of_rank(self.rank, self.group, self.device)

    def sends_states(self, head_dim: int, *, rope: bool = False) -> bool:
        """Whether linear attention sends states in place of rows, as the plan says."""
        return head_dim <= self._widest_states[rope]

    @cached_property
    @made_for_training
    def _widest_states(self) -> tuple[int, int]:
        return self.plan.widest_state(), self.plan.widest_state(rope=True)

    # Tokens and values of this rank.

    def split(self, *tensors: Any, of: Side = "targets", dim: int | None = None) -> Any:
        """Return this rank's rows of tensors with the rows of all tokens.

        Args:
            tensors: the tokens are counted by dimension -2 of floating-point tensors ([*, N, dim]),
                and by the last dimension of others ([*, N], such as masks, positions and
                classes). None stays None.
            of: "targets"; "sources" for a context; or "edges" for values per edge, [E, F] or
                [*, E, F], which become those of ``shard.graph``.
            dim: the dimension that counts the tokens, if it is another one.

        Returns:
            One tensor for one, otherwise a tuple. They share memory with the given tensors, unless
            this rank owns two runs of tokens.

        Raises:
            ValueError: if a tensor has another number of tokens.
        """
        runs = self._runs(as_choice("of", of, SIDES))
        count = self._whole_count(of)
        parts: list[Tensor | None] = []
        for number, x in enumerate(tensors):
            if x is None:
                parts.append(None)
                continue
            along = _token_dim(x) if dim is None else dim
            if _size(x, along) != count:
                raise ValueError(
                    f"tensors[{number}] must have {count} {of} in dimension {along}, got shape "
                    f"{list(x.shape)}"
                )
            rows = [x.narrow(along, run.start, len(run)) for run in runs]
            parts.append(rows[0] if len(rows) == 1 else torch.cat(rows, dim=along))
        return parts[0] if len(parts) == 1 else tuple(parts)

    def gather(self, tensor: Tensor, *, of: Side = "targets", dim: int | None = None) -> Tensor:
        """Return the rows of all ranks, in the order of the whole graph, on every rank.

        Every rank is expected to compute the same from the result. So in the backward pass, a rank
        takes the gradient of its own rows from its own computation, and nothing travels.

        Args:
            tensor: this rank's rows; see :meth:`split` for the dimension that counts them.
            of: "targets" or "sources".
            dim: the dimension that counts the tokens, if it is another one.

        Raises:
            ValueError: if `tensor` does not have the rows of this rank.
        """
        layout = self._targets if as_choice("of", of, SIDES[:2]) == "targets" else self._sources
        along = _token_dim(tensor) if dim is None else dim
        count = layout.size(self.rank)
        if _size(tensor, along) != count:
            raise ValueError(
                f"tensor must have {count} {of} in dimension {along} on rank {self.rank}, got "
                f"shape {list(tensor.shape)}"
            )
        if self.ranks == 1:
            return tensor
        from_end = along % tensor.dim() - tensor.dim()
        facts = OpenFacts([], [])
        if torch.compiler.is_compiling():
            describe(facts, "tensor to gather", tensor, from_end)
        else:
            agree(self.group, {"tensor to gather": described(tensor, from_end)})
        return gathered(tensor, along % tensor.dim(), layout, self.rank, self.group, facts)

    def _runs(self, of: str) -> list[range]:
        """Return the runs of targets, sources or edges of this rank."""
        if of == "sources":
            return list(self._sources.runs(self.rank))
        targets = self._targets.runs(self.rank)
        if of == "targets":
            return list(targets)
        edges = []
        for run in targets:
            first = self.whole.targets(0, run.start)[0].num_edges
            count = self.whole.targets(run.start, run.stop)[0].num_edges
            edges.append(range(first, first + count))
        return edges

    def _whole_count(self, of: str) -> int:
        if of == "edges":
            return self.whole.num_edges
        return self.whole.num_sources if of == "sources" else self.whole.num_targets

    # For layers.

    def fetch(
        self, tensors: Sequence[Tensor], dims: Sequence[int], valid: ValidPair
    ) -> tuple[TokenGraph, list[Tensor], ValidPair]:
        """Fetch what the targets of this rank see of other ranks.

        Args:
            tensors: the sources of this rank, such as keys and values. A tensor that occurs twice
                travels once.
            dims: the dimension of every tensor that counts the tokens, from the end.
            valid: masks of this rank's targets and sources, or None.

        Returns:
            The graph of this rank's targets, the tensors of all its sources, and the masks.
        """
        return self.fetch_for(self.by_targets, tensors, dims, valid)

    def fetch_for(
        self, part: LocalPart, tensors: Sequence[Tensor], dims: Sequence[int], valid: ValidPair
    ) -> tuple[TokenGraph, list[Tensor], ValidPair]:
        """Fetch the sources of a part of this rank's graph, as :meth:`fetch` does for all of it."""
        graph, exchange, _, _ = part
        of_targets, of_sources = valid
        masks = [] if of_sources is None else [of_sources]
        once: list[int] = []  # numbers of tensors, every tensor once
        place: list[int] = []  # for every tensor, where it stands among those
        for number, x in enumerate(tensors):
            known = [i for i, other in enumerate(once) if tensors[other] is x]
            place.append(known[0] if known else len(once))
            once += [] if known else [number]
        sent, along = [tensors[i] for i in once], [dims[i] for i in once]
        arrived = exchange(*sent, *masks, dims=[*along, *[-1] * len(masks)])
        mask = arrived[-1] if masks else None
        return graph, [arrived[i] for i in place], (of_targets, mask)

    # Values per edge.

    @cached_property
    @made_for_training
    def _offset_rows(self) -> Tensor:
        """The row of the whole graph's table of offsets for every edge of ``shard.graph``."""
        rows = []
        for run in self._targets.runs(self.rank):
            part, _ = self.whole.targets(run.start, run.stop)
            assert part.structure is not None
            source, target = part.edge_index
            rows.append(part.structure.offset_index(target, source))
        return torch.cat(rows)

    def edge_bias(self, bias: Tensor | None) -> Tensor | None:
        """Return a bias in the form that ``shard.graph`` takes.

        A table per offset becomes one value per edge where the local graph has no such table.
        [E, H] with as many rows as there are offsets is taken for a table. If it holds values per
        edge, the ranks with other numbers of edges disagree; see :meth:`call_of`.
        """
        if bias is None or not self.is_table(bias):
            return bias
        if self.is_ambiguous(bias):
            raise ValueError(
                f"edge_bias with {len(bias)} rows is ambiguous: rank {self.rank} has as many edges "
                "as the graph has offsets, and so has every rank that it exchanges rows with. For "
                "one value per edge, give it a leading dimension (edge_bias[None]); for a table, "
                "make it with graphattn.nn.OffsetBias, called with the shard"
            )
        return self.spread(bias)

    def is_ambiguous(self, bias: Tensor) -> bool:
        """Whether a bias [E, H] may be a table or values per edge, and no rank can tell."""
        return len(bias) == self._unclear_rows > 1

    @cached_property
    @made_for_training
    def _unclear_rows(self) -> int:
        """The edges of this rank, if no rank with another number takes part in its calls."""
        edges = self.plan.edges.tolist()
        return edges[self.rank] if not self._has_border or len({*edges}) == 1 else 0

    def unlike_a_table(self, bias: Tensor) -> Tensor:
        """Return values of this rank's edges in a form that :meth:`edge_bias` takes for those."""
        return bias[None] if self.is_table(bias) else bias

    def spread(self, bias: Tensor) -> Tensor:
        """Return a table per offset of the whole graph in the form that ``shard.graph`` takes."""
        whole = self.whole.structure
        assert whole is not None
        if self.graph.structure is None:
            bias = bias.index_select(0, self._offset_rows)
            return bias[None] if len(self._offset_rows) == whole.num_offsets else bias
        return unlike_edges(bias, self.graph)

    def is_table(self, bias: Tensor) -> bool:
        """Whether a bias is a table per offset of the whole graph."""
        structure = self.whole.structure
        rows = None if structure is None else structure.num_offsets
        return bias.dim() == 2 and len(bias) == rows != self.whole.num_edges

    @cached_property
    @made_for_training
    def _edges_of_both_ends(self) -> EdgeExchange:
        return edge_exchange_of(self.by_both_ends, self._targets, self.rank, self.group)

    def values_of_both_ends(self, values: Tensor) -> Tensor:
        """Return the values of the edges that touch a token of this rank.

        Args:
            values: [E, F] or [*, E, F] in the order of ``shard.graph.edge_index``.

        Returns:
            The values in the order of the edges of :attr:`by_both_ends`. Those of edges between
            tokens of other ranks are 0.

        Raises:
            ValueError: if there is not one row per edge.
        """
        edges = self.graph.num_edges
        if values.dim() < 2 or values.shape[-2] != edges:
            raise ValueError(
                f"edge_features must have the {edges} edges of rank {self.rank} in dimension -2, "
                f"got shape {list(values.shape)}: shard.split(values, of='edges') gives them"
            )
        return self._edges_of_both_ends(values)

    def check_tokens(self, name: str, x: Any, count: int) -> None:
        """Check that a tensor [*, count, dim] has the tokens of this rank."""
        if isinstance(x, Tensor) and x.dim() >= 2 and x.shape[-2] != count:
            raise ValueError(
                f"{name} must have the {count} tokens of rank {self.rank} of {self.ranks}, got "
                f"shape {list(x.shape)}: shard.split(x) gives them"
            )

    def call_of(self, layer: Any, given: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Return a context for a call of a layer, on which all ranks agree before rows travel.

        It does nothing where no row travels.

        Args:
            layer: the layer.
            given: all arguments by name.

        Raises:
            ValueError: which names the argument that differs, and which ranks have what.
            RankFailure: if another rank has raised an error before it sent rows.
        """
        if self.group is None or not self._has_border:
            return nullcontext()
        traced = torch.compiler.is_compiling()
        both = bool(self.broadcast) or "positions" in layer.exchanged
        name = layer.text_when_made if traced else repr(layer)
        facts = facts_of_call(name, layer.exchanged, given, both=both)
        if self.broadcast:  # they decide whether queries are sent
            weights = given.get("return_attention_weights", False) is not False
            has_bias = given.get("edge_bias") is not None
            facts.texts.extend(["edge_bias or weights", str(weights or has_bias)])
        if isinstance(bias := given.get("edge_bias"), Tensor):
            facts.texts.extend(["edge_bias", TABLE if self.is_table(bias) else VALUES])
        return tracing(facts) if traced else calling(self.group, facts.filled())

    @cached_property
    def _has_border(self) -> bool:
        """Whether any rank sees a token of another rank."""
        return bool(self.broadcast) or self.most_received > 0

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a ShardedGraph belongs to a process group, and cannot be copied or pickled: copy the "
            "graph, and call graphattn.distributed.shard again"
        )

    def __repr__(self) -> str:
        return (
            f"ShardedGraph(rank={self.rank} of {self.ranks}, num_targets={self.num_targets}, "
            f"num_sources={self.num_sources}, whole={self.whole})"
        )


class NeighborShard(ShardedGraph):
    """One rank's part of a graph of neighbours, of which it knows the edges of its own targets.

    :meth:`ShardedGraph.knn_graph` and :meth:`ShardedGraph.radius_graph` make it. Rows are always
    fetched at once. ``whole`` has the tokens of all ranks, and no edges.
    """

    def __init__(self, base: ShardedGraph, neighbors: Neighbors) -> None:
        whole, device, rank, group = base.whole, base.device, base.rank, base.group
        tokens = TokenGraph(
            edge_index=torch.empty((2, 0), dtype=torch.int64, device=device),
            num_targets=whole.num_targets,
            num_sources=whole.num_sources,
            sizes=whole.sizes,
            starts=whole.starts,
            positions=whole.own_positions,
        )
        tokens._points_backward = False
        sources, self._found = base._sources, neighbors
        context = neighbors.source.unique()
        count = len(neighbors.target)
        exchange, rows, edges = asking_exchange(context.cpu(), count, sources, rank, group, device)
        plan = NeighborPlan(
            tokens, base._targets, sources, "targets", "rows", RunTable.of_runs([]),
            rows=rows, edges_of_ranks=edges, search=base._candidates.plan,
        )  # fmt: skip
        super().__init__(plan, rank, group)
        self._candidates = base._candidates  # for another search
        of_targets, of_sources = self.tokens.positions, whole.source_positions[context]
        graph = neighbors.graph(self.num_targets, context, (of_targets, of_sources))
        local = as_local(graph, rank, self.ranks)
        self.by_targets = LocalPart(local, exchange, slice(0, self.num_targets), context.cpu())

    @cached_property
    @made_for_training
    def by_both_ends(self) -> LocalPart:
        """The graph of all edges that touch a token of this rank; other ranks send them once."""
        layout, device = self._targets, self.device
        if self.group is not None:
            agree_on_call(self.group)
        edges = edges_of_both_ends(self._found, layout, self.rank, self.group, device)
        context = torch.cat([layout.tokens(self.rank), edges.flatten()]).unique()
        exchange, _, _ = asking_exchange(context, 0, layout, self.rank, self.group, device)
        source, target = torch.searchsorted(context, edges)
        key = (target * len(context) + source).unique()
        ends = torch.stack([key % len(context), key // len(context)]).to(device)
        positions = self.whole.positions[context.to(device)]
        counts = torch.bincount(sequences_of(self.whole, context).cpu()).tolist()
        among = TokenGraph(
            edge_index=ends,
            num_targets=len(context),
            num_sources=len(context),
            sizes=tuple((count, count) for count in counts),
            positions=(positions, positions),
        )
        return self._with_both_ends(among, exchange, context)

    def nearby(self, window: int) -> NoReturn:
        raise ValueError(
            "graph must not be a graph of neighbours that was found over ranks, of whose edges no "
            f"rank knows all, for a layer that sees only those of a window, here {window}: make "
            "the layer without a window"
        )

    def _whole_count(self, of: str) -> int:
        if of == "edges":
            raise ValueError(
                "of must be 'targets' or 'sources' for a graph of neighbours, whose edges no rank "
                "knows all, got 'edges': compute values per edge from shard.graph"
            )
        return super()._whole_count(of)


def shard_like(part: ShardedGraph, graph: TokenGraph) -> ShardedGraph:
    """Divide another graph over the same tokens in the same way, on all ranks of the group."""
    layout = part.share.targets
    made = planned(graph, layout, layout, "targets", None if part.ranks > 1 else ("rows", ()))
    return ShardedGraph(made, part.rank, part.group)


def _token_dim(x: Tensor) -> int:
    return -2 if x.is_floating_point() and x.dim() >= 2 else -1


def _size(x: Tensor, dim: int) -> int | None:
    """Return the size of a dimension; None if there is no such dimension."""
    return x.shape[dim] if -x.dim() <= dim < x.dim() else None


__all__ = ["ShardedGraph"]

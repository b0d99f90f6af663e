"""Plans of communication: which rank needs which tokens of which other rank, from the graph alone.

A row is what a layer sends of one token, for example its key and its value. A plan needs no
processes, and no memory for pairs of ranks: it keeps the runs of tokens that every rank receives.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from graphattn.distributed.layout import Layout
from graphattn.distributed.planning.inside import runs_inside
from graphattn.distributed.planning.needs import RunTable, edges_per_rank, remote_runs
from graphattn.distributed.planning.plan_text import lines_of
from graphattn.distributed.ring.states import StatePlan, plan_of_states
from graphattn.distributed.seen import Run, global_tokens
from graphattn.distributed.seen import count as count_tokens
from graphattn.graphs.arguments import as_choice, as_float, as_int
from graphattn.graphs.edges.stored_values import made_for_training
from graphattn.graphs.token_graph import TokenGraph

Exchange = Literal["rows", "ring"]
Moves = Literal["targets", "both"]
# Published bytes per second and direction of one H100 SXM: NVLink 4 has 900 GB/s in both directions
# together (NVIDIA H100 data sheet), and NDR InfiniBand 400 Gbit/s (ConnectX-7, one per GPU).
H100_SXM = (450e9, 50e9)
# Names of bandwidths, inside a node and between nodes.
LINKS = {"H100 SXM": H100_SXM, "NVLink": (450e9, 450e9), "InfiniBand": (50e9, 50e9)}
LATENCY = 10e-6  # seconds until the first byte arrives; assumed, not published
WORTH_ZIGZAG = 0.9  # of the edges of the busiest rank
# Bytes to the busiest rank: 0.8 ms at 10 Gbit/s. Two operations in place of one take about as much.
WORTH_HIDING = 1 << 20

Bandwidth = str | float | tuple[float, float]


@dataclass(frozen=True, eq=False, repr=False)
class CommunicationPlan:
    """Plan of which rows every rank receives from which other rank; :func:`plan` makes it.

    Every rank owns some targets and some sources. It needs the rows of all sources that its targets
    see, and receives exactly those that it does not own, each directly from its owner. In the
    backward pass, the gradients of these rows travel back.

    Attributes:
        graph: the graph.
        target_layout: which targets a rank owns.
        source_layout: which sources a rank owns, whose rows it sends.
        moves: "targets", or "both" if the layer moves both ends of an edge.
        exchange: "rows" if all rows arrive at once, before the operation. "ring" if they arrive in
            rounds: in round d = 1 .. ranks - 1, rank r receives the rows of rank (r - d) % ranks.
        needs: the runs of sources that every rank receives.
        broadcast: the global tokens whose queries go to all ranks, where they are compared with
            the sources of that rank; the partial results go back. So their owner does not need all
            rows.

    Example:
        >>> import graphattn as ga
        >>> plan = ga.distributed.plan(ga.causal_window_graph(1024, window=256), ranks=4)
        >>> plan.received_rows, plan.sent_rows
        (tensor([  0, 255, 255, 255]), tensor([255, 255, 255,   0]))
        >>> plan.pairs(2), plan.sends(2)
        ([(1, [(257, 512)])], [(3, [(513, 768)])])
    """

    graph: TokenGraph
    target_layout: Layout
    source_layout: Layout
    moves: Moves
    exchange: Exchange
    needs: RunTable
    broadcast: tuple[int, ...] = ()

    @property
    def ranks(self) -> int:
        return self.source_layout.ranks

    @cached_property
    def own_rows(self) -> Tensor:
        """How many rows each rank owns, a LongTensor [ranks]."""
        return self.source_layout.per_rank(self._borders.diff())

    @cached_property
    def received_rows(self) -> Tensor:
        """How many rows each rank receives, a LongTensor [ranks]."""
        return self.needs.counted(self.ranks)

    @cached_property
    def sent_rows(self) -> Tensor:
        """How many rows each rank sends, a LongTensor [ranks]; a row counts for every receiver."""
        return self._sent(self.needs)

    @cached_property
    def partners(self) -> Tensor:
        """How many ranks each rank receives rows from, a LongTensor [ranks]."""
        R, layout, chunks = self.ranks, self.source_layout, self.source_layout.num_chunks
        first, last = layout.chunk_of(self.needs.start), layout.chunk_of(self.needs.stop - 1) + 1
        owners = RunTable(self.needs.rank, first, last)  # runs of chunks, and then of ranks
        if chunks > R:  # Rank r also owns chunk 2 R - 1 - r.
            mirrored = RunTable(self.needs.rank, chunks - last, chunks - first)
            owners = RunTable.concatenated([owners.cut(0, R), mirrored.cut(0, R)])
        return owners.joined(R).counted(R)

    @cached_property
    def edges(self) -> Tensor:
        """How many edges lead to the targets of each rank, a LongTensor [ranks]."""
        return edges_per_rank(self.graph, self.target_layout)

    @property
    def balance(self) -> float:
        """Edges of the busiest rank, divided by the mean; 1 is perfect."""
        total = int(self.edges.sum())
        return int(self.edges.max()) * self.ranks / total if total else 1.0

    @cached_property
    def inside(self) -> RunTable:
        """The longest run of targets that see no other rank, for every chunk of the targets.

        Layers compute these first, while the rows of the others travel. If a layer moves both ends
        of an edge, no target of another rank sees them, either.
        """
        both = self.moves == "both"
        return runs_inside(self.graph, self.target_layout, self.source_layout, both=both)

    @cached_property
    def inside_targets(self) -> Tensor:
        """How many targets of each rank are computed while rows travel, a LongTensor [ranks].

        All are 0 if none are computed first: see :attr:`has_inside`.
        """
        if not self.has_inside:
            return torch.zeros_like(self.own_rows)
        return self.target_layout.per_rank(self.inside.stop - self.inside.start)

    @cached_property
    def has_inside(self) -> bool:
        """Whether layers compute targets that see no other rank first, while rows travel."""
        if self.exchange == "ring" or self.broadcast:
            return False
        if not self.received_rows.any():
            return False
        inside = self.inside.stop - self.inside.start
        return 2 * int(inside.sum()) >= self.graph.num_targets

    def pairs(self, rank: int) -> list[tuple[int, list[Run]]]:
        """List what `rank` receives: senders in ascending order, each with its runs of sources.

        A run is a pair of the first token and the one after the last.

        Raises:
            ValueError: if there is no such rank.
        """
        needed = self.needs.rank == self._checked(rank)
        start, stop = self.needs.start[needed], self.needs.stop[needed]
        _, chunk, start, stop = self.source_layout.cut_at_chunks(start, stop)
        pieces = RunTable(self.source_layout.rank_of(chunk), start, stop)
        return pieces.joined(self.graph.num_sources).by_rank()

    def senders(self, rank: int) -> list[tuple[int, int]]:
        """Count the rows that `rank` receives from each sender, in ascending order."""
        return [(sender, count_tokens(runs)) for sender, runs in self.pairs(rank)]

    def title(self) -> str:
        """Name the graph."""
        return repr(self.graph)

    def sends(self, rank: int) -> list[tuple[int, list[Run]]]:
        """List what `rank` sends: receivers in ascending order, each with its runs of sources.

        It is the mirror image of :meth:`pairs`.

        Raises:
            ValueError: if there is no such rank.
        """
        runs = self.source_layout.runs(self._checked(rank))
        pieces = RunTable.concatenated(self.needs.cut(run.start, run.stop) for run in runs)
        return pieces.joined(self.graph.num_sources).by_rank()

    def bytes(self, dtype: torch.dtype, features: int, *, backward: bool = False) -> Tensor:
        """Count the bytes that every rank receives for one layer, a LongTensor [ranks].

        Its ``max()`` is the busiest rank, its ``sum()`` all traffic. In the forward pass these are
        rows. In the backward pass, every rank receives the gradients of the rows that it sent; on
        a ring, it also receives the rows again, because no rank has kept them.

        Args:
            dtype: the dtype of rows and gradients.
            features: the numbers in a row, for example 2 * kv_heads * head_dim for keys and values.
            backward: whether to count the backward pass, and not the forward pass.

        Raises:
            ValueError: if `dtype` is not a dtype, or `features` < 1.

        Example:
            >>> import torch, graphattn as ga
            >>> plan = ga.distributed.plan(ga.causal_window_graph(1024, window=256), ranks=4)
            >>> plan.bytes(torch.bfloat16, features=2 * 8 * 128)
            tensor([      0, 1044480, 1044480, 1044480])
        """
        rows = self.received_rows
        if backward:
            rows = self.sent_rows + (rows if self.exchange == "ring" else 0)
        return (rows + self._of_global_tokens) * _bytes_per_row(dtype, features)

    @cached_property
    def states(self) -> StatePlan | None:
        """The states that linear attention may send in place of rows; None if it may not.

        A state is the sums of k_j v_j^T and of k_j over sources that a target sees as a whole.
        """
        if self.exchange != "ring" or self.moves != "targets":
            return None
        return plan_of_states(self.graph, self.target_layout, self.source_layout)

    def widest_state(self, *, rope: bool = False) -> int:
        """Return the most features that heads of linear attention may have to send states.

        A state of D features of keys and of values has D (D + 1) numbers per head. All states
        together must be smaller than all rows, which otherwise travel. The result is 0 if rows
        travel for any number of features.

        Args:
            rope: whether rotated keys would travel beside keys and values.

        Example:
            >>> import graphattn as ga
            >>> plan = ga.distributed.plan(ga.causal_graph(4096), ranks=8)
            >>> int(plan.received_rows.sum()), int(plan.states.received.sum())
            (21504, 84)
            >>> plan.widest_state()  # 84 D (D + 1) < 21504 * 2 D
            510
        """
        states = 0 if self.states is None else int(self.states.received.sum())
        rows = int(self.received_rows.sum())
        return (rows * (3 if rope else 2) - 1) // states - 1 if states else 0

    def linear_bytes(
        self,
        dtype: torch.dtype,
        kv_heads: int,
        head_dim: int,
        *,
        rope: bool = False,
        backward: bool = False,
    ) -> Tensor:
        """Count the bytes that every rank receives for a layer of linear attention, [ranks].

        They are those of :meth:`bytes`, unless it sends states (:meth:`widest_state`). In the
        backward pass, every rank then receives the gradients of the states that it sent.

        Args:
            dtype: the dtype of features, at least float32.
            kv_heads: the number of key and value heads.
            head_dim: the features of a key and of a value.
            rope: whether features are rotated.
            backward: whether to count the backward pass, and not the forward pass.

        Raises:
            ValueError: if an argument is out of range.

        Example:
            >>> import torch, graphattn as ga
            >>> plan = ga.distributed.plan(ga.causal_graph(2**20), ranks=8)
            >>> plan.linear_bytes(torch.float32, 8, 64).max()  # 14 states
            tensor(1863680)
            >>> plan.bytes(torch.float32, features=2 * 8 * 64).max()
            tensor(3758096384)
        """
        heads, D = as_int("kv_heads", kv_heads, 1), as_int("head_dim", head_dim, 1)
        if self.states is None or self.widest_state(rope=rope) < D:
            return self.bytes(dtype, heads * D * (3 if rope else 2), backward=backward)
        count = self.states.sent if backward else self.states.received
        return count * _bytes_per_row(dtype, heads * D * (D + 1))

    @cached_property
    def _of_global_tokens(self) -> Tensor:
        """Queries of global tokens and partial results that every rank receives, [ranks].

        In the backward pass, as many gradients travel the other way, and their number is the same.
        """
        tokens = torch.tensor(self.broadcast, dtype=torch.int64)
        of_rank = torch.bincount(self.target_layout.owner(tokens), minlength=self.ranks)
        return len(tokens) - of_rank + (self.ranks - 1) * of_rank

    def all_gather_bytes(self, dtype: torch.dtype, features: int) -> Tensor:
        """Count the bytes that every rank receives if it gathers all rows, a LongTensor [ranks].

        The backward pass, which scatters the sums of all gradients, receives as many.

        Raises:
            ValueError: if `dtype` is not a dtype, or `features` < 1.
        """
        remote = self.graph.num_sources - self.own_rows
        return remote * _bytes_per_row(dtype, features)

    def seconds(
        self,
        dtype: torch.dtype,
        features: int,
        *,
        backward: bool = False,
        bandwidth: Bandwidth = "H100 SXM",
        latency: float = LATENCY,
        per_node: int = 8,
    ) -> float:
        """Predict the seconds that the exchange of one layer takes; nothing is measured.

        The prediction is the time of the busiest rank. Links inside a node and between nodes work
        at the same time, and so do both directions of a link. The latency counts once if all rows
        arrive at once, and once per sender on a ring, in whose other rounds a rank does nothing.
        Messages reach the full bandwidth, and no rank waits for another one. So real exchanges take
        longer. :meth:`hidden_seconds` says how much of it computation hides.

        Args:
            dtype: the dtype of rows and gradients.
            features: the numbers in a row.
            backward: whether to predict the backward pass, and not the forward pass.
            bandwidth: bytes per second and direction of one rank: a pair (inside a node, between
                nodes), one number for both, or a name. "H100 SXM" has the published numbers of
                NVLink 4 inside and of NDR InfiniBand between nodes, "NVLink" and "InfiniBand" have
                one of them for both.
            latency: seconds until a message begins to arrive; the default is an assumption.
            per_node: how many ranks share a node: ranks 0 .. per_node - 1, and so on.

        Raises:
            ValueError: if an argument is out of range.
        """
        inside, between = _bandwidths(bandwidth)
        latency = as_float("latency", latency, positive=False)
        near_in, near_out = self._within_nodes(as_int("per_node", per_node, 1))
        far_in, far_out = self.received_rows - near_in, self.sent_rows - near_out
        ring = self.exchange == "ring"
        if backward and ring:  # Rows come again, and their gradients go the other way.
            near_rows, far_rows = near_in + near_out, far_in + far_out
        else:
            near_rows, far_rows = torch.maximum(near_in, near_out), torch.maximum(far_in, far_out)
        if not int(self.received_rows.max()):
            return 0.0
        size = _bytes_per_row(dtype, features)
        transfer = size * torch.maximum(near_rows / inside, far_rows / between).max()
        rounds = int(self.partners.max()) * (2 if backward else 1) if ring else 1
        return float(transfer) + rounds * latency

    def hidden_seconds(
        self,
        compute: float,
        dtype: torch.dtype,
        features: int,
        *,
        backward: bool = False,
        bandwidth: Bandwidth = "H100 SXM",
        latency: float = LATENCY,
        per_node: int = 8,
    ) -> float:
        """Predict how many :meth:`seconds` of the exchange pass while a rank computes.

        A layer then takes ``compute + seconds - hidden_seconds``. Its targets that see no other
        rank (:attr:`inside_targets`) are computed while rows travel, if at least 1 MiB goes to the
        busiest rank. Consensus computes at least these. Attention over scattered targets or beside
        global tokens computes something, too, but the result is 0 here. On a ring, a round is
        computed while the rows of the next one travel, and all rounds are taken to be equal.
        Nothing is measured.

        Args:
            compute: the seconds that a rank computes in this pass of the layer, as measured on one
                rank without an exchange.
            dtype, features, backward, bandwidth, latency, per_node: as in :meth:`seconds`.

        Raises:
            ValueError: if an argument is out of range.

        Example:
            >>> import torch, graphattn as ga
            >>> plan = ga.distributed.plan(ga.causal_window_graph(2**20, window=4096), ranks=64)
            >>> plan.seconds(torch.bfloat16, 2048, bandwidth="InfiniBand")  # of 16.8 MB
            0.0003...
            >>> plan.hidden_seconds(1e-3, torch.bfloat16, 2048, bandwidth="InfiniBand")  # all
            0.0003...
            >>> plan.hidden_seconds(2e-4, torch.bfloat16, 2048, bandwidth="InfiniBand")
            0.00015...
        """
        compute = as_float("compute", compute, positive=False)
        links = {"bandwidth": bandwidth, "latency": latency, "per_node": per_node}
        travel = self.seconds(dtype, features, backward=backward, **links)  # type: ignore[arg-type]
        return min(travel, compute * self._share_meanwhile(_bytes_per_row(dtype, features)))

    def _share_meanwhile(self, bytes_per_row: int) -> float:
        """Return the share of a rank's work that is done while something travels."""
        if self.exchange == "ring":
            rounds = int(self.partners.max()) + 1
            return (rounds - 1) / rounds
        if int(self.received_rows.max()) * bytes_per_row < WORTH_HIDING:
            return 0.0
        owned = self.target_layout.per_rank(self.target_layout.borders().diff())
        return float((self.inside_targets / owned).min())

    def describe(self, *, dtype: torch.dtype = torch.bfloat16, features: int = 2048) -> str:
        """Return a short text about the plan, with the bytes of a layer as an example.

        ``print(plan)`` shows it, too.

        Args:
            dtype: the dtype of rows and gradients.
            features: the numbers in a row. The default is that of keys and values of 8 heads with
                128 features each.

        Raises:
            ValueError: if `dtype` is not a dtype, or `features` < 1.

        Example:
            >>> import torch, graphattn as ga
            >>> plan = ga.distributed.plan(ga.window_path_graph(3000, window=10), ranks=3)
            >>> print(plan.describe(dtype=torch.float32, features=64))
            Plan of communication: 3 ranks, all rows at once, before the operation
            TokenGraph(num_tokens=3000, num_edges=59890, structure=Band)
              rank  tokens  receives rows from
                 0   1,000  10: rank 1 (10)
                 1   1,000  20: rank 0 (10), rank 2 (10)
                 2   1,000  10: rank 1 (10)
            edges per rank: 19,945 to 20,000, mean 19,963.3, largest / mean 1.00
            one layer, 64 numbers of float32 per row, received by the busiest rank:
              forward 5.12 kB, backward 5.12 kB; all-gather 512 kB each, 100 times the forward
            predicted for H100 SXM in nodes of 8, not measured: forward 10 µs, backward 10 µs
        """
        return "\n".join(lines_of(self, dtype, features, WORTH_HIDING))

    def __str__(self) -> str:
        return self.describe()

    def __repr__(self) -> str:
        return (
            f"CommunicationPlan(ranks={self.ranks}, exchange={self.exchange!r}, "
            f"largest_received_rows={self.received_rows.max()}, graph={self.graph!r})"
        )

    @cached_property
    def _borders(self) -> Tensor:
        return self.source_layout.borders()

    def _sent(self, table: RunTable) -> Tensor:
        return self.source_layout.per_rank(table.counted_between(self._borders))

    def _within_nodes(self, per_node: int) -> tuple[Tensor, Tensor]:
        """Count the rows that every rank receives from and sends to ranks of its node."""
        first = torch.div(self.needs.rank, per_node, rounding_mode="floor") * per_node
        last = (first + per_node).clamp(max=self.ranks)
        cuts = [self.needs.cut(self._borders[first], self._borders[last])]
        if self.source_layout.zigzag:
            first, last = 2 * self.ranks - last, 2 * self.ranks - first
            cuts.append(self.needs.cut(self._borders[first], self._borders[last]))
        near = RunTable.concatenated(cuts)
        return near.counted(self.ranks), self._sent(near)

    def _checked(self, rank: int) -> int:
        rank = as_int("rank", rank, 0)
        if rank >= self.ranks:
            raise ValueError(f"rank must be < ranks = {self.ranks}, got {rank}")
        return rank


def plan(
    graph: TokenGraph,
    ranks: int,
    *,
    moves: Moves = "targets",
    zigzag: bool | None = None,
) -> CommunicationPlan:
    """Plan which rows ranks exchange, without any process.

    It takes seconds for 65,536 ranks. No edge is listed for windows, blocks, cycles, causal and
    complete graphs, global tokens, and batches and unions of these. The edges of other graphs are
    read once.

    Args:
        graph: the graph of the whole sequence.
        ranks: 1 <= ranks <= number of targets and of sources.
        moves: "both" for consensus with ``update="energy"``, which moves both ends of an edge: a
            rank then also needs the targets that see its sources.
        zigzag: whether rank r owns chunks r and 2 * ranks - 1 - r (a zigzag). None decides:
            True for a causal graph on a ring, if the busiest rank then has at least a tenth fewer
            edges.

    Raises:
        ValueError: if an argument is out of range, or `moves` is "both" although targets and
            sources are different tokens.

    Example:
        >>> import graphattn as ga
        >>> plan = ga.distributed.plan(ga.causal_graph(2**24), ranks=1024)
        >>> plan.exchange, plan.target_layout.zigzag, round(plan.balance, 3)
        ('ring', True, 1.0)
        >>> ga.distributed.plan(ga.causal_graph(2**24), 1024, zigzag=False).balance
        1.99...
    """
    if not isinstance(graph, TokenGraph):
        raise ValueError(f"graph must be a TokenGraph, got {type(graph).__name__}")
    ranks = as_int("ranks", ranks, 1)
    as_choice("moves", moves, ("targets", "both"))
    if zigzag is not None and not isinstance(zigzag, bool):
        raise ValueError(f"zigzag must be True, False or None, got {zigzag!r}")
    for name, count in (("targets", graph.num_targets), ("sources", graph.num_sources)):
        if ranks > count:
            raise ValueError(f"ranks must be <= the number of {name} = {count}, got {ranks}")
    if moves == "both" and not graph.has_same_tokens:
        raise ValueError(
            'moves must be "targets" if targets and sources are different tokens, got "both"'
        )
    plain = planned(graph, *_layouts(graph, ranks, bool(zigzag)), moves)
    if zigzag is None and graph.is_causal and plain.exchange == "ring":
        balanced = planned(graph, *_layouts(graph, ranks, True), moves)
        if int(balanced.edges.max()) <= WORTH_ZIGZAG * int(plain.edges.max()):
            return balanced
    return plain


@made_for_training
def planned(
    graph: TokenGraph,
    targets: Layout,
    sources: Layout,
    moves: Moves = "targets",
    chosen: tuple[Exchange, tuple[int, ...]] | None = None,
) -> CommunicationPlan:
    """Plan the exchange between ranks that own certain targets and sources.

    `chosen` are the exchange and the broadcast of the plan; None chooses them.
    """
    layouts = graph, targets, sources
    if chosen is not None:
        exchange, tokens = chosen
        needs = remote_runs(*layouts, both=moves == "both", left_out=tokens)
        return CommunicationPlan(*layouts, moves, exchange, needs, tokens)
    rows = sources.per_rank(sources.borders().diff())
    needs = remote_runs(*layouts, both=moves == "both")
    exchange = exchange_of(needs.counted(sources.ranks), rows)
    tokens = global_tokens(graph.structure)
    if exchange == "ring" and tokens and moves == "targets":
        others = remote_runs(*layouts, both=False, left_out=tokens)
        if exchange_of(others.counted(sources.ranks), rows) == "rows":
            return CommunicationPlan(*layouts, moves, "rows", others, tokens)
    return CommunicationPlan(*layouts, moves, exchange, needs)


def _layouts(graph: TokenGraph, ranks: int, zigzag: bool) -> tuple[Layout, Layout]:
    return Layout(graph.num_targets, ranks, zigzag), Layout(graph.num_sources, ranks, zigzag)


def exchange_of(received_rows: Tensor, own_rows: Tensor) -> Exchange:
    """Choose how rows travel, from the rows that every rank receives and owns, both [ranks].

    It is "ring" if a rank receives more than twice as many rows as it owns. A rank that gets all
    rows at once keeps them until the backward pass, so it would hold more than three times its
    share. On a ring, it holds the rows of one other rank at a time, and receives them again in the
    backward pass. One such rank is enough, because its memory is what ends a run.
    """
    return "ring" if bool((received_rows > 2 * own_rows).any()) else "rows"


def _bandwidths(given: Bandwidth) -> tuple[float, float]:
    """Return the bytes per second inside a node and between nodes."""
    pair: Any = LINKS.get(given) if isinstance(given, str) else given
    if isinstance(pair, int | float):
        pair = pair, pair
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise ValueError(
            "bandwidth must be bytes per second, a pair of them (inside a node and between nodes) "
            f"or one of {list(LINKS)}, got {given!r}"
        )
    inside, between = (as_float("bandwidth", speed, positive=True) for speed in pair)
    return inside, between


def _bytes_per_row(dtype: torch.dtype, features: int) -> int:
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype must be a torch.dtype, got {dtype!r}")
    return as_int("features", features, 1) * dtype.itemsize

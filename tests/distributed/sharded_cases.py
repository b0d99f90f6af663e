"""Layers over graphs that are divided among ranks, beside the same layers in one process.

The functions that take a group run on every rank. All ranks draw the same numbers.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import graphattn as ga
from graphattn.distributed.layout import Layout
from graphattn.distributed.planning.plans import planned
from graphattn.distributed.ring.operations import SoftmaxParts, TopKParts

WIDE = torch.float64
DIM, HEADS = 8, 2


def _edges(rng: random.Random, targets: int, sources: int) -> Tensor:
    count = rng.randint(1, 4 * targets)
    ends = [torch.randint(0, sources, (count,)), torch.randint(0, targets, (count,))]
    return torch.stack(ends).unique(dim=1)


def _packed(rng: random.Random, n: int, w: int) -> ga.TokenGraph:
    parts = [ga.window_path_graph(n, w), ga.complete_graph(5), ga.window_path_graph(7, 2)]
    return ga.batch([*parts, ga.block_window_graph(n, 4)])


# By name: a graph of about n tokens, with windows of about w.
GRAPHS: dict[str, Callable[[random.Random, int, int], ga.TokenGraph]] = {
    "window": lambda rng, n, w: ga.window_path_graph(n, w),
    "window with self-loops": lambda rng, n, w: ga.window_path_graph(n, w, self_loops=True),
    "causal window": lambda rng, n, w: ga.causal_window_graph(n, w),
    "dilated": lambda rng, n, w: ga.dilated_window_graph(n, w, dilation=rng.randint(2, 9)),
    "blocks": lambda rng, n, w: ga.block_window_graph(n, w),
    "cycle": lambda rng, n, w: ga.window_cycle_graph(2 * n, min(w, n - 1)),
    "causal": lambda rng, n, w: ga.causal_graph(n),
    "complete": lambda rng, n, w: ga.complete_graph(n),
    "longformer": lambda rng, n, w: ga.longformer_graph(n, w, [0, n // 2]),
    "bigbird": lambda rng, n, w: ga.bigbird_graph(n, w, 2, [0], seed=1),
    "union": lambda rng, n, w: ga.union(
        ga.window_path_graph(n, 1), ga.dilated_window_graph(n, 2, 5)
    ),
    "global tokens": lambda rng, n, w: ga.longformer_graph(80, 3, [0, 41, 42]),
    "class token": lambda rng, n, w: ga.grid_window_graph(8, 8, 1, class_token=True),
    "grid": lambda rng, n, w: ga.grid_window_graph(5, 6, 2),
    "grid blocks": lambda rng, n, w: ga.grid_block_graph(6, 6, 3),
    "neighbours": lambda rng, n, w: ga.knn_graph(torch.randn(n, 3), 3),
    "edges": lambda rng, n, w: ga.from_edge_index(_edges(rng, n, n), num_targets=n),
    "permuted": lambda rng, n, w: ga.window_path_graph(n, w).permute(torch.randperm(n)),
    "packed": _packed,
    "packed causal": lambda rng, n, w: ga.batch([ga.causal_graph(n), ga.causal_window_graph(9, w)]),
    "two tracks": lambda rng, n, w: ga.bipartite_window_graph(n, w),
    "two tracks, complete": lambda rng, n, w: ga.bipartite_complete_graph(n, rng.randint(1, 20)),
    "two tracks, edges": lambda rng, n, w: ga.from_edge_index(
        _edges(rng, n, 7), num_targets=n, num_sources=7
    ),
    "past": lambda rng, n, w: ga.causal_graph(n, past=5),
}

SOFTMAX: dict[str, Callable[[], nn.Module]] = {
    "dot": lambda: ga.nn.DotProductAttention(DIM, HEADS, kv_heads=1, rope=True, sink=True),
    "dot, softcap": lambda: ga.nn.DotProductAttention(DIM, HEADS, softcap=2.0),
    "dot, in place": lambda: ga.nn.DotProductAttention(DIM, HEADS, scaling="sq_inplace"),
    "dot, top-k": lambda: ga.nn.DotProductAttention(DIM, HEADS, kv_heads=1, top_k=3),
}
LINEAR: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: ga.nn.LinearAttention(DIM, HEADS, rope=True),
    "linear, kv heads": lambda: ga.nn.LinearAttention(DIM, HEADS, kv_heads=1),
}
ONE_TRACK: dict[str, Callable[[], nn.Module]] = {
    "krause": lambda: ga.nn.KrauseAttention(DIM, HEADS, top_k=3, rope=True),
    "gka": lambda: ga.nn.GaussianKernelAttention(DIM, HEADS),
}


def _consensus(**options: Any) -> nn.Module:
    return ga.nn.SelfConsensus(DIM, HEADS, rank=2, edge_hidden=6, **options)


CONSENSUS: dict[str, Callable[[], nn.Module]] = {
    "target": lambda: _consensus(update="target", rope=True),
    "target, auto": lambda: _consensus(update="target", step_size="auto"),
    "target, features": lambda: _consensus(update="target", edge_features=3),
    "target, iterated": lambda: _consensus(
        update="target", rope=True, iterations=2, learned_step=True
    ),
}
ENERGY: dict[str, Callable[[], nn.Module]] = {
    "energy": lambda: _consensus(rope=True),
    "energy, auto": lambda: _consensus(step_size="auto"),
    "energy, features": lambda: _consensus(edge_features=3, step_size="auto"),
    "energy, by messages": lambda: _consensus(
        step_size="auto", rope="isometric", backend="reference"
    ),
    "energy, iterated": lambda: _consensus(
        step_size="auto", rope="isometric", iterations=3, trunk="separate", edge_input="full"
    ),
}
TWO_TRACKS: dict[str, Callable[[], nn.Module]] = {
    "cross": lambda: ga.nn.CrossConsensus(DIM, HEADS, rank=2, edge_hidden=6),
    "cross, features": lambda: ga.nn.CrossConsensus(
        DIM, HEADS, rank=2, edge_hidden=6, edge_features=3, step_size="auto"
    ),
    "cross, iterated": lambda: ga.nn.CrossConsensus(
        DIM, HEADS, rank=2, edge_hidden=6, rope=True, iterations=2, step_size="learned"
    ),
}
BY_MESSAGES = {
    "dot, by messages": lambda: ga.nn.DotProductAttention(DIM, HEADS, backend="reference")
}


class _Doubled(ga.nn.DotProductAttention):
    """A layer with its own logits, which runs through `propagate`."""

    def log_affinity(self, query_i: Tensor, key_j: Tensor) -> Tensor:
        return 2 * super().log_affinity(query_i, key_j)


def layers_over(graph: ga.TokenGraph, exchange: str) -> dict[str, Callable[[], nn.Module]]:
    """The layers that take a graph."""
    layers = {**SOFTMAX, **LINEAR}
    if exchange == "rows":
        layers |= BY_MESSAGES | {"own logits": lambda: _Doubled(DIM, HEADS)}
    if not graph.has_same_tokens:
        return layers | TWO_TRACKS
    layers |= ONE_TRACK | CONSENSUS
    return layers if graph.has_causal_part else layers | ENERGY


class Call(NamedTuple):
    """The inputs of a call for all tokens; what is None is not given."""

    x: Tensor
    context: Tensor | None
    valid: Any
    positions: Any
    edges: tuple[str, Tensor] | None

    def run(self, layer: nn.Module, graph: Any) -> Tensor:
        given: dict[str, Any] = {"valid": self.valid, "positions": self.positions}
        if self.edges is not None:
            given[self.edges[0]] = self.edges[1]
        tracks = [] if self.context is None else [self.context]
        out: Tensor = layer(self.x, graph, *tracks, **given)
        return out

    def leaves(self) -> list[Tensor]:
        """The tensors whose gradients are compared."""
        edges = None if self.edges is None else self.edges[1]
        return [x for x in (self.x, self.context, edges) if x is not None]

    def of_rank(self, shard: Any) -> tuple[Call, list[Tensor]]:
        """The inputs of a rank, and new leaves that they are parts of, in the order of `leaves`."""

        def pair(values: Any) -> Any:
            if not isinstance(values, tuple):
                return shard.split(values)
            return shard.split(values[0]), shard.split(values[1], of="sources")

        whole = [x.detach().clone().requires_grad_() for x in self.leaves()]
        rest = iter(whole)
        x = shard.split(next(rest))
        context = None if self.context is None else shard.split(next(rest), of="sources")
        edges = None
        if self.edges is not None:
            values = next(rest)
            is_table = values.shape[-2] != shard.whole.num_edges
            edges = self.edges[0], values if is_table else shard.split(values, of="edges")
        return Call(x, context, pair(self.valid), pair(self.positions), edges), whole


def draw_call(rng: random.Random, layer: Any, graph: ga.TokenGraph, exchange: str) -> Call:
    """Draw inputs: batches or not, masks, positions, biases or features of edges."""
    n, m, two = graph.num_targets, graph.num_sources, not graph.has_same_tokens
    batch = rng.choice([(), (2,)])

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=WIDE, requires_grad=True)

    edges = None
    if getattr(layer, "edge_features", 0):
        edges = "edge_features", numbers(*rng.choice([(), batch]), graph.num_edges, 3)
    elif (
        isinstance(layer, ga.nn.DotProductAttention) and layer.top_k is None and rng.random() < 0.5
    ):
        rows = None if graph.structure is None else graph.structure.num_offsets
        if rows is not None and rows != graph.num_edges:
            edges = "edge_bias", numbers(rows, HEADS)
        elif exchange == "rows":
            edges = "edge_bias", numbers(*rng.choice([(), batch]), graph.num_edges, HEADS)
    masks = torch.rand(*batch, n) < 0.8, torch.rand(*batch, m) < 0.8
    places = torch.randint(0, 100, (n,)), torch.randint(0, 100, (m,))
    return Call(
        x=numbers(*batch, n, DIM),
        context=numbers(*batch, m, DIM) if two else None,
        valid=rng.choice([None, masks if two else masks[0]]),
        positions=rng.choice([None, None, places if two else places[0]]),
        edges=edges,
    )


def real_rows(y: Tensor, valid: Any) -> Tensor:
    """Outputs with 0 at padding, where they have no meaning."""
    of_targets = valid[0] if isinstance(valid, tuple) else valid
    return y if of_targets is None else torch.where(of_targets[..., None], y, 0)


def compare(group: Any, rng: random.Random, shard: Any, layer: nn.Module) -> None:
    """Compare outputs and all gradients with those of one process."""
    import torch.distributed as dist

    graph = shard.whole
    for p in layer.parameters():
        nn.init.normal_(p, std=0.5)
    call = draw_call(rng, layer, graph, shard.exchange)
    weight = torch.randn(call.x.shape, dtype=WIDE)
    expected = real_rows(call.run(layer, graph), call.valid)
    gradients = torch.autograd.grad(
        (expected * weight).sum(), [*call.leaves(), *layer.parameters()], allow_unused=True
    )
    of_rank, whole = call.of_rank(shard)
    actual = real_rows(of_rank.run(layer, shard), of_rank.valid)
    parts = torch.autograd.grad(
        (actual * shard.split(weight)).sum(), [*whole, *layer.parameters()], allow_unused=True
    )
    close("output", shard.gather(actual), expected)
    # The parts of the gradient of a bandwidth are larger than their sum.
    by_distance = isinstance(layer, ga.nn.KrauseAttention | ga.nn.GatedKrauseAttention)
    of_bandwidth = by_distance and shard.exchange == "ring"
    for i, (part, gradient) in enumerate(zip(parts, gradients, strict=True)):
        like = [*whole, *layer.parameters()][i]
        total = torch.zeros_like(like) if part is None else part.clone()
        dist.all_reduce(total, group=group)  # every rank has the share of its own tokens
        wanted = torch.zeros_like(like) if gradient is None else gradient
        close(f"gradient {i}", total, wanted, 1e-11 if of_bandwidth else 1e-12)


def close(what: str, actual: Tensor, expected: Tensor, limit: float = 1e-12) -> None:
    actual, expected = actual.detach(), expected.detach()
    error = float((actual - expected).abs().max()) if actual.numel() else 0.0
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    assert error <= limit * max(1.0, largest), (what, error, largest)


WAYS: tuple[tuple[Any, Any], ...] = (
    ("rows", "runs"),
    ("ring", "zigzag"),
    ("rows", "zigzag"),
    ("ring", "runs"),
    ("auto", "runs"),
    ("auto", "zigzag"),
)


def every_layer_over(group: Any, name: str, way: int) -> int:
    """Compare every layer over one graph, with one of the ways of exchange and orders of tokens."""
    exchange, order = WAYS[way]
    rng = random.Random(f"{name} {way}")
    torch.manual_seed(rng.randint(0, 1 << 40))
    graph = GRAPHS[name](rng, rng.randint(2 * group.size() + 4, 60), rng.randint(1, 9))
    shard = ga.distributed.shard(graph, group, exchange=exchange, order=order)
    layers = layers_over(graph, shard.exchange)
    for layer_name, made in layers.items():
        try:
            compare(group, rng, shard, made().to(WIDE))
        except Exception as error:
            error.add_note(f"{layer_name} over {graph}, {exchange}, {order}")
            raise
    return len(layers)


def two_branches(group: Any) -> int:
    """Compare a layer whose second branch sees the nearby edges only; returns the graphs."""
    count = 0
    for number, name in enumerate(("causal", "packed causal", "edges", "longformer", "cycle")):
        exchange, order = WAYS[number]
        rng = random.Random(name)
        torch.manual_seed(8)
        shard = ga.distributed.shard(
            GRAPHS[name](rng, 24, 4), group, exchange=exchange, order=order
        )
        layer = ga.nn.GatedKrauseAttention(DIM, HEADS, krause_window=4, top_k=2, rope=True)
        compare(group, rng, shard, layer.to(WIDE))
        assert shard.nearby(4) is shard.nearby(4)
        count += 1
    near = shard.knn_graph(torch.randn(shard.num_targets, 2), 3)
    with pytest.raises(ValueError, match="must not be a graph of neighbours that was found over"):
        layer(torch.randn(shard.num_targets, DIM, dtype=WIDE), near)
    return count


def random_consensus(group: Any, seeds: list[int]) -> int:
    """Compare layers of consensus on a ring, over random graphs; returns how many."""
    for seed in seeds:
        rng = random.Random(seed)
        torch.manual_seed(seed)
        name = rng.choice([*GRAPHS])
        graph = GRAPHS[name](rng, rng.randint(2 * group.size() + 4, 40), rng.randint(1, 9))
        order: Any = rng.choice(["runs", "zigzag"])
        shard = ga.distributed.shard(graph, group, exchange="ring", order=order)
        known = {*CONSENSUS, *ENERGY, *TWO_TRACKS}
        layers = {k: made for k, made in layers_over(graph, "ring").items() if k in known}
        layer_name = rng.choice([*layers])
        try:
            compare(group, rng, shard, layers[layer_name]().to(WIDE))
        except Exception as error:
            error.add_note(f"seed {seed}: {layer_name} over {name}, {order}")
            raise
    return len(seeds)


class Sent(TorchDispatchMode):
    """Counts the numbers that collectives send to other ranks, and looks for NaN among them."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.rows: list[list[int]] = []  # of every exchange, how many rows each rank gets
        self.numbers = 0
        self.sizes: list[int] = []  # of every exchange, how many numbers all ranks get
        self.dtypes: list[torch.dtype] = []  # of every exchange
        self.has_nan = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "all_to_all" in str(func):
            rows, _, sent = args[:3]
            self.rows.append([int(n) for n in sent])
            self.numbers += rows.numel()
            self.sizes.append(rows.numel())
            self.dtypes.append(rows.dtype)
            self.has_nan |= bool(rows.isnan().any())
        return func(*args, **(kwargs or {}))


def rows_sent_by_a_causal_window(group: Any, window: int, num_tokens: int) -> dict[str, Any]:
    """Return what a forward and a backward pass of a layer sends, and what the plan says."""
    graph = ga.causal_window_graph(num_tokens, window)
    shard = ga.distributed.shard(graph, group)
    layer = ga.nn.DotProductAttention(DIM, HEADS, rope=True).to(WIDE)
    x = shard.split(torch.randn(num_tokens, DIM, dtype=WIDE)).clone().requires_grad_()
    with Sent(group.rank()) as sent:
        layer(x, shard).sum().backward()
    return {"rows": sent.rows, "numbers": sent.numbers}


def numbers_sent(shard: Any, layer: Any, *batch: int) -> tuple[int, int]:
    """Return how many numbers this rank sends in the forward and in the backward pass."""
    counts = (
        [shard.num_targets]
        if shard.whole.has_same_tokens
        else [shard.num_targets, shard.num_sources]
    )
    tokens = [torch.randn(*batch, n, DIM, dtype=WIDE, requires_grad=True) for n in counts]
    with Sent(shard.rank) as sent:
        y = layer(tokens[0], shard, *tokens[1:])
        forward = sent.numbers
        y.sum().backward()
    return forward, sent.numbers - forward


def all_ranks_send(shard: Any, numbers: int) -> int:
    """Return the bytes that all ranks send, from the float64 numbers of this one."""
    total = torch.tensor(8 * numbers)
    torch.distributed.all_reduce(total, group=shard.group)
    return int(total)


def bytes_are_those_of_the_plan(group: Any) -> int:
    """Compare what layers send, forward and backward, with the plan, over every graph."""
    layer = ga.nn.DotProductAttention(DIM, HEADS).to(WIDE)
    linear = ga.nn.LinearAttention(DIM, HEADS, rope=True).to(WIDE)
    for name, make in GRAPHS.items():
        rng = random.Random(name)
        torch.manual_seed(3)
        graph = make(rng, 40, 4)
        for exchange, order in WAYS[:4]:
            shard = ga.distributed.shard(graph, group, exchange=exchange, order=order)
            plan, rank = shard.plan, shard.rank
            counts = numbers_sent(shard, layer)
            # A plan counts what a rank receives: forward, rows of others; backward, the gradients
            # of its own, and on a ring the rows of others again. It sends what others receive.
            again = plan.sent_rows if exchange == "ring" else 0
            rows = int(plan.sent_rows[rank]), int((plan.received_rows + again)[rank])
            assert counts == tuple(2 * DIM * n for n in rows), (name, exchange, order, counts, rows)
            of_linear = numbers_sent(shard, linear)
            for i, backward in enumerate((False, True)):
                planned = plan.bytes(WIDE, 2 * DIM, backward=backward)
                assert all_ranks_send(shard, counts[i]) == int(planned.sum()), (name, exchange)
                sizes = HEADS, DIM // HEADS
                planned = plan.linear_bytes(WIDE, *sizes, rope=True, backward=backward)
                assert all_ranks_send(shard, of_linear[i]) == int(planned.sum()), (name, exchange)
    return len(GRAPHS)


def bytes_of_consensus(group: Any) -> int:
    """Compare what steps of consensus send on a ring, forward and backward, with the plan."""
    count = 0
    for name in ("causal", "complete", "longformer", "edges", "packed", "two tracks, complete"):
        torch.manual_seed(3)
        graph = GRAPHS[name](random.Random(name), 40, 4)
        order: Any = WAYS[count % 2][1]
        shard = ga.distributed.shard(graph, group, exchange="ring", order=order)
        layers = {"target": _consensus(update="target")}
        if not graph.has_same_tokens:
            layers = {"target": ga.nn.CrossConsensus(DIM, HEADS, rank=2, edge_hidden=6)}
        elif not graph.has_causal_part:
            layers |= {"energy": _consensus()}
        for update, layer in layers.items():
            moves: Any = "both" if update == "energy" else "targets"
            plan = planned(graph, shard._targets, shard._sources, moves, ("ring", ()))
            counts = numbers_sent(shard, layer.to(WIDE))
            for sent, backward in zip(counts, (False, True), strict=True):
                expected = plan.bytes(WIDE, DIM, backward=backward)
                assert all_ranks_send(shard, sent) == int(expected.sum()), (name, update, backward)
            count += 1
    return count


def global_tokens_sent(group: Any, name: str) -> bool:
    """Return whether the owner of global tokens gets few rows, and as many as the plan says."""
    shard = ga.distributed.shard(GRAPHS[name](random.Random(0), 0, 0), group, order="runs")
    layer = ga.nn.DotProductAttention(DIM, HEADS).to(WIDE)
    x = torch.randn(shard.num_targets, DIM, dtype=WIDE)
    with Sent(group.rank()) as sent:
        layer(x, shard)
    rows = [sum(ranks) for ranks in sent.rows]
    tokens, ranks = len(shard.broadcast), shard.ranks
    owned = sum(
        owner == shard.rank for owner in shard._targets.owner(torch.tensor(shard.broadcast))
    )
    queries, results = int(owned) * (ranks - 1), tokens - int(owned)
    few = int(shard.plan.received_rows.max()) <= 2 * shard.num_targets
    return few and rows == [queries, results, int(shard.plan.sent_rows[shard.rank])]


def poisoned(group: Any, name: str, exchange: str) -> int:
    """Put NaN into tokens that share no edge with another rank, and into all padding.

    NaN must neither be sent nor change a bit of the outputs that do not see it.
    """
    rng = random.Random(name)
    torch.manual_seed(7)
    graph = GRAPHS[name](rng, 40, 3)
    shard = ga.distributed.shard(graph, group, exchange=exchange, order="runs")
    n, m, two = graph.num_targets, graph.num_sources, not graph.has_same_tokens
    source, target = graph.edge_index
    crossing = _owners(m, group)[source] != _owners(n, group)[target]
    stays = torch.ones(m, dtype=torch.bool)
    stays[source[crossing]] = False
    if not two:  # layers that move both ends fetch targets, too
        stays[target[crossing]] = False
    masks = torch.rand(n) < 0.8, torch.rand(m) < 0.8
    bad = stays | ~(masks[1] if two else masks[0])
    reached = torch.zeros(n, dtype=torch.bool)
    reached[target[stays[source]]] = True
    if not two:
        reached |= stays
        reached[source[stays[target]]] = True
    clean = shard.split(~reached & masks[0])
    x, c = torch.randn(n, DIM, dtype=WIDE), torch.randn(m, DIM, dtype=WIDE)
    layers = layers_over(graph, exchange)
    for layer_name, made in layers.items():
        layer = made().to(WIDE)
        if getattr(layer, "iterations", 1) > 1:  # every iteration reaches one edge further
            continue
        given: dict[str, Any] = {"valid": shard.split(masks[0])}
        if two:
            given["valid"] = given["valid"], shard.split(masks[1], of="sources")
        if getattr(layer, "edge_features", 0):
            features = torch.randn(graph.num_edges, 3, dtype=WIDE)
            given["edge_features"] = shard.split(features, of="edges")
        tokens = c if two else x
        with Sent(group.rank()) as sent:
            outs = []
            for seen in (tokens, tokens.masked_fill(bad[:, None], torch.nan)):
                tracks = [shard.split(seen, of="sources")] if two else []
                outs.append(layer(shard.split(x if two else seen), shard, *tracks, **given))
        assert not sent.has_nan, layer_name
        if getattr(layer, "step_size", None) != "auto":  # one step for the whole sequence
            assert torch.equal(outs[0][clean], outs[1][clean]), layer_name
    return len(layers)


def _owners(tokens: int, group: Any) -> Tensor:
    return Layout(tokens, group.size()).owner(torch.arange(tokens))


def parts_computed_in_backward(group: Any) -> dict[str, int]:
    """How many parts of a ring the backward passes of some layers compute, over two ranks."""
    graph, counts = ga.complete_graph(20), {}
    edges = ga.knn_graph(torch.arange(20.0)[:, None], 7)
    layers = layers_over(graph, "ring")
    structured = partial(ga.nn.DotProductAttention, DIM, HEADS, backend="structured")
    calls: dict[str, tuple[Callable[[], nn.Module], ga.TokenGraph]] = {
        **{name: (layers[name], graph) for name in ("dot", "gka", "krause")},
        "edges": (layers["dot"], edges),
        "structured": (structured, graph),
    }
    for name, (make, whole) in calls.items():
        shard = ga.distributed.shard(whole, group, exchange="ring")
        y = make().to(WIDE)(torch.randn(shard.num_targets, DIM, dtype=WIDE), shard)
        counts[name], plain = 0, (SoftmaxParts.part, TopKParts.part)

        def counted(self: Any, *given: Any, name: str = name, plain: Any = plain) -> Any:
            counts[name] += 1
            return plain[isinstance(self, TopKParts)](self, *given)

        SoftmaxParts.part = TopKParts.part = counted  # type: ignore[method-assign]
        try:
            y.sum().backward()
        finally:
            SoftmaxParts.part, TopKParts.part = plain  # type: ignore[method-assign]
    return counts


def trips_of_a_ring(group: Any) -> list[tuple[int, int]]:
    """Count the files that a second call and a backward pass over a ring enter, and the returns."""
    from test_find_it import files_of  # reads a page of the documentation

    layer = ga.nn.DotProductAttention(128, 8)
    shard = ga.distributed.shard(ga.causal_graph(64), group, exchange="ring")
    x = torch.randn(2, shard.num_targets, 128)
    y = layer(x, shard)
    layer(x, shard).sum().backward()
    trips = files_of(lambda: layer(x, shard)), files_of(lambda: y.sum().backward())
    return [(len(set(trip)), len(trip) - len(set(trip))) for trip in trips]

"""Graphs of neighbours over ranks, beside those of one process; functions run on every rank."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from sharded_cases import DIM, HEADS, WIDE, Sent, close
from torch import Tensor, nn

import graphattn as ga
from graphattn.distributed.layout import Layout


def _points(rng: random.Random, n: int, width: int) -> Tensor:
    """Random points; or on a lattice, where many distances are equal; some are not finite."""
    x = torch.randn(n, width, dtype=rng.choice([torch.float32, WIDE]))
    if rng.random() < 0.5:
        x = (2 * x).round()
    if rng.random() < 0.3:
        x[torch.rand(n) < 0.2] = torch.tensor([torch.nan] + [1.0] * (width - 1), dtype=x.dtype)
    return x


class Case:
    """A random search: the arguments for all tokens, and the graph that one process finds."""

    def __init__(self, rng: random.Random, ranks: int) -> None:
        n = rng.randint(2 * ranks, 40)
        self.two = rng.random() < 0.3
        m = rng.randint(1, 30) if self.two else n
        cuts = sorted(rng.choices(range(1, n), k=rng.randint(0, 2))) if not self.two else []
        lengths = [b - a for a, b in zip([0, *cuts], [*cuts, n], strict=True)]
        parts = [ga.causal_graph(length) for length in lengths if length]
        self.base = parts[0] if len(parts) == 1 else ga.batch(parts)
        if self.two:
            self.base = ga.bipartite_complete_graph(n, m)
        width = rng.choice([1, 2, 3, 7, 20])
        self.x = _points(rng, n, width)
        self.given: dict[str, Any] = {}
        if self.two:
            self.given["source"] = _points(rng, m, width).to(self.x.dtype)
        elif rng.random() < 0.5:
            self.given["self_loops"] = True
        one = {} if len(parts) == 1 else {"batch": self.base.batch}
        self.builder = rng.choice([ga.knn_graph, ga.radius_graph])
        if self.builder is ga.knn_graph:
            most = m - (not self.two and not self.given.get("self_loops"))
            self.size: float = rng.randint(1, max(1, min(most, 9)))
        else:
            self.size = rng.choice([1.0, 2**0.5, rng.random() * width])
            self.given["max_neighbors"] = rng.choice([None, 1, 3])
        self.whole = self.builder(self.x, self.size, **self.given, **one)

    def over(self, shard: Any) -> Any:
        """The graph that this rank finds."""
        given = dict(self.given)
        if self.two:
            given["source"] = shard.split(given["source"], of="sources")
        return self.builder(shard.split(self.x), self.size, **given, shard=shard)


def _layer(two: bool, rng: random.Random) -> nn.Module:
    """Return a layer for one track, or for two."""
    energy: dict[str, Any] = {"rank": 2, "edge_hidden": 6, "step_size": "auto"}
    layers: dict[str, Callable[[], nn.Module]] = {
        "dot": lambda: ga.nn.DotProductAttention(DIM, HEADS, kv_heads=1, rope=True),
        "top-k": lambda: ga.nn.DotProductAttention(DIM, HEADS, top_k=2),
        "linear": lambda: ga.nn.LinearAttention(DIM, HEADS, rope=True),
        "energy": lambda: ga.nn.SelfConsensus(DIM, HEADS, **energy),
        "features": lambda: ga.nn.SelfConsensus(DIM, HEADS, edge_features=1, **energy),
        "iterated": lambda: ga.nn.SelfConsensus(DIM, HEADS, iterations=2, **energy),
        "cross": lambda: ga.nn.CrossConsensus(DIM, HEADS, rank=2, edge_hidden=6),
    }
    made: nn.Module = layers[rng.choice(("dot", "linear", "cross") if two else [*layers][:-1])]()
    return made


def neighbours_equal_those_of_one_process(group: Any, seeds: list[int]) -> int:
    """Compare edges, outputs and gradients of random cases; returns how many."""
    for seed in seeds:
        rng = random.Random(seed)
        torch.manual_seed(seed)
        case = Case(rng, group.size())
        order: Any = rng.choice(["runs", "zigzag"])
        shard = ga.distributed.shard(case.base, group, order=order)
        try:
            _compare(rng, case, shard, group)
        except Exception as error:
            error.add_note(f"seed {seed}: {case.builder.__name__}, {case.size}, {list(case.given)}")
            raise
    return len(seeds)


def _compare(rng: random.Random, case: Case, shard: Any, group: Any) -> None:
    near, whole = case.over(shard), case.whole
    owned = Layout(whole.num_targets, group.size(), shard._targets.zigzag).tokens(group.rank())
    source, target = near.graph.edge_index
    edges = torch.stack([near.by_targets.context[source], owned[target]])
    expected = whole.edge_index[:, torch.isin(whole.edge_index[1], owned)]
    assert torch.equal(edges, expected), (edges.tolist(), expected.tolist())
    assert torch.equal(near.positions, shard.split(whole.positions))
    assert int(near.plan.edges.sum()) == whole.num_edges
    # A layer over the graph: outputs and all gradients.
    layer = _layer(case.two, rng).to(WIDE)
    for p in layer.parameters():
        nn.init.normal_(p, std=0.5)
    batch = rng.choice([(), (2,)])
    tokens = [torch.randn(*batch, whole.num_targets, DIM, dtype=WIDE, requires_grad=True)]
    if case.two:
        tokens.append(torch.randn(*batch, whole.num_sources, DIM, dtype=WIDE, requires_grad=True))
    masks = rng.choice([None, torch.rand(*batch, whole.num_targets) < 0.8])
    masks = None if case.two else masks
    given, of_rank = {"valid": masks}, {"valid": shard.split(masks)}
    if getattr(layer, "edge_features", 0):
        source, target = whole.edge_index
        given["edge_features"] = (source * 7 + target).cos()[:, None].to(WIDE)
        of_rank["edge_features"] = (edges[0] * 7 + edges[1]).cos()[:, None].to(WIDE)
    weight = torch.randn(tokens[0].shape, dtype=WIDE)
    if masks is not None:
        weight = weight * masks[..., None]
    y = layer(tokens[0], whole, *tokens[1:], **given)
    gradients = torch.autograd.grad(
        (y * weight).sum(), [*tokens, *layer.parameters()], allow_unused=True
    )
    leaves = [x.detach().clone().requires_grad_() for x in tokens]
    parts = [shard.split(leaves[0]), *(shard.split(x, of="sources") for x in leaves[1:])]
    z = layer(parts[0], near, *parts[1:], **of_rank)
    local = torch.autograd.grad(
        (z * shard.split(weight)).sum(), [*leaves, *layer.parameters()], allow_unused=True
    )
    part = shard.split(weight) != 0
    close("output", z * part, shard.split(y) * part)
    for i, (mine, wanted) in enumerate(zip(local, gradients, strict=True)):
        like = [*leaves, *layer.parameters()][i]
        total = torch.zeros_like(like) if mine is None else mine.clone()
        torch.distributed.all_reduce(total, group=group)
        close(f"gradient {i}", total, torch.zeros_like(like) if wanted is None else wanted)


def search_is_counted(group: Any) -> bool:
    """Compare the bytes of a search and of a layer with the plan; nothing that is NaN is sent."""
    torch.manual_seed(3)
    graph = ga.batch([ga.complete_graph(31), ga.complete_graph(6)])
    x = torch.randn(37, 3)
    x[11, 1] = torch.nan
    shard = ga.distributed.shard(graph, group)
    with Sent(shard.rank) as sent:
        near = shard.knn_graph(shard.split(x), 4)
    numbers = torch.tensor([n * t.itemsize for n, t in zip(sent.sizes, sent.dtypes, strict=True)])
    total = numbers.sum() + 8 * (shard.ranks + 1) * (shard.ranks - 1)  # counts, by an all-gather
    torch.distributed.all_reduce(total, group=group)
    assert int(total) == int(near.plan.search_bytes(torch.float32, 3).sum())
    assert not sent.has_nan
    layer = ga.nn.DotProductAttention(DIM, HEADS).to(WIDE)
    y = torch.randn(shard.num_targets, DIM, dtype=WIDE, requires_grad=True)
    with Sent(shard.rank) as sent:
        z = layer(y, near)
        forward = sent.numbers
        z.sum().backward()
    plan, rank = near.plan, shard.rank
    assert forward == 2 * DIM * int(plan.sent_rows[rank])
    assert sent.numbers - forward == 2 * DIM * int(plan.received_rows[rank])
    assert "graph of neighbours, 37 targets" in str(plan)
    return True


def refusals(group: Any) -> list[str]:
    """The errors of wrong calls, on this rank."""
    shard = ga.distributed.shard(ga.complete_graph(12), group)
    two = ga.distributed.shard(ga.bipartite_complete_graph(12, 5), group)
    x, first = torch.randn(shard.num_targets, 2), group.rank() == 0
    near = shard.knn_graph(x, 2)
    calls = [
        lambda: shard.knn_graph(x, 12),
        lambda: shard.knn_graph(x, 2 if first else 3),
        lambda: shard.knn_graph(x[1:] if first else x, 2),
        lambda: shard.radius_graph(x, -1.0),
        lambda: two.knn_graph(x, 2),
        lambda: ga.knn_graph(x, 2, shard=shard, batch=torch.zeros(4)),
        lambda: ga.radius_graph(x, 2, shard=ga.complete_graph(3)),
        lambda: near.split(torch.randn(24, 3), of="edges"),
        lambda: near.plan.pairs(0),
    ]
    messages = []
    for call in calls:
        try:
            call()
        except (ValueError, ga.distributed.RankFailure) as error:
            messages.append(str(error))
        else:
            messages.append("no error")
    return messages

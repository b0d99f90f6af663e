"""Inputs that few people give, on several ranks and in one process; functions run on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sharded_cases import CONSENSUS, DIM, ENERGY, HEADS, WIDE, layers_over
from torch import Tensor

import graphattn as ga


def masks_that_differ(group: Any) -> int:
    """Consensus of tokens that move but are not seen, or are elsewhere when they are seen."""
    n, count = 13, 0
    graph = ga.window_path_graph(n, 3)
    torch.manual_seed(3)
    a, b = torch.rand(n) < 0.7, torch.rand(n) < 0.7
    places = torch.randperm(n), torch.randperm(n)
    ways: Any = ("runs", "rows"), ("zigzag", "rows"), ("runs", "ring")
    shards = [
        ga.distributed.shard(graph, group, order=order, exchange=exchange)
        for order, exchange in ways
    ]
    for name, made in {**CONSENSUS, **ENERGY}.items():
        layer, given = made().to(WIDE), {}
        if layer.edge_features:
            given["edge_features"] = torch.randn(graph.num_edges, 3, dtype=WIDE)
        x = torch.randn(2, n, DIM, dtype=WIDE)
        for pair in ((None, b), (a, None), (a, b)):
            if pair[1] is None:  # a position as a target and another one as a source
                given["positions"] = places
            y = layer(x, graph, valid=pair, **given)
            whole = y if pair[0] is None else y * pair[0][:, None]
            for shard, way in zip(shards, ways, strict=True):
                of_rank = dict(given)
                if "edge_features" in given:
                    of_rank["edge_features"] = shard.split(given["edge_features"], of="edges")
                if "positions" in given:
                    of_rank["positions"] = shard.split(*places)
                y = layer(shard.split(x), shard, valid=shard.split(*pair), **of_rank)
                actual = y if pair[0] is None else y * shard.split(pair[0])[:, None]
                assert torch.allclose(actual, shard.split(whole), atol=1e-12), (name, way, pair)
                count += 1
    return count


def graph_kept_by_one_rank(group: Any) -> list[bool]:
    """Whether new graphs are in zigzag: if some, and if all ranks keep one that is."""
    first = ga.distributed.shard(ga.causal_graph(24), group, order="zigzag")
    kept = [first] if group.rank() == 0 else []
    both = first
    del first
    are_zigzag = [ga.distributed.shard(ga.causal_window_graph(24, 3), group)._targets.zigzag]
    del both
    are_zigzag.append(ga.distributed.shard(ga.causal_window_graph(24, 3), group)._targets.zigzag)
    del kept
    return are_zigzag


def bias_as_long_as_a_table(group: Any) -> list[str]:
    """Errors of values per edge that are as many as offsets: on rank 0 only, and on all ranks.

    Tables of the same length, and values that cannot be tables, are taken for what they are.
    """
    graph = ga.causal_graph(15)  # three ranks: 15 edges of 5 targets on rank 0
    shard = ga.distributed.shard(graph, group, exchange="rows", order="runs")
    torch.manual_seed(0)
    layer = ga.nn.DotProductAttention(DIM, HEADS).to(WIDE)
    x, places = torch.randn(15, DIM, dtype=WIDE), torch.randn(15, 3, dtype=WIDE)
    bias = torch.randn(graph.num_edges, HEADS, dtype=WIDE)
    table = torch.randn(15, HEADS, dtype=WIDE)
    of_rank = shard.split(bias, of="edges")
    one_each = ga.causal_window_graph(3, 3, past=5)  # three edges to each token, three offsets
    parts = ga.distributed.shard(one_each, group, exchange="rows", order="runs")
    calls = (
        lambda: layer(shard.split(x), shard, edge_bias=of_rank),
        lambda: layer(x[:1], parts, x[: parts.num_sources], edge_bias=table[:3]),
        lambda: layer(shard.split(x), shard, edge_bias=of_rank[None, shard.rank == 1 :]),
    )
    errors = []
    for call in calls:
        with pytest.raises((ValueError, ga.distributed.RankFailure)) as error:
            call()
        errors.append(str(error.value))
    distances = ga.nn.DistanceBias(HEADS).to(WIDE)
    offsets = ga.nn.OffsetBias(HEADS, max_offset=9).to(WIDE)
    for p in offsets.parameters():
        torch.nn.init.normal_(p)
    pairs = [
        (table, table),
        (bias, of_rank[None]),
        (distances(places, graph), distances(shard.split(places), shard)),
        (offsets(graph), offsets(shard)),
        (
            offsets(graph, positions=torch.arange(15)),
            offsets(shard, positions=shard.split(torch.arange(15))),
        ),
    ]
    for whole, of_rank in pairs:
        expected = shard.split(layer(x, graph, edge_bias=whole))
        assert torch.allclose(layer(shard.split(x), shard, edge_bias=of_rank), expected, atol=1e-12)
    return errors


class _OfItsOwn(ga.nn.DotProductAttention):
    """A layer with a table of biases of its own: a module's, or a parameter."""

    def __init__(self, module: bool) -> None:
        super().__init__(DIM, HEADS)
        self.table = (
            ga.nn.OffsetBias(HEADS, 9) if module else torch.nn.Parameter(torch.empty(12, 2))
        )

    def forward(self, x: Tensor, graph: Any, *given: Any, **named: Any) -> Any:
        table = self.table(graph) if callable(self.table) else self.table
        return super().forward(x, graph, *given, edge_bias=table, **named)


class _Outside(torch.nn.Module):
    """A layer, and a module of biases beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.bias = ga.nn.DotProductAttention(DIM, HEADS), ga.nn.OffsetBias(HEADS, 9)

    def forward(self, x: Tensor, graph: Any) -> Any:
        return self.layer(x, graph, edge_bias=self.bias(graph))


def learned_tables(group: Any) -> int:
    """Compare gradients of tables that a module makes, in a layer and beside it, by both ways."""
    graph, count = ga.causal_graph(12), 0
    torch.manual_seed(9)
    x, weight = torch.randn(2, 12, DIM, dtype=WIDE)
    for model in (_OfItsOwn(True), _OfItsOwn(False), _Outside()):
        model.to(WIDE)
        for p in model.parameters():
            torch.nn.init.normal_(p)
        parameters = [*model.parameters()]
        expected = torch.autograd.grad((model(x, graph) * weight).sum(), parameters)
        ways: Any = "rows", "ring"
        for exchange in ways:
            shard = ga.distributed.shard(graph, group, exchange=exchange)
            y = model(shard.split(x), shard)
            parts = torch.autograd.grad((y * shard.split(weight)).sum(), parameters)
            for part, whole in zip(parts, expected, strict=True):
                torch.distributed.all_reduce(part, group=group)
                assert torch.allclose(part, whole, rtol=1e-11, atol=1e-11)
            count += 1
    return count


def inference_first(group: Any) -> int:
    """A shard whose first use is in inference mode can be used in training."""
    count = 0
    graphs = (
        ga.causal_graph(20),
        ga.longformer_graph(40, 2, [0, 21]),
        ga.knn_graph(torch.arange(60.0).view(20, 3).sin(), 3),
    )
    for graph in graphs:
        for exchange in ("auto", "rows", "ring"):
            if exchange == "auto" and not ga.distributed.shard(graph, group).broadcast:
                continue  # as one of the others
            for name, made in layers_over(graph, exchange).items():
                if "features" in name:
                    continue
                layer = made().to(WIDE)
                shard = ga.distributed.shard(graph, group, exchange=exchange)  # type: ignore[arg-type]
                x = torch.randn(shard.num_targets, DIM, dtype=WIDE, requires_grad=True)
                if exchange == "auto" and shard.exchange == "ring" and name in BY_ROWS:
                    continue
                with torch.inference_mode():
                    first = layer(x, shard)
                y = layer(x, shard)
                assert torch.equal(first, y), name
                y.sum().backward()
                count += 1
    return count


BY_ROWS = ("dot, by messages", "own logits")


def second_derivatives(group: Any, exchange: Any) -> list[str]:
    """Return what a second derivative by rows or on a ring says."""
    messages = []
    torch.manual_seed(1)
    causal, window = (
        ga.distributed.shard(graph, group, exchange=exchange, order="runs")
        for graph in (ga.causal_graph(12), ga.causal_window_graph(12, 5))
    )
    pairs = [("linear", causal), ("linear", window)]
    for name, shard in pairs + [(name, causal) for name in ("dot", "krause", "gka")]:
        graph = shard.whole
        made = layers_over(graph, exchange)[name]
        layer = made().to(WIDE)
        whole = torch.randn(12, DIM, dtype=WIDE)
        expected = _twice(layer, whole, graph, lambda x: x)
        try:
            total = _twice(layer, whole, shard, shard.split)
        except RuntimeError as error:
            messages.append(str(error))
            continue
        torch.distributed.all_reduce(total, group=group)
        assert torch.allclose(total, expected, atol=1e-12), name
        messages.append("right")
    return messages


def _twice(layer: Any, x: Tensor, graph: Any, split: Any) -> Tensor:
    x = x.clone().requires_grad_()
    (once,) = torch.autograd.grad(layer(split(x), graph).pow(2).sum(), x, create_graph=True)
    (twice,) = torch.autograd.grad((once * torch.arange(x.numel()).view(x.shape).cos()).sum(), x)
    return twice.clone()


class _Mixed(ga.nn.DotProductAttention):
    def mix(self, *args: Any, **options: Any) -> Tensor:
        return 2 * super().mix(*args, **options)


class _Fused(ga.nn.LinearAttention):
    def fused(self, *args: Any, **options: Any) -> Tensor:
        return 2 * super().fused(*args, **options)


def own_mix_or_fused(group: Any) -> list[str]:
    """Layers with their own mix() or fused(): over global tokens, and errors on a ring."""
    errors = []
    for made in (_Mixed, _Fused):
        torch.manual_seed(4)
        layer = made(DIM, HEADS).to(WIDE)
        graph = ga.longformer_graph(40, 2, [0, 21])
        shard = ga.distributed.shard(graph, group)
        assert shard.broadcast == (0, 21)
        x = torch.randn(40, DIM, dtype=WIDE)
        expected = shard.split(layer(x, graph))
        assert torch.allclose(layer(shard.split(x), shard), expected, atol=1e-12)
        ring = ga.distributed.shard(graph, group, exchange="ring")
        try:
            layer(ring.split(x), ring)
        except ValueError as error:
            errors.append(str(error))
    return errors


def inside_vmap(group: Any) -> str:
    """Return the error of torch.vmap, in which torch does not wait for collectives."""
    shard = ga.distributed.shard(ga.window_path_graph(12, 3), group)
    layer = ga.nn.DotProductAttention(DIM, HEADS)
    x = torch.randn(3, shard.num_targets, DIM)
    try:
        with torch.no_grad():
            torch.func.vmap(lambda rows: layer(rows, shard))(x)
    except ValueError as error:
        return str(error)
    return "no error"

"""Sharded layers together with what users combine them with; every function runs on all ranks."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import graphattn as ga

DIM, HEADS = 16, 2


def _layers() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {
        "dot": ga.nn.DotProductAttention(DIM, HEADS, rope=True),
        "krause": ga.nn.KrauseAttention(DIM, HEADS, top_k=3),
        "linear": ga.nn.LinearAttention(DIM, HEADS),
        "energy": ga.nn.SelfConsensus(DIM, HEADS, rank=2, edge_hidden=8, step_size="auto"),
        "block": ga.nn.PreNormBlock(ga.nn.GaussianKernelAttention(DIM, HEADS)),
    }


def _graphs(n: int) -> dict[str, ga.TokenGraph]:
    return {"window": ga.window_path_graph(n, 3, self_loops=True), "complete": ga.complete_graph(n)}


def _pairs(n: int) -> Any:
    for graph_name, graph in _graphs(n).items():
        for name, layer in _layers().items():
            yield f"{name} over {graph_name}", layer, graph


def _gradients(run: Callable[[Tensor], Tensor], layer: nn.Module, x: Tensor) -> list[Tensor]:
    """The output, and the gradients of the input and of all parameters."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = run(x)
    (y.float() * torch.arange(y.numel()).view(y.shape).cos()).sum().backward()
    leaves = [x, *layer.parameters()]
    return [y.detach(), *(torch.zeros(1) if p.grad is None else p.grad.clone() for p in leaves)]


def _way(name: str) -> Any:
    """The exchange that a case tests: a ring over complete graphs, rows over windows."""
    return "ring" if name.endswith("complete") else "rows"


def _sharded(name: str, graph: ga.TokenGraph, group: Any) -> Any:
    """Divide the graph of a case; linear attention over complete graphs sends states."""
    shard = ga.distributed.shard(graph, group, exchange=_way(name), order="runs")
    if name == "linear over complete":
        assert shard.sends_states(DIM // HEADS)
    return shard


def _checkpointed(layer: nn.Module, shard: Any, reentrant: bool, x: Tensor) -> Tensor:
    y: Tensor = checkpoint(layer, x, shard, use_reentrant=reentrant)
    return y


def checkpointed(group: Any) -> int:
    """Check that both modes of checkpointing give the bits of a plain call; count the cases."""
    count = 0
    for name, layer, graph in _pairs(24):
        shard = _sharded(name, graph, group)
        x = torch.randn(2, shard.num_targets, DIM)
        plain = _gradients(lambda x, layer=layer, shard=shard: layer(x, shard), layer, x)
        for reentrant in (False, True):
            again = partial(_checkpointed, layer, shard, reentrant)
            for a, b in zip(plain, _gradients(again, layer, x), strict=True):
                assert torch.equal(a, b), (name, reentrant)
            count += 1
    return count


def compiled(group: Any) -> list[tuple[str, list[int]]]:
    """Compiled layers give what plain ones give, at three lengths.

    Returns for every layer and graph how many functions were compiled after each length.
    """
    compilations = []
    for way, (name, layer) in itertools.product(("window", "complete"), _layers().items()):
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        fast = torch.compile(layer, backend=counter, fullgraph=True)
        counts = []
        for n in (24, 36, 50):
            graph = _graphs(n)[way]
            shard = _sharded(f"{name} over {way}", graph, group)
            x = torch.randn(2, shard.num_targets, DIM)
            a = _gradients(lambda x, layer=layer, s=shard: layer(x, s), layer, x)
            b = _gradients(lambda x, layer=fast, s=shard: layer(x, s), layer, x)
            for actual, expected in zip(b, a, strict=True):
                assert torch.allclose(actual, expected, atol=1e-5), name
            counts.append(counter.frame_count)
        compilations.append((f"{name} over {way}", counts))
    return compilations


def compiled_by_inductor(group: Any) -> int:
    """Code of inductor around exchanges gives what plain layers give; returns the calls."""
    count = 0
    for way, n in itertools.product(("window", "complete"), (24, 36)):
        for name in ("dot", "block"):
            torch._dynamo.reset()
            layer, graph = _layers()[name], _graphs(n)[way]
            shard = ga.distributed.shard(graph, group, exchange=_way(way), order="runs")
            x = torch.randn(2, shard.num_targets, DIM)
            a, b = (
                _gradients(lambda x, run=run, s=shard: run(x, s), layer, x)
                for run in (layer, torch.compile(layer, fullgraph=True))
            )
            for actual, expected in zip(b, a, strict=True):
                assert torch.allclose(actual, expected, atol=1e-5), (name, way, n)
            count += 1
    return count


def half_precision(group: Any) -> int:
    """Autocast, and layers in bfloat16, give what one process gives up to rounding."""
    count = 0
    for name, layer, graph in _pairs(24):
        if "krause" in name:  # rounding decides what it selects
            continue
        shard = _sharded(name, graph, group)
        x = torch.randn(2, 24, DIM)
        with torch.autocast("cpu", torch.bfloat16):
            actual, expected = layer(shard.split(x), shard), layer(x, graph)
        assert actual.dtype == expected.dtype
        error = (actual - shard.split(expected)).abs().max()
        assert error <= 0.05 * expected.abs().max(), (name, error)
        half, x = layer.bfloat16(), x.bfloat16()
        error = (half(shard.split(x), shard) - shard.split(half(x, graph))).abs().max()
        assert error <= 0.05 * expected.abs().max(), (name, error)
        count += 1
    return count


def dropped(group: Any) -> list[Tensor]:
    """Return what dropout leaves of equal values, by rows and on a ring, in [tokens, DIM]."""
    layer = ga.nn.DotProductAttention(DIM, HEADS, attention_dropout=0.5)
    for p in layer.parameters():
        nn.init.constant_(p, 0.1)
    outputs = []
    near, blocks = ga.window_cycle_graph(64, 8), ga.block_window_graph(64, 8)
    # No block is on two ranks: equal seeds would drop the same edges on both.
    for graph, exchange in ((near, "rows"), (near, "ring"), (blocks, "rows")):
        shard = ga.distributed.shard(graph, group, exchange=exchange, order="runs")
        torch.manual_seed(3)
        x = torch.ones(shard.num_targets, DIM, requires_grad=True)
        y = layer(x, shard)
        outputs.append(y.detach())
        weights = torch.arange(y.numel()).view(y.shape).cos()
        (before,) = torch.autograd.grad(y, x, weights, retain_graph=True)
        layer.eval()  # which changes later calls only
        assert torch.equal(torch.autograd.grad(y, x, weights)[0], before)
        layer.train()
    return outputs


def refusals(group: Any) -> list[str]:
    """Return the messages of errors, which every rank must raise alike."""
    n = 24
    graph = ga.causal_graph(n)
    ring = ga.distributed.shard(graph, group, exchange="ring")
    rows = ga.distributed.shard(graph, group, exchange="rows")
    layer = ga.nn.DotProductAttention(DIM, HEADS)
    x = torch.randn(ring.num_targets, DIM)
    calls = [
        lambda: layer(x[1:], ring),
        lambda: layer(x, ring, return_attention_weights=True),
        lambda: layer(x, ring, edge_bias=torch.zeros(1, 3, HEADS)),
        lambda: ga.nn.DotProductAttention(DIM, HEADS, top_k=2, softcap=2.0)(x, ring),
        lambda: ga.distributed.shard(ga.causal_graph(1), group),
        lambda: ga.distributed.shard(torch.zeros(2, 3), group),
        lambda: ga.distributed.shard(graph, "cp"),
        lambda: ga.distributed.shard(graph, group, order="random"),
        lambda: rows.split(torch.randn(n + 1, DIM)),
        lambda: rows.split(torch.tensor(1.0)),
        lambda: rows.gather(torch.randn(n, DIM)),
        lambda: rows.gather(torch.randn(8, DIM), dim=2),
        lambda: __import__("copy").deepcopy(rows),
    ]
    messages = []
    for call in calls:
        try:
            call()
        except (ValueError, TypeError) as error:
            messages.append(f"{type(error).__name__}: {error}")
        else:
            messages.append("no error")
    return messages


class _Elsewhere(ga.nn.DotProductAttention):
    """A layer whose score depends on a tensor that is not its parameter."""

    scale: Tensor

    def score(self) -> ga.Score:
        return ga.DotProduct(self.scale)


def a_score_with_a_foreign_parameter(group: Any) -> list[str]:
    """Return what this rank gets by rows, where the gradient is right, and on a ring."""
    messages = []
    for exchange, shape in (("rows", ()), ("ring", ()), ("ring", (HEADS,))):
        shard = ga.distributed.shard(ga.causal_graph(12), group, exchange=exchange, order="runs")  # type: ignore[arg-type]
        layer = _Elsewhere(DIM, HEADS)
        layer.scale = torch.ones(shape, requires_grad=True)
        y = layer(torch.randn(shard.num_targets, DIM), shard)
        try:
            y.sum().backward()
        except ValueError as error:
            messages.append(str(error))
        else:
            messages.append("no error")
    return messages


def compiled_rings(group: Any) -> int:
    """Rings in compiled functions give what plain ones give, in float64; return the cases."""
    torch.manual_seed(0)
    mask = torch.rand(2, 24) < 0.7
    bias = nn.Embedding(47, HEADS)  # a row per offset
    dropping = ga.nn.DotProductAttention(DIM, HEADS, attention_dropout=0.5)
    iterated = ga.nn.SelfConsensus(
        DIM, HEADS, rank=2, edge_hidden=4, update="target", rope=True, iterations=2
    )
    sink = ga.nn.DotProductAttention(DIM, HEADS, kv_heads=1, rope=True, sink=True)
    cases: dict[str, tuple[nn.Module, ga.TokenGraph, Any]] = {
        "masks in zigzag": (sink, ga.causal_graph(24), lambda s: {"valid": s.split(mask)}),
        "biases": (_layers()["dot"], ga.complete_graph(24), lambda s: {"edge_bias": bias.weight}),
        "dropout": (dropping, ga.causal_graph(24), lambda s: {}),
        "iterations": (iterated, ga.causal_graph(24), lambda s: {"valid": s.split(mask)}),
    }
    for name, (layer, graph, options) in cases.items():
        torch._dynamo.reset()
        layer.double()
        bias.double()
        both = nn.ModuleList([layer, bias])
        shard = ga.distributed.shard(graph, group, exchange="ring")
        x = torch.randn(2, shard.num_targets, DIM, dtype=torch.float64)

        def run(x: Tensor, of: Any = layer, shard: Any = shard, options: Any = options) -> Tensor:
            torch.manual_seed(5)
            y: Tensor = of(x, shard, **options(shard))
            return y

        fast = torch.compile(layer, backend="aot_eager", fullgraph=True)
        a = _gradients(run, both, x)
        b = _gradients(partial(run, of=fast), both, x)
        again = _gradients(lambda x, f=fast, run=run: checkpoint(partial(run, of=f), x), both, x)
        for expected, actual, third in zip(a, b, again, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12, msg=name)
            assert torch.equal(actual, third), name
    return len(cases)


def compiled_once_for_all_layers(group: Any) -> int:
    """Layers of a kind and their copies share what is compiled, also with parameters of others."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    shard = ga.distributed.shard(ga.complete_graph(24), group, exchange="ring")
    first = ga.nn.DotProductAttention(DIM, HEADS)
    layers = [first, copy.deepcopy(first), pickle.loads(pickle.dumps(first))]
    x = torch.randn(shard.num_targets, DIM)
    for number, layer in enumerate(layers):
        layer.softcap = 1.0 + number
        with torch.no_grad():
            for p in layer.parameters():
                p.add_(torch.rand_like(p))
        expected = _gradients(lambda x, layer=layer: layer(x, shard), layer, x)
        layer.compile(backend=counter, fullgraph=True)
        actual = _gradients(lambda x, layer=layer: layer(x, shard), layer, x)
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    plain = ga.nn.GaussianKernelAttention(DIM, HEADS)
    values = {name: p + 1 for name, p in plain.named_parameters()}
    replaced = partial(torch.func.functional_call, plain, values, (x, shard))
    torch.testing.assert_close(torch.compile(replaced, backend="aot_eager")(), replaced())
    assert not torch.allclose(replaced(), plain(x, shard))
    return counter.frame_count

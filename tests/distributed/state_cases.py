"""Linear attention that sends states in place of rows; the functions run on every rank.

All ranks draw the same numbers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sharded_cases import DIM, HEADS, WIDE, Sent, all_ranks_send, close, compare, numbers_sent
from torch import Tensor

import graphattn as ga
from graphattn.distributed.planning.plans import CommunicationPlan
from graphattn.distributed.sharded_graph import ShardedGraph
from graphattn.nn.base import across_ranks

LAYERS: dict[str, Callable[[], ga.nn.LinearAttention]] = {
    "plain": lambda: ga.nn.LinearAttention(DIM, HEADS, eps=0.1),
    "rope": lambda: ga.nn.LinearAttention(DIM, HEADS, rope=True),
    "kv heads": lambda: ga.nn.LinearAttention(DIM, HEADS, kv_heads=1),
    "kv heads, rope": lambda: ga.nn.LinearAttention(DIM, 4, kv_heads=2, rope=True),
}


def packed(make: Callable[[int], ga.TokenGraph], *sizes: int) -> ga.TokenGraph:
    return ga.batch([make(size) for size in sizes])


# Graphs of few tokens: with four ranks in zigzag, a chunk has 3 to 8 of them.
GRAPHS: dict[str, Callable[[], ga.TokenGraph]] = {
    "causal": lambda: ga.causal_graph(41),
    "complete": lambda: ga.complete_graph(38),
    "complete without self-loops": lambda: ga.complete_graph(33, self_loops=False),
    "two tracks": lambda: ga.bipartite_complete_graph(29, 43),
    "two tracks, few sources": lambda: ga.bipartite_complete_graph(26, 2),
    "causal sequences": lambda: packed(ga.causal_graph, 3, 1, 17, 2, 25, 4),
    "short sequences": lambda: packed(ga.causal_graph, *[2, 3, 1, 2, 5] * 3, 2),
    "one sequence crosses": lambda: packed(ga.complete_graph, 7, 5, 6, 2, 8),
    "complete and causal": lambda: ga.batch(
        [ga.causal_graph(21), ga.complete_graph(13, self_loops=False), ga.causal_graph(9)]
    ),
    "pairs of tracks": lambda: ga.batch(
        [ga.bipartite_complete_graph(n, m) for n, m in ((9, 2), (1, 20), (12, 6), (8, 3))]
    ),
    "blocks": lambda: ga.block_window_graph(37, 5),
}


@contextmanager
def states_wherever_they_are_exact(wanted: bool) -> Iterator[None]:
    """Send states also where they are larger than rows, if `wanted`."""
    plain = CommunicationPlan.widest_state
    if wanted:
        CommunicationPlan.widest_state = lambda self, **_: 0 if self.states is None else 10**9  # type: ignore[method-assign]
    try:
        yield
    finally:
        CommunicationPlan.widest_state = plain  # type: ignore[method-assign]


@contextmanager
def watched_ways() -> Iterator[list[str]]:
    """List how every call of linear attention on a ring travels."""
    calls: list[str] = []
    plain = across_ranks.linear_with_states, across_ranks.on_ring

    def states(*given: Any) -> Any:
        calls.append("states")
        return plain[0](*given)

    def rows(*given: Any) -> Any:
        calls.append("rows")
        return plain[1](*given)

    across_ranks.linear_with_states, across_ranks.on_ring = states, rows
    try:
        yield calls
    finally:
        across_ranks.linear_with_states, across_ranks.on_ring = plain


def ring_over(graph: ga.TokenGraph, group: Any, order: Any = "zigzag") -> ShardedGraph:
    return ga.distributed.shard(graph, group, exchange="ring", order=order)


def equal_to_one_process(group: Any, name: str, forced: bool) -> list[str]:
    """Compare outputs and all gradients of every layer; return how the calls have travelled."""
    rng = random.Random(name)
    torch.manual_seed(rng.randint(0, 1 << 40))
    graph, ways = GRAPHS[name](), []
    with states_wherever_they_are_exact(forced), watched_ways() as calls:
        for order in ("runs", "zigzag"):
            shard = ring_over(graph, group, order)
            for layer_name, made in LAYERS.items():
                try:
                    compare(group, rng, shard, made().to(WIDE))
                except Exception as error:
                    error.add_note(f"{layer_name} over {graph}, {order}")
                    raise
            ways += [f"{order}: {way}" for way in dict.fromkeys(calls)]
            calls.clear()
    return ways


def bytes_sent(group: Any, name: str, order: str, forced: bool) -> int:
    """Compare what layers send, forward and backward, with the plan; return how many bytes."""
    torch.manual_seed(5)
    graph, total, batch = GRAPHS[name](), 0, 3
    with states_wherever_they_are_exact(forced):
        shard = ring_over(graph, group, order)
        plan, states = shard.plan, shard.plan.states
        for layer_name, made in LAYERS.items():
            layer = made().to(WIDE)
            rope, heads, width = layer.rotary is not None, layer.kv_heads, layer.head_dim
            counts = numbers_sent(shard, layer, batch)
            for sent, backward in zip(counts, (False, True), strict=True):
                planned = plan.linear_bytes(WIDE, heads, width, rope=rope, backward=backward)
                everywhere = all_ranks_send(shard, sent)
                assert everywhere == batch * int(planned.sum()), (layer_name, backward)
                if states is not None and plan.widest_state(rope=rope) >= width:
                    count = (states.received if backward else states.sent)[shard.rank]
                    assert sent == int(count) * batch * heads * width * (width + 1), layer_name
                total += everywhere
    return total


def nan_in_padding(group: Any, name: str) -> bool:
    """Put NaN into padding: it is not sent, and changes no bit of an output or a gradient."""
    torch.manual_seed(6)
    graph = GRAPHS[name]()
    shard = ring_over(graph, group)
    n, m, two = graph.num_targets, graph.num_sources, not graph.has_same_tokens
    masks = torch.rand(2, n) < 0.7, torch.rand(2, m) < 0.7
    tokens = torch.randn(2, m, DIM, dtype=WIDE)
    x = torch.randn(2, n, DIM, dtype=WIDE) if two else tokens
    of_rank = shard.split(masks[0]), shard.split(masks[1 if two else 0], of="sources")
    for made in LAYERS.values():
        layer, by_filling = made().to(WIDE), []
        with Sent(group.rank()) as sent, watched_ways() as ways:
            for filled in (0.0, torch.nan):
                bad = ~(masks[1] if two else masks[0])
                seen = tokens.masked_fill(bad[..., None], filled)
                given = [shard.split(seen, of="sources").clone().requires_grad_()]
                if two:
                    given.insert(0, shard.split(x).clone().requires_grad_())
                y = layer(given[0], shard, *given[1:], valid=of_rank if two else of_rank[0])
                real = y.masked_fill(~of_rank[0][..., None], 0)
                gradients = torch.autograd.grad(real.cos().sum(), given)
                by_filling.append([real, *gradients])
        assert ways == ["states"] * 2
        assert not sent.has_nan
        for a, b in zip(*by_filling, strict=True):
            assert torch.equal(a, b)
    return True


def nan_that_is_seen(group: Any) -> list[int]:
    """Put NaN into a token, and compare what it spreads to: the tokens that see it.

    It must not reach the gradient of a loss of the tokens before. Returns how many outputs of this
    rank are NaN, for every layer.
    """
    torch.manual_seed(8)
    graph, counts = ga.causal_graph(41), []
    shard = ring_over(graph, group)
    for made in LAYERS.values():
        layer = made().to(WIDE)
        x = torch.randn(41, DIM, dtype=WIDE)
        x[13] = torch.nan
        pairs = []
        for given, of, split in ((graph, x, lambda y: y), (shard, shard.split(x), shard.split)):
            given_x = of.clone().requires_grad_()
            y = layer(given_x, given)
            before = split(torch.arange(41) < 13)
            loss = torch.where(before[:, None], y, 0).cos().sum()
            (gradient,) = torch.autograd.grad(loss, given_x)
            pairs.append((y.detach(), gradient.detach()))
        expected, of_rank = ([*map(shard.split, pairs[0])], pairs[1])
        others = shard.split(torch.arange(41) != 13)
        for a, b in zip(expected, of_rank, strict=True):
            assert torch.allclose(a[others], b[others], atol=1e-12, equal_nan=True)
        assert of_rank[1][others].isfinite().all()
        counts.append(int(of_rank[0].isnan().any(-1).sum()))
    return counts


def only_values_are_trained(group: Any, name: str) -> bool:
    """Compare the gradient of the projection of values, the only tensor that has one.

    A rank whose states nobody needs must send their gradients, and receive none, all the same.
    """
    torch.manual_seed(9)
    graph = GRAPHS[name]()
    for order in ("runs", "zigzag"):
        with states_wherever_they_are_exact(True):
            shard = ring_over(graph, group, order)
            layer = ga.nn.LinearAttention(DIM, HEADS).to(WIDE).requires_grad_(False)
            weight = layer.value_proj.weight.requires_grad_()
            x, down = torch.randn(2, graph.num_targets, DIM, dtype=WIDE).unbind()
            (expected,) = torch.autograd.grad((layer(x, graph) * down).sum(), weight)
            y = layer(shard.split(x), shard)
            (actual,) = torch.autograd.grad((y * shard.split(down)).sum(), weight)
        total = actual.clone()
        torch.distributed.all_reduce(total, group=group)
        close("weight", total, expected)
    return True


def dtypes_that_travel(group: Any) -> list[str]:
    """Return the dtypes of states of layers in float32, in bfloat16 and under autocast."""
    shard = ring_over(ga.causal_graph(60), group)
    layer, result = ga.nn.LinearAttention(DIM, HEADS), []
    x = torch.randn(shard.num_targets, DIM)
    with Sent(group.rank()) as sent, watched_ways() as ways:
        layer(x, shard)
        layer.bfloat16()(x.bfloat16(), shard)
        with torch.autocast("cpu", torch.bfloat16):
            layer.float()(x, shard)
    assert ways == ["states"] * 3
    result += [str(dtype) for dtype in sent.dtypes]
    return result


def compiled_at_once(group: Any) -> list[float]:
    """Return the errors of a layer whose first call over a shard is a compiled one."""
    torch.manual_seed(1)
    layer, errors = ga.nn.LinearAttention(DIM, HEADS, rope=True).to(WIDE), []
    torch._dynamo.reset()
    fast = torch.compile(layer, backend="aot_eager")
    shard = ring_over(ga.causal_graph(50), group)
    whole = torch.randn(2, shard.num_targets, DIM, dtype=WIDE)
    pairs: list[tuple[Tensor, Tensor]] = []
    for call in (fast, layer):
        x = whole.clone().requires_grad_()
        y = call(x, shard)
        pairs.append((y.detach(), torch.autograd.grad(y.cos().sum(), x)[0]))
    errors += [float((a - b).abs().max()) for a, b in zip(*pairs, strict=True)]
    assert shard.sends_states(layer.head_dim, rope=True)
    return errors

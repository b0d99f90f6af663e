"""Work of a rank alone, done while rows travel; every function runs on all ranks."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from neighbor_cases import neighbours_equal_those_of_one_process
from sharded_cases import (
    CONSENSUS,
    DIM,
    ENERGY,
    GRAPHS,
    HEADS,
    LINEAR,
    ONE_TRACK,
    SOFTMAX,
    TWO_TRACKS,
    WIDE,
    all_ranks_send,
    compare,
    layers_over,
    numbers_sent,
    poisoned,
    rows_sent_by_a_causal_window,
)
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.utils.checkpoint import checkpoint
from unusual_inputs import _twice

import graphattn as ga
from graphattn.distributed import exchange, sharded_graph
from graphattn.distributed.planning.plans import planned
from graphattn.distributed.ring import passes
from graphattn.nn import attention, consensus
from graphattn.nn.base import across_ranks, consensus_across_ranks


@contextmanager
def for_any_size() -> Iterator[list[str]]:
    """Let small graphs overlap, too; yields the names of the functions that do."""
    names: list[str] = []

    def noted(name: str, function: Any) -> Any:
        def run(*given: Any, **options: Any) -> Any:
            names.append(name)
            return function(*given, **options)

        return run

    limits = (
        (across_ranks, "WORTH_HIDING"),
        (consensus_across_ranks, "WORTH_HIDING"),
        (across_ranks, "FEW"),
        (sharded_graph, "MERGING"),
    )
    functions = (
        (across_ranks, "inside_first"),
        (across_ranks, "own_first"),
        (consensus, "consensus_own_first"),
    )
    with ExitStack() as stack:
        for module, name in limits:
            stack.enter_context(patch.object(module, name, 0))
        for module, name in functions:
            function = noted(name, getattr(module, name))
            stack.enter_context(patch.object(module, name, function))
        yield names


def equal_over(group: Any, name: str, order: Any, *, inside: bool = True, every: int = 1) -> int:
    """Compare outputs and all gradients of layers over a graph; returns how many overlap.

    Args:
        group: the process group.
        name: the graph.
        order: the order of tokens.
        inside: whether targets that see no other rank may come first.
        every: compare one of so many layers.
    """
    count, rng = 0, random.Random(f"{name} {order}")
    torch.manual_seed(rng.randint(0, 1 << 40))
    graph = GRAPHS[name](rng, 60, 3)
    with for_any_size():
        shard = ga.distributed.shard(graph, group, exchange="rows", order=order)
    if not inside:
        shard.__dict__["has_inside"] = False
    known = SOFTMAX | LINEAR | ONE_TRACK | CONSENSUS | ENERGY | TWO_TRACKS
    layers = [x for x in layers_over(graph, "rows") if x in known and "features" not in x]
    for layer in layers[::every]:
        with for_any_size() as names:
            try:
                compare(group, rng, shard, known[layer]().to(WIDE))
            except Exception as error:
                error.add_note(f"{layer} over {name}, {order}")
                raise
        count += len(names)
    return count


def equal_to_one_process(group: Any) -> int:
    """Compare layers over some graphs; returns how many overlap."""
    return (
        equal_over(group, "window", "runs")
        + equal_over(group, "causal window", "zigzag", every=2)
        + equal_over(group, "cycle", "runs", every=4)
        + equal_over(group, "two tracks", "runs", every=2)
        + equal_over(group, "edges", "zigzag", inside=False, every=3)
        + equal_over(group, "window", "zigzag", inside=False, every=5)
    )


def equal_over_every_graph(group: Any) -> int:
    """Compare every layer over every graph."""
    return sum(
        equal_over(group, name, order, inside=False)
        for name in GRAPHS
        for order in ("runs", "zigzag")
    )


def equal_beside_global_tokens(group: Any) -> int:
    """Compare layers that send the queries of global tokens; returns how many overlap."""
    rng = random.Random(5)
    torch.manual_seed(5)
    graph = GRAPHS["global tokens"](rng, 0, 0)
    with for_any_size() as names:
        shard = ga.distributed.shard(graph, group, order="runs")
        shard = ga.distributed.ShardedGraph(
            planned(graph, shard._targets, shard._sources, "targets", ("rows", (0, 41, 42))),
            shard.rank,
            shard.group,
        )
        for made in (SOFTMAX["dot"], LINEAR["linear"], ONE_TRACK["gka"]):
            compare(group, rng, shard, made().to(WIDE))
    return len(names)


def equal_over_neighbours(group: Any, seeds: list[int]) -> int:
    """Compare layers over graphs of neighbours; returns how many overlap."""
    with for_any_size() as names:
        neighbours_equal_those_of_one_process(group, seeds)
    return len(names)


def with_value_embeddings(group: Any) -> float:
    """Return the error of a layer that adds embeddings of the tokens to its values."""
    torch.manual_seed(3)
    graph = ga.window_path_graph(50, 2)
    shard = ga.distributed.shard(graph, group)
    layer = ga.nn.DotProductAttention(DIM, HEADS, rope=True, value_embeddings=7).to(WIDE)
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.5)
    x, tokens = torch.randn(2, 50, DIM, dtype=WIDE), torch.randint(0, 7, (2, 50))
    places = torch.randint(0, 99, (2, 50))
    expected = layer(x, graph, tokens=tokens, positions=places)
    with for_any_size() as names:
        given = {"tokens": shard.split(tokens), "positions": shard.split(places)}
        y = layer(shard.split(x), shard, **given)
    assert names == ["inside_first"]
    return float((y - shard.split(expected)).detach().abs().max())


def bytes_of_consensus(group: Any) -> bool:
    """Compare what consensus sends while it computes with the plan."""
    graph = ga.window_path_graph(40, 3)
    shard = ga.distributed.shard(graph, group, exchange="rows", order="zigzag")
    layer = ga.nn.SelfConsensus(DIM, HEADS, rank=2, edge_hidden=6).to(WIDE)
    with for_any_size() as names:
        counts = numbers_sent(shard, layer)
    plan = planned(graph, shard._targets, shard._sources, "both", ("rows", ()))
    for sent, backward in zip(counts, (False, True), strict=True):
        expected = plan.bytes(WIDE, DIM, backward=backward)
        assert all_ranks_send(shard, sent) == int(expected.sum()), (sent, expected)
    return names == ["consensus_own_first"]


def as_without(group: Any) -> dict[str, Any]:
    """Return what else must be as without an overlap."""
    found: dict[str, Any] = {}
    with for_any_size() as names:
        found["poisoned"] = [
            poisoned(group, name, "rows") for name in ("window", "causal window", "two tracks")
        ]
        found["sent"] = rows_sent_by_a_causal_window(group, 16, 192)
        found["overlaps"] = len(names)
    window = ga.window_path_graph(30, 2)
    shard = ga.distributed.shard(window, group, order="runs")
    x = torch.randn(30, 3, generator=torch.Generator().manual_seed(2))
    near = ga.knn_graph(x, 3)
    near_shard = ga.knn_graph(shard.split(x), 3, shard=shard)
    layers = (
        (ga.nn.DotProductAttention(DIM, HEADS), window, shard),
        (ga.nn.DotProductAttention(DIM, HEADS, rope=True), near, near_shard),
        (ga.nn.SelfConsensus(DIM, HEADS, rank=2, edge_hidden=6), window, shard),
    )
    found["again"] = [again(group, *given) for given in layers]
    return found


def again(group: Any, layer: Any, graph: ga.TokenGraph, shard: Any) -> tuple[float, bool]:
    """Return the error of a second derivative, and whether checkpoints change no gradient."""
    torch.manual_seed(2)
    layer = layer.to(WIDE)
    whole = torch.randn(30, DIM, dtype=WIDE)
    expected = _twice(layer, whole, graph, lambda x: x)
    x = shard.split(whole).clone().requires_grad_()
    with for_any_size() as names:
        total = _twice(layer, whole, shard, shard.split)
        gradients = []
        for way in (None, False, True):
            x.grad = None
            y = layer(x, shard) if way is None else checkpoint(layer, x, shard, use_reentrant=way)
            y.sin().sum().backward()
            gradients.append(x.grad)
        assert len(names) == 6  # both checkpoints compute it again
    torch.distributed.all_reduce(total, group=group)
    same = [torch.equal(gradients[0], gradient) for gradient in gradients[1:]]
    return float((total - expected).abs().max()), all(same)


def order_of_events(group: Any) -> tuple[list[str], list[str]]:
    """Return what happens in a forward and in a backward pass, one after the other."""
    events: list[str] = []

    def noted(name: str, function: Any) -> Any:
        def run(*given: Any) -> Any:
            events.append(name)
            return function(*given)

        return run

    layer = ga.nn.DotProductAttention(DIM, HEADS)
    layer.key_proj.register_forward_hook(lambda *_: events.append("project keys"))
    layer.output_proj.register_forward_hook(lambda *_: events.append("project outputs"))
    attend = attention.attend

    def computed(*given: Any, **options: Any) -> Any:
        part = "outside" if "compute inside" in events else "inside"
        events.append(f"compute {part}")
        out, lse = attend(*given, **options)
        out.register_hook(lambda _: events.append(f"gradients of {part}"))
        return out, lse

    shard = ga.distributed.shard(ga.causal_window_graph(64, 4), group)
    x = torch.randn(shard.num_targets, DIM, requires_grad=True)
    with (
        for_any_size(),
        patch.object(attention, "attend", computed),
        patch.object(exchange, "_exchanged", noted("send", exchange._exchanged)),
        patch.object(functional, "wait_tensor", noted("wait", functional.wait_tensor)),
        patch.object(exchange, "_waited", noted("wait", exchange._waited)),
    ):
        y = layer(x, shard)
        forward = events.copy()
        y.sum().backward()
    backward = events[len(forward) :]
    if backward[-2:] == ["wait", "wait"]:  # `_waited` calls the other one
        backward.pop()
    return forward, backward


def order_of_consensus(group: Any) -> tuple[list[str], list[str]]:
    """Return what happens in a forward and in a backward pass of consensus."""
    events: list[str] = []

    def noted(name: str, function: Any) -> Any:
        def run(*given: Any) -> Any:
            events.append(name)
            return function(*given)

        return run

    sums = consensus_across_ranks._sums

    def computed(*given: Any) -> Any:
        part = "own" if len(events) == 1 else "rest"
        events.append(f"compute {part}")
        (gradient,) = sums(*given)
        gradient.register_hook(lambda _: events.append(f"gradients of {part}"))
        return (gradient,)

    shard = ga.distributed.shard(ga.window_path_graph(64, 4), group)
    layer = ga.nn.SelfConsensus(DIM, HEADS, rank=2, edge_hidden=6)
    x = torch.randn(shard.num_targets, DIM, requires_grad=True)
    with (
        for_any_size(),
        patch.object(consensus_across_ranks, "_sums", computed),
        patch.object(exchange, "_exchanged", noted("send", exchange._exchanged)),
        patch.object(exchange._Arrived, "apply", noted("wait", exchange._Arrived.apply)),
    ):
        y = layer(x, shard)
        forward = events.copy()
        y.sum().backward()
    return forward, events[len(forward) :]


def order_on_a_ring(group: Any) -> list[str]:
    """Return the order of parts and returning gradients in the backward pass of a ring."""
    events: list[str] = []

    def noted(name: str, function: Any) -> Any:
        def run(*given: Any) -> Any:
            events.append(name)
            return function(*given)

        return run

    of = exchange.RowExchange
    shard = ga.distributed.shard(ga.complete_graph(24), group, exchange="ring", order="runs")
    x = torch.randn(shard.num_targets, DIM, requires_grad=True)
    y = ga.nn.DotProductAttention(DIM, HEADS)(x, shard)
    with (
        patch.object(passes, "_gradients", noted("compute", passes._gradients)),
        patch.object(of, "send_back", noted("send back", of.send_back)),
        patch.object(of, "add_returned", noted("add", of.add_returned)),
    ):
        y.sum().backward()
    return events


def quick(group: Any) -> dict[str, Any]:
    """Run all of these."""
    return {
        "equal": equal_to_one_process(group),
        "order": order_of_events(group),
        "consensus": order_of_consensus(group),
        "ring": order_on_a_ring(group),
        "globals": equal_beside_global_tokens(group),
        "neighbours": equal_over_neighbours(group, [*range(5)]),
        "bytes": bytes_of_consensus(group),
        "embeddings": with_value_embeddings(group),
        **as_without(group),
    }


class Slow:
    """A network on which rows take some seconds, and no time of a processor.

    A wait ends so many seconds after the rows were sent at the earliest: `seconds` has one number
    for the forward and one for the backward pass. `waited` are the seconds that waits took.
    """

    def __init__(self, *seconds: float) -> None:
        self.seconds, self.ends, self.waited = iter(seconds), 0.0, 0.0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        sent, waited, wait = exchange._exchanged, exchange._waited, functional.wait_tensor

        def send(*given: Any) -> Tensor:
            self.ends = time.monotonic() + next(self.seconds)
            return sent(*given)

        def then(function: Any) -> Any:
            def run(x: Tensor) -> Tensor:
                start = time.monotonic()
                time.sleep(max(0.0, self.ends - start))
                self.waited += time.monotonic() - start
                return function(x)

            return run

        with (
            patch.object(exchange, "_exchanged", send),
            patch.object(exchange, "_waited", then(waited)),
            patch.object(functional, "wait_tensor", then(wait)),
        ):
            yield


class Times(NamedTuple):
    """Seconds of a forward and a backward pass, of which `waited` for rows."""

    total: float
    waited: float
    transfer: float

    @property
    def of_slower(self) -> float:
        """The whole time, divided by that of what is slower: computing or the transfers."""
        return self.total / max(self.total - self.waited, self.transfer)


def times_on_a_slow_network(
    group: Any, mechanism: str, tries: int = 2
) -> dict[tuple[str, float], Times]:
    """Measure passes beside transfers that take a share of the time that computing takes.

    The rows are few, so that nearly all targets see no other rank. Returns by way, "after" the
    transfer or "meanwhile", and share the try with the shortest time.
    """
    layer: Any = ga.nn.DotProductAttention(64, 4)
    graph = ga.window_path_graph(1 << 14, 256)
    if mechanism == "consensus":
        layer = ga.nn.SelfConsensus(64, 4, edge_hidden=64)
        graph = ga.window_path_graph(1 << 12, 4)
    shard = ga.distributed.shard(graph, group)
    x = torch.randn(shard.num_targets, 64, requires_grad=True)

    def run(way: str, *delays: float) -> tuple[float, float, float]:
        torch.distributed.barrier(group=group)
        slow, start = Slow(*delays), time.monotonic()
        least = 0 if way == "meanwhile" else 1 << 60
        with (
            slow(),
            patch.object(across_ranks, "WORTH_HIDING", least),
            patch.object(consensus_across_ranks, "WORTH_HIDING", least),
        ):
            y = layer(x, shard).sum()
            middle = time.monotonic()
            y.backward()
        return middle - start, time.monotonic() - middle, slow.waited

    best: dict[tuple[str, float], Times] = {}
    ways = "after", "meanwhile"
    for way in ways:
        run(way, 0, 0)
    for share, way, _ in itertools.product((0.7, 1.5), ways, range(tries)):
        computed = torch.tensor(run(way, 0, 0)[:2])
        torch.distributed.all_reduce(computed, torch.distributed.ReduceOp.MAX, group=group)
        delays = (share * computed).tolist()
        forward, backward, waited = run(way, *delays)
        found = Times(forward + backward, waited, sum(delays))
        best[way, share] = min(found, best.get((way, share), found))
    return best

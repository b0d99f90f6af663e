"""Targets that see no other rank, computed while rows travel; every function runs on all ranks."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from sharded_cases import (
    DIM,
    GRAPHS,
    HEADS,
    LINEAR,
    ONE_TRACK,
    SOFTMAX,
    WIDE,
    compare,
    poisoned,
    rows_sent_by_a_causal_window,
)
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.utils.checkpoint import checkpoint
from unusual_inputs import _twice

import graphattn as ga
from graphattn.distributed import exchange
from graphattn.distributed.ring import passes
from graphattn.nn import attention
from graphattn.nn.base import across_ranks


@contextmanager
def for_any_size() -> Iterator[list[str]]:
    """Let small graphs overlap, too; yields the names of the layers that do."""
    names: list[str] = []
    plain = across_ranks.inside_first

    def noted(layer: Any, *given: Any) -> Tensor:
        names.append(type(layer).__name__)
        return plain(layer, *given)

    with (
        patch.object(across_ranks, "WORTH_HIDING", 0),
        patch.object(across_ranks, "inside_first", noted),
    ):
        yield names


def equal_to_one_process(group: Any) -> int:
    """Compare outputs and all gradients of attention layers; returns the layers that overlap."""
    count = 0
    for name, order in (
        ("window", "runs"),
        ("causal window", "zigzag"),
        ("cycle", "runs"),
        ("two tracks", "runs"),
    ):
        rng = random.Random(name)
        torch.manual_seed(5)
        graph = GRAPHS[name](rng, 60, 3)
        shard = ga.distributed.shard(graph, group, exchange="rows", order=order)  # type: ignore[arg-type]
        layers = SOFTMAX | LINEAR | (ONE_TRACK if graph.has_same_tokens else {})
        for layer_name, made in layers.items():
            with for_any_size() as names:
                try:
                    compare(group, rng, shard, made().to(WIDE))
                except Exception as error:
                    error.add_note(f"{layer_name} over {name}")
                    raise
            count += len(names)
    return count


def as_without(group: Any) -> dict[str, Any]:
    """Return what else must be as without an overlap."""
    found: dict[str, Any] = {}
    with for_any_size() as names:
        found["poisoned"] = [
            poisoned(group, name, "rows") for name in ("window", "causal window", "two tracks")
        ]
        found["sent"] = rows_sent_by_a_causal_window(group, 16, 192)
        found["overlaps"] = len(names)
    torch.manual_seed(2)
    graph = ga.window_path_graph(30, 2)
    shard = ga.distributed.shard(graph, group, order="runs")
    layer = ga.nn.DotProductAttention(DIM, HEADS).to(WIDE)
    whole = torch.randn(30, DIM, dtype=WIDE)
    expected = _twice(layer, whole, graph, lambda x: x)
    x = shard.split(whole).clone().requires_grad_()
    with for_any_size() as names:
        total = _twice(layer, whole, shard, shard.split)
        gradients = []
        for way in (None, False, True):
            y = layer(x, shard) if way is None else checkpoint(layer, x, shard, use_reentrant=way)
            gradients.append(torch.autograd.grad(y.sin().sum(), x)[0] if way is None else None)
            if way is not None:
                x.grad = None
                y.sin().sum().backward()
                gradients[-1] = x.grad
        assert len(names) == 6  # both checkpoints compute it again
    torch.distributed.all_reduce(total, group=group)
    found["second"] = float((total - expected).abs().max())
    found["checkpoints"] = [torch.equal(gradients[0], again) for again in gradients[1:]]
    return found


def order_of_events(group: Any) -> tuple[list[str], list[str]]:
    """Return what happens in a forward and in a backward pass, one after the other."""
    events: list[str] = []

    def noted(name: str, function: Any) -> Any:
        def run(*given: Any) -> Any:
            events.append(name)
            return function(*given)

        return run

    layer = ga.nn.DotProductAttention(DIM, HEADS)
    attend = attention.attend

    def computed(*given: Any, **options: Any) -> Any:
        part = "inside" if len(events) == 1 else "outside"
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
        "ring": order_on_a_ring(group),
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


def times_on_a_slow_network(group: Any, tries: int = 2) -> dict[tuple[str, float], Times]:
    """Measure passes beside transfers that take a share of the time that computing takes.

    The rows are few, so that nearly all targets see no other rank. Returns by way, "after" the
    transfer or "meanwhile", and share the try with the shortest time.
    """
    layer = ga.nn.DotProductAttention(64, 4)
    graph = ga.window_path_graph(1 << 14, 512)
    shards = {way: ga.distributed.shard(graph, group) for way in ("after", "meanwhile")}
    shards["after"].__dict__["has_inside"] = False
    x = torch.randn(shards["after"].num_targets, 64, requires_grad=True)

    def run(way: str, *delays: float) -> tuple[float, float, float]:
        torch.distributed.barrier(group=group)
        slow, start = Slow(*delays), time.monotonic()
        with slow():
            y = layer(x, shards[way]).sum()
            middle = time.monotonic()
            y.backward()
        return middle - start, time.monotonic() - middle, slow.waited

    best: dict[tuple[str, float], Times] = {}
    with for_any_size():
        run("meanwhile", 0, 0)
        for share, way, _ in itertools.product((0.7, 1.5), shards, range(tries)):
            computed = torch.tensor(run(way, 0, 0)[:2])
            torch.distributed.all_reduce(computed, torch.distributed.ReduceOp.MAX, group=group)
            delays = (share * computed).tolist()
            forward, backward, waited = run(way, *delays)
            found = Times(forward + backward, waited, sum(delays))
            best[way, share] = min(found, best.get((way, share), found))
    return best

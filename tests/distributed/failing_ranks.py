"""Three ranks of which one fails, and what every rank got; `test_failures.py` reads it.

    python tests/distributed/failing_ranks.py kill   # one scenario, for reading
    torchrun --nproc-per-node 3 tests/distributed/failing_ranks.py --under-torchrun key_error

A process that has imported torch forks the ranks of every scenario, because importing it takes
seconds. Its standard input has the names of scenarios, and its output one line of JSON for each.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import different_calls
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

import graphattn as ga
from graphattn.distributed.failures.agreement import agree, graph_digest
from graphattn.distributed.failures.watching import report, watch, watched

RANKS = 3
LIMIT = 2.0  # of the watches, seconds
DEADLINE = 40.0  # of a scenario, seconds

# A scenario gets its rank, and a place for the moment from which seconds count.
Scenario = Callable[[int, list[float]], None]


def exchanged(x: Tensor, group: Any = None) -> Tensor:
    """Exchange rows as layers do it, with gradients."""
    each = [len(x) // RANKS] * RANKS
    return functional.all_to_all_single_autograd(x, each, each, group or dist.group.WORLD)


def _watched_world() -> Any:
    group = dist.group.WORLD
    watch(group, LIMIT)
    with watched(group):
        exchanged(torch.ones(6, 2)).sum().item()
    return group


def _rows(group: Any, x: Tensor) -> Tensor:
    """Check rows as a layer does it, before it waits."""
    if len(x) != 6:
        error = ValueError(f"x must have 6 rows, got {len(x)}")
        report(group, error)
        raise error
    with watched(group):
        return exchanged(x).clone()


def equal_facts(rank: int, start: list[float]) -> None:
    graph = ga.causal_window_graph(100, 4)
    if rank == 1:
        graph.edge_index  # noqa: B018 - listed on one rank only
    agree(dist.group.WORLD, {"graph": graph_digest(graph), "number of ranks": RANKS})


def different_graphs(rank: int, start: list[float]) -> None:
    graph = ga.causal_window_graph(100, 5 if rank == 1 else 4)
    facts = {"number of tokens": graph.num_tokens, "number of edges": graph.num_edges}
    agree(dist.group.WORLD, {**facts, "graph": graph_digest(graph)})


def own_error(rank: int, start: list[float]) -> None:
    error = ValueError("window must be positive, got -1") if rank == 2 else None
    agree(dist.group.WORLD, {"number of tokens": 100} if error is None else {}, error)


def wrong_shard(rank: int, start: list[float]) -> None:
    group = _watched_world()
    start[0] = time.monotonic()
    _rows(group, torch.ones(7 if rank == 1 else 6, 2))


def wrong_shard_of_all(rank: int, start: list[float]) -> None:
    """All ranks raise alike, one after the other; nobody waits, so they can go on."""
    group = _watched_world()
    for _ in range(2):
        time.sleep(0.6 * rank)
        with contextlib.suppress(ValueError):
            _rows(group, torch.ones(7, 2))
    time.sleep(1.2 - 0.6 * rank)
    assert _rows(group, torch.ones(6, 2)).sum() == 12


def error_inside(rank: int, start: list[float]) -> None:
    """A context around a whole layer, of which one rank fails before it comes to the exchange."""
    group = _watched_world()
    start[0] = time.monotonic()
    with watched(group):
        if rank == 1:
            raise KeyError("q")
        with watched(group):
            exchanged(torch.ones(6, 2)).sum().item()


def plain_functional(rank: int, start: list[float]) -> None:
    group = _watched_world()
    start[0] = time.monotonic()
    if rank == 1:
        report(group, ValueError("no"))
        raise ValueError("no")
    with watched(group):
        each = [2] * RANKS
        functional.all_to_all_single(torch.ones(6, 2), each, each, group).sum().item()


def backward(rank: int, start: list[float]) -> None:
    group = _watched_world()
    y = exchanged(torch.ones(6, 2, requires_grad=True)).sum()
    start[0] = time.monotonic()
    with watched(group):
        if rank == 1:
            raise MemoryError("of the backward pass")
        y.backward()


def compiled(rank: int, start: list[float]) -> None:
    """torch.compile traces the context away; the one around the compiled call counts."""
    group = _watched_world()

    def layer(x: Tensor) -> Tensor:
        with watched(group):
            return exchanged(x * 2).sum()

    layer = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with watched(group):
        layer(torch.ones(6, 2))
    start[0] = time.monotonic()
    with watched(group):
        if rank == 1:
            raise ValueError("no")
        layer(torch.ones(6, 2)).item()


def outside(rank: int, start: list[float]) -> None:
    """A call that no context surrounds ends too, after the limit, if a rank fails beside it."""
    group = _watched_world()
    start[0] = time.monotonic()
    if rank == 1:
        report(group, ValueError("no"))
        raise ValueError("no")
    exchanged(torch.ones(6, 2)).sum().item()


def _signal(number: int, failing: int) -> Scenario:
    def scenario(rank: int, start: list[float]) -> None:
        group = _watched_world()
        dist.barrier()
        start[0] = time.monotonic()
        if rank == failing:
            os.kill(os.getpid(), number)
        with watched(group):
            exchanged(torch.ones(6, 2)).sum().item()

    return scenario


def subgroup(rank: int, start: list[float]) -> None:
    """Ranks 2 and 1 are ranks 0 and 1 of a group; the group of all goes on without it."""
    group = dist.new_group([1, 2])
    if rank:
        watch(group, LIMIT)
        start[0] = time.monotonic()
        try:
            with watched(group):
                if rank == 2:
                    raise KeyError("q")
                dist.all_reduce(torch.ones(1), group=group)
        finally:
            dist.all_reduce(torch.ones(1))
    else:
        dist.all_reduce(torch.ones(1))


def again(rank: int, start: list[float]) -> None:
    """Groups that are made anew, on the same port."""
    for _ in range(3):
        _watched_world()
        dist.barrier()
        dist.destroy_process_group()
        time.sleep(0.3 if rank else 0.0)  # or it may find the store of the group before
        init(rank, int(os.environ["MASTER_PORT"]))
    _watched_world()
    dist.destroy_process_group()
    time.sleep(1.2)
    import threading

    assert threading.active_count() == 1, threading.enumerate()


def key_error(rank: int, start: list[float]) -> None:
    group = _watched_world()
    start[0] = time.monotonic()
    if rank == 1:
        raise KeyError("the script's own")
    with watched(group):
        exchanged(torch.ones(6, 2)).sum().item()


def normal(rank: int, start: list[float]) -> None:
    _watched_world()


SCENARIOS: dict[str, Scenario] = {
    f.__name__: f
    for f in (
        equal_facts, different_graphs, own_error, wrong_shard, wrong_shard_of_all, error_inside,
        plain_functional, backward, compiled, outside, subgroup, again, key_error, normal,
    )
}  # fmt: skip
SCENARIOS |= different_calls.SCENARIOS
SCENARIOS |= {
    "kill": _signal(signal.SIGKILL, 2),
    "kill_host": _signal(signal.SIGKILL, 0),
    "stop": _signal(signal.SIGSTOP, 2),
    "stop_host": _signal(signal.SIGSTOP, 0),
}


def init(rank: int, port: int) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=2 * DEADLINE),
    )


def outcome(name: str, rank: int) -> dict[str, Any]:
    """Run a scenario on this rank, and say which error it raised, and after how many seconds."""
    start = [time.monotonic()]
    error = None
    try:
        SCENARIOS[name](rank, start)
    except Exception as raised:
        error = raised
    return {
        "error": type(error).__name__ if error else "",
        "message": str(error or ""),
        "seconds": round(time.monotonic() - start[0], 2),
    }


def run(name: str) -> list[dict[str, Any]]:
    """Fork three ranks; return what they answer, with empty dicts for those that do not."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    end = time.monotonic() + DEADLINE
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(rank)) for rank in range(RANKS)]
        children = []
        for rank, file in enumerate(files):
            child = os.fork()
            if not child:
                os.environ["MASTER_PORT"] = str(port)
                torch.set_num_threads(1)
                init(rank, port)
                file.with_suffix(".part").write_text(json.dumps(outcome(name, rank)))
                file.with_suffix(".part").rename(file)
                time.sleep(DEADLINE)  # a failed rank stays, with its connections
                os._exit(0)
            children.append(child)
        expected = [r for r in range(RANKS) if not name.endswith("host") or r]
        expected = [r for r in expected if name not in ("kill", "stop") or r < 2]
        while time.monotonic() < end and not all(files[r].exists() for r in expected):
            time.sleep(0.05)
        found = [json.loads(file.read_text()) if file.exists() else {} for file in files]
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["--under-torchrun"]:
        dist.init_process_group("gloo", timeout=timedelta(seconds=DEADLINE))
        SCENARIOS[sys.argv[2]](dist.get_rank(), [0.0])
        sys.exit()
    import torch._dynamo

    for asked in sys.argv[1:] or sys.stdin:
        print(json.dumps(run(asked.strip())), flush=True)

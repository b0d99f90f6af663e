"""Calls of three ranks over one shard, of which one differs; `failing_ranks.py` runs them.

All functions take the rank, and a place for the moment from which seconds count.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import graphattn as ga
import graphattn.nn  # before the ranks are forked
from graphattn.distributed.failures import same_calls

LIMIT = 2.0  # of the watches, seconds, as in `failing_ranks.py`
TOKENS, DIM = 24, 8
Scenario = Callable[[int, list[float]], None]


def _shard(exchange: Any = "rows") -> Any:
    graph = ga.causal_window_graph(TOKENS, 3)
    if exchange == "global":
        return ga.distributed.shard(ga.longformer_graph(TOKENS, 2, [0]), limit=LIMIT)
    return ga.distributed.shard(graph, exchange=exchange, limit=LIMIT)


def _differing(exchange: str, equal: int, of_rank_1: dict[str, Any]) -> Scenario:
    """Make some equal calls, and then another one, in which rank 1 differs.

    Args:
        exchange: how rows travel.
        equal: how many equal calls come before. Without any, all ranks compare the call.
        of_rank_1: what is different there: "batch", "dtype", "valid", "layer" or "autocast".
    """

    def scenario(rank: int, start: list[float]) -> None:
        shard = _shard(exchange)
        made = {"batch": 2, "dtype": torch.float32, "valid": False, "layer": "DotProductAttention"}
        for number in range(equal + 1):
            start[0] = time.monotonic()
            if number == equal and rank == 1:
                made |= of_rank_1
            layer = getattr(ga.nn, made["layer"])(DIM, 2).to(made["dtype"])
            x = torch.randn(made["batch"], shard.num_targets, DIM, dtype=made["dtype"])
            valid = torch.ones(shard.num_targets, dtype=torch.bool) if made["valid"] else None
            with torch.autocast("cpu", enabled=made.get("autocast", False)):
                layer(x, shard, valid=valid)

    return scenario


def gathered(rank: int, start: list[float]) -> None:
    shard = _shard()
    shard.gather(torch.ones(2, 8, 3))
    start[0] = time.monotonic()
    shard.gather(torch.ones(2, 8, 4 if rank == 1 else 3))


def _layer() -> Any:
    torch.manual_seed(0)
    return ga.nn.DotProductAttention(DIM, 2)


def goes_on(rank: int, start: list[float]) -> None:
    """All ranks make calls that differ, and afterwards equal ones, in a group that is whole."""
    shard, layer = _shard(), _layer()
    with contextlib.suppress(ValueError):
        layer(torch.ones(1 + rank, 8, DIM), shard)
    x = torch.randn(2, TOKENS, DIM)
    for _ in range(3):
        y = layer(shard.split(x), shard)
    assert torch.allclose(y, shard.split(layer(x, shard.whole)), atol=1e-6)


def one_is_late(rank: int, start: list[float]) -> None:
    """A rank comes to a comparison after the others have asked it; then all go on."""
    shard, layer = _shard(), _layer()
    for batch in (1, 1, 2):
        if batch == 2 and rank == 1:
            time.sleep(same_calls.PATIENCE + 0.7)
        layer(torch.ones(batch, 8, DIM), shard)


def late_and_expected(rank: int, start: list[float]) -> None:
    """Ranks 0 and 2 change the batch size, and have asked when rank 1 comes and does not."""
    shard, layer = _shard(), _layer()
    for batch in (1, 1, 1 if rank == 1 else 2):
        if (batch, rank) == (1, 1) and shard._calls.count == 2:
            time.sleep(same_calls.PATIENCE + 0.7)
        start[0] = time.monotonic()
        layer(torch.ones(batch, 8, DIM), shard)


def one_compares_nothing(rank: int, start: list[float]) -> None:
    """Rank 1 runs compiled code, say. The others wait as long as the limit, and then go on."""
    shard, layer = _shard(), _layer()
    if rank == 1:
        shard._calls = None
    start[0] = time.monotonic()
    layer(torch.ones(2, 8, DIM), shard)


def nothing_travels(rank: int, start: list[float]) -> None:
    """Every rank calls as it likes, where no rank sees tokens of another one."""
    shard = ga.distributed.shard(ga.block_window_graph(TOKENS, 8), limit=LIMIT)
    layer = _layer()
    for _ in range(1 + rank):
        layer(torch.ones(1 + rank, 8, DIM), shard)


@contextlib.contextmanager
def _comparisons() -> Iterator[list[int]]:
    """Count the calls that are compared."""
    found, plain = [0], same_calls.SameCalls._compare

    def counted(*args: Any) -> None:
        found[0] += 1
        plain(*args)

    same_calls.SameCalls._compare = counted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        same_calls.SameCalls._compare = plain  # type: ignore[method-assign]


def only_surprises(rank: int, start: list[float]) -> None:
    """A model whose layers take different arguments compares its first steps, and no others."""
    shard, layer = _shard(), _layer()
    other = ga.nn.SelfConsensus(DIM, 2, rank=2, edge_hidden=4, update="target")
    valid = torch.ones(shard.num_targets, dtype=torch.bool)

    def step(batch: int) -> None:
        x = torch.ones(batch, shard.num_targets, DIM, requires_grad=True)
        y = layer(x, shard)
        y = torch.utils.checkpoint.checkpoint(
            lambda y: layer(layer(y, shard, valid=valid), shard), y, use_reentrant=False
        )
        other(other(y, shard), shard).sum().backward()

    with _comparisons() as found:
        for _ in range(4):
            step(2)
        begun = found[0]
        for _ in range(20):
            step(2)
        assert found[0] == begun > 0
        for _ in range(4):
            step(1)
        begun = found[0]
        for _ in range(20):
            step(1)
        assert found[0] == begun


SCENARIOS: dict[str, Scenario] = {
    f.__name__: f
    for f in (
        gathered, goes_on, one_is_late, late_and_expected, one_compares_nothing, nothing_travels,
        only_surprises,
    )
}  # fmt: skip
SCENARIOS |= {
    "batch_of_the_first_call": _differing("rows", 0, {"batch": 3}),
    "batch": _differing("rows", 3, {"batch": 3}),
    "batch_on_a_ring": _differing("ring", 3, {"batch": 1}),
    "batch_with_global_tokens": _differing("global", 3, {"batch": 3}),
    "dtype": _differing("rows", 3, {"dtype": torch.float64}),
    "dtype_with_as_many_bytes": _differing("rows", 3, {"dtype": torch.float64, "batch": 1}),
    "autocast": _differing("rows", 3, {"autocast": True}),
    "valid": _differing("rows", 3, {"valid": True}),
    "valid_on_a_ring": _differing("ring", 0, {"valid": True}),
    "layer": _differing("rows", 3, {"layer": "LinearAttention"}),
}

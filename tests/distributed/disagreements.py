"""Ranks of which one differs, raises an error, dies or hangs; every function runs on all ranks."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch

import graphattn as ga
from graphattn.distributed.agreement import (
    GAP,
    OpenFacts,
    agree,
    agree_in_graph,
    calling,
    graph_digest,
)

TOKENS, DIM = 24, 8
HANGS = 12.0  # seconds


def _error(call: Any) -> str:
    """Return the error of a call as the last line of a traceback; "" if there is none."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _check_that_calls_go_on(shard: Any) -> None:
    torch.manual_seed(0)
    layer, x = ga.nn.DotProductAttention(DIM, 2), torch.randn(2, TOKENS, DIM)
    y = layer(shard.split(x), shard)
    assert torch.allclose(y, shard.split(layer(x, shard.whole)), atol=1e-6)


def graphs_differ(group: Any) -> str:
    window = 5 if group.rank() == 1 else 4
    return _error(lambda: ga.distributed.shard(ga.causal_window_graph(TOKENS, window), group))


def equal_graphs_of_which_one_is_listed(group: Any) -> str:
    graph = ga.causal_window_graph(100, 4)
    if group.rank() == 1:
        graph.edge_index  # noqa: B018 - listed on one rank only
    return _error(lambda: agree(group, {"graph": graph_digest(graph)}))


def an_argument_of_shard_is_wrong_on_one_rank(group: Any) -> str:
    order: Any = "random" if group.rank() == 1 else "runs"
    graph = ga.causal_graph(TOKENS)
    return _error(lambda: ga.distributed.shard(graph, group, order=order))


def a_call_differs(
    group: Any, exchange: Any, of_rank_1: dict[str, Any], compiled: bool = False
) -> str:
    """Return the error of a call in which rank 1 has something else; then equal calls go on.

    Args:
        group: the process group.
        exchange: how rows travel; "global" for a graph with a global token.
        of_rank_1: what is different there: "batch", "dtype", "valid", "layer" or "autocast".
        compiled: whether rank 0 compiles the layer, for calls with and without gradients.
    """
    graph = ga.causal_window_graph(TOKENS, 3)
    if exchange == "global":
        graph, exchange = ga.longformer_graph(TOKENS, 2, [0]), "auto"
    shard = ga.distributed.shard(graph, group, exchange=exchange)
    made: dict[str, Any] = {"batch": 2, "dtype": torch.float32, "layer": ("DotProductAttention", 2)}
    made |= of_rank_1 if group.rank() == 1 else {}
    name, heads = made["layer"]
    layer = getattr(ga.nn, name)(DIM, heads).to(made["dtype"])
    x = torch.randn(made["batch"], shard.num_targets, DIM, dtype=made["dtype"])
    valid = torch.ones(shard.num_targets, dtype=torch.bool) if "valid" in made else None
    with torch.autocast("cpu", enabled="autocast" in made):
        message = _error(lambda: layer(x, shard, valid=valid))
        if compiled:
            torch._dynamo.reset()
            run = torch.compile(layer, backend="aot_eager") if group.rank() == 0 else layer
            with torch.no_grad():
                assert _error(lambda: run(x, shard, valid=valid)) == message
            message = _error(lambda: run(x, shard, valid=valid))
    _check_that_calls_go_on(shard)
    return message


def calls_differ_in_a_compiled_function(group: Any) -> list[str]:
    """Return the errors of the operator that compiled functions call before rows are sent."""
    rows, shape = torch.zeros(3), OpenFacts(["x", f"float32 [{GAP}, tokens, {GAP}]"], [2, 8])
    facts = OpenFacts([*shape.texts, "layer", "some"], [2, 8 + (group.rank() == 1)])
    nothing = OpenFacts([], [])

    def in_a_call() -> None:  # which was not compiled itself
        with calling(group, facts.filled()):
            agree_in_graph(rows, nothing, group)

    calls = (
        lambda: agree_in_graph(rows, facts, group),
        in_a_call,
        lambda: agree_in_graph(rows, shape, group),
        lambda: agree_in_graph(rows, nothing, group),
        lambda: agree_in_graph(rows, None, group),
    )
    return [_error(call) for call in calls]


def gathered_tensors_differ(group: Any, compiled: bool = False) -> str:
    shard = ga.distributed.shard(ga.causal_window_graph(TOKENS, 3), group)
    width = 4 if shard.rank == 1 else 3
    gather = shard.gather
    if compiled:
        torch._dynamo.reset()
        gather = torch.compile(gather, backend="aot_eager", fullgraph=True)
        assert gather(torch.ones(2, shard.num_targets, 5)).shape == (2, TOKENS, 5)
    message = _error(lambda: gather(torch.ones(2, shard.num_targets, width)))
    _check_that_calls_go_on(shard)
    return message


def calls_over_a_graph_whose_rows_do_not_travel(group: Any) -> str:
    """Every rank calls as often and with what it likes, and may raise errors."""
    shard = ga.distributed.shard(ga.block_window_graph(TOKENS, TOKENS // group.size()), group)
    layer = ga.nn.DotProductAttention(DIM, 2)
    for _ in range(1 + shard.rank):
        layer(torch.ones(1 + shard.rank, shard.num_targets, DIM), shard)
    if shard.rank == 1:
        assert "ValueError" in _error(lambda: layer(torch.ones(1, DIM), shard))
    return _error(lambda: shard.gather(torch.ones(shard.num_targets, DIM)))


def one_rank_raises(group: Any, exchange: Any) -> list[str]:
    """Return the errors of two calls: of a tensor of another length, and of a lack of memory."""
    shard = ga.distributed.shard(ga.causal_graph(TOKENS), group, exchange=exchange)
    layer = ga.nn.DotProductAttention(DIM, 2)
    x = torch.randn(shard.num_targets, DIM)
    messages = [_error(lambda: layer(x[1:] if shard.rank == 1 else x, shard))]
    failing = ga.nn.DotProductAttention(DIM, 2)
    if shard.rank == 1:
        failing.key_proj.register_forward_hook(_no_memory)
    messages.append(_error(lambda: failing(x, shard)))
    _check_that_calls_go_on(shard)
    return messages


def _no_memory(*_: Any) -> None:
    raise MemoryError("no memory for keys")


def generation_differs(group: Any) -> list[str]:
    """Return the errors of calls in which rank 1 has another prompt, or writes more tokens."""
    shard = ga.distributed.shard(ga.causal_graph(TOKENS), group)
    torch.manual_seed(0)
    model, prompt = ga.models.CausalLM(9, DIM, depth=1, heads=2), torch.arange(TOKENS) % 9
    is_odd = shard.rank == 1
    return [
        _error(lambda: model.generate(prompt.roll(int(is_odd)), 2, shard=shard)),
        _error(lambda: model.generate(prompt, 2 + is_odd, shard=shard)),
    ]


def positions_of_one_rank_are_two(group: Any) -> str:
    """Return the error of a consensus in which tokens of rank 1 have a position for each end."""
    shard = ga.distributed.shard(ga.complete_graph(TOKENS), group, exchange="ring")
    layer = ga.nn.SelfConsensus(DIM, 2, rank=2, edge_hidden=4, rope=True)
    places: Any = shard.positions
    if shard.rank == 1:
        places = places, places + 1
    x = torch.randn(shard.num_targets, DIM)
    return _error(lambda: layer(x, shard, positions=places))


def all_ranks_raise(group: Any) -> str:
    """All ranks make the same mistake, one after the other; afterwards they go on."""
    shard = ga.distributed.shard(ga.causal_graph(TOKENS), group)
    layer = ga.nn.DotProductAttention(DIM, 2)
    time.sleep(0.3 * shard.rank)
    message = _error(lambda: layer(torch.ones(shard.num_targets, DIM + 1), shard))
    _check_that_calls_go_on(shard)
    return message


def one_rank_dies_or_hangs(group: Any, dies: bool, backward: bool) -> tuple[str, float]:
    """Return the error of a rank without rank 2, and after how many seconds it came."""
    shard = ga.distributed.shard(ga.causal_graph(TOKENS), group)
    layer = ga.nn.DotProductAttention(DIM, 2)
    x = torch.randn(shard.num_targets, DIM)
    y = layer(x, shard).sum()
    start = time.monotonic()
    if shard.rank == 2 and dies:
        os.kill(os.getpid(), signal.SIGKILL)
    if shard.rank == 2:
        time.sleep(HANGS)
        return "", HANGS
    return _error(y.backward if backward else lambda: layer(x, shard)), time.monotonic() - start

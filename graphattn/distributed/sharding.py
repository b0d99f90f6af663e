"""How the tokens of a graph are divided among the ranks of a process group."""

from __future__ import annotations

from typing import Any, Literal
from weakref import WeakValueDictionary

from graphattn.distributed.agreement import agree, graph_digest, is_equal_on_all_ranks
from graphattn.distributed.layout import Layout
from graphattn.distributed.planning.plans import Exchange, plan, planned
from graphattn.distributed.sharded_graph import ShardedGraph
from graphattn.graphs.arguments import as_choice
from graphattn.graphs.token_graph import TokenGraph


def shard(
    graph: TokenGraph,
    group: Any = None,
    *,
    order: Literal["auto", "runs", "zigzag"] = "auto",
    exchange: Literal["auto", "rows", "ring"] = "auto",
) -> ShardedGraph:
    """Divide the tokens of a graph among the ranks of a process group.

    Every rank calls it with an equal graph. The ranks get runs of consecutive tokens, which differ
    in length by one token at most. Rows of other ranks that the targets of a rank see are sent to
    it when a layer runs, and no others.

    Args:
        graph: the graph of all tokens.
        group: a one-dimensional :class:`torch.distributed.DeviceMesh`, such as ``mesh["cp"]``, or a
            process group; the default group if None.
        order: "runs": every rank owns one run of consecutive tokens. "zigzag": it owns two, one
            from the beginning and one from the end, so that all ranks have about the same work in a
            causal graph. "auto" takes the order of an earlier graph with as many tokens in this
            group, if all ranks have one, so that one tensor fits all graphs of a model; otherwise
            "zigzag" for a causal graph whose exchange is a ring, and "runs" for all others.
        exchange: "rows": all rows of other ranks that a rank needs are fetched before the
            operation. "ring": attention and consensus compute with the rows of one rank at a time,
            so that a rank never stores those of more than two others; linear attention sends sums
            over sources instead, where these are smaller. "auto" takes the ring if a rank needs
            more than twice as many rows of others as it owns. If only global tokens need so many,
            their queries are sent to all ranks instead. Consensus with features of edges or with
            its own messages always fetches all rows.

    Returns:
        A :class:`ShardedGraph`, which layers take in the place of a graph.

    Raises:
        ValueError: if there are more ranks than targets, an argument has another type or value, or
            the ranks have different graphs. All ranks raise it.
        RankFailure: if another rank raised an error here.

    Example:
        A script for ``torchrun --nproc-per-node 4 script.py``::

            import torch, torch.distributed as dist, graphattn as ga

            dist.init_process_group("gloo")
            graph, x = ga.causal_window_graph(4096, window=256), torch.randn(4096, 64)
            layer = ga.nn.DotProductAttention(64, heads=4, rope=True)
            shard = ga.distributed.shard(graph)
            y = shard.gather(layer(shard.split(x), shard))  # equals layer(x, graph)
    """
    process_group, rank, ranks = _group_of(group)
    error, facts = None, {"the graph": "none"}
    earlier: Earlier = (None, None)
    try:
        _check(graph, ranks, order, exchange)
        facts = {"the graph": graph_digest(graph), "order": order, "exchange": exchange}
        counts = graph.num_targets, graph.num_sources
        earlier = _is_zigzag(process_group, counts[0]), _is_zigzag(process_group, counts[1])
    except ValueError as raised:
        error = raised
    if ranks > 1:
        agree(process_group, facts, error)
    if error is not None:
        raise error
    if ranks > 1 and not is_equal_on_all_ranks(process_group, earlier):
        earlier = None, None  # some ranks have deleted the earlier graph
    shares = Layout(graph.num_targets, ranks), Layout(graph.num_sources, ranks)
    chosen: tuple[Exchange, tuple[int, ...]]
    if exchange == "auto":
        automatic = planned(graph, *shares)
        chosen = automatic.exchange, automatic.broadcast
    else:
        chosen = exchange, ()
    zigzag = order == "zigzag"
    if order == "auto" and earlier[0] is not None:
        zigzag = earlier[0]
    elif order == "auto" and chosen[0] == "ring" and graph.is_causal:
        zigzag = 2 * ranks <= graph.num_targets and plan(graph, ranks).target_layout.zigzag
    targets = sources = _layout(process_group, graph.num_targets, ranks, zigzag)
    if graph.num_sources != graph.num_targets:
        sources = _layout(process_group, graph.num_sources, ranks, bool(earlier[1]))
    made = planned(graph, targets, sources, "targets", chosen if ranks > 1 else ("rows", ()))
    return ShardedGraph(made, rank, process_group if ranks > 1 else None)


def _check(graph: Any, ranks: int, order: str, exchange: str) -> None:
    """Check the arguments of :func:`shard`."""
    if not isinstance(graph, TokenGraph):
        raise ValueError(f"graph must be a TokenGraph, got {type(graph).__name__}")
    as_choice("order", order, ("auto", "runs", "zigzag"))
    as_choice("exchange", exchange, ("auto", "rows", "ring"))
    chunks = ranks * (2 if order == "zigzag" else 1)
    if chunks > graph.num_targets:
        raise ValueError(
            f"graph must have at least {chunks} targets, got {graph.num_targets} targets and "
            f"{ranks} ranks"
        )


# Whether the targets and sources of an earlier graph are in zigzag; None without one.
Earlier = tuple[bool | None, bool | None]
# The layouts of graphs that are in use, by process group and number of tokens.
_LAYOUTS: WeakValueDictionary[tuple[int, int], Layout] = WeakValueDictionary()


def _is_zigzag(group: Any, num_tokens: int) -> bool | None:
    """Whether an earlier graph that is in use on this rank is in zigzag; None without one."""
    earlier = _LAYOUTS.get((id(group), num_tokens))
    return None if earlier is None else earlier.zigzag


def _layout(group: Any, num_tokens: int, ranks: int, zigzag: bool) -> Layout:
    """Return a layout, the one that is in use if it is equal."""
    key, layout = (id(group), num_tokens), Layout(num_tokens, ranks, zigzag)
    earlier = _LAYOUTS.get(key)
    if earlier != layout:
        _LAYOUTS[key] = earlier = layout
    return earlier


def _group_of(group: Any) -> tuple[Any, int, int]:
    """Return the process group of an argument, and the rank and the number of ranks in it."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "group needs an initialised process group: call "
            "torch.distributed.init_process_group() first, in a script that torchrun starts"
        )
    if isinstance(group, dist.DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group must be a mesh of one dimension, such as mesh['cp'], got {group}"
            )
        group = group.get_group()
    elif group is None:
        group = dist.group.WORLD
    elif not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"group must be a DeviceMesh, a process group or None, got {type(group).__name__}"
        )
    return group, dist.get_rank(group), dist.get_world_size(group)


__all__ = ["shard"]

"""Needs of the blocks of one model: graphs that divide tokens alike, and draws that ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphattn.distributed.sharded_graph import ShardedGraph
from graphattn.graphs.token_graph import TokenGraph


def check_same_shares(graphs: Sequence[TokenGraph | ShardedGraph]) -> None:
    """Check that a model can use these graphs, one per block, one after the other.

    The output of a block is the input of the next one, so every block must compute the same tokens
    on this rank. Graphs that are not divided among ranks are not compared.

    Raises:
        ValueError: if only some of the graphs are divided among ranks, or if they are divided among
            other ranks, or in another way.
    """
    first = graphs[0] if graphs else None
    for place, graph in enumerate(graphs):
        if graph is first:
            continue
        if isinstance(graph, ShardedGraph) != isinstance(first, ShardedGraph):
            raise ValueError(
                "graph must be a ShardedGraph for every block or for none, got "
                f"{type(first).__name__} for block 0 and {type(graph).__name__} for block {place}"
            )
        if not isinstance(graph, ShardedGraph) or not isinstance(first, ShardedGraph):
            continue
        if _share_of(graph) != _share_of(first) or graph.group is not first.group:
            raise ValueError(
                "graph must divide the same tokens in the same way for every block, got "
                f"{_described(first)} for block 0 and {_described(graph)} for block {place}: call "
                "graphattn.distributed.shard with the same group for all graphs, which must have "
                "the same number of tokens"
            )


def of_first_rank(drawn: Tensor, group: Any) -> Tensor:
    """Return what the first rank of a group has drawn, a bool tensor, on every rank.

    All ranks draw, so that their generators move on alike, also where a gradient checkpoint draws
    again.
    """
    if group is None:
        return drawn
    from torch.distributed import _functional_collectives as functional

    first: Tensor = functional.broadcast(drawn.to(torch.uint8), 0, group)
    return first.bool()


def _share_of(shard: ShardedGraph) -> tuple[object, ...]:
    """Return what decides which tokens a rank has."""
    return shard._targets, shard._sources, shard.rank


def _described(shard: ShardedGraph) -> str:
    layout = shard._targets
    return (
        f"{layout.size(shard.rank)} of {layout.num_tokens} tokens on rank {shard.rank} of "
        f"{shard.ranks}{' (zigzag)' * layout.zigzag}"
    )

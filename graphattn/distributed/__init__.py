"""Sequences longer than one machine: the graph says which tokens a rank needs of another rank."""

from graphattn.distributed.failures.watching import RankFailure
from graphattn.distributed.sharded_graph import ShardedGraph, shard

__all__ = ["RankFailure", "ShardedGraph", "shard"]

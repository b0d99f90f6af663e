"""Sequences longer than one machine: the graph says which tokens a rank needs of another rank.

A plan needs no processes, so it can be made on a laptop for any number of ranks::

    print(ga.distributed.plan(ga.causal_window_graph(2**22, window=256), ranks=1024))
"""

from graphattn.distributed.agreement import RankFailure
from graphattn.distributed.losses import token_mean
from graphattn.distributed.planning.plans import CommunicationPlan, plan
from graphattn.distributed.sharded_graph import ShardedGraph
from graphattn.distributed.sharding import shard

__all__ = ["CommunicationPlan", "RankFailure", "ShardedGraph", "plan", "shard", "token_mean"]

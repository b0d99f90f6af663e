"""Stochastic depth: training leaves whole branches of a network out, at random."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphattn.distributed.exchange import of_first_rank
from graphattn.distributed.sharded_graph import ShardedGraph
from graphattn.graphs.token_graph import TokenGraph


def drop_paths(x: Tensor, share: float, graph: Any = None) -> Tensor:
    """Set a share of sequences to 0 and divide the others by 1 - share (Huang et al., 2016).

    Args:
        x: [*, N, dim], what a branch adds to its sequences.
        share: probability, in [0, 1), that a sequence is set to 0.
        graph: the graph of the N tokens. If it packs several sequences (:func:`~graphattn.batch`),
            each of them is dropped independently of the others. If it is divided among ranks, a
            sequence is dropped on all of them: the first rank draws.

    Example:
        >>> import torch
        >>> from graphattn.nn.blocks.drop_path import drop_paths
        >>> _ = torch.manual_seed(0)
        >>> drop_paths(torch.ones(4, 1, 1), 0.5).flatten()
        tensor([0., 2., 0., 0.])
    """
    if share == 0:
        return x
    shard = graph if isinstance(graph, ShardedGraph) else None
    whole = graph if shard is None else shard.whole
    sizes = (whole.sizes or ()) if isinstance(whole, TokenGraph) else ()
    parts = max(len(sizes), 1)
    keep = torch.rand(*x.shape[:-2], parts, 1, device=x.device) >= share
    if shard is not None:
        keep = of_first_rank(keep, shard.group)
    scale = keep.to(x.dtype) / (1 - share)
    if parts > 1:
        lengths = torch.tensor([size[0] for size in sizes], device=x.device)
        scale = scale.repeat_interleave(lengths, dim=-2, output_size=whole.num_targets)
        scale = scale if shard is None else shard.split(scale, dim=-2)
    return x * scale

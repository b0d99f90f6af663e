"""PyG's batch vectors, which say to which item of a batch every token belongs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphattn.graphs.token_graph import TokenGraph

BatchVector = Tensor | tuple[Tensor, Tensor]
Sizes = tuple[tuple[int, int], ...]  # (targets, sources) of every part
# The largest number of items. A wrong batch vector with a huge entry would fill the memory.
MOST_ITEMS = 1 << 24


def part_sizes(name: str, batch: Any, num_tokens: int) -> list[int]:
    """Count the tokens of every item of a batch vector [N], after checking it.

    Items are numbered from 0 in ascending order. A number that does not occur is an item without
    tokens.
    """
    if not isinstance(batch, Tensor) or batch.dim() != 1 or not _holds_integers(batch):
        got = (
            f"{batch.dtype} of shape {list(batch.shape)}"
            if isinstance(batch, Tensor)
            else type(batch).__name__
        )
        raise ValueError(
            f"{name} must be an integer tensor of shape [{num_tokens}] that says to which item of "
            f"the batch every token belongs, got {got}"
        )
    if len(batch) != num_tokens:
        raise ValueError(
            f"{name} must have one entry for each of {num_tokens} tokens, got {len(batch)}"
        )
    batch = batch.long()  # torch has few operations for unsigned integers
    steps = batch.diff()
    if (steps < 0).any():
        i = int((steps < 0).nonzero()[0])
        raise ValueError(
            f"{name} must be in ascending order, as PyG's batches are, but {name}[{i}] = "
            f"{int(batch[i])} comes before {name}[{i + 1}] = {int(batch[i + 1])}. Sort the tokens "
            f"by item first, with order = {name}.argsort(stable=True)"
        )
    if num_tokens and int(batch[0]) < 0:
        raise ValueError(f"{name} must be >= 0, got {name}[0] = {int(batch[0])}")
    if num_tokens and int(batch[-1]) >= MOST_ITEMS:
        raise ValueError(
            f"{name} must number the items from 0, with at most {MOST_ITEMS} items, got the item "
            f"{int(batch[-1])}"
        )
    sizes: list[int] = torch.bincount(batch).tolist()
    return sizes


def pair_sizes(batch: Any, num_targets: int, num_sources: int) -> Sizes:
    """Count the targets and sources of every item, given one batch vector or a pair of them."""
    if isinstance(batch, tuple | list):
        if len(batch) != 2:
            raise ValueError(
                "batch must be one tensor or a pair (targets, sources) of tensors, got "
                f"{len(batch)} entries"
            )
        targets = part_sizes("batch[0]", batch[0], num_targets)
        sources = part_sizes("batch[1]", batch[1], num_sources)
        most = max(len(targets), len(sources))  # the last items may have only targets or sources
        targets += [0] * (most - len(targets))
        sources += [0] * (most - len(sources))
        return tuple(zip(targets, sources, strict=True))
    if num_targets != num_sources:
        raise ValueError(
            f"batch must be a pair (targets [{num_targets}], sources [{num_sources}]), because "
            "targets and sources are different tokens, got one tensor"
            if isinstance(batch, Tensor)
            else f"batch must be a pair of integer tensors, got {type(batch).__name__}"
        )
    return tuple((size, size) for size in part_sizes("batch", batch, num_targets))


def with_borders(graph: TokenGraph, sizes: Sizes, what: str) -> TokenGraph:
    """Return a graph that stores a list of edges as a batch of these (targets, sources).

    Raises:
        ValueError: if an edge joins tokens of two items; it names the argument `what`.
    """
    part_of_target, part_of_source = (
        torch.arange(len(sizes)).repeat_interleave(
            torch.tensor([size[side] for size in sizes], dtype=torch.int64)
        )
        for side in (0, 1)
    )
    source, target = graph.compact_edges
    of_target = part_of_target.to(graph.device)[target]
    crossing = (of_target != part_of_source.to(graph.device)[source]).nonzero()
    if len(crossing) > 0:
        j, i = graph.compact_edges[:, int(crossing[0])].tolist()
        raise ValueError(
            f"{what} must have no edge between two items of the batch, but source {j} and target "
            f"{i} of an edge belong to different items"
        )
    return TokenGraph(
        edge_index=graph.compact_edges,
        num_targets=graph.num_targets,
        num_sources=graph.num_sources,
        sizes=sizes,
    )


def _holds_integers(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)

"""Caches over a prompt that ranks divide: each rank stores its own tokens, or what all need."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphattn.distributed.exchange import of_every_rank
from graphattn.distributed.sharded_graph import ShardedGraph
from graphattn.nn.caches.layer_cache import LayerCache
from graphattn.nn.caches.running_cache import RunningCache
from graphattn.ops.inputs import clear_invalid


class DividedCache(LayerCache):
    """Cache of the tokens of a layer that this rank owns; all ranks together store every token.

    Ranks own the tokens of the prompt as the shard says. Of the tokens after it, the one at
    position p is stored by rank p modulo ranks, so that memory grows alike on all of them. A step
    computes the row of a new token over the own tokens of every rank; the layer merges these rows.

    Args:
        like: an empty cache, whose owner, fields, batch, window, dtype and device are taken.
        shard: this rank's part of a graph over the prompt.

    Attributes:
        position, min_length: as in :class:`LayerCache`, for the tokens of all ranks.
        num_bytes: memory of the buffers of this rank, in bytes.
    """

    shard: ShardedGraph

    def __init__(self, like: LayerCache, shard: ShardedGraph) -> None:
        super().__init__(
            like.owner,
            like.fields,
            like.batch,
            like.window,
            dtype=like.dtype,
            device=like.device,
            rollback=like.rollback,
        )
        self.shard = shard
        self.prompt: list[range] = []  # its runs on this rank
        self.start = 0  # the first position after the prompt

    def append_prompt(self, tokens: dict[str, Tensor], valid: Tensor | None) -> None:
        layout = self.shard.share.targets
        super().append(tokens, valid)
        self.prompt, self.start = list(layout.runs(self.shard.rank)), layout.num_tokens
        self._reach(self.start)

    def append(self, tokens: dict[str, Tensor], valid: Tensor | None) -> None:
        """Add one token, [*, 1, heads, width], on the rank that stores it."""
        place = self.position
        if place % self.shard.ranks == self.shard.rank:
            super().append(tokens, valid)
        self._reach(place + 1)

    def _reach(self, position: int) -> None:
        self.position = position
        if self.most_kept is not None and position > self.most_kept:
            self.min_length = max(self.min_length, position - self.rollback)

    def held(self, most: int | None) -> int:
        """Count the tokens of this rank among the newest `most` of all ranks, or among all."""
        first = 0 if most is None else max(self.position - most, 0)
        return self._owned_before(self.position) - self._owned_before(first)

    def places(self, count: int) -> Tensor:
        """Return the positions of the newest `count` tokens of this rank, ascending."""
        runs = [torch.arange(run.start, run.stop) for run in self.prompt]
        after = torch.arange(self.start, self.position)
        runs.append(after[after % self.shard.ranks == self.shard.rank])
        places = torch.cat(runs)
        return places[len(places) - count :].to(self.device)

    def _owned_before(self, position: int) -> int:
        """Count the tokens of this rank at positions below `position`."""
        rank, ranks = self.shard.rank, self.shard.ranks
        count = sum(len(range(run.start, min(run.stop, position))) for run in self.prompt)

        def of_rank(stop: int) -> int:  # p with p % ranks == rank
            return (stop - rank + ranks - 1) // ranks

        return count + of_rank(max(position, self.start)) - of_rank(self.start)

    def truncate(self, length: int) -> None:
        """Forget the tokens from position `length` on, as :meth:`LayerCache.truncate` does."""
        before, end = self.position, self.end
        super().truncate(length)
        if self.position:
            self.end = end - (self._owned_before(before) - self._owned_before(self.position))
        self.prompt = [range(run.start, min(run.stop, self.position)) for run in self.prompt]
        self.start = min(self.start, self.position)

    def gathered(self, x: Tensor) -> Tensor:
        """Return a tensor of every rank, all of one shape, [ranks, ...]."""
        group = self.shard.group
        return x[None] if group is None else of_every_rank(x, group)


def cache_over_ranks(layer: Any, cache: Any, shard: ShardedGraph) -> Any:
    """Return a cache for a prompt that ranks divide, in place of an empty one of a layer.

    Softmax attention divides its tokens (:class:`DividedCache`), unless its window fits into the
    share of every rank. In all other cases only the prompt is divided, and every rank stores the
    window, or the sums of linear attention; then steps send nothing.

    Raises:
        ValueError: for another layer without a window, or a cache of another class.
    """
    given = f"got {layer!r} with window = {getattr(cache, 'window', None)}"
    if not isinstance(cache, LayerCache):
        raise ValueError(f"shard must be None for a layer whose cache is its own, {given}")
    is_long = cache.most_kept is None or cache.most_kept > min(shard.share.targets.sizes())
    if is_long and layer.may_divide_cache():
        return DividedCache(cache, shard)
    if cache.most_kept is None:
        raise ValueError(
            "shard must be None for a layer without a window whose rows over the tokens of several "
            f"ranks cannot be merged, {given}"
        )
    cache.shard = shard
    return cache


def append_prompt(cache: LayerCache, tokens: dict[str, Tensor], valid: Tensor | None) -> None:
    """Add a prompt to an empty cache over ranks, given this rank's tokens [*, n, heads, width].

    Unless the cache is divided, it then is like any other, and equal on all ranks.
    """
    shard = cache.shard
    layout = shard.share.targets
    if isinstance(cache, DividedCache):
        cache.append_prompt(tokens, valid)
        return
    if isinstance(cache, RunningCache):
        tokens = {name: clear_invalid(x, valid) for name, x in tokens.items()}
        valid = None
        older = (layout.tokens(shard.rank) < layout.num_tokens - cache.rollback).to(cache.device)
        cache.add({name: x[..., older, :, :] for name, x in tokens.items()})
        if shard.group is not None:
            for x in cache.sums.values():
                torch.distributed.all_reduce(x, group=shard.group)
    assert cache.most_kept is not None
    count = min(cache.most_kept, layout.num_tokens)
    newest = {name: newest_rows(shard, x, count, -3) for name, x in tokens.items()} if count else {}
    seen = None if valid is None else newest_rows(shard, valid, count, -1)
    cache.append_newest(newest, seen, layout.num_tokens)


def newest_rows(shard: ShardedGraph, x: Tensor, count: int, dim: int) -> Tensor:
    """Return the rows of the last `count` tokens of all ranks, on every rank.

    Args:
        shard: this rank's part.
        x: the rows of this rank, counted by the dimension `dim` < 0.
        count: how many.
        dim: the dimension.
    """
    layout = shard.share.targets
    places = layout.tokens(shard.rank) - (layout.num_tokens - count)
    own = (places >= 0).nonzero().flatten().to(x.device)
    shape = list(x.shape)
    shape[dim] = count
    is_mask = x.dtype == torch.bool
    rows = x.new_zeros(shape, dtype=torch.uint8 if is_mask else x.dtype)
    rows.index_copy_(
        dim % x.dim(), places.to(x.device)[own], x.index_select(dim, own).to(rows.dtype)
    )
    if shard.group is not None:  # every row comes from one rank, so this sum rounds nothing
        torch.distributed.all_reduce(rows, group=shard.group)
    return rows.bool() if is_mask else rows


__all__ = ["DividedCache", "append_prompt", "cache_over_ranks", "newest_rows"]

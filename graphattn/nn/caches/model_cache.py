"""The caches of a model's layers as one."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any, Self

from torch import Tensor


class ModelCache:
    """The caches of a model's layers, which go on, back and apart together.

    ``model.init_cache`` makes one; for a model of your own it is
    ``ModelCache(block.init_cache(batch, window) for block in blocks)``, and its step goes through
    ``zip(blocks, cache)``. Caches of other layers serve as well, with what :class:`LayerCache` has:
    `position`, `batch`, `num_bytes`, `min_length`, `reorder`, `truncate` and `clone`; what one of
    them lacks is missed when it is asked for.

    Args:
        layers: the caches, in the order of the layers; every one once.

    Attributes:
        position: tokens seen so far, by every layer.
        batch: the leading dimensions.
        num_bytes: memory held by all layers.
        min_length: the least length above 0 that :meth:`truncate` takes; 0 while all is kept.

    Raises:
        ValueError: for no cache or one that comes twice; later, where layers have seen different
            numbers of tokens, because a step was broken off between them.

    Example:
        >>> import torch, graphattn as ga
        >>> blocks = [ga.nn.PreNormBlock(ga.nn.KrauseAttention(16, heads=4)) for _ in range(3)]
        >>> cache = ga.nn.ModelCache(block.init_cache(2, window=8) for block in blocks)
        >>> x = torch.randn(2, 30, 16)
        >>> for block, own in zip(blocks, cache):
        ...     x = block.step(x, own)
        >>> cache
        ModelCache(3 layers, batch=[2], position=30, 18432 bytes)
    """

    def __init__(self, layers: Iterable[Any]) -> None:
        self.layers = list(layers)
        if not self.layers:
            raise ValueError("layers must hold at least one cache, got none")
        if len(set(map(id, self.layers))) < len(self.layers):
            raise ValueError("layers must hold every cache once: a layer needs one of its own")

    @property
    def position(self) -> int:
        found: int = self._common("position")
        return found

    @property
    def batch(self) -> tuple[int, ...]:
        found: tuple[int, ...] = self._common("batch")
        return found

    @property
    def num_bytes(self) -> int:
        return sum(self._each("num_bytes"))

    @property
    def min_length(self) -> int:
        return max(self._each("min_length"))

    def truncate(self, length: int) -> None:
        """Forget the tokens from position `length` on in every layer, as if never seen.

        See :meth:`LayerCache.truncate`: what the layer with the least memory can.

        Raises:
            ValueError: for a length out of range; then no layer has changed.
        """
        self._common("position")
        truncates, most = self._each("truncate"), self.min_length
        # The layer that keeps least refuses what any of them does, before another has changed.
        order = sorted(range(len(self)), key=lambda i: self.layers[i].min_length != most)
        for i in order:
            truncates[i](length)

    def reorder(self, index: Tensor) -> None:
        """Continue with the entries `index` of the first batch dimension in every layer.

        Entries may repeat or be left out, and their number may change (beam search).

        Raises:
            ValueError: unless there is a batch dimension and `index` lists entries of it.
        """
        self._common("batch")  # so that what the first layer takes, all do
        for reorder in self._each("reorder"):
            reorder(index)

    def clone(self) -> Self:
        """A copy that shares no memory with this cache: the text branches in two."""
        twin = copy.copy(self)
        twin.layers = [clone() for clone in self._each("clone")]
        return twin

    def _each(self, name: str) -> list[Any]:
        """Return an attribute of every layer's cache."""
        for layer in self.layers:
            if not hasattr(layer, name):
                raise TypeError(
                    f"cache: a {type(layer).__name__} has no {name!r}; ModelCache asks its layers "
                    "for what LayerCache has"
                )
        return [getattr(layer, name) for layer in self.layers]

    def _common(self, name: str) -> Any:
        """Return the value that all layers' caches agree on."""
        first, *others = found = self._each(name)
        for other in others:
            if other != first:
                raise ValueError(
                    f"cache: its layers differ in {name}, {found}: a step was broken off between "
                    "them. Start anew, or from a clone() made before"
                )
        return first

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, place: int) -> Any:
        return self.layers[place]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.layers)

    def __repr__(self) -> str:
        layers = "1 layer" if len(self) == 1 else f"{len(self)} layers"
        return (
            f"ModelCache({layers}, batch={list(self.batch)}, position={self.position}, "
            f"{self.num_bytes} bytes)"
        )

"""One cache for a whole model: the caches of all its layers."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any, Self, cast

from torch import Tensor


class ModelCache:
    """The caches of all layers of a model, which are truncated, reordered and cloned together.

    ``model.init_cache`` makes one. For a model of your own, write
    ``ModelCache(block.init_cache(batch, window) for block in blocks)``, and let each step loop over
    ``zip(blocks, cache)``. Layers of your own can have caches of another class. Such a class needs
    the attributes `position`, `batch`, `num_bytes` and `min_length` and the methods `reorder`,
    `truncate` and `clone` of :class:`LayerCache`. If one is missing, a TypeError says so when it is
    used.

    Args:
        layers: the caches, one per layer, in the order of the layers.

    Attributes:
        position: number of tokens that every layer has seen so far.
        batch: the leading dimensions.
        num_bytes: memory of the caches of all layers, in bytes.
        min_length: the smallest length above 0 that :meth:`truncate` accepts; 0 while every layer
            still stores every token.

    Raises:
        ValueError: if there is no cache, or one comes twice. Methods also raise it if the layers
            have seen different numbers of tokens, because a step was interrupted between them.

    Example:
        >>> import torch, graphattn as ga
        >>> blocks = [ga.nn.PreNormBlock(ga.nn.KrauseAttention(16, heads=4)) for _ in range(3)]
        >>> cache = ga.nn.ModelCache(block.init_cache(2, window=8) for block in blocks)
        >>> x = torch.randn(2, 30, 16)
        >>> for block, cache_of_block in zip(blocks, cache):
        ...     x = block.step(x, cache_of_block)
        >>> cache
        ModelCache(3 layers, batch=[2], position=30, 18432 bytes)
    """

    def __init__(self, layers: Iterable[Any]) -> None:
        self.layers = list(layers)
        if not self.layers:
            raise ValueError("layers must contain at least one cache, got none")
        if len(set(map(id, self.layers))) < len(self.layers):
            raise ValueError(
                "layers must not contain the same cache twice: call init_cache for every layer"
            )

    @property
    def position(self) -> int:
        return cast(int, self._common("position"))

    @property
    def batch(self) -> tuple[int, ...]:
        return cast("tuple[int, ...]", self._common("batch"))

    @property
    def num_bytes(self) -> int:
        return sum(self._each("num_bytes"))

    @property
    def min_length(self) -> int:
        return max(self._each("min_length"))

    def truncate(self, length: int) -> None:
        """Forget the tokens from position `length` on in every layer, as if never seen.

        The layer that stores the fewest tokens decides which lengths are possible (see
        :meth:`LayerCache.truncate`).

        Raises:
            ValueError: if the length is out of range; then no layer changes.
        """
        self._common("position")
        truncates, most = self._each("truncate"), self.min_length
        # The layer that stores the fewest tokens comes first: it raises the error, if any layer
        # does, before another layer has changed.
        order = sorted(range(len(self)), key=lambda i: self.layers[i].min_length != most)
        for i in order:
            truncates[i](length)

    def reorder(self, index: Tensor) -> None:
        """Continue with the entries `index` of the first batch dimension in every layer.

        Entries may repeat or be left out, and their number may change (beam search).

        Raises:
            ValueError: if there is no batch dimension, or `index` is not an int64 tensor [entries]
                of numbers in 0 .. batch[0] - 1.
        """
        self._common("batch")  # if the layers agree, an index that fits the first layer fits all
        for reorder in self._each("reorder"):
            reorder(index)

    def clone(self) -> Self:
        """Copy the cache, so that one text can continue in two ways. The two share no memory."""
        twin = copy.copy(self)
        twin.layers = [clone() for clone in self._each("clone")]
        return twin

    def _each(self, name: str) -> list[Any]:
        """Return an attribute of every layer's cache."""
        for layer in self.layers:
            if not hasattr(layer, name):
                raise TypeError(
                    f"cache: {type(layer).__name__} has no {name!r}, but ModelCache needs it from "
                    "the cache of every layer: add it, as LayerCache has it"
                )
        return [getattr(layer, name) for layer in self.layers]

    def _common(self, name: str) -> Any:
        """Return the value that all layers' caches agree on."""
        values = self._each(name)
        if any(value != values[0] for value in values):
            raise ValueError(
                f"cache: its layers differ in {name}, got {values}, because a step was interrupted "
                "between two layers. Start again with a new cache, or with a clone() made before "
                "that step"
            )
        return values[0]

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

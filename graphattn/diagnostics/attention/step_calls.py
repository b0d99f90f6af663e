"""Steps of generation of our own layers: they run no `forward`, so no hook of a module sees them.

A step attends from its new tokens to those and to what its cache holds. That is taken down before
the layer goes on, since a cache forgets, and weighed afterwards as one call over a causal graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from graphattn.graphs import TokenGraph, causal_graph, causal_window_graph
from graphattn.nn.base.streaming import StreamingLayer
from graphattn.nn.caches.running_cache import RunningCache


class SeenStep(NamedTuple):
    """Tokens that a step attends from and to."""

    targets: tuple[Tensor, ...]
    sources: dict[str, Tensor]
    graph: TokenGraph
    valid: tuple[Tensor | None, Tensor | None]
    first: int  #: the position of the first source in its text
    cut: Tensor | None  #: [*], whether real tokens stand before the first source; of masked texts

    def weights(self, layer: Any) -> Tensor:
        """Compute the weights of the edges of the graph, [*, E, H]."""
        weights: Tensor = layer.step_weights(self.targets, self.sources, self.graph, self.valid)
        return weights


def stepping_classes(model: nn.Module) -> Iterator[tuple[type, str]]:
    """The classes of a model's layers that say what a step is, and the names of those methods."""
    classes = {type(layer) for layer in model.modules() if isinstance(layer, StreamingLayer)}
    for base in {base for cls in classes for base in cls.__mro__}:
        for name in ("step", "_mix_step"):
            if name in vars(base):
                yield base, name


def seen_step(
    targets: tuple[Tensor, ...], sources: dict[str, Tensor], mask: Tensor | None, cache: Any
) -> SeenStep | str:
    """A step that is about to be taken; or why its weights cannot be known."""
    if isinstance(cache, RunningCache) and cache.min_length:
        return "its cache holds sums of the tokens seen so far, and not the tokens themselves"
    n = targets[0].shape[-3]
    before = cache.held(None if cache.window is None else cache.window - 1)
    old_mask = cache.valid(before) if before else None
    both = mask
    if old_mask is not None or (mask is not None and before):
        parts = ((old_mask, before), (mask, n))
        real = torch.ones((), dtype=torch.bool, device=cache.device)
        both = torch.cat(
            [(real if m is None else m).expand(*cache.batch, k) for m, k in parts], dim=-1
        )
    common = torch.promote_types(targets[0].dtype, next(iter(sources.values())).dtype)
    if before:
        common = torch.promote_types(common, cache.dtype)
        sources = {
            name: torch.cat([cache.tokens(name, before).to(common), x.to(common)], dim=-3)
            for name, x in sources.items()
        }
    graph = (
        causal_graph(n, past=before)
        if cache.window is None
        else causal_window_graph(n, cache.window, past=before)
    )
    return SeenStep(
        tuple(x.to(common) for x in targets),
        {name: x.to(common) for name, x in sources.items()},
        graph.to(cache.device),
        (mask, both),
        cache.position - before,
        None if both is None else _is_cut(cache, before),
    )


def _is_cut(cache: Any, before: int) -> Tensor:
    """Whether the token before those that are seen is real: padding on the left comes first."""
    if cache.position == before:
        return torch.zeros(cache.batch, dtype=torch.bool, device=cache.device)
    valid = cache.valid(before + 1)  # a cache keeps a token more than the next one sees
    if valid is None:
        return torch.ones(cache.batch, dtype=torch.bool, device=cache.device)
    return valid[..., 0]

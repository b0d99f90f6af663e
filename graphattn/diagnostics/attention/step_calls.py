"""Operands of steps of generation of graphattn's layers.

A step does not call `forward`, so hooks of modules do not see it. Its new tokens attend to each
other and to the tokens in the cache. These are copied before the layer changes the cache. The
weights are computed afterwards, as for one call with a causal graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from graphattn.graphs import TokenGraph, causal_graph, causal_window_graph
from graphattn.nn.base.streaming import StreamingLayer
from graphattn.nn.caches.running_cache import RunningCache


class StepOperands(NamedTuple):
    """The tokens of a step: targets, sources, and their graph."""

    targets: tuple[Tensor, ...]
    sources: dict[str, Tensor]
    graph: TokenGraph
    valid: tuple[Tensor | None, Tensor | None]
    first: int  #: the position of the first source in its text
    cut: Tensor | None  #: [*], for masked texts: whether real tokens come before the first source

    def weights(self, layer: Any) -> Tensor:
        """Compute the weights of the edges of the graph, [*, E, H]."""
        weights: Tensor = layer.step_weights(self.targets, self.sources, self.graph, self.valid)
        return weights


def stepping_classes(model: nn.Module) -> Iterator[tuple[type, str]]:
    """Yield the classes that define a step of a model's layers, with the names of the methods."""
    classes = {type(layer) for layer in model.modules() if isinstance(layer, StreamingLayer)}
    for base in {base for cls in classes for base in cls.__mro__}:
        for name in ("step", "_mix_step", "compiled_step"):
            if name in vars(base):
                yield base, name


def step_operands(
    targets: tuple[Tensor, ...], sources: dict[str, Tensor], mask: Tensor | None, cache: Any
) -> StepOperands | str:
    """Copy the operands of a step before it changes the cache.

    The result is a string with the reason if its weights cannot be computed.
    """
    if isinstance(cache, RunningCache) and cache.min_length:
        return "its cache has sums over earlier tokens, not the tokens themselves"
    n = targets[0].shape[-3]
    before = cache.held(None if cache.window is None else cache.window - 1)
    old_mask = cache.valid(before) if before else None
    source_mask = mask
    if old_mask is not None or (mask is not None and before):
        parts = ((old_mask, before), (mask, n))
        real = torch.ones((), dtype=torch.bool, device=cache.device)
        source_mask = torch.cat(
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
    return StepOperands(
        tuple(x.to(common) for x in targets),
        {name: x.to(common) for name, x in sources.items()},
        graph.to(cache.device),
        (mask, source_mask),
        cache.position - before,
        None if source_mask is None else _is_cut(cache, before),
    )


def _is_cut(cache: Any, before: int) -> Tensor:
    """Whether the token before the first source is real, and not padding on the left."""
    if cache.position == before:
        return torch.zeros(cache.batch, dtype=torch.bool, device=cache.device)
    valid = cache.valid(before + 1)  # A cache stores one token more than the next token sees.
    if valid is None:
        return torch.ones(cache.batch, dtype=torch.bool, device=cache.device)
    return valid[..., 0]

"""Pairs of queries and keys as masks, for cases where a graph would be slower."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphattn.graphs.token_graph import TokenGraph
from graphattn.integrations.transformers.masks.bands import MaskBand
from graphattn.integrations.transformers.masks.graphs import (
    Limits,
    configured_graph,
    dense,
    limited,
    read_mask,
    without_room,
)
from graphattn.integrations.transformers.masks.once import once
from graphattn.integrations.transformers.options import GraphOf


class Pairs(NamedTuple):
    """Pairs of Q queries and the keys in `keys`.

    Attributes:
        keys: the range of keys that are read.
        allowed: bool [B or 1, 1 or H, 1 or Q, len(keys)]; None for all.
        bias: numbers that a float mask adds to the logits, of the same shape.
    """

    keys: range
    allowed: Tensor | None
    bias: Tensor | None = None


def pairs_in_mask(mask: Tensor, limits: Limits) -> Pairs:
    """Return the pairs of a dense mask [B or 1, 1 or H, Q or 1, n], within the limits of a call."""
    limits.check(mask)
    compiling = torch.compiler.is_compiling()
    reads = mask.device.type == "cpu" and not compiling
    if mask.dtype == torch.bool and limits.band is None and limits.graph_of is None:
        pairs = Pairs(range(mask.shape[-1]), mask)
    elif compiling and limits.graph_of is None:
        pairs = _pairs(mask, limits, None)
    else:
        pairs = _kept_pairs(mask, limits)
    if limits.num_targets > 1 or not reads or pairs.allowed is None:
        return pairs
    allowed = pairs.allowed
    keys, is_full = once(allowed, "span", lambda: _span(allowed))
    cut = slice(keys.start, keys.stop)
    bias = None if pairs.bias is None else pairs.bias[..., cut]
    return Pairs(keys, None if is_full else allowed[..., cut], bias)


@torch.compiler.disable(reason="a graph is laid out by what the mask holds")
def _kept_pairs(mask: Tensor, limits: Limits) -> Pairs:
    """Call :func:`_pairs` once per mask; the bias of a float mask keeps its gradient."""
    fixed, graph = without_room(mask, limits)
    pairs = once(fixed, ("pairs", limits.key), lambda: _pairs(fixed, limits, graph), graph=graph)
    if pairs.bias is None:
        return pairs
    return pairs._replace(bias=read_mask(mask[..., : fixed.shape[-1]])[1])


def _pairs(mask: Tensor, limits: Limits, graph: TokenGraph | None) -> Pairs:
    allowed, bias = read_mask(mask)
    if bias is not None and not torch.compiler.is_compiling() and not bool(bias.any()):
        bias = None
    allowed = limited(allowed, limits, graph)
    return Pairs(range(allowed.shape[-1]), allowed, bias)


def _span(allowed: Tensor) -> tuple[range, bool]:
    """Return the range of keys that any row sees, and whether all rows see all of it."""
    seen = allowed.flatten(0, 2).any(0).nonzero()
    if len(seen) == 0:
        return range(min(1, allowed.shape[-1])), False
    keys = range(int(seen[0]), int(seen[-1]) + 1)
    return keys, bool(allowed[..., keys.start : keys.stop].all())


def pairs_in_band(
    band: MaskBand,
    num_targets: int,
    num_sources: int,
    valid: Tensor | None,
    device: Any,
    graph_of: GraphOf | None = None,
) -> Pairs:
    """Return the pairs if targets are the last of the sources and see a band of offsets.

    A configured graph limits them further.
    """
    keys = range(num_sources)
    if graph_of is None and num_targets == 1 and band.before < num_sources - 1:
        keys = range(num_sources - 1 - band.before, num_sources)
        valid = None if valid is None else valid[:, keys.start :]
    masks = []
    if graph_of is not None or (min(band) < num_sources - 1 and num_targets > 1):
        source = torch.arange(num_sources, device=device)
        target = source[num_sources - num_targets :, None]
        masks.append(band.holds(source - target)[None, None])
    if graph_of is not None:
        graph = configured_graph(graph_of, num_targets, num_sources)
        masks.append(dense(graph, device)[None, None])
    if valid is not None:
        masks.append(valid[:, None, None])
    return Pairs(keys, functools.reduce(torch.logical_and, masks) if masks else None)

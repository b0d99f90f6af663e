"""Pairs of queries and keys as masks, for cases where a graph would be slower."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphattn.graphs.token_graph import TokenGraph
from graphattn.integrations.transformers.masks.bands import MaskBand
from graphattn.integrations.transformers.masks.graphs import (
    check_mask,
    configured_graph,
    dense,
    in_band,
    own_places,
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


def pairs_in_mask(
    mask: Tensor, batch: int, num_targets: int, band: MaskBand | None, graph_of: GraphOf | None
) -> Pairs:
    """Return the pairs of a dense mask [B or 1, 1 or H, Q or 1, n], limited by a band and a
    graph."""
    check_mask(mask, batch, num_targets)
    n = mask.shape[-1]
    compiling = torch.compiler.is_compiling()
    looks = mask.device.type == "cpu" and not compiling
    if mask.dtype == torch.bool and band is None and graph_of is None:
        pairs = Pairs(range(n), mask)
    elif compiling and graph_of is None:
        pairs = _pairs(mask, num_targets, band, None)
    else:
        pairs = _kept_pairs(mask, num_targets, band, graph_of)
    if num_targets > 1 or not looks or pairs.allowed is None:
        return pairs
    allowed = pairs.allowed
    keys, is_full = once(allowed, "span", lambda: _span(allowed))
    cut = slice(keys.start, keys.stop)
    bias = None if pairs.bias is None else pairs.bias[..., cut]
    return Pairs(keys, None if is_full else allowed[..., cut], bias)


@torch.compiler.disable(reason="a graph is laid out by what the mask holds")
def _kept_pairs(
    mask: Tensor, num_targets: int, band: MaskBand | None, graph_of: GraphOf | None
) -> Pairs:
    """Call :func:`_pairs` once per mask; the bias of a float mask keeps its gradient."""
    fixed, graph = without_room(mask, num_targets, graph_of)
    options = "pairs", num_targets, band, id(graph_of)
    pairs = once(fixed, options, lambda: _pairs(fixed, num_targets, band, graph), graph=graph)
    if pairs.bias is None:
        return pairs
    return pairs._replace(bias=read_mask(mask[..., : fixed.shape[-1]])[1])


def _pairs(
    mask: Tensor, num_targets: int, band: MaskBand | None, graph: TokenGraph | None
) -> Pairs:
    allowed, bias = read_mask(mask)
    if bias is not None and not torch.compiler.is_compiling() and not bool(bias.any()):
        bias = None
    n = allowed.shape[-1]
    if band is not None:
        own = own_places(allowed.any(1).expand(-1, num_targets, -1))
        allowed = allowed & in_band(band, own, n)[:, None]
    if graph is not None:
        allowed = allowed & dense(graph, mask.device)
    return Pairs(range(n), allowed, bias)


def _span(allowed: Tensor) -> tuple[range, bool]:
    """Return the range of keys that any row sees, and whether all rows see all of it."""
    seen = allowed.flatten(0, 2).any(0).nonzero()
    if len(seen) == 0:
        return range(min(1, allowed.shape[-1])), False
    keys = range(int(seen[0]), int(seen[-1]) + 1)
    return keys, bool(allowed[..., keys.start : keys.stop].all())


def pairs_in_band(
    band: MaskBand, num_targets: int, num_sources: int, valid: Tensor | None, device: Any
) -> Pairs:
    """Return the pairs if targets are the last of the sources and see a band of offsets."""
    keys = range(num_sources)
    if num_targets == 1 and band.before < num_sources - 1:
        keys = range(num_sources - 1 - band.before, num_sources)
        valid = None if valid is None else valid[:, keys.start :]
    allowed = None
    if min(band) < num_sources - 1 and num_targets > 1:
        own = torch.arange(num_sources - num_targets, num_sources, device=device)[None]
        allowed = in_band(band, own, num_sources)[:, None]
    if valid is not None:
        real = valid[:, None, None]
        allowed = real if allowed is None else allowed & real
    return Pairs(keys, allowed)


def pairs_in_graph(
    graph_of: GraphOf,
    band: MaskBand,
    num_targets: int,
    num_sources: int,
    valid: Tensor | None,
    device: Any,
) -> Pairs:
    """Return the pairs of a configured graph, limited by a band."""
    allowed = dense(configured_graph(graph_of, num_targets, num_sources), device)[None, None]
    own = torch.arange(num_sources - num_targets, num_sources, device=device)[None]
    allowed = allowed & in_band(band, own, num_sources)[:, None]
    if valid is not None:
        allowed = allowed & valid[:, None, None]
    return Pairs(range(num_sources), allowed)

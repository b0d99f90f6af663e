"""Padded items with a graph each: tokens [B, N, dim] over one graph of B * N tokens.

All rows of a tensor [B, N, dim] share a graph over N tokens. A graph over B * N tokens may instead
have its own edges for every row: :func:`graphattn.collate` makes one of padded items, and
:func:`graphattn.knn_graph` of points [B, N, C]. Its parts must end where the rows end. Then the
rows are concatenated, as in packed sequences, and the output is split again.

The same wrapper surrounds calls whose graph is on several ranks, which all of them agree on.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from graphattn.distributed.sharded_graph import ShardedGraph
from graphattn.graphs.token_graph import TokenGraph

POSITIONAL = ("x", "graph", "context")


def takes_padded_rows(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the forward pass of a layer, so that it takes such rows, too."""

    without_keywords = getattr(forward, "without_keywords", forward)
    num_required = getattr(forward, "num_required", 0)

    @functools.wraps(forward)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        graph = args[1] if len(args) > 1 else kwargs.get("graph")
        if isinstance(graph, ShardedGraph):
            given = {**dict(zip(POSITIONAL, args, strict=False)), **kwargs}
            with graph.call_of(self, given):
                return forward(self, *args, **kwargs)
        if not isinstance(graph, TokenGraph):
            return forward(self, *args, **kwargs)
        x = args[0] if args else kwargs.get("x")
        if (
            not isinstance(x, Tensor)
            or x.dim() < 3
            or graph.num_targets == x.shape[-2]
            or len(args) > len(POSITIONAL)
        ):
            if not kwargs and len(args) >= num_required:
                return without_keywords(self, *args)
            return forward(self, *args, **kwargs)
        given = {**dict(zip(POSITIONAL, args, strict=False)), **kwargs}
        context = given.get("context")
        if context is None:
            context = x
        if not _parts_are_rows(graph, x, context):
            return forward(self, *args, **kwargs)
        batch, rows, sides = x.shape[:-2], x.shape[:-1], (x.shape[-2], context.shape[-2])
        for name in ("x", "context"):
            if given.get(name) is not None:
                given[name] = given[name].flatten(0, -2)
        for name in ("valid", "positions", "tokens"):
            if given.get(name) is not None:
                given[name] = _flattened(given[name], batch, sides)
        out = forward(self, **given)
        if isinstance(out, tuple):  # with weights, [E, H] over the edges of all rows
            return (out[0].unflatten(0, rows), *out[1:])
        return out.unflatten(0, rows)

    return call


def _parts_are_rows(graph: TokenGraph, x: Tensor, context: Any) -> bool:
    """Whether the parts of the graph end where the rows of x and of context end."""
    if not isinstance(context, Tensor) or context.shape[:-2] != x.shape[:-2]:
        return False
    rows, targets, sources = math.prod(x.shape[:-2]), x.shape[-2], context.shape[-2]
    if (graph.num_targets, graph.num_sources) != (rows * targets, rows * sources):
        return False
    t = s = 0
    for num_targets, num_sources in graph.sizes:
        t, s = t + num_targets, s + num_sources
        if t > targets or s > sources:
            return False
        if t == targets and s == sources:
            t = s = 0
    return True  # the sizes are equal, so the last part ends with the last row


def _flattened(given: Any, batch: torch.Size, sides: tuple[int, int]) -> Any:
    """Flatten values of tokens to [B * N], from [*, N], from [N] for all rows, or a pair of these.

    A value of another shape is returned unchanged, and the layer raises an error.
    """
    if isinstance(given, tuple | list):
        return tuple(
            value if value is None else _flattened(value, batch, (side, side))
            for value, side in zip(given, sides, strict=False)
        )
    if isinstance(given, Tensor) and given.shape == sides[:1]:
        given = given.expand(*batch, -1)
    if isinstance(given, Tensor) and given.shape == (*batch, sides[0]):
        return given.flatten()
    return given

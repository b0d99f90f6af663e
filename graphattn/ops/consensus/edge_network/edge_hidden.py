"""Features of edges in the edge network: their products F e_ij, or the layer that makes these."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphattn.graphs.token_graph import TokenGraph
from graphattn.ops.consensus.edge_network.parameters import FirstLayer
from graphattn.ops.inputs import clear_invalid_edges

EdgeHidden = Tensor | FirstLayer | None


def check_edge_hidden(
    edge_hidden: Any, like: Tensor, hidden: torch.Size, graph: TokenGraph
) -> EdgeHidden:
    """Check that `edge_hidden` fits hidden vectors [*, tokens, G, xi or 3 xi] and the edges.

    `like` is a tensor with the dtype and device of the operation.
    """
    if edge_hidden is None:
        return None
    E, batch, (groups, width) = graph.num_edges, hidden[:-3], hidden[-2:]
    if not isinstance(edge_hidden, FirstLayer):
        shapes = (E, groups, width), (*batch, E, groups, width)
        _check_tensor("edge_hidden", edge_hidden, like, shapes, like.dtype)
        return edge_hidden
    if edge_hidden.bias is not None:
        raise ValueError(
            "edge_hidden.bias must be None: the bias of the first layer is part of target_hidden"
        )
    features, weight = edge_hidden.tokens, edge_hidden.weight
    F = features.shape[-1] if isinstance(features, Tensor) and features.dim() else 0
    _check_tensor("edge_hidden.tokens", features, like, ((E, 1, F), (*batch, E, 1, F)))
    _check_tensor("edge_hidden.weight", weight, like, ((groups, width, F),))
    return edge_hidden


def _check_tensor(
    name: str,
    tensor: Any,
    like: Tensor,
    shapes: tuple[tuple[int, ...], ...],
    dtype: torch.dtype | None = None,
) -> None:
    """Check that a tensor is floating-point (or has this dtype) and has one of these shapes."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if not tensor.is_floating_point() or (dtype is not None and tensor.dtype != dtype):
        raise ValueError(f"{name} must be {dtype or 'floating-point'}, got {tensor.dtype}")
    if tensor.device != like.device:
        raise ValueError(f"{name} must be on {like.device}, got {tensor.device}")
    if tensor.shape not in shapes:
        allowed = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
        raise ValueError(
            f"{name} must have shape {allowed} (edges in the order of graph.edge_index), "
            f"got {list(tensor.shape)}"
        )


def in_dtype(edge_hidden: EdgeHidden, dtype: torch.dtype) -> EdgeHidden:
    """Hidden vectors, or the layer that makes them, converted to a dtype."""
    if isinstance(edge_hidden, FirstLayer):
        tokens, weight, bias = edge_hidden
        return FirstLayer(
            tokens.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        )
    return None if edge_hidden is None else edge_hidden.to(dtype)


def form(edge_hidden: Tensor | FirstLayer, keep: Tensor | None) -> Tensor:
    """F e_ij of every edge, [*, E, G, xi]; edges outside `keep`, bool [*, E, 1], are not read."""
    if isinstance(edge_hidden, FirstLayer):
        tokens = clear_invalid_edges(edge_hidden.tokens, keep)
        return edge_hidden._replace(tokens=tokens).hidden()
    return clear_invalid_edges(edge_hidden, keep)


def as_pair(edge_hidden: EdgeHidden, entries: int) -> tuple[Tensor | None, Tensor | None]:
    """A tensor [entries or 1, E, 1 or G, features] and the weight that is to be applied to it.

    The tensor is the features of edges; if the weight is None, it is their products F e_ij.
    """
    if edge_hidden is None:
        return None, None
    weight = None
    if isinstance(edge_hidden, FirstLayer):
        weight = edge_hidden.weight
        edge_hidden = edge_hidden.tokens
    if edge_hidden.dim() == 3:
        return edge_hidden[None], weight
    return edge_hidden.reshape(entries, *edge_hidden.shape[-3:]), weight

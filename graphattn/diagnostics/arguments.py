"""Checks of arguments that the diagnostics share."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from graphattn.graphs import TokenGraph
from graphattn.ops.inputs import compute_dtype


def as_graph(graph: Any) -> TokenGraph:
    """Check that `graph` is a TokenGraph."""
    if not isinstance(graph, TokenGraph):
        hint = (
            ": make one by graphattn.from_edge_index(edge_index, num_tokens)"
            if isinstance(graph, Tensor)
            else ""
        )
        raise ValueError(f"graph must be a TokenGraph, got {type(graph).__name__}{hint}")
    return graph


def as_edge_weights(weights: Any, graph: TokenGraph) -> Tensor:
    """Check weights [*, E, H], and convert them to the graph's device and at least float32."""
    expected = f"[*, {graph.num_edges}, heads] (one row per edge of the graph)"
    if not isinstance(weights, Tensor) or not weights.is_floating_point():
        got = weights.dtype if isinstance(weights, Tensor) else type(weights).__name__
        raise ValueError(f"weights must be a floating-point tensor {expected}, got {got}")
    if weights.dim() < 2 or weights.shape[-2] != graph.num_edges or weights.shape[-1] == 0:
        raise ValueError(f"weights must have shape {expected}, got {list(weights.shape)}")
    weights = weights.detach().to(graph.device, compute_dtype(weights.dtype))
    if not (weights.isfinite() & (weights >= 0)).all():
        wrong = weights[~(weights.isfinite() & (weights >= 0))][0]
        raise ValueError(f"weights must be finite and >= 0, got {wrong.item()}")
    return weights


def as_model(model: Any) -> nn.Module:
    """Check that `model` is a torch module."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    return model

"""Checks shared by the diagnostics."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from graphattn.graphs import TokenGraph
from graphattn.ops.inputs import compute_dtype


def as_graph(graph: Any) -> TokenGraph:
    """`graph` if it is a TokenGraph."""
    if not isinstance(graph, TokenGraph):
        hint = (
            ": graphattn.from_edge_index(edge_index, num_tokens) makes one"
            if isinstance(graph, Tensor)
            else ""
        )
        raise ValueError(f"graph must be a TokenGraph, got {type(graph).__name__}{hint}")
    return graph


def as_edge_weights(weights: Any, graph: TokenGraph) -> Tensor:
    """`weights` [*, E, H] of finite numbers >= 0, on the graph's device; float32 at least."""
    expected = f"[*, {graph.num_edges}, heads] (one row per edge of the graph)"
    if not isinstance(weights, Tensor) or not weights.is_floating_point():
        got = weights.dtype if isinstance(weights, Tensor) else type(weights).__name__
        raise ValueError(f"weights must be a floating-point tensor {expected}, got {got}")
    if weights.dim() < 2 or weights.shape[-2] != graph.num_edges or weights.shape[-1] == 0:
        raise ValueError(f"weights must have shape {expected}, got {list(weights.shape)}")
    weights = weights.detach().to(graph.device, compute_dtype(weights.dtype))
    if not (weights.isfinite() & (weights >= 0)).all():
        raise ValueError("weights must be finite and >= 0, as attention weights are")
    return weights


def as_model(model: Any) -> nn.Module:
    """`model` if it is a torch module."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    return model

"""Checks shared by the spectral functions."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from graphattn.graphs import TokenGraph


def as_square_graph(graph: Any) -> TokenGraph:
    """`graph` if it is a TokenGraph whose sources and targets are the same tokens."""
    if not isinstance(graph, TokenGraph):
        hint = (
            ": an edge list does not tell how many tokens there are, "
            "graphattn.from_edge_index(edge_index, num_tokens) does"
            if isinstance(graph, Tensor)
            else ""
        )
        raise ValueError(f"graph must be a TokenGraph, got {type(graph).__name__}{hint}")
    if graph.num_targets != graph.num_sources:
        raise ValueError(
            "graph must have the same tokens as sources and targets, "
            f"got {graph.num_targets} targets and {graph.num_sources} sources"
        )
    return graph


def as_edge_weight(edge_weight: Any, num_edges: int) -> Tensor:
    """`edge_weight` as a real tensor [E] of finite numbers >= 0."""
    if not isinstance(edge_weight, Tensor):
        raise ValueError(
            f"edge_weight must be a tensor of shape [{num_edges}] (one weight per edge), "
            f"got {type(edge_weight).__name__}"
        )
    if edge_weight.shape != (num_edges,):
        raise ValueError(
            f"edge_weight must have shape [{num_edges}] (one weight per edge), "
            f"got {list(edge_weight.shape)}"
        )
    if edge_weight.is_complex():
        raise ValueError(f"edge_weight must hold real numbers, got {edge_weight.dtype}")
    allowed = (edge_weight >= 0) & edge_weight.isfinite()
    if not allowed.all():
        e = int(allowed.logical_not().nonzero()[0])
        raise ValueError(
            f"edge_weight must be finite and >= 0, got edge_weight[{e}] = {edge_weight[e].item()}"
        )
    return edge_weight

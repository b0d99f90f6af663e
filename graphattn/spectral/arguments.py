"""Checks of arguments that the spectral functions share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphattn.graphs import TokenGraph


def as_square_graph(graph: Any) -> TokenGraph:
    """Check that `graph` is a TokenGraph whose sources and targets are the same tokens."""
    if not isinstance(graph, TokenGraph):
        hint = (
            ": an edge list does not say how many tokens there are, so make a graph by "
            "graphattn.from_edge_index(edge_index, num_tokens)"
            if isinstance(graph, Tensor)
            else ""
        )
        raise ValueError(f"graph must be a TokenGraph, got {type(graph).__name__}{hint}")
    if graph.num_targets != graph.num_sources:
        raise ValueError(
            "graph must have the same tokens as sources and targets, "
            f"got {graph.num_targets} targets and {graph.num_sources} sources"
        )
    if not graph.has_same_tokens:
        raise ValueError(
            "graph must have the same tokens as sources and targets, got sequences with (targets, "
            f"sources) {graph.sizes} and first positions {graph.starts}"
        )
    return graph


def as_edge_weight(edge_weight: Any, num_edges: int) -> Tensor:
    """Check that `edge_weight` is a real tensor [E] of finite numbers >= 0."""
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


def has_blocks(edge_weight: Any) -> bool:
    """Whether `edge_weight` has the dimensions of one matrix per edge, [E, C, C]."""
    return isinstance(edge_weight, Tensor) and edge_weight.dim() == 3


def as_edge_blocks(edge_weight: Any, num_edges: int) -> Tensor:
    """Check that `edge_weight` has a symmetric positive semidefinite matrix per edge, [E, C, C].

    Errors of a few roundings are allowed, in the symmetry and in the smallest eigenvalue. The
    matrices that are returned are exactly symmetric.
    """
    if not has_blocks(edge_weight):
        got = (
            list(edge_weight.shape)
            if isinstance(edge_weight, Tensor)
            else type(edge_weight).__name__
        )
        raise ValueError(
            f"edge_weight must be a tensor of shape [{num_edges}, C, C] (one matrix per edge), "
            f"got {got}"
        )
    size = edge_weight.shape[2]
    if edge_weight.shape != (num_edges, size, size) or size == 0:
        raise ValueError(
            f"edge_weight must have shape [{num_edges}, C, C] (one matrix per edge, C >= 1), "
            f"got {list(edge_weight.shape)}"
        )
    if not edge_weight.is_floating_point():
        raise ValueError(
            f"edge_weight must hold real floating-point matrices, got {edge_weight.dtype}"
        )
    checked = edge_weight.detach().double()
    if not checked.isfinite().all():
        e = int(checked.isfinite().all(dim=2).all(dim=1).logical_not().nonzero()[0])
        raise ValueError(f"edge_weight must be finite, got edge_weight[{e}] = {checked[e]}")
    rounding = 32 * size * torch.finfo(edge_weight.dtype).eps * checked.abs().amax(dim=(1, 2))
    gap = (checked - checked.mT).abs().amax(dim=(1, 2))
    if (gap > rounding).any():
        e = int((gap > rounding).nonzero()[0])
        raise ValueError(
            "edge_weight must hold symmetric matrices, got edge_weight"
            f"[{e}], which differs from its transpose by {gap[e].item():.3g}"
        )
    least = torch.linalg.eigvalsh((checked + checked.mT) / 2)[:, 0]
    if (least < -rounding).any():
        e = int((least < -rounding).nonzero()[0])
        raise ValueError(
            "edge_weight must hold positive semidefinite matrices, got edge_weight"
            f"[{e}], which has the eigenvalue {least[e].item():.3g}"
        )
    return (edge_weight + edge_weight.mT) / 2


def check_finite(x: Tensor) -> None:
    """Raise ValueError if a number in `x` is not finite."""
    wrong = ~x.isfinite()
    if wrong.any():
        place = [int(i) for i in wrong.nonzero()[0]]
        raise ValueError(f"x must be finite, got x{place} = {x[tuple(place)].item()}")

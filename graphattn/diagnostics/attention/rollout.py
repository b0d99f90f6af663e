"""Attention rollout, which says how much of every input is in every output of several layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from graphattn.diagnostics.arguments import as_edge_weights, as_graph
from graphattn.graphs import TokenGraph
from graphattn.graphs.arguments import as_float

BLOCK = 1 << 22  # numbers per block of columns, 16 MB in float32


def rollout(
    weights_per_layer: Sequence[Tensor],
    graph: TokenGraph | Sequence[TokenGraph],
    *,
    residual: float = 0.5,
    discard: float = 0.0,
) -> Tensor:
    r"""Compute how much of every input token is in every output token, through attention alone.

    .. math::
        R = \hat A^{(L)} \cdots \hat A^{(1)}, \qquad
        \hat A^{(l)} = \operatorname{normalise}\big( (1 - \rho) \, \bar A^{(l)} + \rho I \big)

    Here :math:`\bar A` is the mean over heads, rho is the `residual`, and every row is divided by
    its sum (Abnar and Zuidema, *Quantifying Attention Flow in Transformers*, 2020; Projection-Free
    Transformers, Eq. 13). Row i of R says from which input tokens output token i comes. For an
    image with a class token, ``R[0, 1:]`` is the map of the class token.

    `discard` sets weak entries to 0 before the residual is added and rows are normalised. In every
    row of the mean over heads, these are the floor(discard * edges of the row) smallest entries.
    Entries that are equal to the smallest remaining one are not discarded, so uniform attention
    does not change. (The papers do not say whether entries are discarded before or after adding the
    residual.)

    For a token that attends to no tokens (without edges, or padding), the row of
    :math:`\hat A` is that of the identity.

    Args:
        weights_per_layer: weights [*, E, heads] of all layers from first to last, in the order of
            their graphs' ``edge_index``.
        graph: one graph for all layers, or one per layer; sources and targets must be the same
            tokens.
        residual: rho, in 0 .. 1.
        discard: the share of each row's edges that is discarded, >= 0 and < 1 (in the paper 0, 0.5
            and 0.9).

    Returns:
        R, [*, N, N], whose rows sum to 1. It is computed in blocks of columns with at most 4
        million numbers, with sparse matrices of the layers. No other N x N matrix is formed.

    Raises:
        ValueError: if an argument is outside its range, or shapes do not fit.

    Example:
        >>> import torch, graphattn as ga
        >>> graph = ga.causal_window_graph(3, window=2)
        >>> weights = torch.tensor([[1.0], [0.5], [0.5], [0.5], [0.5]])  # the mean of two tokens
        >>> ga.diagnostics.rollout([weights, weights], graph)
        tensor([[1.0000, 0.0000, 0.0000],
                [0.4375, 0.5625, 0.0000],
                [0.0625, 0.3750, 0.5625]])
    """
    layers = _checked(weights_per_layer, graph)
    _check_shares(residual, discard)
    first, batch = layers[0][0], layers[0][0].shape[:-2]
    N = layers[0][1].num_targets
    out = first.new_empty((*batch, N, N))
    if out.numel() == 0:
        return out
    width = max(1, min(N, BLOCK // N))
    by_sequence = [weights.flatten(0, -3) if batch else weights[None] for weights, _ in layers]
    for b, sequence in enumerate(out.view(-1, N, N)):
        steps = [
            _step(weights[b].mean(dim=-1), graph, residual, discard)
            for weights, (_, graph) in zip(by_sequence, layers, strict=True)
        ]
        for column in range(0, N, width):
            block = sequence[:, column : column + width]
            block.zero_()
            block[column : column + width].fill_diagonal_(1)
            for attention, stays in steps:
                block.copy_(torch.sparse.mm(attention, block).addcmul_(stays, block))
    return out


def _step(mean: Tensor, graph: TokenGraph, residual: float, discard: float) -> tuple[Tensor, ...]:
    """Return a layer's normalised attention, sparse [N, N], and its residual share, [N, 1]."""
    source, target = graph.edge_index
    N = graph.num_targets
    if discard > 0:
        mean = _without_weak(mean, graph, discard)
    mean = (1 - residual) * mean
    total = mean.new_zeros(N).index_add(0, target, mean) + residual
    empty = total == 0
    total = total.masked_fill(empty, 1)
    # torch computes number / tensor as number * (1 / tensor), which overflows for tiny residuals.
    stays = (torch.full_like(total, residual) / total).masked_fill(empty, 1)
    attention = torch.sparse_coo_tensor(
        torch.stack([target, source]),  # sorted by target, then source
        mean / total[target],
        (N, N),
        is_coalesced=True,
        check_invariants=False,
    )
    return attention, stays[:, None]


def _without_weak(mean: Tensor, graph: TokenGraph, discard: float) -> Tensor:
    """Set entries [E] that are below the quantile of their row to 0."""
    target, degree = graph.edge_index[1], graph.in_degree()
    order = mean.argsort(stable=True)
    order = order[target[order].argsort(stable=True)]  # sorted by row, then ascending
    # Because of rounding, 0.7 * 10 may be a little less than 7.
    dropped = (discard * degree.double() + 1e-9).floor().long()
    has_edges = degree > 0
    least = mean.new_zeros(len(degree))
    least[has_edges] = mean[order[(graph.rowptr[:-1] + dropped)[has_edges]]]
    return mean.masked_fill(mean < least[target], 0)


def rollout_of_matrices(matrices: Iterable[Tensor], *, residual: float, discard: float) -> Tensor:
    """Compute :func:`rollout` from means over heads [B, N, N]; edges are weights above 0."""
    _check_shares(residual, discard)
    flow: Tensor | None = None
    for mean in matrices:
        has_edges = (mean > 0).any(dim=-1, keepdim=True)
        if discard > 0:
            degree = (mean > 0).sum(dim=-1, keepdim=True)
            dropped = (discard * degree.double() + 1e-9).floor().long()
            ascending = mean.masked_fill(mean <= 0, torch.inf).sort(dim=-1).values
            mean = mean.masked_fill(mean < ascending.gather(-1, dropped), 0)
        total = (1 - residual) * mean.sum(dim=-1, keepdim=True) + residual
        attention = torch.where(
            has_edges, (1 - residual) * mean / total.masked_fill(total == 0, 1), 0
        )
        stays = torch.where(has_edges, torch.full_like(total, residual) / total, 1)
        if flow is None:
            flow = torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device).expand_as(mean)
        flow = attention @ flow + stays * flow
    assert flow is not None
    return flow


def _check_shares(residual: float, discard: float) -> None:
    if as_float("residual", residual, positive=False) > 1:
        raise ValueError(f"residual must be in 0 .. 1, got {residual}")
    if as_float("discard", discard, positive=False) >= 1:
        raise ValueError(f"discard must be >= 0 and < 1, got {discard}")


def _checked(weights_per_layer: Any, graph: Any) -> list[tuple[Tensor, TokenGraph]]:
    """Check weights and graphs; return a list of (weights, graph), one per layer."""
    if isinstance(weights_per_layer, Tensor) or not isinstance(weights_per_layer, Sequence):
        raise ValueError(
            "weights_per_layer must be a sequence of one tensor [*, E, heads] per layer, "
            f"got {type(weights_per_layer).__name__}"
        )
    if len(weights_per_layer) == 0:
        raise ValueError("weights_per_layer must hold at least one layer, got none")
    graphs = list(graph) if isinstance(graph, list | tuple) else [graph] * len(weights_per_layer)
    if len(graphs) != len(weights_per_layer):
        raise ValueError(
            f"graph must be one graph, or a list of {len(weights_per_layer)} graphs (one per "
            f"layer), got {len(graphs)} graphs"
        )
    layers: list[tuple[Tensor, TokenGraph]] = []
    for weights, layer_graph in zip(weights_per_layer, map(as_graph, graphs), strict=True):
        if (
            layer_graph.num_targets != layer_graph.num_sources
            or layer_graph.num_targets != graphs[0].num_targets
        ):
            raise ValueError(
                "graph must have the same tokens as sources and targets in every layer, "
                f"got {layer_graph.num_targets} targets and {layer_graph.num_sources} sources"
            )
        weights = as_edge_weights(weights, layer_graph)
        if layers and weights.shape[:-2] != layers[0][0].shape[:-2]:
            raise ValueError(
                "weights_per_layer must have the same batch dimensions in every layer, "
                f"got {list(layers[0][0].shape[:-2])} and {list(weights.shape[:-2])}"
            )
        layers.append((weights, layer_graph))
    return layers

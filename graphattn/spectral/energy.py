"""The energy of a signal on a token graph, which measures how much neighbours differ."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphattn.graphs import TokenGraph
from graphattn.graphs.arguments import as_edge_index
from graphattn.graphs.token_graph import as_token_graph
from graphattn.spectral.arguments import as_edge_weight


def energy(graph: TokenGraph | Tensor, signal: Tensor, edge_weight: Tensor | None = None) -> Tensor:
    r"""Compute the energy of a graph signal, which consensus reduces.

    .. math:: E(u) = \tfrac12 \sum_{(i, j)} W_{ij} \, (u_i - u_j)^2

    The sum is over all directed edges (target i, source j). It is exact for any directed graph,
    while u^T L u with the paper's L is not (see :func:`laplacian`). Its gradient with respect to
    `signal` is 2 L u (Eq. 6).

    Source: Stabilizing Transformer Training Through Consensus, Eq. 5.

    Args:
        graph: a graph of N tokens, or a tensor edge_index [2, E].
        signal: u, floating-point, [N] or [N, C].
        edge_weight: weights >= 0 in the order of ``graph.edge_index``, or of the columns of a
            tensor edge_index, [E]; ones if None.

    Returns:
        A scalar, summed over the columns of `signal`; differentiable with respect to `signal` and
        `edge_weight`. For half precision, the sum and the result are float32.

    Raises:
        ValueError: if shapes do not fit, or `edge_weight` has a number that is negative or not
            finite.

    Example:
        >>> import torch, graphattn as ga
        >>> graph = ga.window_path_graph(3, window=1)  # each pair of neighbours is two edges
        >>> ga.spectral.energy(graph, torch.tensor([0.0, 1.0, 3.0]))
        tensor(5.)
    """
    u = as_signal(signal)
    edge_index = edges_of(graph, signal)
    source, target = edge_index
    squared = (u[target] - u[source]).square()
    if squared.dim() == 2:
        squared = squared.sum(dim=1)
    if edge_weight is not None:
        squared = as_edge_weight(edge_weight, edge_index.shape[1]) * squared
    return squared.sum() / 2


def as_signal(signal: Any) -> Tensor:
    """Check that `signal` is a floating-point tensor [N] or [N, C]; convert it to >= float32."""
    if not isinstance(signal, Tensor) or not signal.is_floating_point():
        got = signal.dtype if isinstance(signal, Tensor) else type(signal).__name__
        raise ValueError(f"signal must be a floating-point tensor [N] or [N, C], got {got}")
    if signal.dim() not in (1, 2):
        raise ValueError(f"signal must have shape [N] or [N, C], got {list(signal.shape)}")
    return signal.to(torch.promote_types(signal.dtype, torch.float32))


def edges_of(graph: Any, signal: Tensor) -> Tensor:
    """Return the edges [2, E] of a graph or a tensor edge_index, if it fits `signal`."""
    num_tokens = signal.shape[0]
    checked = as_token_graph(graph, num_tokens, num_tokens)
    # A tensor edge_index is checked but not sorted, so that the caller's weights still fit.
    edge_index = checked.edge_index if checked is graph else as_edge_index(graph)
    return edge_index.to(signal.device)

"""Statistics of attention weights: sinks, entropy, and diversity of heads."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from graphattn.diagnostics.arguments import as_edge_weights, as_graph
from graphattn.graphs import TokenGraph
from graphattn.graphs.arguments import as_int
from graphattn.ops.segments import segment_sum

# If all weights of a row are 0, it has no edges or is padding. Such rows do not count in means.


def sink_share(weights: Tensor, graph: TokenGraph, token: int = 0) -> Tensor:
    r"""Compute the share of attention that the other tokens give to one token, often the first.

    .. math:: s_h = \frac1{|Q|} \sum_{i \in Q} a^h_{i, t}, \qquad
              Q = \{ i \neq t : i \text{ attends to something} \}

    For the first token, t = 0, Q are all queries >= 1. A head that uses the token as an attention
    sink has a share near 1 (Xiao et al., *Efficient Streaming Language Models with Attention
    Sinks*, 2024). Queries without an edge to the token count with a share of 0. In a
    :func:`~graphattn.batch`, every sequence has its own token t. For two tracks of different
    lengths, the token is a source, and all targets count. The share of a layer's own `sink` logit,
    which is no token, is the difference between the sum of a row and 1, and does not count here.

    Args:
        weights: weights [*, E, heads] in the order of ``graph.edge_index``, as from
            :func:`graphattn.attention_weights` and layers.
        graph: the graph of the weights.
        token: t, the position of the token in its sequence.

    Returns:
        Shares [*, heads] in 0 .. 1; NaN if no query attends to any token.

    Raises:
        ValueError: if `weights` do not fit the graph, or no sequence has this token.

    Example:
        >>> import torch, graphattn as ga
        >>> graph = ga.causal_graph(3)
        >>> weights = torch.tensor([[1.0], [0.9], [0.1], [0.7], [0.2], [0.1]])  # 3 rows, one head
        >>> ga.diagnostics.sink_share(weights, graph)  # (0.9 + 0.7) / 2
        tensor([0.8000])
    """
    graph = as_graph(graph)
    weights = as_edge_weights(weights, graph)
    longest = max(sources for _, sources in graph.sizes)
    if as_int("token", token, 0) >= longest:
        raise ValueError(
            f"token must be < {longest}, the number of sources in the longest sequence, got {token}"
        )
    source, target = graph.edge_index
    is_sink = graph.source_positions[source] == token
    counts = _attends(weights, graph)
    if graph.num_targets == graph.num_sources:
        counts = counts & (graph.positions != token)[:, None]
    share = segment_sum((weights * is_sink[:, None])[..., None], target, graph.num_targets)[..., 0]
    return _mean_over_rows(share, counts)


def attention_entropy(weights: Tensor, graph: TokenGraph) -> Tensor:
    r"""Compute the entropy of every head's attention, in nats.

    .. math:: H_h = \operatorname{mean}_i \Big( - \sum_j a^h_{ij} \log a^h_{ij} \Big)

    The mean is over the rows that attend to a token, and 0 log 0 = 0. The entropy is 0 if every
    query attends to one token, and log k if every query attends to k tokens equally. (If a row sums
    to less than 1, because of ``eps > 0`` or a layer's `sink`, it is divided by its sum first.)

    Args:
        weights: weights [*, E, heads] in the order of ``graph.edge_index``.
        graph: the graph of the weights.

    Returns:
        Entropies [*, heads] in nats; NaN if no query attends to any token.

    Raises:
        ValueError: if `weights` do not fit the graph.

    Example:
        >>> import torch, graphattn as ga
        >>> graph = ga.complete_graph(8)
        >>> ga.diagnostics.attention_entropy(torch.full((64, 1), 1 / 8), graph).exp()
        tensor([8.0000])
    """
    graph = as_graph(graph)
    weights = as_edge_weights(weights, graph)
    each = torch.stack([weights, -torch.special.xlogy(weights, weights)], dim=-1)
    total, entropy = segment_sum(each, graph.edge_index[1], graph.num_targets).unbind(-1)
    counts = total > 0
    total = total.masked_fill(~counts, 1)
    return _mean_over_rows((entropy / total + total.log()).clamp_min(0), counts)


def head_diversity(weights: Tensor, graph: TokenGraph) -> Tensor:
    r"""Compute the mean distance between the attention rows of a layer's heads.

    .. math:: \operatorname{mean}_{i, \, g < h} \; \tfrac12 \sum_j | a^g_{ij} - a^h_{ij} |

    The distance is half of the L1 norm (total variation). It is 0 if all heads attend equally, and
    1 if no two heads attend to a common token.

    Args:
        weights: weights [*, E, heads] with at least two heads, in the order of
            ``graph.edge_index``.
        graph: the graph of the weights.

    Returns:
        Distances [*] in 0 .. 1; NaN if no query attends to any token.

    Raises:
        ValueError: if `weights` do not fit the graph, or have one head.

    Example:
        >>> import torch, graphattn as ga
        >>> graph = ga.complete_graph(2)
        >>> straight, crossed = torch.tensor([1.0, 0, 0, 1]), torch.tensor([0.0, 1, 1, 0])
        >>> ga.diagnostics.head_diversity(torch.stack([straight, crossed], dim=-1), graph)
        tensor(1.)
    """
    graph = as_graph(graph)
    weights = as_edge_weights(weights, graph)
    heads = weights.shape[-1]
    if heads < 2:
        raise ValueError(f"weights must have at least 2 heads to compare, got {heads}")
    # This computes sum_{g < h} |x_g - x_h| without listing pairs. In sorted order, x_k is the
    # larger one of a pair k times, and the smaller one heads - 1 - k times.
    times = 2 * torch.arange(heads, device=weights.device, dtype=weights.dtype) - (heads - 1)
    distance = weights.sort(dim=-1).values @ times
    rows = segment_sum(distance[..., None, None], graph.edge_index[1], graph.num_targets)[..., 0]
    counts = _attends(weights, graph).any(dim=-1, keepdim=True)
    return _mean_over_rows(rows / 2 / math.comb(heads, 2), counts)[..., 0]


def _attends(weights: Tensor, graph: TokenGraph) -> Tensor:
    """Return a bool [*, N, H] of the rows with a weight above 0."""
    total = segment_sum(weights[..., None], graph.edge_index[1], graph.num_targets)[..., 0]
    return total > 0


def _mean_over_rows(rows: Tensor, counts: Tensor) -> Tensor:
    """Compute the mean over N of [*, N, H] for rows that count; NaN if none does."""
    return (rows * counts).sum(dim=-2) / counts.sum(dim=-2)

"""Statistics of attention weights, one number per head: sinks, entropy, diversity."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from graphattn.diagnostics.arguments import as_edge_weights, as_graph
from graphattn.graphs import TokenGraph
from graphattn.graphs.arguments import as_int
from graphattn.ops.segments import segment_sum

# A row whose weights are all 0 attends to nothing: it has no edges, or is padding. Such rows count
# in no mean.


def sink_share(weights: Tensor, graph: TokenGraph, token: int = 0) -> Tensor:
    r"""How much of their attention the other tokens give to one token, often the first.

    .. math:: s_h = \frac1{|Q|} \sum_{i \in Q} a^h_{i, t}, \qquad
              Q = \{ i \neq t : i \text{ attends to something} \}

    For the first token t = 0 these are all queries >= 1. A head that is an attention sink has a
    share near 1 (Xiao et al., *Efficient Streaming Language Models with Attention Sinks*, 2024).
    Queries without an edge to the token count, with a share of 0. In a
    :func:`~graphattn.batch` every sequence has its own token t. Between two tracks of different
    lengths the token is one of the sources and all targets are queries. What a layer's own `sink`
    takes, a logit and no token, is what its rows lack to a sum of 1, and counts for none.

    Args:
        weights: [*, E, heads], in the order of ``graph.edge_index``, as
            :func:`graphattn.attention_weights` and layers give them.
        graph: the graph they belong to.
        token: t, the position of the token in its sequence.

    Returns:
        [*, heads], in 0 .. 1; NaN where no query attends to anything.

    Raises:
        ValueError: if `weights` do not fit the graph or no sequence has such a token.

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
        raise ValueError(f"token must be one of the {longest} positions of a source, got {token}")
    source, target = graph.edge_index
    is_sink = graph.source_positions[source] == token
    counts = _attends(weights, graph)
    if graph.num_targets == graph.num_sources:
        counts = counts & (graph.positions != token)[:, None]
    share = segment_sum((weights * is_sink[:, None])[..., None], target, graph.num_targets)[..., 0]
    return _mean_over_rows(share, counts)


def attention_entropy(weights: Tensor, graph: TokenGraph) -> Tensor:
    r"""The entropy of a head's attention, in nats: log of how many tokens a query looks at.

    .. math:: H_h = \operatorname{mean}_i \Big( - \sum_j a^h_{ij} \log a^h_{ij} \Big)

    over the rows that attend to something, with 0 log 0 = 0: 0 where every query looks at one
    token, log k where it looks at k tokens alike. (A row that sums to less than 1, as with
    ``eps > 0`` or a layer's `sink`, is divided by its sum first.)

    Args:
        weights: [*, E, heads], in the order of ``graph.edge_index``.
        graph: the graph they belong to.

    Returns:
        [*, heads], in nats; NaN where no query attends to anything.

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
    r"""How differently the heads of a layer attend: mean distance between their weight rows.

    .. math:: \operatorname{mean}_{i, \, g < h} \; \tfrac12 \sum_j | a^g_{ij} - a^h_{ij} |

    The distance is half the L1 norm (total variation): 0 where all heads do the same, 1 where no
    two look at a common token.

    Args:
        weights: [*, E, heads] with at least two heads, in the order of ``graph.edge_index``.
        graph: the graph they belong to.

    Returns:
        [*], in 0 .. 1; NaN where no query attends to anything.

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
    # Sorted, x_k is the larger of a pair k times and the smaller heads - 1 - k times: this is
    # sum_{g < h} |x_g - x_h| without listing the pairs.
    times = 2 * torch.arange(heads, device=weights.device, dtype=weights.dtype) - (heads - 1)
    apart = weights.sort(dim=-1).values @ times
    rows = segment_sum(apart[..., None, None], graph.edge_index[1], graph.num_targets)[..., 0]
    counts = _attends(weights, graph).any(dim=-1, keepdim=True)
    return _mean_over_rows(rows / 2 / math.comb(heads, 2), counts)[..., 0]


def _attends(weights: Tensor, graph: TokenGraph) -> Tensor:
    """Bool [*, N, H]: rows with a weight above 0."""
    total = segment_sum(weights[..., None], graph.edge_index[1], graph.num_targets)[..., 0]
    return total > 0


def _mean_over_rows(rows: Tensor, counts: Tensor) -> Tensor:
    """The mean over N of [*, N, H], of the rows that count; 0 / 0 = NaN where none does."""
    return (rows * counts).sum(dim=-2) / counts.sum(dim=-2)

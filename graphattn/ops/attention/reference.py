"""Attention in its readable form: one message per edge, summed at its target.

Everything is computed per edge, in the order of ``graph.edge_index``, so memory is O(E * H * D).
Exact in float64, twice differentiable; the other backends are tested against it.
"""

from __future__ import annotations

from torch import Tensor

from graphattn.graphs.token_graph import TokenGraph
from graphattn.ops.attention.logits.score import Score, edge_logits
from graphattn.ops.attention.logits.softcap import capped
from graphattn.ops.dropout import Dropout, Kept
from graphattn.ops.inputs import ValidPair, clear_invalid, repeat_heads, valid_edges
from graphattn.ops.segments import edge_softmax, segment_sum


def edge_weights(
    query: Tensor,
    key: Tensor,
    graph: TokenGraph,
    *,
    score: Score,
    eps: float = 0.0,
    edge_bias: Tensor | None = None,
    top_k: int | None = None,
    valid: ValidPair = (None, None),
    softcap: float | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Weights [*, E, H], log-sums [*, N, H], and the selected edges, bool [*, E, H] (None: all)."""
    source, target = graph.edge_index
    query = clear_invalid(query, valid[0])
    key = repeat_heads(clear_invalid(key, valid[1]), query.shape[-2])
    logits = edge_logits(score, query.index_select(-3, target), key.index_select(-3, source))
    logits = capped(logits, softcap)
    if edge_bias is not None:
        logits = logits + edge_bias
    keep = valid_edges(valid, source, target)
    return edge_softmax(logits, target, graph.rowptr, keep=keep, top_k=top_k, eps=eps, sink=sink)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    graph: TokenGraph,
    *,
    score: Score,
    edge_bias: Tensor | None = None,
    top_k: int | None = None,
    valid: ValidPair = (None, None),
    softcap: float | None = None,
    dropout: Dropout | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [*, N, H, Dv] and log-sums [*, N, H]: every target averages the values it sees."""
    weights, lse, keep = edge_weights(
        query,
        key,
        graph,
        score=score,
        edge_bias=edge_bias,
        top_k=top_k,
        valid=valid,
        softcap=softcap,
    )
    source, target = graph.edge_index
    if dropout is not None:
        kept = Kept(dropout.p, dropout.kept_edges(source, target, query.shape[:-3]))
        weights, keep = kept.weights(weights), kept.among(keep)
    value_j = repeat_heads(clear_invalid(value, valid[1]), query.shape[-2]).index_select(-3, source)
    if keep is not None:  # a value that is not selected may be NaN, and 0 * NaN is NaN
        value_j = value_j.masked_fill(~keep[..., None], 0)
    return segment_sum(weights[..., None] * value_j, target, graph.num_targets), lse

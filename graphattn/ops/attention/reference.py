"""Attention in its readable form: one message per edge, summed at its target.

Everything is computed per edge, in the order of ``graph.edge_index``, so memory is O(E * H * D).
Exact in float64, twice differentiable; the other backends are tested against it.
"""

from __future__ import annotations

from torch import Tensor

from graphattn.ops.attention.calls import AttentionCall
from graphattn.ops.attention.logits.edge_bias import per_edge
from graphattn.ops.attention.logits.score import capped, edge_logits
from graphattn.ops.dropout import Kept, dropout_of_call
from graphattn.ops.inputs import clear_invalid, repeat_heads, valid_edges
from graphattn.ops.segments import edge_softmax, segment_sum


def edge_weights(
    call: AttentionCall, eps: float = 0.0, sink: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Weights [*, E, H], log-sums [*, N, H], and the selected edges, bool [*, E, H] (None: all)."""
    graph, (of_target, of_source) = call.graph, call.valid
    source, target = graph.edge_index
    query = clear_invalid(call.query, of_target)
    key = repeat_heads(clear_invalid(call.key, of_source), query.shape[-2])
    logits = edge_logits(call.score, query.index_select(-3, target), key.index_select(-3, source))
    logits = capped(logits, call.softcap)
    bias = per_edge(call.bias, graph)
    logits = logits if bias is None else logits + bias
    keep = valid_edges(call.valid, source, target)
    return edge_softmax(
        logits, target, graph.rowptr, keep=keep, top_k=call.top_k, eps=eps, sink=sink
    )


def attend(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Output [*, N, H, Dv] and log-sums [*, N, H]: every target averages the values it sees."""
    weights, lse, keep = edge_weights(call)
    graph, heads = call.graph, call.query.shape[-2]
    source, target = graph.edge_index
    if call.seed is not None:
        dropout = dropout_of_call(call.dropout, call.seed, call.query, graph)
        kept = Kept(dropout.p, dropout.kept_edges(source, target, call.query.shape[:-3]))
        weights, keep = kept.weights(weights), kept.among(keep)
    value = repeat_heads(clear_invalid(call.value, call.valid[1]), heads)
    value_j = value.index_select(-3, source)
    if keep is not None:  # a value that is not selected may be NaN, and 0 * NaN is NaN
        value_j = value_j.masked_fill(~keep[..., None], 0)
    return segment_sum(weights[..., None] * value_j, target, graph.num_targets), lse

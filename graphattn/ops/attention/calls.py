"""The checks of a call of attention, and the checked call that every backend gets."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from graphattn.graphs.arguments import as_int
from graphattn.graphs.token_graph import TokenGraph
from graphattn.ops.attention.logits.edge_bias import check_edge_bias, is_table
from graphattn.ops.attention.logits.score import Score, per_head
from graphattn.ops.backends import check_backend, has_values
from graphattn.ops.dropout import as_share
from graphattn.ops.inputs import (
    Valid,
    ValidPair,
    check_graph,
    check_valid,
    compute_dtype,
)


class AttentionCall(NamedTuple):
    """The arguments of an attention operation after their checks.

    Attributes:
        query: [*, N, H, D], in the dtype of the caller.
        key: [*, M, Hk, D], in the same dtype; Hk divides H.
        value: [*, M, Hk, Dv], in the same dtype.
        graph: N targets, M sources, E edges.
        score: gives the logits; its numbers are tensors [H].
        top_k: sources kept per target and head; all if None.
        bias: added to the logits, in the compute dtype: [E, H], [*, E, H], or with `per_offset` a
            table [offsets, H]; none if None.
        per_offset: whether `bias` is such a table.
        valid: bool [N] or [*, N] for targets, and [M] or [*, M] for sources; None for either if all
            are valid.
        softcap: the bound of the logits, a number > 0; none if None.
        dropout: the share of the weights that is set to 0, in [0, 1).
        seed: int64 [], from which the dropout is drawn; None without dropout.
        rounded: whether a backend may round its output to half precision. It may not if eps or a
            sink is to be applied to the output.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    graph: TokenGraph
    score: Score
    top_k: int | None = None
    bias: Tensor | None = None
    per_offset: bool = False
    valid: ValidPair = (None, None)
    softcap: float | None = None
    dropout: float = 0.0
    seed: Tensor | None = None
    rounded: bool = True


def checked_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    graph: TokenGraph | Tensor,
    score: Score,
    *,
    top_k: int | None = None,
    edge_bias: Tensor | None = None,
    valid: Valid = None,
    backend: str = "auto",
    softcap: float | None = None,
    dropout: float = 0.0,
    rounded: bool = True,
) -> AttentionCall:
    """Check the other arguments of a call whose tensors and score are checked already.

    Raises:
        ValueError: names the argument, its value and what is allowed.
    """
    check_backend(backend)
    dropout = as_share("dropout", dropout)
    N, M, batch = query.shape[-3], key.shape[-3], query.shape[:-3]
    graph = check_graph(graph, query, N, M, per_edge=edge_bias is not None, source=key)
    top_k = None if top_k is None else as_int("top_k", top_k, 1)
    dtype = compute_dtype(query.dtype)
    bias = check_edge_bias(edge_bias, graph, query.shape[-2], dtype, query.device, batch)
    return AttentionCall(
        query=query,
        key=key,
        value=value,
        graph=graph,
        score=score,
        top_k=top_k,
        bias=bias,
        per_offset=is_table(bias, graph),
        valid=check_valid(valid, batch, query.device, N, M),
        softcap=softcap,
        dropout=dropout,
        seed=None,
        rounded=rounded,
    )


def check_sink(sink: float | Tensor | None, heads: int, query: Tensor) -> Tensor | None:
    """The logits [H] of a sink; None without one.

    They are checked where their values can be read.
    """
    if sink is None:
        return None
    logits = per_head("sink", sink, heads, query)
    if has_values(logits) and not all(logit < math.inf for logit in logits.tolist()):
        got = sink.tolist() if isinstance(sink, Tensor) else sink
        raise ValueError(f"sink must be finite, or -inf for none, got {got}")
    return logits

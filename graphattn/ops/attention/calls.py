"""One call of attention, checked: what every backend is given."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from graphattn.graphs.arguments import as_int
from graphattn.graphs.token_graph import TokenGraph
from graphattn.ops.attention.logits.edge_bias import check_edge_bias, is_table
from graphattn.ops.attention.logits.score import Score, per_head
from graphattn.ops.backends import check_backend
from graphattn.ops.dropout import as_share
from graphattn.ops.inputs import (
    Valid,
    ValidPair,
    check_graph,
    check_tensors,
    check_valid,
    compute_dtype,
)


class AttentionCall(NamedTuple):
    """The arguments of an attention operation after their checks.

    Attributes:
        query, key, value: [*, N, H, D], [*, M, Hk, D] and [*, M, Hk, Dv], as they were given.
        score: with its numbers as tensors [H].
        bias: per edge, per sample and edge, or with `per_offset` a table of offsets; or None.
        seed: from which the dropout of the call is drawn; None where there is none.
        rounded: whether a backend may round the output of half precision: nothing more is
            computed with it.
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
    """The call of checked tensors and a checked score; the other arguments are checked here.

    Raises:
        ValueError: names the argument, its value and what is allowed.
    """
    check_backend(backend)
    dropout = as_share("dropout", dropout)
    N, M, batch = query.shape[-3], key.shape[-3], query.shape[:-3]
    graph = check_graph(graph, query, N, M, per_edge=edge_bias is not None)
    top_k = None if top_k is None else as_int("top_k", top_k, 1)
    dtype = compute_dtype(query.dtype)
    bias = check_edge_bias(edge_bias, graph, query.shape[-2], dtype, query.device, batch)
    return AttentionCall(
        query,
        key,
        value,
        graph,
        score,
        top_k,
        bias,
        is_table(bias, graph),
        check_valid(valid, batch, query.device, N, M),
        softcap,
        dropout,
        None,
        rounded,
    )


def check_qkv(query: Any, key: Any, value: Any) -> int:
    """The number of query heads of tensors that fit each other."""
    check_tensors(query=query, key=key, value=value)
    heads, features = query.shape[-2:]
    if key.shape[-1] != features:
        raise ValueError(f"key must have {features} features like query, got {key.shape[-1]}")
    if value.shape[-3:-1] != key.shape[-3:-1]:
        raise ValueError(
            f"value must have the tokens and heads of key ({list(key.shape[-3:-1])}), "
            f"got {list(value.shape[-3:-1])}"
        )
    if key.shape[-2] == 0 or heads % key.shape[-2]:
        raise ValueError(f"key heads must divide query heads ({heads}), got {key.shape[-2]}")
    return cast(int, heads)


def check_sink(sink: float | Tensor | None, heads: int, query: Tensor) -> Tensor | None:
    """Logits [H] of a sink. Tensors on other devices are not read: that would wait for them."""
    if sink is None:
        return None
    logits = per_head("sink", sink, heads, query)
    looks = logits.device.type == "cpu" and not torch.compiler.is_compiling()
    if looks and not all(logit < math.inf for logit in logits.tolist()):
        got = sink.tolist() if isinstance(sink, Tensor) else sink
        raise ValueError(f"sink must be finite, or -inf for none, got {got}")
    return logits

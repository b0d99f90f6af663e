"""Structured attention as one operator of torch.library, which torch.compile keeps whole.

The graph travels as tensors (:mod:`graphattn.graphs.encoding`), so one compilation serves all
windows and lengths. Gradients are there once: of a compiled function nobody can take second ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphattn.graphs.encoding import decode
from graphattn.graphs.token_graph import TokenGraph
from graphattn.ops.attention import structured
from graphattn.ops.inputs import ValidPair

INPUTS = "Tensor query, Tensor key, Tensor value, Tensor scale, Tensor? bias"
OPTIONS = (
    "Tensor? valid_targets, Tensor? valid_sources, Tensor code, Tensor? edge_index, "
    "str score, int? top_k, bool per_offset"
)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    graph: TokenGraph,
    *,
    score: str,
    scale: Tensor,
    bias: Tensor | None,
    per_offset: bool,
    top_k: int | None,
    valid: ValidPair,
) -> tuple[Tensor, Tensor]:
    """What ``structured.attend`` does, as one operator."""
    edge_index = graph.edge_index if graph.structure is None else None
    out, lse, _ = torch.ops.graphattn.attention(
        query, key, value, scale, bias, *valid, graph.code, edge_index, score, top_k, per_offset
    )
    return out, lse


def _plan(inputs: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Any, Any]:
    """The inputs as a plan wants them, and the plan."""
    of_target, of_source, code, edge_index, score, top_k, per_offset = options
    return structured.plan_call(
        inputs,
        decode(code, edge_index, inputs[0].device),
        score=score,
        per_offset=per_offset,
        top_k=top_k,
        valid=(of_target, of_source),
    )


@torch.library.custom_op(
    "graphattn::attention",
    mutates_args=(),
    schema=f"({INPUTS}, {OPTIONS}) -> (Tensor, Tensor, Tensor)",
)
def _attention(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sums, and what the backward wants to see again."""
    inputs, plan = _plan(arguments[:5], arguments[5:])
    out, lse, saved = plan.forward(inputs)
    of_out, of_lse = _shapes(*arguments[:3])
    saved = saved.clone() if saved is lse else saved  # an operator's results share no memory
    return out.reshape(of_out), lse.reshape(of_lse), saved.reshape(of_lse)


@_attention.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    query = arguments[0]
    of_out, of_lse = _shapes(*arguments[:3])
    return query.new_empty(of_out), query.new_empty(of_lse), query.new_empty(of_lse)


def _shapes(query: Tensor, key: Tensor, value: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of the output and of the log-sums."""
    return (*query.shape[:-1], value.shape[-1]), tuple(query.shape[:-1])


@torch.library.custom_op(
    "graphattn::attention_backward",
    mutates_args=(),
    schema=f"({INPUTS}, {OPTIONS}, Tensor out, Tensor saved, Tensor d_out, Tensor d_lse) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _attention_backward(*arguments: Any) -> tuple[Tensor, ...]:
    """Gradients of the inputs; an empty tensor for no bias."""
    given = arguments[:5]
    inputs, plan = _plan(given, arguments[5:-4])
    out, saved, d_out, d_lse = (
        x.reshape(len(inputs[0]), *x.shape[-d:])
        for x, d in zip(arguments[-4:], (3, 2, 3, 2), strict=True)
    )
    gradients = plan.backward(inputs, out, saved, d_out, d_lse)
    return tuple(
        given[0].new_empty(0) if x is None else gradient.reshape(x.shape)
        for x, gradient in zip(given, gradients, strict=True)
    )


@_attention_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    given = arguments[:5]
    return tuple(given[0].new_empty(0) if x is None else torch.empty_like(x) for x in given)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    out, _, saved = output
    *_, ctx.score, ctx.top_k, ctx.per_offset = inputs
    ctx.save_for_backward(*inputs[:9], out, saved)


def _backward(ctx: Any, d_out: Tensor, d_lse: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, out, saved = ctx.saved_tensors
    *gradients, d_bias = torch.ops.graphattn.attention_backward(
        *tensors, ctx.score, ctx.top_k, ctx.per_offset, out, saved, d_out, d_lse
    )
    return (*gradients, None if tensors[4] is None else d_bias, *[None] * 7)


_attention.register_autograd(_backward, setup_context=_remember)

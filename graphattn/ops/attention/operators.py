"""Attention as one operator of torch.library, which torch.compile does not trace into.

The graph is passed as tensors (:mod:`graphattn.graphs.encoding`), so one compilation serves all
windows and lengths. Torch stores compiled functions on disk, with the shapes that fake kernels
returned, and may load them under another version of this library. So shapes must depend on the
arguments only.

Second derivatives of eager calls are computed by structured attention, in operations that can be
differentiated again. Compiled functions have no second derivatives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from graphattn.graphs.encoding import decode
from graphattn.graphs.token_graph import TokenGraph
from graphattn.kernels.shared.launch import on_its_device
from graphattn.ops.attention import native, structured, triton
from graphattn.ops.attention.structured.recompute import saved_per_head
from graphattn.ops.inputs import ValidPair, compute_dtype, gradients_by_autograd

INPUTS = "Tensor query, Tensor key, Tensor value, Tensor scale, Tensor? bias"
OPTIONS = (
    "Tensor? valid_targets, Tensor? valid_sources, Tensor code, Tensor? listed, Tensor? seed, "
    "str score, int? top_k, bool per_offset, float? softcap, float dropout, "
    "int saved_per_head, str backend, bool shared"
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
    backend: str,
    softcap: float | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [*, N, H, Dv] and log-sums [*, N, H]; kernels take the inputs in their own dtype."""
    shared = backend == "triton" and query is key and key is value
    saved = native.most_saved_per_head(top_k) if backend == "native" else 1
    options = seed, score, top_k, per_offset, softcap, dropout, saved, backend, shared
    out, lse, _ = torch.ops.graphattn.attention(
        query, key, value, scale, bias, *valid, graph.code, graph.listed, *options
    )
    return out, lse.transpose(-1, -2) if backend == "triton" else lse


def _structured(inputs: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Any, Any]:
    """The inputs with one batch dimension, and the plan of "native" or "structured"."""
    of_target, of_source, code, listed, seed, score, top_k, per_offset, *more = options
    plan_call = native.plan_call if more[-2] == "native" else structured.plan_call
    return plan_call(
        inputs,
        decode(code, listed, inputs[0].device),
        score=score,
        per_offset=per_offset,
        top_k=top_k,
        valid=(of_target, of_source),
        softcap=more[0],
        dropout=more[1],
        seed=seed,
    )


def _triton(inputs: tuple[Any, ...], options: tuple[Any, ...]) -> triton.KernelCall:
    """The call of the kernels of "triton"."""
    of_target, of_source, code, listed, _, score, top_k, per_offset, *_, shared = options
    return triton.KernelCall(
        inputs,
        decode(code, listed, inputs[0].device),
        score,
        (of_target, of_source),
        per_offset=per_offset,
        top_k=top_k,
        shared=shared,
    )


@torch.library.custom_op(
    "graphattn::attention",
    mutates_args=(),
    schema=f"({INPUTS}, {OPTIONS}) -> (Tensor, Tensor, Tensor)",
)
@on_its_device
def _attention(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The output, the log-sums, and the numbers to save for the backward pass."""
    of_out, of_lse, of_saved = _shapes(*arguments)
    if arguments[-2] == "triton":
        out, lse, saved = _triton(arguments[:5], arguments[5:]).forward()
    else:
        inputs, plan = _structured(arguments[:5], arguments[5:])
        out, lse, saved = plan.forward(inputs)
        saved = (
            saved.clone() if saved is lse else saved
        )  # results of an operator must not share memory
        if saved.shape[-1] < of_saved[-1]:
            saved = pad(saved, (0, of_saved[-1] - saved.shape[-1]))
    # Resized in place, not viewed: callers may change the result in place.
    out, lse, saved = (x.contiguous() for x in (out, lse, saved))
    return out.resize_(of_out), lse.resize_(of_lse), saved.resize_(of_saved)


@_attention.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    query = arguments[0]
    of_out, of_lse, of_saved = _shapes(*arguments)
    dtype = compute_dtype(query.dtype)
    lse, saved = (query.new_empty(shape, dtype=dtype) for shape in (of_lse, of_saved))
    return query.new_empty(of_out), lse, saved


def _shapes(*arguments: Any) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The shapes of the output, of the log-sums, and of the saved numbers.

    Kernels write log-sums head by head. Plans save different amounts of numbers; `saved_per_head`
    is the largest, to which others are padded.
    """
    query, _, value = arguments[:3]
    *batch, tokens, heads, _ = query.shape
    of_out, (per_head, backend) = (*query.shape[:-1], value.shape[-1]), arguments[-3:-1]
    if backend == "triton":
        return of_out, (*batch, heads, tokens), (*batch, heads, tokens)
    return of_out, (*batch, tokens, heads), (*batch, tokens, heads * per_head)


@torch.library.custom_op(
    "graphattn::attention_backward",
    mutates_args=(),
    schema=f"({INPUTS}, {OPTIONS}, Tensor out, Tensor lse, Tensor saved, Tensor d_out, "
    "Tensor d_lse, bool needs_scale, bool needs_bias) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
@on_its_device
def _attention_backward(*arguments: Any) -> tuple[Tensor, ...]:
    """Gradients of the inputs; an empty tensor for one that is missing or not needed."""
    given, (*results, needs_scale, needs_bias) = arguments[:5], arguments[-7:]
    gradients: tuple[Tensor | None, ...]
    if arguments[-9] == "triton":
        call = _triton(given, arguments[5:-7])
        gradients = call.backward(*results, needs_scale=needs_scale, needs_bias=needs_bias)
    else:
        inputs, plan = _structured(given, arguments[5:-7])
        out, _, saved, d_out, d_lse = (
            x.reshape(len(inputs[0]), *x.shape[-d:])
            for x, d in zip(results, (3, 2, 2, 3, 2), strict=True)
        )
        saved = saved[..., : out.shape[-2] * saved_per_head(plan)]
        gradients = plan.backward(inputs, out, saved, d_out, d_lse)
    return tuple(
        given[0].new_empty(0) if x is None or gradient is None else gradient.reshape(x.shape)
        for x, gradient in zip(given, gradients, strict=True)
    )


@_attention_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    (query, key, value, scale, bias), (needs_scale, needs_bias) = arguments[:5], arguments[-2:]
    shared, all_there = arguments[-8], arguments[-9] != "triton"

    def like(x: Tensor | None, there: bool) -> Tensor:
        if x is None or not there:
            return query.new_empty(0)
        return x.new_empty(x.shape)

    return (
        like(query, True),
        like(key, not shared),
        like(value, not shared),
        like(scale, needs_scale or shared or all_there),
        like(bias, needs_bias or all_there),
    )


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    tensors, ctx.options = inputs[:-8], inputs[-8:]
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, d_out: Tensor, d_lse: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, out, lse, saved = ctx.saved_tensors
    needed = ctx.needs_input_grad[:5]
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        # create_graph=True: this is differentiated again.
        return *_gradients_by_autograd(ctx, tensors, (d_out, d_lse), needed), *[None] * 13
    found = torch.ops.graphattn.attention_backward(
        *tensors, *ctx.options, out, lse, saved, d_out, d_lse, *needed[3:]
    )
    there = list(needed)
    if ctx.options[-1]:  # one tensor, one gradient
        there[1] = there[2] = False
    return *(x if n else None for x, n in zip(found, there, strict=True)), *[None] * 13


def _gradients_by_autograd(
    ctx: Any,
    tensors: list[Any],
    upstream: tuple[Tensor, Tensor],
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """The gradients by structured attention, in operations that can be differentiated again."""
    *inputs, of_target, of_source, code, listed, seed = tensors
    score, top_k, per_offset, softcap, dropout, _, backend, _ = ctx.options
    dtype = compute_dtype(inputs[0].dtype)

    def attend_again(*inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        wide: list[Any] = [None if x is None else x.to(dtype) for x in inputs]
        query, key, value, scale, bias = wide
        out, lse = structured.attend(
            query,
            key,
            value,
            decode(code, listed, query.device),
            scale=scale,
            bias=bias,
            score=score,
            per_offset=per_offset,
            top_k=top_k,
            valid=(of_target, of_source),
            softcap=softcap,
            dropout=dropout,
            seed=seed,
        )
        return out, lse.transpose(-1, -2) if backend == "triton" else lse

    return gradients_by_autograd(attend_again, inputs, needed, upstream)


_attention.register_autograd(_backward, setup_context=_remember)

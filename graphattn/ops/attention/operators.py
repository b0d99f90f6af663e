"""Attention as one operator of torch.library, which torch.compile does not trace into.

Second derivatives of eager calls are computed by structured attention. See
:mod:`graphattn.ops.library.operators`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from graphattn.graphs.token_graph import decode
from graphattn.ops.attention import native, structured
from graphattn.ops.attention.calls import AttentionCall, Inputs
from graphattn.ops.attention.logits.score import known_score
from graphattn.ops.attention.structured.recompute import MOST_SAVED, Plan, flattened
from graphattn.ops.attention.triton import KernelCall
from graphattn.ops.inputs import compute_dtype
from graphattn.ops.library.operators import GRAPH, Gradients, Results, Tensors, register

INPUTS = "Tensor query, Tensor key, Tensor value, Tensor scale, Tensor? bias"
OPTIONS = (
    f"{GRAPH}, Tensor? seed, str score, int? top_k, bool per_offset, float? softcap, "
    "float dropout, int saved_per_head, str backend, bool shared"
)


def attend(call: AttentionCall, backend: str) -> tuple[Tensor, Tensor]:
    """Output [*, N, H, Dv] and log-sums [*, N, H]; kernels take the inputs in their own dtype."""
    query, key, value, graph = call.query, call.key, call.value, call.graph
    shared = backend == "triton" and query is key and key is value
    out, lse, _ = torch.ops.graphattn.attention(
        query, key, value, call.scale, call.bias, *call.valid, graph.code, graph.listed,
        call.seed, call.score.kernel, call.top_k, call.per_offset, call.softcap, call.dropout,
        MOST_SAVED, backend, shared,
    )  # fmt: skip
    return out, lse.transpose(-1, -2) if backend == "triton" else lse


def _call(inputs: Tensors, options: Any) -> AttentionCall:
    """The call that the operator was made of."""
    query, key, value, scale, bias = inputs
    graph = decode(options.code, options.listed, query.device)
    return AttentionCall(
        query, key, value, graph, known_score(options.score, scale), options.top_k, bias,
        options.per_offset, (options.valid_targets, options.valid_sources), options.softcap,
        options.dropout, options.seed,
    )  # fmt: skip


def _plan(inputs: Tensors, options: Any) -> tuple[Plan, Inputs]:
    """The plan of "native" or "structured", and its inputs with one batch dimension."""
    call = _call(inputs, options)
    kernels = native.KERNELS if options.backend == "native" else None
    return structured.plan_of(call, kernels), flattened(call.inputs())


def _forward(inputs: Tensors, options: Any) -> Results:
    """The output, the log-sums, and the numbers to save for the backward pass."""
    of_out, of_lse, of_saved = _sizes(inputs, options)
    if options.backend == "triton":
        out, lse, saved = KernelCall(_call(inputs, options), options.shared).forward()
    else:
        plan, flat_inputs = _plan(inputs, options)
        out, lse, saved = plan.forward(flat_inputs)
        if saved is lse:  # results of an operator must not share memory
            saved = saved.clone()
        if saved.shape[-1] < of_saved[-1]:
            saved = pad(saved, (0, of_saved[-1] - saved.shape[-1]))
    # Resized in place, not viewed: callers may change the result in place.
    out, lse, saved = (x.contiguous() for x in (out, lse, saved))
    return out.resize_(of_out), lse.resize_(of_lse), saved.resize_(of_saved)


def _shapes(inputs: Tensors, options: Any) -> Results:
    """Empty tensors like the results of :func:`_forward`."""
    query = inputs[0]
    of_out, of_lse, of_saved = _sizes(inputs, options)
    dtype = compute_dtype(query.dtype)
    lse, saved = (query.new_empty(shape, dtype=dtype) for shape in (of_lse, of_saved))
    return query.new_empty(of_out), lse, saved


def _sizes(inputs: Tensors, options: Any) -> tuple[tuple[int, ...], ...]:
    """The shapes of the output, of the log-sums, and of the saved numbers.

    Kernels write log-sums head by head. Plans save different amounts of numbers; `saved_per_head`
    is the largest, to which others are padded. It is an argument, because torch finds compiled
    graphs again on disk, with the shapes of the version that compiled them.
    """
    query, _, value = inputs[:3]
    *batch, tokens, heads, _ = query.shape
    of_out = (*query.shape[:-1], value.shape[-1])
    if options.backend == "triton":
        return of_out, (*batch, heads, tokens), (*batch, heads, tokens)
    return of_out, (*batch, tokens, heads), (*batch, tokens, heads * options.saved_per_head)


def _backward(
    inputs: Tensors,
    options: Any,
    results: list[Tensor],
    upstream: list[Tensor],
    needed: list[bool],
) -> Gradients:
    """The gradients of the inputs."""
    if options.backend == "triton":
        needs_scale, needs_bias = needed[3:]
        call = KernelCall(_call(inputs, options), options.shared)
        return call.backward(*results, *upstream, needs_scale=needs_scale, needs_bias=needs_bias)
    plan, flat_inputs = _plan(inputs, options)
    out, _, saved, d_out, d_lse = (
        x.reshape(len(flat_inputs.query), *x.shape[-d:])
        for x, d in zip((*results, *upstream), (3, 2, 2, 3, 2), strict=True)
    )
    saved = saved[..., : out.shape[-2] * plan.saved_per_head]
    return plan.backward(flat_inputs, out, saved, d_out, d_lse)


def _again(inputs: Tensors, options: Any) -> tuple[Tensor, Tensor]:
    """The output and the log-sums by structured attention, in the compute dtype."""
    dtype = compute_dtype(inputs[0].dtype)
    wide = tuple(None if x is None else x.to(dtype) for x in inputs)
    out, lse = structured.attend(_call(wide, options))
    return out, lse.transpose(-1, -2) if options.backend == "triton" else lse


OPERATORS = register(
    "attention",
    INPUTS,
    OPTIONS,
    forward=_forward,
    shapes=_shapes,
    backward=_backward,
    again=_again,
    results=3,
    saved=1,
    copies=(1, 2),
)

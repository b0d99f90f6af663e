"""Attention as one operator of torch.library, which torch.compile does not trace into.

Second derivatives of eager calls are computed by structured attention. See
:mod:`graphattn.ops.library.operators`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from graphattn.graphs.encoding import decode
from graphattn.graphs.token_graph import TokenGraph
from graphattn.ops.attention import native, structured, triton
from graphattn.ops.attention.structured.recompute import saved_per_head
from graphattn.ops.inputs import ValidPair, compute_dtype
from graphattn.ops.library.operators import GRAPH, Gradients, Results, Tensors, register

INPUTS = "Tensor query, Tensor key, Tensor value, Tensor scale, Tensor? bias"
OPTIONS = (
    f"{GRAPH}, Tensor? seed, str score, int? top_k, bool per_offset, float? softcap, "
    "float dropout, int saved_per_head, str backend, bool shared"
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
    saved = 4  # the most that a plan saves
    options = seed, score, top_k, per_offset, softcap, dropout, saved, backend, shared
    out, lse, _ = torch.ops.graphattn.attention(
        query, key, value, scale, bias, *valid, graph.code, graph.listed, *options
    )
    return out, lse.transpose(-1, -2) if backend == "triton" else lse


def _plan(inputs: Tensors, options: Any) -> tuple[Any, Any]:
    """The inputs with one batch dimension, and the plan of "native" or "structured"."""
    plan_call = native.plan_call if options.backend == "native" else structured.plan_call
    graph = decode(options.code, options.listed, inputs[0].device)
    return plan_call(inputs, graph, **_of_structured(options))


def _of_structured(options: Any) -> dict[str, Any]:
    """The options of a call of "structured"."""
    same = ("score", "per_offset", "top_k", "softcap", "dropout", "seed")
    valid = options.valid_targets, options.valid_sources
    return {"valid": valid, **{name: getattr(options, name) for name in same}}


def _triton(inputs: Tensors, options: Any) -> triton.KernelCall:
    """The call of the kernels of "triton"."""
    return triton.KernelCall(
        inputs,
        decode(options.code, options.listed, inputs[0].device),
        options.score,
        (options.valid_targets, options.valid_sources),
        per_offset=options.per_offset,
        top_k=options.top_k,
        shared=options.shared,
    )


def _forward(inputs: Tensors, options: Any) -> Results:
    """The output, the log-sums, and the numbers to save for the backward pass."""
    of_out, of_lse, of_saved = _sizes(inputs, options)
    if options.backend == "triton":
        out, lse, saved = _triton(inputs, options).forward()
    else:
        flat_inputs, plan = _plan(inputs, options)
        out, lse, saved = plan.forward(flat_inputs)
        saved = (
            saved.clone() if saved is lse else saved
        )  # results of an operator must not share memory
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
    is the largest, to which others are padded.
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
        call = _triton(inputs, options)
        return call.backward(*results, *upstream, needs_scale=needs_scale, needs_bias=needs_bias)
    flat_inputs, plan = _plan(inputs, options)
    out, _, saved, d_out, d_lse = (
        x.reshape(len(flat_inputs[0]), *x.shape[-d:])
        for x, d in zip((*results, *upstream), (3, 2, 2, 3, 2), strict=True)
    )
    saved = saved[..., : out.shape[-2] * saved_per_head(plan)]
    found: Gradients = plan.backward(flat_inputs, out, saved, d_out, d_lse)
    return found


def _again(inputs: Tensors, options: Any) -> tuple[Tensor, Tensor]:
    """The output and the log-sums by structured attention, in the compute dtype."""
    dtype = compute_dtype(inputs[0].dtype)
    wide: list[Any] = [None if x is None else x.to(dtype) for x in inputs]
    query, key, value, scale, bias = wide
    graph = decode(options.code, options.listed, query.device)
    own = {"scale": scale, "bias": bias, **_of_structured(options)}
    out, lse = structured.attend(query, key, value, graph, **own)
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

"""The backends of attention: who can run a call, and how each is run."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from graphattn.ops import compiled_code
from graphattn.ops.attention import native, operators, reference, structured, triton
from graphattn.ops.attention.calls import AttentionCall
from graphattn.ops.attention.logits.edge_bias import per_edge
from graphattn.ops.attention.logits.score import per_head
from graphattn.ops.backends import Backend
from graphattn.ops.counting import is_watched, note_uncounted
from graphattn.ops.dropout import dropout_of_call
from graphattn.ops.inputs import clear_invalid, compute_dtype

Result = tuple[Tensor, Tensor]  # [*, N, H, Dv] and log-sums [*, N, H]


def _why_not_triton(call: AttentionCall) -> str | None:
    if call.score.kernel is None:
        return f"its kernels know DotProduct and GaussianKernel, not the score {call.score}"
    width = call.value.shape[-1]
    return triton.why_not(call.query, width, softcap=call.softcap, dropout=call.dropout)


def _why_not_native(call: AttentionCall) -> str | None:
    if call.score.kernel is None:
        return f"its compiled code knows DotProduct and GaussianKernel, not the score {call.score}"
    return compiled_code.why_not(call.query)


def _why_not_structured(call: AttentionCall) -> str | None:
    if call.score.kernel is None and torch.compiler.is_compiling():
        return f"torch.compile takes the score {call.score} edge by edge, as the reference does"
    return None


def _is_on_gpu(call: AttentionCall) -> bool:
    """Whether "auto" may take Triton's kernels, which are interpreted elsewhere."""
    return call.query.device.type == "cuda"


def _run_triton(call: AttentionCall) -> Result:
    """Half precision stays what it is: kernels sum up in float32."""
    return operators.attend(
        call.query,
        call.key,
        call.value,
        call.graph,
        score=_kernel(call),
        scale=_strength(call),
        bias=call.bias,
        per_offset=call.per_offset,
        top_k=call.top_k,
        valid=call.valid,
        backend="triton",
    )


def _run_native(call: AttentionCall) -> Result:
    if is_watched(call.query):
        return _run_operator(call, "native")
    widened = not call.rounded  # compiled code reads halves itself
    return native.attend(*_tensors(call, widened), call.graph, **_options(call, _kernel(call)))


def _run_structured(call: AttentionCall) -> Result:
    if call.score.kernel is None:
        # Tiles form pairs that are no edges, and 0 * NaN in the gradient of one is NaN.
        if not _are_finite(call):
            return _run_reference(call)
        return structured.attend(*_tensors(call), call.graph, **_options(call, call.score))
    if is_watched(call.query):
        return _run_operator(call, "structured")
    return structured.attend(*_tensors(call), call.graph, **_options(call, _kernel(call)))


def _run_operator(call: AttentionCall, backend: str) -> Result:
    """One operator of torch.library, which those who follow the steps of a call see whole."""
    options = _options(call, _kernel(call))
    return operators.attend(*_tensors(call), call.graph, backend=backend, **options)


def _run_reference(call: AttentionCall) -> Result:
    note_uncounted("rbf_attention or dot_product_attention with backend='reference'")
    dropout = None
    if call.seed is not None:
        dropout = dropout_of_call(call.dropout, call.seed, call.query, call.graph)
    return reference.attend(
        *_tensors(call),
        call.graph,
        score=call.score,
        edge_bias=per_edge(call.bias, call.graph),
        top_k=call.top_k,
        valid=call.valid,
        softcap=call.softcap,
        dropout=dropout,
    )


def _are_finite(call: AttentionCall) -> bool:
    """Whether queries and keys are numbers. Elsewhere than on a CPU looking would wait: True."""
    if call.query.device.type != "cpu" or is_watched(call.query):
        return True
    masks = call.valid
    return all(
        math.isfinite(clear_invalid(x.detach(), mask).sum())
        for x, mask in zip((call.query, call.key), masks, strict=True)
    )


def _tensors(call: AttentionCall, widened: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, in the compute dtype where they are `widened`."""
    tensors = call.query, call.key, call.value
    if not widened:
        return tensors
    dtype = compute_dtype(call.query.dtype)
    query, key, value = (x.to(dtype) for x in tensors)
    return query, key, value


def _options(call: AttentionCall, score: Any) -> dict[str, Any]:
    return {
        "score": score,
        "scale": _strength(call),
        "bias": call.bias,
        "per_offset": call.per_offset,
        "top_k": call.top_k,
        "valid": call.valid,
        "softcap": call.softcap,
        "dropout": call.dropout,
        "seed": call.seed,
    }


def _strength(call: AttentionCall) -> Tensor:
    """The factor [H] of scores that compiled code knows; 1 for others, which have their own."""
    scale = call.score.strength
    return per_head("scale", 1.0, call.query.shape[-2], call.query) if scale is None else scale


def _kernel(call: AttentionCall) -> str:
    assert call.score.kernel is not None
    return call.score.kernel


BACKENDS = (  # fastest first
    Backend("triton", _why_not_triton, _run_triton, _is_on_gpu),
    Backend("native", _why_not_native, _run_native),
    Backend("structured", _why_not_structured, _run_structured),
    Backend("reference", run=_run_reference),
)

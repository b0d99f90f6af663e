"""The backends of attention: which can run a call, and how each runs it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from graphattn.graphs.token_graph import makes_fakes
from graphattn.ops import compiled_code
from graphattn.ops.attention import native, operators, reference, structured, triton
from graphattn.ops.attention.calls import AttentionCall
from graphattn.ops.attention.logits.edge_bias import per_edge
from graphattn.ops.backends import Backend
from graphattn.ops.counting import is_watched, note_uncounted
from graphattn.ops.dropout import dropout_of_call
from graphattn.ops.inputs import clear_invalid

Result = tuple[Tensor, Tensor]  # [*, N, H, Dv] and log-sums [*, N, H]


def _why_not_triton(call: AttentionCall) -> str | None:
    """The reason why the kernels of "triton" cannot run a call; None if they can."""
    if call.score.kernel is None:
        return f"its kernels know DotProduct and GaussianKernel, not the score {call.score}"
    width = call.value.shape[-1]
    return triton.why_not(call.query, width, softcap=call.softcap, dropout=call.dropout)


def _why_not_native(call: AttentionCall) -> str | None:
    """The reason why the C++ code of "native" cannot run a call; None if it can."""
    if call.score.kernel is None:
        return f"its compiled code knows DotProduct and GaussianKernel, not the score {call.score}"
    return compiled_code.why_not(call.query)


def _why_not_structured(call: AttentionCall) -> str | None:
    """The reason why "structured" cannot run a call; None if it can."""
    if call.score.kernel is None and (torch.compiler.is_compiling() or makes_fakes()):
        return f"a trace takes the score {call.score} edge by edge, as the reference does"
    return None


def _is_on_gpu(call: AttentionCall) -> bool:
    """Whether "auto" may take "triton": elsewhere its kernels run in an interpreter."""
    return call.query.device.type == "cuda"


def _run_triton(call: AttentionCall) -> Result:
    """Run the kernels, which read half precision as it is and sum in float32."""
    assert call.score.kernel is not None
    return operators.attend(
        call.query,
        call.key,
        call.value,
        call.graph,
        score=call.score.kernel,
        scale=call.scale,
        bias=call.bias,
        per_offset=call.per_offset,
        top_k=call.top_k,
        valid=call.valid,
        backend="triton",
    )


def _run_native(call: AttentionCall) -> Result:
    """Run the C++ code, which can read half precision and round its output to it."""
    if is_watched(call.query):
        return _run_operator(call, "native")
    return native.attend(call)


def gradients_of_part(call: AttentionCall, backend: str, whole: Result, d_whole: Result) -> Any:
    """Gradients of a part by a backend, from results over all sources; see `part_gradients.py`.

    The tensors beside the gradients are inputs, for "native" in the compute dtype.
    """
    if call.score.kernel is None or call.top_k is not None or is_watched(call.query):
        return None
    inputs: tuple[Tensor | None, ...]
    found: tuple[Tensor | None, ...] | None
    of_all = call.graph, whole, d_whole
    own: dict[str, Any]
    if backend == "triton":
        inputs = call.query, call.key, call.value, call.scale, call.bias
        own = {"score": call.score.kernel, "valid": call.valid, "per_offset": call.per_offset}
        with torch.no_grad():
            found = triton.gradients_of_part(inputs, *of_all, **own)
    elif backend in ("native", "structured"):
        compute = native if backend == "native" else structured
        own = call.options()
        inputs = *call.tensors(), own.pop("scale"), own.pop("bias")
        with torch.no_grad():
            found = compute.gradients_of_part(inputs, *of_all, **own)
    else:
        return None
    if found is None:
        return None
    pairs = zip(inputs, found, strict=True)
    return [(x, d) for x, d in pairs if x is not None and d is not None]


def _run_structured(call: AttentionCall) -> Result:
    """Run operations of torch over tiles or rows of the graph."""
    if call.score.kernel is None:
        # Tiles hold pairs that are no edges, too. If the logit of such a pair is NaN, autograd
        # computes 0 * NaN = NaN for its gradient, which the reference does not.
        if not _are_finite(call):
            return _run_reference(call)
        return structured.attend(*call.tensors(), call.graph, **call.options())
    if is_watched(call.query):
        return _run_operator(call, "structured")
    return structured.attend(*call.tensors(), call.graph, **call.options())


def _run_operator(call: AttentionCall, backend: str) -> Result:
    """Run a call as one operator of torch.library, for torch.compile, traces and modes."""
    return operators.attend(*call.tensors(), call.graph, backend=backend, **call.options())


def _run_reference(call: AttentionCall) -> Result:
    """Run the readable form, one message per edge."""
    note_uncounted("rbf_attention or dot_product_attention with backend='reference'")
    dropout = None
    if call.seed is not None:
        dropout = dropout_of_call(call.dropout, call.seed, call.query, call.graph)
    return reference.attend(
        *call.tensors(),
        call.graph,
        score=call.score,
        edge_bias=per_edge(call.bias, call.graph),
        top_k=call.top_k,
        valid=call.valid,
        softcap=call.softcap,
        dropout=dropout,
    )


def _are_finite(call: AttentionCall) -> bool:
    """Whether all valid queries and keys are finite.

    The answer is True wherever their values cannot be read: on other devices than a CPU, to read
    them would wait for the device.
    """
    if call.query.device.type != "cpu" or is_watched(call.query):
        return True
    masks = call.valid
    return all(
        math.isfinite(clear_invalid(x.detach(), mask).sum())
        for x, mask in zip((call.query, call.key), masks, strict=True)
    )


BACKENDS = (  # fastest first
    Backend("triton", _why_not_triton, _run_triton, _is_on_gpu),
    Backend("native", _why_not_native, _run_native),
    Backend("structured", _why_not_structured, _run_structured),
    Backend("reference", run=_run_reference),
)

"""The backends of attention: which can run a call, and how each runs it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from graphattn.graphs.token_graph import makes_fakes
from graphattn.ops.attention import fused, native, operators, reference, structured, triton
from graphattn.ops.attention.calls import AttentionCall
from graphattn.ops.attention.logits.score import WIDE, known_score
from graphattn.ops.backends import Backend, is_watched, why_not_native
from graphattn.ops.counting import note_uncounted
from graphattn.ops.inputs import clear_invalid, may_be_differentiated

Result = tuple[Tensor, Tensor]  # [*, N, H, Dv] and log-sums [*, N, H]


def _why_not_fused(call: AttentionCall) -> str | None:
    """The reason why torch's fused attention cannot run a call; None if it can."""
    if call.score.kernel is None:
        return f"it knows DotProduct and GaussianKernel, not the score {call.score}"
    return fused.why_not(call)


def _why_not_triton(call: AttentionCall) -> str | None:
    """The reason why the kernels of "triton" cannot run a call; None if they can."""
    if call.score.kernel is None:
        return f"its kernels know DotProduct and GaussianKernel, not the score {call.score}"
    return triton.why_not(call)


def _why_not_native(call: AttentionCall) -> str | None:
    """The reason why the C++ code of "native" cannot run a call; None if it can."""
    if call.score.kernel is None:
        return f"its compiled code knows DotProduct and GaussianKernel, not the score {call.score}"
    return why_not_native(call.query)


def _why_not_structured(call: AttentionCall) -> str | None:
    """The reason why "structured" cannot run a call; None if it can."""
    if call.score.kernel is None and (torch.compiler.is_compiling() or makes_fakes()):
        return f"a trace takes the score {call.score} edge by edge, as the reference does"
    return None


def _is_on_gpu(call: AttentionCall) -> bool:
    """Whether "auto" may take "triton": elsewhere its kernels run in an interpreter."""
    return call.query.device.type == "cuda"


def _is_fused_fastest(call: AttentionCall) -> bool:
    return call.query.device.type == "cuda" and fused.is_fastest(call)


def _run_fused(call: AttentionCall) -> tuple[Tensor, None]:
    """Run torch's fused attention, which has no log-sums and no second derivatives."""
    out, kernel = fused.attend(call), call.score.kernel
    tensors = call.query, call.key, call.value, call.scale
    if is_watched(call.query) or not may_be_differentiated(tensors):
        return out, None
    assert kernel is not None

    def again(query: Tensor, key: Tensor, value: Tensor, scale: Tensor) -> Tensor:
        score = known_score(kernel, scale)
        same = call._replace(query=query, key=key, value=value, score=score)
        return structured.attend(same.widened())[0]

    return fused.differentiable_again(out, tensors, again), None


def _run_triton(call: AttentionCall) -> Result:
    """Run the kernels, which read half precision as it is and sum in float32."""
    return operators.attend(call, "triton")


def _run_native(call: AttentionCall) -> Result:
    """Run the C++ code, which can read half precision and round its output to it."""
    if is_watched(call.query):
        return operators.attend(call.widened(), "native")
    return native.attend(call)


def _run_structured(call: AttentionCall) -> Result:
    """Run operations of torch over tiles or rows of the graph."""
    # Tiles hold pairs that are no edges, too. If the logit of such a pair is NaN, autograd computes
    # 0 * NaN = NaN for its gradient, which the reference does not.
    if call.score.kernel is None and not _are_finite(call):
        return _run_reference(call)
    if call.score.kernel is not None and is_watched(call.query):
        return operators.attend(call.widened(), "structured")
    return structured.attend(call.widened())


def _run_reference(call: AttentionCall) -> Result:
    """Run the readable form, one message per edge."""
    note_uncounted("rbf_attention or dot_product_attention with backend='reference'")
    return reference.attend(call.widened())


def plan_to_keep(call: AttentionCall, backend: str) -> Any:
    """The plan of all calls like this one; None for a backend or a call that has none.

    Scores of your own and half precision need more than a plan. Torch must see an operator where
    the call is watched.
    """
    if backend not in PLANNED or call.score.kernel is None or call.query.dtype not in WIDE:
        return None
    return None if is_watched(call.query) else structured.plan_of(call, PLANNED[backend])


def gradients_of_part(call: AttentionCall, backend: str, whole: Result, d_whole: Result) -> Any:
    """Gradients of a part by a backend, from results over all sources; see `part_gradients.py`.

    The tensors beside the gradients are inputs, for "native" in the compute dtype.
    """
    if call.score.kernel is None or call.top_k is not None or is_watched(call.query):
        return None
    call = call.widened() if backend in PLANNED else call
    gradients: tuple[Tensor | None, ...] | None = None
    with torch.no_grad():
        if backend == "triton":
            gradients = triton.gradients_of_part(call, whole, d_whole)
        elif backend in PLANNED:
            gradients = structured.gradients_of_part(call, whole, d_whole, PLANNED[backend])
    if gradients is None:
        return None
    inputs = call.query, call.key, call.value, call.scale, call.bias
    pairs = zip(inputs, gradients, strict=True)
    return [(x, d) for x, d in pairs if x is not None and d is not None]


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


PLANNED = {"native": native.KERNELS, "structured": structured.OPERATIONS}
BACKENDS = (  # fastest first
    Backend("fused", _why_not_fused, _run_fused, _is_fused_fastest),
    Backend("triton", _why_not_triton, _run_triton, _is_on_gpu),
    Backend("native", _why_not_native, _run_native),
    Backend("structured", _why_not_structured, _run_structured),
    Backend("reference", run=_run_reference),
)

"""Steps of generation by a kernel: which backend takes one, and the step itself.

(Elsewhere a step is a few operations of torch; the layers state them.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphattn.kernels.shared.launch import why_not_heads, why_not_on
from graphattn.kernels.shared.tuning import HELD_TOKENS
from graphattn.ops.backends import Backend, choose, wanted_backend
from graphattn.ops.compiled_code import why_no_step


class StepCall(NamedTuple):
    """Facts that decide which backend takes a step: targets like these [*, H, D], a cache, and
    options.
    """

    like: Tensor
    cache_dtype: torch.dtype
    window: int | None
    top_k: int | None
    softcap: float | None


def step_kernel(
    backend: str,
    like: Tensor,
    cache_dtype: torch.dtype,
    window: int | None,
    top_k: int | None,
    softcap: float | None = None,
) -> str | None:
    """The backend whose kernel takes a step of targets like these, [*, H, D]; None where none does.

    Device, dtypes and D count.

    Raises:
        ValueError: a backend with kernels was asked for by name, and cannot.
    """
    if torch.compiler.is_compiling() and wanted_backend(backend) != "triton":
        return None  # what is traced are operations of torch
    call = StepCall(like, cache_dtype, window, top_k, softcap)
    chosen = choose(BACKENDS, call, backend).name
    return chosen if chosen in ("triton", "native") else None


def _why_not_native(call: StepCall) -> str | None:
    return why_no_step(call.like, call.cache_dtype)


def _why_not_triton(call: StepCall) -> str | None:
    """The reason why no kernel of "triton" takes a step; None where one does."""
    window, top_k = call.window, call.top_k
    if call.softcap is not None:
        return "its step kernel has no softcap"
    if window is None:
        return "its step kernel needs a window, init_cache(..., window=W)"
    if top_k is not None and top_k < window and window > HELD_TOKENS:
        return f"its step kernel takes top_k in windows of at most {HELD_TOKENS}, not {window}"
    if (reason := why_not_heads(call.like)) is not None or call.cache_dtype == call.like.dtype:
        return reason
    kept = why_not_on(torch.empty(0, dtype=call.cache_dtype, device=call.like.device))
    return None if kept is None else f"{kept}, which the cache holds"


def _is_on_gpu(call: StepCall) -> bool:
    return call.like.device.type == "cuda"


BACKENDS = (  # fastest first; the layer itself takes the step
    Backend("triton", _why_not_triton, is_default=_is_on_gpu),
    Backend("native", _why_not_native),
    Backend("structured"),
    Backend("reference"),
)


def step_by_kernel(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
    """:func:`graphattn.kernels.generation.step.window_step`, which has the arguments."""
    from graphattn.kernels.generation.step import window_step

    return window_step(query, key, value, **arguments)

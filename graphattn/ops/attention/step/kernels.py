"""Steps of generation by a kernel: the choice of the backend, and the step of "triton".

Without a kernel, a step is a few operations of torch in the layer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphattn.kernels.shared.launch import on_its_device, why_not_heads, why_not_on
from graphattn.kernels.shared.tuning import HELD_TOKENS
from graphattn.ops.backends import Backend, choose, wanted_backend, why_no_step


class StepCall(NamedTuple):
    """The facts that decide which backend runs a step.

    Attributes:
        like: a tensor [*, H, D] with the heads, features, dtype and device of the targets.
        cache_dtype: the dtype of the cache.
        window, top_k, softcap: options of the layer and its cache.
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
    """The backend with a kernel that runs a step, "triton" or "native"; None if there is none.

    The answer depends on the options and on the device, dtype and sizes of `like`, [*, H, D].

    Raises:
        ValueError: a backend with kernels was asked for by name and cannot run the step.
    """
    if torch.compiler.is_compiling() and wanted_backend(backend) != "triton":
        return None  # torch.compile traces operations of torch
    call = StepCall(like, cache_dtype, window, top_k, softcap)
    chosen = choose(BACKENDS, call, backend).name
    return chosen if chosen in ("triton", "native") else None


def _why_not_native(call: StepCall) -> str | None:
    """The reason why C++ code cannot run a step; None if it can."""
    return why_no_step(call.like, call.cache_dtype)


def _why_not_triton(call: StepCall) -> str | None:
    """The reason why no kernel of "triton" can run a step; None if one can."""
    window, top_k = call.window, call.top_k
    if call.softcap is not None:
        return "its step kernel has no softcap"
    if window is None:
        return "its step kernel needs a window, init_cache(..., window=W)"
    if top_k is not None and top_k < window and window > HELD_TOKENS:
        return f"its step kernel takes top_k in windows of at most {HELD_TOKENS}, not {window}"
    if (reason := why_not_heads(call.like)) is not None or call.cache_dtype == call.like.dtype:
        return reason
    reason = why_not_on(torch.empty(0, dtype=call.cache_dtype, device=call.like.device))
    return None if reason is None else f"{reason}, which the cache holds"


def _is_on_gpu(call: StepCall) -> bool:
    """Whether "auto" may take "triton": elsewhere its kernels run in an interpreter."""
    return call.like.device.type == "cuda"


def _why_not_fused(_: StepCall) -> str:
    """The reason why torch's fused attention cannot run a step."""
    return "torch's fused attention has no steps of generation"


BACKENDS = (  # fastest first; the layer itself runs the step
    Backend("fused", _why_not_fused),
    Backend("triton", _why_not_triton, is_default=_is_on_gpu),
    Backend("native", _why_not_native),
    Backend("structured"),
    Backend("reference"),
)


@on_its_device
def step_by_kernel(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
    """:func:`graphattn.kernels.generation.step.window_step`, which has the arguments."""
    from graphattn.kernels.generation.step import window_step

    return window_step(query, key, value, **arguments)

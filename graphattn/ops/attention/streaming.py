"""Generation by kernel: which steps of a token it takes, and the step itself.

(Elsewhere a step is a few operations of torch; the layers state them.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphattn.kernels.launch import why_not_heads, why_not_on
from graphattn.kernels.tuning import HELD_TOKENS
from graphattn.ops.backends import choose_backend, wanted_backend


def has_step_kernel(
    backend: str,
    like: Tensor,
    cache_dtype: torch.dtype,
    window: int | None,
    top_k: int | None,
    softcap: float | None = None,
) -> bool:
    """Whether a kernel takes a step of targets like these, [*, H, D]: device, dtype and D count.

    Raises:
        ValueError: the backend "triton" was asked for by name, and cannot.
    """
    wanted = wanted_backend(backend)
    on_device = like.device.type == "cuda" and not torch.compiler.is_compiling()
    if wanted != "triton" and not (wanted == "auto" and on_device):
        return False  # on a CPU every microsecond counts
    reason = why_no_step(like, cache_dtype, window, top_k, softcap)
    support = {
        "reference": None,
        "structured": None,
        "native": "it has no code for single steps",
        "triton": reason,
    }
    return choose_backend(backend, support, like.device) == "triton"


def why_no_step(
    like: Tensor,
    cache_dtype: torch.dtype,
    window: int | None,
    top_k: int | None,
    softcap: float | None = None,
) -> str | None:
    """The reason why no kernel takes a step; None where one does."""
    if softcap is not None:
        return "its step kernel has no softcap"
    if window is None:
        return "its step kernel needs a window, init_cache(..., window=W)"
    if top_k is not None and top_k < window and window > HELD_TOKENS:
        return f"its step kernel takes top_k in windows of at most {HELD_TOKENS}, not {window}"
    if (reason := why_not_heads(like)) is not None or cache_dtype == like.dtype:
        return reason
    kept = why_not_on(torch.empty(0, dtype=cache_dtype, device=like.device))
    return None if kept is None else f"{kept}, which the cache holds"


def step_by_kernel(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
    """:func:`graphattn.kernels.window_step.window_step`, which has the arguments."""
    from graphattn.kernels.window_step import window_step

    return window_step(query, key, value, **arguments)

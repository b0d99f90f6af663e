"""Generation by kernel: which steps of a token one takes, and the step itself.

(Elsewhere a step is a few operations of torch; the layers state them.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphattn.kernels.shared.launch import why_not_heads, why_not_on
from graphattn.kernels.shared.tuning import HELD_TOKENS
from graphattn.ops.attention.native import steps as native_steps
from graphattn.ops.backends import choose_backend, wanted_backend


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
    wanted = wanted_backend(backend)
    if wanted in ("reference", "structured"):
        return None
    compiling = torch.compiler.is_compiling()
    if compiling and wanted != "triton":
        return None  # what is traced are operations of torch
    if like.device.type == "cpu" and wanted != "triton":
        reason = native_steps.why_no_step(like, cache_dtype)
        if reason is None:
            return "native"
        if wanted == "auto":
            return None
    elif wanted == "native":
        reason = native_steps.why_no_step(like, cache_dtype)
    if wanted == "native":
        assert reason is not None
        choose_backend(backend, {"native": reason}, like.device)
    if wanted == "auto" and like.device.type != "cuda":
        return None
    support = {
        "reference": None,
        "structured": None,
        "native": "it runs on CPUs",
        "triton": why_no_step(like, cache_dtype, window, top_k, softcap),
    }
    return "triton" if choose_backend(backend, support, like.device) == "triton" else None


def can_run_compiled(backend: str) -> bool:
    """Whether compiled code may do what it did in a step before, asked once a token."""
    return (
        not torch.compiler.is_compiling()
        and wanted_backend(backend) in ("auto", "native")
        and native_steps.is_here()
        and not native_steps.is_followed()
    )


def why_no_step(
    like: Tensor,
    cache_dtype: torch.dtype,
    window: int | None,
    top_k: int | None,
    softcap: float | None = None,
) -> str | None:
    """The reason why no kernel of "triton" takes a step; None where one does."""
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
    """:func:`graphattn.kernels.generation.step.window_step`, which has the arguments."""
    from graphattn.kernels.generation.step import window_step

    return window_step(query, key, value, **arguments)

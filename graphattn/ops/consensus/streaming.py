"""Generation by compiled code: which steps of a token it takes.

(Elsewhere a step is a few operations of torch; the layer states them.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphattn.ops.backends import choose_backend, wanted_backend
from graphattn.ops.consensus.native import steps as native_steps


def step_kernel(backend: str, like: Tensor, cache_dtype: torch.dtype) -> str | None:
    """ "native" where compiled code takes a step of targets like these, [*, H, D]; otherwise None.

    Raises:
        ValueError: it was asked for by name, and cannot.
    """
    wanted = wanted_backend(backend)
    if wanted not in ("auto", "native") or torch.compiler.is_compiling():
        return None  # what is traced are operations of torch
    reason = native_steps.why_no_step(like, cache_dtype)
    if reason is None:
        return "native"
    if wanted == "native":
        choose_backend(backend, {"native": reason}, like.device)
    return None


def can_run_compiled(backend: str) -> bool:
    """Whether compiled code may do what it did in a step before, asked once a token."""
    return (
        not torch.compiler.is_compiling()
        and wanted_backend(backend) in ("auto", "native")
        and native_steps.is_here()
        and not native_steps.is_followed()
    )

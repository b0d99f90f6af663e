"""Steps of generation: whether C++ code can run one.

Elsewhere a step is a few operations of torch in the layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphattn.ops.backends import refusal, wanted_backend, why_no_step


def step_kernel(backend: str, like: Tensor, cache_dtype: torch.dtype) -> str | None:
    """Return "native" if C++ code can run a step of targets like these, [*, H, D], else None.

    Raises:
        ValueError: "native" was asked for by name and cannot run the step.
    """
    wanted = wanted_backend(backend)
    if wanted not in ("auto", "native") or torch.compiler.is_compiling():
        return None  # torch.compile traces operations of torch
    reason = why_no_step(like, cache_dtype)
    if reason is not None and wanted == "native":
        raise refusal(wanted, reason)
    return "native" if reason is None else None

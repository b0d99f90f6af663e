"""Steps of generation by compiled code: which it takes.

(Elsewhere a step is a few operations of torch; the layer states them.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphattn.ops.backends import refusal, wanted_backend
from graphattn.ops.compiled_code import why_no_step


def step_kernel(backend: str, like: Tensor, cache_dtype: torch.dtype) -> str | None:
    """ "native" where compiled code takes a step of targets like these, [*, H, D]; otherwise None.

    Raises:
        ValueError: it was asked for by name, and cannot.
    """
    wanted = wanted_backend(backend)
    if wanted not in ("auto", "native") or torch.compiler.is_compiling():
        return None  # what is traced are operations of torch
    reason = why_no_step(like, cache_dtype)
    if reason is not None and wanted == "native":
        raise refusal(wanted, reason)
    return "native" if reason is None else None

"""Consensus by compiled code on a CPU: edges in the lanes of vectors, a block of them at a time.

`sums.py` is a step and its gradients, `steps.py` the row of a token that is generated, and
`calls.py` what both hand to C++.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphattn.kernels.cpu import library
from graphattn.ops.consensus.native.sums import gradients_of_sums, sums_over_edges

# Looked up once: torch.compile cannot look into how a library is loaded.
_WHY_NOT_HERE = library.why_not()

__all__ = ["gradients_of_sums", "sums_over_edges", "why_not"]


def why_not(like: Tensor) -> str | None:
    """The reason why compiled code does not take a case, whatever its graph; None where it does."""
    if like.device.type != "cpu":
        return f"it runs on CPUs, not on {like.device.type}"
    if not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() == 0:
        kind = type(like)
        if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
            return f"it reads the memory of plain tensors, which a {kind.__name__} is not"
    return _WHY_NOT_HERE

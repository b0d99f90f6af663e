"""Conditions under which compiled code of the CPU runs a call, asked by every engine."""

from __future__ import annotations

import torch
from torch import Tensor

from graphattn.kernels.cpu import library
from graphattn.ops.backends import is_followed, wanted_backend

# Looked up once: torch.compile cannot look into how a library is loaded.
_WHY_NOT_HERE = library.why_not()


def is_here() -> bool:
    """Whether there is a library of compiled code."""
    return _WHY_NOT_HERE is None


def why_not(like: Tensor) -> str | None:
    """The reason why compiled code does not take a call, whatever its graph; None where it does."""
    if like.device.type != "cpu":
        return f"it runs on CPUs, not on {like.device.type}"
    if not torch.compiler.is_compiling() and torch._C._get_tracing_state() is not None:
        return "a trace (torch.jit.trace) would not have its steps"
    if not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() == 0:
        kind = type(like)
        if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
            return f"it reads the memory of plain tensors, which a {kind.__name__} is not"
    return _WHY_NOT_HERE


def why_no_step(like: Tensor, *others: torch.dtype) -> str | None:
    """The reason why compiled code takes no step of queries like these; None where it does.

    `others` are the dtypes of what is cached.
    """
    if like.device.type != "cpu":
        return f"it runs on CPUs, not on {like.device.type}"
    if _WHY_NOT_HERE is not None:
        return _WHY_NOT_HERE
    if type(like) is not Tensor and type(like) is not torch.nn.Parameter:
        return f"it reads the memory of plain tensors, which a {type(like).__name__} is not"
    for dtype in others:
        if dtype is not like.dtype and torch.float64 in (dtype, like.dtype):
            return f"it does not mix {like.dtype} and a cache of {dtype}"
    if is_followed():
        return "the steps of an operation are looked into"
    return None


def may_repeat_step(backend: str) -> bool:
    """Whether compiled code may do what it did in a step before, asked once a token."""
    return (
        not torch.compiler.is_compiling()
        and wanted_backend(backend) in ("auto", "native")
        and is_here()
        and not is_followed()
    )

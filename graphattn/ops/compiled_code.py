"""Conditions under which the C++ code of the CPU can run a call; every engine asks them."""

from __future__ import annotations

import torch
from torch import Tensor

from graphattn.kernels.cpu import library
from graphattn.ops.backends import is_followed, wanted_backend

# Looked up once, because torch.compile cannot trace how a library is loaded.
_WHY_NOT_HERE = library.why_not()


def is_here() -> bool:
    """Whether the library of C++ code was built and can be loaded."""
    return _WHY_NOT_HERE is None


def why_not(like: Tensor) -> str | None:
    """The reason why C++ code cannot run a call with tensors like this one; None if it can."""
    if like.device.type != "cpu":
        return f"it runs on CPUs, not on {like.device.type}"
    if not torch.compiler.is_compiling() and torch._C._get_tracing_state() is not None:
        return "a trace (torch.jit.trace) would not record its operations"
    if not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() == 0:
        kind = type(like)
        if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
            return f"it reads the memory of plain tensors, which a {kind.__name__} is not"
    return _WHY_NOT_HERE


def why_no_step(like: Tensor, *others: torch.dtype) -> str | None:
    """The reason why C++ code cannot run a step of generation with queries like this one, or None.

    `others` are the dtypes of the cached tensors.
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
        return "torch.func, a trace or a mode of torch must see every operation"
    return None


def may_repeat_step(backend: str) -> bool:
    """Whether C++ code may run a step like one that it has run before; asked once per token."""
    return (
        not torch.compiler.is_compiling()
        and wanted_backend(backend) in ("auto", "native")
        and is_here()
        and not is_followed()
    )

"""Context for values that a graph stores, so that autograd, torch.func and fake tensors work."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from graphattn.late_imports import not_compiled

T = TypeVar("T")


def kept_for_training() -> AbstractContextManager[object]:
    """Leave inference mode and torch.func, so that tensors made inside can be used anywhere later.

    A graph computes some tensors once and stores them. If the first use is in inference mode or
    inside a function transform, autograd must still be able to use them afterwards.
    """
    if torch.compiler.is_compiling():
        return nullcontext()
    stack = ExitStack()
    if torch.is_inference_mode_enabled():
        stack.enter_context(torch.inference_mode(False))
    if torch._C._functorch.maybe_current_level() is not None:
        stack.enter_context(temporarily_clear_interpreter_stack())
    return stack


def made_for_training(make: Callable[..., T]) -> Callable[..., T]:
    """Let what a method makes be used in training, even if the first use is in inference mode.

    torch.compile does not trace into it, but calls it where a compiled layer is the first user.
    """

    @not_compiled()
    @wraps(make)
    def made(*arguments: Any) -> T:
        with kept_for_training():
            return make(*arguments)

    return made


def makes_fakes() -> bool:
    """Whether new tensors are fake, without memory; a graph must not store such tensors."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def usable_for_training(x: Tensor | None) -> Tensor | None:
    """Return x, or a copy if x is an inference tensor, which autograd could not save."""
    if x is None or torch.compiler.is_compiling() or not x.is_inference():
        return x  # torch.compile does not support is_inference()
    return x.clone()

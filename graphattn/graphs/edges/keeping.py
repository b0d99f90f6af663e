"""Values that graphs keep: made so that autograd, torch.func and fake tensors can live with it."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack


def kept_for_training() -> AbstractContextManager[object]:
    """Let values that are derived inside serve autograd later, also from inference mode.

    And outside of torch.func, if it is made within.
    """
    if torch.compiler.is_compiling():
        return nullcontext()
    stack = ExitStack()
    if torch.is_inference_mode_enabled():
        stack.enter_context(torch.inference_mode(False))
    if torch._C._functorch.maybe_current_level() is not None:
        stack.enter_context(temporarily_clear_interpreter_stack())
    return stack


def makes_fakes() -> bool:
    """Whether tensors that are made now are fake ones, without memory: no graph keeps these."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def usable_for_training(x: Tensor | None) -> Tensor | None:
    """x, or a copy if it was made in inference mode: autograd cannot save such a tensor."""
    if x is None or torch.compiler.is_compiling() or not x.is_inference():
        return x  # torch.compile knows no inference tensors
    return x.clone()

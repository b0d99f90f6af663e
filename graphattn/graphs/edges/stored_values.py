"""Values that a graph stores, made such that autograd can use them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from graphattn.kernels.shared.stored import kept_for_training
from graphattn.late_imports import not_compiled

T = TypeVar("T")


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


def usable_for_training(x: Tensor | None) -> Tensor | None:
    """Return x, or a copy if x is an inference tensor, which autograd could not save."""
    if x is None or torch.compiler.is_compiling() or not x.is_inference():
        return x  # torch.compile does not support is_inference()
    return x.clone()

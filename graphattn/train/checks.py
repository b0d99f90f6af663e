"""Checks of tensors that objectives, evaluations and diffusion share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def described(value: Any) -> str:
    """Return the dtype and the shape of a tensor, or the type of another value, for messages."""
    if isinstance(value, Tensor):
        return f"{value.dtype} of shape {list(value.shape)}"
    return "none" if value is None else type(value).__name__


def is_integer(value: Any) -> bool:
    """Return whether a value is a tensor of integers."""
    return isinstance(value, Tensor) and not (
        value.is_floating_point() or value.is_complex() or value.dtype == torch.bool
    )


def check_range(values: Tensor, size: int, name: str = "tokens", note: str = "") -> None:
    """Raise a ValueError for values outside 0 .. size - 1, on a CPU, where reading is cheap."""
    if values.device.type != "cpu" or values.numel() == 0:
        return
    least, most = (int(value) for value in values.aminmax())
    if least < 0 or most >= size:
        wrong = least if least < 0 else most
        raise ValueError(f"{name} must be 0 .. {size - 1}{note}, got {wrong}")


def check_masked_logits(logits: Any, tokens: Tensor, masked: Any) -> None:
    """Raise a ValueError unless there are logits for tokens, and a mask of the same shape."""
    if not isinstance(logits, Tensor) or not logits.is_floating_point() or logits.dim() == 0:
        raise ValueError(
            f"logits must be a floating-point tensor [*, vocab_size], got {described(logits)}"
        )
    if not isinstance(masked, Tensor) or masked.dtype != torch.bool:
        raise ValueError(f"masked must be a bool tensor, got {described(masked)}")
    if logits.shape[:-1] != tokens.shape or masked.shape != tokens.shape:
        raise ValueError(
            "logits, tokens and masked must have shapes [*, vocab_size], [*] and [*], "
            f"got {list(logits.shape)}, {list(tokens.shape)} and {list(masked.shape)}"
        )

"""The softcap of logits in Gemma 2, which bounds them: ``softcap * tanh(logits / softcap)``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphattn.graphs.arguments import as_float


def as_softcap(softcap: Any, name: str = "softcap") -> float | None:
    """A number > 0, or None; a ValueError otherwise."""
    if softcap is None:
        return None
    softcap = as_float(name, softcap, positive=True)
    if softcap > torch.finfo(torch.float32).max:  # infinity * tanh(0) is NaN
        raise ValueError(f"{name} must be a number of float32, got {softcap}")
    return softcap


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Logits between -softcap and softcap; unchanged if `softcap` is None.

    Far beyond the cap, tanh is 1 to the last bit, so many logits are equal. All backends in torch
    use this function, so that logits are equal either in all of them or in none.
    """
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def slope(found: Tensor, softcap: float) -> Tensor:
    """The derivative of :func:`capped`, from its result; 0 where the cap is reached."""
    return 1 - (found / softcap).square()

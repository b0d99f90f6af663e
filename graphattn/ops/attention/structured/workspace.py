"""Memory that one group of tiles after another works in.

What a group makes and nobody keeps is some megabytes. Freed and allocated again, it goes back to
the operating system and returns as fresh pages, which costs more than the arithmetic on it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Workspace:
    """Room by name; whoever asks again for the same name gets the same memory."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def room(self, name: str, like: Tensor, *shape: int) -> Tensor:
        """Room for [G, H, n, D], of the type of `like` and, unless told, of its shape.

        It lies in memory as [G, n, H, D], which is how tokens lie in most tensors.
        """
        G, H, n, D = shape or like.shape
        return self.matrices(name, like, G, n, H, D).transpose(1, 2)

    def matrices(self, name: str, like: Tensor, *shape: int) -> Tensor:
        """Room for a contiguous tensor."""
        size = math.prod(shape)
        kept = self._kept.get(name)
        if kept is None or len(kept) < size:
            kept = self._kept[name] = torch.empty(size, dtype=like.dtype, device=like.device)
        return kept[:size].view(shape)

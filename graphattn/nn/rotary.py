"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graphattn.graphs.arguments import as_float, as_int
from graphattn.nn.files.config import Configured
from graphattn.ops.rotary import can_rotate, rotate, rotate_both, rotate_by_torch

Rotation = tuple[Tensor, Tensor]  # cos and sin of the angles at some positions, [*, N, 1, D / 2]


class RotaryEmbedding(Configured, nn.Module):
    r"""Rotates the features of every head by angles proportional to the position of the token.

    .. math::
        \tilde u = u \odot \cos\theta(p) + (P u) \odot \sin\theta(p), \qquad
        \theta(p)_k = p \, B^{-2k / D}

    in the half-split convention: feature k is rotated together with feature k + D / 2, and P swaps
    the two halves and changes the sign of the new first half (RoFormer; Eq. 41-42 of the consensus
    paper; the layout of Llama and GPT-NeoX). A rotation changes neither norms nor distances between
    tokens at equal positions. There are no parameters.

    Args:
        dim: D, the number of features per head; it must be even.
        base: B, a number > 0.

    Shapes:
        - **x**: [*, N, H, D]
        - **positions**: [N] or [*, N], integers or floats; 0 .. N-1 if None
        - **output**: [*, N, H, D]

    Raises:
        ValueError: if `dim` is odd or too small, if `base` <= 0, or if shapes do not fit.

    Example:
        >>> import torch, graphattn as ga
        >>> rotary = ga.nn.RotaryEmbedding(2)
        >>> rotary(torch.tensor([1.0, 0.0]).expand(3, 1, 2)).squeeze()  # angles 0, 1, 2
        tensor([[ 1.0000,  0.0000],
                [ 0.5403,  0.8415],
                [-0.4161,  0.9093]])
    """

    def __init__(self, dim: int, *, base: float = 10000.0) -> None:
        super().__init__()
        self.dim = as_int("dim", dim, 2)
        if self.dim % 2:
            raise ValueError(f"dim must be even for a rotary embedding, got {dim}")
        self.base = as_float("base", base, positive=True)

    def forward(self, x: Tensor, positions: Tensor | None = None, *, back: bool = False) -> Tensor:
        """Rotate `x`, or with ``back=True`` rotate it back (the transpose)."""
        if x.dim() < 3 or x.shape[-1] != self.dim:
            raise ValueError(f"x must have shape [*, N, H, {self.dim}], got {list(x.shape)}")
        tokens = x.shape[-3]
        if positions is None:
            positions = torch.arange(tokens, device=x.device)
        check_positions(positions, x.shape[:-2])
        return self.turn(x, self.rotation(positions.to(x.device), x.dtype), back=back)

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Return the rotation of features of this dtype at `positions` [*, N], for :meth:`turn`."""
        # Angles in float64: at position 1,000,000 a float32 angle is off by 0.03.
        k = torch.arange(self.dim // 2, dtype=torch.float64, device=positions.device)
        frequency = self.base ** (-2 * k / self.dim)
        angle = (positions[..., None] * frequency)[..., None, :]
        dtype = torch.promote_types(dtype, torch.float32)
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def turn(self, x: Tensor, rotation: Rotation, *, back: bool = False) -> Tensor:
        """`x` [*, N, H, D] rotated as :meth:`rotation` says, or rotated back."""
        cos, sin = rotation
        if can_rotate(x, cos, sin):
            return rotate(x, cos, sin, back=back)
        return rotate_by_torch(x, cos, -sin if back else sin)

    def turn_both(self, x: Tensor, other: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """:meth:`turn` of two tensors of the same tokens, in one call where that is faster."""
        cos, sin = rotation
        if self.is_plain() and x.shape[:-2] == other.shape[:-2]:
            if can_rotate(x, cos, sin) and can_rotate(other, cos, sin):
                return rotate_both(x, other, cos, sin)
            if x.shape[-3] == 1:  # calls of torch take longer than arithmetic
                both = rotate_by_torch(torch.cat([x, other], dim=-2), cos, sin)
                rotated, rotated_other = both.split((x.shape[-2], other.shape[-2]), dim=-2)
                return rotated, rotated_other
        return self.turn(x, rotation), self.turn(other, rotation)

    def is_plain(self) -> bool:
        """Whether :meth:`turn` and :meth:`rotation` are what is written here."""
        own = vars(self)  # torch 2.11 compiles "in", and no other operation on it
        return type(self) is RotaryEmbedding and "turn" not in own and "rotation" not in own

    def __repr__(self) -> str:
        base = int(self.base) if self.base.is_integer() else self.base
        return f"RotaryEmbedding({self.dim}, base={base})"


def check_positions(positions: object, shape: torch.Size) -> None:
    """Check the positions of tokens [*, N]: a tensor of that shape, or [N]."""
    if not isinstance(positions, Tensor):
        raise ValueError(f"positions must be a tensor, got {positions!r}")
    if positions.shape not in (shape[-1:], shape):
        raise ValueError(
            f"positions must have shape {list(shape[-1:])} or {list(shape)}, "
            f"got {list(positions.shape)}"
        )


def as_rotary(rope: object, head_dim: int) -> RotaryEmbedding | None:
    """Make the rotary embedding that the layer option `rope` asks for, or None."""
    if isinstance(rope, RotaryEmbedding):
        if rope.dim != head_dim:
            raise ValueError(f"rope must rotate {head_dim} features per head, got {rope!r}")
        return rope
    if not isinstance(rope, bool):
        raise ValueError(
            "rope must be True, False or a RotaryEmbedding (or 'isometric' in consensus layers), "
            f"got {rope!r}"
        )
    if rope and head_dim % 2:
        raise ValueError(f"rope needs an even number of features per head, got {head_dim}")
    return RotaryEmbedding(head_dim) if rope else None

"""Heads of image models: from features to logits of classes."""

from __future__ import annotations

from torch import nn


def make_head(dim: int, num_classes: int) -> nn.Module:
    """Make a linear map to `num_classes`, initialised; for 0 classes the identity.

    Example:
        >>> from graphattn.models.vision.heads import make_head
        >>> make_head(64, 10), make_head(64, 0)
        (Linear(in_features=64, out_features=10, bias=True), Identity())
    """
    if not num_classes:
        return nn.Identity()
    head = nn.Linear(dim, num_classes)
    draw_head(head)
    return head


def draw_head(head: nn.Module | None) -> None:
    """Initialise the head as DeiT and Swin do: normally distributed with deviation 0.02, biases 0.

    (Theirs is truncated at +-2, a hundred standard deviations, which makes no difference.)
    """
    if isinstance(head, nn.Linear):
        nn.init.trunc_normal_(head.weight, std=0.02)
        nn.init.zeros_(head.bias)

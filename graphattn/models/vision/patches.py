"""The two ends of image models: from images to tokens, and from features to logits of classes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from graphattn.graphs.arguments import as_int

Size = int | tuple[int, int]  # of a square, or (height, width)


class PatchEmbedding(nn.Module):
    """Converts images to tokens: leading tokens, then one token per patch in row-major order.

    Args:
        image_size: size of the images for the learned positions, (height, width) in pixels.
        patch_size: (height, width) in pixels; divides `image_size`.
        channels: number of channels of the images.
        dim: width of the tokens.
        class_token: whether the first token is a learned class token.
        distillation_token: whether a learned distillation token follows it.

    Shapes:
        - **images**: [*, channels, height, width]
        - **output**: [*, leading + patches, dim]

    Raises:
        ValueError: if an argument is not allowed; the message names it and says what is allowed.
    """

    def __init__(
        self,
        image_size: tuple[int, int],
        patch_size: tuple[int, int],
        *,
        channels: int,
        dim: int,
        class_token: bool = True,
        distillation_token: bool = False,
    ) -> None:
        super().__init__()
        self.image_size, self.patch_size, self.channels = image_size, patch_size, channels
        self.grid = self.grid_of(image_size, "image_size")
        self.projection = nn.Conv2d(channels, dim, patch_size, patch_size)
        self.leading = int(class_token) + int(distillation_token)
        tokens = self.leading + math.prod(self.grid)
        self.class_token = nn.Parameter(torch.empty(dim)) if class_token else None
        self.distillation_token = nn.Parameter(torch.empty(dim)) if distillation_token else None
        self.positions = nn.Parameter(torch.empty(tokens, dim))
        self._draw()

    def reset_parameters(self) -> None:
        """Initialise every parameter again."""
        self.projection.reset_parameters()
        self._draw()

    def _draw(self) -> None:
        """Initialise tokens and positions as DeiT does."""
        for drawn in (self.class_token, self.distillation_token, self.positions):
            if drawn is not None:
                nn.init.trunc_normal_(drawn, std=0.02)

    def grid_of(self, image_size: tuple[int, int], name: str) -> tuple[int, int]:
        """Return the number of patches of an image, (down, right)."""
        (height, width), (down, right) = image_size, self.patch_size
        if height % down or width % right:
            raise ValueError(
                f"{name} must be a multiple of the patch size {list(self.patch_size)} "
                f"(height, width), got {list(image_size)}"
            )
        return height // down, width // right

    def checked(self, images: Any, *, interpolate: bool) -> tuple[int, int]:
        """Return the size of images in pixels, or raise a ValueError if it does not fit."""
        check_images(images, self.channels, self.projection.weight.dtype)
        size = images.shape[-2], images.shape[-1]
        if size != self.image_size and not interpolate:
            raise ValueError(
                f"images must have {list(self.image_size)} pixels (image_size: height, width), got "
                f"{list(size)}: resize them, or pass interpolate_pos_encoding=True"
            )
        return size

    def forward(self, images: Tensor, *, interpolate_pos_encoding: bool = False) -> Tensor:
        """Return tokens [*, leading + patches, dim]."""
        size = self.checked(images, interpolate=interpolate_pos_encoding)
        grid = self.grid_of(size, "images")
        several = images.dim() == 4
        lead = images.shape[:-3]
        if not several:
            images = images.reshape(math.prod(lead), *images.shape[-3:])
        x = self.projection(images).flatten(2).mT
        given = (self.class_token, self.distillation_token)
        leading = [token.expand(len(x), 1, -1) for token in given if token is not None]
        if leading:
            x = torch.cat([*leading, x], dim=1)
        x = x + self.positions_of(grid)
        return x if several else x.view(*lead, *x.shape[1:])

    def positions_of(self, grid: tuple[int, int]) -> Tensor:
        """Return learned positions, interpolated if the grid is not the model's own.

        The interpolation is bicubic, between the centres of pixels, as transformers'
        ``interpolate_pos_encoding``.
        """
        if grid == self.grid:
            return self.positions
        leading, of_patches = self.positions.split([self.leading, math.prod(self.grid)])
        plane = of_patches.view(1, *self.grid, -1).permute(0, 3, 1, 2)
        plane = functional.interpolate(plane, size=grid, mode="bicubic", align_corners=False)
        return torch.cat([leading, plane[0].flatten(1).mT])

    def extra_repr(self) -> str:
        """Return the sizes, (height, width)."""
        return f"image_size={self.image_size}, patch_size={self.patch_size}"


def check_images(images: Any, channels: int, dtype: torch.dtype) -> None:
    """Check that images are [*, channels, height, width] and of the model's dtype.

    With autocast, other floating-point dtypes are allowed, too.
    """
    if (
        not isinstance(images, Tensor)
        or images.dim() < 3
        or images.shape[-3] != channels
        or 0 in images.shape[-2:]
    ):
        got = list(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise ValueError(
            f"images must be a tensor of shape [*, {channels}, height, width], got {got}"
        )
    if not images.is_floating_point() or (
        images.dtype != dtype and not torch.is_autocast_enabled(images.device.type)
    ):
        raise ValueError(
            f"images must have the model's dtype {dtype}, got {images.dtype}: convert them (bytes "
            "to normalised numbers, as in training)"
        )


def as_size(name: str, value: Any) -> tuple[int, int]:
    """Return `value`, an integer or a pair (height, width), as a pair."""
    if isinstance(value, list | tuple):
        if len(value) != 2:
            raise ValueError(f"{name} must be an integer or (height, width), got {value!r}")
        return as_int(f"{name}[0]", value[0], 1), as_int(f"{name}[1]", value[1], 1)
    side = as_int(name, value, 1)
    return side, side


def make_head(dim: int, num_classes: int) -> nn.Module:
    """Make a linear map to `num_classes`, initialised; for 0 classes the identity."""
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

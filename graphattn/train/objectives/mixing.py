"""Mixup and CutMix: two images of a batch become one, and so do their labels."""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor
from torch.nn import functional

from graphattn.graphs.arguments import as_float, as_int
from graphattn.ops.inputs import compute_dtype
from graphattn.train.checks import check_range, described, is_integer

CUTMIX_PROBABILITY = 0.5  # if both are on; DeiT's recipe


def mix_images(
    images: Tensor,
    label: Tensor,
    num_classes: int,
    *,
    mixup: float = 0.0,
    cutmix: float = 0.0,
    generator: Generator | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Mix every image of a batch with another one, by Mixup or CutMix.

    One share lambda is drawn for the batch, from Beta(alpha, alpha). Mixup takes the weighted mean
    of two images, and CutMix pastes a box of one image into the other:

    .. math::
        x = \lambda x_1 + (1 - \lambda) x_2 \quad \text{or} \quad x = M x_1 + (1 - M) x_2, \qquad
        y = \lambda y_1 + (1 - \lambda) y_2

    The box has the share 1 - lambda of the area, around a uniformly drawn pixel. After the box is
    clipped at the borders of the image, lambda is the share of pixels that are still of
    :math:`x_1`, exactly. If both are on, each batch uses one of them, with equal probability. The
    first image is mixed with the last one, the second with the last but one, and so on, as in DeiT:
    the images should be in random order.

    Source: Zhang et al. (2018), Eq. 1, for Mixup; Yun et al. (2019), Eq. 1 and 2, and Algorithm A1,
        for CutMix; Touvron et al. (2021), Table 9, for both together.

    Args:
        images: floating-point images [B, C, H, W]; they are not changed.
        label: their classes, integers [B].
        num_classes: K, the number of classes.
        mixup: alpha of Mixup; 0 for no Mixup. DeiT and the GKA paper have 0.8.
        cutmix: alpha of CutMix; 0 for no CutMix. DeiT and the GKA paper have 1.0.
        generator: source of the random numbers; None for torch's default generator of the CPU.

    Returns:
        The mixed images [B, C, H, W], and their targets [B, K], which are probabilities: at least
        float32.

    Raises:
        ValueError: if an argument is not allowed; the message names it and says what is allowed.

    Example:
        >>> import torch, graphattn as ga
        >>> images, label = torch.rand(4, 3, 8, 8), torch.tensor([0, 1, 2, 1])
        >>> mixed, target = ga.train.mix_images(images, label, 3, mixup=0.8, cutmix=1.0)
        >>> mixed.shape, target.shape
        (torch.Size([4, 3, 8, 8]), torch.Size([4, 3]))
        >>> logits = torch.randn(4, 3)
        >>> loss = torch.nn.functional.cross_entropy(logits, target, label_smoothing=0.1)
    """
    mixup, cutmix = check_alphas(mixup, cutmix)
    num_classes = as_int("num_classes", num_classes, 2)
    if not isinstance(images, Tensor) or images.dim() != 4 or not images.is_floating_point():
        raise ValueError(
            "images must be a floating-point tensor [B, C, H, W], got " + described(images)
        )
    if not is_integer(label) or label.shape != images.shape[:1]:
        raise ValueError(
            f"label must be an integer tensor [{len(images)}], one class per image, got "
            + described(label)
        )
    check_range(label, num_classes, "label")
    one_hot = functional.one_hot(label.long(), num_classes)
    target = one_hot.to(compute_dtype(images.dtype))
    if not (mixup or cutmix) or not len(images):
        return images, target
    device = torch.device("cpu") if generator is None else generator.device
    is_cut = cutmix > 0
    if mixup and cutmix:
        drawn = torch.rand((), generator=generator, device=device)
        is_cut = float(drawn) < CUTMIX_PROBABILITY
    alpha = torch.full((2,), cutmix if is_cut else mixup, device=device)
    # Beta(a, a) is the first coordinate of Dirichlet(a, a); torch.distributions.Beta draws it in
    # this way, too, but takes no generator.
    share = float(torch._sample_dirichlet(alpha, generator)[0])
    others = images.flip(0)
    if is_cut:
        height, width = images.shape[-2:]
        rows = _side(height, share, generator, device)
        columns = _side(width, share, generator, device)
        mixed = images.clone()
        mixed[..., rows, columns] = others[..., rows, columns]
        cut = (rows.stop - rows.start) * (columns.stop - columns.start)
        share = 1 - cut / (height * width)
    else:
        mixed = torch.lerp(others, images, share)
    return mixed, torch.lerp(target.flip(0), target, share)


def check_alphas(mixup: float, cutmix: float) -> tuple[float, float]:
    """Return both alphas as floats; a ValueError if one is not a number >= 0."""
    return (
        as_float("mixup", mixup, positive=False),
        as_float("cutmix", cutmix, positive=False),
    )


def _side(length: int, share: float, generator: Generator | None, device: torch.device) -> slice:
    """Draw one side of the box, clipped at the borders of the image."""
    half = int(length * math.sqrt(1 - share)) // 2
    center = int(torch.randint(length, (), generator=generator, device=device))
    return slice(max(center - half, 0), min(center + half, length))

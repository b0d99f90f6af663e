"""Models by name: the papers' shapes, and small ones for a laptop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from graphattn.graphs.arguments import as_choice


@dataclass(frozen=True)
class Preset:
    """What a name stands for.

    Attributes:
        model: name of the class, in :mod:`graphattn.models`.
        arguments: of its constructor.
        about: one line: what it is for, and where the shapes are from.
    """

    model: str
    arguments: dict[str, Any] = field(repr=False)
    about: str


_PRESETS: dict[str, Preset] = {}

# SwinTransformer: Liu et al. (2021), Section 3.3; stochastic depth as trained on ImageNet-1K
# (Appendix A2.1).


def _swin(size: str, dim: int, depths: tuple[int, ...], drop_path: float, **other: Any) -> Preset:
    arguments = {
        "image_size": 224,
        "patch_size": 4,
        "num_classes": 1000,
        "dim": dim,
        "depths": depths,
        "heads": tuple(dim * 2**stage // 32 for stage in range(4)),
        "window_size": 7,
        "drop_path": drop_path,
        **other,
    }
    pixels, classes = arguments["image_size"], arguments["num_classes"]
    about = f"Swin-{size}: {pixels} pixels, patches of 4, {classes:,} classes"
    return Preset("SwinTransformer", arguments, about)


_CIFAR = {"image_size": 32, "num_classes": 10, "window_size": 4}
_PRESETS |= {
    "swin-tiny": _swin("T", 96, (2, 2, 6, 2), 0.2),
    "swin-small": _swin("S", 96, (2, 2, 18, 2), 0.3),
    "swin-base": _swin("B", 128, (2, 2, 18, 2), 0.5),
    "swin-small-cifar": _swin("S", 96, (2, 2, 18, 2), 0.3, **_CIFAR),
}


def presets() -> dict[str, Preset]:
    """Return all presets by name, in the order of the models.

    ``from_preset`` of a model makes one of them.

    Example:
        >>> import graphattn as ga
        >>> ga.models.presets()["swin-tiny"].model
        'SwinTransformer'
    """
    return dict(_PRESETS)


def preset(name: str, model: str) -> dict[str, Any]:
    """The arguments of a preset of one class of models."""
    own = tuple(key for key, found in _PRESETS.items() if found.model == model)
    if name in _PRESETS and name not in own:
        raise ValueError(
            f"name must be a preset of {model}, got {name!r}, which is a preset of "
            f"{_PRESETS[name].model}; this class has {', '.join(own) or 'none'}"
        )
    as_choice("name", name, own)
    return dict(_PRESETS[name].arguments)

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
        of_mixer: further arguments that a mixer comes with, by its name.
    """

    model: str
    arguments: dict[str, Any] = field(repr=False)
    about: str
    of_mixer: dict[str, dict[str, Any]] = field(repr=False, default_factory=dict)


_PRESETS: dict[str, Preset] = {}

# VisionTransformer: DeiT (Touvron et al., 2021), stochastic depth as in Projection-Free
# Transformers, Section 4.1; windows and neighbours as in Krause Synchronization Transformers.


def _deit(size: str, dim: int, heads: int, drop_path: float) -> Preset:
    schedule = [8, 9, 9, 10, 11, 12, 12, 13, 14, 15, 15, 16]  # top_k_schedule(8, 16, 12)
    return Preset(
        "VisionTransformer",
        {
            "image_size": 224,
            "patch_size": 16,
            "num_classes": 1000,
            "dim": dim,
            "depth": 12,
            "heads": heads,
            "drop_path": drop_path,
        },
        f"DeiT-{size}: 224 pixels, patches of 16, 1,000 classes",
        _of_vision_mixers(radius=2, krause={"top_k": schedule}),
    )


def _of_vision_mixers(radius: int, krause: dict[str, Any]) -> dict[str, dict[str, Any]]:
    windows = {"radius": radius}
    patches_alone = {"class_token": False, "pooling": "mean"}
    safe = {"step_size": "auto"}
    return {
        "krause": {**windows, "mixer_options": krause},
        "dot-window": windows,
        "consensus": {**patches_alone, "mixer_options": safe},
        "mix": {**patches_alone, "mixer_options": safe},
        "gka-consensus": {**patches_alone, "mixer_options": safe},
        "krause-consensus": {**windows, **patches_alone, "mixer_options": {**krause, **safe}},
    }


_PRESETS["deit-tiny"] = _deit("Ti", 192, 3, 0.1)
_PRESETS["deit-small"] = _deit("S", 384, 6, 0.1)
_PRESETS["deit-base"] = _deit("B", 768, 12, 0.2)
_PRESETS["digits"] = Preset(
    "VisionTransformer",
    {
        "image_size": 8,
        "patch_size": 2,
        "channels": 1,
        "num_classes": 10,
        "dim": 64,
        "depth": 3,
        "heads": 4,
        "mlp_ratio": 2.0,
    },
    "a laptop's first vision model: the 8 x 8 digits of scikit-learn",
    _of_vision_mixers(radius=1, krause={"top_k": [2, 3, 4], "init_sigma": 2.5}),
)


def presets() -> dict[str, Preset]:
    """Return all presets by name, in the order of the models.

    ``from_preset`` of a model makes one of them.

    Example:
        >>> import graphattn as ga
        >>> ga.models.presets()["deit-tiny"].model
        'VisionTransformer'
    """
    return dict(_PRESETS)


def preset(name: str, model: str, mixer: Any = None) -> dict[str, Any]:
    """The arguments of a preset of one class of models, with what a mixer comes with."""
    own = tuple(key for key, found in _PRESETS.items() if found.model == model)
    if name in _PRESETS and name not in own:
        raise ValueError(
            f"name must be a preset of {model}, got {name!r}, which is a preset of "
            f"{_PRESETS[name].model}; this class has {', '.join(own) or 'none'}"
        )
    as_choice("name", name, own)
    found = _PRESETS[name]
    mixer = found.arguments.get("mixer") if mixer is None else mixer
    further = found.of_mixer.get(mixer, {}) if isinstance(mixer, str) else {}
    return {**found.arguments, **further}

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


_PRESETS: dict[str, Preset] = {
    # ProteinModel
    "protein-structure-1m": Preset(
        "ProteinModel",
        {
            "dim": 128,
            "depth": 4,
            "heads": 4,
            "mixer": "mix",
            "mixer_options": {"edge_hidden": 64},
            "neighbors": 16,
            "window": 4,
        },
        "proteins along the chain and in space; trains on a laptop",
    ),
}


def presets() -> dict[str, Preset]:
    """Return all presets by name, in the order of the models.

    ``from_preset`` of a model makes one of them.

    Example:
        >>> import graphattn as ga
        >>> sorted({preset.model for preset in ga.models.presets().values()})
        []
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

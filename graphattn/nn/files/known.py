"""The classes of graphattn that a file may name, and how they are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Described:
    """A module whose `config` contains the arguments to make another one like it."""

    state_dict: Callable[..., Any]

    @property
    def config(self) -> dict[str, Any]:
        raise NotImplementedError


# The only classes that a file may name.
KNOWN: dict[str, type[Any]] = {}


def class_name(cls: type) -> str:
    """Return the name of a class; classes outside graphattn get their module as a prefix."""
    return (
        cls.__name__ if KNOWN.get(cls.__name__) is cls else f"{cls.__module__}.{cls.__qualname__}"
    )


def build(description: dict[str, Any], kind: type | None = None) -> Any:
    """Make the module that a dict with its class and arguments describes.

    Args:
        description: a dict made by :func:`plain`.
        kind: the class to make instead of the named one.

    Raises:
        ValueError: if no class is named, or the class is not one of graphattn.
    """
    arguments = {name: value for name, value in description.items() if name != "class"}
    if kind is None:
        kind = KNOWN.get(description["class"]) if isinstance(description["class"], str) else None
    if kind is None:
        raise ValueError(
            f"class must be a class of graphattn, got {description['class']!r}, which cannot be "
            "made from files alone: make the model in code and load its state dict"
        )
    return kind(**arguments)

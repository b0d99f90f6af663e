"""The classes of graphattn by name: what a file may ask for, and how it is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Described:
    """A module that tells the arguments it was made with, from which its like can be made."""

    state_dict: Callable[..., Any]

    @property
    def config(self) -> dict[str, Any]:
        raise NotImplementedError


# The only classes that a file may ask for.
KNOWN: dict[str, type[Any]] = {}


def class_name(cls: type) -> str:
    """A class of graphattn by its name, any other with its module, so that neither is mistaken."""
    return (
        cls.__name__ if KNOWN.get(cls.__name__) is cls else f"{cls.__module__}.{cls.__qualname__}"
    )


def build(description: dict[str, Any], kind: type | None = None) -> Any:
    """The module that a dict of class and arguments describes, made by a class of graphattn.

    Args:
        description: as :func:`plain` writes it.
        kind: the class to make, in place of the one that is named.

    Raises:
        ValueError: no class is named, or none of graphattn's.
    """
    arguments = {name: value for name, value in description.items() if name != "class"}
    if kind is None:
        kind = KNOWN.get(description["class"]) if isinstance(description["class"], str) else None
    if kind is None:
        raise ValueError(
            f"class must be one of graphattn's, got {description['class']!r}, which no file can "
            "bring along: make the model in code and load its state dict"
        )
    return kind(**arguments)

"""Checks of the arguments `layers` and `graph`, which all plug-ins have."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from graphattn.graphs.arguments import as_int


def numbers_of_layers(layers: Any) -> set[int]:
    """Return the layer numbers in `layers`, without checking that the model has these layers.

    Raises: ValueError: if one of them is not a number.
    """
    several = isinstance(layers, Iterable) and not isinstance(layers, str)
    try:
        return {as_int("layers", n, -(2**63)) for n in (layers if several else [layers])}
    except (ValueError, TypeError):
        raise ValueError(
            "layers must be a number, a list or range of numbers, or None for all layers, got "
            f"{layers!r}"
        ) from None


def check_takes_two(graph: Any) -> None:
    """Check that a function for `graph` takes (num_targets, num_sources).

    Raises: ValueError: if its signature does not allow that. A function without a signature passes.
    """
    try:
        signature = inspect.signature(graph)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(1, 1)
    except TypeError:
        name = getattr(graph, "__name__", type(graph).__name__)
        raise ValueError(
            "graph must be a function of two arguments, (num_targets, num_sources), that returns "
            f"a TokenGraph, got {name}{signature}"
        ) from None

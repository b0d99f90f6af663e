"""Checks of the arguments that all plug-ins have: `layers` and `graph`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from graphattn.graphs.arguments import as_int


def numbers_of_layers(layers: Any) -> set[int]:
    """The numbers in `layers`, a number or several; whether a model has them is not asked here.

    Raises:
        ValueError: for names and what else is no number.
    """
    several = isinstance(layers, Iterable) and not isinstance(layers, str)
    try:
        return {as_int("layers", n, -(2**63)) for n in (layers if several else [layers])}
    except (ValueError, TypeError):
        raise ValueError(
            f"layers must be numbers (a list or range) or None for all, got {layers!r}"
        ) from None


def check_takes_two(graph: Any) -> None:
    """A function for `graph` must take (num_targets, num_sources).

    Raises:
        ValueError: if its signature says that it does not; functions without one are believed.
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

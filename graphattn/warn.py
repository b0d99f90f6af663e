"""Warnings that name the line of the user's code, however deep in the library they arise."""

from __future__ import annotations

import sys
import warnings
from types import FrameType


def warn_caller(message: str) -> None:
    """Warn, with the line outside of graphattn and torch that called them."""
    frame: FrameType | None = sys._getframe()
    level = 1
    while frame is not None and _is_inside(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def _is_inside(frame: FrameType) -> bool:
    name: str = frame.f_globals.get("__name__", "")
    return name.split(".")[0] in ("graphattn", "torch", "torch_geometric")

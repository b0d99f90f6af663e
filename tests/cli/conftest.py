"""Commands draw pictures that no test of this folder looks at, and wait for disks."""

from __future__ import annotations

import os
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def few_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of the time would go into laying out and filling in pictures.

    Fixtures of whole modules come before, and what these draw is drawn in full.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    in_full = Figure.savefig

    def savefig(self: Figure, *file: Any, **options: Any) -> None:
        self.set_layout_engine("none")
        in_full(self, *file, **{**options, "dpi": 24})

    monkeypatch.setattr(Figure, "savefig", savefig)


@pytest.fixture(autouse=True)
def no_waiting_for_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs and sweeps wait until a disk has their files, which only matters when power fails."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)

"""Axes of figures that belong to no window, for what the tests of this folder draw."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib", reason="figures need the extra `plots`")

from matplotlib.axes import Axes
from matplotlib.figure import Figure


@pytest.fixture
def ax() -> Axes:
    return Figure().add_subplot()

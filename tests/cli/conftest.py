"""Commands draw pictures that no test of this folder looks at, and wait for disks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PHONE, MARGIN = 390, 16  # CSS pixels: the width of a phone, and of either margin of a report


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


@pytest.fixture
def in_an_empty_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch) -> None:
    """Run commands in a folder that nothing else uses."""
    monkeypatch.chdir(tmp_path_factory.mktemp("cwd"))


@pytest.fixture(autouse=True)
def no_waiting_for_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs and sweeps wait until a disk has their files, which only matters when power fails."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


class OnAPhone(list["Figure"]):
    """The figures that a command draws."""

    def smallest_label(self) -> float:
        """Return the height of the smallest letters in CSS pixels, computed from the figures."""
        from matplotlib.text import Text

        assert self
        sizes = []
        for figure in self:
            inches = figure.get_figwidth()
            shown = min(96 * inches, PHONE - 2 * MARGIN)
            sizes += [
                text.get_fontsize() / 72 * shown / inches
                for text in figure.findobj(Text)
                if text.get_visible() and text.get_text().strip()
            ]
        return min(sizes)


@pytest.fixture
def on_a_phone(few_dots: None, monkeypatch: pytest.MonkeyPatch) -> OnAPhone:
    """Collect the figures that are saved."""
    matplotlib = pytest.importorskip("matplotlib.figure", reason="figures need the extra `plots`")
    figures, save = OnAPhone(), matplotlib.Figure.savefig

    def savefig(self: Figure, *file: Any, **options: Any) -> None:
        figures.append(self)
        save(self, *file, **options)

    monkeypatch.setattr(matplotlib.Figure, "savefig", savefig)
    return figures

"""Pictures of the documentation: every function of ga.plot has one, and all can be read."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="figures need the extra `plots`")

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import graphattn as ga

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))

import pictures
import plots


def drawn_inside(figure: Figure) -> bool:
    """Whether the pixels inside some axes differ, apart from ticks, labels and frames."""
    for text in [*figure.texts, *figure.legends]:
        text.set_visible(False)
    for ax in figure.axes:
        ax.axis("off")
        ax.set_visible(not hasattr(ax, "_colorbar"))
        for text in [*ax.texts, *filter(None, [ax.get_legend()])]:
            text.set_visible(False)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return bool(np.ptp(np.asarray(canvas.buffer_rgba()), axis=(0, 1)).any())


@pytest.mark.parametrize("name", ga.plot.__all__)
def test_the_example_of_every_function_draws_one_figure_that_a_phone_can_show(name, capsys):
    figure = plots.drawn_by_example(getattr(ga.plot, name))
    assert pictures.unreadable(figure) == []
    assert drawn_inside(figure)


def test_every_function_has_a_thumbnail_with_its_name_and_a_sentence():
    page = plots.markdown()
    for name in ga.plot.__all__:
        assert page.count(f"_figures/plot_{name}.png") == 1
        about = getattr(ga.plot, name).__doc__.split("\n\n")[0]
        assert f"{{func}}`{name} <graphattn.plot.{name}>`: {about}" in page


def without() -> None:
    """Draw something that has no example."""


def of_nothing() -> None:
    """Draw something.

    >>> import matplotlib.pyplot as plt
    >>> figure = plt.figure()
    >>> ax = figure.subplots()
    """


def of_two() -> None:
    """Draw something.

    >>> import matplotlib.pyplot as plt
    >>> lines = plt.figure().subplots().plot([1, 2])
    >>> lines = plt.figure().subplots().plot([1, 2])
    """


@pytest.mark.parametrize("function", [without, of_nothing, of_two])
def test_an_example_that_does_not_draw_one_figure_is_refused(function):
    with pytest.raises(ValueError, match=f"example of {function.__name__} must draw exactly one"):
        plots.drawn_by_example(function)


def test_a_broken_example_is_refused():
    def broken():
        """Draw something.

        >>> import graphattn as ga
        >>> ga.plot.adjacency("no graph")
        """

    with pytest.raises(ValueError, match="graph must be a TokenGraph"):
        plots.drawn_by_example(broken)


def test_a_text_that_is_small_cut_off_or_over_another_is_found(tmp_path):
    figure = Figure(figsize=(8, 3))
    figure.text(0.1, 0.5, "small", fontsize=9)  # 5.6 pixels on a phone
    figure.text(0.98, 0.8, "beyond the edge", fontsize=14)
    figure.text(0.5, 0.5, "one", fontsize=14)
    figure.text(0.51, 0.5, "other", fontsize=14)
    assert pictures.unreadable(figure) == [
        "'small' is 5.6 pixels high, not 8",
        "'beyond the edge' is cut off",
        "'one' is over 'other'",
    ]
    with pytest.raises(ValueError, match="picture cannot be read on a phone: 'small'"):
        pictures.save(figure, tmp_path / "picture.png")

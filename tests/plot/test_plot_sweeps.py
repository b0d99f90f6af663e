"""The curves of a sweep are its numbers: means, seeds, and what diverged."""

from __future__ import annotations

import math
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import graphattn as ga


def row(mixer: str, lr: float, loss: float | None, seed: int = 0) -> dict[str, Any]:
    status = "diverged" if loss is None else "finished"
    return {"mixer": mixer, "lr": lr, "seed": seed, "status": status, "loss": loss}


ROWS = [
    row("dot", 1e-3, 3.0), row("dot", 1e-3, 4.0, 1), row("dot", 1e-2, 2.0),
    row("dot", 1e-1, None), row("dot", 1e-1, 5.0, 1),
    row("mix", 1e-3, 2.5), row("mix", 1e-1, None),
    {**row("mix", 1.0, None), "status": "waiting"},
]  # fmt: skip


@pytest.fixture
def ax() -> Axes:
    return ga.plot.sweep_curves(ROWS, ax=Figure().add_subplot())


def curves(ax: Axes) -> dict[str, dict[float, float]]:
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    lines = [line for line in ax.lines if line.get_label() in names]
    return {
        str(line.get_label()): dict(zip(*map(list, line.get_data()), strict=True)) for line in lines
    }


def test_a_curve_is_the_mean_over_seeds_with_a_gap_where_one_diverged(ax: Axes) -> None:
    by_mixer = curves(ax)
    assert list(by_mixer) == ["dot", "mix"]
    assert (by_mixer["dot"][1e-3], by_mixer["dot"][1e-2]) == (3.5, 2.0)
    assert math.isnan(by_mixer["dot"][1e-1])
    assert set(by_mixer["mix"]) == {1e-3, 1e-1}  # trials without a result are not drawn


def test_every_trial_is_seen(ax: Axes) -> None:
    points = {tuple(point) for dots in ax.collections for point in dots.get_offsets().tolist()}
    assert {(1e-3, 3.0), (1e-3, 4.0), (1e-1, 5.0)} <= points


def test_diverged_trials_are_above_all_losses_each_mixer_in_a_line_of_its_colour(ax: Axes) -> None:
    crosses = [line for line in ax.lines if line.get_marker() == "x"]
    assert [list(line.get_xdata()) for line in crosses] == [[1e-1], [1e-1]]
    heights = [float(line.get_ydata()[0]) for line in crosses]
    assert 5.0 < heights[0] < heights[1] < ax.get_ylim()[1]
    colours = {line.get_label(): line.get_color() for line in ax.lines}
    assert [line.get_color() for line in crosses] == [colours["dot"], colours["mix"]]


def test_a_ring_marks_the_best_rate(ax: Axes) -> None:
    rings = [line.get_data() for line in ax.lines if line.get_fillstyle() == "none"]
    assert [(float(x[0]), float(y[0])) for x, y in rings] == [(1e-2, 2.0), (1e-3, 2.5)]


def test_where_all_diverged_the_figure_still_stands_and_names_are_no_mathematics() -> None:
    ax = ga.plot.sweep_curves([row("$m_", 1.0, None)], ax=Figure().add_subplot())
    ax.figure.draw_without_rendering()
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["$m_"]
    assert ax.get_ylim()[1] > ax.get_ylim()[0]


def test_without_results_there_is_nothing_to_draw() -> None:
    with pytest.raises(ValueError, match="rows must have at least one trial with a result"):
        ga.plot.sweep_curves([{**row("mix", 1.0, None), "status": "running"}])


def test_more_curves_than_colours_still_look_different() -> None:
    rows = [
        {"mixer": f"mixer {i}", "lr": lr, "seed": 0, "status": "finished", "loss": 1.0}
        for i in range(14)
        for lr in (0.1, 1.0)
    ]
    lines = ga.plot.sweep_curves(rows).lines
    looks = {
        (line.get_color(), line.get_linestyle(), line.get_marker())
        for line in lines
        if str(line.get_label()).startswith("mixer")
    }
    assert len(looks) == 14

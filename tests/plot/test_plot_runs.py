"""Figures of runs show what the log holds, diverged and unfinished runs too."""

import math

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

import graphattn as ga


def train(step, loss, lr=1e-3):
    return {"step": step, "split": "train", "loss": loss, "lr": lr}


def validation(step, loss, **more):
    return {"step": step, "split": "validation", "loss": loss, **more}


ROWS = [train(1, 3.0), train(2, 2.5), validation(2, 2.75), train(3, 2.0), validation(3, 2.25)]


def test_curves_are_the_rows_of_their_split(ax):
    assert ga.plot.training_curves(ROWS, reference={"guessing": 2.9}, ax=ax) is ax
    drawn = {line.get_label(): np.array(line.get_data()).T.tolist() for line in ax.lines}
    assert drawn["training"] == [[1, 3.0], [2, 2.5], [3, 2.0]]
    assert drawn["validation"] == [[2, 2.75], [3, 2.25]]
    assert drawn["guessing"][0][1] == 2.9
    assert [text.get_text() for text in ax.get_legend().get_texts()] == list(drawn)


def test_several_runs_are_compared_by_validation_where_they_have_one(ax):
    ga.plot.training_curves({"a": ROWS, "b_$x$": ROWS[:2]}, ax=ax)
    named = {text.get_text() for text in ax.get_legend().get_texts()}
    assert named == {"a", "b_$x$"}
    data = {line.get_label(): len(line.get_xdata()) for line in ax.lines}
    assert (data["a"], data["b_$x$"]) == (2, 2)  # validation of a, training of b
    ax.figure.draw_without_rendering()  # "$" is no mathematics


def test_a_run_that_diverged_ends_with_a_cross_in_view_and_does_not_flatten_the_rest(ax):
    rows = [train(k, 3.0 - 0.1 * k) for k in range(1, 9)]
    rows += [train(9, 4e6), train(10, None)]
    ga.plot.training_curves(rows, ax=ax)
    (cross,) = [line for line in ax.lines if line.get_label() == "diverged"]
    low, high = ax.get_ylim()
    assert low < 2.2
    assert 2.9 < high < 4
    assert (cross.get_xdata()[0], cross.get_ydata()[0]) == (9, high)
    ga.plot.training_curves(ROWS, ax=(calm := Figure().add_subplot()))
    assert all(line.get_label() != "diverged" for line in calm.lines)


def test_where_most_losses_are_far_above_the_first_the_axis_is_logarithmic(ax):
    ga.plot.training_curves([train(1, 3.0), *(train(k, 10.0**k) for k in range(2, 8))], ax=ax)
    assert ax.get_yscale() == "log"


def test_other_measures_are_drawn_in_full(ax):
    rows = [validation(k, 1.0, accuracy=0.001 * 4**k) for k in range(5)]
    ga.plot.training_curves(rows, measure="accuracy", ax=ax)
    assert ax.get_ylim()[1] > 0.001 * 4**4


def test_learning_rates_start_at_zero(ax):
    ga.plot.learning_rates([train(1, None, 1e-4), train(2, 1.0, 3e-4)], ax=ax)
    assert ax.lines[0].get_ydata().tolist() == [1e-4, 3e-4]
    assert ax.get_ylim()[0] == 0


def layers(step, **values):
    named = {name: {"sink_share": value, "alpha_max": value} for name, value in values.items()}
    return {"step": step, "split": "layers", "alpha_max": 0.5, "layers": named}


def test_layers_are_lines_in_their_order_and_unknown_numbers_are_left_out(ax):
    rows = [layers(5, first=0.25, second=None), layers(10, first=0.5, second=0.75)]
    ga.plot.layer_curves(rows, "sink_share", ax=ax)
    drawn = {line.get_label(): np.array(line.get_data()).T.tolist() for line in ax.lines}
    assert drawn == {"first": [[5, 0.25], [10, 0.5]], "second": [[10, 0.75]]}


def test_stable_learning_rates_stand_beside_the_one_that_was_used(ax):
    rows = [train(5, 1.0, 0.125), layers(5, first=0.25, second=0.0), layers(10, first=0.5)]
    ga.plot.layer_curves(rows, "alpha_max", ax=ax)
    drawn = {line.get_label(): line.get_ydata().tolist() for line in ax.lines}
    # 0 has no place on a logarithmic axis.
    assert drawn == {"first": [0.25, 0.5], "whole model": [0.5, 0.5], "learning rate": [0.125]}
    assert ax.get_yscale() == "log"


def test_a_legend_of_many_layers_names_the_first_the_last_and_some_between(ax):
    names = [f"blocks.{k}" for k in range(40)]
    ga.plot.layer_curves([layers(1, **dict.fromkeys(names, 0.5))], "sink_share", ax=ax)
    assert len(ax.lines) == 40
    named = [text.get_text() for text in ax.get_legend().get_texts()]
    assert len(named) <= 7
    assert (named[0], named[-1]) == ("blocks.0", "blocks.39")


def test_a_reliability_diagram_has_a_point_per_bin_and_bars_that_sum_to_one(ax):
    calibration = ga.train.Calibration(bins=5)
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(500, 3, generator=generator)
    calibration.add(logits, torch.randint(3, (500,), generator=generator))
    ga.plot.reliability_diagram(calibration, ax=ax)
    (model,) = [line for line in ax.lines if line.get_label() == "model"]
    kept = calibration.counts > 0
    torch.testing.assert_close(torch.tensor(model.get_xdata()), calibration.confidence[kept])
    torch.testing.assert_close(torch.tensor(model.get_ydata()), calibration.accuracy[kept])
    heights = [bar.get_height() for bar in ax.patches]
    assert math.isclose(sum(heights), 1)
    from_rows = Figure().add_subplot()
    ga.plot.reliability_diagram(calibration.rows(), ax=from_rows)
    assert [bar.get_height() for bar in from_rows.patches] == heights


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: ga.plot.training_curves([train(1, None)]), "runs must have rows with a finite"),
        (lambda: ga.plot.training_curves({}), "runs must have at least one run"),
        (lambda: ga.plot.learning_rates([validation(1, 2.0)]), "runs must have training rows"),
        (lambda: ga.plot.layer_curves(ROWS), "run must have rows of layers"),
        (lambda: ga.plot.layer_curves(ROWS, "colour"), "measure must be one of"),
        (lambda: ga.plot.reliability_diagram([]), "calibration must have at least one prediction"),
    ],
)
def test_nothing_to_draw_is_said(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()


def test_ticks_are_the_losses_themselves():
    """Losses that are near each other would be 0.0 to 0.2 "+3"."""
    rows = [{"step": k, "split": "train", "loss": 3.1201 - 1e-4 * k} for k in range(5)]
    ax = ga.plot.training_curves(rows)
    ax.figure.canvas.draw()
    shown = [float(label.get_text()) for label in ax.yaxis.get_ticklabels() if label.get_text()]
    assert ax.yaxis.get_offset_text().get_text() == ""
    assert shown == pytest.approx(list(ax.get_yticks()), abs=1e-5)

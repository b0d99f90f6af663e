"""Figures of training runs: curves, learning rates, the state of layers, and reliability."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from graphattn.graphs.arguments import as_choice
from graphattn.plot.drawing.style import COLOURS, INK, axes_or_new, line_look, plain_legend, styled
from graphattn.train.evaluation.calibration import Calibration
from graphattn.train.runs.folder import Run
from graphattn.train.runs.records import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Runs = Run | Sequence[Row] | Mapping[str, Run | Sequence[Row]]

SIZE = 4.6, 3.2  # inches; a phone can show this size without making it much smaller
WHOLE = "whole model"
LAYER_MEASURES = {  # the name of a measure in the rows and the label of its axis
    "alpha_max": "largest stable learning rate",
    "share_stable": "share of stable steps",
    "sink_share": "attention on the first token",
    "effective_rank": "effective rank of the output",
    "max_step_size": "largest step size of a low-pass filter",
    "1 - 2 eta lambda_max": "1 - 2 eta lambda_max",
}
FEW = 7  # Up to this number of lines, the legend names every line.


def training_curves(
    runs: Runs,
    *,
    measure: str = "loss",
    reference: Mapping[str, float] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw the training and validation losses of one or several runs over their steps.

    A run that diverged ends with a cross at its last finite loss. Losses far above the first losses
    are cut off; if most losses are that large, the axis is logarithmic instead.

    Args:
        runs: a :class:`~graphattn.train.Run`, its rows, or a mapping from names to runs or rows.
        measure: which number of the rows to draw: "loss", or one that the objective reports for the
            validation split, such as "accuracy".
        reference: for each name a value to compare with, such as that of guessing by frequency;
            drawn as a dashed line.
        ax: where to draw; new axes if None.

    Raises:
        ValueError: if no run has a finite value of the measure.

    Example:
        >>> import graphattn as ga
        >>> train = [{"step": s, "split": "train", "loss": 2 + 1 / s} for s in range(1, 41)]
        >>> held_out = [{"step": s, "split": "validation", "loss": 2.3 + 2 / s} for s in (10, 40)]
        >>> ax = ga.plot.training_curves(train + held_out)
        >>> [line.get_label() for line in ax.lines]
        ['training', 'validation']
    """
    named = _by_name(runs)
    alone = len(named) == 1
    curves = {
        name: {split: _points(run, split, measure) for split in ("train", "validation")}
        for name, run in named.items()
    }
    if not any(points for splits in curves.values() for points in splits.values()):
        raise ValueError(f"runs must have rows with a finite {measure!r}, got none")
    ax = axes_or_new(ax, *SIZE)
    for i, (name, splits) in enumerate(curves.items()):
        has_validation = bool(splits["validation"])
        for split, points in splits.items():
            if not points:
                continue
            # Runs are compared by the validation loss; the noisy training loss is drawn paler.
            is_pale = split == "train" and has_validation
            label = {"train": "training"}.get(split, split) if alone else "" if is_pale else name
            ax.plot(
                *zip(*points, strict=True),
                **line_look(1 if alone and split == "validation" else i),
                linewidth=1.0 if is_pale else 1.6,
                alpha=0.45 if is_pale and not alone else 0.8 if is_pale else 1.0,
                marker="o" if split == "validation" and len(points) < 40 else None,
                markersize=3,
                label=label or "_",
            )
    for k, (name, value) in enumerate((reference or {}).items()):
        dashes = ((0, (4, 3)), (0, (1, 2)), (0, (6, 2, 1, 2)))[k % 3]
        ax.axhline(value, color="#777777", linewidth=1, linestyle=dashes, label=name)
    if measure == "loss":
        _cut_off(ax, list(curves.values()), list((reference or {}).values()))
    top = ax.get_ylim()[1]
    for name, splits in curves.items() if measure == "loss" else ():
        if _has_diverged(named[name]) and (points := splits["train"] or splits["validation"]):
            step, last = points[-1]
            ax.plot(
                step, min(last, top), "x", color="#b00020", markersize=9, markeredgewidth=2,
                clip_on=False, zorder=4, label="diverged" if alone else "_",
            )  # fmt: skip
    _label(ax, measure.replace("_", " "))
    return ax


def learning_rates(runs: Runs, *, ax: Axes | None = None) -> Axes:
    """Draw the learning rates of one or several runs over their steps.

    Args:
        runs: a :class:`~graphattn.train.Run`, its rows, or a mapping from names to runs or rows.
        ax: where to draw; new axes if None.

    Raises:
        ValueError: if no training row has a learning rate.

    Example:
        >>> import graphattn as ga
        >>> rates = [min(s / 10, (50 - s) / 40) * 1e-3 for s in range(51)]  # up, then down
        >>> rows = [{"step": s, "split": "train", "lr": rate} for s, rate in enumerate(rates)]
        >>> ga.plot.learning_rates(rows).get_xlabel()
        'training step'
    """
    named = {name: _points(run, "train", "lr") for name, run in _by_name(runs).items()}
    if not any(named.values()):
        raise ValueError("runs must have training rows with 'lr', got none")
    ax = axes_or_new(ax, *SIZE)
    for i, (name, points) in enumerate(named.items()):
        if points:
            ax.plot(*zip(*points, strict=True), **line_look(i), label=name or "_")
    ax.set_ylim(bottom=0)
    ax.ticklabel_format(axis="y", scilimits=(-3, 3), useMathText=True)
    ax.yaxis.get_offset_text().set(color=INK, fontsize=8)
    _label(ax, "learning rate")
    return ax


def layer_curves(
    run: Run | Sequence[Row], measure: str = "effective_rank", *, ax: Axes | None = None
) -> Axes:
    """Draw how one number of every layer changed in training, one line per layer.

    Deeper layers have lighter lines.

    Args:
        run: a run whose config sets ``record_every``, or its rows.
        measure: "alpha_max", "share_stable", "sink_share", "effective_rank", "max_step_size" or
            "1 - 2 eta lambda_max", as :func:`graphattn.train.layer_state` returns them. If the rows
            have this number for the whole model too, it is drawn as a dashed line.
        ax: where to draw; new axes if None.

    Raises:
        ValueError: if the measure is unknown, or no layer has it.

    Example:
        >>> import graphattn as ga
        >>> rows = [{"step": s, "split": "layers",
        ...          "layers": {"first": {"sink_share": 0.1 * s}, "second": {"sink_share": 0.2}}}
        ...         for s in (1, 2, 3)]
        >>> ax = ga.plot.layer_curves(rows, "sink_share")
        >>> [line.get_label() for line in ax.lines]
        ['first', 'second']
    """
    from matplotlib import colormaps

    as_choice("measure", measure, tuple(LAYER_MEASURES))
    curves = _of_layers(run, measure)
    if not curves:
        raise ValueError(
            f"run must have rows of layers with a finite {measure!r}, got none: set record_every "
            f"in the config of the run"
        )
    ax = axes_or_new(ax, *SIZE)
    layers = [name for name in curves if name != WHOLE]
    shades = colormaps["viridis"]
    for name, points in curves.items():
        line: dict[str, Any] = {"color": INK, "linestyle": (0, (4, 3))}
        if name in layers:
            depth = layers.index(name) / max(len(layers) - 1, 1)
            line = {"color": shades(0.05 + 0.8 * depth)}
        line["marker"] = "o" if len(points) < 25 else None
        ax.plot(*zip(*points, strict=True), linewidth=1.4, markersize=2.5, label=name, **line)
    if measure == "alpha_max":
        ax.set_yscale("log")
        if rates := _points(run, "train", "lr"):
            ax.plot(*zip(*rates, strict=True), color="#b00020", linewidth=1, label="learning rate")
    elif measure == "share_stable":
        ax.set_ylim(-0.03, 1.03)
    elif measure == "sink_share":
        largest = max(value for points in curves.values() for _, value in points)
        ax.set_ylim(0, min(1.03, max(0.2, 1.3 * largest)))
    elif measure == "1 - 2 eta lambda_max":
        ax.axhline(0, color="#777777", linewidth=0.8, linestyle=(0, (1, 2)))
    _label(ax, LAYER_MEASURES[measure], shown=_some(layers))
    return ax


def reliability_diagram(
    calibration: Calibration | Sequence[Mapping[str, Any]], *, ax: Axes | None = None
) -> Axes:
    """Draw the accuracy of a model's predictions against its confidence in them.

    Every bin of confidence is a point. On the diagonal the accuracy equals the confidence. Grey
    bars show the share of all predictions that are in the bin.

    Args:
        calibration: a :class:`~graphattn.train.Calibration`, or its ``rows()``.
        ax: where to draw; new axes if None.

    Raises:
        ValueError: if there are no predictions.

    Source:
        Guo et al., 2017, *On Calibration of Modern Neural Networks*, Figure 1.

    Example:
        >>> import torch, graphattn as ga
        >>> calibration = ga.train.Calibration(bins=10)
        >>> logits = torch.randn(1000, 4)
        >>> calibration.add(logits, torch.distributions.Categorical(logits=logits).sample())
        >>> ax = ga.plot.reliability_diagram(calibration)
    """
    rows = calibration.rows() if isinstance(calibration, Calibration) else calibration
    total = sum(row["count"] for row in rows)
    if not total:
        raise ValueError("calibration must have at least one prediction, got none")
    ax = axes_or_new(ax, *SIZE)
    edges, widths, shares, confidence, accuracy = zip(
        *((row["from"], row["to"] - row["from"], row["count"] / total, row["confidence"],
           row["accuracy"]) for row in rows), strict=True,
    )  # fmt: skip
    ax.bar(
        edges, shares, widths, align="edge", color="#dddddd", edgecolor="white",
        label="share of guesses",
    )  # fmt: skip
    ax.plot([0, 1], [0, 1], color="#777777", linewidth=1, linestyle=(0, (4, 3)), label="as it says")
    line: dict[str, Any] = {"color": COLOURS[0], "markersize": 4, "linewidth": 1.4}
    ax.plot(confidence, accuracy, "o-", label="model", **line)
    ax.set(xlim=(0, 1), ylim=(0, 1))
    ax.legend(frameon=False, fontsize=8, loc="upper left")
    return styled(ax, "confidence", "accuracy")


def loss_curves(
    curves: Mapping[str, Sequence[tuple[float, float | Tensor]]],
    *,
    reference: Mapping[str, float] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw losses over training steps, one line per model, with the names in the legend.

    Args:
        curves: for each name of a model its (step, loss) points; a loss is a number or a tensor
            with one number.
        reference: for each name a loss to compare with, such as that of guessing by frequency;
            drawn as a dashed line.
        ax: where to draw; new axes if None.

    Raises:
        ValueError: if there is no curve, or a curve has no points.

    Example:
        >>> import graphattn as ga
        >>> curves = {
        ...     "attention": [(0, 4.1), (10, 3.4), (20, 3.1), (30, 3.0)],
        ...     "mix": [(0, 4.1), (10, 3.2), (20, 2.9), (30, 2.8)],
        ... }
        >>> ax = ga.plot.loss_curves(curves, reference={"guessing by frequency": 3.3})
        >>> [line.get_label() for line in ax.lines]
        ['attention', 'mix', 'guessing by frequency']
    """
    if not curves:
        raise ValueError("curves must have at least one curve, got none")
    for name, points in curves.items():
        if len(points) == 0:
            raise ValueError(f"each of curves must have points, got none for {name!r}")
    ax = axes_or_new(ax, *SIZE)
    for i, (name, points) in enumerate(curves.items()):
        steps, losses = [step for step, _ in points], [loss for _, loss in points]
        numbers = [loss.item() if isinstance(loss, Tensor) else loss for loss in losses]
        line: dict[str, Any] = {"marker": "o"} if len(points) < 30 else {}
        line |= {"markersize": 3, "linewidth": 1.6, **line_look(i)}
        ax.plot(steps, numbers, label=name, **line)
    for name, loss in (reference or {}).items():
        ax.axhline(loss, color="#777777", linewidth=1, linestyle=(0, (4, 3)), label=name)
    names = [*curves, *(reference or {})]
    plain_legend(ax, ax.lines[-len(names) :], names)
    return styled(ax, "training step", "loss (nats per token)")


# Reading rows.


def _by_name(runs: Runs) -> dict[str, Run | Sequence[Row]]:
    named = dict(runs) if isinstance(runs, Mapping) else {"": runs}
    if not named:
        raise ValueError("runs must have at least one run, got none")
    return named


def _rows(run: Run | Sequence[Row], split: str) -> Iterator[Row]:
    for row in run.rows if isinstance(run, Run) else run:
        if row.get("split") == split:
            yield row


def _points(run: Run | Sequence[Row], split: str, measure: str) -> list[tuple[int, float]]:
    """Return the points that can be drawn; the log has None for a number that is not finite."""
    return [
        (row["step"], row[measure]) for row in _rows(run, split) if _is_finite(row.get(measure))
    ]


def _of_layers(run: Run | Sequence[Row], measure: str) -> dict[str, list[tuple[int, float]]]:
    """Return the points of every layer, in the order of the rows; those of the whole model last."""
    layers: dict[str, list[tuple[int, float]]] = {}
    whole = []
    for row in _rows(run, "layers"):
        if _is_finite(row.get(measure)):
            whole.append((row["step"], row[measure]))
        for name, numbers in (row.get("layers") or {}).items():
            value = numbers.get(measure)
            # alpha_max is a learning rate on a logarithmic axis, so only values > 0 are drawn.
            if _is_finite(value) and (value > 0 or measure != "alpha_max"):
                layers.setdefault(name, []).append((row["step"], value))
    return {**layers, WHOLE: whole} if whole else layers


def _has_diverged(run: Run | Sequence[Row]) -> bool:
    if isinstance(run, Run):
        return run.status == "diverged"
    last = list(_rows(run, "train"))[-1:]
    return any(not _is_finite(row.get("loss")) for row in last)


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


# Drawing.


def _cut_off(ax: Axes, curves: list[dict[str, list[Any]]], reference: list[float]) -> None:
    """Cut off losses far above the first losses, so that the others remain distinguishable."""
    values = [value for splits in curves for points in splits.values() for _, value in points]
    starts = [splits["train"] or splits["validation"] for splits in curves]
    low = min(values + reference)
    high = max([points[0][1] for points in starts if points] + reference)
    span = (high - low) or abs(high) or 1.0
    above = sum(value > high + 0.5 * span for value in values)
    if above > 0.5 * len(values) and low > 0:
        ax.set_yscale("log")  # Cutting off would leave out more than half of the values.
    elif above:
        ax.set_ylim(low - 0.06 * span, high + 0.25 * span)


def _some(names: list[str]) -> list[str]:
    """Select which of many lines the legend names: the first, the last, and some between."""
    if len(names) <= FEW:
        return names
    selected = {round(k * (len(names) - 1) / (FEW - 3)) for k in range(FEW - 2)}
    return [names[i] for i in sorted(selected)]


def _label(ax: Axes, quantity: str, shown: list[str] | None = None) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 2.5, 5, 10]))
    handles, labels = ax.get_legend_handles_labels()
    named = [
        (handle, label)
        for handle, label in zip(handles, labels, strict=True)
        if shown is None or label in shown or label in (WHOLE, "learning rate")
    ]
    if len(named) > 1:
        # A frame of white: on a narrow figure, no place for the legend may be free of lines.
        frame = {"frameon": True, "framealpha": 0.8, "edgecolor": "none"}
        plain_legend(ax, *zip(*named, strict=True), **frame)
    styled(ax, "training step", quantity)

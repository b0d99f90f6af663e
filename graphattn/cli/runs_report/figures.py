"""Figures of one run, and of several runs together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import graphattn as ga
from graphattn.cli.report import Figure
from graphattn.cli.runs_report.reading import RunFiles
from graphattn.cli.runs_report.words import is_number, number
from graphattn.plot.drawing.style import page_figure
from graphattn.plot.runs import LAYER_MEASURES
from graphattn.train.runs.records import Row

WHAT_LAYERS_SAY = {
    "alpha_max": "The largest learning rate at which the optimizer's next step still lowers the "
    "loss up to second order (consensus paper, Eq. 17-19), if only this layer makes it, together "
    "with the rate that was used. Gaps: there was no positive curvature along the step, or the "
    "loss was rising.",
    "share_stable": "Of a few fixed batches, the share whose largest stable learning rate is above "
    "the one that was used.",
    "sink_share": "The share of attention that goes to the first token, over sequences and heads: "
    "near 1, a layer attends to almost nothing else.",
    "effective_rank": "The participation ratio of a layer's output, over sequences: in how "
    "many directions its tokens differ.",
    "max_step_size": "1 / (2 lambda_max) of consensus layers: with a step size up to this "
    "value, no mode oscillates.",
    "1 - 2 eta lambda_max": "The factor of the roughest mode in a step of a consensus layer: at "
    "0 or more the step is a low-pass filter, below -1 the mode grows.",
}


def drawn(title: str, caption: str, alt: str, draw: Callable[..., Any]) -> Figure:
    """Draw with `draw` on the `ax` of a new figure."""
    figure = page_figure(2.8)
    draw(ax=figure.add_subplot())
    return Figure(title, caption, figure, alt)


def curves_of(files: RunFiles, reference: Mapping[str, float]) -> list[Figure]:
    run, pictures = files.run, []
    if _has(run.rows, "loss"):
        caption = "The mean per guess since the point before"
        caption += ", and on the validation split." if run.evaluations else "."
        if run.status == "diverged":
            caption += (
                " The cross is the last finite loss, or at the edge where that lies above it."
            )
        pictures.append(
            drawn(
                "Loss",
                caption,
                f"Loss over training steps. {_summary(run.training, 'training loss')} "
                f"{_summary(run.evaluations, 'validation loss')}",
                partial(ga.plot.training_curves, run, reference=reference),
            )
        )
    pictures += [
        drawn(
            measure.capitalize(),
            "On the validation split.",
            _summary(run.evaluations, measure, measure),
            partial(ga.plot.training_curves, run, measure=measure),
        )
        for measure in ("accuracy", "pearson")
        if _has(run.evaluations, measure)
    ]
    if _has(run.training, "lr"):
        pictures.append(
            drawn(
                "Learning rate",
                "Of the optimizer.",
                _summary(run.training, "learning rate", "lr"),
                partial(ga.plot.learning_rates, run),
            )
        )
    return pictures


def layers_of(files: RunFiles) -> list[Figure]:
    run, pictures = files.run, []
    for measure, label in LAYER_MEASURES.items():
        layers = [layer for row in run.layers for layer in (row.get("layers") or {}).values()]
        known = [layer[measure] for layer in layers if is_number(layer.get(measure))]
        if not known or (measure == "alpha_max" and max(known) <= 0):
            continue
        pictures.append(
            drawn(
                label[0].upper() + label[1:],
                WHAT_LAYERS_SAY[measure],
                f"{label} of every layer over training steps, between {number(min(known))} and "
                f"{number(max(known))}.",
                partial(ga.plot.layer_curves, run, measure),
            )
        )
    return pictures


def reliability(name: str, bins: list[Row], error: Any) -> Figure:
    ece = f" The expected calibration error is {number(error)}." if is_number(error) else ""
    return drawn(
        f"Calibration ({name})" if name else "Calibration",
        "How often guesses are right, against the confidence of the model: below the dashed line "
        f"it is overconfident.{ece}",
        "Accuracy beside confidence, in bins: "
        + ", ".join(f"{number(row['accuracy'])} at {number(row['confidence'])}" for row in bins)
        + ".",
        partial(ga.plot.reliability_diagram, bins),
    )


def comparison(runs: list[RunFiles]) -> list[Figure]:
    known = {files.name: files.run for files in runs if _has(files.run.rows, "loss")}
    if len(known) < 2:
        return []
    lowest = [
        f"{name}: {_summary(run.evaluations or run.training, 'loss')}"
        for name, run in known.items()
    ]
    return [
        drawn(
            "Loss of all runs",
            "Bold: on the validation split, if there is one; pale: in training. A cross marks the "
            "end of a run that diverged. Losses on different data or of different objectives "
            "cannot be compared.",
            " ".join(lowest),
            partial(ga.plot.training_curves, known),
        )
    ]


def _has(rows: list[Row], measure: str) -> bool:
    return any(is_number(row.get(measure)) for row in rows)


def _summary(rows: list[Row], what: str, measure: str = "loss") -> str:
    """Describe a curve in a sentence."""
    known = [(row["step"], row[measure]) for row in rows if is_number(row.get(measure))]
    if not known:
        return ""
    (first, start), (last, end) = known[0], known[-1]
    if len(known) == 1:
        return f"{what.capitalize()} {number(start)} at step {first:,}."
    return (
        f"{what.capitalize()} from {number(start)} at step {first:,} to {number(end)} at step "
        f"{last:,}, lowest {number(min(value for _, value in known))}."
    )

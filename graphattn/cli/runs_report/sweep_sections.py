"""The part of a page about a sweep."""

from __future__ import annotations

import statistics
from collections import Counter
from functools import partial
from typing import Any

import graphattn as ga
from graphattn.cli.report import Notes, ReportSection
from graphattn.cli.runs_report.figures import drawn
from graphattn.cli.runs_report.reading import FoundSweep
from graphattn.cli.runs_report.words import duration, is_number, number, value
from graphattn.plain_tables import Cells, counted
from graphattn.train import RunConfig
from graphattn.train.runs.records import Row
from graphattn.train.sweeps.results import TOLERANCE


def sections_of(found: FoundSweep) -> list[Any]:
    """Return a sweep's sections: missing parts, best rates, all losses, and shared options."""
    parts: list[Any] = [Notes(found.missing)] if found.missing else []
    if found.rows:
        parts += [*_figures(found), _summary(found.rows), _by_rate(found.rows), _trials(found.rows)]
    if found.options is not None:
        usual = RunConfig().as_dict()
        rows = [
            [name, value(own)]
            for name, own in found.options.items()
            if name not in ("mixer", "lr", "seed", "out") and usual.get(name) != own
        ]
        shared = Cells("", "", ["option", "value"], rows, [False, False])
        parts.append(ReportSection("Common options of the trials", [shared]))
    return parts


def opening(found: FoundSweep) -> str:
    """Describe how many trials there are, and how they ended."""
    counts = Counter(row["status"] for row in found.rows)
    known = ("finished", "diverged", "failed", "running", "interrupted", "waiting")
    order = [*known, *(own for own in counts if own not in known)]
    told = ", ".join(f"{counts[own]:,} {own}" for own in order if counts[own])
    said = f"{counted(len(found.rows), 'trial')}: {told}." if told else "No trials."
    if counts["diverged"]:
        said += (
            " A trial that diverged is also a result: its learning rate is too high for its mixer."
        )
    if unfinished := sum(counts[own] for own in ("running", "interrupted", "waiting")):
        said += f" The sweep has not ended: {counted(unfinished, 'trial')} without a result so far."
    return said


def _figures(found: FoundSweep) -> list[Any]:
    rows = [row for row in found.rows if row["status"] == "diverged" or is_number(row.get("loss"))]
    if not any(is_number(row.get("loss")) for row in rows):
        return ["No trial has a loss yet, so there is no curve."]
    best = [
        f"{own.mixer}: lowest {number(own.loss)} at {number(own.best_lr)}"
        for own in ga.train.summarize_sweep(rows)
        if own.best_lr is not None
    ]
    return [
        drawn(
            "Loss over the learning rate",
            "The validation loss at the last step, of every mixer at every rate: a point per "
            "trial, a line through their means, a ring at the lowest mean. A cross at the top: a "
            "trial diverged at that rate.",
            f"Validation loss over the learning rate, a line per mixer. {'; '.join(best)}.",
            partial(ga.plot.sweep_curves, rows),
        )
    ]


def _summary(rows: list[Row]) -> Cells:
    cells = []
    for own in ga.train.summarize_sweep(rows):
        stable = "" if own.stable is None else " to ".join(map(number, own.stable))
        spread = "" if own.spread is None else f" ± {own.spread:.2g}"
        cells.append(
            [
                own.mixer,
                number(own.best_lr),
                f"{number(own.loss)}{spread}",
                stable,
                number(own.highest_loss),
                f"{own.diverged} of {own.trials}",
            ]
        )
    return Cells(
        "Best learning rates",
        "Stable: the rates around the best one without a trial that diverged, with a loss at most "
        f"{TOLERANCE:g} above the best. ±: the standard "
        "deviation over seeds. The loss at the highest stable rate shows the cost of a learning "
        "rate that is too high.",
        ["mixer", "best rate", "loss there", "stable rates", "loss at the highest", "diverged"],
        cells,
        [False, True, True, False, True, True],
    )


def _by_rate(rows: list[Row]) -> Cells:
    mixers = list(dict.fromkeys(row["mixer"] for row in rows))
    rates = sorted({row["lr"] for row in rows})
    cells = [
        [number(float(lr)), *(_cell([r for r in rows if (r["mixer"], r["lr"]) == (own, lr)])
                              for own in mixers)]
        for lr in rates
    ]  # fmt: skip
    return Cells(
        "Validation losses",
        "Means over seeds, for the trials that have a loss.",
        ["learning rate", *mixers],
        cells,
        [True, *(True for _ in mixers)],
    )


def _cell(rows: list[Row]) -> str:
    losses = [row["loss"] for row in rows if is_number(row.get("loss"))]
    others = Counter(row["status"] for row in rows if not is_number(row.get("loss")))
    told = [number(statistics.fmean(losses))] if losses else []
    for status, count in others.items():
        told.append(status if count == len(rows) else f"{count} of {len(rows)} {status}")
    return ", ".join(told)


def _trials(rows: list[Row]) -> ReportSection:
    has_errors = any(row.get("error") for row in rows)
    header = ["mixer", "rate", "seed", "ended", "loss", "lowest", "steps", "time", "folder"]
    cells = []
    for row in rows:
        folder = row.get("folder")
        own = [
            row["mixer"],
            number(float(row["lr"])),
            value(row.get("seed")),
            row["status"],
            number(row.get("loss")),
            number(row.get("best_loss")),
            number(row.get("step", row.get("steps"))),
            duration(row.get("seconds")),
            str(folder) if folder else "",
        ]
        cells.append([*own, str(row.get("error") or "")] if has_errors else own)
    header = [*header, "error"] if has_errors else header
    is_number_column = [
        name in ("rate", "seed", "loss", "lowest", "steps", "time") for name in header
    ]
    table = Cells("", "", header, cells, is_number_column)
    return ReportSection(
        f"All {len(rows):,} trials" if len(rows) > 1 else "The trial", [table], folded=True
    )

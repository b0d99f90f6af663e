"""The part of a page about a sweep."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import graphattn as ga
from graphattn.cli.report import Notes, ReportSection
from graphattn.cli.runs_report.figures import drawn
from graphattn.cli.runs_report.reading import SweepFiles
from graphattn.cli.runs_report.words import duration, is_number, number, option_table, value
from graphattn.plain_tables import Cells, counted
from graphattn.train import RunConfig
from graphattn.train.runs.records import Row
from graphattn.train.sweeps.results import TOLERANCE, variant_of


def sections_of(files: SweepFiles) -> list[Any]:
    """Return a sweep's sections: missing parts, best rates, all losses, and shared options."""
    parts: list[Any] = [Notes(files.missing)] if files.missing else []
    if files.rows:
        parts += [*_figures(files), _summary(files.rows), _by_rate(files.rows), _trials(files.rows)]
    if files.options is not None:
        usual = RunConfig().as_dict()
        shared = {
            name: given
            for name, given in files.options.items()
            if name not in ("mixer", "lr", "seed", "out") and usual.get(name) != given
        }
        parts.append(ReportSection("Common options of the trials", [option_table(shared)]))
    return parts


def opening(files: SweepFiles) -> str:
    """Describe how many trials there are, and how they ended."""
    counts = Counter(row["status"] for row in files.rows)
    known = ("finished", "diverged", "failed", "running", "interrupted", "waiting")
    order = [*known, *(status for status in counts if status not in known)]
    ends = ", ".join(f"{counts[status]:,} {status}" for status in order if counts[status])
    text = f"{counted(len(files.rows), 'trial')}: {ends}." if ends else "No trials."
    if counts["diverged"]:
        text += (
            " A trial that diverged is also a result: its learning rate is too high for its mixer."
        )
    if unfinished := sum(counts[status] for status in ("running", "interrupted", "waiting")):
        text += f" The sweep has not ended: {counted(unfinished, 'trial')} without a result so far."
    return text


def _figures(files: SweepFiles) -> list[Any]:
    rows = [row for row in files.rows if row["status"] == "diverged" or is_number(row.get("loss"))]
    if not any(is_number(row.get("loss")) for row in rows):
        return ["No trial has a loss yet, so there is no curve."]
    best = [
        f"{mixer.mixer}: lowest {number(mixer.loss)} at {number(mixer.best_lr)}"
        for mixer in ga.train.summarize_sweep(rows)
        if mixer.best_lr is not None
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
    for summary in ga.train.summarize_sweep(rows):
        stable = "" if summary.stable is None else " to ".join(map(number, summary.stable))
        spread = "" if summary.spread is None else f" ± {summary.spread:.2g}"
        loss, highest = f"{number(summary.loss)}{spread}", number(summary.highest_loss)
        diverged = f"{summary.diverged} of {summary.trials}"
        cells.append([summary.mixer, number(summary.best_lr), loss, stable, highest, diverged])
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
    mixers = list(dict.fromkeys(map(variant_of, rows)))
    rates = sorted({row["lr"] for row in rows})
    cells = [
        [number(float(lr)), *(_cell([r for r in rows if (variant_of(r), r["lr"]) == (mixer, lr)])
                              for mixer in mixers)]
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
    texts = [number(statistics.fmean(losses))] if losses else []
    for status, count in others.items():
        texts.append(status if count == len(rows) else f"{count} of {len(rows)} {status}")
    return ", ".join(texts)


def _trials(rows: list[Row]) -> ReportSection:
    columns: dict[str, Callable[[Row], str]] = {
        "mixer": variant_of,
        "rate": lambda row: number(float(row["lr"])),
        "seed": lambda row: value(row.get("seed")),
        "ended": lambda row: row["status"],
        "loss": lambda row: number(row.get("loss")),
        "lowest": lambda row: number(row.get("best_loss")),
        "steps": lambda row: number(row.get("step", row.get("steps"))),
        "time": lambda row: duration(row.get("seconds")),
        "folder": lambda row: str(row.get("folder") or ""),
    }
    if any(row.get("error") for row in rows):
        columns["error"] = lambda row: str(row.get("error") or "")
    numbers = ("rate", "seed", "loss", "lowest", "steps", "time")
    cells = [[cell(row) for cell in columns.values()] for row in rows]
    table = Cells("", "", list(columns), cells, [name in numbers for name in columns])
    title = f"All {len(rows):,} trials" if len(rows) > 1 else "The trial"
    return ReportSection(title, [table], folded=True)

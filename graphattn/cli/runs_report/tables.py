"""Tables of a run: options, results, and origin."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from graphattn.cli.runs_report.reading import FoundRun
from graphattn.cli.runs_report.words import (
    best_row,
    column,
    duration,
    in_order,
    is_number,
    number,
    value,
)
from graphattn.plain_tables import Cells
from graphattn.train import RunConfig
from graphattn.train.runs.records import Row

PLACES = ("data", "out")  # options that every run has
MOST_COLUMNS = 10  # of a table as wide as a page


GUESSES = {"frequency_loss": "guessing by frequency", "bigram_loss": "guessing by bigram"}


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Result of `graphattn evaluate` on some data.

    Attributes:
        name: name of the data; "" if the file has none.
        numbers: numbers of the model.
        guesses: losses of guessing without a model.
        bins: bins of the reliability diagram.
        words: everything that is text.
    """

    name: str
    numbers: dict[str, float]
    guesses: dict[str, float]
    bins: list[Row]
    words: dict[str, str]

    @property
    def error(self) -> float | None:
        """Return the expected calibration error."""
        return self.numbers.get("calibration_error")


def evaluations_of(found: FoundRun) -> list[Evaluation]:
    """Read evaluation.json; numbers outside of any evaluation become one without a name."""
    own = {name: row for name, row in found.evaluation.items() if isinstance(row, Mapping)}
    if not all(name in own or name == "calibration" for name in found.evaluation):
        own = {"": found.evaluation}
    return [_evaluation(name, row) for name, row in own.items()]


def _evaluation(name: str, row: Mapping[str, Any]) -> Evaluation:
    calibration = row.get("calibration")
    calibration = calibration if isinstance(calibration, Mapping) else {}
    bins = calibration.get("bins")
    hidden = {*GUESSES, *(f"{key}_error" for key in GUESSES)}
    numbers = {key: own for key, own in row.items() if is_number(own) and key not in hidden}
    if is_number(calibration.get("error")):
        numbers["calibration_error"] = calibration["error"]
    return Evaluation(
        name,
        numbers,
        {told: row[key] for key, told in GUESSES.items() if is_number(row.get(key))},
        bins if isinstance(bins, list) and _are_bins(bins) else [],
        {key: own for key, own in row.items() if isinstance(own, str)},
    )


def _are_bins(rows: list[Any]) -> bool:
    """Return whether rows have the form of :meth:`graphattn.train.Calibration.rows`."""
    names = ("from", "to", "count", "confidence", "accuracy")
    return bool(rows) and all(
        isinstance(row, Mapping) and all(is_number(row.get(name)) for name in names) for row in rows
    )


def guesses_on_own_data(found: FoundRun, evaluations: Sequence[Evaluation]) -> dict[str, float]:
    """Return the losses of guessing on the run's own data, for comparison with its curves."""
    data = PurePath(str((found.options or {}).get("data", ""))).name
    for split in ("validation", "test"):
        for own in evaluations:
            if own.name == f"{data} {split}" and own.guesses:
                return {f"{name} ({split})": loss for name, loss in own.guesses.items()}
    return {}


# Tables.


def results(found: FoundRun, evaluations: Sequence[Evaluation]) -> Cells | None:
    """Make the table of losses and other numbers, with those of guessing without a model."""
    rows: dict[str, Mapping[str, Any]] = {}
    best = best_row(found)
    if found.run.evaluations:
        last = found.run.evaluations[-1]
        if best is not None and best["step"] != last["step"]:
            rows[f"validation, lowest loss (step {best['step']:,})"] = best
        rows[f"validation, last (step {last['step']:,})"] = last
    elif found.run.training:
        last = found.run.training[-1]
        rows[f"training, last (step {last['step']:,})"] = {"loss": last.get("loss")}
    for own in evaluations:
        rows[f"evaluation on {own.name}" if own.name else "evaluation"] = own.numbers
        for name, loss in own.guesses.items():
            rows[f"{name}, on {own.name}" if own.name else name] = {"loss": loss}
    if not rows:
        return None
    left_out = ("step", "split", "lr", "grad_norm")
    measures = in_order(
        name
        for row in rows.values()
        for name, own in row.items()
        if name not in left_out and is_number(own)
    )
    measures = measures or ["loss"]
    return Cells(
        "",
        "Empty cells were not measured or are not finite.",
        ["", *map(column, measures)],
        [[name, *(number(row.get(own)) for own in measures)] for name, row in rows.items()],
        [False, *(True for _ in measures)],
    )


def config_tables(found: FoundRun) -> tuple[Cells, Cells] | None:
    """Make tables of the options that differ from defaults (with data and folder), and of
    others."""
    if found.options is None:
        return None
    usual = RunConfig().as_dict()
    changed: list[list[str]] = []
    same: list[list[str]] = []
    for name, own in found.options.items():
        differs = name in PLACES or name not in usual or usual[name] != own
        (changed if differs else same).append([name, value(own)])
    header = ["option", "value"]
    return (
        Cells("", "", header, changed, [False, False]),
        Cells("", "", header, same, [False, False]),
    )


def origin(found: FoundRun) -> Cells | None:
    """Describe the origin of a run."""
    info = found.run.info
    versions = info.get("versions")
    versions = versions if isinstance(versions, Mapping) else {}
    rows = [
        ["commit of graphattn", value(info["commit"])] if info.get("commit") else [],
        ["digest of the config", value(info["config"])] if info.get("config") else [],
        ["seed", value(info["seed"])] if "seed" in info else [],
        ["device", value(info["device"])] if info.get("device") else [],
        ["processes", value(info["processes"])] if "processes" in info else [],
        ["started", value(info["started"])] if info.get("started") else [],
        ["ended", value(info["ended"])] if info.get("ended") else [],
        ["trained for", duration(info.get("seconds"))] if duration(info.get("seconds")) else [],
        ["continued from step", value(info["continued"])] if info.get("continued") else [],
        *([f"version of {name}", value(own)] for name, own in versions.items() if own),
    ]
    kept = [row for row in rows if row]
    return Cells("", "", ["", "value"], kept, [False, False]) if kept else None


# Several runs.


def comparison(runs: Sequence[FoundRun]) -> Cells:
    """Make the table of several runs: options in which they differ, and results.

    Runs are rows, or columns if there are too many options for the width of a page.
    """
    options = [found.options or {} for found in runs]
    names = dict.fromkeys(name for own in options for name in own if name not in ("out", "steps"))
    differing = [
        name for name in names if len({value(own[name]) for own in options if name in own}) > 1
    ]
    rows = []
    measures = in_order(
        name
        for found in runs
        for name, own in (best_row(found) or {}).items()
        if name in ("perplexity", "bits_per_byte", "accuracy", "pearson") and is_number(own)
    )
    for found, own in zip(runs, options, strict=True):
        best = best_row(found) or {}
        of = f"/{found.run.config.steps:,}" if found.options else ""
        rows.append(
            [
                found.name,
                found.run.status,
                number(best.get("loss")),
                *(number(best.get(name)) for name in measures),
                f"{found.run.step:,}{of}",
                *(value(own[name]) if name in own else "" for name in differing),
                duration(found.run.info.get("seconds")),
            ]
        )
    numbers = ["lowest validation loss", *map(column, measures), "steps"]
    header = ["run", "ended", *numbers, *differing, "time"]
    is_number_column = [own in numbers or own == "time" for own in header]
    if len(header) > max(MOST_COLUMNS, len(rows) + 1):
        header, *rows = map(list, zip(header, *rows, strict=True))
        is_number_column = [False] * len(header)
    caption = "Options that are equal in all runs are omitted."
    if measures:
        told = " and ".join(map(column, measures))
        caption = f"With the lowest validation loss comes its {told}. {caption}"
    return Cells("", caption, header, rows, is_number_column)

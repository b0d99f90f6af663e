"""The tables of a run: what was asked for, what came out, what made it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
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
from graphattn.cli.tables import Cells
from graphattn.train import RunConfig
from graphattn.train.records import Row

PLACES = ("data", "out")  # options without which no run is


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What evaluation.json holds, laid out.

    Attributes:
        rows: what was evaluated -> its numbers.
        reference: what needs no model, such as guessing by frequency -> its loss.
        bins: what was evaluated -> (reliability bins, calibration error).
        words: everything that is text.
    """

    rows: dict[str, dict[str, float]]
    reference: dict[str, float]
    bins: dict[str, tuple[list[Row], Any]]
    words: dict[str, str]


def laid_out(evaluation: Mapping[str, Any]) -> Evaluation:
    """Numbers by what they are of, however deep they lie."""
    found = Evaluation({}, {}, {}, {})
    for path, name, own in _leaves(evaluation, ()):
        guess = next((way for way in map(_guess, (name, *reversed(path))) if way), None)
        if isinstance(own, list):
            found.bins[" ".join(path[:-1] if path[-1:] == ("calibration",) else path)] = own, None
        elif isinstance(own, str):
            found.words[" ".join((*path, name))] = own
        elif guess is not None:
            measure = "loss" if _guess(name) else name
            found.rows.setdefault(guess, {})[measure] = own
            if measure == "loss":
                found.reference[guess] = own
        else:
            found.rows.setdefault(" ".join(path), {})[name] = own
    for name, (bins, _) in found.bins.items():
        for own in (name, f"{name} calibration".strip()):
            numbers = found.rows.get(own, {})
            for measure in ("error", "calibration_error", "expected_calibration_error", "ece"):
                if measure in numbers:
                    found.bins[name] = bins, numbers[measure]
    return found


def _leaves(
    given: Mapping[str, Any], path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], str, Any]]:
    for key, own in given.items():
        if isinstance(own, Mapping):
            yield from _leaves(own, (*path, str(key)))
        elif is_number(own) or isinstance(own, str) or _are_bins(own):
            yield path, str(key), own


def _are_bins(rows: Any) -> bool:
    """Whether it is what :meth:`graphattn.train.Calibration.rows` gives."""
    names = ("from", "to", "count", "confidence", "accuracy")
    return (
        isinstance(rows, list)
        and bool(rows)
        and all(isinstance(r, Mapping) and all(is_number(r.get(n)) for n in names) for r in rows)
    )


def _guess(name: str) -> str | None:
    """What a name says of guessing without a model."""
    if "bigram" in name:
        return "guessing by the token before"
    return "guessing by frequency" if "frequency" in name else None


# Tables.


def results(found: FoundRun, evaluation: Evaluation) -> Cells | None:
    """Losses and what comes with them, beside what needs no model."""
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
    own = {name: row for name, row in evaluation.rows.items() if name not in evaluation.reference}
    rows |= {name or "evaluation": row for name, row in own.items()}
    rows |= {name: evaluation.rows[name] for name in evaluation.reference}
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
        "Empty where it was not measured or is no finite number.",
        ["", *map(column, measures)],
        [[name, *(number(row.get(own)) for own in measures)] for name, row in rows.items()],
        [False, *(True for _ in measures)],
    )


def config_tables(found: FoundRun) -> tuple[Cells, Cells] | None:
    """Options that differ from their defaults, data and folder among them; and all others."""
    if found.options is None:
        return None
    usual = RunConfig().as_dict()
    changed, same = [], []
    for name, own in found.options.items():
        differs = name in PLACES or name not in usual or usual[name] != own
        (changed if differs else same).append([name, value(own)])
    header = ["option", "value"]
    return (
        Cells("", "", header, changed, [False, False]),
        Cells("", "", header, same, [False, False]),
    )


def origin(found: FoundRun) -> Cells | None:
    """What made a run."""
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


def comparison(runs: Sequence[FoundRun], evaluations: Sequence[Evaluation]) -> Cells:
    """A row per run: what their configs differ in, and what came out."""
    options = [found.options or {} for found in runs]
    names = dict.fromkeys(name for own in options for name in own if name != "out")
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
                f"{found.run.step:,}{of}",
                *(value(own[name]) if name in own else "" for name in differing),
                number(best.get("loss")),
                *(number(best.get(name)) for name in measures),
                duration(found.run.info.get("seconds")),
            ]
        )
    header = ["run", "ended", "steps", *differing, "lowest validation loss"]
    header += [*map(column, measures), "time"]
    is_text = {0, 1, *range(3, 3 + len(differing))}
    caption = "perplexity and what follows it are those of the lowest validation loss. " * bool(
        measures
    )
    caption += "Options in which the runs do not differ are left out."
    if any(own.reference for own in evaluations):
        caption += " What guessing without a model loses stands in the part of each run."
    caption = caption[0].upper() + caption[1:]
    return Cells("", caption, header, rows, [k not in is_text for k in range(len(header))])

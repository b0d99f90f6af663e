"""The part of a page about one run: options, curves, numbers, samples, layers and origin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from graphattn.cli.report import Notes, ReportSample, ReportSection
from graphattn.cli.runs_report import figures
from graphattn.cli.runs_report.certificates import certificates_of
from graphattn.cli.runs_report.reading import RunFiles
from graphattn.cli.runs_report.words import (
    best_row,
    column,
    duration,
    in_order,
    is_number,
    number,
    option_table,
    status,
    value,
)
from graphattn.plain_tables import Cells, short
from graphattn.train import RunConfig
from graphattn.train.runs.records import Row

PLACES = ("data", "out")  # options that every run has
MOST_COLUMNS = 10  # of a table as wide as a page
MOST_SAMPLES, LONGEST = 12, 4000  # samples and their characters on the page; the folder has all
GUESSES = {"frequency_loss": "guessing by frequency", "bigram_loss": "guessing by bigram"}


def sections_of(files: RunFiles, *, certify: bool) -> list[ReportSection]:
    """Return the sections of a run: curves and numbers, samples, and the state of its layers."""
    evaluations = evaluations_of(files)
    curves = figures.curves_of(files, _guesses_on_its_data(files, evaluations))
    parts = [
        _what_was_trained(files),
        ReportSection("Curves", curves) if curves else None,
        _results(files, evaluations),
        _samples(files.samples),
        certificates_of(files) if certify else None,
        _layers(files),
        _origin(files),
    ]
    return [part for part in parts if part is not None]


def opening(files: RunFiles) -> str:
    """Describe how a run ended, what was trained, and its best loss."""
    sentences = [status(files)]
    options = files.options
    if options is not None:
        model, mixer, data = (options.get(name) for name in ("model", "mixer", "data"))
        what = str(model or "") + (f", mixer {value(mixer)}" if mixer else "")
        where = f" on {data}" if data else ""
        objective = options.get("objective")
        objective = f", objective {objective}" if objective not in (None, "auto", "") else ""
        sentences.append(f"Model {what}{objective}{where}." if what else f"Trained{where}.")
    best = best_row(files)
    if best is not None:
        sentences.append(
            f"Lowest validation loss {number(best['loss'])}, at step {best['step']:,}."
        )
    for evaluation in evaluations_of(files):
        guesses = evaluation.guesses.items()
        if "loss" in evaluation.numbers and guesses:
            on = f" on {evaluation.name}" if evaluation.name else ""
            beside = " and ".join(f"{number(loss)} by {name}" for name, loss in guesses)
            loss = number(evaluation.numbers["loss"])
            sentences.append(f"Loss{on} {loss}, compared with {beside}.")
    return " ".join(sentences)


def notes(files: RunFiles) -> list[Notes]:
    """Return notes on missing parts of a run."""
    return [Notes(files.missing)] if files.missing else []


# Evaluations.


@dataclass(frozen=True)
class Evaluation:
    """Result of `graphattn evaluate` on some data."""

    name: str  # of the data; "" if the file has none
    numbers: dict[str, float]
    guesses: dict[str, float]  # losses of guessing without a model
    bins: list[Row]  # of the reliability diagram


def evaluations_of(files: RunFiles) -> list[Evaluation]:
    """Read evaluation.json; numbers outside of any evaluation become one without a name."""
    named = {name: row for name, row in files.evaluation.items() if isinstance(row, Mapping)}
    if not all(name in named or name == "calibration" for name in files.evaluation):
        named = {"": files.evaluation}
    return [_evaluation(name, row) for name, row in named.items()]


def _evaluation(name: str, row: Mapping[str, Any]) -> Evaluation:
    calibration = row.get("calibration")
    calibration = calibration if isinstance(calibration, Mapping) else {}
    bins = calibration.get("bins")
    hidden = {*GUESSES, *(f"{key}_error" for key in GUESSES)}
    numbers = {key: n for key, n in row.items() if is_number(n) and key not in hidden}
    if is_number(calibration.get("error")):
        numbers["calibration_error"] = calibration["error"]
    guesses = {guess: row[key] for key, guess in GUESSES.items() if is_number(row.get(key))}
    drawn = bins if isinstance(bins, list) and _are_bins(bins) else []
    return Evaluation(name, numbers, guesses, drawn)


def _are_bins(rows: list[Any]) -> bool:
    """Return whether rows have the form of :meth:`graphattn.train.Calibration.rows`."""
    names = ("from", "to", "count", "confidence", "accuracy")
    return bool(rows) and all(
        isinstance(row, Mapping) and all(is_number(row.get(name)) for name in names) for row in rows
    )


def _guesses_on_its_data(files: RunFiles, evaluations: Sequence[Evaluation]) -> dict[str, float]:
    """Return the losses of guessing on the run's own data, for comparison with its curves."""
    data = PurePath(str((files.options or {}).get("data", ""))).name
    for split in ("validation", "test"):
        for evaluation in evaluations:
            if evaluation.name == f"{data} {split}" and evaluation.guesses:
                return {f"{name} ({split})": loss for name, loss in evaluation.guesses.items()}
    return {}


# Sections.


def _what_was_trained(files: RunFiles) -> ReportSection | None:
    """Show the options that differ from defaults, with data and folder, then the others."""
    if files.options is None:
        return None
    usual = RunConfig().as_dict()
    differing = {
        name: given
        for name, given in files.options.items()
        if name in PLACES or name not in usual or usual[name] != given
    }
    same = {name: files.options[name] for name in files.options if name not in differing}
    parts: list[Any] = [
        "Options that differ from their defaults, and the paths of data and results.",
        option_table(differing),
    ]
    if same:
        title = f"{len(same)} options with their default values"
        parts.append(ReportSection(title, [option_table(same)], folded=True))
    return ReportSection("What was trained", parts)


def _results(files: RunFiles, evaluations: Sequence[Evaluation]) -> ReportSection | None:
    """Show losses and other numbers, beside those of guessing without a model."""
    rows: dict[str, Mapping[str, Any]] = {}
    best = best_row(files)
    if files.run.evaluations:
        last = files.run.evaluations[-1]
        if best is not None and best["step"] != last["step"]:
            rows[f"validation, lowest loss (step {best['step']:,})"] = best
        rows[f"validation, last (step {last['step']:,})"] = last
    elif files.run.training:
        last = files.run.training[-1]
        rows[f"training, last (step {last['step']:,})"] = {"loss": last.get("loss")}
    for evaluation in evaluations:
        data = evaluation.name
        rows[f"evaluation on {data}" if data else "evaluation"] = evaluation.numbers
        for name, loss in evaluation.guesses.items():
            rows[f"{name}, on {data}" if data else name] = {"loss": loss}
    parts: list[Any] = []
    if rows:
        measures = in_order(
            name
            for row in rows.values()
            for name, measured in row.items()
            if name not in ("step", "split", "lr", "grad_norm") and is_number(measured)
        )
        measures = measures or ["loss"]
        cells = [[name, *(number(row.get(m)) for m in measures)] for name, row in rows.items()]
        header = ["", *map(column, measures)]
        caption = "Empty cells were not measured or are not finite."
        parts.append(Cells("", caption, header, cells, [False, *(True for _ in measures)]))
    parts += [
        figures.reliability(e.name, e.bins, e.numbers.get("calibration_error"))
        for e in evaluations
        if e.bins
    ]
    return ReportSection("Results", parts) if parts else None


def _samples(samples: list[Row]) -> ReportSection | None:
    if not samples:
        return None
    parts: list[Any] = []
    if len(samples) > MOST_SAMPLES:
        parts.append(f"The first {MOST_SAMPLES} of {len(samples):,}.")
    for place, row in enumerate(samples[:MOST_SAMPLES], 1):
        text = next((row[key] for key in ("text", "sequence", "tokens") if key in row), None)
        prompt = row.get("prompt")
        shown = value(text) if isinstance(text, list) else "" if text is None else str(text)
        cut = f" Cut after {LONGEST:,} of {len(shown):,} characters." * (len(shown) > LONGEST)
        facts = "; ".join(
            f"{name.replace('_', ' ')}: {short(fact) if isinstance(fact, float) else value(fact)}"
            for name, fact in row.items()
            if name not in ("text", "sequence", "tokens", "prompt")
            and (is_number(fact) or isinstance(fact, str))
        )
        begin = f"Prompt: {prompt}\n" if isinstance(prompt, str) and prompt else ""
        caption = f"{begin}{facts}{cut}".strip()
        parts.append(ReportSample(f"Sample {place}", shown[:LONGEST], caption))
    return ReportSection("Samples", parts)


def _layers(files: RunFiles) -> ReportSection | None:
    pictures = figures.layers_of(files)
    if not pictures:
        return None
    intro = (
        "Measured in every layer during training, on the same few examples; darker lines are "
        "layers nearer to the input."
    )
    return ReportSection("Layers over time", [intro, *pictures])


def _origin(files: RunFiles) -> ReportSection | None:
    info = files.run.info
    versions = info.get("versions")
    facts = {
        "commit of graphattn": info.get("commit"),
        "digest of the config": info.get("config"),
        "seed": info.get("seed", ""),
        "device": info.get("device"),
        "processes": info.get("processes", ""),
        "started": info.get("started"),
        "ended": info.get("ended"),
        "trained for": duration(info.get("seconds")),
        "continued from step": info.get("continued"),
    }
    # A seed of 0 is a fact, and a number of processes that is None; others are not known.
    rows = [
        [name, value(fact)]
        for name, fact in facts.items()
        if fact or (name in ("seed", "processes") and fact != "")
    ]
    if isinstance(versions, Mapping):
        rows += [[f"version of {name}", value(of)] for name, of in versions.items() if of]
    if not rows:
        return None
    return ReportSection("Origin", [Cells("", "", ["", "value"], rows, [False, False])])


# Several runs.


def comparison(runs: Sequence[RunFiles]) -> Cells:
    """Make the table of several runs: options in which they differ, and results.

    Runs are rows, or columns if there are too many options for the width of a page.
    """
    options = [files.options or {} for files in runs]
    names = dict.fromkeys(name for given in options for name in given)
    differing = [
        name
        for name in names
        if name not in ("out", "steps")
        and len({value(given[name]) for given in options if name in given}) > 1
    ]
    measures = in_order(
        name
        for files in runs
        for name, measured in (best_row(files) or {}).items()
        if name in ("perplexity", "bits_per_byte", "accuracy", "f1_macro", "pearson")
        and is_number(measured)
    )
    rows = []
    for files, given in zip(runs, options, strict=True):
        best = best_row(files) or {}
        of = f"/{files.run.config.steps:,}" if files.options else ""
        rows.append(
            [
                files.name,
                files.run.status,
                number(best.get("loss")),
                *(number(best.get(name)) for name in measures),
                f"{files.run.step:,}{of}",
                *(value(given[name]) if name in given else "" for name in differing),
                duration(files.run.info.get("seconds")),
            ]
        )
    numbers = ["lowest validation loss", *map(column, measures), "steps"]
    header = ["run", "ended", *numbers, *differing, "time"]
    is_number_column = [name in numbers or name == "time" for name in header]
    if len(header) > max(MOST_COLUMNS, len(rows) + 1):
        header, *rows = map(list, zip(header, *rows, strict=True))
        is_number_column = [False] * len(header)
    caption = "Options that are equal in all runs are omitted."
    if measures:
        of_best = " and ".join(map(column, measures))
        caption = f"With the lowest validation loss comes its {of_best}. {caption}"
    return Cells("", caption, header, rows, is_number_column)

"""The part of a page about one run."""

from __future__ import annotations

from typing import Any

from graphattn.cli.report import Notes, ReportSample, ReportSection
from graphattn.cli.runs_report import figures, tables
from graphattn.cli.runs_report.certificates import certificates_of
from graphattn.cli.runs_report.reading import FoundRun
from graphattn.cli.runs_report.words import best_row, is_number, number, status, value
from graphattn.plain_tables import short
from graphattn.train.runs.records import Row

MOST_SAMPLES, LONGEST = (
    12,
    4000,
)  # samples on the page, characters per sample; the folder contains all


def sections_of(found: FoundRun, *, certify: bool) -> list[ReportSection]:
    """Return the sections of a run: curves and numbers, samples, and the state of its layers."""
    evaluations = tables.evaluations_of(found)
    drawn = figures.curves_of(found, tables.guesses_on_own_data(found, evaluations))
    parts = [
        _what_was_trained(found),
        ReportSection("Curves", drawn) if drawn else None,
        _results(found, evaluations),
        _samples(found.samples),
        certificates_of(found) if certify else None,
        _layers(found),
        _origin(found),
    ]
    return [part for part in parts if part is not None]


def opening(found: FoundRun) -> str:
    """Describe how a run ended, what was trained, and its best loss."""
    sentences = [status(found)]
    options = found.options
    if options is not None:
        what = str(options.get("model", ""))
        mixer = options.get("mixer")
        what += f", mixer {value(mixer)}" if mixer else ""
        data = options.get("data")
        where = f" on {data}" if data else ""
        objective = options.get("objective")
        objective = f", objective {objective}" if objective not in (None, "auto", "") else ""
        sentences.append(f"Model {what}{objective}{where}." if what else f"Trained{where}.")
    best = best_row(found)
    if best is not None:
        sentences.append(
            f"Lowest validation loss {number(best['loss'])}, at step {best['step']:,}."
        )
    for own in tables.evaluations_of(found):
        if "loss" in own.numbers and own.guesses:
            on = f" on {own.name}" if own.name else ""
            beside = " and ".join(f"{number(loss)} by {name}" for name, loss in own.guesses.items())
            sentences.append(f"Loss{on} {number(own.numbers['loss'])}, compared with {beside}.")
    return " ".join(sentences)


def notes(found: FoundRun) -> list[Notes]:
    """Return notes on missing parts of a run."""
    return [Notes(found.missing)] if found.missing else []


def _what_was_trained(found: FoundRun) -> ReportSection | None:
    made = tables.config_tables(found)
    if made is None:
        return None
    changed, same = made
    parts: list[Any] = [
        "Options that differ from their defaults, and the paths of data and results."
    ]
    parts.append(changed)
    if same.rows:
        parts.append(
            ReportSection(
                f"{len(same.rows)} options with their default values", [same], folded=True
            )
        )
    return ReportSection("What was trained", parts)


def _results(found: FoundRun, evaluations: list[tables.Evaluation]) -> ReportSection | None:
    table = tables.results(found, evaluations)
    parts: list[Any] = [] if table is None else [table]
    parts += [figures.reliability(own.name, own.bins, own.error) for own in evaluations if own.bins]
    return ReportSection("Results", parts) if parts else None


def _samples(samples: list[Row]) -> ReportSection | None:
    if not samples:
        return None
    parts: list[Any] = []
    if len(samples) > MOST_SAMPLES:
        parts.append(f"The first {MOST_SAMPLES} of {len(samples):,}.")
    for place, row in enumerate(samples[:MOST_SAMPLES], 1):
        text = next((row[own] for own in ("text", "sequence", "tokens") if own in row), None)
        prompt = row.get("prompt")
        shown = value(text) if isinstance(text, list) else "" if text is None else str(text)
        cut = f" Cut after {LONGEST:,} of {len(shown):,} characters." * (len(shown) > LONGEST)
        told = "; ".join(
            f"{name.replace('_', ' ')}: {short(own) if isinstance(own, float) else value(own)}"
            for name, own in row.items()
            if name not in ("text", "sequence", "tokens", "prompt")
            and (is_number(own) or isinstance(own, str))
        )
        said = f"Prompt: {prompt}\n" if isinstance(prompt, str) and prompt else ""
        parts.append(ReportSample(f"Sample {place}", shown[:LONGEST], f"{said}{told}{cut}".strip()))
    return ReportSection("Samples", parts)


def _layers(found: FoundRun) -> ReportSection | None:
    drawn = figures.layers_of(found)
    if not drawn:
        return None
    intro = (
        "Measured in every layer during training, on the same few examples; darker lines are "
        "layers nearer to the input."
    )
    return ReportSection("Layers over time", [intro, *drawn])


def _origin(found: FoundRun) -> ReportSection | None:
    table = tables.origin(found)
    return None if table is None else ReportSection("Origin", [table])

"""Format numbers, options and the status of a run as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from graphattn.cli.runs_report.reading import FoundRun
from graphattn.plain_tables import counted, short

NAMES = {  # names in an evaluation -> names in a table
    "loss": "loss",
    "nats": "nats per token",
    "perplexity": "perplexity",
    "pseudo_perplexity": "pseudo-perplexity",
    "bits_per_byte": "bits per byte",
    "bits_per_token": "bits per token",
    "accuracy": "accuracy",
    "calibration_error": "calibration error",
}


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number (True is not one)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def number(value: Any) -> str:
    """Format a number for a table; "" if it is not known."""
    if not is_number(value):
        return ""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if 1e-3 <= abs(value) < 1e4 or value == 0 else short(value)


def column(name: str) -> str:
    """Return the head of a column of numbers."""
    return NAMES.get(name, name.replace("_", " "))


def in_order(names: Iterable[str]) -> list[str]:
    """Return known measures first, then the others in their order."""
    found = list(dict.fromkeys(names))
    return [name for name in NAMES if name in found] + [name for name in found if name not in NAMES]


def duration(seconds: Any) -> str:
    """Format a time, such as 3 s, 12 min or 2.5 h; "" if it is not known."""
    if not is_number(seconds):
        return ""
    if seconds < 90:
        return f"{seconds:.0f} s" if seconds >= 1 else "under 1 s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def value(given: Any) -> str:
    """Format an option as YAML on one line."""
    if isinstance(given, Mapping):
        return ", ".join(f"{key}: {value(own)}" for key, own in given.items()) or "none"
    if isinstance(given, list | tuple):
        return "[" + ", ".join(map(value, given)) + "]"
    if given is None or given == "":
        return "none"
    if isinstance(given, bool):
        return "yes" if given else "no"
    return f"{given:g}" if isinstance(given, float) else str(given)


def status(found: FoundRun) -> str:
    """Describe in one sentence how a run ended, or its present step."""
    run = found.run
    of = f"step {run.step:,} of {run.config.steps:,}" if found.options else f"step {run.step:,}"
    time = duration(run.info.get("seconds"))
    taken = f" in {time}" if time else ""
    if run.status == "finished":
        return f"Finished: {counted(run.step, 'step')}{taken}."
    if run.status == "diverged":
        return (
            f"Diverged: the run ended at {of}{taken}, because its loss was no longer finite, or "
            "had stayed far above its first loss."
        )
    if run.status == "interrupted":
        return (
            f"Interrupted: the log ends at {of}. graphattn train --resume {run.path} continues it "
            "from its last checkpoint."
        )
    if run.status == "failed":
        error = run.info.get("error")
        return f"Failed at {of}: {error}" if error else f"Failed at {of}; its error is not known."
    if run.status == "running":
        return f"Running when this page was written, at {of}: these are not its final results."
    return f"How the run ended is not known; the log ends at {of}."


def best_row(found: FoundRun) -> dict[str, Any] | None:
    """Return the evaluation with the lowest loss."""
    known = [row for row in found.run.evaluations if is_number(row.get("loss"))]
    return min(known, key=lambda row: row["loss"], default=None)

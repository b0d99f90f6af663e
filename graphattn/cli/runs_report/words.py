"""Format numbers, options and the status of a run as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from graphattn.cli.runs_report.reading import RunFiles
from graphattn.plain_tables import Cells, counted, short

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
    once = list(dict.fromkeys(names))
    return [name for name in NAMES if name in once] + [name for name in once if name not in NAMES]


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
        return ", ".join(f"{key}: {value(inner)}" for key, inner in given.items()) or "none"
    if isinstance(given, list | tuple):
        return "[" + ", ".join(map(value, given)) + "]"
    if given is None or given == "":
        return "none"
    if isinstance(given, bool):
        return "yes" if given else "no"
    return f"{given:g}" if isinstance(given, float) else str(given)


def option_table(options: Mapping[str, Any]) -> Cells:
    """Make the table of some options."""
    rows = [[name, value(given)] for name, given in options.items()]
    return Cells("", "", ["option", "value"], rows, [False, False])


def status(files: RunFiles) -> str:
    """Describe in one sentence how a run ended, or its present step."""
    run = files.run
    of = f"step {run.step:,} of {run.config.steps:,}" if files.options else f"step {run.step:,}"
    time = duration(run.info.get("seconds"))
    taken = f" in {time}" if time else ""
    error = run.info.get("error")
    sentences = {
        "finished": f"Finished: {counted(run.step, 'step')}{taken}.",
        "diverged": f"Diverged: the run ended at {of}{taken}, because its loss was no longer "
        "finite, or had stayed far above its first loss.",
        "interrupted": f"Interrupted: the log ends at {of}. graphattn train --resume {run.path} "
        "continues it from its last checkpoint.",
        "failed": f"Failed at {of}: {error}"
        if error
        else f"Failed at {of}; its error is not known.",
        "running": f"Running when this page was written, at {of}: these are not its final results.",
    }
    return sentences.get(run.status, f"How the run ended is not known; the log ends at {of}.")


def best_row(files: RunFiles) -> dict[str, Any] | None:
    known = [row for row in files.run.evaluations if is_number(row.get("loss"))]
    return min(known, key=lambda row: row["loss"], default=None)

"""Rows of a benchmark as JSON, with where they come from; and two of them side by side."""

from __future__ import annotations

import json
import platform
import subprocess
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

import graphattn


@dataclass(frozen=True)
class Row:
    """One contender in one pass of one case. Times in seconds, memory in bytes."""

    case: str
    passes: str
    contender: str
    size: dict[str, int]
    median: float
    spread: float
    rounds: int
    ratio: float | None  # its time over graphattn's in the same run, if that has one
    peak: float | None
    share_of_bound: float | None
    error: float | None


def provenance(device: torch.device) -> dict[str, Any]:
    """Where the numbers of a record come from."""
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    else:
        hardware = f"{_processor()}, {torch.get_num_threads()} threads"
    return {
        "device": device.type,
        "hardware": hardware,
        "graphattn": graphattn.__version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": date.today().isoformat(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str | None:
    """The checkout's commit; None for an installed package."""
    folder = Path(graphattn.__file__).parent
    try:
        run = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True
        )
    except OSError:
        return None
    return run.stdout.strip() or None


def write(path: Path, facts: dict[str, Any], rows: list[Row], notes: list[str]) -> None:
    """One object: provenance, rows, and what is missing."""
    record = {"provenance": facts, "rows": [asdict(row) for row in rows], "missing": notes}
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """What :func:`write` wrote; a ValueError for anything else."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return record["provenance"], [Row(**row) for row in record["rows"]]
    except (KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no record of `graphattn bench`: {error!r}") from None

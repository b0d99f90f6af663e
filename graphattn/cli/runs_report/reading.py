"""Read folders of runs and sweeps, with a note for everything that cannot be read."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graphattn.train import Run, RunConfig, read_run
from graphattn.train.runs.folder import CONFIG, LOG, STATE, _is_locked, read_state
from graphattn.train.runs.records import Row

EVALUATION, SAMPLES, MODEL = "evaluation.json", "samples.jsonl", "model"
RESULTS, SHARED = "results.jsonl", "sweep.yaml"
OF_RUNS = (CONFIG, STATE, LOG, EVALUATION, SAMPLES, MODEL)
OF_SWEEPS = (RESULTS, SHARED)


@dataclass(frozen=True)
class FoundRun:
    """A run, with everything that its folder contains.

    Attributes:
        name: its name on the page.
        run: status, state and rows; the config is the default one if its file is broken.
        options: contents of config.yaml, or None.
        evaluation, samples: contents of these files.
        missing: a line for everything that is missing or damaged.
    """

    name: str
    run: Run
    options: dict[str, Any] | None
    evaluation: dict[str, Any]
    samples: list[Row]
    missing: list[str]


@dataclass(frozen=True)
class FoundSweep:
    """A sweep: the rows of its trials, and their common options."""

    name: str
    path: Path
    rows: list[Row]
    options: dict[str, Any] | None
    missing: list[str] = field(default_factory=list)


def read_folders(folders: Sequence[Path]) -> tuple[list[FoundRun], list[FoundSweep]]:
    """Read the runs and the sweeps among some folders.

    Raises: ValueError: if a folder does not exist, or is neither that of a run nor of a sweep.
    """
    runs, sweeps = [], []
    for folder, name in zip(folders, _names(folders), strict=True):
        if not folder.is_dir():
            raise ValueError(
                f"FOLDER must be the folder of a run or of a sweep, got {str(folder)!r}"
            )
        if any((folder / own).exists() for own in OF_SWEEPS):
            sweeps.append(_read_sweep(folder, name))
        elif any((folder / own).exists() for own in OF_RUNS):
            runs.append(_read_run(folder, name))
        else:
            raise ValueError(
                f"FOLDER must be the folder of a run or of a sweep, got {str(folder)!r}, which "
                f"contains neither {CONFIG} nor {RESULTS}"
            )
    return runs, sweeps


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the last part of every path, with as many parts before it as make names unique."""
    parts = [Path(os.path.abspath(folder)).parts for folder in folders]
    count = 1
    while count < max(map(len, parts)) and len({own[-count:] for own in parts}) < len(set(parts)):
        count += 1
    names = ["/".join(own[-count:]) for own in parts]
    # The same folder twice has the same name twice.
    return [f"{own} ({names[:k].count(own) + 1})" if own in names[:k] else own
            for k, own in enumerate(names)]  # fmt: skip


# Runs.


def _read_run(path: Path, name: str) -> FoundRun:
    missing: list[str] = []
    options = _read_options(path / CONFIG, missing)
    try:
        run = read_run(path)
        rows = run.rows
    except (ValueError, OSError):  # the files are read one by one below
        try:
            info = read_state(path)
        except (ValueError, OSError) as error:
            info = {}
            missing.append(f"{STATE} cannot be read: {_why(error, path)}")
        rows = _read_rows(path / LOG, missing, steps=True)
        config = RunConfig()
        if options is not None:
            known = {own.name for own in dataclasses.fields(RunConfig)}
            try:
                config = RunConfig(**{key: own for key, own in options.items() if key in known})
            except (ValueError, TypeError) as error:
                missing.append(f"{CONFIG}: {error}")
        run = Run(path, config, _status(path, info), info, rows)
    rows = [row for row in rows if _is_row(row)]
    if len(rows) < len(run.rows):
        missing.append(f"{LOG}: rows without numbers were omitted")
        run = dataclasses.replace(run, rows=rows)
    for own, what in ((STATE, "the end and the origin of the run"), (LOG, "its curves")):
        if not (path / own).exists():
            missing.append(f"There is no {own}, so {what} are unknown.")
    if (path / LOG).exists() and not rows:
        missing.append(f"{LOG} contains no rows, so there are no curves.")
    evaluation = _read_object(path / EVALUATION, missing)
    samples = _read_rows(path / SAMPLES, missing)
    absent = [own for own in (EVALUATION, SAMPLES, MODEL) if not (path / own).exists()]
    if absent:
        missing.append(f"Missing (or not written yet): {', '.join(absent)}.")
    return FoundRun(name, run, options, evaluation, samples, missing)


def _status(path: Path, info: dict[str, Any]) -> str:
    """Return the status by :func:`graphattn.train.read_run`."""
    status = str(info.get("status", "unknown"))
    try:
        was_killed = status == "running" and not _is_locked(path)
    except OSError:  # perhaps the folder belongs to another user
        return "unknown"
    return "interrupted" if was_killed else status


def _is_row(row: Row) -> bool:
    """Return whether a row contains only numbers where it should."""
    layers = row.get("layers")
    return layers is None or (
        isinstance(layers, dict) and all(isinstance(own, dict) for own in layers.values())
    )


def _read_options(path: Path, missing: list[str]) -> dict[str, Any] | None:
    if not path.is_file():
        missing.append(f"There is no {path.name}, so the options are unknown.")
        return None
    try:
        import yaml
    except ImportError as error:
        raise ImportError(
            "reports of runs need PyYAML: install it with pip install 'graphattn[train]'"
        ) from error
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, OSError) as error:
        missing.append(f"{path.name} cannot be read: {_why(error, path.parent)}")
        return None
    if not isinstance(found, dict):
        missing.append(f"{path.name} must contain names and values, got a {type(found).__name__}.")
        return None
    return {str(key): value for key, value in found.items()}


def _read_object(path: Path, missing: list[str]) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        missing.append(f"{path.name} cannot be read: {_why(error, path.parent)}")
        return {}
    if not isinstance(found, dict):
        missing.append(f"{path.name} must contain a JSON object, got a {type(found).__name__}.")
        return {}
    return found


def _read_rows(path: Path, missing: list[str], *, steps: bool = False) -> list[Row]:
    """Read the lines that are JSON objects (with a step), and note how many are not."""
    if not path.is_file():
        return []
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        missing.append(f"{path.name} cannot be read: {_why(error, path.parent)}")
        return []
    rows, broken = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and (not steps or type(row.get("step")) is int):
            rows.append(row)
        else:
            broken.append(number)
    if broken:
        first = ", ".join(map(str, broken[:5])) + (", ..." if len(broken) > 5 else "")
        many = "lines" if len(broken) > 1 else "line"
        missing.append(f"{path.name}: omitted because damaged: {many} {first} of {len(lines)}.")
    return rows


def _why(error: Exception, folder: Path) -> str:
    """Return an error as one line, without the folder, which the page already shows."""
    return " ".join(str(error).replace(f"{folder}{os.sep}", "").split())


# Sweeps.


def _read_sweep(path: Path, name: str) -> FoundSweep:
    missing: list[str] = []
    options = _read_options(path / SHARED, missing) if (path / SHARED).exists() else None
    rows = _read_rows(path / RESULTS, missing)
    if not (path / RESULTS).exists():
        missing.append(f"There is no {RESULTS}: no trial has ended yet, or the file was removed.")
    whole = [row for row in rows if _is_trial(row)]
    if len(whole) < len(rows):
        missing.append(
            f"{RESULTS}: omitted, because mixer, lr or status is missing: {len(rows) - len(whole)} "
            f"of {len(rows)} rows."
        )
    return FoundSweep(name, path, whole, options, missing)


def _is_trial(row: Row) -> bool:
    lr = row.get("lr")
    return (
        isinstance(row.get("mixer"), str)
        and isinstance(lr, int | float)
        and isinstance(row.get("status"), str)
    )

"""Read folders of runs and sweeps, with a note for everything that cannot be read."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
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
class RunFiles:
    """A run, with everything that its folder contains."""

    name: str  # on the page
    run: Run  # its config is the default one if the file is broken
    options: dict[str, Any] | None  # of config.yaml
    evaluation: dict[str, Any]
    samples: list[Row]
    missing: list[str]  # a line for everything that is missing or damaged


@dataclass(frozen=True)
class SweepFiles:
    """A sweep: the rows of its trials, and their common options."""

    name: str
    path: Path
    rows: list[Row]
    options: dict[str, Any] | None
    missing: list[str]


def read_folders(folders: Sequence[Path]) -> tuple[list[RunFiles], list[SweepFiles]]:
    """Read the runs and the sweeps among some folders.

    Raises: ValueError: if a folder does not exist, or is neither that of a run nor of a sweep.
    """
    runs, sweeps = [], []
    for folder, title in zip(folders, _names(folders), strict=True):
        if not folder.is_dir():
            raise ValueError(
                f"FOLDER must be the folder of a run or of a sweep, got {str(folder)!r}"
            )
        if any((folder / name).exists() for name in OF_SWEEPS):
            sweeps.append(_read_sweep(folder, title))
        elif any((folder / name).exists() for name in OF_RUNS):
            runs.append(_read_run(folder, title))
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
    while count < max(map(len, parts)) and len({p[-count:] for p in parts}) < len(set(parts)):
        count += 1
    names = ["/".join(p[-count:]) for p in parts]
    # The same folder twice has the same name twice.
    return [f"{name} ({names[:k].count(name) + 1})" if name in names[:k] else name
            for k, name in enumerate(names)]  # fmt: skip


# Runs.


def _read_run(path: Path, name: str) -> RunFiles:
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
            known = {field.name for field in dataclasses.fields(RunConfig)}
            try:
                config = RunConfig(**{key: options[key] for key in options if key in known})
            except (ValueError, TypeError) as error:
                missing.append(f"{CONFIG}: {error}")
        run = Run(path, config, _status(path, info), info, rows)
    rows = [row for row in rows if _is_row(row)]
    if len(rows) < len(run.rows):
        missing.append(f"{LOG}: rows without numbers were omitted")
        run = dataclasses.replace(run, rows=rows)
    for file, what in ((STATE, "the end and the origin of the run"), (LOG, "its curves")):
        if not (path / file).exists():
            missing.append(f"There is no {file}, so {what} are unknown.")
    if (path / LOG).exists() and not rows:
        missing.append(f"{LOG} contains no rows, so there are no curves.")
    evaluation = _read_object(path / EVALUATION, missing)
    samples = _read_rows(path / SAMPLES, missing)
    absent = [file for file in (EVALUATION, SAMPLES, MODEL) if not (path / file).exists()]
    if absent:
        missing.append(f"Missing (or not written yet): {', '.join(absent)}.")
    return RunFiles(name, run, options, evaluation, samples, missing)


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
        isinstance(layers, dict) and all(isinstance(numbers, dict) for numbers in layers.values())
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
        options = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, OSError) as error:
        missing.append(f"{path.name} cannot be read: {_why(error, path.parent)}")
        return None
    if not isinstance(options, dict):
        kind = type(options).__name__
        missing.append(f"{path.name} must contain names and values, got a {kind}.")
        return None
    return {str(key): value for key, value in options.items()}


def _read_object(path: Path, missing: list[str]) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        missing.append(f"{path.name} cannot be read: {_why(error, path.parent)}")
        return {}
    if not isinstance(content, dict):
        missing.append(f"{path.name} must contain a JSON object, got a {type(content).__name__}.")
        return {}
    return content


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


def _read_sweep(path: Path, name: str) -> SweepFiles:
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
    return SweepFiles(name, path, whole, options, missing)


def _is_trial(row: Row) -> bool:
    named = all(isinstance(row.get(name), str) for name in ("mixer", "status"))
    return named and isinstance(row.get("lr"), (int, float))

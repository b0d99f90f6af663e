"""Folders of runs and sweeps as they are read, with a line for each that cannot be."""

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
    """A run, as far as its folder goes.

    Attributes:
        name: what it is called on the page.
        run: status, state and rows; its config is the default one where the file is broken.
        options: what config.yaml says, or None.
        evaluation, samples: what those files hold.
        missing: a line for all that is absent or damaged.
    """

    name: str
    run: Run
    options: dict[str, Any] | None
    evaluation: dict[str, Any]
    samples: list[Row]
    missing: list[str]


@dataclass(frozen=True)
class FoundSweep:
    """A sweep: the rows of its trials, and the options that they share."""

    name: str
    path: Path
    rows: list[Row]
    options: dict[str, Any] | None
    missing: list[str] = field(default_factory=list)


def read_folders(folders: Sequence[Path]) -> tuple[list[FoundRun], list[FoundSweep]]:
    """The runs and the sweeps among some folders.

    Raises:
        ValueError: one is not there, or holds nothing of a run or of a sweep.
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
                f"holds neither {CONFIG} nor {RESULTS}"
            )
    return runs, sweeps


def _names(folders: Sequence[Path]) -> list[str]:
    """The last part of every path, and as many before it as tell them apart."""
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
    except (ValueError, OSError):  # what is wrong is found file by file
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
        missing.append(f"{LOG}: rows that hold no numbers were left out")
        run = dataclasses.replace(run, rows=rows)
    for own, what in ((STATE, "how the run ended and what made it"), (LOG, "its curves")):
        if not (path / own).exists():
            missing.append(f"There is no {own}: {what} cannot be told.")
    if (path / LOG).exists() and not rows:
        missing.append(f"{LOG} holds no rows: there are no curves.")
    evaluation = _read_object(path / EVALUATION, missing)
    samples = _read_rows(path / SAMPLES, missing)
    absent = [own for own in (EVALUATION, SAMPLES, MODEL) if not (path / own).exists()]
    if absent:
        missing.append(f"Not there (yet): {', '.join(absent)}.")
    return FoundRun(name, run, options, evaluation, samples, missing)


def _status(path: Path, info: dict[str, Any]) -> str:
    """Return the status by :func:`graphattn.train.read_run`."""
    status = str(info.get("status", "unknown"))
    try:
        was_killed = status == "running" and not _is_locked(path)
    except OSError:  # a folder of somebody else, perhaps
        return "unknown"
    return "interrupted" if was_killed else status


def _is_row(row: Row) -> bool:
    """Whether what should be numbers by name is that."""
    layers = row.get("layers")
    return layers is None or (
        isinstance(layers, dict) and all(isinstance(own, dict) for own in layers.values())
    )


def _read_options(path: Path, missing: list[str]) -> dict[str, Any] | None:
    if not path.is_file():
        missing.append(f"There is no {path.name}: what was asked for cannot be told.")
        return None
    try:
        import yaml
    except ImportError as error:
        raise ImportError("reports of runs need PyYAML: pip install 'graphattn[train]'") from error
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, OSError) as error:
        missing.append(f"{path.name} cannot be read: {_why(error, path.parent)}")
        return None
    if not isinstance(found, dict):
        missing.append(f"{path.name} must hold names and values, got a {type(found).__name__}.")
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
        missing.append(f"{path.name} must hold a JSON object, got a {type(found).__name__}.")
        return {}
    return found


def _read_rows(path: Path, missing: list[str], *, steps: bool = False) -> list[Row]:
    """The lines that are JSON objects (with a step); how many are not is said."""
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
        missing.append(f"{path.name}: left out, as damaged: {many} {first} of {len(lines)}.")
    return rows


def _why(error: Exception, folder: Path) -> str:
    """Return an error as one line without the folder, which the page names once."""
    return " ".join(str(error).replace(f"{folder}{os.sep}", "").split())


# Sweeps.


def _read_sweep(path: Path, name: str) -> FoundSweep:
    missing: list[str] = []
    options = _read_options(path / SHARED, missing) if (path / SHARED).exists() else None
    rows = _read_rows(path / RESULTS, missing)
    if not (path / RESULTS).exists():
        missing.append(f"There is no {RESULTS}: no trial is over, or the file is gone.")
    whole = [row for row in rows if _is_trial(row)]
    if len(whole) < len(rows):
        missing.append(
            f"{RESULTS}: left out, without mixer, lr or status: {len(rows) - len(whole)} of "
            f"{len(rows)} rows."
        )
    return FoundSweep(name, path, whole, options, missing)


def _is_trial(row: Row) -> bool:
    lr = row.get("lr")
    return (
        isinstance(row.get("mixer"), str)
        and isinstance(lr, int | float)
        and isinstance(row.get("status"), str)
    )

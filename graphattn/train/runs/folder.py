"""The folder of a run: config, status, log, and the lock of the writing process."""

from __future__ import annotations

import errno
import functools
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from graphattn.train.runs.config import FREE, RunConfig
from graphattn.train.runs.records import Row, read_rows, replace_text
from graphattn.version import __version__

CONFIG, STATE, LOG, LOCK = "config.yaml", "run.json", "log.jsonl", ".lock"
OVER = ("finished", "diverged")  # statuses of a run that has ended with a result


@dataclass(frozen=True)
class Run:
    """Record of a training run, read from its folder.

    Attributes:
        path: the folder.
        config: the resolved :class:`~graphattn.train.RunConfig`.
        status: "running", "finished", "diverged" (the loss became too large, which is also a
            result), "interrupted" (it can be continued, also if its process was killed) or
            "failed".
        info: contents of ``run.json``: commit, digest of the config, seed, versions, times.
        rows: all rows of ``log.jsonl``.

    Example:
        >>> import graphattn as ga
        >>> run = ga.train.read_run("runs/a")  # doctest: +SKIP
        >>> run.status, run.evaluations[-1]["loss"]  # doctest: +SKIP
        ('finished', 2.31)
    """

    path: Path
    config: RunConfig
    status: str
    info: dict[str, Any]
    rows: list[Row]

    @property
    def training(self) -> list[Row]:
        """Return the rows of training: "step", "loss" (mean per guess since the last row), "lr"."""
        return [row for row in self.rows if row.get("split") == "train"]

    @property
    def evaluations(self) -> list[Row]:
        """Return the rows of evaluations on the validation split."""
        return [row for row in self.rows if row.get("split") == "validation"]

    @property
    def layers(self) -> list[Row]:
        """Return the rows with the state of the layers, see :func:`graphattn.train.layer_state`."""
        return [row for row in self.rows if row.get("split") == "layers"]

    @property
    def step(self) -> int:
        """Return the last step in the log."""
        return max((row["step"] for row in self.rows), default=0)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {self.status}, step {self.step} of {self.config.steps})"


def read_run(folder: str | os.PathLike[str]) -> Run:
    """Read the folder of a training run, during the run or afterwards.

    Args:
        folder: the folder of the run, ``config.out``.

    Raises:
        FileNotFoundError: if it is not the folder of a run.
        ValueError: if a file in it is broken; the message names it.

    Example:
        >>> import graphattn as ga
        >>> ga.train.read_run("runs/a")  # doctest: +SKIP
        Run('runs/a', finished, step 2000 of 2000)
    """
    path = Path(folder)
    if not (path / CONFIG).is_file():
        raise FileNotFoundError(
            f"folder must be the folder of a run, got {str(path)!r}, which does not contain "
            f"{CONFIG}"
        )
    info = read_state(path)
    status = str(info.get("status", "interrupted"))
    if status == "running" and not _is_locked(path):
        status = "interrupted"  # its process was killed, so it could not write this status itself
    return Run(path, RunConfig.load(path / CONFIG), status, info, read_rows(path / LOG))


def read_state(path: Path) -> dict[str, Any]:
    """Read run.json; return an empty dict if it does not exist yet."""
    file = path / STATE
    if not file.is_file():
        return {}
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(state, dict):
        raise ValueError(f"{file} must contain a JSON object, got a {type(state).__name__}")
    return state


def write_state(path: Path, **changes: Any) -> None:
    """Change some values in run.json."""
    text = json.dumps({**read_state(path), **changes}, indent=2, default=str)
    replace_text(path / STATE, text + "\n")


def check_config(path: Path, config: RunConfig, processes: int) -> None:
    """Check that a run can be continued with a config, in which `steps` and FREE may differ."""
    if not (path / CONFIG).is_file():
        return
    there, here = RunConfig.load(path / CONFIG).as_dict(), config.as_dict()
    free = (*FREE, "accumulate")  # which is checked below, with the number of processes
    names = [name for name in here if name not in free and there[name] != here[name]]
    if "steps" in names and here["steps"] > there["steps"]:
        names.remove("steps")
    if names:
        raise ValueError(
            f"out must be a new folder or that of a run with the same config, got {str(path)!r}, "
            f"whose config differs: {differences(names, there, here)}. Choose another folder, or "
            "continue with the old config (only steps may grow)"
        )
    before = read_state(path).get("processes", processes)
    batches = [
        each["accumulate"] * (count // each["context_parallel"])
        for each, count in ((there, before), (here, processes))
    ]
    if batches[0] != batches[1]:
        raise ValueError(
            "out must be continued with as many batches per step, accumulate * processes / "
            f"context_parallel: the run in {str(path)!r} has {batches[0]} (accumulate "
            f"{there['accumulate']}, {before} processes), got {batches[1]} (accumulate "
            f"{here['accumulate']}, {processes} processes)"
        )


def differences(names: Sequence[str], there: dict[str, Any], here: dict[str, Any]) -> str:
    """Describe the options in which two configs differ."""
    return "; ".join(f"{name} was {there[name]!r}, is now {here[name]!r}" for name in names)


# Creation.


def make_folder(path: Path) -> None:
    """Make the folder of a run, without overwriting files of anything else."""
    with _as_bad_out(path):
        path.mkdir(parents=True, exist_ok=True)
        if (path / CONFIG).is_file():
            return
        # A process that was killed while it made the folder leaves only empty files and folders.
        taken = [name for name in ("model", "checkpoints", LOG) if _holds(path / name)]
    if taken:
        raise ValueError(
            f"out must be a new folder or that of a run, got {str(path)!r}, which contains "
            f"{' and '.join(taken)} but no {CONFIG}: choose another folder"
        )


def _holds(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.exists() and path.stat().st_size > 0


@contextmanager
def _as_bad_out(path: Path) -> Iterator[None]:
    """Convert an OSError to a ValueError about `out`, unless the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ValueError(
            f"out must be a folder in which files can be made, got {str(path)!r}: {error.strerror}"
        ) from error


def forget_failed(path: Path) -> None:
    """Remove a run that failed before its first log row and checkpoint.

    It has no results, and another config, which may be needed, can then use the folder.
    """
    if read_state(path).get("status") != "failed" or read_rows(path / LOG):
        return
    if not any(_holds(path / name) for name in ("model", "checkpoints")):
        for name in (CONFIG, "tokenizer.json", LOG, STATE):
            (path / name).unlink(missing_ok=True)


# Locks.


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Prevent other processes from writing into a run; the lock ends with this process."""
    with _as_bad_out(path):
        handle = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    holding = [handle]
    # Data-loading processes must not inherit the lock: they may outlive a killed process.
    os.register_at_fork(after_in_child=lambda: _close(holding))
    try:
        if not _lock(handle, patience=0.5):
            raise ValueError(
                f"out must not be in use, but another process is training in {str(path)!r}: wait "
                "for it, or choose another folder"
            )
        yield
    finally:
        holding.clear()
        os.close(handle)


def _close(handles: list[int]) -> None:
    while handles:
        os.close(handles.pop())


def _is_locked(path: Path) -> bool:
    if not (path / LOCK).is_file():
        return False
    # Read-only, because the folder may belong to another user.
    handle = os.open(path / LOCK, os.O_RDONLY)
    try:
        return not _lock(handle)
    finally:
        os.close(handle)


def _lock(handle: int, patience: float = 0.0) -> bool:
    """Try to lock a file and return whether it worked; True if the system has no such locks.

    Checking a lock takes it for a moment, so a process that starts to write tries again for
    `patience` seconds.
    """
    try:
        import fcntl
    except ImportError:
        return True
    end = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() >= end:
                return False
            time.sleep(0.01)
        else:
            return True


# Provenance of results.


def origin(config: RunConfig) -> dict[str, Any]:
    """Describe the origin of a number: commit, digest of the config, seed, versions."""
    versions: dict[str, str | None] = {"graphattn": __version__}
    versions["python"] = platform.python_version()
    for name in ("torch", "transformers", "accelerate", "datasets", "numpy"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    made_by = {"commit": commit(), "config": config.digest()}
    return {**made_by, "seed": config.seed, "versions": versions}


def commit() -> str | None:
    """Return the commit of graphattn's checkout, with "-dirty" if files differ, or None."""
    file = Path(__file__)
    git = functools.partial(subprocess.run, capture_output=True, text=True, timeout=10)
    where = ["git", "-C", str(file.parent)]
    try:
        tracked = git([*where, "ls-files", "--error-unmatch", file.name])
        description = git(
            [*where, "describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*"]
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    # If graphattn is installed inside another repository, that commit is not its own.
    is_known = tracked.returncode == description.returncode == 0
    return description.stdout.strip() or None if is_known else None


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")

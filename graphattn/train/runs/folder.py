"""The folder of a run: its config, how it stands, its log, and who is writing there."""

from __future__ import annotations

import errno
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from graphattn.train.runs.config import RunConfig
from graphattn.train.runs.records import Row, read_rows, replace_file, replace_text
from graphattn.version import __version__

CONFIG, STATE, LOG, LOCK = "config.yaml", "run.json", "log.jsonl", ".lock"
FREE = ("out", "workers", "log_to")  # what a run does not depend on
OVER = ("finished", "diverged")  # a run that is a result already


@dataclass(frozen=True)
class Run:
    """Record of a training run, read from its folder.

    Attributes:
        path: the folder.
        config: the resolved :class:`~graphattn.train.RunConfig`.
        status: "running", "finished", "diverged" (the loss ran away: a result like others),
            "interrupted" (to be continued; so is one whose process was killed) or "failed".
        info: what ``run.json`` holds: commit, digest of the config, seed, versions, times.
        rows: all of ``log.jsonl``.

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
        """The rows of training: "step", "loss" (the mean per answer since the row before), "lr"."""
        return [row for row in self.rows if row.get("split") == "train"]

    @property
    def evaluations(self) -> list[Row]:
        """The rows of evaluations on the validation split, with what the objective reports."""
        return [row for row in self.rows if row.get("split") == "validation"]

    @property
    def layers(self) -> list[Row]:
        """The rows of the layers' state, see :func:`graphattn.train.layer_state`."""
        return [row for row in self.rows if row.get("split") == "layers"]

    @property
    def step(self) -> int:
        """The last step that was logged."""
        return max((row["step"] for row in self.rows), default=0)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {self.status}, step {self.step} of {self.config.steps})"


def read_run(folder: str | os.PathLike[str]) -> Run:
    """Read what a training run has left in its folder, while it goes on or afterwards.

    Args:
        folder: that of the run, ``config.out``.

    Raises:
        FileNotFoundError: it is no folder of a run.
        ValueError: a file in it is broken; the message names it.

    Example:
        >>> import graphattn as ga
        >>> ga.train.read_run("runs/a")  # doctest: +SKIP
        Run('runs/a', finished, step 2000 of 2000)
    """
    path = Path(folder)
    if not (path / CONFIG).is_file():
        raise FileNotFoundError(f"folder must be that of a run, got {str(path)!r}: no {CONFIG}")
    info = read_state(path)
    status = str(info.get("status", "interrupted"))
    if status == "running" and not _is_locked(path):
        status = "interrupted"  # killed: nobody is there who could have said so
    return Run(path, RunConfig.load(path / CONFIG), status, info, read_rows(path / LOG))


def read_state(path: Path) -> dict[str, Any]:
    """Read run.json; nothing where there is none yet."""
    file = path / STATE
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file} must hold a JSON object, got a {type(found).__name__}")
    return found


def write_state(path: Path, **changes: Any) -> None:
    """Change some of what run.json holds."""
    text = json.dumps({**read_state(path), **changes}, indent=2, default=str)
    replace_text(path / STATE, text + "\n")


def write_config(path: Path, config: RunConfig) -> None:
    """Write config.yaml, whole or not at all."""
    replace_file(path / CONFIG, config.save)


def check_config(path: Path, config: RunConfig, processes: int) -> None:
    """Refuse to go on with a run that another config began.

    Raises:
        ValueError: names what differs, there and here. Steps may grow, and what a run does not
            depend on may change.
    """
    if not (path / CONFIG).is_file():
        return
    there, here = RunConfig.load(path / CONFIG).as_dict(), config.as_dict()
    names = [name for name in here if name not in FREE and there[name] != here[name]]
    if "steps" in names and here["steps"] > there["steps"]:
        names.remove("steps")
    if names:
        told = "; ".join(f"{name} is {there[name]!r} there, {here[name]!r} here" for name in names)
        raise ValueError(
            f"out: {str(path)!r} holds a run of another config: {told}. Choose another folder, or "
            "go on with that config (only steps may grow)"
        )
    before = read_state(path).get("processes", processes)
    if before != processes:
        raise ValueError(
            f"out: {str(path)!r} holds a run of {before} processes, which sets the size of its "
            f"batches: it goes on with as many, got {processes}"
        )


# Making it.


def make_folder(path: Path) -> None:
    """Make the folder of a run, where nothing of somebody else's would be written over.

    Raises:
        ValueError: it cannot be made, or holds files that a run would replace.
    """
    with _as_bad_out(path):
        path.mkdir(parents=True, exist_ok=True)
        if (path / CONFIG).is_file():
            return
        # What a process that was killed while it made the folder may have left is empty.
        taken = [name for name in ("model", "checkpoints", LOG) if _holds(path / name)]
    if taken:
        raise ValueError(
            f"out: {str(path)!r} holds {' and '.join(taken)}, which a run would replace, and no "
            f"{CONFIG}: choose another folder"
        )


def _holds(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.exists() and path.stat().st_size > 0


@contextmanager
def _as_bad_out(path: Path) -> Iterator[None]:
    """An error of the system as one of the argument, but for a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ValueError(
            f"out must be a folder in which files can be made, got {str(path)!r}: {error.strerror}"
        ) from error


def forget_failed(path: Path) -> None:
    """Remove what is left of a run that failed before its first row and checkpoint.

    Nothing came of it, and what made it fail can be changed only by another config.
    """
    if read_state(path).get("status") != "failed" or read_rows(path / LOG):
        return
    if not any(_holds(path / name) for name in ("model", "checkpoints")):
        for name in (CONFIG, "tokenizer.json", LOG, STATE):
            (path / name).unlink(missing_ok=True)


# Who is writing.


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other processes from writing into a run; the lock ends with the process that holds it.

    Raises:
        ValueError: another process holds it.
    """
    with _as_bad_out(path):
        handle = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    holding = [handle]
    # Processes that load data must not hold the lock of one that was killed.
    os.register_at_fork(after_in_child=lambda: _close(holding))
    try:
        if not _lock(handle, patience=0.5):
            raise ValueError(
                f"out: another process is training in {str(path)!r}: wait for it, or choose "
                "another folder"
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
    handle = os.open(path / LOCK, os.O_RDONLY)  # the folder may belong to somebody else
    try:
        return not _lock(handle)
    finally:
        os.close(handle)


def _lock(handle: int, patience: float = 0.0) -> bool:
    """Whether a file could be locked; True where the system has no such locks.

    A process that only looks whether a run is locked holds the lock for a moment, so a process
    that starts to write tries again for `patience` seconds.
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


# Where results come from.


def provenance(config: RunConfig, device: str, processes: int) -> dict[str, Any]:
    """Return the facts behind a result that its config does not hold: commit, versions, machine."""
    return {**origin(config), "device": device, "processes": processes}


def origin(config: RunConfig) -> dict[str, Any]:
    """Describe the origin of a number: commit, digest of the config, seed, versions."""
    names = ("torch", "transformers", "accelerate", "datasets", "numpy")
    return {
        "commit": commit(),
        "config": config.digest(),
        "seed": config.seed,
        "versions": {
            "graphattn": __version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in names},
        },
    }


def commit() -> str | None:
    """The commit of graphattn's own checkout, with "-dirty" where files differ; None elsewhere."""
    own = Path(__file__)
    git = ["git", "-C", str(own.parent)]
    try:
        known = subprocess.run(
            [*git, "ls-files", "--error-unmatch", own.name], capture_output=True, timeout=10
        )
        told = subprocess.run(
            [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    # Installed beside somebody else's files, it is none of that repository's.
    return told.stdout.strip() or None if known.returncode == told.returncode == 0 else None


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

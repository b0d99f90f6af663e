"""The queue of trials of a sweep, in Optuna's storage, for several processes."""

from __future__ import annotations

import json
import math
import os
import platform
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from graphattn.train.runs.config import FREE, RunConfig
from graphattn.train.runs.folder import Run, differences, origin, read_run
from graphattn.train.runs.records import Row, finite, replace_file, replace_text
from graphattn.train.sweeps.grid import Trial
from graphattn.train.sweeps.results import ORIGIN, RESULTS, outcome

SHARED, STORAGE, LOCK, ROWS = "sweep.yaml", "trials.db", ".sweep.lock", "results.jsonl"
OF_TRIALS = (*FREE, "mixer", "lr", "seed")  # options that may differ within a sweep
MOST_KILLED = 5  # a trial whose processes were killed this often is not started again
SECONDS = 120  # how long to wait for a busy database
NUMBERS = ("loss", "best_loss", "best_step", "step", "diverged_at", "seconds", "error")
NAMED = "name"  # the attribute of an Optuna trial that contains the name of the trial

Train = Callable[[RunConfig], Run]


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop, and has saved its state."""


class TrialQueue:
    """Queue of trials, their workers and their outcomes.

    A process adds and takes trials only while it has the lock of the folder: with SQLite alone, two
    processes could take the same trial, because reading and writing its state are two statements. A
    trial that is being trained has its own lock, which ends with its process. Killed processes are
    detected by that lock on the same machine, and on other machines by Optuna's heartbeat, which
    has stopped for `grace` seconds.
    """

    def __init__(self, folder: Path, grace: int) -> None:
        try:
            import optuna
        except ImportError as error:
            raise ImportError(
                "sweeps need optuna: install it with pip install 'graphattn[train]'"
            ) from error
        self.optuna, self.folder = optuna, folder
        self.lock = FileLock(folder / LOCK)
        with self.lock, self._without_logs(), self._as_damaged():
            storage = optuna.storages.RDBStorage(
                f"sqlite:///{(folder / STORAGE).absolute()}",
                engine_kwargs={"connect_args": {"timeout": SECONDS}},
                heartbeat_interval=max(1, grace // 6),
                grace_period=grace,
            )
            self.study = optuna.create_study(
                storage=storage,
                study_name="sweep",
                sampler=optuna.samplers.RandomSampler(),
                load_if_exists=True,
            )
        self.alone: Any = None  # the lock of the current trial
        self.finished: Row | None = None  # the row of the last trial of this process

    @contextmanager
    def _as_damaged(self) -> Iterator[None]:
        """Raise a ValueError if the storage cannot be read, or is missing beside results."""
        from sqlalchemy.exc import SQLAlchemyError

        path, rows = self.folder / STORAGE, self.folder / ROWS
        is_empty = not path.is_file() or not path.stat().st_size
        if is_empty and rows.is_file() and rows.stat().st_size:
            raise ValueError(
                f"{str(path)!r} is missing or empty, although {ROWS} contains results: restore the "
                "file, or choose another folder as out"
            )
        try:
            yield
        except (SQLAlchemyError, self.optuna.exceptions.StorageInternalError) as error:
            reason = str(getattr(error, "orig", None) or error)
            raise ValueError(
                f"{str(path)!r} cannot be read as the trials of a sweep ({reason}): restore a "
                f"complete copy, or choose another folder as out. Results so far are in {ROWS}"
            ) from error

    @contextmanager
    def _without_logs(self) -> Iterator[None]:
        """Silence Optuna: rows contain errors, and its "experimental" heartbeat works."""
        logging = self.optuna.logging
        level = logging.get_verbosity()
        logging.set_verbosity(logging.CRITICAL)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", self.optuna.exceptions.ExperimentalWarning)
                yield
        finally:
            logging.set_verbosity(level)

    # Waiting trials.

    def add(self, trials: Iterable[Trial], *, retry_failed: bool = False) -> None:
        """Enqueue new trials, those of killed processes, and those to retry."""
        with self.lock:
            known = self._enqueue_left()
            for tries in known.values() if retry_failed else ():
                if _status(tries) == "failed":
                    self._enqueue(_trial_of(tries))
            for trial in trials:
                if trial.name not in known:
                    self._enqueue(trial)
            self._write_rows()

    def _enqueue(self, trial: Trial) -> None:
        self.study.enqueue_trial({}, user_attrs=vars(trial) | {NAMED: trial.name})

    def _enqueue_left(self) -> dict[str, list[Any]]:
        """Enqueue again trials without a result and without a process; return all tries so far.

        If a process is killed at any time, even in this method, the next process finds its trial.
        """
        states = self.optuna.trial.TrialState
        tries_of = self._by_name()
        if running := [each[-1] for each in tries_of.values() if each[-1].state == states.RUNNING]:
            for trial in running:
                self._fail_if_dead(trial)
            with self._without_logs():
                self.optuna.storages.fail_stale_trials(self.study)
            tries_of = self._by_name()
        for tries in tries_of.values():
            if tries[-1].state == states.FAIL and _status(tries) == "interrupted":
                self._enqueue(_trial_of(tries))
        return tries_of

    def _fail_if_dead(self, trial: Any) -> None:
        """Mark a try as failed if its process on this machine has ended, and remove its lock."""
        if trial.user_attrs.get("host") != platform.node():
            return  # locks of other machines may not be visible here
        states = self.optuna.trial.TrialState
        with suppress(Timeout), self._lock_of(trial.user_attrs[NAMED]).acquire(timeout=0):
            # Its process may have finished it in the meantime.
            now = self.study.get_trials(deepcopy=False)[trial.number]
            if now.state == states.RUNNING:
                self.study.tell(trial.number, state=states.FAIL)

    def _is_gone(self, trial: Any) -> bool:
        """Return whether a trial that was taken on this machine has no process any more."""
        if trial.user_attrs.get("host") != platform.node():
            return False
        with suppress(Timeout, OSError), self._lock_of(trial.user_attrs[NAMED]).acquire(timeout=0):
            return True
        return False

    def _lock_of(self, name: str) -> FileLock:
        folder = self.folder / ".locks"
        folder.mkdir(exist_ok=True)
        return FileLock(folder / name)

    # Work on trials.

    def work(self, train: Train) -> Row | None:
        """Take a trial, train it, and write its result; return None if none is waiting.

        Raises:
            Interrupted: if the run was asked to stop; its trial is waiting again.
        """
        self.finished = None
        self.lock.acquire()
        try:
            statuses = {_status(tries) for tries in self._enqueue_left().values()}
            if not statuses & {"waiting", "interrupted"}:
                return None
            try:
                # With the lock, no other process can take a waiting trial.
                with self._without_logs():
                    self.study.optimize(lambda trial: self._train(trial, train), n_trials=1)
            except Exception:
                # An error of the training is stored with its trial. If another process took this
                # trial because its heartbeat had stopped, Optuna does not accept a result here;
                # that process finds the finished run.
                if self.finished is None:
                    raise
        except KeyboardInterrupt:
            self.lock.acquire()
            self._enqueue_left()
            self._write_rows()
            raise
        finally:
            self.lock.release(force=True)
            if self.alone is not None:  # release it only after Optuna has stored the result
                self.alone.release(force=True)
                self.alone = None
        with self.lock:
            self._write_rows()
        return self.finished

    def _train(self, trial: Any, train: Train) -> float:
        """Train a trial; Optuna calls this with the lock of the folder, which is released here."""
        combination = _trial_of([trial])
        self.alone = self._lock_of(combination.name)
        with suppress(Timeout):
            self.alone.acquire(timeout=0)  # before other processes can check this lock
        trial.set_user_attr("host", platform.node())
        self.lock.release(force=True)
        shared = RunConfig.load(self.folder / SHARED)
        config = combination.config(shared, os.fspath(self.folder / "trials" / combination.name))
        made_by = origin(config)
        try:
            self.alone.acquire()  # the former process is still alive: wait for its result
            result = outcome_of(train, config)
            self.finished = _row(combination, result)
            trial.set_user_attr("result", json.dumps(finite(result.items())))
            return math.inf if result["loss"] is None else float(result["loss"])
        except KeyboardInterrupt:
            trial.set_user_attr("asked", True)
            raise
        except Exception as error:
            if self.finished is None:
                result = {"status": "failed", "error": f"{type(error).__name__}: {error}"}
                result |= {name: made_by[name] for name in ORIGIN}
                self.finished = _row(combination, result)
                trial.set_user_attr("error", json.dumps(finite(result.items())))
            raise

    # Status.

    def is_over(self) -> bool:
        """Return whether no trial is waiting or running."""
        over = (*RESULTS, "failed")
        return all(_status(tries) in over for tries in self._by_name().values())

    def rows(self) -> list[Row]:
        """Return a row per trial, in the order in which they were enqueued."""
        return [_row(_trial_of(tries), self._state(tries)) for tries in self._by_name().values()]

    def _state(self, tries: list[Any]) -> Row:
        row: Row = {"status": _status(tries)}
        attributes = tries[-1].user_attrs
        if row["status"] in RESULTS:
            return {**json.loads(attributes["result"])}
        if row["status"] == "failed":
            row["error"] = f"its process was killed {MOST_KILLED} times"
            row |= json.loads(attributes.get("error", "{}"))
        elif row["status"] == "running":
            if self._is_gone(tries[-1]):
                row["status"] = "interrupted"  # until another process continues it
            with suppress(FileNotFoundError, ValueError):  # the folder is just being made
                run = read_run(self.folder / "trials" / attributes[NAMED])
                row |= {"step": run.step, "config": run.info.get("config")}
        return row

    def _write_rows(self) -> None:
        text = "".join(json.dumps(finite(row.items())) + "\n" for row in self.rows())
        replace_text(self.folder / ROWS, text)

    def _by_name(self) -> dict[str, list[Any]]:
        """Return all tries of every trial, the last one last."""
        tries_of: dict[str, list[Any]] = {}
        for trial in self.study.get_trials(deepcopy=False):
            if NAMED in trial.user_attrs:
                tries_of.setdefault(trial.user_attrs[NAMED], []).append(trial)
        return tries_of


def check_folder(folder: Path, shared: RunConfig) -> None:
    """Check that a folder is new or contains this sweep."""
    # Check the config first: if another process makes the folder, it writes the config first.
    inside = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if not (folder / SHARED).is_file():
        if any(name != LOCK and not name.startswith(f".{SHARED}.") for name in inside):
            raise ValueError(
                f"out must be a new folder or that of a sweep, got {str(folder)!r}, which contains "
                "other files: choose another folder"
            )
        return
    there, here = (config.as_dict() for config in (RunConfig.load(folder / SHARED), shared))
    names = [name for name in here if name not in OF_TRIALS and there[name] != here[name]]
    if names:
        raise ValueError(
            "out must be a new folder or that of a sweep with the same options, got "
            f"{str(folder)!r}, whose options differ: {differences(names, there, here)}. Choose "
            "another folder, or continue with the old options (you can add mixers, lrs, seeds and "
            "a grid)"
        )


def open_folder(folder: Path, shared: RunConfig) -> None:
    """Make the folder of a sweep, or check that it contains this sweep."""
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / LOCK):
        check_folder(folder, shared)
        if not (folder / SHARED).is_file():
            replace_file(folder / SHARED, shared.save)


def outcome_of(train: Train, config: RunConfig) -> Row:
    """Train, and return the result; raise Interrupted if the run was asked to stop."""
    run = train(config)
    if run.status == "interrupted":
        raise Interrupted
    if run.status not in RESULTS:
        raise RuntimeError(f"the run ended as {run.status!r}: {run.info.get('error')}")
    return outcome(run)


def _trial_of(tries: list[Any]) -> Trial:
    attributes = tries[-1].user_attrs
    options = tuple((name, value) for name, value in attributes.get("options", ()))
    return Trial(attributes["mixer"], attributes["lr"], attributes["seed"], options)


def _status(tries: list[Any]) -> str:
    """Return the status of a trial, from all its tries."""
    last = tries[-1]
    state = last.state.name
    if state == "COMPLETE":
        return str(json.loads(last.user_attrs["result"])["status"])
    if state == "RUNNING":
        return "running"
    if state == "WAITING":
        return "waiting" if len(tries) == 1 else "interrupted"
    if "error" in last.user_attrs:
        return "failed"
    killed = [each for each in tries if each.state == last.state and "asked" not in each.user_attrs]
    return "failed" if len(killed) >= MOST_KILLED else "interrupted"


def _row(trial: Trial, state: Row) -> Row:
    known = {
        **vars(trial),
        "options": dict(trial.options),
        "status": None,
        **dict.fromkeys((*NUMBERS, *ORIGIN)),
        **state,
    }
    return {**known, "folder": f"trials/{trial.name}"}

"""Run sweeps over mixers, learning rates and seeds, in several processes."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from graphattn.graphs.arguments import as_int
from graphattn.train.engine import fit_prepared
from graphattn.train.runs.config import RunConfig
from graphattn.train.runs.folder import Run
from graphattn.train.runs.records import Row
from graphattn.train.runs.setup import prepare
from graphattn.train.sweeps.grid import Trial, as_grid, as_mixers, as_rates, trials_of
from graphattn.train.sweeps.queue import (
    ROWS,
    SHARED,
    STORAGE,
    Interrupted,
    Train,
    TrialQueue,
    check_folder,
    open_folder,
)

POLL = 0.5  # seconds between checks of trials that other processes are training
Tell = Callable[[Row], None]


def run_sweep(
    config: RunConfig,
    *,
    mixers: str | Sequence[str],
    lrs: str | float | Sequence[float],
    seeds: int = 1,
    grid: Mapping[str, Sequence[Any]] | Sequence[str] | str | None = None,
    processes: int = 1,
    grace: int = 60,
    retry_failed: bool = False,
    train: Train | None = None,
    tell: Tell | None = None,
) -> list[Row]:
    """Train a model with every mixer at every learning rate, several times.

    The folder ``config.out`` contains ``sweep.yaml`` (the common options), Optuna's storage
    ``trials.db``, the folder of every run in ``trials/``, and ``results.jsonl`` with a row per
    trial. Any number of processes, started by this call or separately, can work on the sweep
    together; they never train the same trial at the same time. A second call continues the sweep,
    and can add mixers, rates and seeds.

    A trial that diverges is a result like others. If a trial fails, its error is stored, and the
    sweep continues. If the process of a trial was killed, the trial continues from its checkpoint.

    Args:
        config: the common options of all trials; each trial sets mixer, lr and seed. A trial gets
            those `mixer_options` that its mixer takes.
        mixers: names of mixers, as a list or separated by commas.
        lrs: learning rates, or text: ``1e-4,3e-4`` or ``1e-4..5e-2:7``, which are 7 values from
            1e-4 to 5e-2, each the same multiple of the one before.
        seeds: number of training runs per combination, with the seeds 0, 1, ...
        grid: further options with several values, ``{"window": [1, 2, 4], "rank": [2, 4]}`` or
            ``"window=1,2,4 rank=2,4"``: fields of :class:`RunConfig` (but for those of the data),
            or options of mixers. Every combination is trained; a mixer that does not take an option
            is trained once for all its values.
        processes: number of processes that work on the trials, including this one. With more than
            one, the calling script must be importable (``if __name__ == "__main__"``).
        grace: number of seconds without a heartbeat after which a process on another machine counts
            as killed. On this machine it is detected at once.
        retry_failed: whether to train failed trials again.
        train: function that trains one config; it must be picklable. None prepares data and model
            from the config, and calls :func:`fit`.
        tell: function that is called with the row of every finished trial, in the process that
            trained it.

    Returns:
        The rows of all trials, as in :func:`read_sweep`.

    Raises:
        ValueError: if an argument is not allowed, for instance because the folder contains a sweep
            with other options; the message names it and says what is allowed.
        KeyboardInterrupt: if the sweep was asked to stop; the trials have saved their state.
        ImportError: if optuna is missing.

    Example:
        >>> import graphattn as ga
        >>> config = ga.train.RunConfig(data="proteins.fasta", steps=500, out="sweeps/a")
        >>> rows = ga.train.run_sweep(
        ...     config, mixers=["dot", "mix"], lrs="1e-4..1e-2:5", seeds=2)  # doctest: +SKIP
        >>> ga.train.summarize_sweep(rows)[1].stable  # doctest: +SKIP
        (0.0001, 0.01)
    """
    seeds = as_int("seeds", seeds, 1)
    names = as_mixers(mixers, config.mixer_options)
    trials = trials_of(names, as_rates(lrs), seeds, as_grid(grid, names))
    processes, grace = _checked(processes, grace)
    if not config.out:
        raise ValueError("out must be the path of the folder of the sweep, got ''")
    if config.validation <= 0:
        raise ValueError(
            "validation must be > 0 in a sweep, because trials are compared by their validation "
            "loss, got 0"
        )
    folder = Path(config.out)
    given = {name: getattr(config, name) for name in ("data", "tokenizer", "model")}
    # With absolute paths, the sweep can be continued from another working folder.
    paths = {name: os.path.abspath(path) for name, path in given.items() if os.path.exists(path)}
    shared = config.replace(mixer=None, out="", seed=0, **paths)
    check_folder(folder, shared)
    if train is None:  # check data and model before many trials fail because of them
        for first in {(trial.mixer, str(trial.options)): trial for trial in trials}.values():
            of_trial = folder / "trials" / first.name
            if not of_trial.exists():
                prepare(first.config(shared, os.fspath(of_trial)))
    open_folder(folder, shared)
    return _run(folder, trials, processes, grace, retry_failed, train, tell)


def resume_sweep(
    folder: str | os.PathLike[str],
    *,
    processes: int = 1,
    grace: int = 60,
    retry_failed: bool = False,
    train: Train | None = None,
    tell: Tell | None = None,
) -> list[Row]:
    """Continue the sweep in a folder, or help other processes that work on it.

    Args:
        folder: of the sweep.
        processes, grace, retry_failed, train, tell: as in :func:`run_sweep`.

    Raises:
        FileNotFoundError: it is no folder of a sweep.
        KeyboardInterrupt: somebody asked to stop; the trials have saved their state.

    Example:
        >>> import graphattn as ga
        >>> rows = ga.train.resume_sweep("sweeps/a", processes=2)  # doctest: +SKIP
    """
    processes, grace = _checked(processes, grace)
    _check_is_sweep(Path(folder))
    return _run(Path(folder), [], processes, grace, retry_failed, train, tell)


def read_sweep(folder: str | os.PathLike[str]) -> list[Row]:
    """Read the results of the trials of a sweep, during the sweep or afterwards.

    A row has "mixer", "lr", "seed", and "options", a dict of those of the grid; "status":
    "finished", "diverged", "failed" (with an "error"), "running", "waiting", or "interrupted" (can
    be continued); "loss", the validation loss at the last step, "best_loss" and "best_step";
    "step", "diverged_at", "seconds"; "folder" of the run, relative to that of the sweep; and the
    origin of the numbers: "commit", "config" (its digest), "versions". Unknown values are None.

    Args:
        folder: of the sweep.

    Raises:
        FileNotFoundError: it is no folder of a sweep.
        ValueError: if a line of ``results.jsonl`` is broken; the message has its number.

    Example:
        >>> import graphattn as ga
        >>> [row["loss"] for row in ga.train.read_sweep("sweeps/a")]  # doctest: +SKIP
        [2.41, 2.38]
    """
    path = Path(folder)
    _check_is_sweep(path)
    with contextlib.suppress(ImportError):
        return TrialQueue(path, grace=60).rows()
    rows = []  # results can be read without the packages for training
    for number, line in enumerate((path / ROWS).read_text(encoding="utf-8").splitlines(), 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path / ROWS}, line {number}: is not valid JSON: {error}") from None
    return rows


def prepare_and_fit(config: RunConfig) -> Run:
    """Train one config as ``graphattn train`` does."""
    return fit_prepared(prepare(config))


def _run(
    folder: Path,
    trials: Sequence[Trial],
    processes: int,
    grace: int,
    retry_failed: bool,
    train: Train | None,
    tell: Tell | None,
) -> list[Row]:
    queue, work = TrialQueue(folder, grace), train or prepare_and_fit
    queue.add(trials, retry_failed=retry_failed)
    with _others(processes - 1, folder, grace, work, tell), _threads(processes):
        _work_until_over(queue, work, tell)
    return queue.rows()


def _checked(processes: Any, grace: Any) -> tuple[int, int]:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            "a sweep must be started without torchrun, because it trains every trial in one "
            "process, got WORLD_SIZE > 1: start it once per GPU instead"
        )
    return as_int("processes", processes, 1), as_int("grace", grace, 2)


def _check_is_sweep(path: Path) -> None:
    if not all((path / name).is_file() for name in (SHARED, STORAGE, ROWS)):
        raise FileNotFoundError(
            f"folder must be the folder of a sweep, got {str(path)!r}, which does not contain all "
            f"of {SHARED}, {STORAGE} and {ROWS}"
        )


# Processes.


def _work_until_over(queue: TrialQueue, train: Train, tell: Tell | None) -> None:
    while True:
        row = queue.work(train)
        if row is not None:
            if tell is not None:
                tell(row)
        elif queue.is_over():
            return
        else:
            time.sleep(POLL)  # a trial of another process may become free


@contextmanager
def _others(count: int, folder: Path, grace: int, train: Any, tell: Any) -> Any:
    """Start further processes for the sweep, which end when this one is interrupted or killed."""
    context = multiprocessing.get_context("spawn")  # a forked process with threads can hang
    started = [
        context.Process(target=_work_beside, args=(folder, grace, train, tell, count + 1))
        for _ in range(count)
    ]
    for process in started:
        process.start()
    try:
        yield
    except BaseException:
        for process in started:
            process.terminate()  # SIGTERM: the run saves its state and ends
        raise
    finally:
        for process in started:
            process.join()


def _work_beside(folder: Path, grace: int, train: Any, tell: Any, processes: int) -> None:
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # Control-C then reaches only the first process, which passes it on once
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with _threads(processes):
        try:
            _work_until_over(TrialQueue(folder, grace), train, tell)
        except Interrupted:
            return


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def _threads(processes: int) -> Any:
    """Limit each process to its share of the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, before // processes))
    try:
        yield
    finally:
        torch.set_num_threads(before)

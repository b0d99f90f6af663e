"""Sweeps: many trainings that differ in mixer, learning rate and seed, by several processes."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from graphattn.graphs.arguments import as_int
from graphattn.train.runs.config import RunConfig
from graphattn.train.runs.folder import Run
from graphattn.train.runs.records import Row
from graphattn.train.sweeps.grid import Trial, as_mixers, as_rates, as_seeds, trials_of
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

POLL = 0.5  # seconds between looks at trials that others are training
Tell = Callable[[Row], None]


def run_sweep(
    config: RunConfig,
    *,
    mixers: str | Sequence[str],
    lrs: str | float | Sequence[float],
    seeds: int = 1,
    processes: int = 1,
    grace: int = 60,
    retry_failed: bool = False,
    train: Callable[[RunConfig], Run] | None = None,
    tell: Tell | None = None,
) -> list[Row]:
    """Train a model with every mixer at every learning rate, several times.

    The folder ``config.out`` holds the sweep: ``sweep.yaml`` (what the trials share), Optuna's
    storage ``trials.db``, the folder of every run in ``trials/``, and ``results.jsonl``, a row per
    trial. Any number of processes may work on it at once, of this call or started by themselves;
    they never train the same trial at the same time. A second start goes on where the first ended,
    and may add mixers, rates and seeds.

    A trial that diverges is a result like others. One that fails keeps its error, and the sweep
    goes on. One whose process was killed is taken again, and goes on from its checkpoint.

    Args:
        config: what all trials share; its mixer, rate and seed are those of the trials. Of its
            `mixer_options`, a trial gets those that its mixer takes.
        mixers: names, a list or separated by commas.
        lrs: learning rates, or text: ``1e-4,3e-4`` or ``1e-4..5e-2:7``, which are 7 values from
            1e-4 to 5e-2, each the same multiple of the one before.
        seeds: so many trainings of every combination: with the seeds 0, 1, ...
        processes: that work on the trials at once, this one included. A script that asks for more
            than one must be importable (``if __name__ == "__main__"``).
        grace: seconds after which a process on another machine that gives no sign of life counts
            as killed; on this machine it is known at once.
        retry_failed: train again what failed before.
        train: trains one config, and can be pickled; None: prepares data and model from the
            config, and calls :func:`fit`.
        tell: called with the row of every trial that is over, in the process that trained it.

    Returns:
        The rows of all trials, as :func:`read_sweep` gives them.

    Raises:
        ValueError: names the argument, its value and what is allowed: the folder holds a sweep of
            other options, for instance.
        KeyboardInterrupt: somebody asked to stop; the trials have saved their state.
        ImportError: optuna is missing.

    Example:
        >>> import graphattn as ga
        >>> config = ga.train.RunConfig(data="proteins.fasta", steps=500, out="sweeps/a")
        >>> rows = ga.train.run_sweep(
        ...     config, mixers=["dot", "mix"], lrs="1e-4..1e-2:5", seeds=2)  # doctest: +SKIP
        >>> ga.train.summarize_sweep(rows)[1].stable  # doctest: +SKIP
        (0.0001, 0.01)
    """
    trials = trials_of(as_mixers(mixers, config.mixer_options), as_rates(lrs), as_seeds(seeds))
    processes, grace = _checked(processes, grace)
    if not config.out:
        raise ValueError("out must be the folder of the sweep, got ''")
    if config.validation <= 0:
        raise ValueError("validation must be > 0 in a sweep, which compares by it, got 0")
    folder = Path(config.out)
    shared = _with_whole_paths(config.replace(mixer=None, out="", seed=0))
    check_folder(folder, shared)
    if train is None:
        _try_to_prepare(trials, shared, folder)
    open_folder(folder, shared)
    return _run(folder, trials, processes, grace, retry_failed, train, tell)


def resume_sweep(
    folder: str | os.PathLike[str],
    *,
    processes: int = 1,
    grace: int = 60,
    retry_failed: bool = False,
    train: Callable[[RunConfig], Run] | None = None,
    tell: Tell | None = None,
) -> list[Row]:
    """Go on with the sweep in a folder, or help those who work on it.

    Args:
        folder: of the sweep.
        processes, grace, retry_failed, train, tell: as :func:`run_sweep` has them.

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
    """Read how the trials of a sweep stand, while it goes on or afterwards.

    A row has "mixer", "lr", "seed"; "status": "finished", "diverged", "failed" (with an "error"),
    "running", "waiting", or "interrupted" (to be continued); "loss", the validation loss at the
    last step, "best_loss" and "best_step"; "step", "diverged_at", "seconds"; "folder" of the run in
    that of the sweep; and where the numbers come from: "commit", "config" (its digest), "versions".
    What is not known is None.

    Args:
        folder: of the sweep.

    Raises:
        FileNotFoundError: it is no folder of a sweep.
        ValueError: a line of ``results.jsonl`` is broken; the message has its number.

    Example:
        >>> import graphattn as ga
        >>> [row["loss"] for row in ga.train.read_sweep("sweeps/a")]  # doctest: +SKIP
        [2.41, 2.38]
    """
    path = Path(folder)
    _check_is_sweep(path)
    try:
        return TrialQueue(path, grace=60).rows()
    except ImportError:  # results can be read where nothing is trained
        return _read_rows(path / ROWS)


def prepare_and_fit(config: RunConfig) -> Run:
    """Train one config as ``graphattn train`` does."""
    from graphattn.train.engine import fit
    from graphattn.train.runs.setup import prepare

    found: Any = prepare(config)
    return fit(
        found.model,
        found.objective,
        found.config,
        found.train,
        found.validation,
        tokenizer=found.tokenizer,
    )


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
            "a sweep trains every trial in one process: start it without torchrun, once per GPU"
        )
    return as_int("processes", processes, 1), as_int("grace", grace, 2)


def _check_is_sweep(path: Path) -> None:
    if not all((path / name).is_file() for name in (SHARED, STORAGE, ROWS)):
        raise FileNotFoundError(f"folder must be that of a sweep, got {str(path)!r}: no {STORAGE}")


def _with_whole_paths(config: RunConfig) -> RunConfig:
    """Files as they are called from everywhere: the sweep may be gone on with from there."""
    given = {name: getattr(config, name) for name in ("data", "tokenizer", "model")}
    paths = {name: os.path.abspath(own) for name, own in given.items() if os.path.exists(own)}
    return config.replace(**paths)


def _try_to_prepare(trials: Sequence[Trial], config: RunConfig, folder: Path) -> None:
    """Check data and model before a hundred trials fail of them."""
    from graphattn.train.runs.setup import prepare

    for own in {trial.mixer: trial for trial in trials}.values():
        if not (folder / "trials" / own.name).exists():
            prepare(own.config(config, os.fspath(folder / "trials" / own.name)))


def _read_rows(path: Path) -> list[Row]:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: is no JSON: {error}") from None
    return rows


# Processes.


def _work_until_over(queue: TrialQueue, train: Callable[[RunConfig], Run], tell: Any) -> None:
    while True:
        row = queue.work(train)
        if row is not None:
            if tell is not None:
                tell(row)
        elif queue.is_over():
            return
        else:
            time.sleep(POLL)  # what others are training may be left to us


@contextmanager
def _others(count: int, folder: Path, grace: int, train: Any, tell: Any) -> Any:
    """Further processes at the same work, which end when this one is interrupted or killed."""
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
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
            process.terminate()  # SIGTERM: a run saves its state, and ends
        raise
    finally:
        for process in started:
            process.join()


def _work_beside(folder: Path, grace: int, train: Any, tell: Any, processes: int) -> None:
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # Control-C reaches the first process alone, which passes it on once
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
    """Each process computes with its share of the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, math.floor(before / processes)))
    try:
        yield
    finally:
        torch.set_num_threads(before)

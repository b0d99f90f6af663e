"""Sweeps: every trial is trained once by somebody, whoever is started, stopped or killed."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest

import graphattn as ga
from graphattn.train import MixerSummary, Run, RunConfig, read_sweep, run_sweep, summarize_sweep
from graphattn.train.sweeps import queue as sweep_queue
from graphattn.train.sweeps.grid import Trial, as_rates
from graphattn.train.sweeps.results import outcome

pytest.importorskip("optuna", reason="sweeps need the extra `train`")
pytest.importorskip("yaml", reason="sweeps need the extra `train`")

INFO = {"commit": "c", "config": "d", "versions": {"torch": "2"}, "device": "cpu", "seconds": 1.5}


def curve(config: RunConfig, losses: list[float | None], status: str = "finished") -> Run:
    """A run with these validation losses at steps 1, 2, ..."""
    rows = [{"step": i + 1, "split": "validation", "loss": v} for i, v in enumerate(losses)]
    return Run(Path(config.out), config, status, {**INFO, "config": config.digest()}, rows)


def parabola(config: RunConfig) -> Run:
    """Best at 1e-2; at 1 it diverges; each training leaves a line with its process."""
    folder = Path(config.out)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder.parent.parent / "taken.txt").open("a") as file:
        file.write(f"{folder.name} {os.getpid()}\n")
    if config.lr >= 1:
        return curve(config, [3.0], "diverged")
    if config.mixer == "krause":
        raise MemoryError("no room for krause")
    loss = (math.log10(config.lr) + 2) ** 2 + 1 + 0.1 * config.seed
    return curve(config, [loss + 1, loss - 0.01, loss])


def sweep(folder: Path, **options: Any) -> list[dict[str, Any]]:
    changes = {k: options.pop(k) for k in list(options) if k in RunConfig().as_dict()}
    config = RunConfig(data="x.txt", out=str(folder)).replace(**changes)
    return run_sweep(
        config, **{"mixers": "dot,mix", "lrs": "1e-3,1e-2", "train": parabola, **options}
    )


def taken(folder: Path) -> list[str]:
    return [line.split()[0] for line in (folder / "taken.txt").read_text().splitlines()]


# The grid.


@pytest.mark.parametrize(
    ("first", "last", "count"), [(1e-4, 5e-2, 7), (1e-5, 1.0, 2), (2.0, 3.0, 5)]
)
def test_a_range_is_geometric_and_holds_its_ends(first, last, count):
    import numpy

    rates = as_rates(f"{first}..{last}:{count}")
    assert (rates[0], rates[-1], len(rates)) == (first, last, count)
    numpy.testing.assert_allclose(rates, numpy.geomspace(first, last, count), rtol=5e-4)


def test_lists_and_ranges_go_together_and_a_rate_counts_once():
    assert as_rates("1e-2, 1e-4..1e-2:3") == as_rates([1e-2, 1e-4, 1e-3]) == [1e-4, 1e-3, 1e-2]
    assert as_rates(0.5) == [0.5]


@pytest.mark.parametrize(
    ("lrs", "says"),
    [
        ("1e-4..5e-2", "must contain its number of values"),
        ("1e-4..5e-2:x", "must contain its number of values"),
        ("5e-2..1e-4:3", "must go from a number above 0 to a larger one"),
        ("0..1:3", "must go from a number above 0 to a larger one"),
        ("1e-4..inf:3", "must go from a number above 0 to a larger one"),
        ("nan..1:3", "must go from a number above 0 to a larger one"),
        ("1e-4..1e-2:1", "at least 2"),
        ("1..1.001:9", "differ when rounded to 4 digits"),
        ("1e-3..1e-2:100000000000000000000", "differ when rounded to 4 digits"),  # told at once
        ("", "got ''"),
        ("fast", "got 'fast'"),
        ("1e-3,-1", "above 0, got -1.0"),
        ([], "at least one"),
        ([math.nan], "above 0, got nan"),
        ([None], "got None"),
    ],
)
def test_rates_that_are_none_are_refused_by_name(lrs, says, tmp_path):
    with pytest.raises(ValueError, match=f"^lrs.*{says}"):
        sweep(tmp_path / "a", lrs=lrs)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mixers": "dot,dto"}, "mixers must be one of .*got 'dto'"),
        ({"mixers": []}, "mixers must name at least one"),
        ({"seeds": 0}, "seeds must be >= 1, got 0"),
        ({"processes": 0}, "processes must be >= 1"),
        ({"grace": 1}, "grace must be >= 2"),
        ({"validation": 0.0}, "validation must be > 0"),
        ({"mixer_options": {"hops": 3}}, "options of dot, mix, got 'hops'"),
        (
            {"grid": "window"},
            r"grid must be the values of an option \(window=1,2,4\), got 'window'",
        ),
        ({"grid": "window=1 window=2"}, "every option once"),
        ({"grid": {"windw": [1]}}, "got 'windw'.*window"),
        ({"grid": {"lr": [1]}}, "grid must contain options.*got 'lr'"),
        ({"grid": "data=a,b"}, "grid must contain options.*got 'data'"),
        ({"grid": {"sigma": [1]}}, "or of dot, mix, got 'sigma'"),
        ({"grid": {"window": 3}}, "values of window must be a list, got 3"),
        ({"grid": {"window": []}}, "at least one value of every option, got none of window"),
    ],
)
def test_bad_input_is_named_and_leaves_no_folder(options, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        sweep(tmp_path / "a", **options)
    assert not (tmp_path / "a").exists()


def test_a_trial_gets_the_options_that_its_mixer_takes():
    shared = RunConfig(mixer_options={"edge_hidden": 8, "sigma": 1.0}, out="s")
    options = {name: Trial(name, 0.1, 3).config(shared, "x") for name in ("dot", "mix", "gka")}
    assert "edge_hidden" not in options["dot"].mixer_options
    assert "edge_hidden" in options["mix"].mixer_options
    assert "edge_hidden" not in options["gka"].mixer_options
    mix = options["mix"]
    assert (mix.mixer, mix.lr, mix.seed, mix.out) == ("mix", 0.1, 3, "x")


def test_a_grid_has_all_values_of_options_that_a_mixer_takes(tmp_path):
    rows = sweep(tmp_path / "a", grid="window=1,2 edge_hidden=4,8,4", lrs="1e-3", seeds=2)
    wanted = {("dot", window, None) for window in (1, 2)}
    wanted |= {("mix", window, hidden) for window in (1, 2) for hidden in (4, 8)}
    for seed in (0, 1):
        found = [row for row in rows if row["seed"] == seed]
        assert len(found) == len(wanted)
        options = [row["options"] for row in found]
        assert {
            (row["mixer"], each["window"], each.get("edge_hidden"))
            for row, each in zip(found, options, strict=True)
        } == wanted
    names = [each.mixer for each in summarize_sweep(rows)]
    assert names[:2] == ["dot, window=1", "mix, window=1, edge_hidden=4"]
    assert len(names) == len(wanted)
    assert read_sweep(tmp_path / "a") == rows
    again = sweep(
        tmp_path / "a", grid={"window": [1, 2], "edge_hidden": [8, 4]}, lrs="1e-3", seeds=2
    )
    assert again == rows
    assert len(taken(tmp_path / "a")) == len(rows)


def test_the_options_of_a_grid_reach_the_config():
    shared = RunConfig(mixer_options={"edge_hidden": 8, "rank": 1}, window=3, out="s")
    trial = Trial("mix", 0.1, 0, (("window", 5), ("rank", 2)))
    config = trial.config(shared, "x")
    assert (config.window, config.mixer_options) == (5, {"edge_hidden": 8, "rank": 2})
    assert trial.name == "mixer=mix,lr=0.1,seed=0,window=5,rank=2"
    assert "/" not in Trial("mix", 0.1, 0, (("step_size", "a/b"),)).name


# What a sweep leaves.


def test_every_combination_is_trained_once_and_never_again(tmp_path):
    rows = sweep(tmp_path / "a", seeds=2)
    wanted = {(m, lr, s) for m in ("dot", "mix") for lr in (1e-3, 1e-2) for s in (0, 1)}
    assert {(row["mixer"], row["lr"], row["seed"]) for row in rows} == wanted
    assert len(rows) == len(taken(tmp_path / "a")) == 8
    assert sweep(tmp_path / "a", seeds=2) == rows == read_sweep(tmp_path / "a")
    assert len(taken(tmp_path / "a")) == 8


def test_a_row_has_the_losses_of_its_run_and_where_they_come_from(tmp_path):
    row = sweep(tmp_path / "a", mixers="dot", lrs="1e-3", seeds=1)[0]
    assert (row["loss"], row["best_loss"], row["best_step"], row["step"]) == (2.0, 1.99, 2, 3)
    assert (row["status"], row["seconds"], row["error"]) == ("finished", 1.5, None)
    shared = RunConfig(data="x.txt", mixer="dot", lr=1e-3)
    assert row["config"] == shared.digest()
    assert {name: row[name] for name in ("commit", "versions")} == {
        name: INFO[name] for name in ("commit", "versions")
    }
    assert row["folder"] == "trials/mixer=dot,lr=0.001,seed=0"
    assert (tmp_path / "a" / row["folder"]).is_dir()
    lines = (tmp_path / "a" / "results.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [row]


@pytest.mark.long
def test_a_diverged_trial_is_a_result_and_a_failed_one_keeps_its_error(tmp_path):
    import optuna

    rows = sweep(tmp_path / "a", mixers="krause,dot", lrs="1e-2,1")
    by_name = {(row["mixer"], row["lr"]): row for row in rows}
    diverged = by_name["dot", 1.0]
    assert (diverged["status"], diverged["loss"], diverged["diverged_at"]) == ("diverged", None, 1)
    failed = by_name["krause", 1e-2]
    assert (failed["status"], failed["error"]) == ("failed", "MemoryError: no room for krause")
    assert failed["versions"]["graphattn"] == ga.__version__
    assert by_name["dot", 1e-2]["status"] == "finished"  # it came after the one that failed
    study = optuna.load_study(study_name=None, storage=f"sqlite:///{tmp_path}/a/trials.db")
    states = [(trial.state.name, trial.value) for trial in study.trials]
    assert sorted(states, key=str) == [
        ("COMPLETE", 1.0), ("COMPLETE", math.inf), ("COMPLETE", math.inf), ("FAIL", None)
    ]  # fmt: skip


def test_losses_that_are_not_finite_or_end_far_above_the_first_are_a_divergence():
    row = outcome(curve(RunConfig(), [2.0, None]))
    assert (row["status"], row["diverged_at"], row["best_loss"]) == ("diverged", 2, 2.0)
    for last, status in ((30.0, "finished"), (30.001, "diverged")):  # of a first loss of 3
        run = curve(RunConfig(), [last])
        run.rows.insert(0, {"step": 1, "split": "train", "loss": 3})
        assert outcome(run)["status"] == status


@pytest.mark.long
def test_what_failed_is_trained_again_only_when_asked_for(tmp_path):
    sweep(tmp_path / "a", mixers="krause", lrs="1e-2")
    sweep(tmp_path / "a", mixers="krause", lrs="1e-2")
    assert len(taken(tmp_path / "a")) == 1
    mended = {"train": lambda config: curve(config, [1.0])}
    rows = sweep(tmp_path / "a", mixers="krause", lrs="1e-2", retry_failed=True, **mended)
    assert [row["status"] for row in rows] == ["finished"]


@pytest.mark.long
def test_more_may_be_added_and_old_results_stay(tmp_path):
    first = sweep(tmp_path / "a", mixers="dot", lrs="1e-2")
    rows = sweep(tmp_path / "a", mixers="mix,dot", lrs="1e-2,1e-3", seeds=2)
    assert rows[0] == first[0]
    assert len(rows) == len(set(taken(tmp_path / "a"))) == len(taken(tmp_path / "a")) == 8


@pytest.mark.long
def test_other_options_are_refused_by_their_names(tmp_path):
    sweep(tmp_path / "a", window=(3, 4), steps=9)
    sweep(tmp_path / "a", window=[3, 4], steps=9, workers=1, lr=1e-1, seed=4)  # of no trial
    with pytest.raises(ValueError, match="steps was 9, is now 7; clip_norm was 1"):
        sweep(tmp_path / "a", window=(3, 4), steps=7, clip_norm=2.0)


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "run.json").write_text("{}")
    with pytest.raises(ValueError, match="contains other files"):
        sweep(tmp_path / "a")
    with pytest.raises(FileNotFoundError, match="must be the folder of a sweep"):
        read_sweep(tmp_path / "a")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["run.json"]


# Stopping.


@pytest.mark.long
@pytest.mark.parametrize("content", [None, b"", b"not a database", 200])
def test_a_damaged_list_of_trials_is_refused_and_its_results_stay(tmp_path, content):
    folder = tmp_path / "sweep"
    sweep(folder)
    rows, storage = (folder / "results.jsonl").read_bytes(), folder / "trials.db"
    if content is None:
        storage.unlink()
    else:
        storage.write_bytes(storage.read_bytes()[:content] if isinstance(content, int) else content)
    with pytest.raises(ValueError, match=r"trials\.db.*choose another folder as out"):
        sweep(folder)
    assert (folder / "results.jsonl").read_bytes() == rows


@pytest.mark.long
def test_a_run_that_was_asked_to_stop_ends_the_sweep_and_is_gone_on_with(tmp_path):
    calls: list[str] = []

    def stopped_once(config: RunConfig) -> Run:
        calls.append(Path(config.out).name)
        return curve(config, [1.0], "interrupted" if len(calls) == 2 else "finished")

    with pytest.raises(KeyboardInterrupt):
        sweep(tmp_path / "a", mixers="dot", lrs="1,2,3", train=stopped_once)
    statuses = [row["status"] for row in read_sweep(tmp_path / "a")]
    assert statuses == ["finished", "interrupted", "waiting"]
    rows = sweep(tmp_path / "a", mixers="dot", lrs="1,2,3", train=stopped_once)
    assert [row["status"] for row in rows] == ["finished"] * 3
    assert sorted(calls) == sorted([calls[1], *(Path(row["folder"]).name for row in rows)])


def patient(config: RunConfig) -> Run:
    """Trials of mix go on until a file `go` lies in the folder of the sweep."""
    run = parabola(config)
    while config.mixer == "mix" and not (Path(config.out).parent.parent / "go").exists():
        time.sleep(0.01)
    return run


FORK = multiprocessing.get_context("fork")  # a process that need not import anything


def works(folder: Path, barrier: Any, **options: Any) -> None:
    barrier.wait(60)
    sweep(folder, train=patient, **options)


def wait_for(condition: Any, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing came of it"
        time.sleep(0.02)


@pytest.mark.long
def test_starts_at_the_same_moment_enqueue_once_and_never_take_the_same_trial(tmp_path):
    folder, barrier = tmp_path / "a", FORK.Barrier(3)
    options = {"mixers": "dot,gka", "lrs": [0.01 * k for k in range(1, 9)]}
    workers = [FORK.Process(target=works, args=(folder, barrier), kwargs=options) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(200)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    lines = [line.split() for line in (folder / "taken.txt").read_text().splitlines()]
    assert len(lines) == len({name for name, _ in lines}) == 16
    assert len({pid for _, pid in lines}) >= 2
    assert [row["status"] for row in read_sweep(folder)] == ["finished"] * 16


@pytest.mark.long
def test_a_killed_worker_loses_no_trial(tmp_path):
    folder, options = tmp_path / "a", {"mixers": "mix", "lrs": "1e-3,1e-2"}
    killed = FORK.Process(target=works, args=(folder, FORK.Barrier(1)), kwargs=options)
    killed.start()
    wait_for(lambda: (folder / "taken.txt").exists())
    killed.kill()
    killed.join()
    assert [row["status"] for row in read_sweep(folder)] == ["interrupted", "waiting"]
    (folder / "go").touch()
    began = time.monotonic()
    rows = sweep(folder, **options, grace=600)
    assert time.monotonic() - began < 300  # known by its lock, without waiting for the grace
    assert [row["status"] for row in rows] == ["finished", "finished"]
    first, second = (Trial("mix", lr, 0).name for lr in (1e-3, 1e-2))
    assert sorted(taken(folder)) == sorted([first, first, second])


# Tests that a shell starts in the background ignore interrupts, and so would their children.
SCRIPT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, {here!r})
from pathlib import Path
from test_train_sweep import patient, sweep

if __name__ == "__main__":
    sweep(Path(sys.argv[1]), mixers="mix", processes=2, train=patient)
"""


@pytest.mark.long
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_processes_of_one_start_share_the_work_and_end_with_it(tmp_path, end):
    folder, script = tmp_path / "a", tmp_path / "work.py"
    script.write_text(SCRIPT.format(here=str(Path(__file__).parent)))
    process = subprocess.Popen([sys.executable, script, folder])
    try:
        wait_for(lambda: (folder / "taken.txt").exists() and len(taken(folder)) == 2)
        pids = [int(line.split()[1]) for line in (folder / "taken.txt").read_text().splitlines()]
        assert len(set(pids)) == 2
    finally:
        process.send_signal(end)
        process.wait(300)
    wait_for(lambda: not any(map(is_alive, pids)))
    (folder / "go").touch()
    assert [row["status"] for row in sweep(folder, mixers="mix")] == ["finished", "finished"]


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.long
def test_a_worker_of_another_machine_is_taken_for_dead_after_the_grace_alone(tmp_path, monkeypatch):
    """Heartbeats in Optuna are seen on every machine, but locks may not be.

    A trial without a heartbeat would be left alone.
    """
    folder = tmp_path / "a"
    with pytest.raises(KeyboardInterrupt):
        sweep(folder, mixers="dot", lrs="1e-2", train=interrupt)
    queue = sweep_queue.TrialQueue(folder, grace=2)
    monkeypatch.setattr(sweep_queue.platform, "node", lambda: "elsewhere")
    trial = queue.study.ask()
    trial.set_user_attr("host", "here")
    queue.study._storage.record_heartbeat(trial._trial_id)
    assert queue.work(parabola) is None
    assert not queue.is_over()
    time.sleep(3.1)
    row = queue.work(parabola)
    assert row is not None
    assert row["status"] == "finished"
    assert queue.is_over()


def interrupt(config: RunConfig) -> Run:
    raise KeyboardInterrupt


@pytest.mark.long
def test_who_was_taken_for_dead_and_is_alive_is_waited_for(tmp_path):
    """The one that took his trial over finds it locked, and trains after him."""
    folder = tmp_path / "a"
    with pytest.raises(KeyboardInterrupt):
        sweep(folder, mixers="dot", lrs="1e-2", train=interrupt)
    order: list[str] = []
    began, go = threading.Event(), threading.Event()

    def slow(config: RunConfig) -> Run:
        began.set()
        go.wait(20)
        order.append("first")
        return parabola(config)

    def fast(config: RunConfig) -> Run:
        order.append("second")
        return parabola(config)

    first, second = (sweep_queue.TrialQueue(folder, grace=60) for _ in range(2))
    thread = threading.Thread(target=first.work, args=(slow,))
    thread.start()
    assert began.wait(20)
    states = second.optuna.trial.TrialState
    second.study.tell(second.study.trials[-1].number, state=states.FAIL)  # as after the grace
    other = threading.Thread(target=second.work, args=(fast,))
    other.start()
    time.sleep(0.3)
    go.set()
    thread.join(20)
    other.join(20)
    assert order == ["first", "second"]
    assert [row["status"] for row in read_sweep(folder)] == ["finished"]


def test_whoever_asks_a_trial_to_stop_has_not_killed_it():
    def status(**attributes: Any) -> str:
        failed = types.SimpleNamespace(name="FAIL")
        trial = types.SimpleNamespace(state=failed, user_attrs=attributes)
        return sweep_queue._status([trial] * sweep_queue.MOST_KILLED)

    assert status() == "failed"
    assert status(asked=True) == "interrupted"


@pytest.mark.long
def test_a_trial_that_kills_every_worker_is_given_up(tmp_path):
    folder = tmp_path / "a"
    with pytest.raises(KeyboardInterrupt):
        sweep(folder, mixers="dot", lrs="1e-2", train=interrupt)
    queue = sweep_queue.TrialQueue(folder, grace=60)
    for _ in range(sweep_queue.MOST_KILLED):
        assert [row["status"] for row in queue.rows()] == ["interrupted"]
        trial = queue.study.ask()
        trial.set_user_attr("host", sweep_queue.platform.node())  # which holds no lock
        queue.add([])
    row = queue.rows()[0]
    assert (row["status"], row["error"]) == ("failed", "its process was killed 5 times")


# What it says.


def row_of(mixer: str, lr: float, loss: float | None, **more: Any) -> dict[str, Any]:
    status = "diverged" if loss is None else "finished"
    return {"mixer": mixer, "lr": lr, "seed": 0, "status": status, "loss": loss, **more}


def test_the_best_rate_has_the_lowest_mean_among_those_where_no_seed_diverged():
    rows = [
        row_of("dot", 1e-3, 3.0), row_of("dot", 1e-3, 4.0),
        row_of("dot", 1e-2, 1.0), row_of("dot", 1e-2, None),
        row_of("mix", 1e-3, 2.0),
    ]  # fmt: skip
    dot, mix = summarize_sweep(rows)
    assert (dot.best_lr, dot.loss, dot.spread) == (1e-3, 3.5, statistics.stdev([3.0, 4.0]))
    assert (dot.stable, dot.diverged, dot.trials) == ((1e-3, 1e-3), 1, 4)
    assert (mix.best_lr, mix.spread) == (1e-3, None)


def test_the_stable_range_has_no_gap():
    losses = {1e-5: 4.0, 1e-4: None, 1e-3: 3.0, 1e-2: 2.0, 1e-1: 2.5, 1.0: None, 10.0: 9.0}
    rows = [row_of("mix", lr, loss) for lr, loss in losses.items()]
    (summary,) = summarize_sweep(rows, tolerance=1)
    assert (summary.best_lr, summary.stable, summary.highest_loss) == (1e-2, (1e-3, 1e-1), 2.5)
    unfinished = row_of("mix", 5e-2, None, status="waiting")
    (summary,) = summarize_sweep([*rows, unfinished], tolerance=1)
    assert (summary.stable, summary.open) == ((1e-3, 1e-2), 1)  # what is not known is not stable


def test_the_width_of_the_range_has_an_interval_over_seeds():
    by_seed = {0: (1.0, 1.0, 1.0, 5.0), 1: (1.0, 1.0, 5.0, 5.0), 2: (5.0, 1.0, 1.0, None)}
    rows = [
        row_of("mix", lr, loss) | {"seed": seed}
        for seed, losses in by_seed.items()
        for lr, loss in zip((1e-4, 1e-3, 1e-2, 1e-1), losses, strict=True)
    ]
    (summary,) = summarize_sweep(rows)
    widths = [2.0, 1.0, 1.0]  # decades
    half = 4.302653 * statistics.stdev(widths) / math.sqrt(3)  # Student's t, two degrees of freedom
    assert half > statistics.fmean(widths)  # a width is not negative
    expected = (0.0, statistics.fmean(widths) + half)
    assert summary.stable is not None
    assert summary.decades == pytest.approx(math.log10(summary.stable[1] / summary.stable[0]))
    assert summary.decades_interval == pytest.approx(expected, rel=1e-6)
    # A seed that has not ended says nothing about the width; one seed alone has no interval.
    waiting = row_of("mix", 1e-4, None, status="waiting") | {"seed": 3}
    (summary,) = summarize_sweep([*rows, waiting])
    assert summary.decades_interval == pytest.approx(expected, rel=1e-6)
    assert summarize_sweep(rows[:4])[0].decades_interval is None
    equal = [row | {"seed": seed} for row in rows[:4] for seed in (0, 1)]
    assert summarize_sweep(equal)[0].decades_interval == pytest.approx((2.0, 2.0))
    # Neither does one with fewer rates; and there is no width if nothing was finished.
    fewer = row_of("mix", 1e-4, 1.0) | {"seed": 3}
    assert summarize_sweep([*rows, fewer])[0].decades_interval == pytest.approx(expected, rel=1e-6)
    none = [row_of("mix", 1e-4, None) | {"seed": seed} for seed in (0, 1)]
    (summary,) = summarize_sweep(none)
    assert (summary.diverged, summary.decades, summary.decades_interval) == (2, None, None)


RATES = (1e-5, 5e-5, 7.5e-5, 1e-4, 2.5e-4, 5e-4, 7.5e-4, 1e-3)
TABLE_2 = {  # validation losses of the consensus paper's Table 2
    "SA": (5.098, 4.105, 3.986, 3.863, 3.770, 7.176, 7.255, 7.201),
    "SC": (5.536, 4.713, 4.589, 4.553, 4.484, 4.428, 4.426, 4.496),
}


@pytest.mark.parametrize(
    ("tolerance", "attention", "consensus"),
    [
        (0.1, (1e-4, 2.5e-4), (2.5e-4, 1e-3)),
        ("3%", (1e-4, 2.5e-4), (1e-4, 1e-3)),
        ("10 %", (5e-5, 2.5e-4), (5e-5, 1e-3)),
        (0, (2.5e-4, 2.5e-4), (7.5e-4, 7.5e-4)),
        (10, (1e-5, 1e-3), (1e-5, 1e-3)),
    ],
)
def test_a_stable_rate_ends_near_the_best_loss(tolerance, attention, consensus):
    rows = [
        row_of(mixer, lr, loss)
        for mixer, losses in TABLE_2.items()
        for lr, loss in zip(RATES, losses, strict=True)
    ]
    SA, SC = summarize_sweep(rows, tolerance=tolerance)
    assert (SA.stable, SC.stable) == (attention, consensus)
    if tolerance == 0.1:
        assert summarize_sweep(rows) == [SA, SC]


def test_a_rate_at_the_tolerance_is_stable():
    rows = [row_of("mix", 1e-3, 0.1), row_of("mix", 1e-2, 0.2), row_of("mix", 1e-1, 0.3)]
    assert summarize_sweep(rows)[0].stable == (1e-3, 1e-2)
    # Losses below zero, as log-densities have: a share is one of their size.
    rows = [row_of("mix", 1e-3, -2.0), row_of("mix", 1e-2, -1.8), row_of("mix", 1e-1, -1.7)]
    assert summarize_sweep(rows, tolerance="10%")[0].stable == (1e-3, 1e-2)


@pytest.mark.parametrize(
    "tolerance", [-0.1, math.nan, math.inf, "five", "-5%", "nan%", "%", "0.1", None, True, [0.1]]
)
def test_a_tolerance_that_is_none_is_refused(tolerance):
    with pytest.raises(ValueError, match=r"tolerance must be a finite number >= 0, or a share"):
        summarize_sweep([], tolerance=tolerance)


def test_without_results_nothing_is_said():
    rows = [{"mixer": "dot", "lr": 1.0, "seed": 0, "status": "waiting", "loss": None}]
    assert summarize_sweep(rows) == [
        MixerSummary("dot", *[None] * 7, trials=1, diverged=0, failed=0, open=1)
    ]
    assert ga.train.summarize_sweep([]) == []

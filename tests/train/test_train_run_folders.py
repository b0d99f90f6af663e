"""Training runs: stopped, gone on with, ended, refused."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import tiny_runs
import torch
from torch import nn

import graphattn as ga
from graphattn.train import engine
from graphattn.train.runs import checkpoints, records
from graphattn.train.runs import folder as run_folder

pytestmark = pytest.mark.usefixtures("short_collections")


def interrupted_after(step: int) -> tiny_runs.At:
    """Control-C when a step ends."""
    return tiny_runs.At(step, lambda _: os.kill(os.getpid(), signal.SIGINT))


# Going on.


@pytest.mark.every_case
@pytest.mark.parametrize("step", [7, 8])  # between two rows of the log, and at one
def test_a_run_that_was_interrupted_ends_as_if_undisturbed(tmp_path, straight, step):
    stopped = tiny_runs.train(tmp_path / "run", callbacks=[interrupted_after(step - 1)])
    assert (stopped.status, checkpoints.complete_checkpoints(stopped.path)[-1]) == (
        "interrupted",
        step,  # the step under way was finished and saved
    )
    again = tiny_runs.train(tmp_path / "run")
    assert (straight.status, again.status) == ("finished", "finished")
    assert again.info["continued"] == [step]
    straight_files, files = (tiny_runs.results(run.path) for run in (straight, again))
    assert files["log.jsonl"] == straight_files["log.jsonl"]
    assert files["model"] == straight_files["model"]
    assert files["moments"] == straight_files["moments"]


def test_a_second_control_c_does_not_wait(tmp_path):
    def insist(_: nn.Module) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        tiny_runs.train(tmp_path / "run", callbacks=[tiny_runs.At(7, insist)])
    assert signal.getsignal(signal.SIGINT) is handler
    assert ga.train.read_run(tmp_path / "run").status == "interrupted"


@pytest.mark.long
def test_steps_may_grow_and_a_run_that_is_over_is_returned_as_it_is(tmp_path):
    first = tiny_runs.train(tmp_path / "run", steps=4, schedule="constant", keep=9)
    written = (first.path / "run.json").read_bytes()
    assert (
        tiny_runs.train(tmp_path / "run", steps=4, schedule="constant", keep=9).rows == first.rows
    )
    assert (first.path / "run.json").read_bytes() == written
    grown = tiny_runs.train(tmp_path / "run", steps=9, schedule="constant", keep=9)
    straight = tiny_runs.train(tmp_path / "straight", steps=9, schedule="constant", keep=9)
    assert grown.config.steps == 9
    files = [tiny_runs.results(run.path) for run in (grown, straight)]
    assert files[0]["step-00000009"] == files[1]["step-00000009"]


def test_a_folder_of_another_config_is_refused_by_the_names_that_differ(tmp_path):
    before = tiny_runs.train(tmp_path / "run", steps=4)
    with pytest.raises(
        ValueError, match=r"out must be .* batch_tokens was 48, is now 96; lr was 0.01"
    ) as caught:
        tiny_runs.train(tmp_path / "run", steps=4, batch_tokens=96, lr=0.5)
    assert "seed" not in str(caught.value)
    with pytest.raises(ValueError, match="steps was 4, is now 3"):
        tiny_runs.train(tmp_path / "run", steps=3)
    assert ga.train.read_run(tmp_path / "run").rows == before.rows


@pytest.mark.long
def test_what_is_half_written_is_removed_and_never_read(tmp_path, straight):
    folder = tmp_path / "run"
    tiny_runs.train(folder, callbacks=[interrupted_after(7)])
    aside = checkpoints.unfinished_path(folder, 11)
    aside.mkdir()
    (aside / "model.safetensors").write_bytes(b"half")
    (folder / ".run.json.abc").write_text("{")
    with (folder / "log.jsonl").open("a") as log:
        log.write('{"step": 9, "split": "train", "loss": 1.0}\n{"step": 10, "spl')
    assert checkpoints.complete_checkpoints(folder)[-1] == 8
    run = tiny_runs.train(folder)
    assert not [path for path in folder.rglob(".*") if path.name != ".lock"]
    assert (folder / "log.jsonl").read_bytes() == (straight.path / "log.jsonl").read_bytes()
    assert run.status == "finished"


def test_a_name_is_given_after_all_that_it_names_is_on_the_disk(tmp_path, monkeypatch):
    """A power cut may lose what was not synced, and a name may reach the disk before its file."""
    events: list[tuple[str, str]] = []
    fsync, rename, replace = os.fsync, Path.rename, Path.replace

    def sync(handle: int) -> None:
        events.append(("sync", os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def noting(move: Any) -> Any:
        def moved(path: Path, target: Path) -> Path:
            events.append(("name", str(path)))
            return move(path, target)

        return moved

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "rename", noting(rename))
    monkeypatch.setattr(Path, "replace", noting(replace))
    records.replace_text(tmp_path / "run.json", "{}")
    (_, aside), named, folder = events
    assert named == ("name", aside)
    assert folder == ("sync", str(tmp_path))
    events.clear()
    checkpoints.write_folder(
        tmp_path / "model", lambda folder_aside: (folder_aside / "numbers").write_text("1")
    )
    aside = str(tmp_path / ".model.unfinished")
    assert set(events[:2]) == {("sync", aside), ("sync", f"{aside}/numbers")}
    assert events[2:] == [("name", aside), ("sync", str(tmp_path))]


@pytest.mark.long
def test_the_newest_and_the_best_checkpoints_are_kept(tmp_path):
    run = tiny_runs.train(tmp_path / "run", steps=20, evaluate_every=3, save_every=2, keep=3)
    best = min(run.evaluations, key=lambda row: row["loss"])["step"]
    saved = sorted({*range(2, 21, 2), best})
    assert checkpoints.complete_checkpoints(run.path) == sorted({best, *saved[-3:]})
    files = tiny_runs.results(run.path)
    assert files["model"] == files[f"step-{best:08d}"]


@pytest.mark.long
def test_a_full_disk_while_saving_keeps_the_checkpoint_before(tmp_path, straight):
    """The system refuses to write beyond a size that the first checkpoints do not reach."""
    folder, most = tmp_path / "run", resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    shut = tiny_runs.At(7, lambda _: resource.setrlimit(resource.RLIMIT_FSIZE, (2000, most[1])))
    try:
        with pytest.raises(
            OSError, match=r"checkpoint of step 9 .* the checkpoint of step 6 remains"
        ):
            tiny_runs.train(folder, callbacks=[shut])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    run = ga.train.read_run(folder)
    assert run.status == "failed"
    assert "step 9" in run.info["error"]
    assert checkpoints.complete_checkpoints(folder)[-1] == 6
    again = tiny_runs.train(folder)
    assert again.status == "finished"
    assert again.rows == straight.rows


@pytest.mark.long
def test_a_folder_is_enough_to_go_on(tmp_path, monkeypatch):
    """A stand-in for the preparation of data makes what the config of the folder says."""
    straight = tiny_runs.train(tmp_path / "straight", steps=9, schedule="constant")
    tiny_runs.train(tmp_path / "run", steps=6, schedule="constant")

    def prepare(config: ga.train.RunConfig) -> Any:
        return types.SimpleNamespace(
            config=config,
            model=tiny_runs.model(config.seed),
            objective=tiny_runs.Hidden(),
            train=tiny_runs.examples(),
            validation=tiny_runs.examples(9, 1),
            tokenizer=None,
        )

    monkeypatch.setattr(engine, "prepare", prepare)
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    run = ga.train.resume(moved, steps=9)
    assert (run.status, run.step, run.path) == ("finished", 9, moved)
    weights = [tiny_runs.results(one.path)["step-00000009"] for one in (run, straight)]
    assert weights[0] == weights[1]
    with pytest.raises(
        ValueError, match="steps must be at least the number of steps of the run, 9, got 8"
    ):
        ga.train.resume(moved, steps=8)


# How runs end.


def spoil(model: nn.Module) -> None:
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)


@pytest.mark.long
def test_a_loss_that_is_not_finite_ends_a_run_as_diverged_and_keeps_its_rows(tmp_path):
    run = tiny_runs.train(tmp_path / "run", callbacks=[tiny_runs.At(9, spoil)])
    assert run.status == "diverged"
    assert [row["step"] for row in run.training] == [4, 8, 10]
    assert run.training[-1]["loss"] is None  # JSON knows no NaN
    assert all(row["loss"] is not None for row in run.training[:-1])
    assert checkpoints.complete_checkpoints(run.path)[-1] == 9
    assert tiny_runs.train(tmp_path / "run").rows == run.rows  # a result: not tried again
    for line in (run.path / "log.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not valid JSON"))


def test_a_loss_that_stays_far_above_its_start_is_diverged_and_one_peak_is_not():
    def after(losses: list[float]) -> bool:
        running = ga.train.running_loss.RunningLoss()
        for loss in losses:
            running.finish_step(loss * 7, 7, False)
        return running.diverged

    assert after([2.0] + [21.0] * 100)
    assert not after([2.0] + [21.0] * 99)
    assert not after([2.0] + ([21.0] * 50 + [19.0]) * 9)
    assert after([2.0, float("inf")])


def test_a_checkpoint_knows_how_long_a_loss_was_far_above_its_start():
    before, after = (ga.train.running_loss.RunningLoss() for _ in range(2))
    for loss in [2.0] + [21.0] * 60:
        before.finish_step(loss * 7, 7, False)
    after.load_state(json.loads(json.dumps(before.state())))
    assert after.take_mean() == pytest.approx((2.0 + 21.0 * 60) / 61)
    for _ in range(39):
        after.finish_step(21.0 * 7, 7, False)
    assert not after.diverged
    after.finish_step(21.0 * 7, 7, False)
    assert after.diverged


@pytest.mark.long
def test_an_error_leaves_a_failed_run_that_can_go_on(tmp_path, straight):
    def fail(_: nn.Module) -> None:
        raise RuntimeError("the data is gone")

    with pytest.raises(RuntimeError, match="the data is gone"):
        tiny_runs.train(tmp_path / "run", callbacks=[tiny_runs.At(5, fail)])
    run = ga.train.read_run(tmp_path / "run")
    assert (run.status, run.info["error"]) == ("failed", "RuntimeError: the data is gone")
    assert tiny_runs.train(tmp_path / "run").rows == straight.rows


@pytest.mark.long
def test_two_processes_do_not_train_in_one_folder(tmp_path, straight):
    outcomes = []

    def meet(_: nn.Module) -> None:
        outcomes.append(ga.train.read_run(tmp_path / "run").status)
        child = os.fork()
        if child == 0:
            try:
                tiny_runs.train(tmp_path / "run")
            except ValueError as error:
                os._exit(7 if "another process is training" in str(error) else 1)
            os._exit(0)
        outcomes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    run = tiny_runs.train(tmp_path / "run", callbacks=[tiny_runs.At(5, meet)])
    assert outcomes == ["running", 7]
    assert run.rows == straight.rows


def test_a_look_at_a_run_neither_writes_to_it_nor_keeps_it_from_starting(tmp_path, monkeypatch):
    path = tiny_runs.train(tmp_path / "run", steps=2).path
    (path / "run.json").write_text((path / "run.json").read_text().replace("finished", "running"))
    opened, held = [], []

    def open_and_note(name, flags, *mode, **keywords):
        opened.append((str(name), flags & os.O_ACCMODE))
        return real(name, flags, *mode, **keywords)

    real = os.open
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", open_and_note)
        assert ga.train.read_run(path).status == "interrupted"
    assert (str(path / ".lock"), os.O_RDONLY) in opened
    held.append(real(path / ".lock", os.O_RDONLY))
    fcntl.flock(held[0], fcntl.LOCK_EX)
    threading.Timer(0.1, lambda: os.close(held[0])).start()
    assert tiny_runs.train(path, steps=2).status == "finished"


def test_processes_that_load_data_hold_no_lock_of_the_run_that_started_them(tmp_path):
    """Processes that load data may outlive a killed run, which then goes on beside them."""
    (ear, mouth), (heard, said) = os.pipe(), os.pipe()
    with run_folder.locked(tmp_path):
        child = os.fork()
        if child == 0:
            os.close(mouth)
            os.write(said, b"!")
            os.read(ear, 1)
            os._exit(0)
    try:
        os.read(heard, 1)  # what is to be done after a fork is done
        with run_folder.locked(tmp_path):
            pass
    finally:
        os.close(mouth)
        os.waitpid(child, 0)
        for handle in (ear, heard, said):
            os.close(handle)


def test_a_run_says_where_it_comes_from(tmp_path):
    run = tiny_runs.train(tmp_path / "run", steps=2)
    assert run.info["config"] == run.config.digest()
    assert run.info["versions"]["torch"] == torch.__version__
    assert run.info["seed"] == 0
    commit = run.info["commit"]
    assert commit is None or len(commit.removesuffix("-dirty")) == 40
    assert run.info["seconds"] > 0
    assert ga.train.RunConfig.load(run.path / "config.yaml") == run.config


@pytest.mark.long
def test_a_model_of_another_class_is_kept_as_its_numbers(tmp_path):
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(7, 6)
            self.output = nn.Linear(6, 7, bias=False)
            self.output.weight = nn.Parameter(torch.zeros(7, 6))
            self.embedding.weight = self.output.weight  # one tensor under two names

        def forward(self, tokens: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
            return self.output(self.embedding(tokens))

    def run(name: str, **given: Any) -> Any:
        return ga.train.fit(
            Plain(), tiny_runs.Hidden(), tiny_runs.config(tmp_path / name), tiny_runs.examples(),
            **given,
        )  # fmt: skip

    run("run", callbacks=[interrupted_after(7)])
    assert run("run").rows == run("straight").rows
    assert tiny_runs.results(tmp_path / "run")["model"]


# What is refused.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "tiny"}, "model must be a torch.nn.Module, got str"),
        ({"model": nn.Linear(2, 2).requires_grad_(False)}, "parameters that require gradients"),
        ({"objective": None}, "objective must be an Objective, got NoneType"),
        ({"train": []}, "train must contain at least one example, got none"),
        ({"validation": []}, "validation must contain at least one example, got none"),
        ({"out": ""}, "out must be the path of the folder of the run"),
        ({"precision": "float16"}, "precision must be 'float32' or 'bfloat16' on a CPU"),
    ],
)
def test_what_cannot_be_trained_is_refused(tmp_path, changes, message):
    if torch.cuda.is_available() and "precision" in changes:
        pytest.skip("a GPU trains in float16")
    given = {
        "model": tiny_runs.model(), "objective": tiny_runs.Hidden(), "train": tiny_runs.examples(),
        "validation": None,
    }  # fmt: skip
    options = {name: value for name, value in changes.items() if name not in given}
    given |= {name: value for name, value in changes.items() if name in given}
    config = tiny_runs.config(tmp_path / "run").replace(**options)
    with pytest.raises(ValueError, match=message):
        ga.train.fit(
            given["model"], given["objective"], config, given["train"], given["validation"]
        )
    assert not (tmp_path / "run").exists()


def test_what_is_missing_is_named_with_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "graphattn.train.trainer", None)
    with pytest.raises(ImportError, match=r"pip install 'graphattn\[train\]'"):
        tiny_runs.train(tmp_path / "run")


def test_a_folder_without_a_run_is_not_read(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"folder must be the folder of a run.*config\.yaml"
    ):
        ga.train.read_run(tmp_path)


def test_a_broken_log_is_told_by_its_line(tmp_path):
    run = tiny_runs.train(tmp_path / "run", steps=2)
    (run.path / "log.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"log\.jsonl, line 2"):
        ga.train.read_run(run.path)

"""`graphattn sweep` trains every combination once, tells what came out, and goes on where it ended.

What a training finds is given by a formula, but in the last test.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import call, done, refused

import graphattn.train.sweeps.sweep as sweeping
from graphattn.cli.app import app
from graphattn.cli.training.sweep import summary_table
from graphattn.train import Run, RunConfig, fit, prepare, read_run, read_sweep

pytest.importorskip("optuna", reason="sweeps need the extra `train`")
pytest.importorskip("transformers", reason="training needs the extra `train`")
pytest.importorskip("yaml", reason="configs need the extra `train`")

SIX = ("--mixers", "dot,mix", "--lrs", "1e-3..1e-1:3")


@pytest.fixture
def formula(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Put a formula in the place of training, and keep all configs that it is given.

    The mixer dot diverges at learning rates from 0.1 on.
    """
    configs: list[RunConfig] = []

    def train(config: RunConfig) -> Run:
        configs.append(config)
        Path(config.out).mkdir(parents=True)
        lost = (math.log10(config.lr) + 2) ** 2 / 16 + 2
        diverged = config.mixer == "dot" and config.lr >= 0.1
        rows: list[dict[str, Any]] = [{"step": 9, "split": "validation", "loss": lost}]
        status = "diverged" if diverged else "finished"
        return Run(Path(config.out), config, status, {"seconds": 2.5}, rows)

    monkeypatch.setattr(sweeping, "prepare_and_fit", train)
    monkeypatch.setattr(sweeping, "prepare", lambda *arguments: None)
    return configs


def test_all_are_trained_and_the_table_has_the_best_and_the_stable_rates(
    formula: list[RunConfig], tmp_path: Path
) -> None:
    result = done("sweep", *SIX, "--data", "x.txt", "--steps", "9", "--out", tmp_path / "a")
    assert [(config.mixer, config.lr) for config in formula] == [
        (mixer, lr) for lr in (1e-3, 1e-2, 1e-1) for mixer in ("dot", "mix")
    ]
    assert {(config.data, config.steps) for config in formula} == {("x.txt", 9)}
    assert "mixer=dot,lr=0.1,seed=0: diverged at step 9" in result.output
    assert "mixer=mix,lr=0.1,seed=0: loss 2.0625, best 2.0625 at step 9, 2.5 s" in result.output
    cells = {
        line.split()[0]: line.split()[1:]
        for line in result.output.splitlines()
        if re.match(r" (dot|mix) ", line)
    }
    dot, mix = (" ".join(cells[name]) for name in ("dot", "mix"))
    assert dot == "0.01 2.0000 0.001 to 0.01 +0.0000 3 trials, 1 diverged"
    assert mix == "0.01 2.0000 0.001 to 0.1 +0.0625 3 trials"
    assert result.output.splitlines()[-1] == str(tmp_path / "a" / "results.jsonl")


@pytest.mark.long
def test_a_second_start_and_resume_train_what_is_left_and_draw_it(
    formula: list[RunConfig], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="figures need the extra `plots`")
    done("sweep", *SIX, "--out", tmp_path / "a")
    done("sweep", *SIX, "--out", tmp_path / "a", "--seeds", "2")
    assert [config.seed for config in formula] == [0] * 6 + [1] * 6
    result = done("sweep", "--resume", tmp_path / "a", "--plot", tmp_path / "a.png")
    assert len(formula) == 12
    assert "± 0.0000" in result.output
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.long
def test_options_come_from_a_file_and_from_the_line(
    formula: list[RunConfig], tmp_path: Path
) -> None:
    (tmp_path / "c.yaml").write_text("steps: 7\nlength: 32\nmodel_options: {dim: 8}\n")
    options = ("--config", tmp_path / "c.yaml", "--length", "16", "--mixer-options", "{rank: 2}")
    done("sweep", *SIX, *options, "--out", tmp_path / "a")
    dot, mix = formula[:2]
    assert (dot.steps, dot.length, dot.model_options) == (7, 16, {"dim": 8})
    assert (dot.mixer_options, mix.mixer_options) == ({}, {"rank": 2})


@pytest.mark.long
def test_a_failed_training_is_told_and_ends_with_1(
    formula: list[RunConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(config: RunConfig) -> Run:
        raise RuntimeError("out of [memory]")

    monkeypatch.setattr(sweeping, "prepare_and_fit", fail)
    result = call("sweep", "--mixers", "dot", "--lrs", "1", "--out", tmp_path / "a")
    assert result.exit_code == 1
    assert "mixer=dot,lr=1.0,seed=0: failed: RuntimeError: out of [memory]" in result.output


@pytest.mark.long
def test_control_c_says_how_to_go_on(
    formula: list[RunConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def stop(config: RunConfig) -> Run:
        return Run(Path(config.out), config, "interrupted", {}, [])

    train = sweeping.prepare_and_fit
    monkeypatch.setattr(sweeping, "prepare_and_fit", stop)
    result = call("sweep", *SIX, "--out", tmp_path / "a")
    assert result.exit_code == 130
    assert f"continue with: graphattn sweep --resume {tmp_path / 'a'}" in result.output
    assert read_sweep(tmp_path / "a")[0]["status"] == "interrupted"
    monkeypatch.setattr(sweeping, "prepare_and_fit", train)
    done("sweep", "--resume", tmp_path / "a")
    assert len(formula) == 6


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--lrs", "1"], "--mixers, --out must be given, or --resume FOLDER"),
        ([*SIX[:2], "--lrs", "1..2", "--out", "a"], "lrs: a range must contain its number"),
        (["--mixers", "dto", "--lrs", "1", "--out", "a"], "mixers must be one of 'dot'"),
        ([*SIX, "--out", "a", "--steps", "x"], "steps must be an integer"),
        ([*SIX, "--resume", "a", "--steps", "3"], "without --mixers, --lrs, --steps"),
        (["--resume", "nowhere"], "folder must be the folder of a sweep"),
        ([*SIX, "--out", "a", "--plot", "a.gif"], "--plot: the ending must be one of"),
        ([*SIX, "--out", "a", "--data", "nowhere.txt"], "nowhere.txt"),
        ([*SIX, "--out", "a", "--config", "c.yaml"], "did you mean 'steps'"),
    ],
)
def test_bad_input_is_one_line_and_leaves_no_folder(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text("stepz: 3\n")
    assert says in refused("sweep", *arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]


def test_the_options_are_those_of_a_run_but_what_trials_differ_in() -> None:
    import typer.main

    command = typer.main.get_command(app).commands["sweep"]  # type: ignore[attr-defined]
    names = {parameter.name for parameter in command.params}
    assert set(RunConfig().as_dict()) - {"mixer", "lr", "seed"} <= names
    assert not {"mixer", "lr", "seed"} & names


@pytest.mark.long
def test_a_trial_is_the_training_of_its_config_bit_for_bit(tmp_path: Path) -> None:
    (tmp_path / "play.txt").write_text("to be or not to be, that is the question " * 60)
    shared = {
        "data": str(tmp_path / "play.txt"), "steps": 4, "length": 16, "batch_tokens": 64,
        "log_every": 1, "evaluate_every": 2, "warmup_steps": 1,
        "model_options": {"dim": 16, "depth": 2, "heads": 2},
    }  # fmt: skip
    given = [f"--{name.replace('_', '-')}={json.dumps(value)}" for name, value in shared.items()]
    given[0] = f"--data={shared['data']}"
    done("sweep", "--mixers", "dot", "--lrs", "1e-2,1e-3", *given, "--out", tmp_path / "a")
    for row in read_sweep(tmp_path / "a"):
        config = RunConfig(**shared, mixer="dot", lr=row["lr"], out=str(tmp_path / str(row["lr"])))
        it = prepare(config)
        alone = fit(it.model, it.objective, it.config, it.train, it.validation)
        trial = read_run(tmp_path / "a" / row["folder"])
        assert [step["loss"] for step in trial.rows] == [step["loss"] for step in alone.rows]
        assert row["loss"] == alone.evaluations[-1]["loss"]
        assert row["config"] == alone.info["config"]


def test_a_best_rate_at_the_end_of_those_tried_is_told():
    losses = {"dot": (3.0, 2.5, 2.0), "mix": (3.0, 2.0, 2.5)}
    rows = [
        {"mixer": mixer, "lr": lr, "seed": 0, "status": "finished", "loss": loss}
        for mixer, of_mixer in losses.items()
        for lr, loss in zip((1e-4, 1e-3, 1e-2), of_mixer, strict=True)
    ]
    caption = str(summary_table(rows).caption)
    assert " dot: the best rate is the lowest or highest one tried" in caption
    assert "best at the end" not in str(summary_table(rows[3:]).caption)

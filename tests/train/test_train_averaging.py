"""Exponential moving averages of weights: a plain loop, evaluations, checkpoints, files."""

from __future__ import annotations

import functools
import os
import signal
from typing import Any

import pytest
import tiny_runs
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import TrainerCallback

import graphattn as ga
from graphattn.train.averaging import WeightAverage
from graphattn.train.runs import checkpoints

pytestmark = pytest.mark.usefixtures("short_collections")

DECAY = 0.75


class Snapshots(TrainerCallback):
    """Keep the weights after every step."""

    def __init__(self) -> None:
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        present = given["model"].model.state_dict()
        self.weights.append({name: value.clone() for name, value in present.items()})


def averages(weights: list[dict[str, torch.Tensor]], decay: float) -> list[dict[str, torch.Tensor]]:
    """The averages after every step, by a plain loop in float64."""
    rows = [{name: value.double() for name, value in weights[0].items()}]
    for present in weights[1:]:
        row = {}
        for name, value in present.items():
            row[name] = decay * rows[-1][name] + (1 - decay) * value.double()
        rows.append(row)
    return rows


def test_a_run_saves_and_evaluates_the_averages_of_a_plain_loop(tmp_path):
    snapshots = Snapshots()
    run = tiny_runs.train(
        tmp_path / "run", ema_decay=DECAY, callbacks=[snapshots], evaluate_every=5, save_every=5,
        keep=9, steps=10,
    )  # fmt: skip
    assert run.status == "finished"
    wanted = averages(snapshots.weights, DECAY)
    assert checkpoints.complete_checkpoints(run.path) == [5, 10]
    for step, row in zip((5, 10), run.evaluations, strict=True):
        folder = checkpoints.checkpoint_path(run.path, step)
        found, raw = (
            load_file(folder / name) for name in ("model.safetensors", checkpoints.NOT_AVERAGED)
        )
        assert found.keys() == raw.keys() == wanted[step - 1].keys()
        for name, value in wanted[step - 1].items():
            torch.testing.assert_close(found[name].double(), value, rtol=1e-6, atol=1e-7)
            assert torch.equal(raw[name], snapshots.weights[step - 1][name])
        assert any(not torch.equal(found[name], raw[name]) for name in found)
        objective, held_out = tiny_runs.Hidden(), tiny_runs.examples(9, 1)
        lengths = torch.tensor([len(example["tokens"]) for example in held_out])
        batches = [
            objective.collate([held_out[i] for i in chosen])
            for chosen in ga.data.TokenBatches(lengths, 48, shuffle=False)
        ]
        report = objective.evaluate(ga.load(folder), batches, seed=0)
        assert row == {"step": step, "split": "validation", **report}
    best = min(run.evaluations, key=lambda row: row["loss"])["step"]
    folder = checkpoints.checkpoint_path(run.path, best)
    assert [path.name for path in sorted((run.path / "model").iterdir())] == [
        "config.json",
        "model.safetensors",
    ]
    model, copied = (load_file(path / "model.safetensors") for path in (run.path / "model", folder))
    assert all(torch.equal(model[name], copied[name]) for name in copied)


def test_training_itself_is_the_same_with_and_without_an_average(tmp_path):
    rows = [
        tiny_runs.train(tmp_path / str(decay), ema_decay=decay, steps=6, log_every=1).training
        for decay in (0.0, 0.9)
    ]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("step", [1, 7])
def test_a_run_that_was_interrupted_has_the_same_averages_as_undisturbed(tmp_path, step):
    stop = tiny_runs.At(step, lambda _: os.kill(os.getpid(), signal.SIGINT))
    stopped = tiny_runs.train(tmp_path / "run", ema_decay=DECAY, callbacks=[stop])
    assert stopped.status == "interrupted"
    again = tiny_runs.train(tmp_path / "run", ema_decay=DECAY)
    straight = tiny_runs.train(tmp_path / "straight", ema_decay=DECAY)
    assert (again.status, straight.status) == ("finished", "finished")
    ours, wanted = (tiny_runs.results(run.path) for run in (again, straight))
    assert ours["log.jsonl"] == wanted["log.jsonl"]
    assert ours["model"] == wanted["model"]
    assert ours["moments"] == wanted["moments"]
    last = checkpoints.complete_checkpoints(again.path)[-1]
    raw = [
        load_file(checkpoints.checkpoint_path(run.path, last) / checkpoints.NOT_AVERAGED)
        for run in (again, straight)
    ]
    assert all(torch.equal(raw[0][name], raw[1][name]) for name in raw[1])


def test_a_checkpoint_without_the_weights_in_training_is_named(tmp_path):
    run = tiny_runs.train(tmp_path / "run", ema_decay=DECAY, steps=3)
    (checkpoints.checkpoint_path(run.path, 3) / checkpoints.NOT_AVERAGED).unlink()
    with pytest.raises(ValueError, match=r"not_averaged.safetensors is missing, so the run cannot"):
        tiny_runs.train(tmp_path / "run", ema_decay=DECAY, steps=5)


def test_another_decay_is_another_run(tmp_path):
    tiny_runs.train(tmp_path / "run", steps=2)
    with pytest.raises(ValueError, match=r"ema_decay was 0\.0, is now 0\.5"):
        tiny_runs.train(tmp_path / "run", steps=2, ema_decay=0.5)


@pytest.mark.long
def test_an_average_goes_with_recomputed_activations_and_autocast(tmp_path):
    options = {"steps": 3, "ema_decay": DECAY, "save_every": 3, "evaluate_every": 3}
    run = tiny_runs.train(
        tmp_path / "run", gradient_checkpointing=True, precision="bfloat16", **options
    )
    plain = tiny_runs.train(tmp_path / "plain", **options)
    ours, theirs = (load_file(each.path / "model/model.safetensors") for each in (run, plain))
    for name, value in theirs.items():
        assert ours[name].dtype == torch.float32
        torch.testing.assert_close(ours[name], value, rtol=0.1, atol=0.05)


@pytest.mark.long
def test_two_processes_have_the_average_of_one_with_twice_the_batches(server, tmp_path):
    alone, together = tmp_path / "alone", tmp_path / "together"
    options = {"certain": True, "ema_decay": DECAY}
    assert server.train(alone, accumulate=4, **options) == [0]
    assert server.train(together, accumulate=2, processes=2, **options) == [0, 0]
    ours, wanted = (load_file(each / "model/model.safetensors") for each in (together, alone))
    for name, value in wanted.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.long
def test_the_average_of_a_compiled_model_is_saved_under_the_same_names(tmp_path, monkeypatch):
    options = {"steps": 2, "ema_decay": DECAY, "save_every": 2, "evaluate_every": 2}
    # A backend that takes seconds, not minutes, and wraps the model in the same way.
    monkeypatch.setattr(
        nn.Module, "compile", functools.partialmethod(nn.Module.compile, backend="eager")
    )
    runs = [tiny_runs.train(tmp_path / str(on), compile=on, **options) for on in (False, True)]
    plain, ours = (load_file(run.path / "model/model.safetensors") for run in runs)
    assert plain.keys() == ours.keys()
    for name, value in plain.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-4)


# The average itself.


class Parts(nn.Module):
    """Tied weights, statistics, a mask with infinities, an index, flags."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
        self.register_buffer("index", torch.arange(3), persistent=False)
        self.register_buffer("flags", torch.tensor([True, False]))

    def forward(self, x):
        return self.second(self.norm(self.first(x)))


def test_statistics_are_averaged_and_masks_integers_and_flags_are_copied():
    torch.manual_seed(0)
    model = Parts()
    average = WeightAverage(model, 0.9)
    assert average.module.second.weight is average.module.first.weight
    optimizer, states = torch.optim.SGD(model.parameters(), 0.1), []
    for step in range(5):
        model(torch.randn(8, 3) + step).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.flags.logical_not_()
        model.index.add_(1)
        average.update_parameters(model)
        states.append({name: value.clone() for name, value in model.state_dict().items()})
    wanted, found = averages(states, 0.9)[-1], average.module.state_dict()
    for name in ("first.weight", "second.bias", "frozen", "norm.running_mean", "norm.running_var"):
        torch.testing.assert_close(found[name].double(), wanted[name], rtol=1e-6, atol=1e-7)
    for name in ("mask", "flags", "norm.num_batches_tracked"):
        assert torch.equal(found[name], model.state_dict()[name])
    assert torch.equal(average.module.index, model.index)
    assert average.module.second.weight is average.module.first.weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_half_precision_would_lose_small_changes_and_are_refused(tmp_path, dtype):
    with pytest.raises(ValueError, match="ema_decay must be 0 for a model in half precision"):
        WeightAverage(nn.Linear(2, 2).to(dtype), 0.999)
    config = tiny_runs.config(tmp_path / "run", ema_decay=0.999)
    with pytest.raises(ValueError, match=r"ema_decay must be 0 .* keep the weights in float32"):
        ga.train.fit(tiny_runs.model().to(dtype), tiny_runs.Hidden(), config, tiny_runs.examples())


@pytest.mark.parametrize(
    ("value", "says"),
    [(1.0, r"in \[0, 1\), got 1.0"), (-0.1, "a finite number >= 0"), ("x", "a finite number")],
)
def test_a_bad_decay_is_named(value, says):
    with pytest.raises(ValueError, match=f"ema_decay must be {says}"):
        ga.train.RunConfig(ema_decay=value)

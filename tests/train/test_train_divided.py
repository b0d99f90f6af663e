"""Runs whose processes divide every sequence, and start again by themselves when one is killed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import tiny_runs
import torch
from safetensors.torch import load_file
from torch import nn

import graphattn as ga
from graphattn.train.runs.sharded_weights import ShardedWeights

OPTIONS: dict[str, Any] = {"divided": "masked", "processes": 2, "context_parallel": 2}


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def check_is_bit_for_bit(folder: Path, straight: Path) -> None:
    runs = [ga.train.read_run(path) for path in (folder, straight)]
    assert [run.status for run in runs] == ["finished", "finished"]
    assert runs[0].rows == runs[1].rows
    expected = weights_of(straight)
    assert all(torch.equal(x, expected[name]) for name, x in weights_of(folder).items())


def check_is_the_same_to_rounding(folder: Path, straight: Path) -> None:
    runs = [ga.train.read_run(path) for path in (folder, straight)]
    assert [run.status for run in runs] == ["finished", "finished"]
    for here, there in zip(*(run.rows for run in runs), strict=True):
        assert (here["step"], here["split"]) == (there["step"], there["split"])
        assert here["loss"] == pytest.approx(there["loss"], rel=1e-11)
        norms = [row.get("grad_norm", 0.0) for row in (here, there)]  # not of evaluations
        assert norms[0] == pytest.approx(norms[1], rel=1e-9)
    expected = weights_of(straight)
    for name, x in weights_of(folder).items():
        torch.testing.assert_close(x, expected[name], rtol=1e-8, atol=1e-9)


@pytest.fixture(scope="module")
def undisturbed(server: tiny_runs.Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes, with dropout."""
    folder: Path = tmp_path_factory.mktemp("undisturbed") / "run"
    assert server.train(folder, dropout=0.2, **OPTIONS) == [0, 0]
    return folder


def run_with_kills(
    server: tiny_runs.Server, folder: Path, kills: list[dict[str, int]], **options: Any
) -> int:
    """How many of the kills came before the run was over."""
    given = {"dropout": 0.2, "restarts": len(kills), "kills": kills, **OPTIONS, **options}
    assert server.train(folder, **given) == [0]
    starts = Path(f"{folder}.starts").read_text(encoding="utf-8").splitlines()
    return len(starts) - 1


def test_a_run_with_a_killed_process_starts_again_and_ends_as_if_undisturbed(
    server, undisturbed, tmp_path
):
    # The first process in the middle of a checkpoint, and the other one somewhere.
    kills = [{"rank": 0, "event": 60}, {"rank": 1, "after": 3000}]
    assert run_with_kills(server, tmp_path / "run", kills) >= 1
    check_is_bit_for_bit(tmp_path / "run", undisturbed)


@pytest.mark.nightly
@pytest.mark.parametrize("fsdp", [False, True])
def test_twenty_kills_of_a_process_leave_no_trace(server, undisturbed, tmp_path, fsdp):
    straight = tmp_path / "straight" if fsdp else undisturbed
    if fsdp:
        assert server.train(straight, dropout=0.2, fsdp=True, **OPTIONS) == [0, 0]
    kills, seed = 0, 0
    while kills < 20:
        source = random.Random(seed)
        moments = [
            {
                "rank": source.randrange(2),
                **source.choice(({"event": source.randint(1, 120)}, {"after": after})),
            }
            for after in (source.randint(500, 8000) for _ in range(5))
        ]
        kills += run_with_kills(server, tmp_path / str(seed), moments, fsdp=fsdp)
        check_is_bit_for_bit(tmp_path / str(seed), straight)
        seed += 1


@pytest.mark.long
@pytest.mark.parametrize(("processes", "context_parallel"), [(2, 2), (3, 3), (4, 2)])
def test_divided_sequences_give_the_run_of_one_process(
    server, tmp_path, processes, context_parallel
):
    alone, together = tmp_path / "alone", tmp_path / "together"
    assert server.train(alone, divided="causal") == [0]
    given = {"processes": processes, "context_parallel": context_parallel}
    given["accumulate"] = 2 * context_parallel // processes
    assert server.train(together, divided="causal", **given) == [0] * processes
    check_is_the_same_to_rounding(together, alone)


@pytest.mark.long
def test_a_run_goes_on_with_another_number_of_processes(server, tmp_path):
    straight, run = tmp_path / "straight", tmp_path / "run"
    assert server.train(straight, **OPTIONS) == [0, 0]
    for interrupt, processes, accumulate in ((4, 2, 2), (7, 3, 2), (10, 4, 1), (0, 4, 2)):
        context_parallel = processes * accumulate // 2  # as many batches per step
        given = {"processes": processes, "context_parallel": context_parallel, "divided": "masked"}
        given |= {"accumulate": accumulate, "interrupt": interrupt}
        assert server.train(run, **given) == [0] * processes
    check_is_the_same_to_rounding(run, straight)


def numbers_of(folder: Path, processes: int) -> list[int]:
    """How many numbers of weights and of the optimizer every process of a run stores."""
    files = [Path(f"{folder}.numbers-{rank}") for rank in range(processes)]
    return [int(file.read_text(encoding="utf-8")) for file in files]


def test_divided_weights_give_the_run_of_one_process_which_can_go_on_with_it(server, tmp_path):
    alone, run = tmp_path / "alone", tmp_path / "run"
    given = {"divided": "causal", "ema_decay": 0.5, "fsdp": True, "lr": 0.1, "steps": 8}
    given |= {"warmup_steps": 1, "save_every": 4, "evaluate_every": 1, "log_every": 1}
    assert server.train(alone, **given) == [0]
    losses = [row["loss"] for row in ga.train.read_run(alone).evaluations]
    assert losses[1] < losses[2]  # so there is an evaluation that no checkpoint follows
    assert server.train(run, processes=2, context_parallel=2, interrupt=5, **given) == [0, 0]
    whole, parts = numbers_of(alone, 1)[0], numbers_of(run, 2)
    assert sum(parts) == whole
    assert max(parts) < 0.52 * whole
    assert server.train(run, **given) == [0]
    check_is_the_same_to_rounding(run, alone)
    assert ga.load(run / "model")(torch.zeros(4, dtype=torch.long)).shape == (4, 7)


@pytest.mark.long
@pytest.mark.parametrize(("processes", "context_parallel"), [(2, 1), (4, 2), (4, 1)])
def test_weights_are_divided_among_processes_that_divide_batches_and_sequences(
    server, tmp_path, processes, context_parallel
):
    run, whole = tmp_path / "run", tmp_path / "whole"
    given = {"divided": "causal", "processes": processes, "context_parallel": context_parallel}
    assert server.train(whole, **given) == [0] * processes
    assert server.train(run, fsdp=True, interrupt=7, **given) == [0] * processes
    given |= {"processes": 2, "context_parallel": 2}  # another number of processes
    given["accumulate"] = 2 * processes // context_parallel
    assert server.train(run, fsdp=True, **given) == [0, 0]
    check_is_the_same_to_rounding(run, whole)


@pytest.mark.long
def test_divided_weights_survive_a_killed_process(server, tmp_path):
    options = {**OPTIONS, "fsdp": True, "dropout": 0.2, "ema_decay": 0.9}
    assert server.train(tmp_path / "straight", **options) == [0, 0]
    kills = [{"rank": 0, "event": 60}, {"rank": 1, "after": 3000}]
    assert run_with_kills(server, tmp_path / "run", kills, **options) >= 1
    check_is_bit_for_bit(tmp_path / "run", tmp_path / "straight")


@pytest.mark.long
def test_a_divided_weight_may_be_used_by_one_process_alone(server, tmp_path):
    runs = tmp_path / "alone", tmp_path / "together"
    assert server.train(runs[0], divided="odd", accumulate=2) == [0]
    options = {"processes": 2, "accumulate": 1, "fsdp": True}
    assert server.train(runs[1], divided="odd", **options) == [0, 0]
    check_is_the_same_to_rounding(runs[1], runs[0])


@pytest.mark.parametrize("changes", [{"record_every": 5}, {"precision": "float16"}])
def test_what_divided_weights_cannot_do_is_refused(tmp_path, monkeypatch, changes):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (name,) = changes
    with pytest.raises(ValueError, match=f"{name} must be .* with fsdp=True"):
        tiny_runs.train(tmp_path / "run", fsdp=True, **changes)


def test_a_block_that_is_there_twice_is_not_divided():
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Linear(2, 2)] * 2)
    with pytest.raises(ValueError, match=r"fsdp must be False .* same block several times"):
        ShardedWeights.shard(ShardedWeights.__new__(ShardedWeights), model)


def test_the_launcher_of_accelerate_does_not_divide_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match=r"fsdp must be an option of the run \(--fsdp"):
        tiny_runs.train(tmp_path / "run")


def test_processes_that_cannot_be_divided_into_groups_are_refused(tmp_path):
    config = tiny_runs.config(tmp_path, context_parallel=2)
    with pytest.raises(
        ValueError, match=r"context_parallel must divide .* got 2 and 1: .*torchrun"
    ):
        ga.train.fit(tiny_runs.model(), tiny_runs.Hidden(), config, tiny_runs.examples())

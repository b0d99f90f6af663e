"""Several processes, as torchrun starts them: one run, the same mathematics."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import tiny_runs
import torch
from safetensors.torch import load_file

import graphattn as ga
from graphattn.train.runs import folder as run_folder


def check_is_one_run(alone, together) -> None:
    """Losses and weights are equal up to the order of sums."""
    runs = [ga.train.read_run(folder) for folder in (alone, together)]
    assert [run.status for run in runs] == ["finished", "finished"]
    assert [run.info["processes"] for run in runs] == [1, 2]
    losses = [[row["loss"] for row in run.training] for run in runs]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    weights = [load_file(folder / "model" / "model.safetensors") for folder in (alone, together)]
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.long
def test_two_processes_take_the_steps_that_one_takes_with_twice_the_batches(server, tmp_path):
    alone, together = tmp_path / "alone", tmp_path / "together"
    assert server.train(alone, certain=True, accumulate=4) == [0]
    assert server.train(together, certain=True, accumulate=2, processes=2) == [0, 0]
    check_is_one_run(alone, together)


def test_a_run_is_gone_on_with_by_as_many_processes_as_have_its_batches(tmp_path):
    config = tiny_runs.config(tmp_path)
    config.save(tmp_path / "config.yaml")
    run_folder.write_state(tmp_path, processes=2)
    run_folder.check_config(tmp_path, config, 2)
    with pytest.raises(ValueError, match=r"as many batches per step.* has 4 .*, got 2"):
        run_folder.check_config(tmp_path, config, 1)
    run_folder.check_config(tmp_path, config.replace(accumulate=4), 1)  # the same batches
    run_folder.check_config(tmp_path, config.replace(context_parallel=3), 6)
    run_folder.check_config(tmp_path, config.replace(context_parallel=2, accumulate=1), 8)


@pytest.mark.long
def test_two_processes_stop_after_the_same_step_and_go_on_bit_for_bit(server, tmp_path):
    straight, run = tmp_path / "straight", tmp_path / "run"
    assert server.train(straight, processes=2, keep=9) == [0, 0]
    assert server.train(run, processes=2, keep=9, interrupt=7) == [0, 0]
    assert ga.train.read_run(run).status == "interrupted"
    assert server.train(run) == [1]  # as many processes as before, or another mathematics
    assert server.train(run, processes=2, keep=9) == [0, 0]
    assert ga.train.read_run(run).rows == ga.train.read_run(straight).rows
    files = [load_file(path / "model" / "model.safetensors") for path in (run, straight)]
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])
    last = [path / "checkpoints" / "step-00000014" for path in (run, straight)]
    for name in ("rng_state_0.pth", "rng_state_1.pth"):
        assert (last[0] / name).read_bytes() == (last[1] / name).read_bytes()
    # Masks are drawn from torch's numbers, which processes must not have in common.
    with tiny_runs.safe_globals():
        drawn = [torch.load(last[0] / f"rng_state_{k}.pth", weights_only=True) for k in (0, 1)]
    seeds = [int.from_bytes(bytes(each["cpu"][:8].tolist()), "little") for each in drawn]
    assert seeds == [0, 1]


@pytest.mark.long
def test_torchrun_starts_a_run_of_two_processes(server, tmp_path):
    alone, together = tmp_path / "alone", tmp_path / "together"
    assert server.train(alone, certain=True, accumulate=4) == [0]
    given = {"folder": str(together), "certain": True, "accumulate": 2}
    subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            tiny_runs.__file__, json.dumps(given),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=300,
    )  # fmt: skip
    check_is_one_run(alone, together)

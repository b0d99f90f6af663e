"""Models over shards train as one process does, in the engines that people use.

Each claim holds in four processes, two of data parallelism times two of context parallelism.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from engine_cases import case
from ranks import Ranks

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("torch has no gloo", allow_module_level=True)

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CASES = (
    "models_compute_over_shards_what_they_compute_over_graphs",
    "proteins_compute_over_shards_what_they_compute_over_graphs",
    "biases_of_a_shard_are_those_of_its_edges",
    "graphs_that_divide_tokens_differently_are_refused",
    "a_sequence_is_dropped_on_all_ranks_or_on_none",
    "the_mean_over_tokens_is_that_of_all_ranks",
    "masked_tokens_of_all_ranks_have_one_mean",
    "ddp",
    "ddp_with_checkpoints",
    "ddp_with_reentrant_checkpoints",
    "fsdp",
    "fsdp_with_checkpoints",
    "fsdp_with_reentrant_checkpoints",
    "hybrid_fsdp",
    "images_whose_patches_are_divided",
    "compiled_blocks",
)


def run_or_kill(command: list[str], seconds: float) -> str:
    """Run a command and all processes that it starts, and return what they print.

    After `seconds` all of them are killed.
    """
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=seconds)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 0, printed[-4000:]
    return printed


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_in_four_processes(ranks: Ranks, name: str) -> None:
    ranks.run(case, 4, name=name)


@pytest.mark.long
def test_a_checkpoint_of_four_ranks_is_loaded_by_two_and_by_one(tmp_path: Path) -> None:
    processes = Ranks()
    name = "a_checkpoint_of_four_ranks_is_loaded_by_two_and_by_one"
    processes.run(case, 4, name=name, folder=tmp_path)
    processes.stop()


def torchrun(example: str, *options: str) -> str:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return run_or_kill([sys.executable, *command, str(EXAMPLES / example), *options], 120)


def losses_in(printed: str) -> list[float]:
    return [float(line.split()[-1]) for line in printed.splitlines() if line.startswith("step ")]


TINY = ("--steps", "4", "--tokens", "96", "--batch", "2")


@pytest.fixture(scope="module")
def losses_of_the_script() -> list[float]:
    """Losses of the plain script, whose two processes divide every sequence."""
    return losses_in(torchrun("long_sequences.py", *TINY))


@pytest.mark.long
def test_the_example_learns_the_same_if_processes_divide_tokens_or_sequences(losses_of_the_script):
    assert len(losses_of_the_script) == 4
    assert losses_of_the_script[-1] < losses_of_the_script[0] - 0.2
    by_sequence = losses_in(torchrun("long_sequences.py", *TINY, "--dp", "2", "--engine", "fsdp"))
    assert by_sequence == pytest.approx(losses_of_the_script, abs=2e-4)


@pytest.mark.long
def test_the_example_with_a_trainer_learns_as_the_plain_script_does(losses_of_the_script):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    losses = losses_in(torchrun("long_sequences_trainer.py", *TINY))
    assert losses == pytest.approx(losses_of_the_script, abs=2e-3)  # other weights decay

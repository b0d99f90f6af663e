"""Models over shards train as one process does, in the engines that people use.

Each claim holds in four processes, two of data parallelism times two of context parallelism. They
start once for all claims (`engine_cases.py`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("torch has no gloo", allow_module_level=True)

CASES = Path(__file__).with_name("engine_cases.py")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
QUICK = (
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
    "a_checkpoint_of_four_ranks_is_loaded_by_two_and_by_one",
)
Outcomes = list[dict[str, str]]


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


def outcomes_of(folder: Path, names: tuple[str, ...]) -> Outcomes:
    """Run cases in four processes; one dict per rank says what became of every case."""
    run_or_kill([sys.executable, str(CASES), str(folder), *names], 180)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


def check(outcomes: Outcomes, name: str) -> None:
    """Fail with the errors of the ranks on which a case failed, or which it never reached."""
    failed = {
        rank: found.get(name, "not run, because a case before it failed")
        for rank, found in enumerate(outcomes)
        if found.get(name) != "passed"
    }
    assert not failed, "\n".join(f"rank {rank}: {said}" for rank, said in failed.items())


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> Outcomes:
    return outcomes_of(tmp_path_factory.mktemp("quick"), QUICK)


@pytest.mark.long
@pytest.mark.parametrize("name", QUICK)
def test_in_four_processes(outcomes, name):
    check(outcomes, name)


@pytest.mark.long
def test_compiled_blocks_train_as_one_process_does(tmp_path):
    check(outcomes_of(tmp_path, ("compiled_blocks",)), "compiled_blocks")


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
    found = losses_in(torchrun("long_sequences_trainer.py", *TINY))
    assert found == pytest.approx(losses_of_the_script, abs=2e-3)  # other weights decay

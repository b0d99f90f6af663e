"""A run that is killed at any moment, during saving too, goes on as if nothing had happened."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import tiny_runs

import graphattn as ga
from graphattn.train.runs import checkpoints
from graphattn.train.runs import folder as run_folder

KILLED = -9


def test_a_run_that_says_it_runs_and_holds_no_lock_was_killed(tmp_path):
    tiny_runs.config(tmp_path).save(tmp_path / run_folder.CONFIG)
    run_folder.write_state(tmp_path, status="running")
    assert ga.train.read_run(tmp_path).status == "interrupted"
    with run_folder.locked(tmp_path):
        assert ga.train.read_run(tmp_path).status == "running"
    assert ga.train.read_run(tmp_path).status == "interrupted"


@pytest.fixture(scope="module")
def undisturbed(
    server: tiny_runs.Server, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert server.train(folder) == [0]
    return tiny_runs.results(folder)


def check_is_readable(folder: Path) -> None:
    """Check that complete checkpoints have all files and load, as the model and the run do."""
    for step in checkpoints.complete_checkpoints(folder):
        path = checkpoints.checkpoint_path(folder, step)
        ga.load(path)
        names = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"}
        assert names <= {file.name for file in path.iterdir()}
    if (folder / "model").is_dir():
        ga.load(folder / "model")
    if (folder / "config.yaml").is_file():
        run = ga.train.read_run(folder)
        assert run.status in ("interrupted", "finished")


def kill_until_finished(
    server: tiny_runs.Server, folder: Path, moments: list[dict[str, int]]
) -> int:
    """How many of the moments came before the run was over, which begins anew after each."""
    kills = 0
    for moment in moments:
        (status,) = server.train(folder, **moment)
        assert status in (0, KILLED)
        kills += status == KILLED
        check_is_readable(folder)
    assert server.train(folder) == [0]
    return kills


def drawn(seed: int, count: int) -> list[dict[str, int]]:
    """Moments: half of them at the n-th change of a file, half after some milliseconds."""
    source = random.Random(seed)
    return [
        source.choice(({"event": source.randint(1, 120)}, {"after": source.randint(100, 1200)}))
        for _ in range(count)
    ]


@pytest.mark.long
def test_a_run_killed_at_random_moments_ends_as_if_undisturbed(server, undisturbed, tmp_path):
    kills = kill_until_finished(
        server, tmp_path / "run", [{"event": 31}, {"after": 400}, {"event": 47}]
    )
    assert kills >= 1
    assert tiny_runs.results(tmp_path / "run") == undisturbed


@pytest.mark.nightly
def test_fifty_kills_leave_no_trace(server, undisturbed, tmp_path):
    kills, seed = 0, 0
    while kills < 50:
        folder = tmp_path / str(seed)
        kills += kill_until_finished(server, folder, drawn(seed, 8))
        assert tiny_runs.results(folder) == undisturbed
        seed += 1


@pytest.mark.long
def test_a_run_killed_at_every_change_of_a_file_while_it_saves_goes_on(
    server, undisturbed, tmp_path
):
    # Far enough for the opening of the folder, two checkpoints, and the removal of an old one.
    for event in range(1, 130, 5):
        folder = tmp_path / str(event)
        kill_until_finished(server, folder, [{"event": event}])
        assert tiny_runs.results(folder) == undisturbed

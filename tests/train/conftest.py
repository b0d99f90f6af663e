"""Fixtures that tests of runs share."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest

import graphattn as ga


@pytest.fixture(autouse=True)
def no_waiting_for_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs and sweeps wait until a disk has their files, which only matters when power fails."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture(scope="module")
def short_collections() -> Iterator[None]:
    """accelerate collects garbage at every start, which takes longer than these runs."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def straight(short_collections: None, tmp_path_factory: pytest.TempPathFactory) -> ga.train.Run:
    """A run that nothing disturbed."""
    import tiny_runs

    return tiny_runs.train(tmp_path_factory.mktemp("straight") / "run")


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    """A process that trains in forks of itself."""
    import tiny_runs

    training = tiny_runs.Server()
    yield training
    training.close()

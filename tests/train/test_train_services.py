"""Services for logs, as transformers knows them: what they are told, and what is missing."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import tiny_runs

import graphattn as ga

pytestmark = pytest.mark.usefixtures("short_collections")


@pytest.mark.long
def test_a_service_is_told_what_the_log_holds(tmp_path, monkeypatch):
    """A stand-in for TensorBoard's writer records what it is told."""
    scalars: dict[str, dict[int, float]] = {}

    class SummaryWriter:
        def __init__(self, log_dir: str) -> None:
            assert log_dir.startswith(str(tmp_path / "run"))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            scalars.setdefault(name, {})[step] = value

        def __getattr__(self, name: str) -> Any:
            return lambda *args, **given: None

    fake = types.ModuleType("tensorboardX")
    fake.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorboardX", fake)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    from transformers.integrations import integration_utils

    monkeypatch.setattr(integration_utils, "is_tensorboard_available", lambda: True)
    run = tiny_runs.train(tmp_path / "run", log_to="tensorboard")
    assert scalars["train/loss"] == {row["step"]: row["loss"] for row in run.training}
    assert scalars["train/learning_rate"] == {row["step"]: row["lr"] for row in run.training}
    assert scalars["eval/loss"] == {row["step"]: row["loss"] for row in run.evaluations}
    assert scalars["eval/accuracy"] == {row["step"]: row["accuracy"] for row in run.evaluations}


def test_a_service_that_is_unknown_or_missing_is_named_before_anything_is_written(
    tmp_path, monkeypatch
):
    for name in ("nobody", "", "none,none"):
        with pytest.raises(
            ValueError, match=rf"log_to must be 'none', 'all' or some of .*, got '{name}'"
        ):
            tiny_runs.train(tmp_path / "run", log_to=name)
    from transformers.integrations import integration_utils

    monkeypatch.setattr(integration_utils, "is_wandb_available", lambda: False)
    with pytest.raises(
        ImportError, match=r"log_to='wandb' needs .*: install it with pip install wandb"
    ):
        tiny_runs.train(tmp_path / "run", log_to="wandb")
    assert not (tmp_path / "run").exists()


def test_what_is_logged_elsewhere_changes_nothing_of_a_run():
    here, there = (tiny_runs.config("a", log_to=service) for service in ("none", "tensorboard"))
    assert ga.train.RunConfig.digest(here) == ga.train.RunConfig.digest(there)

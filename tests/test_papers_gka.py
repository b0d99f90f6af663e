"""Experiments about Gaussian kernel attention and hybrids: their judgements and their numbers."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "examples" / "papers"


@pytest.fixture(autouse=True)
def _scripts_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))


def script(name: str) -> ModuleType:
    return importlib.import_module(name)


def curves_of(losses: dict[str, dict[float, list[list[float]]]]) -> list[dict[str, Any]]:
    """Rows of runs with losses at steps 0, 100 and 200: per arm, rate and seed."""
    return [
        {"arm": arm, "lr": lr, "seed": seed, "loss": curve[-1], "status": "finished",
         "curve": [[100 * i, loss] for i, loss in enumerate(curve)]}
        for arm, by_rate in losses.items()
        for lr, own in by_rate.items()
        for seed, curve in enumerate(own)
    ]  # fmt: skip


def test_losses_are_compared_after_equal_time() -> None:
    costs = script("costs")
    rows = curves_of(
        {
            "cheap": {1.0: [[9.0, 5.0, 4.0], [9.0, 5.0, 4.2]], 2.0: [[9.0, 9.0, 9.0]] * 2},
            "dear": {1.0: [[9.0, 4.0, 2.0]] * 2, 2.0: [[9.0, 3.9, 3.8]] * 2},
        }
    )
    # While the cheap one makes 200 steps, the dear one makes 100: its better rate there is 2.
    pair = costs.at_equal_cost(rows, {"cheap": 1.0, "dear": 2.0}, "cheap", "dear", 200)
    assert pair[:2] == pytest.approx((4.1, 3.9))
    assert pair.deviation == pytest.approx(2**0.5 / 10)
    same = costs.at_equal_cost(rows, {"cheap": 1.0, "dear": 1.0}, "cheap", "dear", 200)
    assert same.other == pytest.approx(2.0)
    assert costs.loss_after(rows[0], 150) == pytest.approx(4.5)
    assert costs.loss_after({**rows[0], "status": "diverged"}, 150) == float("inf")

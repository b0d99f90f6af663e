"""Benchmarks watch the speed of the machine, which is not what these tests look at."""

from __future__ import annotations

import pytest

from graphattn.bench.measuring import host_clock


@pytest.fixture(autouse=True)
def small_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of the time of tiny cases would go into the products that tell the speed."""
    monkeypatch.setattr(host_clock, "WATCHED", 64)

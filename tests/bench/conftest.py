"""Benchmarks watch the speed of the machine, which is not what these tests look at."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

from graphattn.bench.contenders import flex, fused_attention
from graphattn.bench.measuring import host_clock


@pytest.fixture(autouse=True)
def small_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of the time of tiny cases would go into the products that tell the speed."""
    monkeypatch.setattr(host_clock, "WATCHED", 64)


@pytest.fixture
def flex_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run FlexAttention uncompiled and with gradients, which torch refuses on a CPU."""
    attention = pytest.importorskip("torch.nn.attention.flex_attention")
    monkeypatch.setattr(flex, "compile_once", lambda function: function)
    monkeypatch.setattr(flex, "operands", fused_attention.by_head)
    monkeypatch.setattr(attention, "_validate_device", lambda *_: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not compiled
        yield

"""Devices that kernels run on, and what they do where there are several or none.

There is no GPU here: what torch.cuda says of one is made up.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import graphattn as ga
from graphattn.kernels.shared import launch as launches
from graphattn.kernels.shared import tuning
from graphattn.kernels.shared.launch import Heads, launch, recording, why_not_on
from graphattn.ops.attention import backends
from graphattn.ops.attention.calls import AttentionCall
from graphattn.ops.attention.step.kernels import step_kernel
from graphattn.ops.backends import choose

TESTS = Path(__file__).parents[1]


@pytest.mark.long
def test_asking_for_a_gpu_that_is_not_there_is_a_usage_error_and_not_a_skip() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "--device", "cuda", "-p", "no:cacheprovider", __file__],
        capture_output=True,
        text=True,
        cwd=TESTS.parent,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--device must be cpu, because there is no CUDA device, got cuda" in run.stderr
    assert "skipped" not in run.stdout


# Old devices.


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], list[Any]]]:
    """Let every CUDA device have this capability; the list has the devices that were asked."""

    def pretend(major: int, minor: int) -> list[Any]:
        asked: list[Any] = []

        def properties(device: Any) -> SimpleNamespace:
            asked.append(device)
            return SimpleNamespace(major=major, minor=minor)

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
        monkeypatch.setattr(launches, "_capabilities", {})
        return asked

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(launches, "HAS_TRITON", True)
    return pretend


def on_gpu(*shape: int, index: int = 0) -> Any:
    """A stand-in for a tensor on a GPU, as it is asked before a backend is chosen."""
    return SimpleNamespace(
        device=torch.device("cuda", index), dtype=torch.bfloat16, shape=shape, is_meta=False
    )


def call_of(query: Any) -> AttentionCall:
    """A call of attention with these queries; nothing else of it is read."""
    call: Any = SimpleNamespace(
        query=query, value=query, score=ga.DotProduct(), softcap=None, dropout=0.0
    )
    return call


@pytest.mark.parametrize(("major", "minor"), [(7, 0), (7, 5)])
def test_a_device_before_ampere_gets_no_kernels(
    major: int, minor: int, capability: Callable[[int, int], list[Any]]
) -> None:
    asked = capability(major, minor)
    reason = f"its kernels need compute capability 8.0 or more, and cuda:0 has {major}.{minor}"
    query = on_gpu(2, 9, 4, 16)
    assert why_not_on(query) == reason
    call = call_of(query)
    assert choose(backends.BACKENDS, call, "auto").name == "structured"
    with pytest.raises(ValueError, match=f"backend 'triton' cannot run this case: {reason}"):
        choose(backends.BACKENDS, call, "triton")
    assert step_kernel("auto", query, query.dtype, window=8, top_k=None) is None
    assert asked == [query.device]  # once


@pytest.mark.parametrize(("major", "minor"), [(8, 0), (8, 9), (9, 0), (12, 0)])
def test_ampere_and_later_devices_get_kernels(
    major: int, minor: int, capability: Callable[[int, int], list[Any]]
) -> None:
    capability(major, minor)
    query = on_gpu(2, 9, 4, 16)
    assert why_not_on(query) is None
    assert choose(backends.BACKENDS, call_of(query), "auto").name == "triton"


def test_a_device_of_amd_is_not_asked(
    capability: Callable[[int, int], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = capability(0, 0)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert why_not_on(on_gpu(2, 9, 4, 16)) is None
    assert not asked


# Several devices.


@pytest.fixture
def two_kinds(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A machine with an H100 and an A100; the list has the current device."""
    current, kinds = [0], [(9, 0), (8, 0)]

    @contextmanager
    def device_of(tensor: Any) -> Iterator[None]:
        before, current[0] = current[0], getattr(tensor, "on", 0)
        yield
        current[0] = before

    def properties(index: int) -> SimpleNamespace:
        return SimpleNamespace(major=kinds[index][0], minor=kinds[index][1])

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    caches = tuning._of_device, tuning._has_devices
    for cache in caches:
        cache.cache_clear()
    yield current
    for cache in caches:
        cache.cache_clear()


def test_tiles_are_chosen_for_the_current_device(two_kinds: list[int]) -> None:
    choices = []
    for two_kinds[0] in (0, 1, 0):
        choices.append((tuning.architecture(), tuning.choose("forward", torch.bfloat16, 64, 4096)))
    assert [name for name, _ in choices] == ["sm_90", "sm_80", "sm_90"]
    assert [choice for _, choice in choices] == [
        table["forward"][64] for table in (tuning.HOPPER, tuning.OTHERS, tuning.HOPPER)
    ]


def graph_of() -> ga.TokenGraph:
    return ga.window_path_graph(20, 2)


def attend(x: Tensor) -> Tensor:
    return ga.dot_product_attention(x, x.detach(), x.detach(), graph_of(), backend="triton")


def search(x: Tensor) -> Tensor:
    return ga.knn_graph(x.detach().flatten(1), 3, backend="triton").neighbors


def generate(x: Tensor) -> Tensor:
    layer = ga.nn.DotProductAttention(16, 1, backend="triton")
    with torch.no_grad():
        return layer.step(x[:, 0][:1], layer.init_cache(1, window=8))


def agree(x: Tensor) -> Tensor:
    layer = ga.nn.SelfConsensus(16, 1, edge_hidden=4, backend="triton")
    return layer(x[:, 0], graph_of())


@pytest.mark.every_case
@pytest.mark.parametrize("run", [attend, search, generate, agree])
def test_operations_run_with_the_device_of_their_tensors_as_the_current_one(
    run: Callable[[Tensor], Tensor], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the architecture is asked for within `device_of` a tensor of the call."""
    if device == "cuda":
        pytest.skip("the devices are made up")
    depth, asked = [0], []

    @contextmanager
    def device_of(tensor: Tensor) -> Iterator[None]:
        assert isinstance(tensor, Tensor)
        depth[0] += 1
        yield
        depth[0] -= 1

    def architecture() -> str:
        asked.append(depth[0])
        return "sm_90"

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(tuning, "architecture", architecture)
    x = torch.randn(20, 1, 16, requires_grad=True)
    with mock.patch.object(tuning, "_override", {}):  # which is looked at before the device
        result = run(x)
        if result.requires_grad:
            result.sum().backward()
    assert asked or run is generate
    assert 0 not in asked


# Many programs.


def kernel_that_is_not_started(**_: Any) -> None:
    raise AssertionError


@pytest.mark.parametrize("grid", [(2**31,), (2**20, 2**11)])
def test_more_programs_than_a_device_can_start_are_refused(grid: tuple[int, ...]) -> None:
    arguments = {"p_x": torch.ones(1), "num_warps": 4, "num_stages": 1}
    says = (
        "kernel_that_is_not_started must have at most .* = 2,147,483,647 programs, "
        "got 2,147,483,648: split the batch, or the heads, into several calls"
    )
    with pytest.raises(ValueError, match=says):
        launch(kernel_that_is_not_started, grid, **arguments)  # type: ignore[arg-type]
    with recording() as recorded, pytest.raises(ValueError, match=says):
        launch(kernel_that_is_not_started, grid, **arguments)  # type: ignore[arg-type]
    assert not recorded
    with recording() as recorded:
        launch(kernel_that_is_not_started, (2**31 - 1,), **arguments)  # type: ignore[arg-type]
    assert len(recorded) == 1


# Tuples as arguments.


def test_a_launch_runs_on_the_device_of_a_tensor_in_a_tuple(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen, x = [], torch.ones(1, 2, 3, 4)

    @contextmanager
    def device_of(tensor: Tensor) -> Iterator[None]:
        seen.append(tensor)
        yield

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda **_: None

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    launch(Kernel(), (1,), num_warps=4, num_stages=1, size=1, q=Heads.of(x))
    assert seen[0] is x


def test_few_features_never_meet_many_tokens_at_a_time_on_hopper() -> None:
    """Values of 24 features in tiles of 64 sources are compiled wrong by ptxas 12.8."""
    with tuning.compiling_for("sm_90"):
        for kernel, side in tuning.OTHER_SIDE.items():
            for width, narrowest in ((24, None), (32, 32), (40, 24), (64, 1)):
                for window in (17, 256, 4096):
                    choice = tuning.choose(kernel, torch.bfloat16, width, window, narrowest)
                    assert getattr(choice, side) <= 32
        assert tuning.choose("forward", torch.bfloat16, 64, 4096, 40).columns == 128
    with tuning.compiling_for("sm_80"):
        assert tuning.choose("d_source", torch.bfloat16, 24, 4096).columns == 64

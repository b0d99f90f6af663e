"""Compiled kernels, run by the emulator: right, and without a mistake that it notices."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fresh_memory import nan_until_written
from problems import problems

from emulator.device import CAPABILITIES, watched

PROBLEMS = {problem.name: problem for problem in problems()}


@pytest.fixture(autouse=True)
def _memory_is_nan_until_written() -> Iterator[None]:
    with nan_until_written():
        yield


@pytest.mark.parametrize("arch", CAPABILITIES)
@pytest.mark.parametrize("name", PROBLEMS)
def test_compiled_kernels_are_right_and_clean(
    name: str, arch: str, request: pytest.FixtureRequest
) -> None:
    with watched(arch) as launches:
        PROBLEMS[name].run()
    # For the report at the end (`conftest`), also from other processes.
    request.node.user_properties.append(("launches", [list(launch) for launch in launches]))
    assert launches

"""Compiled kernels, run by the emulator: right, and without a mistake that it notices."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fresh_memory import nan_until_written
from problems import problems

from emulator.device import CAPABILITIES, emulated_gpu, watched
from graphattn.kernels.shared import launch

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


@pytest.mark.parametrize(
    "name", ["window, RBF, bf16", "one tensor, bf16", "padding, bf16", "top 16, bf16"]
)
def test_careful_launches_are_right_where_all_programs_run_again(name: str) -> None:
    again = []

    def run(one: launch.Launch) -> None:
        if one.arguments.get("CAREFUL"):
            one.arguments["p_again"].fill_(1)
            again.append(one.kernel.fn.__name__)
        emulated_gpu("sm_90").run(one)

    with watched("sm_90") as launches, launch.redirected(run):
        PROBLEMS[f"bands: {name}"].run()
    assert len(again) >= 2
    assert len(launches) >= 2 * len(again)

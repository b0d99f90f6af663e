"""Choose the device that kernels run on, and prepare what every test of theirs starts from."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
from fresh_memory import nan_until_written

from graphattn.kernels.shared import tuning

# Tiny sizes cross the borders of tiles. On a GPU the real tables are tested.
SMALL = {name: tuning.Choice(16, 16, 4, 1) for name in tuning.KERNELS}


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield "cpu" (small tiles) or "cuda" (real ones); memory is NaN until written.

    On the CPU kernels are interpreted, or emulated as they are compiled. In the latter case the
    test also fails if the emulator finds a race, an access out of bounds, or the like.
    """
    chosen = request.config.getoption("--device")
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    if chosen == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    torch.manual_seed(0)
    with ExitStack() as stack:
        stack.enter_context(nan_until_written())
        if chosen == "emulator":
            from emulator.device import watched

            stack.enter_context(watched(request.config.getoption("--arch")))
        stack.enter_context(tuning.override(**({} if chosen == "cuda" else SMALL)))
        yield "cuda" if chosen == "cuda" else "cpu"


@pytest.fixture
def edge_tiles(device: str) -> Iterator[None]:
    """Large tiles of edge kernels where they are interpreted."""
    from cases_edges import large_tiles

    with large_tiles(device):
        yield


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing that was compiled before or is compiled in a test is used in another."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()

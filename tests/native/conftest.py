"""Give the tests every build of the compiled CPU kernels that exists and runs here."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from graphattn.kernels.cpu import library


@pytest.fixture(scope="session", params=[*reversed(library.BUILDS)])
def native(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """One build after the other."""
    capability = torch.backends.cpu.get_cpu_capability()
    loaded = library.find(Path(library.__file__).parent, request.param, capability)
    if loaded.library is None:
        pytest.skip(loaded.reason)
    return loaded.library

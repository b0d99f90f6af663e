"""Which tests run where: those of launches need compiled kernels, `--device emulator`."""

from __future__ import annotations

from pathlib import Path

import pytest

COMPILED = ("test_emulated_launches.py", "test_mutations_of_kernels.py")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Kernels that were imported to be interpreted cannot be compiled in the same process."""
    if collection_path.name in COMPILED and config.getoption("--device") != "emulator":
        return True
    return None

"""Real files for the reader tests: never copied here, read where the workplace keeps them."""

from collections.abc import Callable
from pathlib import Path

import pytest

SHARED_DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"


@pytest.fixture(scope="session")
def real_file() -> Callable[[str], Path]:
    """The path of a real file, by its name below ../shared/data; skips where there is none."""

    def find(name: str) -> Path:
        path = SHARED_DATA / name
        if not path.exists():
            pytest.skip(f"real data file {path} is not here")
        return path

    return find


@pytest.fixture(scope="session")
def real_files() -> Callable[[str], list[Path]]:
    """All real files that match a glob pattern below ../shared/data; skips where none does."""

    def find(pattern: str) -> list[Path]:
        paths = sorted(SHARED_DATA.glob(pattern))
        if not paths:
            pytest.skip(f"no real data file matches {SHARED_DATA / pattern}")
        return paths

    return find

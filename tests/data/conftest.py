"""Real files for the reader tests: never copied here, read where the workplace keeps them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structure_files import ReadText

from graphattn.data import Structure, read_structure

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


@pytest.fixture
def structure_of(tmp_path: Path) -> ReadText:
    """A function that writes a structure file and reads it."""

    def read(content: str | bytes, name: str = "test.pdb", **arguments: Any) -> Structure:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return read_structure(path, **arguments)

    return read

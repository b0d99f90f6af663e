"""Run tests in a copy of the checkout, whose files are replaced one at a time."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import forks

COPIED = ("graphattn", "kernels", "tests", "pyproject.toml", "README.md")


class Checkout:
    """A copy of a checkout, and the process that runs its tests in forks (`forks.py`)."""

    def __init__(self, top: Path, folder: Path) -> None:
        self.folder = folder
        for name in COPIED:
            if (top / name).is_dir():
                shutil.copytree(top / name, folder / name)
            else:
                shutil.copy2(top / name, folder / name)
        # Where an installation puts it, and where it is found before the checkout's.
        (folder / "graphattn" / "kernels").symlink_to("../kernels")
        left_out = ("PYTEST_ADDOPTS", "PYTHONDONTWRITEBYTECODE")
        environment = {name: value for name, value in os.environ.items() if name not in left_out}
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(forks.__file__))],
            cwd=folder, env=environment | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._times = itertools.count(1)

    def run(self, tests: Sequence[str]) -> tuple[int, str]:
        """Run tests on the code of the copy up to the first failure; return status and output."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(tests) + "\n")
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())
        return status, (self.folder / forks.OUTPUT).read_text()

    @contextmanager
    def replaced(self, name: str, code: str) -> Iterator[None]:
        """Put other code into a file of the copy, and take it out again."""
        file = self.folder / name
        before, times = file.read_text(), file.stat()
        file.write_text(code)
        # Python tells by its time and its size whether a file is that of the stored bytecode.
        os.utime(file, (time := next(self._times), time))
        try:
            yield
        finally:
            file.write_text(before)
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

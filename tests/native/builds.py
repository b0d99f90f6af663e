"""Tests of one build of the compiled CPU kernels, in a process of its own.

Each build has one process for all tests, because starting torch is what takes time.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import traceback

import pytest

from graphattn.kernels.cpu import library


class Process:
    """A Python that runs the compiled CPU kernels of one build."""

    def __init__(self, build: str) -> None:
        folder = os.path.dirname(__file__)
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"GRAPHATTN_NATIVE": build, "PYTHONPATH": folder},
        )
        self.name, self.why_not = self._read()

    def run(self, code: str) -> str:
        """Run code in the process, and return its error, or an empty text."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(code) + "\n")
        self.process.stdin.flush()
        return self._read()[0]

    def _read(self) -> list[str]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:  # a wrong address ends a process; the next test has a new one
            process_of.cache_clear()
            return [f"the process ended with status {self.process.wait()}"] * 2
        fields: list[str] = json.loads(line)
        return fields


process_of = functools.cache(Process)


def run_with(build: str, code: str) -> None:
    """Run `code`, which may import the files beside this one; skip where the build does not run."""
    process = process_of(build)
    if "is not in" in process.why_not or "this processor" in process.why_not:
        pytest.skip(f"there is no build {build} that this processor runs")
    assert process.name == library.NAMES[build], process.why_not
    error = process.run(code)
    assert not error, error


def serve() -> None:
    """Run the code of every line, and answer with what went wrong."""
    channel, sys.stdout = sys.stdout, sys.stderr  # what is printed is no result
    print(json.dumps([library.instruction_set(), str(library.why_not())]), file=channel, flush=True)
    for line in sys.stdin:
        error = ""
        try:
            exec(json.loads(line), {})
        except BaseException:
            error = traceback.format_exc()
        print(json.dumps([error]), file=channel, flush=True)


if __name__ == "__main__":
    serve()

"""Tests of one build of the compiled CPU kernels, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from graphattn.kernels.cpu import library


def run_with(build: str, code: str) -> None:
    """Run `code`, which may import the files beside this one; skip where the build does not run."""
    found = (
        "from graphattn.kernels.cpu import library\nassert library.library(), library.why_not()\n"
    )
    said = "\nprint(library.instruction_set())"
    environment = os.environ | {"GRAPHATTN_NATIVE": build, "PYTHONPATH": os.path.dirname(__file__)}
    run = subprocess.run(
        [sys.executable, "-c", found + code + said],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if "is not in" in run.stderr or "this processor" in run.stderr:
        pytest.skip(f"there is no build {build} that this processor runs")
    assert run.stdout.strip() == library.NAMES[build], run.stderr

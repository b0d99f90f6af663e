"""The day with a GPU, rehearsed on the emulator, from the first step to the report."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpu.jobs import environment


def rehearse(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpu", "--device", "emulator", "--out", str(out), *options],
        env=environment(OMP_NUM_THREADS="1"), capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.nightly
def test_a_benchmark_that_is_cut_off_goes_on_and_all_steps_end_with_a_report(tmp_path) -> None:
    first = rehearse(tmp_path, "--step", "benchmark", "--limit", "26")
    assert first.returncode in (0, 3), first.stderr
    text = (tmp_path / "report.md").read_text()
    assert text.startswith("# Rehearsal")
    assert "| parity | not run |" in rows_of(text)

    run = rehearse(tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    for step, jobs in (
        ("parity", 5), ("candidates", 1), ("sanitizer", 2), ("benchmark", 2), ("tune", 2),
    ):  # fmt: skip
        assert f"{step}: done: {jobs} of {jobs}" in run.stdout
    text = (tmp_path / "report.md").read_text()
    assert "| sanitizer | done: 2 of 2 |" in rows_of(text)
    assert text.count("| clean |") == 2
    assert "emulated, no time" in text
    assert " ms |" not in text
    assert "paste nothing of it" in text

    written = {path: os.stat(path).st_mtime_ns for path in tmp_path.iterdir()}
    again = rehearse(tmp_path)  # nothing is left
    assert again.returncode == 0
    changed = {path.name for path, then in written.items() if os.stat(path).st_mtime_ns != then}
    assert changed == {"report.md", "tuning.py.txt"}


def rows_of(text: str) -> list[str]:
    """Return lines of a table without the spaces that line up its columns."""
    return [" ".join(line.split()) for line in text.splitlines()]

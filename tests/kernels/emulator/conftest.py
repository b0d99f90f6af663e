"""Choose the tests that run (launches need compiled kernels, `--device emulator`), and report."""

from __future__ import annotations

from pathlib import Path

import pytest

from emulator.device import Emulated
from emulator.report import markdown

COMPILED = ("test_emulated_launches.py", "test_mutations_of_kernels.py")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Kernels that were imported to be interpreted cannot be compiled in the same process."""
    if collection_path.name in COMPILED and config.getoption("--device") != "emulator":
        return True
    return None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was emulated: kernels, launches and blocks; `--emulated FILE` writes the table."""
    rows = [
        (report.nodeid.rstrip("]").rpartition("-")[2], Emulated(*launch))
        for report in terminalreporter.getreports("passed")
        for name, launches in report.user_properties
        if name == "launches"
        for launch in launches
    ]
    if not rows:
        return
    seconds = sum(launch.compile_seconds + launch.run_seconds for _, launch in rows)
    terminalreporter.write_line(
        f"emulated: {len(rows)} launches of {len({launch.kernel for _, launch in rows})} kernels, "
        f"{sum(launch.blocks for _, launch in rows)} blocks, {seconds:.0f} s, nothing found"
    )
    if path := terminalreporter.config.getoption("--emulated"):
        Path(path).write_text(markdown(rows), encoding="utf-8")

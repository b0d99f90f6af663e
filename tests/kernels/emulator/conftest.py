"""Choose the tests that run (launches need compiled kernels, `--device emulator`), and report."""

from __future__ import annotations

from collections import Counter
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
    """Say what was emulated: kernels, launches and blocks; `--emulated FILE` writes the table.

    And what was taken out of kernels to see whether it is noticed.
    """
    found = [
        (report.nodeid.rstrip("]").rpartition("-")[2], name, rows)
        for report in terminalreporter.getreports("passed")
        for name, rows in report.user_properties
    ]
    removed: Counter[str] = Counter()
    for _, name, rows in found:
        if name == "removals":
            removed.update({f"{kind}, {verdict}": count for kind, verdict, count in rows})
    if removed:
        terminalreporter.write_line(
            "taken out: " + "; ".join(f"{n} {k}" for k, n in removed.items())
        )
    launches = [
        (arch, Emulated(*launch))
        for arch, name, rows in found
        if name == "launches"
        for launch in rows
    ]
    if not launches:
        return
    seconds = sum(launch.compile_seconds + launch.run_seconds for _, launch in launches)
    terminalreporter.write_line(
        f"emulated: {len(launches)} launches of {len({x.kernel for _, x in launches})} kernels, "
        f"{sum(x.blocks for _, x in launches)} blocks, {seconds:.0f} s, nothing found"
    )
    remarks: Counter[str] = Counter()
    for _, launch in launches:
        remarks.update({f"{launch.kernel}: {remark}": n for remark, n in launch.remarks.items()})
    for remark, times in remarks.items():
        terminalreporter.write_line(f"remark: {remark}, {times} times")
    if path := terminalreporter.config.getoption("--emulated"):
        Path(path).write_text(markdown(launches), encoding="utf-8")

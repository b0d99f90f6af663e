"""Choose the tests that run (launches need compiled kernels, `--device emulator`), and report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from emulator.device import Emulated
from graphattn.kernels.check.report import table

COMPILED = (
    "test_emulated_launches.py", "test_mutations_of_kernels.py", "test_specialised_warps.py",
)  # fmt: skip
HEADER = ("arch", "dtype", "tile", "warps", "options", "launches", "blocks")
TILE = ("ROWS", "COLUMNS", "SLOTS", "TOKENS", "KEPT")
# Sizes, and constants that follow from others.
LEFT_OUT = {*"NMEBHD", "DV", "WIDTH", "BLOCK", "XI", "LOW", *TILE}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Kernels that were imported to be interpreted cannot be compiled in the same process."""
    if collection_path.name in COMPILED and config.getoption("--device") != "emulator":
        return True
    return None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was emulated: kernels, launches and blocks; `--emulated FILE` writes the table.

    And what was taken out of kernels to see whether it is noticed.
    """
    properties = [
        (report.nodeid.rstrip("]").rpartition("-")[2], name, rows)
        for report in terminalreporter.getreports("passed")
        for name, rows in report.user_properties
    ]
    removed: Counter[str] = Counter()
    for _, name, rows in properties:
        if name == "removals":
            removed.update({f"{kind}, {verdict}": count for kind, verdict, count in rows})
    if removed:
        terminalreporter.write_line(
            "taken out: " + "; ".join(f"{n} {k}" for k, n in removed.items())
        )
    launches = [
        (arch, Emulated(*launch))
        for arch, name, rows in properties
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


def markdown(rows: Sequence[tuple[str, Emulated]]) -> str:
    """Emulated launches beside their architectures, as docs/benchmarks/emulated.md shows them."""
    import triton

    kernels = sorted({launch.kernel for _, launch in rows})
    text = [
        "# Kernels, executed without a GPU",
        "",
        f"What Triton {triton.__version__} compiled, run by the emulator of "
        "`tests/kernels/emulator`: results agree with float64, and no race, no access out of "
        "bounds and no missing wait was found. `make emulate` writes this.",
        "",
        f"{len(rows)} launches of {len(kernels)} kernels, "
        f"{sum(launch.blocks for _, launch in rows)} blocks. Options are constants of the kernel, "
        "and tensors that not all of its launches have.",
    ]
    for kernel in kernels:
        of_kernel = [(arch, launch) for arch, launch in rows if launch.kernel == kernel]
        text += ["", f"## {kernel}", "", *table(HEADER, list(_cells(of_kernel)))]
    return "\n".join([*text, ""])


def _cells(rows: Sequence[tuple[str, Emulated]]) -> Iterator[tuple[str, ...]]:
    """A row for every version of a kernel that was executed."""
    tensors = [set(launch.constants["tensors"]) for _, launch in rows]
    always = set.intersection(*tensors)
    versions: dict[tuple[str, ...], list[int]] = {}
    for arch, launch in rows:
        constants = launch.constants
        tile = " x ".join(str(constants[name]) for name in TILE if name in constants)
        options = sorted(set(constants["tensors"]) - always) + [
            name if value is True else f"{name} {value}"
            for name, value in constants.items()
            if name.isupper()
            and name not in LEFT_OUT
            and value not in (False, None)
            and (name, value) != ("REPEATS", 1)
        ]
        version = (arch, constants["dtype"], tile, str(launch.warps), ", ".join(options))
        versions.setdefault(version, []).append(launch.blocks)
    for version, blocks in sorted(versions.items()):
        yield (*version, str(len(blocks)), str(sum(blocks)))

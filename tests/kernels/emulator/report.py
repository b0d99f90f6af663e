"""The table of emulated launches, for docs/benchmarks/emulated.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from graphattn.kernels.check.report import table

from .device import Emulated

HEADER = ("problem", "arch", "kernel", "dtype", "tile", "options", "blocks", "warps")
TILE = ("ROWS", "COLUMNS", "SLOTS", "TOKENS")
# Constants that follow from sizes, or that every launch has.
LEFT_OUT = {"D", "DV", "BLOCK_D", "BLOCK_DV", "WIDTH", "BLOCK", *TILE}


def markdown(rows: Sequence[tuple[str, Emulated]]) -> str:
    """Write the report.

    Args:
        rows: the name of a test ("problem-arch"), and a launch of it.
    """
    import triton

    kernels = {launch.kernel for _, launch in rows}
    text = [
        "# Kernels, executed without a GPU",
        "",
        f"What Triton {triton.__version__} compiled, run by the emulator of "
        "`tests/kernels/emulator`: results agree with float64, and no race, no access out of "
        "bounds and no missing wait was found. `make emulate` writes this.",
        "",
        f"{len(rows)} launches of {len(kernels)} kernels, "
        f"{sum(launch.blocks for _, launch in rows)} blocks.",
        "",
        *table(HEADER, dict.fromkeys(_cells(rows))),
        "",
    ]
    return "\n".join(text)


def _cells(rows: Iterable[tuple[str, Emulated]]) -> Iterable[tuple[str, ...]]:
    for test, launch in sorted(rows, key=lambda row: row[0]):
        problem, _, arch = test.rpartition("-")
        constants: dict[str, Any] = launch.constants
        tile = " x ".join(str(constants[name]) for name in TILE if name in constants)
        options = [
            name if value is True else f"{name} {value}"
            for name, value in constants.items()
            if name.isupper() and name not in LEFT_OUT and value not in (False, None, 0)
        ]
        yield (
            problem, arch, launch.kernel, str(constants.get("dtype", "")), tile,
            ", ".join(options), str(launch.blocks), str(launch.warps),
        )  # fmt: skip

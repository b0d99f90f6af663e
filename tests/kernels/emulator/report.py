"""The table of emulated launches, for docs/benchmarks/emulated.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from graphattn.kernels.check.report import table

from .device import Emulated

HEADER = ("arch", "dtype", "tile", "warps", "options", "launches", "blocks")
TILE = ("ROWS", "COLUMNS", "SLOTS", "TOKENS", "KEPT")
# Sizes, and constants that follow from others.
LEFT_OUT = {*"NMEBHD", "DV", "WIDTH", "BLOCK", "XI", "LOW", *TILE}


def markdown(rows: Sequence[tuple[str, Emulated]]) -> str:
    """Write the report.

    Args:
        rows: the architecture, and a launch that was executed for it.
    """
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
        own = [(arch, launch) for arch, launch in rows if launch.kernel == kernel]
        text += ["", f"## {kernel}", "", *table(HEADER, list(_cells(own)))]
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

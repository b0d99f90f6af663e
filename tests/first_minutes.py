"""Measure what a newcomer waits for: `make first-minutes` prints the table.

    python tests/first_minutes.py              # all rows, in a fresh clone: 10 minutes of two cores
    python tests/first_minutes.py imports      # imports and the command, here

A row has seconds of wall clock and of processors, and what is aimed at on two cores that have
nothing else to do.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TOP = Path(__file__).resolve().parents[1]
FIRST_LAYER = "import graphattn as ga; ga.nn.KrauseAttention(32, heads=4)"


def timed(command: list[str], folder: Path, **environment: str) -> tuple[float, float, str]:
    """Seconds of wall clock and of processors that a command takes, and what it prints."""

    def used() -> float:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return children.ru_utime + children.ru_stime

    start, before = time.perf_counter(), used()
    run = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if run.returncode not in (0, 2):  # 2: a mistyped option is refused
        raise SystemExit(f"{' '.join(command)}\n{run.stdout[-3000:]}\nexit {run.returncode}")
    return time.perf_counter() - start, used() - before, run.stdout


def row(what: str, wall: float, processors: float, aim: str) -> None:
    print(f"| {what} | {wall:.1f} s | {processors:.1f} s | {aim} |", flush=True)


def best(command: list[str], folder: Path, times: int = 5) -> tuple[float, float]:
    """The least wall clock and the least processor time of some runs, after a first one."""
    timed(command, folder)
    found = [timed(command, folder)[:2] for _ in range(times)]
    return min(wall for wall, _ in found), min(cpu for _, cpu in found)


def imports(binaries: Path, folder: Path) -> None:
    """Print what a first layer and the command add to torch and to Python."""
    python = str(binaries / "python")
    empty, torch = (best([python, "-c", code], folder) for code in ("pass", "import torch"))
    layer = best([python, "-c", FIRST_LAYER], folder)
    row("a first layer, beyond `import torch`", *less(layer, torch), "0.6 s")
    for options in (["--help"], ["train", "--help"], ["train", "--stepz", "5"]):
        found = best([str(binaries / "graphattn"), *options], folder)
        row(f"`graphattn {' '.join(options)}`, beyond Python", *less(found, empty), "1.0 s")


def less(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    return a[0] - b[0], a[1] - b[1]


def everything(folder: Path) -> None:
    """Print every row, of a fresh clone with an environment of its own."""
    clone = folder / "graphattn"
    timed(["git", "clone", "--quiet", str(TOP), str(clone)], folder)
    wall, processors, _ = timed(["make", "demo"], clone)
    row("`make demo`, first time", wall, processors, "4 min")
    for library in (clone / "kernels" / "cpu").glob("_native_*"):
        library.unlink()
    shutil.rmtree(clone / "build", ignore_errors=True)
    wall, processors, _ = timed(["make", "build/native.built"], clone)
    row("its build of C++ alone", wall, processors, "60 s")
    binaries = clone / ".venv" / "bin"
    imports(binaries, clone)
    install = [str(binaries / "python"), "-m", "pip", "wheel", "--quiet", "--no-deps", "."]
    wall, processors, _ = timed([*install, "--wheel-dir", str(folder)], clone)
    row("`pip install .`: a wheel with all instruction sets", wall, processors, "2.5 min")
    timed(["make", ".venv/.installed"], clone)
    wall, processors, output = timed(["make", "test"], clone)
    row(f"`make test`: {output.strip().splitlines()[-1].strip('= ')}", wall, processors, "4 min")
    readme = (clone / "README.md").read_text(encoding="utf-8")
    print(f"README.md: {len(readme.split())} words, {len(readme.splitlines())} lines")


if __name__ == "__main__":
    print("| what a newcomer does | wall | processors | aim |\n|---|---|---|---|", flush=True)
    # Bytecode is kept, as everywhere by default.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if sys.argv[1:] == ["imports"]:
        imports(Path(sys.executable).parent, TOP)
    else:
        with tempfile.TemporaryDirectory() as temporary:
            everything(Path(temporary))

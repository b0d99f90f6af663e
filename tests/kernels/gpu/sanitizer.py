"""The sanitizer: launches of every family under NVIDIA's compute-sanitizer.

On the emulator, its own findings take that place. Without the tool the step is skipped, and the
report says so.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from . import parity
from .jobs import environment, run_jobs
from .session import Machine, Progress, Row, Session

TOOLS = ("memcheck", "racecheck", "synccheck")
EMULATOR = "emulator"
MISSING = "compute-sanitizer is not there"
PROBLEMS = (  # together they start every kernel
    "bands: narrow window, bf16", "bands: one tensor, bf16", "bands: table of biases, bf16",
    "bands: top 16, bf16", "edges: hubs in parts, bf16", "edges: top 3 of a list, bf16",
    "consensus: path, bf16", "consensus: list, bf16", "neighbours: 3 coordinates",
    "generation: KrauseAttention, bf16",
)  # fmt: skip
TINY = ("bands: heads of 7, bf16", "edges: bias of every edge, bf16")
SECONDS = 240.0
AT_ONCE = 8  # a checked process is slow, and holds much memory
FOUND = 86  # the exit code for findings
# memcheck and synccheck end with the first, racecheck with the second.
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")


def tool() -> str | None:
    """Find compute-sanitizer, in PATH or a CUDA toolkit."""
    if path := shutil.which("compute-sanitizer"):
        return path
    homes = [os.environ.get("CUDA_HOME", ""), *map(str, sorted(Path("/usr/local").glob("cuda*")))]
    for home in filter(None, homes):
        for place in ("bin", "compute-sanitizer"):
            path = Path(home) / place / "compute-sanitizer"
            if path.is_file():
                return str(path)
    return None


def jobs(size: str, *, is_emulated: bool) -> list[str]:
    """Names such as "memcheck; edges: hubs in parts, bf16", one tool after the other."""
    names = TINY if size == "tiny" else PROBLEMS
    return [f"{by}; {name}" for by in ((EMULATOR,) if is_emulated else TOOLS) for name in names]


def run(session: Session) -> None:
    """Check what is left, or note that the tool is missing."""
    emulated = session.machine.is_emulated
    if not emulated and tool() is None:
        session.rows("sanitizer").add({"skipped": MISSING})
        return
    run_jobs(
        __name__, jobs(session.size, is_emulated=emulated), session,
        processes=min(AT_ONCE, session.processes),
        seconds=parity.ON_EMULATOR if emulated else SECONDS,
    )  # fmt: skip


def work(name: str, known: list[Row], machine: Machine, size: str) -> Iterator[Row]:
    """Run one problem under one tool, and yield what the tool found."""
    by, _, problem = name.partition("; ")
    if by == EMULATOR:
        row = next(parity.work(problem, known, machine, size))
        yield {"tool": by, "problem": problem, "found": len(row["findings"]),
               "log": "\n".join(row["findings"]), "kernels": row["kernels"]}  # fmt: skip
        return
    path = tool()
    if path is None:
        raise FileNotFoundError(MISSING)
    yield {"tool": by, "problem": problem, **checked([path, "--tool", by], problem)}


def checked(command: list[str], problem: str) -> Row:
    """Run a problem under a tool, and read what it printed.

    Raises:
        RuntimeError: the tool gave no summary, or the problem failed under it.
    """
    # Allocations of their own: accesses beyond a tensor end in no other tensor.
    run = subprocess.run(
        [*command, "--error-exitcode", str(FOUND), sys.executable, "-m", "gpu.sanitizer", problem],
        env=environment(PYTORCH_NO_CUDA_MEMORY_CACHING="1"),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    counts = [int(a or b) for a, b in SUMMARY.findall(run.stdout)]
    tail = run.stdout[-2000:]
    if not counts or run.returncode not in (0, FOUND):
        raise RuntimeError(f"no verdict, exit code {run.returncode}: {tail}")
    number = max(sum(counts), int(run.returncode == FOUND))
    return {"found": number, "log": tail if number else ""}


def progress(session: Session) -> Progress:
    """How many checks have run, and how many found something; why they could not."""
    rows = session.rows("sanitizer").all()
    names = jobs(session.size, is_emulated=session.machine.is_emulated)
    progress = session.progress(
        "sanitizer", names, (row["job"] for row in rows if row.get("found"))
    )
    skipped = [row["skipped"] for row in rows if "skipped" in row]
    return progress._replace(skipped=skipped[-1]) if skipped and not progress.done else progress


if __name__ == "__main__":  # under the tool
    if not parity.is_right(next(parity.work(sys.argv[1], [], Machine("cuda"), "full"))):
        sys.exit("the result is wrong")

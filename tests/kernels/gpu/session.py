"""One run of the steps: its folder of rows, its device, its time; and launches on that device."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from graphattn.bench.reporting.record import provenance
from graphattn.kernels.shared import launch

ROOT = Path(__file__).resolve().parents[3]
Row = dict[str, Any]


class Started(NamedTuple):
    """A launch that was executed."""

    launch: launch.Launch
    findings: str = "none"  # by the emulator
    instructions: int = 0  # that it has executed

    @property
    def kernel(self) -> str:
        return self.launch.kernel.fn.__name__


def start(one: launch.Launch) -> None:
    """Start a recorded launch on the device of its tensors."""
    launch.launch(
        one.kernel, one.grid, num_warps=one.num_warps, num_stages=one.num_stages,
        fp_fusion=one.fp_fusion, max_registers=one.max_registers, **one.arguments,
    )  # fmt: skip


def compile_only(one: launch.Launch) -> None:
    """Compile the kernel of a recorded launch as Triton's launcher would, and start nothing."""
    if 0 not in one.grid:
        one.kernel.warmup(grid=one.grid, **one.options, **one.arguments)


class Machine(NamedTuple):
    """A GPU, or the emulator in its place."""

    device: str  # "cuda" or "emulator"
    arch: str = "sm_80"  # of the emulator

    @property
    def tensors(self) -> str:
        """The device of tensors."""
        return "cuda" if self.device == "cuda" else "cpu"

    @property
    def is_emulated(self) -> bool:
        return self.device == "emulator"

    @contextmanager
    def launching(self) -> Iterator[list[Started]]:
        """Run launches within the block, and keep them in the list that is returned."""
        started: list[Started] = []
        if not self.is_emulated:

            def run(one: launch.Launch) -> None:
                with launch.redirected(None):
                    start(one)
                started.append(Started(one))

            with launch.redirected(run):
                yield started
            torch.cuda.synchronize()
            return
        from emulator.device import emulated_gpu

        gpu = emulated_gpu(self.arch)

        def emulate(one: launch.Launch) -> None:
            before = len(gpu.launches)
            gpu.run(one)
            for run in gpu.launches[before:]:
                started.append(Started(one, run.findings, run.instructions))

        with gpu.emulating(), launch.redirected(emulate):
            yield started


class Rows:
    """A file of JSON lines, to which rows are added one by one."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, row: Row) -> None:
        """Write a row, so that it is there whatever happens next."""
        with self.path.open("a+b") as file:
            file.seek(max(file.tell() - 1, 0))
            cut = file.read(1) not in (b"", b"\n")  # the last line, by a process that was stopped
            file.write(b"\n" * cut + json.dumps(row).encode() + b"\n")

    def all(self) -> list[Row]:
        """Every row; a line that was cut off in the middle is none."""
        if not self.path.exists():
            return []
        rows = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return rows

    def ended(self) -> dict[str, Row]:
        """The last row of every job that came to its end."""
        return {row["job"]: row for row in self.all() if row.get("end")}

    def forget_failures(self) -> None:
        """Drop all rows of jobs that ended with an error, which then run again."""
        failed = {job for job, row in self.ended().items() if "error" in row}
        kept = [row for row in self.all() if row.get("job") not in failed]
        self.path.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")


class Progress(NamedTuple):
    """How far a step has come."""

    done: int
    of: int
    wrong: int = 0
    skipped: str = ""  # the reason

    @property
    def is_left(self) -> bool:
        """Whether another run would do more."""
        return self.done < self.of and not self.skipped

    def __str__(self) -> str:
        if self.skipped:
            state = f"skipped: {self.skipped}"
        elif self.done == 0:
            state = "not run"
        elif self.done < self.of:
            state = f"partly: {self.done} of {self.of}"
        else:
            state = f"done: {self.of} of {self.of}"
        return f"{state}, {self.wrong} WRONG" if self.wrong else state


@dataclass(frozen=True)
class Session:
    """A run of steps that writes into one folder.

    Args:
        out: the folder.
        machine: what kernels run on.
        size: "tiny" or "full".
        processes: how many run at once.
        deadline: when the step must end, by `time.monotonic`.
    """

    out: Path
    machine: Machine
    size: str
    processes: int
    deadline: float = float("inf")

    def rows(self, step: str) -> Rows:
        return Rows(self.out / f"{step}.jsonl")

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def progress(
        self, step: str, names: list[str], wrong: Iterable[str] = (), skipped: str = ""
    ) -> Progress:
        """How many of these jobs have ended, and how many are wrong, or ended with an error."""
        ended = self.rows(step).ended()
        failed = {name for name in names if "error" in ended.get(name, {})} | set(wrong)
        return Progress(sum(name in ended for name in names), len(names), len(failed), skipped)


def facts(machine: Machine, size: str) -> dict[str, Any]:
    """The machine, the versions and the sources that rows belong to."""
    known = provenance(torch.device(machine.tensors), size)
    if machine.is_emulated:
        known["hardware"] = f"emulator of {machine.arch} on {platform.machine()}"
    known["device"] = machine.device
    known["driver"] = "none" if machine.is_emulated else _driver()
    known["sources"] = hash_of_sources()
    return known


# A commit is not among them: a copy without git has none, and a commit of documentation changes no
# row. Sources tell versions of the library apart.
SAME = ("device", "hardware", "size", "torch", "triton", "sources")


def hash_of_sources() -> str:
    """A short name of what rows depend on: the library, its kernels, and the problems."""
    digest = hashlib.sha256()
    for folder in ("graphattn", "kernels", "tests/kernels"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            inside = path.relative_to(ROOT)
            if path.name.startswith("test_") or {"emulator", "gpu"} & set(inside.parts):
                continue
            digest.update(str(inside).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def why_not_here(out: Path, now: dict[str, Any]) -> str | None:
    """The reason why rows of a folder cannot be continued; None where they can."""
    path = out / "session.json"
    if not path.exists():
        return None
    then = json.loads(path.read_text(encoding="utf-8"))
    changed = [f"{name} {then.get(name)}, now {now[name]}" for name in SAME
               if then.get(name) != now[name]]  # fmt: skip
    if not changed:
        return None
    return (
        f"{out} has rows of another run ({'; '.join(changed)}). Rename or remove that folder, or "
        "name another one with --out (make gpu OUT=...)"
    )


def _driver() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown"
    asked = subprocess.run(
        [tool, "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return asked.stdout.strip().splitlines()[0] if asked.stdout.strip() else "unknown"

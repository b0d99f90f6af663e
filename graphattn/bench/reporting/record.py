"""Records of benchmark runs in JSON, with the machine and the versions that were used."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch

import graphattn
from graphattn.kernels.cpu.library import instruction_set

OURS = "graphattn"
Quantity = Literal["time", "memory", "error", "share of bound"]


@dataclass(frozen=True)
class Row:
    """One contender in one pass of one case. Times are in seconds, memory is in bytes."""

    case: str
    passes: str
    contender: str
    size: dict[str, int]
    median: float
    spread: float
    rounds: int
    ratio: float | None  # its time divided by that of graphattn, if both were timed in this run
    peak: float | None
    share_of_bound: float | None
    error: float | None
    captured: bool | None = None  # on a GPU: True if replayed, False if launched by the host
    threads: int | None = None  # on a CPU: the number of threads that was used
    speed: float | None = None  # on a CPU: speed of the machine, as a share of its best speed

    def number(self, quantity: Quantity) -> float | None:
        return {
            "time": self.median,
            "memory": self.peak,
            "error": self.error,
            "share of bound": self.share_of_bound,
        }[quantity]


@dataclass(frozen=True)
class Verdict:
    """One target and its measurement: a ratio, or a number in the unit of its quantity."""

    case: str
    passes: str
    quantity: Quantity
    of: str  # a contender, or "one / other" for a ratio
    is_ratio: bool
    measured: float | None  # None if a measurement is missing
    spread: float | None
    at_most: float | None
    at_least: float | None

    @property
    def met(self) -> bool | None:
        """Tell whether the target was met; None if nothing was measured."""
        if self.measured is None:
            return None
        if self.at_most is not None:
            return self.measured <= self.at_most
        return self.at_least is not None and self.measured >= self.at_least


@dataclass(frozen=True)
class Slope:
    """The exponent p of ``quantity ~ tokens ** p``, fitted over all lengths of a case."""

    case: str
    passes: str
    quantity: Quantity
    exponent: float


@dataclass(frozen=True)
class Record:
    """One run of `graphattn bench`."""

    provenance: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    targets: list[Verdict] = field(default_factory=list)
    slopes: list[Slope] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    measured: list[str] = field(default_factory=list)  # cases that need not be measured again

    def write(self, path: Path) -> None:
        """Write the record as JSON under another name, then rename it: never half a record."""
        unfinished = path.with_name(path.name + ".part")
        unfinished.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        unfinished.replace(path)


def read(path: Path) -> Record:
    """Read a record that :meth:`Record.write` wrote; raise a ValueError for any other file.

    A file with more than that has the record under "benchmark" (`docs/benchmarks/visits`).
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        record = record.get("benchmark", record)
        return Record(
            record["provenance"],
            [Row(**row) for row in record["rows"]],
            [Verdict(**target) for target in record.get("targets", [])],
            [Slope(**slope) for slope in record.get("slopes", [])],
            record["missing"],
            record.get("measured", []),
        )
    except (
        AttributeError, KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError
    ) as error:  # fmt: skip
        raise ValueError(
            f"{path} must be a record that `graphattn bench --json` wrote, but it cannot be read: "
            f"{error!r}"
        ) from None


SAME = ("device", "hardware", "size", "graphattn", "commit", "torch", "triton")


def resumed(path: Path, provenance: dict[str, Any]) -> Record:
    """Return the cases that an interrupted run measured; a ValueError if it was another run."""
    if not path.exists():
        return Record(provenance)
    earlier = read(path)
    for name in SAME:
        before = earlier.provenance.get(name)
        if before != provenance[name]:
            raise ValueError(
                f"{path} cannot be continued: its {name} is {before}, and that of this run is "
                f"{provenance[name]}"
            )

    def is_kept(case: str) -> bool:
        return case in earlier.measured

    return Record(
        earlier.provenance,
        [row for row in earlier.rows if is_kept(row.case)],
        [target for target in earlier.targets if is_kept(target.case)],
        [slope for slope in earlier.slopes if is_kept(slope.case)],
        [line for line in earlier.missing if is_kept(re.split("[:,]", line)[0])],
        earlier.measured,
    )


def provenance(device: torch.device, size: str) -> dict[str, Any]:
    """Return the machine, the versions, the date and the size that a record's numbers belong to."""
    if device.type == "cuda":
        hardware = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    else:
        hardware = f"{_processor()}, {torch.get_num_threads()} threads"
    on_cpu = {"compiled kernels": instruction_set(), "huge pages": _huge_pages()}
    return {
        "device": device.type,
        "hardware": hardware,
        "size": size,
        "graphattn": graphattn.__version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "date": date.today().isoformat(),
        **(on_cpu if device.type == "cpu" else {}),
    }


def _huge_pages() -> str:
    """Say whether PyTorch requests huge pages for tensors of 2 MB or more."""
    asked = os.environ.get("THP_MEM_ALLOC_ENABLE") == "1"
    return "asked for (THP_MEM_ALLOC_ENABLE=1)" if asked else "as the system gives them"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str | None:
    """Return the commit of the checkout, with "+" if files of the package differ; or None."""
    folder = Path(graphattn.__file__).parent
    try:
        run, changed = (
            subprocess.run(["git", *command], cwd=folder, capture_output=True, text=True)
            for command in (
                ["rev-parse", "--short", "HEAD"],
                ["status", "--porcelain", "--untracked-files=no", "."],
            )
        )
    except OSError:
        return None
    commit = run.stdout.strip()
    return f"{commit}+" if commit and changed.stdout.strip() else commit or None

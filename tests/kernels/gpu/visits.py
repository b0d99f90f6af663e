"""Records of visits: one file for each time that a GPU was there, and what has changed since.

A file is one JSON object: the machine and versions, "launches" (see `graphattn.kernels.check`),
"benchmark" (a record of `graphattn bench`), and what the other steps found. No file is ever
changed: `docs/benchmarks/visits` has them all.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from graphattn.bench.reporting import record
from graphattn.kernels.check.measured import as_file, read_measured
from graphattn.kernels.check.report import microseconds, table

from .session import ROOT

FOLDER = ROOT / "docs" / "benchmarks" / "visits"
SLOWER = 1.1  # times an earlier visit; two runs of one kernel differ by less
Times = dict[str, float]  # seconds by the name of what was timed


class Visit(NamedTuple):
    """Times of one visit."""

    name: str  # of its file: "2026-11-26-h200"
    hardware: str
    times: Times
    cases: list[str]  # of the benchmark
    tuned: list[str]  # jobs of `tune`
    seconds: dict[str, dict[str, float]]  # that jobs of the steps took


class Change(NamedTuple):
    """A time now, and those of earlier visits, the newest first; None where it was not measured."""

    name: str
    seconds: float
    earlier: list[float | None]

    @property
    def ratio(self) -> float | None:
        """The time now divided by that of the last visit that measured it."""
        known = [seconds for seconds in self.earlier if seconds is not None]
        return self.seconds / known[0] if known else None

    @property
    def is_slower(self) -> bool:
        return self.ratio is not None and self.ratio > SLOWER


def read(path: Path) -> Visit:
    """Read the record of a visit."""
    measured = read_measured(path)
    content = json.loads(path.read_text(encoding="utf-8"))
    benchmark = record.read(path)
    return Visit(
        path.stem,
        measured.facts["hardware"],
        times_of(measured.launches, benchmark.rows),
        benchmark.measured,
        content.get("tuned", []),
        content.get("seconds", {}),
    )


def earlier(hardware: str | None = None, folder: Path = FOLDER) -> list[Visit]:
    """Visits of that GPU, the newest first; without a name, of the GPU that was there last."""
    visits = [read(path) for path in sorted(folder.glob("*.json"), reverse=True)]
    if hardware is None:
        hardware = visits[0].hardware if visits else ""
    return [visit for visit in visits if device_of(visit.hardware) == device_of(hardware)]


def device_of(hardware: str) -> str:
    """The name of a GPU, without versions: "NVIDIA H200"."""
    return hardware.split(",")[0]


def times_of(launches: Iterable[tuple[str, float]], rows: Iterable[record.Row]) -> Times:
    """Name every time. Launches of one name are numbered from the second on."""
    times: Times = {}
    for name, seconds in launches:
        numbers = (name if i == 1 else f"{name} ({i})" for i in count(1))
        times[next(other for other in numbers if other not in times)] = seconds
    for row in rows:
        size = ", ".join(f"{n:,} {what}" for what, n in row.size.items())
        times[f"{row.case}, {row.passes}, {row.contender} ({size})"] = row.median
    return times


def changes(times: Times, visits: list[Visit]) -> list[Change]:
    """Put times beside those of earlier visits; what none of them has measured is left out."""
    found = [
        Change(name, seconds, [visit.times.get(name) for visit in visits])
        for name, seconds in times.items()
    ]
    return [change for change in found if change.ratio is not None]


def lines(times: Times, visits: list[Visit]) -> Iterator[str]:
    """Yield what is slower than at the last visit, and then all times.

    If contenders by others are slower, too, so is the machine.
    """
    found = changes(times, visits)
    if not found:
        yield "No earlier visit has measured any of this."
        return
    for change in found:
        if change.is_slower:
            yield f"- SLOWER: {change.name}: {change.ratio:.2f} times as long"
    yield ""
    yield from table(
        ("microseconds of", "now", *(visit.name for visit in visits), "now / last"),
        [
            (
                change.name,
                microseconds(change.seconds),
                *("" if s is None else microseconds(s) for s in change.earlier),
                f"{change.ratio:.2f}",
            )
            for change in found
        ],
    )


def name_of(facts: dict[str, Any], folder: Path = FOLDER) -> str:
    """A file name that no visit has yet, and that comes after them: the date, and the GPU."""
    device = device_of(facts["hardware"]).split()[-1].lower()
    names = (f"{facts['date']}-{device}{'' if i == 1 else f'_{i}'}.json" for i in count(1))
    return next(name for name in names if not (folder / name).exists())


def as_text(
    facts: dict[str, Any], launches: Iterable[tuple[str, float]], others: dict[str, Any]
) -> str:
    """The JSON of a visit: facts, names and seconds of launches, and what else it has."""
    head = as_file(facts, launches).removesuffix("\n}\n")
    rest = json.dumps(others, indent=1).removeprefix("{")
    return f"{head},{rest}\n"

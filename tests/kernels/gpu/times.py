"""Times: every launch that is predicted without a device, alone on one.

`python -m graphattn.kernels.check` predicts how long these launches take. Here the same launches
run, with random values, one process at a time. What they compute is checked by `parity`. On the
emulator a launch of real size would take hours, so there this step is skipped.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator

import torch

from graphattn.kernels.check.families import cases
from graphattn.kernels.shared import launch

from .jobs import run_jobs
from .session import Machine, Progress, Row, Session, start

SECONDS = 120.0  # of a case
SAMPLES = 15
LONG = 0.05  # seconds of a launch; then a few samples are enough
FLUSHED = 256 * 2**20  # bytes that are written between two samples, more than any cache has


def jobs() -> list[str]:
    """Names of the cases."""
    return list(cases())


def run(session: Session) -> None:
    """Time what is left, by one process: others would take the GPU's time."""
    if not session.machine.is_emulated:
        run_jobs(__name__, jobs(), session, processes=1, seconds=SECONDS)


def work(name: str, known: list[Row], machine: Machine, size: str) -> Iterator[Row]:
    """Yield the time of every launch of a case that is not known yet."""
    done = sum(map(is_time, known))
    for configuration in cases()[name](machine.tensors)[done:]:
        one = configuration.launch
        yield {"name": configuration.name, "seconds": seconds_of(one)}


def seconds_of(one: launch.Launch) -> float:
    """The median time on the GPU of a launch whose data is not in the cache."""
    cache = torch.empty(FLUSHED, dtype=torch.uint8, device="cuda")
    samples: list[float] = []
    for i in range(3 + SAMPLES):
        cache.zero_()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        start(one)
        last.record()
        torch.cuda.synchronize()
        seconds = first.elapsed_time(last) / 1000
        if i >= 3:
            samples.append(seconds)
        if seconds > LONG and len(samples) >= 3:
            break
    return statistics.median(samples)


def is_time(row: Row) -> bool:
    """Whether a row is the time of a launch; the last row of a job has seconds, but no name."""
    return "name" in row and "seconds" in row


def launches(rows: Iterable[Row]) -> list[tuple[str, float]]:
    """Names and times of launches, in the order of all cases, whenever a case was timed."""
    by_job: dict[str, list[tuple[str, float]]] = {name: [] for name in jobs()}
    for row in filter(is_time, rows):
        by_job.setdefault(row.get("job", ""), []).append((row["name"], row["seconds"]))
    return [launch for of_job in by_job.values() for launch in of_job]


def progress(session: Session) -> Progress:
    """How many cases have been timed."""
    skipped = "the emulator has no time" if session.machine.is_emulated else ""
    return session.progress("times", jobs(), skipped=skipped)

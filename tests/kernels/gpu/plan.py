"""The plan of a visit: every job that is left, in its order, with the seconds that it may take.

Seconds of a job are those of the last visit that has run it. Where none has, they are those of
`ASSUMED`. Jobs of a step run side by side, so that a step takes their sum divided by the processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

from . import benchmark, candidates, parity, report, sanitizer, times, tune
from .session import Machine
from .visits import Visit

START = 75.0  # seconds until a machine that is lent has started
LEASE = 900.0  # seconds that it is lent for
COMMAND = 600.0  # seconds of one command there
BETWEEN = 30.0  # seconds from one command to the next, with copies of files
PROCESSES = 14
COMPILED = "all cases that are left, to compile them"
# Seconds of one job in one process, with kernels that were compiled ahead: of an H200 with 16 cores
# on 2026-11-26 (94 problems in 40 s, 30 checks in 120 s with 8 at once, 15 to 25 s of a case that
# was compiled), else guesses: those of `times` and whole models, and half of the tuning's 9 minutes
# without kernels compiled ahead.
ASSUMED = {"parity": 6.0, "sanitizer": 32.0, "times": 1.5, "benchmark": 20.0, "tune": 40.0}
OF_WHOLE_MODELS = {"encoder": 60.0, "causal": 60.0, "causal-step": 30.0}


class Planned(NamedTuple):
    """A job, and how much longer its step takes for it."""

    step: str
    job: str
    seconds: float
    measured: bool = False  # whether the seconds are those of an earlier visit
    again: bool = False  # whether an earlier visit has its results


def jobs(visits: list[Visit]) -> Iterator[Planned]:
    """Yield every job of a visit, in its order."""
    machine = Machine("cuda")
    had = {
        "benchmark": {case for visit in visits for case in visit.cases},
        "tune": {job for visit in visits for job in visit.tuned},
    }
    names = {
        "parity": (parity.jobs("full"), PROCESSES),
        "candidates": (candidates.jobs(machine, "full"), PROCESSES),
        "benchmark": ([case.name for case in benchmark.cases("full", machine, visits)], 1),
        "sanitizer": (sanitizer.jobs("full", is_emulated=False), sanitizer.AT_ONCE),
        "times": (times.jobs(), 1),
        "tune": (tune.jobs("full", visits), PROCESSES),
    }
    for step in report.STEPS:
        if step == "benchmark":
            yield Planned(step, COMPILED, benchmark.WARMING)
        of_step, processes = names[step]
        for job in of_step:
            seconds, measured = seconds_of(step, job, visits)
            at_once = 1 if candidates.TIMED in job else processes
            again = job in had.get(step, ())
            yield Planned(step, job, seconds / at_once, measured, again)


def seconds_of(step: str, job: str, visits: list[Visit]) -> tuple[float, bool]:
    """Return the seconds of a job in one process, and whether a visit has measured them."""
    for visit in visits:
        if job in visit.seconds.get(step, {}):
            return visit.seconds[step][job], True
    if step == "candidates":
        return ASSUMED["times" if candidates.TIMED in job else "parity"], False
    kind = job.rpartition("-")[0]
    return (
        OF_WHOLE_MODELS.get(kind, ASSUMED[step]) if step == "benchmark" else ASSUMED[step]
    ), False


def commands(planned: Iterable[Planned], limit: float) -> list[list[Planned]]:
    """Divide jobs among commands that stop before `limit` seconds each; steps go on in the next."""
    found: list[list[Planned]] = [[]]
    for job in planned:
        if found[-1] and total([*found[-1], job]) > limit:
            is_cut = job.step == "benchmark" and job.job != COMPILED
            found.append([Planned(job.step, COMPILED, benchmark.WARMING)] if is_cut else [])
        found[-1].append(job)
    return found


def total(planned: Iterable[Planned]) -> float:
    """Seconds of jobs."""
    return sum(job.seconds for job in planned)


def lines(visits: list[Visit], limit: float) -> Iterator[str]:
    """Yield the plan: commands, the seconds of their steps, and where a lease ends."""
    at, is_over = START, False
    yield f"{at:4.0f} s: the machine has started"
    for number, command in enumerate(commands(jobs(visits), limit), 1):
        at += BETWEEN if number > 1 else 0
        yield f"{at:4.0f} s: command {number}, stopped after {limit:.0f} s"
        for step, group in groupby(command, key=lambda job: job.step):
            of_step = list(group)
            for job in of_step:
                at += job.seconds
                if at > LEASE and not is_over:
                    is_over = True
                    yield f"        {LEASE / 60:.0f} minutes are over in {step}: {job.job}"
            measured = sum(job.measured for job in of_step)
            yield (
                f"{at:4.0f} s: {step}: {total(of_step):.0f} s for {len(of_step)} jobs "
                f"({measured} timed before), the last: {of_step[-1].job}"
            )
    yield f"{at / 60:.0f} minutes in all"

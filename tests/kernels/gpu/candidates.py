"""Candidates: kernels that must be asked for, beside those that run otherwise.

A candidate is a setting of the environment under which some launches take another kernel. Its
kernels are compared with float64, by the problems of the families it names, and timed: every launch
of `times` that takes another kernel under the setting, once without and once with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from graphattn.kernels.shared.configuration import Configuration
from graphattn.kernels.shared.launch import Launch

from . import parity, times
from .jobs import run_jobs
from .session import Machine, Progress, Row, Session


class Candidate(NamedTuple):
    """A setting, and the families of kernels among which it chooses."""

    variable: str
    value: str
    families: tuple[str, ...]


CANDIDATES = {"gluon": Candidate("GRAPHATTN_GLUON", "1", ("bands",))}
TIMED = "times of"


@contextmanager
def asked_for(candidate: Candidate) -> Iterator[None]:
    """Set the variable of a candidate within the block."""
    before = os.environ.get(candidate.variable)
    os.environ[candidate.variable] = candidate.value
    try:
        yield
    finally:
        if before is None:
            del os.environ[candidate.variable]
        else:
            os.environ[candidate.variable] = before


def jobs(machine: Machine, size: str) -> list[str]:
    """Names such as "gluon; bands: heads of 7, bf16" and "gluon; times of bands 3"."""
    names = []
    for name, (_, _, families) in CANDIDATES.items():
        compared = [problem for problem in parity.jobs(size) if of_family(problem) in families]
        timed = (
            [] if machine.is_emulated else filter(lambda j: of_family(j) in families, times.jobs())
        )
        names += [f"{name}; {problem}" for problem in compared]
        names += [f"{name}; {TIMED} {case}" for case in timed]
    return names


def of_family(job: str) -> str:
    """``"bands"`` of ``"bands: heads of 7, bf16"`` and ``"bands 3"``."""
    return job.partition(":")[0].partition(" ")[0]


def run(session: Session) -> None:
    """Compare what is left, side by side; then time what is left, by one process."""
    names = jobs(session.machine, session.size)
    seconds = parity.ON_EMULATOR if session.machine.is_emulated else parity.SECONDS
    for timed, processes in ((False, session.processes), (True, 1)):
        some = [name for name in names if (TIMED in name) == timed]
        run_jobs(__name__, some, session, processes=processes, seconds=seconds)


def work(name: str, known: list[Row], machine: Machine, size: str) -> Iterator[Row]:
    """Yield the errors of a problem, or the times of launches with two kernels."""
    setting, _, job = name.partition("; ")
    if not job.startswith(TIMED):
        with asked_for(CANDIDATES[setting]):
            yield from parity.work(job, known, machine, size)
        return
    done = sum("plain" in row for row in known)
    for plain, other in list(pairs(CANDIDATES[setting], job.removeprefix(f"{TIMED} "), machine))[
        done:
    ]:
        yield {
            "name": plain.name,
            "kernel": kernel_of(other),
            "plain": times.seconds_of(plain.launch),
            "candidate": times.seconds_of(other.launch),
        }


def pairs(
    candidate: Candidate, case: str, machine: Machine
) -> Iterator[tuple[Configuration, Configuration]]:
    """Yield the launches of a case that take another kernel under a setting, without and with it.

    Launches are told apart by their names, and those of one name by their order.
    """
    plain = times.cases()[case](machine.tensors)
    with asked_for(candidate):
        others = times.cases()[case](machine.tensors)
    by_name: dict[str, list[Configuration]] = {}
    for other in reversed(others):
        by_name.setdefault(other.name, []).append(other)
    for one in plain:
        if by_name.get(one.name):
            other = by_name[one.name].pop()
            if kernel_of(one) != kernel_of(other):
                yield one, other


def kernel_of(one: Configuration | Launch) -> str:
    """The name of the kernel of a launch."""
    kernel: Any = (one.launch if isinstance(one, Configuration) else one).kernel
    return str(kernel.fn.__name__)


def is_new(row: Row, rows: list[Row]) -> bool:
    """Whether a problem has started a kernel that it does not start otherwise."""
    problem = row["job"].partition("; ")[2]
    usual = (other.get("kernels", []) for other in rows if other.get("job") == problem)
    return bool(set(row["kernels"]).difference(*usual))


def progress(session: Session) -> Progress:
    """How many jobs have run, and how many problems are wrong."""
    rows = session.rows("candidates").all()
    wrong = (row["job"] for row in rows if "errors" in row and not parity.is_right(row))
    return session.progress("candidates", jobs(session.machine, session.size), wrong)

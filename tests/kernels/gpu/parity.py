"""Parity: problems that start every kernel, in every precision, compared with float64."""

from __future__ import annotations

from collections.abc import Iterator

from fresh_memory import nan_until_written
from problems import Problem, problems

from .jobs import run_jobs
from .session import Machine, Progress, Row, Session

TINY = (  # a problem of every family
    "bands: heads of 7, bf16", "edges: bias of every edge, fp32", "consensus: rotated, bf16",
    "neighbours: 3 coordinates", "generation: KrauseAttention, bf16",
)  # fmt: skip
SECONDS = 150.0  # of one problem; compiling some kernels takes half a minute
ON_EMULATOR = 1500.0
BY_NAME: dict[str, Problem] = {problem.name: problem for problem in problems()}


def jobs(size: str) -> list[str]:
    """Names of the problems."""
    return list(TINY) if size == "tiny" else list(BY_NAME)


def run(session: Session) -> None:
    """Run the problems that are left."""
    seconds = ON_EMULATOR if session.machine.is_emulated else SECONDS
    run_jobs(__name__, jobs(session.size), session, processes=session.processes, seconds=seconds)


def work(name: str, known: list[Row], machine: Machine, size: str) -> Iterator[Row]:
    """Run one problem, and yield its errors beside those that are allowed."""
    problem = BY_NAME[name]
    with nan_until_written(), machine.launching() as started:
        errors = problem.errors(machine.tensors)
    yield {
        "family": problem.family,
        "dtype": problem.dtype,
        "errors": errors,
        "kernels": sorted({one.kernel for one in started}),
        "launches": len(started),
        "findings": sorted({one.findings for one in started} - {"none"}),
    }


def is_right(row: Row) -> bool:
    """Whether every error of a row is allowed; NaN is not.

    A problem that started no kernel shows nothing, and one with a finding of the emulator is wrong.
    """
    if not row["launches"] or row["findings"]:
        return False
    return all(error <= allowed for error, allowed in row["errors"].values())


def progress(session: Session) -> Progress:
    """How many problems have run, and how many are wrong."""
    rows = session.rows("parity").all()
    wrong = (row["job"] for row in rows if "errors" in row and not is_right(row))
    return session.progress("parity", jobs(session.size), wrong)

"""Claims, the results of their checks, and the numbers of cases."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

CLEAR = 1e-3  # a violation above this is not a rounding error
ROUNDING = 1e-9

Kind = Literal["inequality", "equation"]
Measure = Callable[[Any], tuple[float, float]]


class Size(NamedTuple):
    """How many cases are checked."""

    every: int  # window graphs: every N up to here, with every window
    paths: tuple[tuple[int, int], ...]  # and these (N, w)
    draws: int  # random graphs, matrices, weights


LONG_PATHS = [
    (N, w)
    for N in (500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)
    for w in (1, 2, 4, 8, 16, 32, 64)
    if N * w <= 2_000_000
]

SIZES = {
    "small": Size(
        every=200,
        paths=((500, 1), (500, 100), (1_000, 2), (1_000, 499), (10_000, 8), (100_000, 1)),
        draws=40,
    ),
    "full": Size(
        every=200,
        paths=(*LONG_PATHS, (500, 249), (1_000, 499), (2_000, 999)),
        draws=400,
    ),
}


class MeasuredCase(NamedTuple):
    """One case of a claim as measured: the claim holds where margin >= -slack."""

    name: str
    margin: float
    slack: float = 0.0

    @property
    def holds(self) -> bool:
        return self.margin >= -self.slack


@dataclass(frozen=True)
class Claim:
    """A statement of the theory, its cases, and the function that measures a case.

    Every case has a `name`. The function returns (margin, slack). For an inequality, the margin is
    the distance from the bound, relative to the quantity, and the slack is the allowed rounding
    error. For an equation, the margin is minus the relative error, and the slack is the allowed
    error.
    """

    name: str
    source: str
    statement: str
    cases: Callable[[Size], Iterable[Any]]
    measure: Measure
    kind: Kind = "inequality"

    def run(self, size: Size) -> Outcome:
        """Measure every case; a claim whose cases or measurements raise an exception fails."""
        outcome = Outcome(self)
        started = time.perf_counter()
        try:
            for case in self.cases(size):
                outcome.cases.append(MeasuredCase(case.name, *self.measure(case)))
        except Exception as error:
            outcome.error = f"{type(error).__name__}: {error}"
        outcome.seconds = time.perf_counter() - started
        return outcome


def claim(
    name: str, source: str, cases: Callable[[Size], Iterable[Any]], kind: Kind = "inequality"
) -> Callable[[Measure], Claim]:
    """Make a claim of a function that measures one case; its docstring is the statement."""

    def make(measure: Measure) -> Claim:
        return Claim(name, source, " ".join((measure.__doc__ or "").split()), cases, measure, kind)

    return make


@dataclass
class Outcome:
    """The results of all cases of a claim."""

    claim: Claim
    cases: list[MeasuredCase] = field(default_factory=list)
    error: str = ""
    seconds: float = 0.0

    @property
    def failures(self) -> list[MeasuredCase]:
        return [case for case in self.cases if not case.holds]

    @property
    def holds(self) -> bool:
        return bool(self.cases) and not self.failures and not self.error

    @property
    def tightest(self) -> MeasuredCase | None:
        """Return the worst violation, or the case nearest to one."""
        if self.claim.kind == "equation":
            return min(self.failures or self.cases, key=lambda c: c.margin + c.slack, default=None)
        return min(self.failures or self.cases, key=lambda c: c.margin, default=None)


class Exhibit(NamedTuple):
    """A counterexample: errors of the printed and of the corrected statement."""

    violation: float
    corrected: float
    numbers: dict[str, float]


@dataclass(frozen=True)
class Erratum:
    """A wrong printed statement, the correct one, and a counterexample."""

    source: str
    printed: str
    right: str
    show: Callable[[], Exhibit]

    def run(self) -> Shown:
        try:
            return Shown(self, self.show())
        except Exception as error:
            return Shown(self, None, f"{type(error).__name__}: {error}")


class Shown(NamedTuple):
    """The result of a counterexample."""

    erratum: Erratum
    exhibit: Exhibit | None
    error: str = ""

    @property
    def holds(self) -> bool:
        """Return whether the printed statement clearly fails and the corrected one does not."""
        shown = self.exhibit
        return shown is not None and shown.violation > CLEAR and abs(shown.corrected) <= ROUNDING


def erratum(source: str, printed: str, right: str) -> Callable[[Callable[[], Exhibit]], Erratum]:
    """Make an erratum of the function that computes its counterexample."""
    return lambda show: Erratum(source, printed, right, show)

"""Claims, results of checking them over many cases, and the sizes of the sweeps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

CLEAR = 1e-3  # a violation that no rounding explains
ROUNDING = 1e-9

Check = Callable[["Size"], Iterable["ClaimCase"]]


class Size(NamedTuple):
    """How much is tried."""

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


class ClaimCase(NamedTuple):
    """One instance of a claim: it holds where margin >= -slack.

    Of an inequality, the margin is the room left, relative to the quantity, and the slack what
    rounding may take. Of an equation, it is minus the relative error, and the slack is the error
    allowed.
    """

    name: str
    margin: float
    slack: float = 0.0

    @property
    def holds(self) -> bool:
        """False for NaN, too."""
        return self.margin >= -self.slack


@dataclass(frozen=True)
class Claim:
    """A sentence of the theory and the function that tries to break it."""

    name: str
    source: str
    statement: str
    check: Check
    kind: Literal["inequality", "equation"] = "inequality"

    def run(self, size: Size) -> Outcome:
        """Every case; a check that cannot finish has not passed."""
        outcome = Outcome(self)
        started = time.perf_counter()
        try:
            outcome.cases.extend(self.check(size))
        except Exception as error:
            outcome.error = f"{type(error).__name__}: {error}"
        outcome.seconds = time.perf_counter() - started
        return outcome


@dataclass
class Outcome:
    """All cases of a claim."""

    claim: Claim
    cases: list[ClaimCase] = field(default_factory=list)
    error: str = ""
    seconds: float = 0.0

    @property
    def failures(self) -> list[ClaimCase]:
        """Cases that violate the claim."""
        return [case for case in self.cases if not case.holds]

    @property
    def holds(self) -> bool:
        """Whether there were cases, and all of them held."""
        return bool(self.cases) and not self.failures and not self.error

    @property
    def tightest(self) -> ClaimCase | None:
        """The worst violation, or the case nearest to one."""
        if self.claim.kind == "equation":
            return min(self.failures or self.cases, key=lambda c: c.margin + c.slack, default=None)
        return min(self.failures or self.cases, key=lambda c: c.margin, default=None)


class Exhibit(NamedTuple):
    """A counterexample: by how much the printed statement fails on it, and the corrected one."""

    violation: float
    corrected: float
    numbers: dict[str, float]


@dataclass(frozen=True)
class Erratum:
    """A statement that is wrong as printed, what is right, and a case that shows both."""

    source: str
    printed: str
    right: str
    show: Callable[[], Exhibit]

    def run(self) -> Shown:
        """The counterexample; one that cannot be shown has not been."""
        try:
            return Shown(self, self.show())
        except Exception as error:
            return Shown(self, None, f"{type(error).__name__}: {error}")


class Shown(NamedTuple):
    """A counterexample, looked at."""

    erratum: Erratum
    exhibit: Exhibit | None
    error: str = ""

    @property
    def holds(self) -> bool:
        """Whether the printed statement clearly fails and the corrected one does not."""
        shown = self.exhibit
        return shown is not None and shown.violation > CLEAR and abs(shown.corrected) <= ROUNDING

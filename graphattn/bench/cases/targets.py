"""Performance targets: bounds on single numbers of a run, stored as data with every case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from graphattn.bench.measuring.passes import Timing, ratio_of_rounds
from graphattn.bench.reporting.record import OURS, Quantity, Row, Verdict


@dataclass(frozen=True)
class Target:
    """A bound on a number of one contender, `of`; with `over`, on its ratio to another's.

    `over` names that other contender, or several, of which the fastest is used. ``at_most`` bounds
    of / over, and ``at_least`` over / of: how many times faster or smaller graphattn is. Without
    `over` the bound is in seconds, in bytes, or on the error or the share itself. Other devices
    than `device` have targets of their own.
    """

    quantity: Quantity
    over: tuple[str, ...] = ()
    at_most: float | None = None
    at_least: float | None = None
    of: str = OURS
    passes: str = "forward"
    device: str = "cpu"

    def judge(self, case: str, rows: Mapping[str, Row], timings: Mapping[str, Timing]) -> Verdict:
        """Compare the rows of one pass with the target; without a row, there is no measurement."""
        timed = [name for name in self.over if name in timings]
        other = min(timed, key=lambda name: timings[name].median, default=None)
        measured, spread = None, None
        if self.of in rows and (other or not self.over):
            measured, spread = self._measure(rows, timings, other)
        rival = other or " or ".join(self.over)
        pair = (rival, self.of) if self.at_least is not None else (self.of, rival)
        return Verdict(
            case,
            self.passes,
            self.quantity,
            " / ".join(pair) if self.over else self.of,
            bool(self.over),
            measured,
            spread,
            self.at_most,
            self.at_least,
        )

    def _measure(
        self, rows: Mapping[str, Row], timings: Mapping[str, Timing], other: str | None
    ) -> tuple[float | None, float | None]:
        """Return the number, and the spread if it is a time."""
        if other is None:
            row = rows[self.of]
            return row.number(self.quantity), row.spread if self.quantity == "time" else None
        top, bottom = (other, self.of) if self.at_least is not None else (self.of, other)
        if self.quantity == "time":
            return ratio_of_rounds(timings[top], timings[bottom])
        a, b = rows[top].number(self.quantity), rows[bottom].number(self.quantity)
        return (a / b if a is not None and b else None), None

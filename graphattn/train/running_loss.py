"""Loss of a run between two rows of the log, and whether it diverges."""

from __future__ import annotations

import math
from typing import Any

TIMES = 10  # a run diverges if its loss is more than this many times its first loss ...
PATIENCE = 100  # ... for this many steps in a row


class RunningLoss:
    """Sums of losses and numbers of guesses since the last row of the log; part of a checkpoint."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0.0  # since the last row
        self.first: float | None = None  # the loss of the first step
        self.above = 0  # number of steps in a row with a loss far above the first one
        self.diverged = False
        self.stopped = False  # all processes know that the run is to stop
        self.asked = False  # this process was asked to stop
        self._step_total, self._step_count = 0.0, 0.0

    def add(self, total: float, count: int) -> None:
        """Add a batch of this process."""
        self._step_total += total
        self._step_count += count

    def of_step(self) -> list[float]:
        """Return the numbers that processes add up: losses, guesses, requests to stop."""
        return [self._step_total, self._step_count, float(self.asked)]

    def finish_step(self, total: float, count: float, stopped: bool) -> None:
        """Record a step of all processes."""
        self._step_total, self._step_count = 0.0, 0.0
        self.total += total
        self.count += count
        self.stopped = stopped
        if count == 0:
            return
        mean = total / count
        if self.first is None:
            self.first = mean
        is_far = self.first > 0 and mean > TIMES * self.first
        self.above = self.above + 1 if is_far else 0
        self.diverged = not math.isfinite(mean) or self.above >= PATIENCE

    def take_mean(self) -> float:
        """Return the mean loss per guess since the last row (0 if there was none), and start
        again."""
        mean = self.total / self.count if self.count else 0.0
        self.total, self.count = 0.0, 0.0
        return mean

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"total": self.total, "count": self.count, "first": self.first, "above": self.above}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the state from :meth:`state`."""
        self.total, self.count = float(state["total"]), float(state["count"])
        self.first = None if state["first"] is None else float(state["first"])
        self.above = int(state["above"])

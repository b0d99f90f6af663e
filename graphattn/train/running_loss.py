"""Loss of a run between two rows of the log, and whether it runs away."""

from __future__ import annotations

import math
from typing import Any

TIMES = 10  # a loss that is so many times what it was at the start ...
PATIENCE = 100  # ... for so many steps in a row will not come back


class RunningLoss:
    """Sums of losses and answers since the last row; part of a checkpoint."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0.0  # since the last row
        self.first: float | None = None  # the loss of the first step
        self.above = 0  # steps in a row whose loss was far above it
        self.diverged = False
        self.stopped = False  # somebody has asked to stop, and all processes know
        self.asked = False  # this process was asked to
        self._step_total, self._step_count = 0.0, 0.0

    def add(self, total: float, count: int) -> None:
        """A batch of this process."""
        self._step_total += total
        self._step_count += count

    def of_step(self) -> list[float]:
        """Return the numbers that processes add up at the end of a step: losses, answers, wishes to
        stop.
        """
        return [self._step_total, self._step_count, float(self.asked)]

    def finish_step(self, total: float, count: float, stopped: bool) -> None:
        """A step of all processes."""
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
        """The mean per answer since the last row; 0 where there was none."""
        mean = self.total / self.count if self.count else 0.0
        self.total, self.count = 0.0, 0.0
        return mean

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint keeps."""
        return {"total": self.total, "count": self.count, "first": self.first, "above": self.above}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state`."""
        self.total, self.count = float(state["total"]), float(state["count"])
        self.first = None if state["first"] is None else float(state["first"])
        self.above = int(state["above"])

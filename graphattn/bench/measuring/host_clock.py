"""Times on a CPU: each contender uses its best number of threads, and the machine is monitored.

The time of a contender must not depend on the contender that ran before it. A sample therefore
follows a pass of the same contender that is not timed. Caches, memory pages and waiting threads are
then those of the contender itself.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

LONG_ENOUGH = 1e-3  # seconds of one sample
MOST_REPEATS = 100
COLD_MATTERS = 2.5  # seconds of a pass; from here on, the contender before has no effect
ENDLESS = 20.0  # seconds of a pass; from here on, the pass before the rounds is the first sample
SLOW = 5.0  # seconds of a pass; from here on, one thread is not tried
WATCHED = 1024  # rows and columns of the matrices that measure the speed of the machine


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class HostClock:
    """Samples of the mean time of at most 100 passes, for a millisecond, in seconds."""

    is_captured: bool | None = None  # only passes on a GPU are captured

    def __init__(self, work: Callable[[], object], threads: int) -> None:
        self.work, self.threads, self.repeats = work, threads, 1
        self.first: float | None = None
        before = num_compiled()
        self.seconds = self._mean()  # this pass also loads or compiles code
        if self.seconds < ENDLESS or num_compiled() > before:
            self.seconds = self._mean()
        else:
            self.first = self.seconds
        if self.seconds < COLD_MATTERS:
            self.seconds = min(self.seconds, *(self._mean() for _ in range(2)))
        self.repeats = min(MOST_REPEATS, max(1, math.ceil(LONG_ENOUGH / self.seconds)))

    def sample(self) -> float:
        """Return a mean; a pass that is not timed comes first, unless it takes 2.5 s or more."""
        if self.first is not None:
            first, self.first = self.first, None
            return first
        if self.seconds < COLD_MATTERS:
            self._pass()
        return self._mean()

    def _pass(self) -> None:
        with threads(self.threads):
            self.work()

    def _mean(self) -> float:
        with threads(self.threads):
            start = time.perf_counter()
            for _ in range(self.repeats):
                self.work()
            return (time.perf_counter() - start) / self.repeats


class LongClock(HostClock):
    """Samples of one pass each, with all threads: what ran before a whole model has no effect."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.work, self.threads, self.repeats = work, torch.get_num_threads(), 1
        self.first, self.seconds = None, math.inf


def num_compiled() -> int:
    """Return how many graphs PyTorch has compiled: a pass that adds to it is not timed."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # imported by torch.compile only: slow
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


def fastest(work: Callable[[], object]) -> HostClock:
    """Return a clock with all threads, or with one if that is faster."""
    best = HostClock(work, torch.get_num_threads())
    if best.threads > 1 and best.seconds < SLOW:
        alone = HostClock(work, 1)
        best = min(best, alone, key=lambda clock: clock.seconds)
    return best


class Watch:
    """The speed of the machine, which others may use, as a share of the best so far."""

    def __init__(self) -> None:
        self.factor = torch.randn(WATCHED, WATCHED)
        self.product = torch.empty_like(self.factor)
        self.best = min(self._seconds() for _ in range(5))

    def speed(self) -> float:
        seconds = sorted(self._seconds() for _ in range(3))[1]
        self.best = min(self.best, seconds)
        return self.best / seconds

    def _seconds(self) -> float:
        start = time.perf_counter()
        torch.mm(self.factor, self.factor, out=self.product)
        return time.perf_counter() - start

"""Times on a CPU: every contender at its best number of threads, on a machine that is watched.

A number must not depend on the row that it stands in. So a sample follows a pass of the same
contender that nobody times: caches, pages and waiting threads are then its own and not those of
whoever came before.
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
COLD_MATTERS = 2.5  # seconds of a pass beyond which it no longer matters who came before
ENDLESS = 20.0  # seconds of a pass so long that the run before the rounds counts as the first round
SLOW = 5.0  # seconds of a pass beyond which other numbers of threads are not tried
WATCHED = 1024  # the side of the matrices whose product tells how fast the machine is now


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Use a number of torch's threads, which are OpenMP's, for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class HostClock:
    """Samples of one pass with so many threads, in seconds: its mean over a millisecond or more."""

    is_captured: bool | None = None  # nothing to capture

    def __init__(self, work: Callable[[], object], threads: int) -> None:
        self.work, self.threads, self.repeats = work, threads, 1
        self.first: float | None = None
        before = num_compiled()
        self.seconds = self._mean()  # loads code, or compiles it for this number of threads
        if self.seconds < ENDLESS or num_compiled() > before:
            self.seconds = self._mean()
        else:
            self.first = self.seconds
        if self.seconds < COLD_MATTERS:
            self.seconds = min(self.seconds, *(self._mean() for _ in range(2)))
        self.repeats = min(MOST_REPEATS, max(1, math.ceil(LONG_ENOUGH / self.seconds)))

    def sample(self) -> float:
        """After a pass of its own, if that takes no time to speak of."""
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
    """Samples of one pass each, with all threads.

    For whole models: what came before is nothing beside them, and one thread is never faster.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self.work, self.threads, self.repeats = work, torch.get_num_threads(), 1
        self.first, self.seconds = None, math.inf


def num_compiled() -> int:
    """How many graphs torch has compiled so far: a pass that adds to them says nothing of time."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # slow to import, and there once it is used
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


def fastest(work: Callable[[], object]) -> HostClock:
    """A clock with all threads or with one, whatever is faster in a run before the rounds."""
    best = HostClock(work, torch.get_num_threads())
    if best.threads > 1 and best.seconds < SLOW:
        alone = HostClock(work, 1)
        best = min(best, alone, key=lambda clock: clock.seconds)
    return best


class Watch:
    """How fast the machine is at any moment, as a share of the best seen: others may use it too."""

    def __init__(self) -> None:
        self.factor = torch.randn(WATCHED, WATCHED)
        self.product = torch.empty_like(self.factor)
        self.best = min(self._seconds() for _ in range(5))

    def speed(self) -> float:
        """Measure the speed of a product of matrices by all threads, the median of three tries."""
        seconds = sorted(self._seconds() for _ in range(3))[1]
        self.best = min(self.best, seconds)
        return self.best / seconds

    def _seconds(self) -> float:
        start = time.perf_counter()
        torch.mm(self.factor, self.factor, out=self.product)
        return time.perf_counter() - start

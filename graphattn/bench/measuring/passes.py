"""Interleaved time measurements, and the highest speed of the machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphattn.bench.contenders.peers import Run
from graphattn.bench.measuring.gpu_clock import GpuClock
from graphattn.bench.measuring.host_clock import HostClock, LongClock, fastest
from graphattn.bench.models.training import TrainingRun

GIGABYTE = 2**30
TWO_WILL_DO = 3.0  # seconds of a pass; from here on, a contender takes part in two rounds only


class Timing(NamedTuple):
    """The time of every round, in seconds."""

    times: list[float]

    @property
    def median(self) -> float:
        """Return the median of all rounds, or for nine or more the smallest median of a third.

        Other work on the machine during one third then changes only the spread.
        """
        n, parts = len(self.times), 3 if len(self.times) >= 9 else 1
        cuts = [n * part // parts for part in range(parts + 1)]
        return min(statistics.median(self.times[a:b]) for a, b in pairwise(cuts))

    @property
    def spread(self) -> float:
        """Return half the distance between the quartiles, divided by the median."""
        return _median_and_spread(self.times)[1]


def ratio_of_rounds(top: Timing, bottom: Timing) -> tuple[float, float]:
    """Return median and spread of ratios of single rounds: a busy machine slows both sides."""
    rounds = zip(top.times, bottom.times, strict=False)  # a slow contender has only two rounds
    return _median_and_spread([a / b for a, b in rounds])


def _median_and_spread(values: list[float]) -> tuple[float, float]:
    low, median, high = statistics.quantiles(values, n=4)
    return median, (high - low) / 2 / median


def one_pass(run: Run, inputs: Any, *, backward: bool) -> None:
    """Run a forward pass, or also a backward pass from ones, or a step of training."""
    if not backward:
        with torch.no_grad():
            run(inputs)
        return
    if isinstance(run, TrainingRun):
        run.step(inputs)
        return
    out = run(inputs)
    torch.autograd.grad(out, leaves(out), torch.ones_like(out))


def leaves(out: Tensor) -> list[Tensor]:
    """List the leaf tensors for which a backward pass from `out` computes gradients."""
    variables, seen, open_nodes = [], set(), [out.grad_fn]
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            variables.append(node.variable)
        open_nodes += [following for following, _ in node.next_functions]
    return variables


Clock = HostClock | GpuClock


def clock(
    run: Run, inputs: Any, *, backward: bool, device: torch.device, long_passes: bool = False
) -> Clock:
    """Return the clock of a pass; except for a `LongClock`, some passes have loaded code."""

    def work() -> None:
        one_pass(run, inputs, backward=backward)

    if device.type == "cpu":
        return LongClock(work) if long_passes else fastest(work)
    work()
    return GpuClock(work)


def time_interleaved(
    clocks: Mapping[str, Clock], *, seconds: float
) -> tuple[dict[str, Timing], dict[str, Exception]]:
    """Time all contenders one after another, in several rounds; return times and failures.

    A busy machine then slows all contenders, so ratios remain valid. The rounds end after `seconds`
    in total, but there are at least 3 and at most 100. A contender that needs 3 seconds or more for
    its first pass takes part in two rounds only. In this case, `seconds` is counted from the end of
    the second round. A contender that fails, for example for lack of memory, gets no times.
    """
    times: dict[str, list[float]] = {name: [] for name in clocks}
    failures: dict[str, Exception] = {}
    started, rounds = time.perf_counter(), 0
    while rounds < 3 or (rounds < 100 and time.perf_counter() - started < seconds):
        for name in list(times):
            if rounds < 2 or times[name][0] < TWO_WILL_DO:
                try:
                    times[name].append(clocks[name].sample())
                except Exception as failure:
                    failures[name] = failure
                    del times[name]
        rounds += 1
        if rounds == 2 and any(values[0] >= TWO_WILL_DO for values in times.values()):
            started = time.perf_counter()
    return {name: Timing(values) for name, values in times.items()}, failures


# The bound: the shortest time that the machine could need.


class Machine(NamedTuple):
    """The highest speeds of the machine, in products of large matrices and in copies."""

    flops: float  # per second
    bytes: float  # per second

    def seconds(self, work: tuple[float, float]) -> float:
        """Return the larger of the two lower bounds of the time, for (operations, bytes)."""
        return max(work[0] / self.flops, work[1] / self.bytes)


def measure_machine(device: torch.device, dtype: torch.dtype) -> Machine:
    """Measure products of square matrices and copies (read and written), each the best of five."""
    on_gpu = device.type == "cuda"
    width, size = (8192, 2 * GIGABYTE) if on_gpu else (2048, GIGABYTE // 4)
    a = torch.randn(width, width).to(device, dtype)
    product = torch.empty_like(a)
    source = torch.ones(size, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)

    def best(work: Callable[[], Tensor]) -> float:
        work()
        timer = GpuClock(work) if on_gpu else HostClock(work, torch.get_num_threads())
        return min(timer.sample() for _ in range(5))

    return Machine(
        2 * width**3 / best(lambda: torch.mm(a, a, out=product)),
        2 * source.nbytes / best(lambda: target.copy_(source)),
    )

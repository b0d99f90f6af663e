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
from graphattn.bench.models.vision import VisionRun

GIGABYTE = 2**30
TWO_WILL_DO = 3.0  # seconds of a pass; from here on, a contender takes part in two rounds only


class Timing(NamedTuple):
    """The time of every round, in seconds."""

    times: list[float]

    @property
    def median(self) -> float:
        """The median of all rounds.

        Nine rounds or more are divided into three parts, and this is the smallest median of a
        part. Other work on the machine during one part then changes only the spread.
        """
        n, parts = len(self.times), 3 if len(self.times) >= 9 else 1
        cuts = [n * part // parts for part in range(parts + 1)]
        return min(statistics.median(self.times[a:b]) for a, b in pairwise(cuts))

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, divided by the median."""
        return _median_and_spread(self.times)[1]


def ratio_of_rounds(top: Timing, bottom: Timing) -> tuple[float, float]:
    """Compute the median and the spread of the ratios of single rounds.

    Both contenders run in every round, so other work on the machine slows both sides of a ratio.
    """
    rounds = zip(top.times, bottom.times, strict=False)  # a slow contender has only two rounds
    return _median_and_spread([a / b for a, b in rounds])


def _median_and_spread(values: list[float]) -> tuple[float, float]:
    low, median, high = statistics.quantiles(values, n=4)
    return median, (high - low) / 2 / median


def one_pass(run: Run, inputs: Any, *, backward: bool) -> None:
    """Run one forward pass, or with `backward` one forward and one backward pass.

    The backward pass starts from a gradient of ones and computes the gradients of all leaves. A
    vision model takes one training step instead of both passes.
    """
    if not backward:
        with torch.no_grad():
            run(inputs)
        return
    if isinstance(run, VisionRun):
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
    """Return the clock of a pass of this run.

    Some passes come first, which load and compile code. A `LongClock` does without them.
    """

    def work() -> None:
        one_pass(run, inputs, backward=backward)

    if device.type == "cpu":
        return LongClock(work) if long_passes else fastest(work)
    work()
    return GpuClock(work)


def time_interleaved(
    clocks: Mapping[str, Clock],
    *,
    seconds: float,
    failed: Callable[[str, Exception], None] | None = None,
) -> dict[str, Timing]:
    """Time all contenders one after another, in several rounds.

    A busy machine then slows all contenders, so ratios remain valid. The rounds end after `seconds`
    in total, but there are at least 3 and at most 100. A contender that needs 3 seconds or more for
    its first pass takes part in two rounds only. In this case, `seconds` is counted from the end of
    the second round. If a contender fails, for example for lack of memory, `failed` is called with
    its name and the error, and it gets no times. Without `failed`, the error is raised.
    """
    times: dict[str, list[float]] = {name: [] for name in clocks}
    started, rounds = time.perf_counter(), 0
    while rounds < 3 or (rounds < 100 and time.perf_counter() - started < seconds):
        for name in list(times):
            if rounds < 2 or times[name][0] < TWO_WILL_DO:
                try:
                    times[name].append(clocks[name].sample())
                except Exception as failure:
                    if failed is None:
                        raise
                    del times[name]
                    failed(name, failure)
        rounds += 1
        if rounds == 2 and any(values[0] >= TWO_WILL_DO for values in times.values()):
            started = time.perf_counter()
    return {name: Timing(values) for name, values in times.items()}


# The bound: the shortest time that the machine could need.


class Machine(NamedTuple):
    """The highest speeds of the machine, in products of large matrices and in copies."""

    flops: float  # per second
    bytes: float  # per second

    def seconds(self, work: tuple[float, float]) -> float:
        """Return the larger of the two lower bounds of the time, for (operations, bytes)."""
        return max(work[0] / self.flops, work[1] / self.bytes)


def measure_machine(device: torch.device, dtype: torch.dtype) -> Machine:
    """Measure the speeds of the machine, each as the best of five samples.

    The work is a product of two square matrices, and a copy, whose bytes count as read and as
    written. On a CPU the matrices are 2048 x 2048 and the copy has 256 MB. On a GPU this would be
    too small, so the matrices are 8192 x 8192 and the copy has 2 GB.
    """
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

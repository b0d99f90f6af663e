"""Times, interleaved, and what the machine could do at best."""

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
TWO_WILL_DO = 3.0  # seconds of a pass that takes part in two rounds


class Timing(NamedTuple):
    """Seconds of every round."""

    times: list[float]

    @property
    def median(self) -> float:
        """Median of all rounds; of nine or more, the least of the medians of three parts
        of them.

        A machine that is busy for a while, during one part, shows in the spread.
        """
        n, parts = len(self.times), 3 if len(self.times) >= 9 else 1
        cuts = [n * part // parts for part in range(parts + 1)]
        return min(statistics.median(self.times[a:b]) for a, b in pairwise(cuts))

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, over the median."""
        return _median_and_spread(self.times)[1]


def ratio_of_rounds(top: Timing, bottom: Timing) -> tuple[float, float]:
    """Median and spread of the ratios of single rounds, in which contenders took turns.

    A machine that is busy for a while slows both sides of such a ratio.
    """
    rounds = zip(top.times, bottom.times, strict=False)  # a slow contender is in the first two
    return _median_and_spread([a / b for a, b in rounds])


def _median_and_spread(values: list[float]) -> tuple[float, float]:
    low, median, high = statistics.quantiles(values, n=4)
    return median, (high - low) / 2 / median


def one_pass(run: Run, inputs: Any, *, backward: bool) -> None:
    """Forward, or forward and backward from a gradient of ones to all that the run has read.

    A model takes a step of training instead of the latter.
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
    """The tensors that gradients of `out` end at."""
    found, seen, open_nodes = [], set(), [out.grad_fn]
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        open_nodes += [following for following, _ in node.next_functions]
    return found


Clock = HostClock | GpuClock


def clock(
    run: Run, inputs: Any, *, backward: bool, device: torch.device, long_passes: bool = False
) -> Clock:
    """Return the clock of a pass of this run, after some that warm up (and compile)."""

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
    """Every contender in turn, round after round, for so many seconds in all.

    A busy machine is then slow for all of them, and ratios hold. Three rounds at least and a
    hundred at most; two for whoever needs seconds for a pass, beside which the clock of the others
    stands still. Who fails in a round (memory that others took meanwhile) is handed to `failed` and
    has no times.
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


# The bound.


class Machine(NamedTuple):
    """Machine: its speed on its best work: products of large matrices, and copies."""

    flops: float  # per second
    bytes: float  # per second

    def seconds(self, work: tuple[float, float]) -> float:
        """The larger of the two bounds."""
        return max(work[0] / self.flops, work[1] / self.bytes)


def measure_machine(device: torch.device, dtype: torch.dtype) -> Machine:
    """Best of five: a product of square matrices, and a copy (read and written).

    2048 x 2048 and 256 MB; on a GPU, where that is too small, 8192 x 8192 and 2 GB.
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

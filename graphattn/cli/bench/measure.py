"""Times, interleaved, and what the machine could do at best."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphattn.cli.bench.contenders import Run

MEGABYTE = 2**20


class Timing(NamedTuple):
    """Seconds of every round."""

    times: list[float]

    @property
    def median(self) -> float:
        """Of all rounds."""
        return statistics.median(self.times)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, over the median."""
        return _median_and_spread(self.times)[1]


def ratio_of_rounds(top: Timing, bottom: Timing) -> tuple[float, float]:
    """Median and spread of the ratios of single rounds, in which contenders took turns.

    A machine that is busy for a while slows both sides of such a ratio.
    """
    return _median_and_spread([a / b for a, b in zip(top.times, bottom.times, strict=True)])


def _median_and_spread(values: list[float]) -> tuple[float, float]:
    low, median, high = statistics.quantiles(values, n=4)
    return median, (high - low) / 2 / median


def one_pass(run: Run, inputs: Any, *, backward: bool) -> None:
    """Forward, or forward and backward from a gradient of ones to all that the run has read."""
    if not backward:
        with torch.no_grad():
            run(inputs)
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


def time_interleaved(
    runs: Mapping[str, tuple[Run, Any]], *, backward: bool, seconds: float, device: torch.device
) -> dict[str, Timing]:
    """Every contender in turn on its inputs, round after round, for so many seconds in all.

    A busy machine is then slow for all of them, and ratios hold. Three rounds at least, after one
    that warms up (and compiles, where something compiles), and a hundred at most.
    """
    wait = _wait(device)
    for run, inputs in runs.values():
        one_pass(run, inputs, backward=backward)
    times: dict[str, list[float]] = {name: [] for name in runs}
    started, rounds = time.perf_counter(), 0
    while rounds < 3 or (rounds < 100 and time.perf_counter() - started < seconds):
        for name, (run, inputs) in runs.items():
            wait()
            start = time.perf_counter()
            one_pass(run, inputs, backward=backward)
            wait()
            times[name].append(time.perf_counter() - start)
        rounds += 1
    return {name: Timing(values) for name, values in times.items()}


def _wait(device: torch.device) -> Callable[[], None]:
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


# The bound.


class Machine(NamedTuple):
    """What it reaches on what it does best: products of large matrices, and copies."""

    flops: float  # per second
    bytes: float  # per second

    def seconds(self, work: tuple[float, float]) -> float:
        """The larger of the two bounds."""
        return max(work[0] / self.flops, work[1] / self.bytes)


def measure_machine(device: torch.device, dtype: torch.dtype) -> Machine:
    """Best of five: a product of 2048 x 2048 matrices, and a copy of 256 MB (read and written)."""
    a = torch.randn(2048, 2048, device=device, dtype=dtype)
    source = torch.empty(64 * MEGABYTE, device=device, dtype=torch.float32).fill_(1.0)
    target = torch.empty_like(source)
    return Machine(
        2 * 2048**3 / _best(lambda: a @ a, device),
        2 * source.nbytes / _best(lambda: target.copy_(source), device),
    )


def _best(run: Callable[[], Tensor], device: torch.device) -> float:
    wait, times = _wait(device), []
    for _ in range(6):
        wait()
        start = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - start)
    return min(times[1:])

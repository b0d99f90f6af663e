"""Times, interleaved; memory, as the peak of a process of its own; what the machine could do."""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphattn.cli.bench.cases import CASES, Size
from graphattn.cli.bench.contenders import Run

MEGABYTE = 2**20


class Timing(NamedTuple):
    """Seconds: the median, and half the distance between the quartiles over the median."""

    median: float
    spread: float
    rounds: int


def one_pass(run: Run, inputs: Any, *, backward: bool) -> None:
    """Forward, or forward and backward from a gradient of ones."""
    if not backward:
        with torch.no_grad():
            run(inputs)
        return
    out = run(inputs)
    torch.autograd.grad(out, inputs.learned(), torch.ones_like(out), allow_unused=True)


def time_interleaved(
    runs: dict[str, Run], inputs: Any, *, backward: bool, seconds: float, device: torch.device
) -> dict[str, Timing]:
    """Every contender in turn, round after round, for about so many seconds in all.

    A busy machine is then slow for all of them, and ratios hold. Three rounds at least, after one
    that warms up (and compiles, where something compiles).
    """
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for run in runs.values():
        one_pass(run, inputs, backward=backward)
    times: dict[str, list[float]] = {name: [] for name in runs}
    started = time.perf_counter()
    while True:
        for name, run in runs.items():
            wait()
            start = time.perf_counter()
            one_pass(run, inputs, backward=backward)
            wait()
            times[name].append(time.perf_counter() - start)
        rounds = len(next(iter(times.values())))
        if (rounds >= 3 and time.perf_counter() - started > seconds) or rounds >= 100:
            return {name: _timing(values) for name, values in times.items()}


def _timing(values: list[float]) -> Timing:
    low, median, high = statistics.quantiles(values, n=4)
    return Timing(median, (high - low) / 2 / median, len(values))


# Memory.


class Peak:
    """Peak memory of one pass beyond its inputs, measured in a fresh process each.

    The processes are forked from one that has imported torch and computed nothing.
    """

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["graphattn.cli.bench.measure", "graphattn.nn"])

    def of(self, case: str, contender: str, size: Size, *, backward: bool) -> float | None:
        """Bytes; None where the process died (of too little memory, most likely)."""
        receiver, sender = self.context.Pipe(duplex=False)
        process = self.context.Process(
            target=_report_peak, args=(sender, case, contender, size, backward)
        )
        process.start()
        sender.close()
        try:
            return receiver.recv()
        except EOFError:
            return None
        finally:
            process.join()


def _report_peak(sender: Any, case: str, contender: str, size: Size, backward: bool) -> None:
    own = next(c for c in CASES if c.name == case)
    inputs = own.make(size, torch.device("cpu"), torch.float32)
    if hasattr(inputs, "graph") and contender != "graphattn":
        inputs.graph.edge_index  # noqa: B018  # message passing is given its edges
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    one_pass(own.runs()[contender], inputs, backward=backward)
    sender.send(1024.0 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))


def cuda_peak(run: Run, inputs: Any, *, backward: bool) -> float:
    """Bytes beyond the inputs, by torch's own accounting."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    one_pass(run, inputs, backward=backward)
    return float(torch.cuda.max_memory_allocated() - before)


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
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    times = []
    for _ in range(6):
        wait()
        start = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - start)
    return min(times[1:])

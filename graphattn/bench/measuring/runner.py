"""A run of the benchmark: check, time, weigh and judge one case after the other."""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from rich.console import Console
from rich.status import Status

from graphattn.bench.cases.case import BOTH, FORWARD, BenchmarkCase, Entry
from graphattn.bench.cases.inputs import ForwardOnlyError, MissingError
from graphattn.bench.contenders.peers import Run
from graphattn.bench.measuring.correctness import ALLOWED, OperationTruth, Truth, truth_of
from graphattn.bench.measuring.host_clock import HostClock, Watch
from graphattn.bench.measuring.memory import Peak, cuda_peak
from graphattn.bench.measuring.passes import (
    Clock,
    Timing,
    clock,
    measure_machine,
    one_pass,
    ratio_of_rounds,
    time_interleaved,
)
from graphattn.bench.reporting.record import Quantity, Record, Row, Slope

# Of timing, per case and pass; on a GPU, where a round takes milliseconds, less will do.
SECONDS = {"small": 0.5, "paper": 6.0, "long": 30.0}
SECONDS_ON_GPU = {"small": 0.5, "paper": 2.0, "long": 5.0}
# Of output and gradients, None for those of a contender that has no backward pass; None for
# yardsticks.
Errors = dict[str, tuple[float, float | None] | None]


class Runner:
    """Measures cases on a device and adds what it finds to a record.

    Whatever a contender raises (too little memory, a kernel that does not compile) is noted, and
    the others go on.
    """

    def __init__(self, device: torch.device, size: str, record: Record, console: Console) -> None:
        self.device, self.size, self.record, self.console = device, size, record, console
        on_cpu = device.type == "cpu"
        self.dtype = torch.float32 if on_cpu else torch.bfloat16
        self.seconds = (SECONDS if on_cpu else SECONDS_ON_GPU)[size]
        self.machine = measure_machine(device, self.dtype)
        self.peak = Peak() if on_cpu else None
        self.watch = Watch() if on_cpu else None
        self.status: Status | None = None

    def measure(self, case: BenchmarkCase) -> list[Row]:
        """The rows of one case, which are added to the record together with their verdicts."""
        first = len(self.record.rows)
        torch.compiler.reset()  # of one function, no more than 8 variants are compiled
        entries = case.entries(self.size, self.device.type)
        with self.console.status(case.title) as self.status:
            inputs, errors = self.check(case, entries)
        for passes in (FORWARD, BOTH) if case.backward else (FORWARD,):
            with self.console.status(case.title) as self.status:
                clocks, peaks = self.warm(case, passes, entries, inputs, errors)
                self.tell(f"{case.name}, {passes}: timing")
                speeds = [] if self.watch is None else [self.watch.speed()]

                def note_failure(name: str, failure: Exception, passes: str = passes) -> None:
                    self.note(f"{case.name}, {name}, {passes}: {reason_of(failure)}")

                seconds = 0.0 if self.is_long(case) else self.seconds  # three rounds
                timings = time_interleaved(clocks, seconds=seconds, failed=note_failure)
                if self.watch is not None:
                    speeds.append(self.watch.speed())
                rows = {
                    name: self.row(
                        case, passes, name, entries[name], clocks[name], peaks[name], errors[name],
                        timings, min(speeds, default=None),
                    )
                    for name in timings
                }  # fmt: skip
            self.record.rows.extend(rows.values())
            self.record.targets.extend(
                target.judge(case.name, rows, timings)
                for target in case.targets
                if (target.passes, target.device) == (passes, self.device.type)
            )
            if case.lengths:
                self.record.slopes.extend(slopes(list(rows.values())))
            del clocks  # captured passes hold their memory
            self.release()
        return self.record.rows[first:]

    def is_long(self, case: BenchmarkCase) -> bool:
        """Whether a pass takes so long that three will do."""
        return case.long_passes and self.size != "small"

    def release(self) -> None:
        """Hand back what a GPU has lent to passes that are over."""
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def check(
        self, case: BenchmarkCase, entries: Mapping[str, Entry]
    ) -> tuple[dict[str, Any], Errors]:
        """Inputs, and the errors of those that run and are right; the others are noted as missing.

        Inputs are made and the truth is computed once per size, and every contender is checked
        once, forward and backward together.
        """
        by_size: dict[tuple[tuple[str, int], ...], list[str]] = {}
        for name, entry in entries.items():
            by_size.setdefault(tuple(entry.size.items()), []).append(name)
        inputs: dict[str, Any] = {}
        errors: Errors = {}
        for size, names in by_size.items():
            try:
                own = case.make(dict(size), self.device, self.dtype)
                truth = truth_of(own, backward=case.backward)
                of_dot_product: Truth | None = None
                if case.dot_products:
                    of_dot_product = truth_of(own, backward=case.backward, dot_product=True)
            except Exception as failure:
                self.note(f"{case.name}: {reason_of(failure)}")
                continue
            for name in names:
                run, contender = entries[name].run, entries[name].contender
                self.tell(f"{case.name}: checking {name}")
                try:
                    if contender in case.yardsticks:  # nothing to compare
                        one_pass(run, own, backward=case.backward)
                        errors[name] = None
                    else:
                        is_dot = contender in case.dot_products
                        own_truth = of_dot_product if is_dot and of_dot_product else truth
                        errors[name] = self.errors_of(own_truth, run)
                    inputs[name] = own
                except Exception as failure:
                    self.note(f"{case.name}, {name}: {reason_of(failure)}")
                self.release()
        return inputs, errors

    def errors_of(self, truth: Truth, run: Run) -> tuple[float, float | None]:
        """Return the errors of a result that is right, of the output alone without gradients."""
        try:
            error, worst = truth.errors_of(run)
        except ForwardOnlyError:
            if not isinstance(truth, OperationTruth):
                raise
            return self.right(truth.forward_error_of(run)), None
        self.right(error, worst)
        return error, worst

    def warm(
        self,
        case: BenchmarkCase,
        passes: str,
        entries: Mapping[str, Entry],
        inputs: Mapping[str, Any],
        errors: Errors,
    ) -> tuple[dict[str, Clock], dict[str, float | None]]:
        """Clocks of all that were right, warm, and peaks of memory; failures are noted."""
        clocks: dict[str, Clock] = {}
        peaks: dict[str, float | None] = {}
        backward = passes == BOTH
        for name, own in inputs.items():
            entry, error = entries[name], errors[name]
            self.tell(f"{case.name}, {passes}: compiling and weighing {name}")
            try:
                if backward and error is not None and error[1] is None:
                    one_pass(entry.run, own, backward=True)  # says why it cannot
                peak = None
                if case.memory and self.peak is None:
                    peak = cuda_peak(entry.run, own, backward=backward)
                elif case.memory and self.peak is not None:
                    peak = self.peak.of(case.name, entry.contender, entry.size, backward=backward)
                clocks[name] = clock(
                    entry.run,
                    own,
                    backward=backward,
                    device=self.device,
                    long_passes=self.is_long(case),
                )
                peaks[name] = peak
            except Exception as failure:
                self.note(f"{case.name}, {name}, {passes}: {reason_of(failure)}")
                self.release()
        return clocks, peaks

    def right(self, *errors: float) -> float:
        """The first of them, unless one is too large."""
        if not all(error <= ALLOWED[self.dtype] for error in errors):  # NaN is too large
            shown = ", ".join(f"{error:.1e}" for error in errors)
            raise MissingError(f"not timed: wrong result (errors {shown})")
        return errors[0]

    def tell(self, doing: str) -> None:
        """Report progress, as runs take minutes: beside a spinner, or in a line of a log."""
        if self.status is not None:
            self.status.update(doing)
        if not self.console.is_terminal:
            print(doing, file=sys.stderr, flush=True)

    def note(self, line: str) -> None:
        """Note a measurement that is missing, and the reason."""
        self.record.missing.append(line)

    def row(
        self,
        case: BenchmarkCase,
        passes: str,
        name: str,
        entry: Entry,
        own_clock: Clock,
        peak: float | None,
        errors: tuple[float, float | None] | None,
        timings: Mapping[str, Timing],
        speed: float | None,
    ) -> Row:
        """All numbers of one contender."""
        timing, backward = timings[name], passes == BOTH
        beside = timings.get(entry.beside or "")
        bound = self.machine.seconds(case.work(entry.size, self.dtype.itemsize, backward))
        return Row(
            case.name,
            passes,
            name,
            entry.size,
            timing.median,
            timing.spread,
            len(timing.times),
            ratio=None if beside is None else ratio_of_rounds(timing, beside)[0],
            peak=peak,
            share_of_bound=bound / timing.median if bound > 0 else None,
            error=None if errors is None else max(errors[0], errors[1] or 0 if backward else 0),
            captured=own_clock.is_captured,
            threads=own_clock.threads if isinstance(own_clock, HostClock) else None,
            speed=speed,
        )


def reason_of(failure: Exception) -> str:
    """The first line of its message, in 100 characters."""
    return (str(failure).splitlines() or [type(failure).__name__])[0][:100]


def slopes(rows: list[Row]) -> list[Slope]:
    """Exponents of time and memory over the lengths of one pass, by least squares on logarithms."""
    fitted: list[Slope] = []
    quantities: tuple[Quantity, ...] = ("time", "memory")
    for quantity in quantities:
        points = [(row.size["tokens"], n) for row in rows if (n := row.number(quantity))]
        if len(points) > 2:  # two points are no line
            tokens, numbers = numpy.log(points).T
            exponent = float(numpy.polyfit(tokens, numbers, 1)[0])
            fitted.append(Slope(rows[0].case, rows[0].passes, quantity, exponent))
    return fitted

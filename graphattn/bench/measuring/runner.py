"""A run of the benchmark, one case after another.

For each case, the run checks results, measures time and memory, and compares them with targets.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch

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

if TYPE_CHECKING:  # a run without the command line needs no rich
    from rich.console import Console
    from rich.status import Status

# Seconds of timing per case and pass. On a GPU a round takes milliseconds, so fewer are enough.
SECONDS = {"small": 0.5, "paper": 6.0, "long": 30.0}
SECONDS_ON_GPU = {"small": 0.5, "paper": 2.0, "long": 5.0}
# The errors of output and gradients of every contender. The second is None if the contender has no
# backward pass. A yardstick, whose result is not checked, has None instead of both.
Errors = dict[str, tuple[float, float | None] | None]


class Runner:
    """Measures cases on one device; a contender that fails is noted, and the others go on."""

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
        first = len(self.record.rows)
        torch.compiler.reset()  # PyTorch compiles at most 8 variants of a function
        entries = case.entries(self.size, self.device.type)
        with self.console.status(case.title) as self.status:
            inputs, errors = self.check(case, entries)
        for passes in (FORWARD, BOTH) if case.backward else (FORWARD,):
            with self.console.status(case.title) as self.status:
                clocks, peaks = self.warm(case, passes, entries, inputs, errors)
                self.tell(f"{case.name}, {passes}: timing")
                speeds = [] if self.watch is None else [self.watch.speed()]
                seconds = 0.0 if self.is_long(case) else self.seconds  # 0 s: three rounds
                timings, failures = time_interleaved(clocks, seconds=seconds)
                for name, failure in failures.items():
                    self.note(failure, case.name, name, passes)
                if self.watch is not None:
                    speeds.append(self.watch.speed())
                rows = {
                    name: replace(
                        self.row(case, passes, name, entries[name], timings, errors[name]),
                        peak=peaks[name],
                        captured=its_clock.is_captured,
                        threads=its_clock.threads if isinstance(its_clock, HostClock) else None,
                        speed=min(speeds, default=None),
                    )
                    for name, its_clock in clocks.items()
                    if name in timings
                }
            self.record.rows.extend(rows.values())
            self.record.targets.extend(
                target.judge(case.name, rows, timings)
                for target in case.targets
                if (target.passes, target.device) == (passes, self.device.type)
            )
            if case.lengths:
                self.record.slopes.extend(slopes(list(rows.values())))
            del clocks  # captured passes occupy memory
            self.release()
        return self.record.rows[first:]

    def is_long(self, case: BenchmarkCase) -> bool:
        return case.long_passes and self.size != "small"

    def release(self) -> None:
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def check(
        self, case: BenchmarkCase, entries: Mapping[str, Entry]
    ) -> tuple[dict[str, Any], Errors]:
        """Return inputs and errors of all contenders that run and are right, once per size."""
        by_size: dict[tuple[tuple[str, int], ...], list[str]] = {}
        for name, entry in entries.items():
            by_size.setdefault(tuple(entry.size.items()), []).append(name)
        inputs: dict[str, Any] = {}
        errors: Errors = {}
        for size, names in by_size.items():
            try:
                case_inputs = case.make(dict(size), self.device, self.dtype)
                truth = truth_of(case_inputs, backward=case.backward)
                of_dot_product: Truth | None = None
                if case.dot_products:
                    of_dot_product = truth_of(case_inputs, backward=case.backward, dot_product=True)
            except Exception as failure:
                self.note(failure, case.name)
                continue
            for name in names:
                run, contender = entries[name].run, entries[name].contender
                self.tell(f"{case.name}: checking {name}")
                try:
                    if contender in case.yardsticks:  # its result is not checked
                        one_pass(run, case_inputs, backward=case.backward)
                        errors[name] = None
                    else:
                        is_dot = contender in case.dot_products
                        its_truth = of_dot_product if is_dot and of_dot_product else truth
                        errors[name] = self.errors_of(its_truth, run)
                    inputs[name] = case_inputs
                except Exception as failure:
                    self.note(failure, case.name, name)
                self.release()
        return inputs, errors

    def errors_of(self, truth: Truth, run: Run) -> tuple[float, float | None]:
        """Return the errors of output and gradients (None: no backward pass) if they are small."""
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
        """Return a warm clock and the peak memory of every contender with right results."""
        clocks: dict[str, Clock] = {}
        peaks: dict[str, float | None] = {}
        backward = passes == BOTH
        for name, case_inputs in inputs.items():
            entry, error = entries[name], errors[name]
            self.tell(f"{case.name}, {passes}: compiling and weighing {name}")
            try:
                if backward and error is not None and error[1] is None:
                    # This raises an error with the reason.
                    one_pass(entry.run, case_inputs, backward=True)
                peaks[name] = None
                if case.memory and self.peak is None:
                    peaks[name] = cuda_peak(entry.run, case_inputs, backward=backward)
                elif case.memory and self.peak is not None:
                    contender, size = entry.contender, entry.size
                    peaks[name] = self.peak.of(case.name, contender, size, backward=backward)
                clocks[name] = clock(
                    entry.run,
                    case_inputs,
                    backward=backward,
                    device=self.device,
                    long_passes=self.is_long(case),
                )
            except Exception as failure:
                self.note(failure, case.name, name, passes)
                self.release()
        return clocks, peaks

    def right(self, *errors: float) -> float:
        """Return the first error; raise a MissingError if any of them is too large."""
        if not all(error <= ALLOWED[self.dtype] for error in errors):  # NaN is too large
            shown = ", ".join(f"{error:.1e}" for error in errors)
            raise MissingError(f"not timed: wrong result (errors {shown})")
        return errors[0]

    def tell(self, doing: str) -> None:
        """Report progress: by the spinner of a terminal, or as a line of standard error."""
        if self.status is not None:
            self.status.update(doing)
        if not self.console.is_terminal:
            print(doing, file=sys.stderr, flush=True)

    def note(self, failure: Exception | str, *measurement: str) -> None:
        """Note in the record that a measurement is missing, and the reason.

        The reason is up to 100 characters of the first line of an error, or the error's type.
        """
        lines = str(failure).splitlines() or [type(failure).__name__]
        self.record.missing.append(f"{', '.join(measurement)}: {lines[0][:100]}")

    def row(
        self,
        case: BenchmarkCase,
        passes: str,
        name: str,
        entry: Entry,
        timings: Mapping[str, Timing],
        errors: tuple[float, float | None] | None,
    ) -> Row:
        """Return the row of one contender, without its peak and what its clock knows."""
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
            peak=None,
            share_of_bound=bound / timing.median if bound > 0 else None,
            error=None if errors is None else max(errors[0], errors[1] or 0 if backward else 0),
        )


def measure_all(
    cases: list[BenchmarkCase],
    runner: Runner,
    json: Path | None,
    show: Callable[[BenchmarkCase, list[Row]], None] = lambda case, rows: None,
) -> None:
    """Measure the cases that the record lacks; write it after each, and `show` its rows."""
    record, device = runner.record, runner.device.type
    for case in cases:
        if case.name in record.measured:
            continue
        if device not in case.devices:
            runner.note(f"it cannot run on {device}", case.name)
            record.measured.append(case.name)
            continue
        rows: list[Row] | None = None
        is_interrupted = False
        try:
            rows = runner.measure(case)
        except KeyboardInterrupt:
            runner.note("interrupted", f"{case.name} and all later cases")
            is_interrupted = True
        except Exception as failure:  # other cases can still run
            runner.note(failure, case.name)
        if not is_interrupted:
            record.measured.append(case.name)
        runner.release()
        if json is not None:
            record.write(json)
        if is_interrupted:
            return
        if rows is not None:
            show(case, rows)


def slopes(rows: list[Row]) -> list[Slope]:
    """Fit the exponents of time and memory over three or more lengths of one pass."""
    fitted: list[Slope] = []
    quantities: tuple[Quantity, ...] = ("time", "memory")
    for quantity in quantities:
        points = [(row.size["tokens"], n) for row in rows if (n := row.number(quantity))]
        if len(points) > 2:  # a line always fits two points
            tokens, numbers = numpy.log(points).T
            exponent = float(numpy.polyfit(tokens, numbers, 1)[0])
            fitted.append(Slope(rows[0].case, rows[0].passes, quantity, exponent))
    return fitted

"""A run of the benchmark: check, time, weigh and judge one case after the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy
import torch
from rich.console import Console

from graphattn.cli.bench.cases import BOTH, FORWARD, Case, Entry
from graphattn.cli.bench.gate import ALLOWED, truth_of
from graphattn.cli.bench.inputs import MissingError
from graphattn.cli.bench.measure import (
    Timing,
    measure_machine,
    one_pass,
    ratio_of_rounds,
    time_interleaved,
)
from graphattn.cli.bench.memory import Peak, cuda_peak
from graphattn.cli.bench.record import OURS, Quantity, Record, Row, Slope

SECONDS = {"small": 0.5, "paper": 20.0, "long": 30.0}  # of timing, per case and pass
FAILURES = (MissingError, RuntimeError, MemoryError)  # the last two: too large, most likely
Errors = dict[str, tuple[float, float] | None]  # of output and gradients; None for yardsticks


class Runner:
    """Measures cases on a device and adds what it finds to a record."""

    def __init__(self, device: torch.device, size: str, record: Record, console: Console) -> None:
        self.device, self.size, self.record, self.console = device, size, record, console
        self.dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self.machine = measure_machine(device, self.dtype)
        self.peak = Peak() if device.type == "cpu" else None

    def measure(self, case: Case) -> list[Row]:
        """The rows of one case, which are added to the record together with their verdicts."""
        first = len(self.record.rows)
        entries = case.entries(self.size)
        with self.console.status(f"{case.title}: checking"):
            inputs, errors = self.check(case, entries)
        for passes in (FORWARD, BOTH) if case.backward else (FORWARD,):
            runs = {name: (entries[name].run, inputs[name]) for name in errors}
            with self.console.status(f"{case.title}, {passes}: timing"):
                timings = time_interleaved(
                    runs,
                    backward=passes == BOTH,
                    seconds=SECONDS[self.size],
                    device=self.device,
                )
                rows = {
                    name: self.row(case, passes, name, entries[name], inputs, errors, timings)
                    for name in runs
                }
            self.record.rows.extend(rows.values())
            self.record.targets.extend(
                target.judge(case.name, rows, timings)
                for target in case.targets
                if target.passes == passes
            )
            if case.lengths:
                self.record.slopes.extend(slopes(list(rows.values())))
        return self.record.rows[first:]

    def check(self, case: Case, entries: Mapping[str, Entry]) -> tuple[dict[str, Any], Errors]:
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
            except FAILURES as failure:
                self.note(f"{case.name}: {reason_of(failure)}")
                continue
            for name in names:
                try:
                    if entries[name].contender in case.yardsticks:  # nothing to compare
                        one_pass(entries[name].run, own, backward=case.backward)
                        errors[name] = None
                    else:
                        errors[name] = self.right(truth.errors_of(entries[name].run))
                    inputs[name] = own
                except FAILURES as failure:
                    self.note(f"{case.name}, {name}: {reason_of(failure)}")
        return inputs, errors

    def right(self, errors: tuple[float, float]) -> tuple[float, float]:
        """The same, unless one is too large."""
        if not all(error <= ALLOWED[self.dtype] for error in errors):  # NaN is too large
            shown = ", ".join(f"{error:.1e}" for error in errors)
            raise MissingError(f"no time for a wrong result (errors {shown})")
        return errors

    def note(self, line: str) -> None:
        """What was not measured, and why."""
        self.record.missing.append(line)

    def row(
        self,
        case: Case,
        passes: str,
        name: str,
        entry: Entry,
        inputs: Mapping[str, Any],
        errors: Errors,
        timings: Mapping[str, Timing],
    ) -> Row:
        """All numbers of one contender."""
        timing, backward, error = timings[name], passes == BOTH, errors[name]
        flops, moved = case.work(entry.size)
        bound = self.machine.seconds((flops * (3.5 if backward else 1), moved))
        peak = None
        if case.memory and self.peak is None:
            peak = cuda_peak(entry.run, inputs[name], backward=backward)
        elif case.memory and self.peak is not None:
            peak = self.peak.of(case.name, entry.contender, entry.size, backward=backward)
        return Row(
            case.name,
            passes,
            name,
            entry.size,
            timing.median,
            timing.spread,
            len(timing.times),
            ratio=ratio_of_rounds(timing, timings[OURS])[0] if OURS in timings else None,
            peak=peak,
            share_of_bound=bound / timing.median if bound > 0 else None,
            error=None if error is None else max(error) if backward else error[0],
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

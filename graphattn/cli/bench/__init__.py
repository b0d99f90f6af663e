"""`graphattn bench`: every operation beside its peers, on the same inputs, in one process."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from graphattn.cli.bench import record
from graphattn.cli.bench.cases import CASES, OURS, Case, Size
from graphattn.cli.bench.contenders import MissingError, Run
from graphattn.cli.bench.gate import ALLOWED, Truth
from graphattn.cli.bench.measure import (
    MEGABYTE,
    Machine,
    Peak,
    cuda_peak,
    measure_machine,
    one_pass,
    time_interleaved,
)
from graphattn.cli.tables import plain_table
from graphattn.graphs.arguments import as_choice

SECONDS = {"small": 2.0, "paper": 20.0, "long": 30.0}  # of timing, per case and pass


class Bench:
    """One run of the benchmark: rows so far, what is missing, and where they are shown."""

    def __init__(self, device: torch.device, size: str, console: Console) -> None:
        self.device, self.size, self.console = device, size, console
        self.dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self.rows: list[record.Row] = []
        self.missing: list[str] = []
        self.machine: Machine = measure_machine(device, self.dtype)
        self.peak = Peak() if device.type == "cpu" else None

    def run(self, cases: Iterable[Case]) -> None:
        """Measure and show one case after the other."""
        self.console.print(
            f"{self.machine.flops / 1e9:,.0f} GFLOP/s in products of matrices, "
            f"{self.machine.bytes / 1e9:,.0f} GB/s in copies",
            highlight=False,
        )
        for case in cases:
            first = len(self.rows)
            self.measure(case)
            self.console.print()
            self.console.print(self.table(case, self.rows[first:]))
        for line in self.missing:
            self.console.print(f"missing: {line}", highlight=False, markup=False)

    def measure(self, case: Case) -> None:
        """Check every contender against float64, then time those that are right."""
        size = case.sizes[self.size]
        inputs = case.make(size, self.device, self.dtype)
        for backward in (False, True) if case.backward else (False,):
            passes = "forward + backward" if backward else "forward"
            with self.console.status(f"{case.title}, {passes}: checking"):
                errors = self.check(case, inputs, backward=backward)
            runs = {name: run for name, run in case.runs().items() if name in errors}
            with self.console.status(f"{case.title}, {passes}: timing"):
                timings = time_interleaved(
                    runs,
                    inputs,
                    backward=backward,
                    seconds=SECONDS[self.size],
                    device=self.device,
                )
                peaks = {
                    name: self.peak_of(case, name, run, inputs, size, backward=backward)
                    for name, run in runs.items()
                }
            flops, moved = case.work(size)
            bound = self.machine.seconds((flops * (3.5 if backward else 1), moved))
            for name, timing in timings.items():
                self.rows.append(
                    record.Row(
                        case.name,
                        passes,
                        name,
                        size,
                        *timing,
                        ratio=timing.median / timings[OURS].median if OURS in timings else None,
                        peak=peaks[name],
                        share_of_bound=bound / timing.median if bound > 0 else None,
                        error=errors[name],
                    )
                )

    def check(self, case: Case, inputs: Any, *, backward: bool) -> dict[str, float | None]:
        """Errors of those contenders that run and are right; the others go to `missing`."""
        truth = Truth(inputs, backward=backward)
        errors: dict[str, float | None] = {}
        for name, run in case.runs().items():
            try:
                if name in case.yardsticks:  # computes something else: there is nothing to compare
                    one_pass(run, inputs, backward=backward)
                    errors[name] = None
                    continue
                error = max(truth.error_of(run))
            except MissingError as reason:
                self.note(f"{case.name}, {name}: {reason}")
            except (RuntimeError, MemoryError) as failure:  # too large, most likely
                self.note(f"{case.name}, {name}: {str(failure).splitlines()[0][:100]}")
            else:
                if error <= ALLOWED[self.dtype]:
                    errors[name] = error
                else:
                    self.note(
                        f"{case.name}, {name}: no time for a wrong result (error {error:.1e})"
                    )
        return errors

    def note(self, line: str) -> None:
        """Once each."""
        if line not in self.missing:
            self.missing.append(line)

    def peak_of(
        self, case: Case, name: str, run: Run, inputs: Any, size: Size, *, backward: bool
    ) -> float | None:
        """Bytes beyond the inputs."""
        if self.peak is None:
            return cuda_peak(run, inputs, backward=backward)
        return self.peak.of(case.name, name, size, backward=backward)

    def table(self, case: Case, rows: list[record.Row]) -> Table:
        """The rows of one case."""
        size = ", ".join(f"{name} {value:,}" for name, value in case.sizes[self.size].items())
        table = plain_table(f"{case.title} ({size})")
        table.add_column("", min_width=20)
        for name in ("time", "spread", "ratio", "memory", "of bound", "error"):
            table.add_column(name, justify="right", no_wrap=True)
        passes = ""
        for row in rows:
            if row.passes != passes:
                passes = row.passes
                table.add_row(f"[bold]{passes}[/bold]")
            table.add_row(*cells(row))
        return table


def cells(row: record.Row) -> list[str]:
    """What is shown of a row."""
    return [
        row.contender,
        f"{1000 * row.median:,.4g} ms",
        f"±{row.spread:.0%}",
        times(row.ratio),
        "" if row.peak is None else f"{row.peak / MEGABYTE:,.0f} MB",
        "" if row.share_of_bound is None else f"{row.share_of_bound:.1%}",
        "" if row.error is None else f"{row.error:.0e}",
    ]


def times(ratio: float | None) -> str:
    """A ratio as it is shown; nothing where graphattn itself was not timed."""
    return "" if ratio is None else f"{ratio:.2f}x"


def run_bench(
    names: list[str],
    device: str,
    size: str,
    json: Path | None,
    compare: Path | None,
    console: Console,
) -> None:
    """Measure the named cases (all if none), write the record, compare with an older one."""
    known = {case.name: case for case in CASES}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"case must be one of {', '.join(known)}, got {unknown[0]!r}")
    as_choice("size", size, tuple(SECONDS))
    as_choice("device", device, ("cpu", "cuda"))
    older = None if compare is None else record.read(compare)
    if json is not None and not json.parent.is_dir():
        raise ValueError(f"--json: there is no folder {json.parent}")
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU")
    facts = record.provenance(where)
    console.print(", ".join(f"{k} {v}" for k, v in facts.items()), highlight=False, markup=False)
    bench = Bench(where, size, console)
    bench.run([known[name] for name in names] if names else CASES)
    if older is not None:
        console.print()
        console.print(comparison(older, bench.rows))
    if json is not None:
        record.write(json, facts, bench.rows, bench.missing)
        console.print(str(json), highlight=False, markup=False, soft_wrap=True)


def comparison(older: tuple[dict[str, Any], list[record.Row]], rows: list[record.Row]) -> Table:
    """Ratios to graphattn then and now: they hold on a busy machine, times do not."""
    facts, then = older
    before = {(r.case, r.passes, r.contender, tuple(r.size.items())): r for r in then}
    table = plain_table(f"Ratios, compared with {facts['date']} ({facts['commit']})")
    table.add_column("case", min_width=20)
    for name in ("then", "now", "time then", "time now"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        old = before.get((row.case, row.passes, row.contender, tuple(row.size.items())))
        if old is not None:
            table.add_row(
                f"{row.case}, {row.passes}: {row.contender}",
                times(old.ratio),
                times(row.ratio),
                f"{1000 * old.median:,.4g} ms",
                f"{1000 * row.median:,.4g} ms",
            )
    return table

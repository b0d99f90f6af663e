"""`graphattn bench`: every operation beside its peers, on the same inputs, in one process."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console

from graphattn.cli.bench import record, tables
from graphattn.cli.bench.cases import CASES, Case
from graphattn.cli.bench.record import Record
from graphattn.cli.bench.runner import SECONDS, Runner
from graphattn.graphs.arguments import as_choice


def run_bench(
    names: list[str],
    device: str,
    size: str,
    json: Path | None,
    compare: Path | None,
    plot: Path | None,
    console: Console,
) -> None:
    """Measure the named cases (all if none); write, draw and compare what was found."""
    cases = chosen(names)
    as_choice("size", size, tuple(SECONDS))
    as_choice("device", device, ("cpu", "cuda"))
    older = None if compare is None else record.read(compare)
    for option, path in (("--json", json), ("--plot", plot)):
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"{option}: there is no folder {path.parent}")
    if plot is not None:
        as_choice("--plot: the ending", plot.suffix, (".png", ".svg", ".pdf"))
        from graphattn.cli.bench import figure  # before the work, in case matplotlib is missing
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU")

    found = Record(record.provenance(where, size))
    facts = ", ".join(f"{name} {value}" for name, value in found.provenance.items())
    console.print(facts, highlight=False, markup=False)
    runner = Runner(where, size, found, console)
    console.print(
        f"{runner.machine.flops / 1e9:,.0f} GFLOP/s in products of matrices, "
        f"{runner.machine.bytes / 1e9:,.0f} GB/s in copies",
        highlight=False,
    )
    for case in cases:
        rows = runner.measure(case)
        console.print()
        console.print(tables.case_table(case, rows, found.slopes, size))
    console.print()
    console.print(tables.target_table(found.targets, size))
    for line in found.missing:
        console.print(f"missing: {line}", highlight=False, markup=False)
    if older is not None:
        console.print()
        console.print(tables.comparison(older, found.rows))
    if json is not None:
        found.write(json)
        console.print(str(json), highlight=False, markup=False, soft_wrap=True)
    if plot is not None:
        figure.draw(found).savefig(plot)
        console.print(str(plot), highlight=False, markup=False, soft_wrap=True)


def chosen(names: list[str]) -> list[Case]:
    """The cases of these names, all for none; "scaling" stands for those at several lengths."""
    known = {case.name: [case] for case in CASES}
    known["scaling"] = [case for case in CASES if case.lengths]
    for name in names:
        if name not in known:
            raise ValueError(f"case must be one of {', '.join(known)}, got {name!r}")
    return [case for name in names for case in known[name]] if names else CASES

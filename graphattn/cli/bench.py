"""`graphattn bench`: compare every operation with its peers, on the same inputs, in one process."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console

from graphattn.bench.cases.case import BenchmarkCase
from graphattn.bench.cases.catalogue import CASES
from graphattn.bench.cases.edges import OVER_EDGES
from graphattn.bench.cases.mixers import LENGTHS
from graphattn.bench.cases.small_layers import SMALL
from graphattn.bench.cases.whole import WHOLE
from graphattn.bench.measuring.runner import SECONDS, Runner, measure_all
from graphattn.bench.models.mixers import MIXERS
from graphattn.bench.reporting import record, tables
from graphattn.bench.reporting.record import Record, Row
from graphattn.cli.outputs import check_output
from graphattn.graphs.arguments import as_choice
from graphattn.near_names import did_you_mean


def run_bench(
    cases: list[str] | None,
    device: str,
    size: str,
    json: Path | None,
    resume: bool,
    compare: Path | None,
    plot: Path | None,
    console: Console,
) -> None:
    """Measure the named cases (all if none), and write, draw and compare the results.

    With `resume`, cases are left out that the file `json` has from an interrupted run.
    """
    to_measure = chosen(cases or [])
    as_choice("size", size, tuple(SECONDS))
    as_choice("device", device, ("cpu", "cuda"))
    older = None if compare is None else record.read(compare)
    check_output("--json", json)
    check_output("--plot", plot, (".png", ".svg", ".pdf"))
    if plot is not None:
        from graphattn.bench.reporting import figure
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device must be cpu, because there is no CUDA device, got cuda")

    if resume and json is None:
        raise ValueError("--resume needs --json, the file of the run that goes on")

    provenance = record.provenance(where, size)
    results = record.resumed(json, provenance) if resume and json else Record(provenance)
    runner = Runner(where, size, results, console)
    results.provenance["products of matrices"] = f"{runner.machine.flops / 1e9:,.0f} GFLOP/s"
    results.provenance["copies"] = f"{runner.machine.bytes / 1e9:,.0f} GB/s"
    facts = ", ".join(f"{name} {value}" for name, value in results.provenance.items())
    console.print(facts, highlight=False, markup=False)

    def show(case: BenchmarkCase, rows: list[Row]) -> None:
        console.print()
        console.print(tables.case_table(case, rows, results.slopes, size, device))

    measure_all(to_measure, runner, json, show)
    for line in results.missing:
        console.print(f"missing: {line}", highlight=False, markup=False)
    if older is not None:
        console.print()
        console.print(tables.comparison(older, results.rows))
    console.print()
    console.print(tables.target_table(results.targets, size))
    if json is not None:
        results.write(json)
        console.print(str(json), highlight=False, markup=False, soft_wrap=True)
    if plot is not None:
        figure.draw(results).savefig(plot)
        console.print(str(plot), highlight=False, markup=False, soft_wrap=True)


def chosen(names: list[str]) -> list[BenchmarkCase]:
    """Return the cases with these names, or all for none.

    The names "irregular", "models", "mixers" (or "mixers-2048" for one length), "transformers",
    "whole", "small-layers" and "scaling" stand for several cases.
    """
    known = {case.name: [case] for case in CASES}
    irregular = {"knn", *(case.name for case in OVER_EDGES)}
    known["irregular"] = [case for case in CASES if case.name in irregular]
    known["models"] = [case for case in CASES if case.name.startswith("gka-")]
    for tokens in LENGTHS:
        names_of_length = [f"mixer-{mixer}-{tokens}" for mixer in MIXERS]
        known[f"mixers-{tokens}"] = [case for case in CASES if case.name in names_of_length]
    known["mixers"] = [case for tokens in LENGTHS for case in known[f"mixers-{tokens}"]]
    known["transformers"] = [case for case in CASES if case.name.startswith("llama-")]
    known["whole"] = WHOLE
    known["small-layers"] = SMALL
    known["scaling"] = [case for case in CASES if case.lengths]
    for name in names:
        if name not in known:
            near = did_you_mean(name, known)
            raise ValueError(f"CASE must be one of {', '.join(known)}, got {name!r}{near}")
    return [case for name in names for case in known[name]] if names else CASES

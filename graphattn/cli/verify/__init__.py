"""`graphattn verify`: check every theorem on many cases, and show counterexamples for errata."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path

import torch
from rich.console import Console
from threadpoolctl import ThreadpoolController

import graphattn
from graphattn.cli.outputs import check_figures_can_be_drawn, check_output, write_json
from graphattn.cli.verify import (
    closed_classes,
    errata,
    filtering,
    matrix_weights,
    other_papers,
    tables,
    windows,
)
from graphattn.cli.verify.claims import SIZES, Claim, Erratum
from graphattn.graphs.arguments import as_choice
from graphattn.plain_tables import cells_of

CLAIMS = [
    value
    for module in (windows, filtering, matrix_weights, closed_classes, other_papers)
    for value in vars(module).values()
    if isinstance(value, Claim)
]
ERRATA = [value for value in vars(errata).values() if isinstance(value, Erratum)]


def run_verify(size: str, json: Path | None, html: Path | None, console: Console) -> bool:
    """Check all claims, print the results, and return whether all hold."""
    as_choice("size", size, tuple(SIZES))
    check_output("--json", json)
    check_output("--html", html)
    if html is not None:
        check_figures_can_be_drawn()  # before the work
    started = time.perf_counter()
    with _one_thread():
        outcomes = []
        for claim in CLAIMS:
            with console.status(claim.name):
                outcomes.append(claim.run(SIZES[size]))
        with console.status("counterexamples"):
            shown = [erratum.run() for erratum in ERRATA]
            more, total = closed_classes.more_than_groups(SIZES[size])
    claim_table, errata_table = tables.claim_table(outcomes), tables.errata_table(shown)
    for table in (claim_table, errata_table):
        console.print()
        console.print(table)
    summary = (
        f"{sum(len(outcome.cases) for outcome in outcomes):,} cases of {len(outcomes)} claims, "
        f"{len(shown)} errata, {time.perf_counter() - started:.0f} s. With top-k, {more} of "
        f"{total} random groups split into more closed classes than there were groups."
    )
    console.print(f"\n{summary}", highlight=False, markup=False)
    for line in tables.detail_lines(outcomes, shown):
        console.print(f"FAILED {line}", highlight=False, markup=False, style="red")
    passed = all(outcome.holds for outcome in outcomes) and all(item.holds for item in shown)
    if json is not None:
        provenance = {
            "graphattn": graphattn.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "date": date.today().isoformat(),
            "size": size,
        }
        write_json(json, {**provenance, "passed": passed, **tables.record(outcomes, shown)})
        console.print(str(json), highlight=False, markup=False, soft_wrap=True)
    if html is not None:
        from graphattn.cli.report import write_report
        from graphattn.cli.verify.figures import draw

        write_report(
            html,
            "Theory, verified" if passed else "Theory: something FAILED",
            intro=summary,
            figures=draw(outcomes),
            tables=[cells_of(claim_table), cells_of(errata_table)],
            facts={"size": size},
        )
        console.print(str(html), highlight=False, markup=False, soft_wrap=True)
    return passed


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread, which is faster for matrices this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadpoolController().limit(limits=1):  # numpy's and scipy's own
            yield
    finally:
        torch.set_num_threads(threads)

"""`graphattn demo`: run graphs and layers on real tokens, train two models, write a report."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from graphattn.cli.demo.graphs import graph_table, graphs_that_fit
from graphattn.cli.demo.layers import layer_table
from graphattn.cli.demo.sample import load_sample
from graphattn.cli.demo.training import FEWEST_TOKENS, train_models
from graphattn.cli.demo.verdict import training_table
from graphattn.cli.outputs import check_figures_can_be_drawn
from graphattn.plain_tables import cells_of


def run_demo(
    file: Path | None,
    tokens: int,
    seed: int,
    steps: int,
    out: Path,
    max_bytes: int,
    console: Console,
) -> None:
    """Read, print tables, train and draw; the last line printed is the path of the report."""
    started = time.perf_counter()
    check_figures_can_be_drawn()  # before a minute of work
    sample = load_sample(file, tokens, max_bytes)
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    console.print(f"[bold]{escape(sample.title)}[/bold]", highlight=False)
    for note in sample.notes:
        console.print(escape(note), highlight=False)
    tables: list[Table] = []

    def show(table: Table) -> None:
        tables.append(table)
        console.print()
        console.print(table)

    show(graph_table(graphs_that_fit(sample)))
    show(layer_table(sample, console))
    training = train_models(sample, steps, seed, console) if steps > 0 else None
    if training is not None:
        show(training_table(training))
    elif steps > 0:
        console.print(
            f"no training, because it needs {FEWEST_TOKENS} tokens or more", highlight=False
        )
    with console.status("drawing"):
        from graphattn.cli.demo.figures import draw_figures
        from graphattn.cli.report import write_report

        report = write_report(
            out / "report.html",
            sample.title,
            intro="Tokens are nodes, and every mechanism is message passing along explicit edges: "
            "build a token graph, apply a layer to it.",
            figures=draw_figures(sample, training, seed),
            tables=[cells_of(table) for table in tables],
            facts={"seed": seed},
        )
    console.print(f"done in {time.perf_counter() - started:.1f} s", highlight=False)
    typer.echo(os.fsencode(report))  # byte for byte: the console would replace emoji codes and tabs

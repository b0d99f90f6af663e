"""`graphattn clusters`: iterate attention without weights over an image or a table."""

from __future__ import annotations

import os
import time
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

from graphattn import dynamics
from graphattn.cli.clusters.images import MOST_PIXELS
from graphattn.cli.clusters.patterns import parse_pattern
from graphattn.cli.clusters.sample import load_tokens
from graphattn.cli.clusters.tables import clusterings, score_table, step_table
from graphattn.cli.outputs import check_figures_can_be_drawn
from graphattn.dynamics.arguments import need_scikit_learn
from graphattn.graphs.arguments import as_choice, as_int
from graphattn.plain_tables import cells_of


def run_clusters(
    file: Path,
    pattern: str,
    scaling: str,
    steps: int,
    mask: Path | None,
    labels: str | None,
    out: Path,
    console: Console,
    *,
    columns: str | None = None,
    per_class: int | None = None,
    seed: int = 0,
    size: int | None = None,
    global_tokens: str | None = None,
    most_pixels: int = MOST_PIXELS,
) -> None:
    """Read, simulate, score and draw; the last line printed is the path of the report."""
    started = time.perf_counter()
    # Check for missing packages before the work.
    check_figures_can_be_drawn()
    need_scikit_learn()
    as_choice("--scaling", scaling, ("sdp", "sq", "sq_inplace"))
    as_int("--steps", steps, 1)
    tokens = load_tokens(
        file,
        mask,
        labels,
        columns=columns,
        per_class=per_class,
        seed=as_int("--seed", seed, 0),
        size=size,
        most_pixels=most_pixels,
    )
    chosen = parse_pattern(
        pattern, len(tokens.x), is_image=tokens.image is not None, global_tokens=global_tokens
    )
    out.mkdir(parents=True, exist_ok=True)
    intro = [
        *tokens.notes,
        f"Pattern {chosen.name}: {chosen.meaning}.",
        f"Scaling {scaling}, features standardised, no weights (Attention Clusters, Eq. 1-3).",
    ]
    console.print(f"[bold]{escape(tokens.title)}[/bold]", highlight=False)
    for line in intro:
        console.print(line, highlight=False, markup=False)
    trajectory = dynamics.simulate(
        tokens.x,
        chosen.graph,
        steps=steps,
        scaling=scaling,  # type: ignore[arg-type]  # checked above
        progress=console.is_terminal,
    )
    with console.status("looking for clusters"):
        found = clusterings(tokens, trajectory)
        tables = [score_table(tokens, found, steps), step_table(trajectory)]
    for table in tables:
        console.print()
        console.print(table)
    with console.status("drawing"):
        from graphattn.cli.clusters.figures import draw
        from graphattn.cli.report import write_report

        report = write_report(
            out / "report.html",
            tokens.title,
            intro=" ".join(intro),
            figures=draw(tokens, found, trajectory, chosen.name),
            tables=[cells_of(table) for table in tables],
            facts={"pattern": chosen.name, "scaling": scaling, "steps": steps},
        )
    console.print(f"done in {time.perf_counter() - started:.1f} s", highlight=False)
    typer.echo(os.fsencode(report))  # byte for byte: a console would replace emoji codes and tabs

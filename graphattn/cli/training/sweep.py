"""`graphattn sweep`: run many trainings; print a line for each, and a table of all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from graphattn.cli.outputs import check_figures_can_be_drawn, check_output
from graphattn.cli.training.run_options import config_of, flag
from graphattn.plain_tables import counted, number_columns, plain_table, short
from graphattn.train import MixerSummary, resume_sweep, run_sweep, summarize_sweep
from graphattn.train.sweeps.results import RESULTS, TOLERANCE

Row = dict[str, Any]


def run_sweeps(
    out: Path | None,
    resume: Path | None,
    grid: dict[str, Any],
    processes: int,
    grace: int,
    retry_failed: bool,
    config: Path | None,
    plot: Path | None,
    options: dict[str, Any],
    console: Console,
) -> bool:
    """Start or continue a sweep; print the table, also after an interruption.

    Returns: Whether no trial failed.

    Raises: KeyboardInterrupt: if the sweep was asked to stop; everything is saved.
    """
    if plot is not None:
        check_figures_can_be_drawn()
        check_output("--plot", plot, (".png", ".svg", ".pdf"))
    how: dict[str, Any] = {"grace": grace, "retry_failed": retry_failed, "tell": tell}
    given = [name for name, value in {**grid, **options}.items() if value is not None]
    if resume is not None:
        if given or out is not None or config is not None:
            other = [*given, *["out"] * (out is not None), *["config"] * (config is not None)]
            names = ", ".join(map(flag, other))
            raise ValueError(
                f"--resume must be given without {names}, because it continues the sweep in its "
                "folder"
            )
        folder, work = resume, lambda: resume_sweep(resume, processes=processes, **how)
    else:
        missing = [name for name in ("mixers", "lrs") if grid[name] is None]
        missing += ["out"] * (out is None)
        if out is None or missing:
            names = ", ".join(map(flag, missing))
            raise ValueError(f"{names} must be given, or --resume FOLDER to continue a sweep")
        run_config = config_of(config, options).replace(out=os.fspath(out))
        options_of_grid = {**grid, "seeds": 1 if grid["seeds"] is None else grid["seeds"]}
        folder, work = (
            out,
            lambda: run_sweep(run_config, processes=processes, **options_of_grid, **how),
        )
    try:
        rows = work()
    except KeyboardInterrupt:
        typer.echo(f"stopped; continue with: graphattn sweep --resume {folder}", err=True)
        raise
    console.print(summary_table(rows))
    if plot is not None and any(row["status"] in RESULTS for row in rows):
        from matplotlib.figure import Figure

        from graphattn.plot import sweep_curves

        figure = Figure(figsize=(5.5, 3.6), layout="constrained")
        sweep_curves(rows, ax=figure.add_subplot())
        figure.savefig(plot, dpi=160)
    typer.echo(os.fspath(folder / "results.jsonl"))
    return not any(row["status"] == "failed" for row in rows)


def tell(row: Row) -> None:
    """Print a line for a finished trial."""
    name = Path(row["folder"]).name
    if row["status"] == "failed":
        typer.echo(f"{name}: failed: {row['error']}", err=True)
    elif row["status"] == "diverged":
        typer.echo(f"{name}: diverged at step {row['diverged_at']:,}")
    else:
        seconds = "" if row["seconds"] is None else f", {short(row['seconds'])} s"
        best = f"best {row['best_loss']:.4f} at step {row['best_step']:,}"
        typer.echo(f"{name}: loss {row['loss']:.4f}, {best}{seconds}")


def summary_table(rows: list[Row]) -> Table:
    table = plain_table("Validation loss at the last step, by mixer")
    table.add_column("mixer", no_wrap=True)
    number_columns(table, "best lr", "loss there", "stable lrs", "at the highest")
    table.add_column("trials")
    summaries = summarize_sweep(rows)
    for summary in summaries:
        table.add_row(escape(summary.mixer), *_numbers(summary), _counts(summary))
    caption = (
        "Loss: mean over seeds, ± standard deviation. Stable: rates around the best at which no "
        f"trial diverged and the loss is at most {TOLERANCE:g} above the best. At the highest: "
        "difference between the loss at the highest stable rate and the best loss."
    )
    rates = {row["lr"] for row in rows}
    ends = {min(rates), max(rates)} if len(rates) > 1 else set()
    if at_end := [summary.mixer for summary in summaries if summary.best_lr in ends]:
        caption += (
            f" {escape(', '.join(at_end))}: the best rate is the lowest or highest one tried, so "
            "rates beyond may be better, and the stable range may be larger."
        )
    table.caption = caption
    return table


def _numbers(summary: MixerSummary) -> list[str]:
    if summary.loss is None or summary.stable is None or summary.highest_loss is None:
        return ["-"] * 4
    spread = "" if summary.spread is None else f" ± {summary.spread:.4f}"
    low, high = summary.stable
    return [
        f"{summary.best_lr:g}",
        f"{summary.loss:.4f}{spread}",
        f"{low:g} to {high:g}",
        f"+{summary.highest_loss - summary.loss:.4f}",
    ]


def _counts(summary: MixerSummary) -> str:
    parts = [counted(summary.trials, "trial")]
    for name in ("diverged", "failed", "open"):
        if number := getattr(summary, name):
            parts.append(f"{number} {name}")
    return ", ".join(parts)

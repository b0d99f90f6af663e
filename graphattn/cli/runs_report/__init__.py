"""`graphattn report`: write training runs and sweeps as one page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from graphattn.cli.outputs import check_figures_can_be_drawn, check_output
from graphattn.cli.report import ReportSection, write_report
from graphattn.cli.runs_report import figures, run_page, sweep_page
from graphattn.cli.runs_report.reading import RunFiles, SweepFiles, read_folders
from graphattn.plain_tables import counted


def run_report(
    folders: Sequence[Path], out: Path | None, title: str | None, certify: bool, console: Console
) -> None:
    """Read folders, print their status, and write the page; the last line printed is its path."""
    check_figures_can_be_drawn()
    runs, sweeps = read_folders(folders)
    path = out or (folders[0] if len(folders) == 1 else Path()) / "report.html"
    check_output("--out", path, (".html",))
    lines = [f"{run.name}: {run_page.opening(run)}" for run in runs]
    lines += [f"{sweep.name}: {sweep_page.opening(sweep)}" for sweep in sweeps]
    folders_read: list[RunFiles | SweepFiles] = [*runs, *sweeps]
    lines += [f"{files.name}: {line}" for files in folders_read for line in files.missing]
    for line in lines:
        console.print(line, markup=False, highlight=False)
    with console.status("drawing, and certifying layers" if certify else "drawing"):
        intro, sections = _page(runs, sweeps, certify)
    if title is None:
        title = _title(runs, sweeps)
    written = write_report(path, title, intro=intro, sections=sections)
    typer.echo(os.fsencode(written))  # byte for byte: a console would replace emoji codes and tabs


def _page(
    runs: list[RunFiles], sweeps: list[SweepFiles], certify: bool
) -> tuple[str, list[ReportSection]]:
    """Return the introduction of the page and its parts, or one part per folder if several."""
    of_runs = [run_page.sections_of(run, certify=certify) for run in runs]
    of_sweeps = [sweep_page.sections_of(sweep) for sweep in sweeps]
    if len(runs) == 1 and not sweeps:
        missing = [ReportSection("Missing data", run_page.notes(runs[0]))]
        return run_page.opening(runs[0]), [*missing * bool(runs[0].missing), *of_runs[0]]
    if len(sweeps) == 1 and not runs:
        return sweep_page.opening(sweeps[0]), [ReportSection("Results", of_sweeps[0])]
    sections = []
    if len(runs) > 1:
        compared: list[Any] = [run_page.comparison(runs), *figures.comparison(runs)]
        sections.append(ReportSection("Comparison", compared))
    for run, of_run in zip(runs, of_runs, strict=True):
        parts: list[Any] = [run_page.opening(run), *run_page.notes(run), *of_run]
        sections.append(ReportSection(f"Run {run.name}", parts))
    for sweep, of_sweep in zip(sweeps, of_sweeps, strict=True):
        parts = [sweep_page.opening(sweep), *of_sweep]
        sections.append(ReportSection(f"Sweep {sweep.name}", parts))
    counts = [counted(len(runs), "run")] * bool(runs)
    counts += [counted(len(sweeps), "sweep")] * bool(sweeps)
    return f"{' and '.join(counts)}.", sections


def _title(runs: list[RunFiles], sweeps: list[SweepFiles]) -> str:
    if len(runs) == 1 and not sweeps:
        return f"Training run {runs[0].name}"
    if len(sweeps) == 1 and not runs:
        return f"Sweep {sweeps[0].name}"
    return "Training runs" if not sweeps else "Sweeps" if not runs else "Training runs and sweeps"

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
from graphattn.cli.runs_report import figures, run_sections, sweep_sections, tables
from graphattn.cli.runs_report.reading import FoundRun, FoundSweep, read_folders
from graphattn.plain_tables import counted


def run_report(
    folders: Sequence[Path], out: Path | None, title: str | None, certify: bool, console: Console
) -> None:
    """Read folders, print their status, and write the page; the last line printed is its path."""
    check_figures_can_be_drawn()
    runs, sweeps = read_folders(folders)
    path = out or (folders[0] if len(folders) == 1 else Path()) / "report.html"
    check_output("--out", path, (".html",))
    for run in runs:
        console.print(f"{run.name}: {run_sections.opening(run)}", markup=False, highlight=False)
    for sweep in sweeps:
        console.print(
            f"{sweep.name}: {sweep_sections.opening(sweep)}", markup=False, highlight=False
        )
    missing = [(own.name, line) for own in runs for line in own.missing]
    missing += [(own.name, line) for own in sweeps for line in own.missing]
    for name, line in missing:
        console.print(f"{name}: {line}", markup=False, highlight=False)
    with console.status("drawing, and certifying layers" if certify else "drawing"):
        intro, sections = _page(runs, sweeps, certify)
    if title is None:
        title = _title([run.name for run in runs], [sweep.name for sweep in sweeps])
    written = write_report(path, title, intro=intro, sections=sections)
    typer.echo(os.fsencode(written))  # byte for byte: a console would replace emoji codes and tabs


def _page(
    runs: list[FoundRun], sweeps: list[FoundSweep], certify: bool
) -> tuple[str, list[ReportSection]]:
    """Return the introduction of the page and its parts, or one part per folder if several."""
    of_runs = [run_sections.sections_of(run, certify=certify) for run in runs]
    of_sweeps = [sweep_sections.sections_of(sweep) for sweep in sweeps]
    if len(runs) == 1 and not sweeps:
        missing = [ReportSection("Missing data", run_sections.notes(runs[0]))]
        return run_sections.opening(runs[0]), [*missing * bool(runs[0].missing), *of_runs[0]]
    if len(sweeps) == 1 and not runs:
        return sweep_sections.opening(sweeps[0]), [ReportSection("Results", of_sweeps[0])]
    sections = []
    if len(runs) > 1:
        compared: list[Any] = [tables.comparison(runs), *figures.comparison(runs)]
        sections.append(ReportSection("Comparison", compared))
    for run, own in zip(runs, of_runs, strict=True):
        parts: list[Any] = [run_sections.opening(run), *run_sections.notes(run), *own]
        sections.append(ReportSection(f"Run {run.name}", parts))
    for sweep, others in zip(sweeps, of_sweeps, strict=True):
        sections.append(
            ReportSection(f"Sweep {sweep.name}", [sweep_sections.opening(sweep), *others])
        )
    counts = [counted(len(runs), "run")] * bool(runs)
    counts += [counted(len(sweeps), "sweep")] * bool(sweeps)
    return f"{' and '.join(counts)}.", sections


def _title(runs: list[str], sweeps: list[str]) -> str:
    if len(runs) == 1 and not sweeps:
        return f"Training run {runs[0]}"
    if len(sweeps) == 1 and not runs:
        return f"Sweep {sweeps[0]}"
    return "Training runs" if not sweeps else "Sweeps" if not runs else "Training runs and sweeps"

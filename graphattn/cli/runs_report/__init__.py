"""`graphattn report`: training runs and sweeps as one page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console

from graphattn.cli.outputs import check_figures_can_be_drawn, check_output
from graphattn.cli.tables import counted


def run_report(
    folders: Sequence[Path], out: Path | None, title: str | None, certify: bool, console: Console
) -> None:
    """Read the folders, say how each stands, write the page; its path is the last line printed."""
    check_figures_can_be_drawn()
    from graphattn.cli.report import Section, write_report
    from graphattn.cli.runs_report import figures, run_sections, sweep_sections, tables
    from graphattn.cli.runs_report.reading import read_folders

    path = out or (folders[0] if len(folders) == 1 else Path()) / "report.html"
    check_output("--out", path, (".html",))
    runs, sweeps = read_folders(folders)
    for run in runs:
        console.print(f"{run.name}: {run_sections.opening(run)}", markup=False, highlight=False)
    for sweep in sweeps:
        console.print(
            f"{sweep.name}: {sweep_sections.opening(sweep)}", markup=False, highlight=False
        )
    for found in (*runs, *sweeps):
        for line in found.missing:
            console.print(f"{found.name}: {line}", markup=False, highlight=False)
    intro = ""
    sections: list[Section] = []
    with console.status("drawing, and certifying layers" if certify else "drawing"):
        parts = {run.name: run_sections.sections_of(run, certify=certify) for run in runs}
        if len(runs) == 1 and not sweeps:
            [run] = runs
            intro = run_sections.opening(run)
            if run.missing:
                sections.append(Section("What is missing", run_sections.notes(run)))
            sections += parts[run.name]
        else:
            counts = [counted(len(runs), "run")] * bool(runs)
            counts += [counted(len(sweeps), "sweep")] * bool(sweeps)
            intro = f"{' and '.join(counts)}." if len(folders) > 1 else ""
            if len(runs) > 1:
                parts_of_all = [tables.comparison(runs), *figures.comparison(runs)]
                sections.append(Section("Comparison", parts_of_all))
            for run in runs:
                own = [run_sections.opening(run), *run_sections.notes(run), *parts[run.name]]
                sections.append(Section(f"Run {run.name}", own))
            for sweep in sweeps:
                sections.append(Section(f"Sweep {sweep.name}", sweep_sections.sections_of(sweep)))
    if title is None:
        title = _title([run.name for run in runs], [sweep.name for sweep in sweeps])
    written = write_report(path, title, intro=intro, sections=sections)
    typer.echo(os.fsencode(written))  # byte for byte: a console would replace emoji codes and tabs


def _title(runs: list[str], sweeps: list[str]) -> str:
    if len(runs) == 1 and not sweeps:
        return f"Training run {runs[0]}"
    if len(sweeps) == 1 and not runs:
        return f"Sweep {sweeps[0]}"
    return "Training runs" if not sweeps else "Sweeps" if not runs else "Training runs and sweeps"

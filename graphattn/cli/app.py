"""Commands, their options, and how they end: 0 when done, 2 with one line for bad input."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import graphattn
from graphattn.data import FileFormatError

app = typer.Typer(
    help="Token graphs and the layers on them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"graphattn {graphattn.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Token graphs and the layers on them."""


def _console() -> Console:
    """The terminal, at least 80 columns of it; what its encoding lacks becomes a question mark."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")
    console = Console(emoji=False)
    return console if console.width >= 80 else Console(emoji=False, width=80)


@app.command()
def demo(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="Text, FASTA, PDB or mmCIF, also gzipped. Default: the text of Python's manual."
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=1, max=2048, help="Use at most so many; 2048 take a minute.")
    ] = 512,
    seed: Annotated[
        int,
        typer.Option(min=0, max=2**63 - 1, help="Seed of the random weights and of the training."),
    ] = 0,
    steps: Annotated[
        int, typer.Option(min=0, help="Training steps of both models; 0 for no training.")
    ] = 200,
    out: Annotated[
        Path,
        typer.Option(
            file_okay=False, help="Folder for the figures and the report, which replace older ones."
        ),
    ] = Path("graphattn-demo"),
) -> None:
    """Send real tokens through every graph and layer, train two tiny models, write a report."""
    from graphattn.cli.demo import run_demo

    try:
        run_demo(file, tokens, seed, steps, out, _console())
    except (FileFormatError, ImportError, OSError) as error:  # ImportError: an extra is missing
        typer.echo(f"graphattn: {error}", err=True)
        raise typer.Exit(2) from None


@app.command()
def bench(
    cases: Annotated[
        list[str] | None,
        typer.Argument(
            help="Attention: complete, causal-window, window, krause, million. Other operations: "
            "consensus, knn, edges, fiedler, streaming. Growth with the number of tokens: "
            "doubling, scaling. Default: all of them.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda (not yet run on one).")] = "cpu",
    size: Annotated[
        str,
        typer.Option(
            help="small (two minutes), paper (half an hour: what the targets are stated for), "
            "or long."
        ),
    ] = "small",
    json: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write all numbers into this file.")
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Compare with an older --json file."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Draw the run into this file: .png, .svg or .pdf."),
    ] = None,
) -> None:
    """Time every operation beside its peers, on the same inputs, if its result is right.

    Contenders take turns: a busy machine slows all of them, and ratios hold.
    Results are checked against float64 before they are timed.
    Memory is the peak of a process of its own, beyond the inputs.
    The targets of the project stand beside what was measured.
    """
    from graphattn.cli.bench import run_bench

    try:
        run_bench(cases or [], device, size, json, compare, plot, _console())
    except (ImportError, ValueError, OSError) as error:
        typer.echo(f"graphattn: {error}", err=True)
        raise typer.Exit(2) from None

"""Commands, their options, and how they end: 0 when done, 2 with one line for bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import graphattn
from graphattn.cli.terminal import terminal
from graphattn.cli.training.commands import evaluate, generate, report, sweep, train
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


@app.command()
def demo(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="Text, FASTA, PDB or mmCIF, also gzipped, or a folder of structures. Default: the "
            "text of Python's manual."
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
    ] = 300,
    out: Annotated[
        Path,
        typer.Option(
            file_okay=False, help="Folder for the figures and the report, which replace older ones."
        ),
    ] = Path("graphattn-demo"),
    max_bytes: Annotated[
        int, typer.Option(min=1, help="Refuse files that hold more, counted after unpacking.")
    ] = 2**26,
) -> None:
    """Send real tokens through every graph and layer, train two tiny models, write a report."""
    from graphattn.cli.demo import run_demo

    try:
        run_demo(file, tokens, seed, steps, out, max_bytes, terminal())
    except (FileFormatError, ImportError, OSError) as error:  # ImportError: an extra is missing
        typer.echo(f"graphattn: {error}", err=True)
        raise typer.Exit(2) from None


@app.command()
def bench(
    cases: Annotated[
        list[str] | None,
        typer.Argument(
            help="Attention: complete, gka, causal-window, window, krause, krause-dense, million; "
            "over irregular graphs: knn-graph, knn-graph-reordered, radius-graph, bipartite, "
            "grid, longformer, crossover, or irregular for all seven and knn. Vision "
            "transformers: gka-tiny, gka-small, gka-base, or models for all three. Language "
            "models of Hugging Face in a window: llama-2048, llama-4096, llama-8192, "
            "llama-16384, or transformers for all four. Texts written token by token: "
            "generation. Other operations: consensus, consensus-layer, knn, edges, fiedler, "
            "streaming, streaming-krause. Whole models of ours, one mixer each, and their "
            "operations alone: mixer-dot-2048 and others, or mixers for all. Layers of 32 tokens: "
            "small-dot, small-rope, small-gka, small-krause, small-linear, small-consensus, or "
            "small-layers for all six. Growth with the number of tokens: scaling. Default: all of "
            "them.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda (not yet run on one).")] = "cpu",
    size: Annotated[
        str,
        typer.Option(
            help="small (minutes), paper (about an hour, on a GPU minutes: what the targets "
            "are stated for), or long."
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
        run_bench(cases or [], device, size, json, compare, plot, terminal())
    except (ImportError, ValueError, OSError) as error:
        typer.echo(f"graphattn: {error}", err=True)
        raise typer.Exit(2) from None


@app.command()
def embed(
    file: Annotated[Path, typer.Argument(help="FASTA, PDB or mmCIF, also gzipped; - for a pipe.")],
    model: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            help="Folder of a saved model: a ProteinModel, or a SequenceEncoder of proteins.",
            show_default=False,
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="In place of --model: a preset, protein-structure-1m for instance, with random "
            "weights.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="A file .npz or .pt, or a folder for one .npz per protein. Default: the name of "
            "FILE with -embeddings.npz, here.",
            show_default=False,
        ),
    ] = None,
    chains: Annotated[
        str | None,
        typer.Option(
            help="Of a structure: names separated by commas. Default: all.", show_default=False
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the random weights of a preset.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Records computed at once.")] = 8,
    max_bytes: Annotated[
        int, typer.Option(min=1, help="Refuse files that hold more, counted after unpacking.")
    ] = 2**28,
) -> None:
    """Write what a model makes of proteins: features per residue, and their means.

    A record of FASTA is a protein; so is a structure, all its chains together.
    """
    from graphattn.cli.embed import run_embed

    try:
        run_embed(file, model, preset, out, chains, seed, batch_size, max_bytes, terminal())
    except (ImportError, ValueError, OSError) as error:  # FileFormatError is a ValueError
        typer.echo(f"graphattn: {error}", err=True)
        raise typer.Exit(2) from None


@app.command()
def clusters(
    file: Annotated[Path, typer.Argument(help="An image (PNG, JPEG, ...) or a table (CSV).")],
    pattern: Annotated[
        str,
        typer.Option(
            help="Who sees whom: global, block:128, window:128 or longformer:512 (sizes in tokens; "
            "longformer:512 is 256 on each side, and one global token)."
        ),
    ] = "global",
    scaling: Annotated[
        str,
        typer.Option(help="sdp, sq (the same operator) or sq_inplace (what the paper measured)."),
    ] = "sdp",
    steps: Annotated[int, typer.Option(min=1, help="How often attention is applied.")] = 20,
    mask: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="An image of the same size: the true foreground, or a trimap (0/1/255, or "
            "Oxford-IIIT Pet's 1/2/3). Of a palette, its indices count.",
        ),
    ] = None,
    labels: Annotated[
        str | None,
        typer.Option(help="Column of the true classes: its name, or its number (-1: the last)."),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            help="Columns of a table that are features: names or numbers, separated by commas. "
            "Default: all columns of numbers.",
            show_default=False,
        ),
    ] = None,
    per_class: Annotated[
        int | None,
        typer.Option(
            help="Draw so many rows of every class of --labels at random. Default: all rows.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of that draw.")] = 0,
    size: Annotated[
        int | None,
        typer.Option(
            help="Longest side of an image in tokens; larger images are averaged over blocks of "
            "pixels. Default: 64.",
            show_default=False,
        ),
    ] = None,
    global_tokens: Annotated[
        str | None,
        typer.Option(
            help="Of longformer: token numbers or first, middle, last, separated by commas (-1 is "
            "the last). Default: the middle of an image, the first row of a table.",
            show_default=False,
        ),
    ] = None,
    max_pixels: Annotated[
        int, typer.Option(help="Refuse images with more pixels, before they are unpacked.")
    ] = 50_000_000,
    out: Annotated[
        Path,
        typer.Option(
            file_okay=False, help="Folder for the figures and the report, which replace older ones."
        ),
    ] = Path("graphattn-clusters"),
) -> None:
    """Iterate attention without weights over an image or a table, and score its clusters."""
    from graphattn.cli.clusters import run_clusters

    try:
        run_clusters(
            file,
            pattern,
            scaling,
            steps,
            mask,
            labels,
            out,
            terminal(),
            columns=columns,
            per_class=per_class,
            seed=seed,
            size=size,
            global_tokens=global_tokens,
            most_pixels=max_pixels,
        )
    except (ImportError, ValueError, OSError) as error:  # FileFormatError is a ValueError
        typer.echo(f"graphattn: {error}", err=True)
        raise typer.Exit(2) from None


@app.command()
def graph(
    kind: Annotated[
        str | None,
        typer.Argument(
            help="window-path, window-cycle, causal-window, causal, complete, block-window, "
            "dilated-window, longformer, bigbird, grid-window, grid-block, volume-window. Without "
            "one: a list of them all, with their options.",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Number of tokens.", show_default=False)
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(help="Tokens on each side; of a causal window, keys.", show_default=False),
    ] = None,
    self_loops: Annotated[
        bool | None, typer.Option(help="Whether a token sees itself.", show_default=False)
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(help="Tokens per block, on a grid along each axis.", show_default=False),
    ] = None,
    shift: Annotated[
        int | None, typer.Option(help="Of the borders of the blocks.", show_default=False)
    ] = None,
    dilation: Annotated[
        int | None, typer.Option(help="Tokens from one hop to the next.", show_default=False)
    ] = None,
    global_tokens: Annotated[
        int | None,
        typer.Option(help="How many see, and are seen by, all.", show_default=False),
    ] = None,
    random: Annotated[
        int | None, typer.Option(help="Random sources of every token.", show_default=False)
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of the random ones.", show_default=False)
    ] = None,
    height: Annotated[
        int | None, typer.Option(help="Of the image, in tokens.", show_default=False)
    ] = None,
    width: Annotated[
        int | None, typer.Option(help="Of the image, in tokens.", show_default=False)
    ] = None,
    radius: Annotated[
        int | None, typer.Option(help="Reach on the image.", show_default=False)
    ] = None,
    metric: Annotated[
        str | None, typer.Option(help="chebyshev or manhattan.", show_default=False)
    ] = None,
    class_token: Annotated[
        bool | None,
        typer.Option(help="Put a token that sees all before the image.", show_default=False),
    ] = None,
    depth: Annotated[
        int | None, typer.Option(help="Of the volume, in tokens.", show_default=False)
    ] = None,
    causal: Annotated[
        bool | None,
        typer.Option(help="Nobody looks ahead along any axis of a grid.", show_default=False),
    ] = None,
    border: Annotated[
        str | None,
        typer.Option(help="Of a grid: cut windows there, or shift them.", show_default=False),
    ] = None,
    step_size: Annotated[
        float | None,
        typer.Option(
            help="Of consensus. Default: the largest that changes no sign.", show_default=False
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Draw it into this file: .png, .svg or .pdf."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write a report with pictures.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write all numbers into this file.")
    ] = None,
) -> None:
    """Print facts about a token graph: sizes, reach, spectrum, memory, and a picture."""
    from graphattn.cli.graph import run_graph

    sizes = {
        "num_tokens": tokens,
        "window": window,
        "self_loops": self_loops,
        "block_size": block_size,
        "shift": shift,
        "dilation": dilation,
        "global_tokens": global_tokens,
        "num_random": random,
        "seed": seed,
        "height": height,
        "width": width,
        "radius": radius,
        "metric": metric,
        "class_token": class_token,
        "depth": depth,
        "causal": causal,
        "border": border,
    }
    try:
        run_graph(kind, sizes, step_size, plot, html, json, terminal())
    except (ImportError, ValueError, OSError) as error:
        typer.echo(f"graphattn: {error}", err=True)
        raise typer.Exit(2) from None


@app.command()
def models(
    name: Annotated[
        str | None,
        typer.Argument(
            help="One of the list: shows its arguments, and what every layer sees.",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Length of a sequence for which layers are shown. Default: 512.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """List the models that have a name, with their sizes, or show what one is made of."""
    from graphattn.cli.models import run_models

    try:
        run_models(name, tokens, terminal())
    except (ImportError, ValueError, OSError) as error:
        typer.echo(f"graphattn: {error}", err=True)
        raise typer.Exit(2) from None


@app.command()
def verify(
    size: Annotated[str, typer.Option(help="small (a minute) or full (some minutes).")] = "small",
    json: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write all numbers into this file.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write a report with pictures.")
    ] = None,
) -> None:
    """Try every theorem on many cases, and show every erratum on a counterexample.

    Ends with 1 if anything fails.
    """
    from graphattn.cli.verify import run_verify

    try:
        passed = run_verify(size, json, html, terminal())
    except (ImportError, ValueError, OSError) as error:
        typer.echo(f"graphattn: {error}", err=True)
        raise typer.Exit(2) from None
    if not passed:
        raise typer.Exit(1)


for command in (train, evaluate, generate, sweep, report):
    app.command(no_args_is_help=command in (train, sweep))(command)

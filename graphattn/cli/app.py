"""Commands and their options; the exit status is 0, or 2 with one line for bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from graphattn.cli.options import argument, option, with_options
from graphattn.cli.terminal import terminal
from graphattn.cli.training.commands import evaluate, generate, report, sweep, train
from graphattn.version import __version__


class Commands(TyperGroup):
    """Group of commands: for bad input, they print one line, and the exit status is 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # nobody reads the output any more, so there is nobody to tell
        except (ImportError, ValueError, OSError) as error:  # ImportError: an extra is missing
            typer.echo(f"graphattn: {error}", err=True)
            raise typer.Exit(2) from None


# A command imports what it needs after its options are checked: torch alone takes a second.
app = typer.Typer(
    cls=Commands,
    help="Token graphs and the layers on them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

JSON = option("json", Path, "Write all numbers into this JSON file.", dir_okay=False)
HTML = option("html", Path, "Write a report with figures into this HTML file.", dir_okay=False)


def out_folder(name: str) -> Any:
    """Return the option of the folder for a report."""
    text = "Folder for the report; an older one is replaced."
    return option("out", Path(name), text, file_okay=False)


def max_bytes(default: int) -> Any:
    """Return the option of the largest size of a file."""
    text = "Stop with an error if a file has more bytes than this, after unpacking."
    return option("max_bytes", default, text, min=1)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"graphattn {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Token graphs and the layers on them."""


@app.command()
@with_options(
    argument(
        "file",
        Path,
        "A text, FASTA, PDB or mmCIF file, also gzipped, or a folder of structures. Default: the "
        "text of Python's manual.",
    ),
    option("tokens", 512, "Maximal number of tokens; 2048 take a minute.", min=1, max=2048),
    option("seed", 0, "Seed of the random weights and of the training.", min=0, max=2**63 - 1),
    option("steps", 200, "Number of training steps of both models; 0 for no training.", min=0),
    out_folder("graphattn-demo"),
    max_bytes(2**26),
)
def demo(**options: Any) -> None:
    """Run every graph and layer on real tokens, train two tiny models, and write a report."""
    from graphattn.cli.demo import run_demo

    run_demo(**options, console=terminal())


@app.command()
@with_options(
    argument(
        "cases",
        list[str],
        "Attention: complete, gka, causal-window, window, krause, krause-dense, million; "
        "over irregular graphs: knn-graph, knn-graph-reordered, radius-graph, bipartite, "
        "grid, longformer, crossover, or irregular for all seven and knn. Vision "
        "transformers: gka-tiny, gka-small, gka-base, or models for all three. Language "
        "models of Hugging Face in a window: llama-2048, llama-4096, llama-8192, "
        "llama-16384, or transformers for all four. Texts written token by token: "
        "generation. Other operations: consensus, consensus-layer, knn, edges, fiedler, "
        "streaming, streaming-krause. Whole models of ours, one mixer each, and their "
        "operations alone: mixer-dot-2048 and others, or mixers for all. Encoders and causal "
        "models with every mixer, trained, and a token of generation: encoder-4096, causal-4096, "
        "causal-step-4096, encoder-32768, causal-32768, causal-step-32768, or whole for all six. "
        "Layers of 32 tokens: "
        "small-dot, small-rope, small-gka, small-krause, small-linear, small-consensus, or "
        "small-layers for all six. Growth with the number of tokens: scaling. Default: all of "
        "them.",
        show_default=False,
    ),
    option("device", "cpu", "cpu or cuda."),
    option(
        "size",
        "small",
        "small (takes minutes), paper (an hour, or minutes on a GPU; the size for which the "
        "targets are stated), or long.",
    ),
    JSON,
    option(
        "resume",
        False,
        "Go on with the file of --json: cases that an interrupted run has measured are not "
        "measured again.",
        "--resume",
    ),
    option(
        "compare",
        Path,
        "Compare with the file that an earlier run wrote with --json.",
        exists=True,
        dir_okay=False,
    ),
    option(
        "plot", Path, "Draw a figure of the run into this file: .png, .svg or .pdf.", dir_okay=False
    ),
)
def bench(**options: Any) -> None:
    """Time every operation and its peers on the same inputs, if the results are right.

    Contenders take turns, so other load slows all of them and hardly changes the ratios.
    Results are checked against float64 before they are timed.
    Memory is the peak of a separate process, without the inputs.
    The output shows the targets of the project next to the measurements.
    """
    from graphattn.cli.bench import run_bench

    run_bench(**options, console=terminal())


@app.command()
@with_options(
    argument(
        "file",
        Path,
        "A FASTA, PDB or mmCIF file, also gzipped; - reads standard input.",
        required=True,
    ),
    option(
        "model",
        Path,
        "Folder of a saved model, which is a ProteinModel or a SequenceEncoder of proteins.",
        file_okay=False,
    ),
    option(
        "preset",
        str,
        "Instead of --model: a preset with random weights, for instance protein-structure-1m.",
    ),
    option(
        "out",
        Path,
        "A .npz or .pt file, or a folder for one .npz file per protein. Default: the name of FILE "
        "with -embeddings.npz, in the current folder.",
    ),
    option(
        "chains",
        str,
        "Names of the chains of a structure, separated by commas. Default: all chains.",
    ),
    option("seed", 0, "Seed of the random weights of --preset.", min=0),
    option("batch_size", 8, "Number of records that are computed together.", min=1),
    max_bytes(2**28),
)
def embed(**options: Any) -> None:
    """Write the features that a model computes for proteins: per residue, and their means.

    Each record of a FASTA file is a protein; a structure with all its chains is one protein.
    """
    from graphattn.cli.embed import run_embed

    run_embed(**options, console=terminal())


@app.command()
@with_options(
    argument("file", Path, "An image (PNG, JPEG, ...) or a table (CSV).", required=True),
    option(
        "pattern",
        "global",
        "Which tokens see which: global, block:128, window:128 or longformer:512. Sizes are in "
        "tokens; longformer:512 is 256 tokens on each side, and one global token.",
    ),
    option(
        "scaling",
        "sdp",
        "Scaling: sdp, sq (the same operator), or sq_inplace (the one measured in the paper).",
    ),
    option("steps", 20, "Number of times that attention is applied.", min=1),
    option(
        "mask",
        Path,
        "An image of the same size with the true foreground, or a trimap (0/1/255, or 1/2/3 as in "
        "Oxford-IIIT Pet). In an image with a palette, the indices are the classes.",
        dir_okay=False,
    ),
    option("labels", str, "Column of the true classes: its name or its number (-1 is the last)."),
    option(
        "columns",
        str,
        "Columns of the features of a table: names or numbers, separated by commas. Default: all "
        "numeric columns.",
    ),
    option(
        "per_class",
        int,
        "Number of rows per class of --labels, drawn at random. Default: all rows.",
    ),
    option("seed", 0, "Seed for drawing the rows of --per-class."),
    option(
        "size",
        int,
        "Maximal side length of an image in tokens; larger images are averaged over blocks of "
        "pixels. Default: 64.",
    ),
    option(
        "global_tokens",
        str,
        "Global tokens of longformer: numbers or first, middle, last, separated by commas (-1 is "
        "the last). Default: the middle of an image, the first row of a table.",
    ),
    option(
        "max_pixels",
        50_000_000,
        "Stop with an error if an image has more pixels; this is checked before unpacking.",
    ),
    out_folder("graphattn-clusters"),
)
def clusters(**options: Any) -> None:
    """Iterate attention without weights over an image or a table, and score its clusters."""
    from graphattn.cli.clusters import run_clusters

    run_clusters(**options, console=terminal())


GRAPH_SIZES: dict[str, tuple[type, str]] = {
    "tokens": (int, "Number of tokens."),
    "window": (int, "Number of tokens on each side; for causal-window, the number of keys."),
    "self_loops": (bool, "Whether a token sees itself."),
    "block_size": (int, "Number of tokens per block; on a grid, along each axis."),
    "shift": (int, "Shift of the borders of the blocks, in tokens."),
    "dilation": (int, "Distance between neighbouring hops, in tokens."),
    "global_tokens": (int, "Number of tokens that see all tokens and are seen by all."),
    "random": (int, "Number of random sources of every token."),
    "seed": (int, "Seed of the random sources."),
    "height": (int, "Height of the image or volume, in tokens."),
    "width": (int, "Width of the image or volume, in tokens."),
    "radius": (int, "Radius of the window on the image or volume, in tokens."),
    "metric": (str, "Distance on the grid: chebyshev or manhattan."),
    "class_token": (bool, "Add a token before the image that sees all and is seen by all."),
    "depth": (int, "Depth of the volume, in tokens."),
    "causal": (bool, "On a grid: no token sees later tokens along any axis."),
    "border": (str, "At the border of a grid: cut windows, or shift them inside."),
}


@app.command()
@with_options(
    argument(
        "kind",
        str,
        "Kind of graph: window-path, window-cycle, causal-window, causal, complete, "
        "block-window, dilated-window, longformer, causal-longformer, bigbird, grid-window, "
        "grid-block or volume-window. Without it, the command lists all kinds with their options.",
        show_default=False,
    ),
    *(option(name, kind, text) for name, (kind, text) in GRAPH_SIZES.items()),
    option(
        "step_size",
        float,
        "Step size of consensus. Default: the largest with which no mode changes sign.",
    ),
    option("plot", Path, "Draw the graph into this file: .png, .svg or .pdf.", dir_okay=False),
    HTML,
    JSON,
)
def graph(**options: Any) -> None:
    """Print facts about a token graph (sizes, reach, spectrum, memory), and draw it."""
    from graphattn.cli.graph import run_graph

    names = {"tokens": "num_tokens", "random": "num_random"}  # of the builders
    sizes = {names.get(name, name): options.pop(name) for name in GRAPH_SIZES}
    run_graph(sizes=sizes, **options, console=terminal())


@app.command(no_args_is_help=True)
@with_options(
    argument(
        "subject",
        str,
        "A PDB or mmCIF file (with a model also FASTA), or a kind of graph: `graphattn graph` "
        "lists the kinds with their options.",
        required=True,
    ),
    option("out", Path("explore.html"), "The HTML file that is written.", dir_okay=False),
    option("neighbors", int, "For a structure: number of nearest residues that one sees.", min=1),
    option("model", Path, "Folder of a saved protein model, whose attention is shown."),
    option("preset", str, "Instead of --model: a preset with random weights."),
    option("chains", str, "Names of the chains of a structure, separated by commas."),
    option("tokens", int, GRAPH_SIZES["tokens"][1], "--tokens", "--num-tokens"),
    *(option(n, kind, text) for n, (kind, text) in GRAPH_SIZES.items() if n != "tokens"),
)
def explore(**options: Any) -> None:
    """Write an HTML page to explore a graph, a protein structure or the attention over it.

    If the kind of graph has a window, a radius or blocks, a slider has several values of it.
    """
    from graphattn.cli.explore import run_explore

    names = {"tokens": "num_tokens", "random": "num_random"}  # of the builders
    sizes = {names.get(name, name): options.pop(name) for name in GRAPH_SIZES}
    run_explore(sizes=sizes, **options, console=terminal())


@app.command()
@with_options(
    argument(
        "name",
        str,
        "Name of a model in the list; shows its arguments, and what every layer sees.",
        show_default=False,
    ),
    option(
        "tokens",
        int,
        "Length of the sequence for which the graphs of the layers are shown. Default: 512.",
        min=1,
    ),
)
def models(**options: Any) -> None:
    """List the presets of models with their sizes, or show the layers of one of them."""
    from graphattn.cli.models import run_models

    run_models(**options, console=terminal())


@app.command()
@with_options(
    option("size", "small", "small (takes a minute) or full (takes several minutes)."), JSON, HTML
)
def verify(**options: Any) -> None:
    """Check every theorem, and show counterexamples for errata of the consensus paper.

    The exit status is 1 if a check fails.
    """
    from graphattn.cli.verify import run_verify

    passed = run_verify(**options, console=terminal())
    if not passed:
        raise typer.Exit(1)


for command in (train, evaluate, generate, sweep, report):
    app.command(no_args_is_help=command in (train, sweep))(command)

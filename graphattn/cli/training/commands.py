"""The commands of training, their options, and how they end."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from graphattn.cli.terminal import terminal
from graphattn.cli.training.run_options import with_run_options


@with_run_options()
def train(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG]", help="A YAML file of these options.", show_default=False
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="The same file, as an option.", show_default=False)
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Go on with the run in this folder; --steps may grow.", show_default=False
        ),
    ] = None,
    *,
    options: dict[str, Any],
) -> None:
    """Train a model on a file or folder of data, or go on with a run.

    Options take the place of what the file says.
    A second start of an interrupted run goes on from its last checkpoint.
    Ends with 0 when done, 1 if training failed (a full disk), 2 for bad input, 3 if the loss ran
    away, 130 after Control-C.
    """
    from graphattn.cli.training.train import run_train

    try:
        if file is not None and config is not None:
            raise ValueError("CONFIG and --config are the same: give one of them")
        code = run_train(config if file is None else file, resume, options, terminal())
    except (ImportError, ValueError, OSError) as error:  # FileFormatError is a ValueError
        typer.echo(f"graphattn: {error}", err=True)
        raise typer.Exit(2) from None
    if code:
        raise typer.Exit(code)


def evaluate(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    data: Annotated[
        str | None,
        typer.Option(
            help="Another file or folder, all of it. Default: a part of the run's own.",
            show_default=False,
        ),
    ] = None,
    split: Annotated[
        str, typer.Option(help="Of the run's own data: train, validation, test or all.")
    ] = "test",
    pseudo_tokens: Annotated[
        int,
        typer.Option(
            min=0,
            help="Of masked models: mask so many tokens one at a time, for the pseudo-perplexity.",
        ),
    ] = 512,
    batch_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Default: those of the training.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of masks and noise.")] = 0,
) -> None:
    """Measure a trained model: loss, perplexity, calibration, beside guessing.

    The numbers are added to evaluation.json in the folder of the run.
    """
    from graphattn.cli.training.evaluate import run_evaluate

    try:
        run_evaluate(run, data, split, pseudo_tokens, batch_tokens, seed, terminal())
    except (ImportError, ValueError, OSError) as error:
        typer.echo(f"graphattn: {error}", err=True)
        raise typer.Exit(2) from None


def generate(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    prompt: Annotated[
        str,
        typer.Option(
            help="What the text begins with. Of proteins and nucleotides, with a model that "
            "unmasks, _ is a gap to fill."
        ),
    ] = "",
    tokens: Annotated[int, typer.Option(min=1, help="How many are written.")] = 400,
    temperature: Annotated[
        float, typer.Option(min=0, help="Below 1 for likelier texts; 0 for the likeliest.")
    ] = 1.0,
    top_k: Annotated[
        int | None,
        typer.Option(min=1, help="Draw from so many likeliest tokens.", show_default=False),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Draw from the fewest likeliest tokens of this probability.", show_default=False
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(min=0, max=2**63 - 1, help="Of the draws; the next sample has the next."),
    ] = 0,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Of unmasking, for masked models and diffusion. Default: one per token.",
            show_default=False,
        ),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="How many texts.")] = 1,
    method: Annotated[
        str | None,
        typer.Option(
            help="Of unmasking: ancestral, tweedie or top-probability. Default: ancestral for "
            "diffusion, top-probability for masked models.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write text or sequences with a trained model, as they come.

    They are added to samples.jsonl in the folder of the run.
    """
    from graphattn.cli.training.generate import run_generate

    try:
        run_generate(
            run, prompt, tokens, temperature, top_k, top_p, seed, steps, samples, method, terminal()
        )
        typer.echo()
    except (ImportError, ValueError, OSError) as error:
        typer.echo(f"graphattn: {error}", err=True)
        raise typer.Exit(2) from None


@with_run_options("mixer", "lr", "seed", "out")
def sweep(
    mixers: Annotated[
        str | None,
        typer.Option(help="Names separated by commas: dot,consensus,mix,dot-window."),
    ] = None,
    lrs: Annotated[
        str | None,
        typer.Option(
            help="Learning rates: 1e-4,3e-4, or 1e-4..5e-2:7 for 7 values from 1e-4 to 5e-2, each "
            "the same multiple of the one before."
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="Trainings of every combination. Default: 1.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Folder of the sweep. A second start continues it."),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            help="Go on with the sweep in this folder, or help those who work on it.",
        ),
    ] = None,
    processes: Annotated[
        int,
        typer.Option(min=1, help="That train at once, each with its share of the cores."),
    ] = 1,
    grace: Annotated[
        int,
        typer.Option(
            min=2,
            help="Seconds without a sign of life after which a process on another machine counts "
            "as killed.",
        ),
    ] = 60,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Train again what failed before.")
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="YAML with options; those given here come first."
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Draw the curves into this file: .png, .svg or .pdf."),
    ] = None,
    *,
    options: dict[str, Any],
) -> None:
    """Train with every mixer at every learning rate, and compare.

    Started several times, also on several machines, all work on the same sweep.
    A training that diverges is a result; one that was killed goes on from its checkpoint.
    Ends with 1 if a training failed.
    """
    from graphattn.cli.training.sweep import run_sweeps

    grid = {"mixers": mixers, "lrs": lrs, "seeds": seeds}
    try:
        is_whole = run_sweeps(
            out, resume, grid, processes, grace, retry_failed, config, plot, options, terminal()
        )
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except (ImportError, ValueError, OSError) as error:
        typer.echo(f"graphattn: {error}", err=True)
        raise typer.Exit(2) from None
    if not is_whole:
        raise typer.Exit(1)


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER", help="Folders of runs and of sweeps."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="The page, which replaces an older one. Default: report.html in the folder, or "
            "here where there are several.",
            show_default=False,
        ),
    ] = None,
    title: Annotated[str | None, typer.Option(help="Of the page.", show_default=False)] = None,
    certify: Annotated[
        bool,
        typer.Option(help="Certify the layers of trained models, a second or so for each."),
    ] = True,
) -> None:
    """Write training runs and sweeps as one page: curves, tables, samples, certificates.

    Runs that diverged, were interrupted or still go on are shown as what they are.
    What is absent or damaged in a folder is said in a line; all else is shown.
    """
    from graphattn.cli.runs_report import run_report

    try:
        run_report(folders, out, title, certify, terminal())
    except (ImportError, ValueError, OSError) as error:
        typer.echo(f"graphattn: {error}", err=True)
        raise typer.Exit(2) from None

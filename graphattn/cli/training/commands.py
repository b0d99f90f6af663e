"""The commands for training, with their options and exit statuses."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from graphattn.cli.options import unset
from graphattn.cli.terminal import terminal
from graphattn.cli.training.run_options import with_run_options


@with_run_options()
def train(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG]", help="A YAML file with these options.", show_default=False
        ),
    ] = None,
    config: Annotated[
        Path | None,
        unset(help="The same file as CONFIG, given as an option."),
    ] = None,
    resume: Annotated[
        Path | None,
        unset(help="Continue the run in this folder; --steps may be larger than before."),
    ] = None,
    *,
    options: dict[str, Any],
) -> None:
    """Train a model on a file or folder of data, or continue a run.

    Options replace those of the file.
    If an interrupted run is started again, it continues from its last checkpoint.
    The exit status is 0 when done, 1 if training failed (for instance, the disk is full), 2 for
    bad input, 3 if the run diverged, 130 after Control-C.
    """
    from graphattn.cli.training.train import run_train

    if file is not None and config is not None:
        raise ValueError("CONFIG and --config must not both be given: they mean the same file")
    code = run_train(config if file is None else file, resume, options, terminal())
    if code:
        raise typer.Exit(code)


def evaluate(
    run: Annotated[Path, typer.Argument(help="Folder of a training run.")],
    data: Annotated[
        str | None,
        unset(
            help="Another file or folder, which is used completely. Default: a part of the data "
            "of the run."
        ),
    ] = None,
    split: Annotated[
        str, typer.Option(help="Part of the data of the run: train, validation, test or all.")
    ] = "test",
    pseudo_tokens: Annotated[
        int,
        typer.Option(
            min=0,
            help="For masked models: number of tokens that are masked one at a time, for the "
            "pseudo-perplexity.",
        ),
    ] = 512,
    batch_tokens: Annotated[
        int | None,
        unset(min=1, help="Number of tokens per batch. Default: as in training."),
    ] = None,
    length: Annotated[
        int | None,
        unset(
            min=1,
            help="Largest number of tokens that the model reads together. Default: whole "
            "structures; for other data, the length of the run.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of masks and noise.")] = 0,
) -> None:
    """Evaluate a trained model: loss, perplexity, calibration, compared with guessing.

    The numbers are added to evaluation.json in the folder of the run.
    """
    from graphattn.cli.training.evaluate import run_evaluate

    run_evaluate(run, data, split, pseudo_tokens, batch_tokens, length, seed, terminal())


def generate(
    run: Annotated[Path, typer.Argument(help="Folder of a training run.")],
    prompt: Annotated[
        str,
        typer.Option(
            help="Beginning of the text. For proteins and nucleotides, with a masked or "
            "diffusion model, each _ is a position to fill."
        ),
    ] = "",
    tokens: Annotated[int, typer.Option(min=1, help="Maximal number of tokens to write.")] = 400,
    temperature: Annotated[
        float,
        typer.Option(min=0, help="Below 1: more likely texts; 0: always the most likely token."),
    ] = 1.0,
    top_k: Annotated[
        int | None,
        unset(min=1, help="Draw from this number of most likely tokens."),
    ] = None,
    top_p: Annotated[
        float | None,
        unset(help="Draw from the smallest set of most likely tokens with this probability."),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            min=0,
            max=2**63 - 1,
            help="Seed of the random draws; each further sample uses the next seed.",
        ),
    ] = 0,
    steps: Annotated[
        int | None,
        unset(
            min=1, help="Number of steps for masked and diffusion models. Default: one per token."
        ),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Number of texts.")] = 1,
    method: Annotated[
        str | None,
        unset(
            help="Method for masked and diffusion models: ancestral, tweedie or "
            "top-probability. Default: ancestral for diffusion, top-probability for masked "
            "models."
        ),
    ] = None,
) -> None:
    """Generate text or sequences with a trained model, printed token by token if possible.

    The samples are added to samples.jsonl in the folder of the run.
    """
    from graphattn.cli.training.generate import run_generate

    run_generate(
        run, prompt, tokens, temperature, top_k, top_p, seed, steps, samples, method, terminal()
    )
    typer.echo()


@with_run_options("mixer", "lr", "seed", "out")
def sweep(
    mixers: Annotated[
        str | None,
        typer.Option(help="Names of mixers, separated by commas: dot,consensus,mix,dot-window."),
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
        unset(
            min=1, help="Number of training runs per combination, with different seeds. Default: 1."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            file_okay=False, help="Folder of the sweep. If it exists, the sweep is continued."
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            help="Continue the sweep in this folder, or help other processes that work on it.",
        ),
    ] = None,
    processes: Annotated[
        int,
        typer.Option(
            min=1,
            help="Number of processes that train at the same time, each with its share of the "
            "cores.",
        ),
    ] = 1,
    grace: Annotated[
        int,
        typer.Option(
            min=2,
            help="Number of seconds without a heartbeat after which a process on another "
            "machine counts as killed.",
        ),
    ] = 60,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Train failed trials again.")
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="A YAML file with options; options on the command line replace those of the file.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Draw the curves into this file: .png, .svg or .pdf."),
    ] = None,
    *,
    options: dict[str, Any],
) -> None:
    """Train with every mixer at every learning rate, and compare the results.

    If it is started several times, also on several machines, all work on the same sweep.
    A run that diverges is a result; a run that was killed continues from its checkpoint.
    The exit status is 1 if a run failed.
    """
    from graphattn.cli.training.sweep import run_sweeps

    grid = {"mixers": mixers, "lrs": lrs, "seeds": seeds}
    try:
        is_whole = run_sweeps(
            out, resume, grid, processes, grace, retry_failed, config, plot, options, terminal()
        )
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if not is_whole:
        raise typer.Exit(1)


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER", help="Folders of runs and of sweeps."),
    ],
    out: Annotated[
        Path | None,
        unset(
            dir_okay=False,
            help="The HTML file to write; an older one is replaced. Default: report.html in the "
            "folder, or in the current folder if there are several.",
        ),
    ] = None,
    title: Annotated[str | None, unset(help="Title of the page.")] = None,
    certify: Annotated[
        bool,
        typer.Option(
            help="Compute certificates of the layers of trained models, about a second for each "
            "layer."
        ),
    ] = True,
) -> None:
    """Write training runs and sweeps as one page: curves, tables, samples, certificates.

    Runs that diverged, were interrupted or are still running are marked.
    A note says what is missing or damaged in a folder; everything else is shown.
    """
    from graphattn.cli.runs_report import run_report

    run_report(folders, out, title, certify, terminal())

"""The commands for training, with their options and exit statuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from graphattn.cli.options import argument, option, with_options
from graphattn.cli.terminal import terminal
from graphattn.cli.training.run_options import run_options

RUN = argument("run", Path, "Folder of a training run.", required=True)
LARGEST_SEED = 2**63 - 1


def _given_run_options(options: dict[str, Any], *left_out: str) -> dict[str, Any]:
    """Take the options of RunConfig out of all options; return the text of those given."""
    texts = {each.name: options.pop(each.name) for each in run_options(*left_out)}
    return {name: text for name, text in texts.items() if text is not None}


@with_options(
    argument(
        "file", Path, "A YAML file with these options.", metavar="[CONFIG]", show_default=False
    ),
    option("config", Path, "The same file as CONFIG, given as an option."),
    option("resume", Path, "Continue the run in this folder; --steps may be larger than before."),
    *run_options(),
)
def train(*, file: Path | None, config: Path | None, resume: Path | None, **options: Any) -> None:
    """Train a model on a file or folder of data, or continue a run.

    Options replace those of the file.
    If an interrupted run is started again, it continues from its last checkpoint.
    The exit status is 0 when done, 1 if training failed (for instance, the disk is full), 2 for
    bad input, 3 if the run diverged, 130 after Control-C.
    """
    from graphattn.cli.training.train import run_train

    if file is not None and config is not None:
        raise ValueError("CONFIG and --config must not both be given: they mean the same file")
    given = _given_run_options(options)
    code = run_train(config if file is None else file, resume, given, terminal())
    if code:
        raise typer.Exit(code)


@with_options(
    RUN,
    option(
        "data",
        str,
        "Another file or folder, which is used completely. Default: a part of the data of the run.",
    ),
    option("split", "test", "Part of the data of the run: train, validation, test or all."),
    option(
        "pseudo_tokens",
        512,
        "For masked models: number of tokens that are masked one at a time, for the "
        "pseudo-perplexity.",
        min=0,
    ),
    option("batch_tokens", int, "Number of tokens per batch. Default: as in training.", min=1),
    option(
        "length",
        int,
        "Largest number of tokens that the model reads together. Default: whole structures; for "
        "other data, the length of the run.",
        min=1,
    ),
    option("seed", 0, "Seed of masks and noise.", min=0, max=LARGEST_SEED),
)
def evaluate(*, run: Path, **options: Any) -> None:
    """Evaluate a trained model: loss, perplexity, calibration, compared with guessing.

    The numbers are added to evaluation.json in the folder of the run.
    """
    from graphattn.cli.training.evaluate import run_evaluate

    run_evaluate(run, **options, console=terminal())


@with_options(
    RUN,
    option(
        "prompt",
        "",
        "Beginning of the text. For proteins and nucleotides, with a masked or diffusion model, "
        "each _ is a position to fill.",
    ),
    option("tokens", 400, "Maximal number of tokens to write.", min=1),
    option(
        "temperature",
        1.0,
        "Below 1: more likely texts; 0: always the most likely token.",
        min=0,
    ),
    option("top_k", int, "Draw from this number of most likely tokens.", min=1),
    option(
        "top_p", float, "Draw from the smallest set of most likely tokens with this probability."
    ),
    option(
        "seed",
        0,
        "Seed of the random draws; each further sample uses the next seed.",
        min=0,
        max=LARGEST_SEED,
    ),
    option(
        "steps",
        int,
        "Number of steps for masked and diffusion models. Default: one per token.",
        min=1,
    ),
    option("samples", 1, "Number of texts.", min=1),
    option(
        "method",
        str,
        "Method for masked and diffusion models: ancestral, tweedie or top-probability. Default: "
        "ancestral for diffusion, top-probability for masked models.",
    ),
)
def generate(*, run: Path, **options: Any) -> None:
    """Generate text or sequences with a trained model, printed token by token if possible.

    The samples are added to samples.jsonl in the folder of the run.
    """
    from graphattn.cli.training.generate import run_generate

    run_generate(run, **options, console=terminal())
    typer.echo()


OF_TRIALS = ("mixer", "lr", "seed", "out")  # what the trials of a sweep differ in


@with_options(
    option("mixers", str, "Names of mixers, separated by commas: dot,consensus,mix,dot-window."),
    option(
        "lrs",
        str,
        "Learning rates: 1e-4,3e-4, or 1e-4..5e-2:7 for 7 values from 1e-4 to 5e-2, each the same "
        "multiple of the one before.",
    ),
    option(
        "seeds",
        int,
        "Number of training runs per combination, with different seeds. Default: 1.",
        min=1,
    ),
    option(
        "grid",
        list[str],
        "Further options with several values, of the model, of training or of mixers: "
        "window=1,2,4. May be given several times; every combination is trained.",
        metavar="NAME=VALUES",
    ),
    option(
        "out",
        Path,
        "Folder of the sweep. If it exists, the sweep is continued.",
        file_okay=False,
    ),
    option(
        "resume",
        Path,
        "Continue the sweep in this folder, or help other processes that work on it.",
        file_okay=False,
    ),
    option(
        "processes",
        1,
        "Number of processes that train at the same time, each with its share of the cores.",
        min=1,
    ),
    option(
        "grace",
        60,
        "Number of seconds without a heartbeat after which a process on another machine counts as "
        "killed.",
        min=2,
    ),
    option("retry_failed", False, "Train failed trials again.", "--retry-failed"),
    option(
        "config",
        Path,
        "A YAML file with options; options on the command line replace those of the file.",
        exists=True,
        dir_okay=False,
    ),
    option("plot", Path, "Draw the curves into this file: .png, .svg or .pdf.", dir_okay=False),
    *run_options(*OF_TRIALS),
)
def sweep(**options: Any) -> None:
    """Train with every mixer at every learning rate, and compare the results.

    If it is started several times, also on several machines, all work on the same sweep.
    A run that diverges is a result; a run that was killed continues from its checkpoint.
    The exit status is 1 if a run failed.
    """
    from graphattn.cli.training.sweep import run_sweeps

    grid = {name: options.pop(name) for name in ("mixers", "lrs", "seeds", "grid")}
    given = _given_run_options(options, *OF_TRIALS)
    try:
        is_whole = run_sweeps(grid=grid, options=given, **options, console=terminal())
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if not is_whole:
        raise typer.Exit(1)


@with_options(
    argument(
        "folders", list[Path], "Folders of runs and of sweeps.", metavar="FOLDER", required=True
    ),
    option(
        "out",
        Path,
        "The HTML file to write; an older one is replaced. Default: report.html in the folder, or "
        "in the current folder if there are several.",
        dir_okay=False,
    ),
    option("title", str, "Title of the page."),
    option(
        "certify",
        True,
        "Compute certificates of the layers of trained models, about a second for each layer.",
    ),
)
def report(**options: Any) -> None:
    """Write training runs and sweeps as one page: curves, tables, samples, certificates.

    Runs that diverged, were interrupted or are still running are marked.
    A note says what is missing or damaged in a folder; everything else is shown.
    """
    from graphattn.cli.runs_report import run_report

    run_report(**options, console=terminal())

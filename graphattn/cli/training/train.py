"""`graphattn train`: train a model on a file of data, or from a config."""

from __future__ import annotations

import logging
import os
import shlex
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from graphattn.cli.training.run_options import config_of, flag
from graphattn.plain_tables import counted, number_columns, plain_table, short
from graphattn.train import Prepared, Run, prepare, read_run
from graphattn.train.engine import fit_prepared
from graphattn.train.evaluation.baselines import guesses_of
from graphattn.train.runs.config import FREE
from graphattn.train.runs.setup import cut_records, is_of_records

DONE, FAILED, BAD_INPUT, DIVERGED, INTERRUPTED = 0, 1, 2, 3, 130
MAY_CHANGE = (
    "steps",
    "accumulate",
    *(name for name in FREE if name != "out"),
)  # when a run is continued


def run_train(
    file: Path | None, resume: Path | None, options: dict[str, Any], console: Console
) -> int:
    """Start or continue a run, and return the exit status; the last line printed is the result.

    Raises: ValueError, OSError: for bad input, before training.
    """
    if int(os.environ.get("RANK", "0")) > 0:  # with several processes, only the first prints
        console = Console(quiet=True)
    if resume is not None:
        if file is not None:
            raise ValueError(
                "--resume must be given without CONFIG, because it uses the config of its folder"
            )
        for name in options:
            if name not in MAY_CHANGE:
                raise ValueError(
                    f"{flag(name)} must not change when a run is continued: --resume "
                    f"allows only {', '.join(map(flag, MAY_CHANGE))}"
                )
        before = read_run(resume).config.replace(out=os.fspath(resume))
        config = config_of(None, {**before.as_dict(), **options} if options else before.as_dict())
        if config.steps < before.steps:
            raise ValueError(
                f"--steps must be at least the number of steps of the run, {before.steps}, got "
                f"{config.steps}"
            )
    else:
        config = config_of(file, options)
    if not config.data:
        raise ValueError("--data must be the path of a file or a folder, got ''")
    if not config.out:
        raise ValueError("--out is required: the path of the folder that the run makes")
    with console.status("reading"):
        prepared = prepare(config)
    console.print(what_is_trained(prepared))
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        run = fit_prepared(prepared)
    except OSError as error:
        typer.echo(f"graphattn: {error}", err=True)
        return FAILED
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).splitlines()[0] if str(error) else "there is no memory left"
        typer.echo(
            f"graphattn: {reason}: to use less memory, give a smaller --batch-tokens (with a "
            "larger --accumulate), or --gradient-checkpointing",
            err=True,
        )
        return FAILED
    except KeyboardInterrupt:
        typer.echo(f"graphattn: stopped before the first step; {go_on(config.out)}", err=True)
        return INTERRUPTED
    return tell_end(run, prepared, console)


def is_out_of_memory(error: Exception) -> bool:
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or "can't allocate memory" in str(error)


def go_on(folder: str | os.PathLike[str]) -> str:
    return f"continue with: graphattn train --resume {shlex.quote(os.fspath(folder))}"


def tell_end(run: Run, prepared: Prepared, console: Console) -> int:
    """Print how a run ended, and return the exit status."""
    if run.status == "interrupted":
        typer.echo(f"graphattn: stopped at step {run.step}; {go_on(run.path)}", err=True)
        return INTERRUPTED
    if run.status == "diverged":
        typer.echo(
            f"graphattn: the run diverged at step {run.step}, which is a valid result: a lower "
            "--lr or more --warmup-steps may prevent it",
            err=True,
        )
        typer.echo(str(run.path))
        return DIVERGED
    console.print(result_table(run, prepared))
    seconds = short(float(run.info.get("seconds", 0)))
    model = escape(str(run.path / "model"))
    console.print(f"{seconds} seconds. The best model is in {model}", soft_wrap=True)
    typer.echo(str(run.path))
    return DONE


def what_is_trained(prepared: Prepared) -> Table:
    config, model = prepared.config, prepared.model
    parameters = sum(parameter.numel() for parameter in model.parameters())
    unit = "tokens" if prepared.corpus.image_shape is None else "images"
    table = plain_table("What is trained")
    table.add_column("option", no_wrap=True)
    table.add_column("value")
    records = f"{counted(len(prepared.corpus), 'record')}, {prepared.corpus.num_tokens:,} {unit}"
    table.add_row("data", f"{Path(config.data).name}: {config.kind}, {records}")
    sizes = [f"{name} {part.num_tokens:,}" for name, part in prepared.parts.items()]
    table.add_row("split", f"by {config.split}: {', '.join(sizes)} {unit}")
    noun = "texts" if config.kind == "text" else "sequences"
    beginnings = is_of_records(prepared.objective)
    given = prepared.parts["train"], config.length, noun, beginnings
    cut = cut_records(*given) if unit == "tokens" else ""
    if cut:
        table.add_row("", f"train: {cut} of at most {config.length:,} tokens")
    validation = prepared.validation
    if validation is not None and validation.indices is not None:
        seen = f"{len(validation):,} of {len(validation.windows):,} windows while training"
        table.add_row("", f"validation on {seen}; --validation-tokens 0 for all")
    mixer = f", mixer {config.mixer}" if config.mixer is not None else ""
    table.add_row("model", f"{Path(config.model).name}: {parameters:,} parameters{mixer}")
    table.add_row("objective", repr(prepared.objective))
    tokens = config.steps * config.accumulate * config.batch_tokens
    epochs = tokens / max(int(prepared.train.lengths.sum()), 1)
    table.add_row(
        "training",
        f"{counted(config.steps, 'step')} of {config.batch_tokens * config.accumulate:,} tokens "
        f"({epochs:.2g} epochs), length {config.length}, rate {config.lr:g}",
    )
    return table


def result_table(run: Run, prepared: Prepared) -> Table:
    """Make the table of the validation loss and the losses of guessing on the same tokens."""
    validation = prepared.validation
    table = plain_table(f"After {counted(run.step, 'step')}")
    table.add_column("validation")
    number_columns(table, "nats")
    if validation is None or not run.evaluations:
        losses = [row["loss"] for row in run.training if row["loss"] is not None]
        table.add_row("the last training loss", f"{losses[-1]:.4f}" if losses else "unknown")
        return table
    losses = [row["loss"] for row in run.evaluations if row.get("loss") is not None]
    table.add_row("the model", f"{min(losses):.4f}" if losses else "unknown")
    guesses = guesses_of(prepared.objective, prepared.parts["train"], validation, prepared.model)
    for name, (value, _) in guesses.items():
        table.add_row(f"guessing by {name}", f"{value:.4f}")
    return table

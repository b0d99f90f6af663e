"""`graphattn evaluate`: evaluate a trained model on data, compared with guessing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from graphattn.cli.demo.sample import printable
from graphattn.cli.outputs import as_json
from graphattn.data import Part, split_corpus
from graphattn.graphs.arguments import as_choice
from graphattn.plain_tables import number_columns, plain_table
from graphattn.train.evaluation.evaluate import evaluate_model
from graphattn.train.runs.choices import tokens_of_image
from graphattn.train.runs.folder import origin
from graphattn.train.runs.records import replace_text
from graphattn.train.runs.setup import (
    Examples,
    as_read,
    cut_records,
    is_of_records,
    read_corpus,
    split_data,
)
from graphattn.train.runs.trained import Trained, load_trained

NAMES = {
    "loss": "loss (nats)",
    "nats": "loss without smoothing (nats)",
    "perplexity": "perplexity",
    "bits_per_token": "bits per token",
    "bits_per_byte": "bits per byte",
    "accuracy": "accuracy",
    "f1_macro": "F1 (macro)",
    "pseudo_perplexity": "pseudo-perplexity",
    "frequency_loss": "guessing by frequency (nats)",
    "bigram_loss": "guessing by bigram (nats)",
}


def run_evaluate(
    folder: Path,
    data: str | None,
    split: str,
    pseudo_tokens: int,
    batch_tokens: int | None,
    length: int | None,
    seed: int,
    console: Console,
) -> None:
    """Evaluate, print, and write ``evaluation.json``; the last line printed is its path."""
    as_choice("--split", split, ("train", "validation", "test", "all"))
    trained = load_trained(folder)
    with console.status("reading"):
        part, train, name = _data_of(trained, data, split)
        examples, cut = _examples_of(trained, part, length)
    with console.status(f"evaluating {len(examples):,} examples"):
        report = evaluate_model(
            trained.model,
            trained.objective,
            examples,
            train=train,
            batch_tokens=batch_tokens or trained.run.config.batch_tokens,
            pseudo_tokens=pseudo_tokens,
            seed=seed,
        )
    if cut:
        report["cut"] = cut
    report["model"] = str(trained.source.relative_to(trained.run.path))
    report["origin"] = {**origin(trained.run.config), "seed": seed}
    path = folder / "evaluation.json"  # write it before printing: a closed pipe then loses nothing
    replace_text(path, as_json({**_before(path), name: report}))
    console.print(table_of(name, report))
    run = trained.run
    if run.status in ("running", "interrupted"):
        typer.echo(
            f"graphattn: training is {run.status}, at step {run.step} of {run.config.steps}: this "
            "is its newest checkpoint",
            err=True,
        )
    if train is None:
        typer.echo(
            "graphattn: the training data of the run does not exist any more, so the losses of "
            "guessing are not computed",
            err=True,
        )
    typer.echo(str(path))


def _examples_of(trained: Trained, part: Part, length: int | None) -> tuple[Examples, str]:
    """Return what the model reads at once, and a sentence if records of it are cut."""
    config, corpus = trained.run.config, part.corpus
    if corpus.image_shape is not None:
        return Examples(part, config.length, tokens_of_image(trained.model)), ""
    if length is None:
        # An edge between two pieces of a structure would be lost.
        longest = int((part.spans[:, 2] - part.spans[:, 1]).max())
        length = longest if corpus.kind == "structures" else config.length
    whole = is_of_records(trained.objective)
    if corpus.kind == "table" and length != config.length:
        raise ValueError(
            f"--length must be {config.length}, the number of columns, for a table, got {length}"
        )
    noun = "texts" if corpus.kind == "text" else "sequences"
    is_cut = whole or corpus.kind in ("structures", "protein")
    cut = cut_records(part, length, noun, whole) if is_cut else ""
    cut += f" of at most {length:,} tokens" if whole and cut else ""
    return Examples(part, length, beginnings=whole), cut


def _data_of(trained: Trained, data: str | None, split: str) -> tuple[Part, Part | None, str]:
    """Return the data to evaluate, the training data (or None), and a name for the first."""
    config = trained.run.config
    parts: dict[str, Part] | None = None
    try:
        corpus = as_read(read_corpus(config, trained.tokenizer), config.objective)
    except (ValueError, OSError):  # FileFormatError is a ValueError
        if data is None:
            raise
    else:
        parts = split_data(config, corpus)[1]
    if data is None:
        assert parts is not None
        part = parts[split] if split != "all" else _whole(corpus)
        if not len(part):
            raise ValueError(
                f"--split must be a part that contains data, got {split!r}, which is empty"
            )
        name = f"{Path(config.data).name} {split}"
    else:
        if split != "test":
            raise ValueError(
                "--split can only be used without --data, because it is a part of the data of the "
                f"run, got --data and --split {split!r}"
            )
        other = read_corpus(config.replace(data=data), trained.tokenizer)
        other = as_read(other, config.objective)
        if other.image_shape is not None:
            _check_images(trained, other)
        part, name = _whole(other), Path(data).name
    return part, None if parts is None else parts["train"], printable(name)


def _whole(corpus: Any) -> Part:
    return split_corpus(corpus, validation=0.0, test=0.0, by="position")["train"]


def _check_images(trained: Trained, corpus: Any) -> None:
    given = trained.run.config.model_options
    expected = (given["channels"], *given["image_size"]) if "image_size" in given else None
    if expected is not None and tuple(corpus.image_shape) != tuple(expected):
        raise ValueError(
            f"--data must contain images of (channels, height, width) = {tuple(expected)}, got "
            f"{tuple(corpus.image_shape)}"
        )


def _before(path: Path) -> dict[str, Any]:
    """Return earlier evaluations; a broken file is replaced."""
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return earlier if isinstance(earlier, dict) else {}


def table_of(name: str, report: dict[str, Any]) -> Table:
    """Make the table of an evaluation: the loss, losses of guessing, then other numbers."""
    numbers = f"{report['examples']:,} examples, {report['guesses']:,} guesses"
    table = plain_table(f"{name}: {numbers}" + (f"; {report['cut']}" if "cut" in report else ""))
    table.add_column("what")
    number_columns(table, "")
    losses: list[str] = [key for key in ("loss", "frequency_loss", "bigram_loss") if key in report]
    errors = {key: report.get(f"{key}_error") for key in losses} | _errors_of_others(report)
    hidden = {*losses, *(f"{key}_error" for key in losses)}
    rest = [key for key in report if key not in hidden and isinstance(report[key], float)]
    for key in [*losses, *rest]:
        table.add_row(NAMES.get(key, key.replace("_", " ")), _number(report[key], errors.get(key)))
    if "calibration" in report:
        table.add_row("calibration error (ECE)", f"{report['calibration']['error']:.4f}")
    return table


def _errors_of_others(report: dict[str, Any]) -> dict[str, float | None]:
    """Standard errors of numbers that follow from the loss, and of the share of right guesses."""
    errors: dict[str, float | None] = {}
    if error := report.get("loss_error"):
        for key in ("bits_per_token", "bits_per_byte"):
            if key in report:
                errors[key] = error * report[key] / report["loss"] if report["loss"] else None
        if math.isfinite(report.get("perplexity", math.inf)):
            errors["perplexity"] = error * report["perplexity"]
        if "accuracy" in report:
            share = report["accuracy"]
            errors["accuracy"] = max(share * (1 - share), 0.0) ** 0.5 / report["guesses"] ** 0.5
    return errors


def _number(value: float, error: float | None) -> str:
    """A number, and its standard error with two digits; no digits of the number beyond these."""
    if not error:
        return f"{value:.4f}"
    digits = min(max(1 - math.floor(math.log10(error)), 0), 4)
    return f"{value:.{digits}f} ± {error:.{digits}f}"

"""A run's model, ready to be used: where evaluating and generating begin."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from graphattn.nn.files import pretrained
from graphattn.train.objectives.objective import Objective
from graphattn.train.objectives.registry import objective as make_objective
from graphattn.train.runs import checkpoints
from graphattn.train.runs.folder import Run, read_run

if TYPE_CHECKING:
    from graphattn.data import Tokenizer


@dataclass(frozen=True)
class Trained:
    """Trained model of a run, made by :func:`load_trained`.

    Attributes:
        run: the folder's :class:`~graphattn.train.Run`.
        model: in evaluation mode.
        objective: what it learned from.
        tokenizer: None for images.
        source: the folder that the model was read from.

    Example:
        >>> import graphattn as ga
        >>> found = ga.train.load_trained("runs/a")  # doctest: +SKIP
        >>> found.model.generate(found.tokenizer.encode("To be"), 20)  # doctest: +SKIP
    """

    run: Run
    model: nn.Module
    objective: Objective
    tokenizer: Tokenizer | None
    source: Path


def load_trained(folder: str | os.PathLike[str]) -> Trained:
    """Read the model of a run: the best one, or that of the newest checkpoint of one not yet over.

    Args:
        folder: that of the run.

    Raises:
        FileNotFoundError: it is no folder of a run, or nothing was saved in it yet.
        ValueError: its files do not fit each other, as where one is of another run.

    Example:
        >>> import graphattn as ga
        >>> ga.train.load_trained("runs/a").model  # doctest: +SKIP
        CausalLM(...)
    """
    from graphattn.data import load_tokenizer

    run = read_run(folder)
    source = run.path / "model"
    if not (source / pretrained.CONFIG).is_file():
        steps = checkpoints.complete_checkpoints(run.path)
        if not steps:
            raise FileNotFoundError(
                f"folder must hold a model, got {os.fspath(folder)!r}: its run saved none yet"
            )
        source = checkpoints.checkpoint_path(run.path, max(steps))
    model: Any = pretrained.load(source)
    path = run.path / "tokenizer.json"
    tokenizer = load_tokenizer(path) if path.is_file() else None
    config = run.config
    if (tokenizer is None) != (config.kind == "images"):
        raise ValueError(f"{path} does not fit the run's config, of kind {config.kind!r}")
    objective = make_objective(config.objective, **config.objective_options)
    mask = getattr(objective, "mask_token", None)
    vocab_size = getattr(model, "vocab_size", None)
    if tokenizer is not None and isinstance(vocab_size, int):
        least = tokenizer.vocab_size
        if vocab_size < least or (mask is not None and mask < least):
            raise ValueError(
                f"{path} has {least} tokens, and the model in {str(source)!r} {vocab_size}: they "
                "are of different runs"
            )
    return Trained(run, model, objective, tokenizer, source)

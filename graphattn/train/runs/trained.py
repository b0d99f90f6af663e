"""The trained model of a run, for evaluation and generation."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from graphattn.data import Tokenizer, load_tokenizer
from graphattn.nn.files import pretrained
from graphattn.train.objectives.objective import Objective
from graphattn.train.objectives.registry import objective as make_objective
from graphattn.train.runs import checkpoints
from graphattn.train.runs.folder import Run, read_run


@dataclass(frozen=True)
class Trained:
    """Trained model of a run, made by :func:`load_trained`.

    Attributes:
        run: the :class:`~graphattn.train.Run` of the folder.
        model: the model, in evaluation mode.
        objective: the objective of its training.
        tokenizer: the tokenizer; None for images.
        source: the folder from which the model was read.

    Example:
        >>> import graphattn as ga
        >>> trained = ga.train.load_trained("runs/a")  # doctest: +SKIP
        >>> trained.model.generate(trained.tokenizer.encode("To be"), 20)  # doctest: +SKIP
    """

    run: Run
    model: nn.Module
    objective: Objective
    tokenizer: Tokenizer | None
    source: Path


def load_trained(folder: str | os.PathLike[str]) -> Trained:
    """Read the best model of a run; if the run has not ended, the model of its newest checkpoint.

    Args:
        folder: the folder of the run.

    Raises:
        FileNotFoundError: if it is not the folder of a run, or no model has been saved in it yet.
        ValueError: if its files do not fit each other, for instance because one is from another
            run.

    Example:
        >>> import graphattn as ga
        >>> ga.train.load_trained("runs/a").model  # doctest: +SKIP
        CausalLM(...)
    """
    run = read_run(folder)
    config, path = run.config, run.path / "tokenizer.json"
    tokenizer = load_tokenizer(path) if path.is_file() else None
    if config.kind == "auto" and (tokenizer is None or config.objective == "auto"):
        raise ValueError(
            "folder must be that of a run of `graphattn train` or of ga.train.prepare, got "
            f"{os.fspath(folder)!r}, which ga.train.fit trained on examples of its own: evaluate "
            "its model in code, with ga.train.evaluate_model(model, objective, examples)"
        )
    source = run.path / "model"
    if not (source / pretrained.CONFIG).is_file():
        steps = checkpoints.complete_checkpoints(run.path)
        if not steps:
            raise FileNotFoundError(
                f"folder must contain a model, got {os.fspath(folder)!r}, whose run has not saved "
                "one yet: wait for its first checkpoint"
            )
        source = checkpoints.checkpoint_path(run.path, max(steps))
    model: Any = pretrained.load(source)
    if (tokenizer is None) != (config.kind == "images"):
        raise ValueError(
            f"{path} does not fit the config of the run, which has kind {config.kind!r}: one of "
            "the two files is from another run"
        )
    objective = make_objective(config.objective, **config.objective_options)
    mask = getattr(objective, "mask_token", None)
    vocab_size = getattr(model, "vocab_size", None)
    if tokenizer is not None and isinstance(vocab_size, int):
        least = tokenizer.vocab_size
        if vocab_size < least or (mask is not None and mask < least):
            raise ValueError(
                f"{path} has {least} tokens, but the model in {str(source)!r} has {vocab_size}: "
                "the two are from different runs"
            )
    return Trained(run, model, objective, tokenizer, source)

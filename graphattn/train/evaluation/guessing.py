"""Losses of guessing without a model, on the examples of an evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from graphattn.data import Part
from graphattn.train.evaluation.baselines import bigram_nats, frequency_nats
from graphattn.train.objectives.objective import Example, Objective

PIECE = 2**16  # tokens of a part that are read together


def guesses_of(
    objective: Objective, train: Part, examples: Sequence[Example], model: nn.Module
) -> dict[str, tuple[float, float]]:
    """Return the losses of guessing by frequency in the training part, and their standard errors.

    They are in nats per guess.

    For "causal" it also returns the loss of guessing from the token before ("bigram"). Both count
    the same tokens that the model guesses.

    Args:
        objective: determines what is guessed, tokens or classes; for other objectives the result is
            empty.
        train: the data whose tokens or classes are counted.
        examples: the data to guess.
        model: the model whose vocabulary is used.
    """
    if objective.name == "classification":
        classes = int(objective.num_classes)  # type: ignore[attr-defined]
        per_token = bool(getattr(objective, "per_token", False))
        seen = _labels(_stretches(train), per_token)
        asked = _labels(_each(examples), per_token)
        return {"frequency": frequency_nats(seen, asked, classes)}
    if objective.name not in ("causal", "masked", "diffusion"):
        return {}
    vocab_size = _vocab_size(objective, model)
    if not vocab_size:
        return {}
    if objective.name != "causal":
        return {"frequency": frequency_nats(_tokens(train), _each(examples), vocab_size)}
    rest = (example["tokens"][1:] for example in _each(examples) if len(example["tokens"]) > 1)
    return {
        "frequency": frequency_nats(_tokens(train), rest, vocab_size),
        "bigram": bigram_nats(_tokens(train), _each(examples), vocab_size),
    }


def _vocab_size(objective: Objective, model: nn.Module) -> int:
    """Return the number of tokens to guess, without a mask token at the end of the vocabulary."""
    read = int(getattr(model, "vocab_size", 0))
    mask = getattr(objective, "mask_token", None)
    return int(mask) if mask is not None and mask >= read - 1 else read


def _each(examples: Sequence[Example]) -> Iterator[Example]:
    return (examples[place] for place in range(len(examples)))


def _stretches(part: Part) -> Iterator[Example]:
    """Yield pieces of a part that fit into memory."""
    for record, first, last in part.spans.tolist():
        for start in range(first, last, PIECE):
            yield part.corpus.example(record, start, min(start + PIECE, last))


def _tokens(part: Part) -> Iterator[Tensor]:
    for record, first, last in part.spans.tolist():
        for start in range(first, last, PIECE):
            yield part.corpus.tokens(record, start, min(start + PIECE, last))


def _labels(examples: Iterable[Example], per_token: bool) -> Iterator[Tensor]:
    """Yield the classes of examples, or of their tokens, some thousands at once."""
    labels: list[Any] = []
    for example in examples:
        if per_token:
            yield example["labels"][example["labels"] >= 0]
        else:
            labels.append(example["label"])
    if labels:
        yield torch.tensor(labels)

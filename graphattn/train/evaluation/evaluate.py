"""Evaluation of a trained model: its numbers on data, beside what guessing gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from graphattn.data import Part, TokenBatches
from graphattn.graphs.arguments import as_int
from graphattn.train.evaluation.calibration import Calibration
from graphattn.train.evaluation.guessing import guesses_of
from graphattn.train.evaluation.pseudo_likelihood import pseudo_perplexity
from graphattn.train.objectives.likelihood import LikelihoodObjective
from graphattn.train.objectives.objective import Batch, Example, Objective

PER_SEQUENCE = 16  # tokens of a sequence that are asked for one by one


def evaluate_model(
    model: nn.Module,
    objective: Objective,
    examples: Sequence[Example],
    *,
    train: Part | None = None,
    batch_tokens: int = 4096,
    pseudo_tokens: int = 512,
    bins: int = 15,
    seed: int = 0,
) -> dict[str, Any]:
    """The numbers of a model on examples, as JSON keeps them.

    Args:
        model: is in evaluation mode meanwhile.
        objective: whose `evaluate` gives the loss and what comes with it.
        examples: with an attribute ``lengths``, such as :class:`graphattn.data.Windows`.
        train: what the model learned from; with it, what guessing by its frequencies costs is told
            ("frequency", and "bigram" of causal models, in nats per answer).
        batch_tokens: of a batch; one of a longer example holds it alone.
        pseudo_tokens: of models of masked tokens, so many tokens at most are masked one at a time
            for the pseudo-perplexity, some of each sequence; 0 leaves it out.
        bins: of the calibration.
        seed: of masks and noise.

    Returns:
        What the objective reports, and "examples", how many there were; for objectives that
        guess, "calibration" with the expected "error" and its "bins"; for masked tokens
        "pseudo_perplexity" and "pseudo_tokens"; with `train`, "frequency_loss" and "bigram_loss".

    Example:
        >>> import torch, graphattn as ga
        >>> model = ga.models.CausalLM(9, dim=16, depth=1, heads=2)
        >>> data = [{"tokens": torch.randint(9, (20,))} for _ in range(4)]
        >>> found = ga.train.evaluate_model(model, ga.train.NextToken(), data)
        >>> sorted(found)
        ['accuracy', 'bits_per_token', 'calibration', 'examples', 'loss', 'perplexity']
    """
    pseudo_tokens = as_int("pseudo_tokens", pseudo_tokens, 0)
    batch_tokens = as_int("batch_tokens", batch_tokens, 1)
    seed = as_int("seed", seed, 0)
    if not len(examples):
        raise ValueError("examples must hold at least one example, got none")
    found: dict[str, Any] = {
        **objective.evaluate(model, _batches(objective, examples, batch_tokens), seed=seed),
        "examples": len(examples),
    }
    if isinstance(objective, LikelihoodObjective):
        batches = _batches(objective, examples, batch_tokens)
        calibration = Calibration.of(objective, model, batches, seed, bins)
        found["calibration"] = {"error": calibration.error, "bins": calibration.rows()}
    if objective.name == "masked" and pseudo_tokens:
        count = min(max(pseudo_tokens // PER_SEQUENCE, 1), len(examples))
        chosen = [examples[k * len(examples) // count] for k in range(count)]
        asked = max(pseudo_tokens // count, 1)
        found["pseudo_perplexity"] = pseudo_perplexity(
            model,
            chosen,
            objective.mask_token,  # type: ignore[attr-defined]
            max_tokens=asked,
            generator=torch.Generator().manual_seed(seed),
        )
        found["pseudo_tokens"] = sum(min(asked, len(own["tokens"])) for own in chosen)
    if train is not None:
        guesses = guesses_of(objective, train, examples, model)
        found |= {f"{name}_loss": value for name, value in guesses.items()}
    return found


def _batches(objective: Objective, examples: Any, batch_tokens: int) -> Iterator[Batch]:
    lengths = getattr(examples, "lengths", None)
    if lengths is None:
        lengths = torch.tensor([len(own["tokens"]) if "tokens" in own else 1 for own in examples])
    size = max(batch_tokens, int(lengths.max()))
    for indices in TokenBatches(lengths, size, shuffle=False):
        yield objective.collate([examples[place] for place in indices])

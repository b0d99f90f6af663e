"""Evaluation of a trained model, with the losses of guessing for comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from graphattn.data import Part, TokenBatches
from graphattn.graphs.arguments import as_int
from graphattn.train.evaluation.baselines import guesses_of, standard_error
from graphattn.train.evaluation.calibration import Calibration
from graphattn.train.evaluation.pseudo_likelihood import pseudo_perplexity
from graphattn.train.objectives.objective import Example, Objective

PER_SEQUENCE = 16  # tokens per sequence that are masked one at a time
ENOUGH = 4096  # tokens; of fewer, masks are drawn several times
MOST_DRAWS = 16


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
    """Evaluate a model on examples and return the numbers as JSON values.

    Args:
        model: the model; it runs in evaluation mode.
        objective: its `evaluate` computes the loss and related numbers.
        examples: examples with an attribute ``lengths``, such as :class:`graphattn.data.Windows`.
        train: the training data. With it, the result contains the losses of guessing by its
            frequencies ("frequency", and "bigram" for causal models, in nats per guess).
        batch_tokens: maximal number of tokens per batch; a longer example is a batch by itself.
        pseudo_tokens: for models of masked tokens: the maximal number of tokens that are masked one
            at a time for the pseudo-perplexity, some of each sequence; 0 for no pseudo-perplexity.
        bins: number of bins of the calibration.
        seed: seed of masks and noise.

    Returns:
        A dict with what the objective reports; "examples" and "guesses", their numbers; and
        "loss_error", the standard error of the loss, as if guesses of different tokens were
        independent. For objectives with guesses, "calibration" has the expected "error" and its
        "bins"; for masked tokens, there are "pseudo_perplexity" and "pseudo_tokens"; with `train`,
        "frequency_loss" and "bigram_loss" with their errors. Masks and noise are drawn up to 16
        times if the examples have fewer than 4,096 tokens.

    Example:
        >>> import torch, graphattn as ga
        >>> model = ga.models.CausalLM(9, dim=16, depth=1, heads=2)
        >>> data = [{"tokens": torch.randint(9, (20,))} for _ in range(4)]
        >>> report = ga.train.evaluate_model(model, ga.train.NextToken(), data)
        >>> sorted(report)
        ['accuracy', 'bits_per_token', 'calibration', 'examples', 'guesses', 'loss', 'loss_error',
         'perplexity']
    """
    pseudo_tokens = as_int("pseudo_tokens", pseudo_tokens, 0)
    batch_tokens = as_int("batch_tokens", batch_tokens, 1)
    seed = as_int("seed", seed, 0)
    if not len(examples):
        raise ValueError("examples must contain at least one example, got none")
    lengths = getattr(examples, "lengths", None)
    if lengths is None:
        lengths = torch.tensor(
            [len(each["tokens"]) if "tokens" in each else 1 for each in examples]
        )
    tokens, draws = int(lengths.sum()), 1
    if objective.name in ("masked", "diffusion"):
        draws = min(MOST_DRAWS, -(-ENOUGH // tokens))

    order = TokenBatches(lengths, max(batch_tokens, int(lengths.max())), shuffle=False)
    batches = (
        objective.collate([examples[place] for place in indices])
        for _ in range(draws)
        for indices in order
    )
    calibration = Calibration(bins)
    sums = objective.sums_over(model, batches, seed, calibration.add)
    report: dict[str, Any] = {
        **objective.report_of(sums),
        "examples": len(examples),
        "guesses": sums.count,
    }
    if sums.squares is not None:
        error = standard_error(float(sums.total), float(sums.squares), sums.count)
        # A token that is guessed again, under another mask, says little more than the first time.
        report["loss_error"] = error * max(1.0, sums.count / tokens) ** 0.5
    if bool(calibration.counts.any()):
        report["calibration"] = {"error": calibration.error, "bins": calibration.rows()}
    if objective.name == "masked" and pseudo_tokens:
        count = min(max(pseudo_tokens // PER_SEQUENCE, 1), len(examples))
        chosen = [examples[k * len(examples) // count] for k in range(count)]
        asked = max(pseudo_tokens // count, 1)
        report["pseudo_perplexity"] = pseudo_perplexity(
            model,
            chosen,
            objective.mask_token,  # type: ignore[attr-defined]
            max_tokens=asked,
            generator=torch.Generator().manual_seed(seed),
        )
        report["pseudo_tokens"] = sum(min(asked, len(example["tokens"])) for example in chosen)
    if train is not None:
        for name, (loss, error) in guesses_of(objective, train, examples, model).items():
            report |= {f"{name}_loss": loss, f"{name}_loss_error": error}
    # The error of a single guess is not known.
    is_nan = {
        name: isinstance(value, float) and math.isnan(value) for name, value in report.items()
    }
    return {name: value for name, value in report.items() if not is_nan[name]}

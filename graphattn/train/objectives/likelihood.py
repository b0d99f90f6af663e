"""Objectives of guessing: a model gives every choice a probability, and one choice is right."""

from __future__ import annotations

import abc

import torch
from torch import Tensor, nn
from torch.nn import functional

from graphattn.ops.inputs import compute_dtype
from graphattn.train.checks import check_range
from graphattn.train.objectives.objective import Batch, Loss, Objective


class LikelihoodObjective(Objective):
    """Objective of guessing one of K choices: a token, a class.

    Subclasses define the choices in :meth:`guesses`. The loss is the negative logarithm of the
    probability of the right choice, in nats; the share of right guesses is also reported.
    """

    @abc.abstractmethod
    def guesses(
        self, model: nn.Module, batch: Batch, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return logits [n, K] and the right choices, integers [n]."""

    def loss(
        self, model: nn.Module, batch: Batch, generator: torch.Generator | None = None
    ) -> Loss:
        """Return the sum over all guesses, in nats, and the number of right ones as "accuracy"."""
        logits, truth = self.guesses(model, batch, generator)
        sums = {"accuracy": num_right(logits, truth)}
        return loss_of(nats(logits, truth), len(truth), sums, (logits, truth))


def loss_of(
    values: Tensor,
    count: int,
    sums: dict[str, float] | None = None,
    guesses: tuple[Tensor, Tensor] | None = None,
) -> Loss:
    """Return the loss of guesses from the loss of each one; guesses that are 0 may be left out."""
    return Loss(values.sum(), count, sums or {}, values.detach().square().sum(), guesses)


def nats(logits: Tensor, truth: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the cross-entropy of every guess, -log p(truth), in nats; float32 for half precision.

    Args:
        logits: [n, K].
        truth: integers [n].
        label_smoothing: the share of the target probability that is spread evenly over all K
            choices.

    Raises:
        ValueError: if the truth is not one of the K choices (checked only on a CPU, where reading
            it is cheap).
    """
    truth = truth.long()
    check_range(truth, logits.shape[-1], "tokens and labels", ", one per output of the model")
    logits = logits.to(compute_dtype(logits.dtype))
    return functional.cross_entropy(
        logits, truth, reduction="none", label_smoothing=label_smoothing
    )


def num_right(logits: Tensor, truth: Tensor) -> float:
    """Return the number of right guesses."""
    return float((logits.argmax(-1) == truth).sum()) if len(truth) else 0.0

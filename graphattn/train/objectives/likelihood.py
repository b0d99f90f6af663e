"""Objectives that are likelihoods: a model gives every choice a probability, and one is right."""

from __future__ import annotations

import abc

import torch
from torch import Tensor, nn
from torch.nn import functional

from graphattn.ops.inputs import compute_dtype
from graphattn.train.objectives.objective import Batch, Loss, Objective


class LikelihoodObjective(Objective):
    """Objective of guessing one of K choices: a token, a class.

    Subclasses say which choices (:meth:`guesses`); the loss is the negative logarithm of the
    probability of the right one, in nats, and beside it the share of guesses that are right.
    """

    @abc.abstractmethod
    def guesses(
        self, model: nn.Module, batch: Batch, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits [n, K] and what is right, integers [n]."""

    def loss(
        self, model: nn.Module, batch: Batch, generator: torch.Generator | None = None
    ) -> Loss:
        """The sum over all guesses, in nats, and the share that is right as "accuracy"."""
        logits, truth = self.guesses(model, batch, generator)
        return Loss(nats(logits, truth).sum(), len(truth), {"accuracy": num_right(logits, truth)})


def nats(logits: Tensor, truth: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Cross-entropy of every guess: -log p(truth), in nats; float32 for half precision.

    Args:
        logits: [n, K].
        truth: integers [n].
        label_smoothing: the share of the right choice's weight that all K choices get evenly.

    Raises:
        ValueError: the truth is none of the K choices (on a CPU, where reading it costs nothing).
    """
    truth = truth.long()
    if truth.device.type == "cpu" and truth.numel():
        least, most = (int(x) for x in truth.aminmax())
        if least < 0 or most >= logits.shape[-1]:
            raise ValueError(
                f"tokens and labels must be 0 .. {logits.shape[-1] - 1}, the model's choices, got "
                f"{least if least < 0 else most}"
            )
    logits = logits.to(compute_dtype(logits.dtype))
    return functional.cross_entropy(
        logits, truth, reduction="none", label_smoothing=label_smoothing
    )


def num_right(logits: Tensor, truth: Tensor) -> float:
    """How many guesses are right."""
    return float((logits.argmax(-1) == truth).sum()) if len(truth) else 0.0

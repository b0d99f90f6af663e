"""Base classes of objectives: how examples become a batch, and what the loss of a model is.

:class:`Objective` is any objective. In a :class:`LikelihoodObjective`, a model gives every choice a
probability, and one choice is right.
"""

from __future__ import annotations

import abc
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from graphattn.models.proteins.scores import evaluating
from graphattn.ops.inputs import compute_dtype
from graphattn.train.checks import check_range

# "tokens" [N] or "image" [C, H, W], and further entries that an objective needs.
Example = dict[str, Any]
Batch = dict[str, Any]  # tensors, and other arguments of models
Guesses = tuple[Tensor, Tensor]  # logits [n, K], and the right choices [n]


@dataclass
class Loss:
    """Loss of a model on a batch, as sums, so that batches of different sizes can be added.

    Attributes:
        total: the sum over all guesses, in nats for likelihoods: a scalar with a gradient.
        count: the number of guesses.
        sums: other sums that are reported as means over `count`, such as the number of right
            guesses.
        squares: the sum of the squares of the losses of single guesses, for the standard error of
            the mean; None if it is not known.
        guesses: logits [n, K] and right choices [n], for objectives of guessing; else None.

    Example:
        >>> import torch
        >>> from graphattn.train import Loss
        >>> Loss(torch.tensor(6.0), 3).mean
        tensor(2.)
    """

    total: Tensor
    count: int
    sums: dict[str, float] = field(default_factory=dict)
    squares: Tensor | None = None
    guesses: Guesses | None = None

    @property
    def mean(self) -> Tensor:
        """Return the loss per guess; 0 if there was none."""
        return self.total / max(self.count, 1)


class Objective(abc.ABC):
    """Base class of the objectives of training.

    A subclass defines how examples become a batch (:meth:`collate`) and the loss of a model on it
    (:meth:`loss`). Random numbers, such as those of a mask, are drawn in `loss`: from `generator`,
    or from torch's default generator if it is None. A training run that continues from a checkpoint
    then draws the same numbers as without the interruption.

    Example:
        >>> import torch
        >>> from graphattn.train import Loss, Objective
        >>> class Autoencoding(Objective):
        ...     name = "autoencoding"
        ...     def collate(self, examples):
        ...         return {"image": torch.stack([example["image"] for example in examples])}
        ...     def loss(self, model, batch, generator=None):
        ...         apart = model(batch["image"]) - batch["image"]
        ...         return Loss(apart.square().sum(), apart.numel())
        ...     def report(self, mean, means):
        ...         return {"loss": mean}
        >>> objective = Autoencoding()
        >>> batch = objective.collate([{"image": torch.ones(1, 2, 2)}] * 3)
        >>> objective.evaluate(torch.nn.Dropout(1.0), [batch])  # nothing is left out
        {'loss': 0.0}
    """

    name: str  # its name on the command line

    @abc.abstractmethod
    def collate(self, examples: Sequence[Example]) -> Batch:
        """Join examples into one batch; unequal lengths are padded on the right, with ``valid``."""

    @abc.abstractmethod
    def loss(self, model: nn.Module, batch: Batch, generator: Generator | None = None) -> Loss:
        """Compute the loss of the model on a batch."""

    def __repr__(self) -> str:
        given = [
            f"{name}={getattr(self, name)!r}"
            for name, parameter in inspect.signature(type(self)).parameters.items()
            if hasattr(self, name) and repr(getattr(self, name)) != repr(parameter.default)
        ]
        return f"{type(self).__name__}({', '.join(given)})"

    def report(self, mean: float, means: dict[str, float]) -> dict[str, float]:
        """Return named numbers from the mean loss and the means of ``Loss.sums``."""
        perplexity = math.exp(mean) if mean < 700 else math.inf
        return {"loss": mean, "perplexity": perplexity, **means}

    @torch.no_grad()
    def evaluate(
        self, model: nn.Module, batches: Iterable[Batch], seed: int = 0
    ) -> dict[str, float]:
        """Evaluate a model on all batches, and return the numbers of :meth:`report`.

        The model runs in evaluation mode, and `seed` determines the random numbers, so two calls
        give the same result.
        """
        return self.report_of(self.sums_over(model, batches, seed))

    def report_of(self, sums: Loss) -> dict[str, float]:
        """Return the numbers of :meth:`report` for a loss over all batches."""
        means = {key: value / sums.count for key, value in sums.sums.items()}
        return self.report(float(sums.total) / sums.count, means)

    @torch.no_grad()
    def sums_over(
        self,
        model: nn.Module,
        batches: Iterable[Batch],
        seed: int = 0,
        on_guesses: Callable[[Tensor, Tensor], None] | None = None,
    ) -> Loss:
        """Return the loss of a model on all batches together, as :meth:`evaluate` needs it.

        `on_guesses` is called with ``Loss.guesses`` of every batch that has them.
        """
        total, count, squares = 0.0, 0, 0.0
        sums: dict[str, float] = {}
        with evaluating(model):
            for place, batch in enumerate(batches):
                loss = self.loss(model, batch, evaluation_generator(batch, place, seed))
                total, count = total + float(loss.total), count + loss.count
                squares += math.nan if loss.squares is None else float(loss.squares)
                for key, value in loss.sums.items():
                    sums[key] = sums.get(key, 0.0) + float(value)
                if on_guesses is not None and loss.guesses is not None:
                    on_guesses(*loss.guesses)
        if count == 0:
            raise ValueError("batches must contain at least one guess, got none")
        as_tensor = functools.partial(torch.tensor, dtype=torch.float64)
        known = None if math.isnan(squares) else as_tensor(squares)
        return Loss(as_tensor(total), count, sums, known)


def evaluation_generator(batch: Batch, place: int, seed: int) -> torch.Generator:
    """Make the generator of one batch of an evaluation, independent of the batches before it."""
    device = next((x.device for x in batch.values() if isinstance(x, Tensor)), torch.device("cpu"))
    return torch.Generator(device).manual_seed(seed + 1_000_003 * place)


# Guesses.


class LikelihoodObjective(Objective):
    """Objective of guessing one of K choices: a token, a class.

    Subclasses define the choices in :meth:`guesses`. The loss is the negative logarithm of the
    probability of the right choice, in nats; the share of right guesses is also reported.
    """

    @abc.abstractmethod
    def guesses(
        self, model: nn.Module, batch: Batch, generator: Generator | None = None
    ) -> Guesses:
        """Return logits [n, K] and the right choices, integers [n]."""

    def loss(self, model: nn.Module, batch: Batch, generator: Generator | None = None) -> Loss:
        """Return the sum over all guesses, in nats, and the number of right ones as "accuracy"."""
        logits, truth = self.guesses(model, batch, generator)
        sums = {"accuracy": num_right(logits, truth)}
        return loss_of(nats(logits, truth), len(truth), sums, (logits, truth))


def loss_of(
    values: Tensor,
    count: int,
    sums: dict[str, float] | None = None,
    guesses: Guesses | None = None,
) -> Loss:
    """Return the loss of guesses from the loss of each one; losses of 0 may be left out."""
    return Loss(values.sum(), count, sums or {}, values.detach().square().sum(), guesses)


def nats(logits: Tensor, truth: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the cross-entropy of guesses [n, K], -log p(truth), in nats [n]; at least in float32.

    `truth` are the right choices [n], or floating-point probabilities of all choices [n, K]. The
    share `label_smoothing` of the target probability is spread evenly over all K choices.
    """
    logits = logits.to(compute_dtype(logits.dtype))
    if truth.is_floating_point():
        truth = truth.to(logits.dtype)
    else:
        truth = truth.long()
        check_range(truth, logits.shape[-1], "tokens and labels", ", one per output of the model")
    return functional.cross_entropy(
        logits, truth, reduction="none", label_smoothing=label_smoothing
    )


def num_right(logits: Tensor, truth: Tensor) -> float:
    """Return the number of right guesses."""
    return float((logits.argmax(-1) == truth).sum()) if len(truth) else 0.0

"""Calibration: whether the confidence of a model equals its accuracy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from graphattn.graphs.arguments import as_int
from graphattn.ops.inputs import compute_dtype
from graphattn.train.checks import described
from graphattn.train.objectives.objective import Batch, LikelihoodObjective


class Calibration:
    r"""Reliability of guesses: their confidence, compared with how often they are right.

    The confidence of a guess is the probability of the most likely choice. Guesses are put into
    bins of equal width, ((k - 1) / K, k / K], and the expected calibration error is

    .. math::
        \text{ECE} = \sum_{k=1}^{K} \frac{|B_k|}{n}
            \left| \text{accuracy}(B_k) - \text{confidence}(B_k) \right|

    Args:
        bins: K, the number of bins.

    Attributes:
        counts: int64 [bins], the number of guesses in every bin.
        confidence: float64 [bins], their mean confidence; NaN in an empty bin.
        accuracy: float64 [bins], the share of right guesses; NaN in an empty bin.

    Raises:
        ValueError: if an argument is not allowed; the message names it and says what is allowed.

    Source:
        Guo et al., 2017, *On Calibration of Modern Neural Networks*, Equation 3.

    Example:
        >>> import torch, graphattn as ga
        >>> calibration = ga.train.Calibration(bins=10)
        >>> sure = torch.tensor([[0.9, 0.1]]).log().expand(10, 2)
        >>> calibration.add(sure, torch.tensor([0, 0, 0, 0, 0, 0, 0, 1, 1, 1]))
        >>> round(calibration.error, 3)  # 90 % sure, 70 % right
        0.2
        >>> calibration.rows()[0]["accuracy"]
        0.7
    """

    def __init__(self, bins: int = 15) -> None:
        self.bins = as_int("bins", bins, 1)
        self.counts = torch.zeros(self.bins, dtype=torch.int64)
        self._sure = torch.zeros(self.bins, dtype=torch.float64)
        self._right = torch.zeros(self.bins, dtype=torch.float64)

    @classmethod
    def of(
        cls,
        objective: LikelihoodObjective,
        model: nn.Module,
        batches: Iterable[Batch],
        seed: int = 0,
        bins: int = 15,
    ) -> Calibration:
        """Measure the calibration of a model's guesses on all batches.

        The model runs in evaluation mode with the random numbers of `seed`, as in
        :meth:`Objective.evaluate`, so the guesses are the same.

        Args:
            objective: an objective with guesses: "masked", "causal" or "classification".
            model: the model to evaluate.
            batches: batches made by ``objective.collate``.
            seed: seed of the masks.
            bins: number of bins.

        Example:
            >>> import torch, graphattn as ga
            >>> model = ga.models.CausalLM(9, dim=16, depth=1, heads=2)
            >>> objective = ga.train.NextToken()
            >>> batch = objective.collate([{"tokens": torch.arange(9)}])
            >>> int(ga.train.Calibration.of(objective, model, [batch]).counts.sum())
            8
        """
        if not isinstance(objective, LikelihoodObjective):
            raise ValueError(
                "objective must be one with guesses ('masked', 'causal' or 'classification'), got "
                f"{objective!r}"
            )
        calibration = cls(bins)
        objective.sums_over(model, batches, seed, calibration.add)
        return calibration

    @torch.no_grad()
    def add(self, logits: Tensor, truth: Tensor) -> None:
        """Count guesses.

        Args:
            logits: [*, K], for any number of choices K.
            truth: integers [*], the right choices.

        Raises:
            ValueError: if the shapes do not fit, or the truth is not one of the choices.
        """
        for name, values in (("logits", logits), ("truth", truth)):
            is_floating = isinstance(values, Tensor) and values.is_floating_point()
            if not isinstance(values, Tensor) or is_floating != (name == "logits"):
                kind = "a floating-point" if name == "logits" else "an integer"
                raise ValueError(f"{name} must be {kind} tensor, got {described(values)}")
        if logits.shape[:-1] != truth.shape:
            raise ValueError(
                "logits and truth must have shapes [*, K] and [*], got "
                f"{list(logits.shape)} and {list(truth.shape)}"
            )
        if outside := truth[(truth < 0) | (truth >= logits.shape[-1])].tolist():
            raise ValueError(
                f"truth must contain choices 0 .. {logits.shape[-1] - 1}, got {outside[0]}: leave "
                "out guesses with a missing label"
            )
        sure, guess = logits.to(compute_dtype(logits.dtype)).softmax(-1).max(-1)
        sure, right = sure.double().flatten(), (guess == truth).double().flatten()
        place = ((sure * self.bins).ceil().long() - 1).clamp(0, self.bins - 1)
        self.counts += place.bincount(minlength=self.bins).cpu()
        self._sure += place.bincount(sure, minlength=self.bins).cpu()
        self._right += place.bincount(right, minlength=self.bins).cpu()

    @property
    def confidence(self) -> Tensor:
        """Return the mean confidence of every bin."""
        return self._sure / self.counts

    @property
    def accuracy(self) -> Tensor:
        """Return the share of right guesses of every bin."""
        return self._right / self.counts

    @property
    def error(self) -> float:
        """Return the expected calibration error, in 0 .. 1."""
        if not self.counts.sum():
            raise ValueError("error needs at least one guess, got none: call add or of first")
        return float((self._right - self._sure).abs().sum() / self.counts.sum())

    def rows(self) -> list[dict[str, Any]]:
        """Return the non-empty bins as JSON values, for a reliability diagram."""
        return [
            {
                "from": place / self.bins,
                "to": (place + 1) / self.bins,
                "count": int(self.counts[place]),
                "confidence": float(self.confidence[place]),
                "accuracy": float(self.accuracy[place]),
            }
            for place in self.counts.nonzero()[:, 0].tolist()
        ]

    def __repr__(self) -> str:
        guesses = int(self.counts.sum())
        error = f", error={self.error:.4f}" if guesses else ""
        return f"Calibration(bins={self.bins}, guesses={guesses}{error})"

"""Regression per residue: predict numbers for every token; labels can be missing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn

from graphattn.graphs.arguments import as_choice, as_float, as_int
from graphattn.ops.inputs import compute_dtype
from graphattn.train.batches import collate_tokens, guessed_here, outputs_at, unwrapped
from graphattn.train.objectives.objective import Batch, Example, Loss, Objective, loss_of


class ResidueRegression(Objective):
    r"""Regression: a model predicts numbers for every token, such as the accessibility of residues.

    Examples have "labels", floating-point [N] or [N, T]; NaN is a label that is missing and costs
    nothing. The output of the model, [B, N, T], is in units of `std` above `mean`, and so is the
    loss, the mean over all labels y that there are:

    .. math::
        \ell\left(a, \frac{y - \text{mean}}{\text{std}}\right), \quad
        \ell(a, z) = (a - z)^2 \text{ or } |a - z|

    Evaluations report "mse" and "mae" in the units of the labels, and Pearson's correlation of
    predictions and labels, over all tokens of all batches (the mean over targets; NaN where
    either of them is constant).

    Args:
        targets: T, how many numbers a token has.
        error: squared ("mse") or absolute ("mae").
        mean, std: of the labels, so that a model starts near them.
        packed: as in :class:`MaskedTokens`.

    Raises:
        ValueError: if an argument is not allowed; the message names it and says what is allowed.

    Example:
        >>> import torch, graphattn as ga
        >>> encoder = ga.models.ProteinModel(16, depth=1, heads=2)
        >>> model = ga.train.WithHead(encoder, 1)
        >>> objective = ga.train.ResidueRegression(mean=60.0, std=40.0)
        >>> tokens = encoder.tokenizer.encode("MKVLAGHW")
        >>> labels = torch.tensor([90.0, 120.0, torch.nan, 10.0, 15.0, 60.0, 80.0, 20.0])
        >>> batch = objective.collate([{"tokens": tokens, "labels": labels}])
        >>> objective.loss(model, batch).count
        7
        >>> sorted(objective.evaluate(model, [batch]))
        ['loss', 'mae', 'mse', 'pearson']
    """

    name = "regression"

    def __init__(
        self,
        targets: int = 1,
        error: Literal["mse", "mae"] = "mse",
        *,
        mean: float = 0.0,
        std: float = 1.0,
        packed: bool = False,
    ) -> None:
        self.targets = as_int("targets", targets, 1)
        self.error = as_choice("error", error, ("mse", "mae"))
        self.mean = _as_finite("mean", mean)
        self.std = as_float("std", std, positive=True)
        self.packed = as_choice("packed", packed, (False, True))

    def collate(self, examples: Sequence[Example]) -> Batch:
        """Join sequences into one batch with "labels" [B, N, T]."""
        batch = collate_tokens(examples, "labels")
        labels = batch["labels"]
        if not labels.is_floating_point():
            raise ValueError(
                "labels must be a floating-point tensor, with NaN for missing labels, got "
                f"{labels.dtype}"
            )
        if bool(labels.isinf().any()):
            raise ValueError("labels must be finite, or NaN for missing labels, got infinity")
        if labels.dim() == 2:
            labels = labels[..., None]
        if labels.dim() != 3 or labels.shape[-1] != self.targets:
            raise ValueError(
                f"labels must have targets={self.targets} numbers per token, got "
                f"{list(labels.shape[2:])}"
            )
        return {**batch, "labels": labels}

    def loss(self, model: nn.Module, batch: Batch, generator: Generator | None = None) -> Loss:
        """Return the loss summed over all known labels, and the sums that :meth:`report` needs."""
        labels = batch["labels"]
        where = guessed_here(model, ~labels.isnan().all(-1), batch)
        outputs = outputs_at(model, batch["tokens"], batch, where, packed=self.packed)
        if outputs.shape[-1] != self.targets:
            raise ValueError(
                f"model must return targets={self.targets} numbers per token, got "
                f"{outputs.shape[-1]} from a {type(unwrapped(model)).__name__}: ga.train.WithHead "
                "gives a model a head of another width"
            )
        labels = labels[where]
        known = ~labels.isnan()
        outputs = outputs.to(compute_dtype(outputs.dtype))
        wanted = ((labels - self.mean) / self.std).to(outputs.dtype)
        apart = torch.where(known, outputs - wanted.masked_fill(~known, 0), 0)
        errors = apart.square() if self.error == "mse" else apart.abs()
        return loss_of(errors, int(known.sum()), self._sums(outputs.detach(), labels, known))

    def _sums(self, outputs: Tensor, labels: Tensor, known: Tensor) -> dict[str, float]:
        """Return the sums for errors and Pearson's correlation of every target, in float64."""
        sums = {}
        for target in range(self.targets):
            known_here = known[:, target]
            # Use standardised numbers, so that sums of squares do not lose digits to a large mean.
            x = outputs[known_here, target].double()
            y = (labels[known_here, target].double() - self.mean) / self.std
            pieces = {
                "n": torch.ones_like(x),
                "x": x,
                "y": y,
                "xx": x * x,
                "yy": y * y,
                "xy": x * y,
            }
            pieces["squared"], pieces["absolute"] = (x - y).square(), (x - y).abs()
            sums.update({f"{key}_{target}": float(piece.sum()) for key, piece in pieces.items()})
        return sums

    def report(self, mean: float, means: dict[str, float]) -> dict[str, float]:
        """Return the loss, mse and mae in the units of the labels, and Pearson's correlation."""
        squared = sum(means[f"squared_{target}"] for target in range(self.targets))
        absolute = sum(means[f"absolute_{target}"] for target in range(self.targets))
        correlations = [
            _correlation(
                {key: means[f"{key}_{target}"] for key in ("n", "x", "y", "xx", "yy", "xy")}
            )
            for target in range(self.targets)
        ]
        return {
            "loss": mean,
            "mse": squared * self.std**2,
            "mae": absolute * self.std,
            "pearson": sum(correlations) / self.targets,
        }


def _as_finite(name: str, value: Any) -> float:
    """Convert `value` to a finite float, positive or negative."""
    try:
        if isinstance(value, bool | str):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return number


def _correlation(means: dict[str, float]) -> float:
    """Compute Pearson's correlation from sums, all divided by the same number."""
    if not means["n"]:
        return math.nan
    x, y, xx, yy, xy = (means[key] / means["n"] for key in ("x", "y", "xx", "yy", "xy"))
    spread = (xx - x * x) * (yy - y * y)
    # Rounding can make the variance of a constant slightly positive or negative.
    if spread <= 1e-24 * max(xx * yy, 1e-300):
        return math.nan
    return (xy - x * y) / math.sqrt(spread)

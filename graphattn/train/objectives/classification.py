"""Classification: one class for every image, sequence or token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from graphattn.graphs.arguments import as_choice, as_int
from graphattn.ops.dropout import as_share
from graphattn.train.batches.calling import answers_at, pooled_answers, unwrapped
from graphattn.train.batches.collation import all_have, checked, collate_images, collate_tokens
from graphattn.train.objectives.likelihood import LikelihoodObjective, nats, num_right
from graphattn.train.objectives.objective import Batch, Example, Loss


class Classification(LikelihoodObjective):
    r"""Classification: cross-entropy of the classes of images, sequences or tokens.

    Images and sequences have a "label", an integer. A model that answers per token, [B, N, K], is
    taken by the mean over the tokens of a sequence, which is its head on the mean of its features.
    With ``per_token=True`` every token has its own, "labels" [N]; those below 0 are missing and
    cost nothing.

    With label smoothing s the loss is that of guessing a distribution which gives the right class
    1 - s + s / K and each other s / K (Szegedy et al., 2016, Section 7):

    .. math::
        -(1 - s) \log p_y - \frac{s}{K} \sum_{k=1}^{K} \log p_k

    Evaluations report it as "loss", and without smoothing as "nats".

    Args:
        num_classes: K, as many as the model tells apart.
        label_smoothing: s, in [0, 1).
        per_token: whether tokens have classes.
        packed: as in :class:`MaskedTokens`.

    Raises:
        ValueError: names the argument, its value and what is allowed.

    Example:
        >>> import torch, graphattn as ga
        >>> model = ga.models.VisionTransformer.from_preset("digits")
        >>> objective = ga.train.Classification(10, label_smoothing=0.1)
        >>> batch = objective.collate(
        ...     [{"image": torch.rand(1, 8, 8), "label": label} for label in (3, 1, 4)])
        >>> objective.loss(model, batch).mean.backward()
        >>> sorted(objective.evaluate(model, [batch]))
        ['accuracy', 'loss', 'nats', 'perplexity']
    """

    name = "classification"

    def __init__(
        self,
        num_classes: int,
        label_smoothing: float = 0.0,
        *,
        per_token: bool = False,
        packed: bool = False,
    ) -> None:
        self.num_classes = as_int("num_classes", num_classes, 2)
        self.label_smoothing = as_share("label_smoothing", label_smoothing)
        self.per_token = as_choice("per_token", per_token, (False, True))
        self.packed = as_choice("packed", packed, (False, True))

    def collate(self, examples: Sequence[Example]) -> Batch:
        """Images or sequences with their classes as one batch: "label" [B], or "labels" [B, N]."""
        if self.per_token:
            return collate_tokens(examples, "labels")
        is_image = all_have(checked(examples), "image")
        batch = collate_images(examples) if is_image else collate_tokens(examples)
        batch["label"] = torch.tensor([self._label(example) for example in examples])
        return batch

    def _label(self, example: Example) -> int:
        label: Any = example.get("label")
        try:
            label = as_int("label", label, 0)
        except ValueError as error:
            named = f" ({example['name']!r})" if example.get("name") else ""
            raise ValueError(f"examples must have a class each{named}: {error}") from None
        if label >= self.num_classes:
            raise ValueError(f"label must be 0 .. {self.num_classes - 1}, got {label}")
        return label

    def guesses(
        self, model: nn.Module, batch: Batch, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits [n, num_classes] and the classes [n] of images, sequences, or labelled tokens."""
        if self.per_token:
            labels = batch["labels"]
            if labels.is_floating_point():
                raise ValueError(f"labels must be integers, got {labels.dtype}")
            where = labels >= 0
            logits = answers_at(model, batch["tokens"], batch, where, packed=self.packed)
            truth = labels[where]
        else:
            truth = batch["label"]
            if "image" in batch:
                logits = model(batch["image"])
            else:
                logits = pooled_answers(model, batch, packed=self.packed)
        if logits.dim() != 2 or logits.shape[-1] != self.num_classes:
            raise ValueError(
                f"model must tell num_classes={self.num_classes} classes apart, got answers "
                f"{list(logits.shape)} of a {type(unwrapped(model)).__name__}: "
                "ga.train.WithHead gives a model of tokens a head of another width"
            )
        return logits, truth

    def loss(
        self, model: nn.Module, batch: Batch, generator: torch.Generator | None = None
    ) -> Loss:
        """The smoothed cross-entropy; "accuracy", and "nats" without smoothing."""
        logits, truth = self.guesses(model, batch, generator)
        total = nats(logits, truth, self.label_smoothing).sum()
        with torch.no_grad():
            plain = float(nats(logits, truth).sum() if self.label_smoothing else total)
        return Loss(total, len(truth), {"accuracy": num_right(logits, truth), "nats": plain})

    def report(self, mean: float, means: dict[str, float]) -> dict[str, float]:
        """Loss, nats and accuracy; the perplexity is that of the nats."""
        unsmoothed = means["nats"]
        perplexity = math.exp(unsmoothed) if unsmoothed < 700 else math.inf
        return {"loss": mean, "perplexity": perplexity, **means}

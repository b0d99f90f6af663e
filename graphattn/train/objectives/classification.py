"""Classification: one class for every image, sequence or token."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Generator, Tensor, nn

from graphattn.graphs.arguments import as_choice, as_int, as_share
from graphattn.train.batches import (
    all_have,
    checked,
    collate_images,
    collate_tokens,
    guessed_here,
    outputs_at,
    pooled_outputs,
    unwrapped,
)
from graphattn.train.checks import described
from graphattn.train.objectives.mixing import check_alphas, mix_images
from graphattn.train.objectives.objective import (
    Batch,
    Example,
    Guesses,
    LikelihoodObjective,
    Loss,
    loss_of,
    nats,
    num_right,
)


class Classification(LikelihoodObjective):
    r"""Classification: cross-entropy of the classes of images, sequences or tokens.

    Images and sequences have a "label", an integer. If a model returns [B, N, K], one output per
    token, the mean over the tokens of a sequence is used, which is its head applied to the mean of
    its features. With ``per_token=True`` every token has its own class, "labels" [N]; labels below
    0 are missing and are not counted.

    With label smoothing s, the target is a distribution with probability 1 - s + s / K for the
    right class and s / K for every other class (Szegedy et al., 2016, Section 7):

    .. math::
        -(1 - s) \log p_y - \frac{s}{K} \sum_{k=1}^{K} \log p_k

    Evaluations report it as "loss", and the value without smoothing as "nats". "f1_macro" is the
    mean over the classes of the F1 score, without weights (as in scikit-learn). For class k with
    TP_k right guesses, FP_k guesses of other classes as k, and FN_k of k as another class:

    .. math::
        F_{1,k} = \frac{2 \, TP_k}{2 \, TP_k + FP_k + FN_k}

    A class that is neither guessed nor right is left out.

    Images can be changed at random while the model is in training mode: first by `augment`, then by
    Mixup and CutMix (:func:`mix_images`). The target is then a distribution, which label smoothing
    also applies to, and the right class is the one with the larger share. A model in evaluation
    mode gets the images as they are, so validation is not affected.

    Args:
        num_classes: K, the number of classes of the model.
        label_smoothing: s, in [0, 1).
        classes: names of the classes, at most K of them; None if they are not known.
        mixup: alpha of Mixup; 0 for no Mixup.
        cutmix: alpha of CutMix; 0 for no CutMix.
        augment: a function or module that takes images [B, C, H, W] and returns images of the same
            shape, for instance of kornia.augmentation. It draws from torch's default generators,
            whose state is a part of checkpoints.
        per_token: whether every token has a class.
        packed: as in :class:`MaskedTokens`.

    Source: GKA paper, Section 4.1, for the image recipe (label smoothing, Mixup and CutMix).

    Raises:
        ValueError: if an argument is not allowed; the message names it and says what is allowed.

    Example:
        >>> import torch, graphattn as ga
        >>> model = ga.models.VisionTransformer.from_preset("digits")
        >>> objective = ga.train.Classification(10, label_smoothing=0.1)
        >>> batch = objective.collate(
        ...     [{"image": torch.rand(1, 8, 8), "label": label} for label in (3, 1, 4)])
        >>> objective.loss(model, batch).mean.backward()
        >>> sorted(objective.evaluate(model, [batch]))
        ['accuracy', 'f1_macro', 'loss', 'nats', 'perplexity']
        >>> mixing = ga.train.Classification(10, label_smoothing=0.1, mixup=0.8, cutmix=1.0)
        >>> mixing.loss(model.train(), batch).mean.backward()
        >>> mixing.evaluate(model, [batch]) == objective.evaluate(model, [batch])
        True
    """

    name = "classification"

    def __init__(
        self,
        num_classes: int,
        label_smoothing: float = 0.0,
        *,
        classes: Sequence[str] | None = None,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        augment: Callable[[Tensor], Tensor] | None = None,
        per_token: bool = False,
        packed: bool = False,
    ) -> None:
        self.num_classes = as_int("num_classes", num_classes, 2)
        self.label_smoothing = as_share("label_smoothing", label_smoothing)
        self.classes = None if classes is None else list(classes)
        if self.classes is not None and len(self.classes) > self.num_classes:
            raise ValueError(
                f"classes must be at most num_classes={self.num_classes} names, got "
                f"{len(self.classes)}"
            )
        self.per_token = as_choice("per_token", per_token, (False, True))
        self.packed = as_choice("packed", packed, (False, True))
        self.mixup, self.cutmix = check_alphas(mixup, cutmix)
        if augment is not None and not callable(augment):
            raise ValueError(
                "augment must be a function of images [B, C, H, W], or None, got "
                f"{type(augment).__name__}"
            )
        self.augment = augment
        if self.per_token:
            self._need_images("per_token=True")

    def _need_images(self, given: str) -> None:
        """Raise a ValueError if options for images are set."""
        for name, off in (("mixup", 0), ("cutmix", 0), ("augment", None)):
            if (value := getattr(self, name)) != off:
                raise ValueError(
                    f"{name} must be {off} with {given}, because only images can be changed, got "
                    f"{value!r}"
                )

    def collate(self, examples: Sequence[Example]) -> Batch:
        """Join images or sequences into one batch with "label" [B] or "labels" [B, N]."""
        if self.per_token:
            return collate_tokens(examples, "labels")
        is_image = all_have(checked(examples), "image")
        if not is_image:
            self._need_images("examples of tokens")
        batch = collate_images(examples) if is_image else collate_tokens(examples)
        batch["label"] = torch.tensor([self._label(example) for example in examples])
        return batch

    def _label(self, example: Example) -> int:
        label: Any = example.get("label")
        try:
            label = as_int("label", label, 0)
        except ValueError as error:
            named = f" ({example['name']!r})" if example.get("name") else ""
            raise ValueError(f"every example must contain a class{named}: {error}") from None
        if label >= self.num_classes:
            raise ValueError(f"label must be 0 .. {self.num_classes - 1}, got {label}")
        return label

    def guesses(
        self, model: nn.Module, batch: Batch, generator: Generator | None = None
    ) -> Guesses:
        """Return logits [n, num_classes] and classes [n] of images, sequences, or tokens."""
        if self.per_token:
            labels = batch["labels"]
            if labels.is_floating_point():
                raise ValueError(f"labels must be integers, got {labels.dtype}")
            where = guessed_here(model, labels >= 0, batch)
            logits = outputs_at(model, batch["tokens"], batch, where, packed=self.packed)
            truth = labels[where]
        else:
            truth = batch["label"]
            if "image" in batch:
                logits = model(batch["image"])
            else:
                logits = pooled_outputs(model, batch, packed=self.packed)
        if logits.dim() != 2 or logits.shape[-1] != self.num_classes:
            raise ValueError(
                f"model must return num_classes={self.num_classes} logits, got shape "
                f"{list(logits.shape)} from a {type(unwrapped(model)).__name__}: ga.train.WithHead "
                "gives a model of tokens a head of another width"
            )
        return logits, truth

    def loss(self, model: nn.Module, batch: Batch, generator: Generator | None = None) -> Loss:
        """Return the smoothed cross-entropy, "accuracy", and "nats" without smoothing.

        Outside of training, ``sums`` also has the counts of :func:`f1_macro`, under the names of
        :data:`COUNTS`. A step of training reads no F1, and would wait for three numbers per class.
        """
        in_training = getattr(model, "training", False)
        if in_training and "image" in batch:
            batch = self._changed(batch, generator)
        logits, truth = self.guesses(model, batch, generator)
        target = batch.get("target", truth)
        smoothed = nats(logits, target, self.label_smoothing)
        with torch.no_grad():
            plain = float(nats(logits, target).sum() if self.label_smoothing else smoothed.sum())
        sums = {"accuracy": num_right(logits, truth), "nats": plain}
        if not in_training:
            sums |= counts_of_classes(logits, truth)
        return loss_of(smoothed, len(truth), sums, (logits, truth))

    def _changed(self, batch: Batch, generator: Generator | None) -> Batch:
        """Return a batch with augmented and mixed images; "target" [B, K] are probabilities."""
        images = batch["image"]
        if self.augment is not None:
            images = self._augmented(images, generator)
        if not (self.mixup or self.cutmix):
            return {**batch, "image": images}
        images, target = mix_images(
            images,
            batch["label"],
            self.num_classes,
            mixup=self.mixup,
            cutmix=self.cutmix,
            generator=generator,
        )
        return {**batch, "image": images, "label": target.argmax(-1), "target": target}

    def _augmented(self, images: Tensor, generator: Generator | None) -> Tensor:
        assert self.augment is not None
        if generator is None:
            changed = self.augment(images)
        else:  # `augment` draws from the default generators, so a generator gives their seed
            seed = torch.randint(2**62, (), generator=generator, device=generator.device)
            devices = [images.device] if images.device.type == "cuda" else []
            with torch.random.fork_rng(devices):
                torch.manual_seed(int(seed))
                changed = self.augment(images)
        if not isinstance(changed, Tensor) or changed.shape != images.shape:
            raise ValueError(
                f"augment must return images of the same shape, {list(images.shape)}, got "
                f"{described(changed)}"
            )
        return changed

    def report(self, mean: float, means: dict[str, float]) -> dict[str, float]:
        """Return loss, nats, accuracy, macro F1 and the perplexity, exp(nats)."""
        unsmoothed = means["nats"]
        perplexity = math.exp(unsmoothed) if unsmoothed < 700 else math.inf
        shown = {name: value for name, value in means.items() if not name.startswith(COUNTS)}
        return {"loss": mean, "perplexity": perplexity, **shown, "f1_macro": f1_macro(means)}


RIGHT, ASKED, GUESSED = COUNTS = "right_of_", "asked_of_", "guessed_of_"


def counts_of_classes(logits: Tensor, truth: Tensor) -> dict[str, float]:
    """Count for every class that occurs how often it is right, asked and guessed.

    Args:
        logits: [n, K].
        truth: [n], the right classes.

    Returns:
        A dict with numbers above 0, by names such as "asked_of_3".
    """
    if not len(truth):
        return {}
    guess, classes = logits.argmax(-1), logits.shape[-1]
    counts = {RIGHT: truth[guess == truth], ASKED: truth, GUESSED: guess}
    return {
        f"{name}{k}": float(count)
        for name, which in counts.items()
        for k, count in enumerate(which.bincount(minlength=classes).tolist())
        if count
    }


def f1_macro(counts: Mapping[str, float]) -> float:
    """Compute the mean F1 score of the classes that occur, from :func:`counts_of_classes`.

    All counts may be multiplied by one factor.
    """
    occurs: dict[str, float] = {}  # 2 TP + FP + FN, by class
    for name, count in counts.items():
        for prefix in (ASKED, GUESSED):
            if name.startswith(prefix):
                k = name.removeprefix(prefix)
                occurs[k] = occurs.get(k, 0.0) + count
    scores = [2 * counts.get(f"{RIGHT}{k}", 0.0) / both for k, both in occurs.items()]
    return sum(scores) / len(scores) if scores else math.nan

"""Masked-token modelling: a model guesses hidden tokens from the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from graphattn.graphs.arguments import as_choice, as_int
from graphattn.models.proteins.source_tracks import LETTERS
from graphattn.train.batches import collate_tokens, guessed_here, outputs_of_tracks, unwrapped
from graphattn.train.objectives.masking import SCHEDULES, MaskSchedule, Schedule, mask_tokens
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

TOGETHER = "together"  # a track that is masked where the letters are
UNKNOWN = -1  # a code, or a class of context, that a model does not read


class MaskedTokens(LikelihoodObjective):
    r"""Masked-token modelling: a share of the tokens is hidden, and the model guesses them.

    The share is drawn per sequence from a :class:`MaskSchedule`, and every token is masked with
    this probability. The loss is the mean over all masked tokens, in nats per masked token:

    .. math::
        \frac{\sum_b \sum_{i \in M_b} -\log p(x_{b,i} \mid x_{b, \setminus M_b})}{\sum_b |M_b|}

    If no token of a sequence is drawn, one token is masked, each with the same probability.

    With ``weight="1/ratio"``, a sequence with the ratio r has the weight 1 / r, and the loss is in
    nats per token:

    .. math::
        \frac{\sum_b \frac{1}{r_b} \sum_{i \in M_b}
            -\log p(x_{b,i} \mid x_{b, \setminus M_b})}{\sum_b N_b}

    For the schedule "linear" its expectation is an upper bound of the negative log-likelihood of
    the text, the one of absorbing diffusion. With this weight, a sequence without a drawn token
    stays unmasked.

    **Source tracks.** A :class:`~graphattn.models.ProteinModel` with source tracks, such as codes
    of the structure, also learns to guess these. Each track in `tracks` is masked by its own
    schedule, with its own ratio per sequence, or where the letters are masked ("together"). The
    loss is the mean over the masked tokens of all tracks. Reports also have the loss and the
    accuracy of each track, such as "loss_structure". Unknown codes (below 0) are never guessed. The
    model reads tracks of an example that are not in `tracks` as they are.

    **Context.** With `context_schedule`, a share of the rows of each track of context becomes
    unknown, in evaluations, too. The share is drawn per sequence and track.

    Args:
        mask_token: the token of a masked position; for a :class:`~graphattn.models.ProteinModel` is
            ``model.mask_token``.
        schedule: "constant", "linear", "cosine", "sqrt" or "betalinear30".
        mask_ratio: the ratio of "constant", in (0, 1].
        replace: if True, 80 % of the masked tokens become the mask token, 10 % a random token, and
            10 % do not change (BERT). If False, all become the mask token.
        vocab_size: with `replace`, random tokens are drawn from 0 .. vocab_size - 1 without the
            mask token; `mask_token` if None.
        weight: "none" or "1/ratio".
        tracks: names of source tracks to guess, and the schedule of each ("constant" has the ratio
            `mask_ratio`); or "together", which masks them where the letters are masked.
        context_schedule: the schedule of the context; None leaves it as it is.
        packed: pack sequences of unequal lengths into one row, over graphs without edges between
            them, instead of padding rows. The outputs do not change.

    Raises:
        ValueError: if an argument is not allowed; the message names it and says what is allowed.

    Source:
        BERT (Devlin et al., 2019), Section 3.1 and Appendix A.1; ESM3 (Hayes et al., 2024),
        Appendix A.2.2; for ``weight="1/ratio"`` MDLM (Sahoo et al., 2024), Equation 10, and LLaDA
        (Nie et al., 2025), Equation 3. Stabilizing Transformer Training Through Consensus, Section
        5.1 and Appendix E.1, for source tracks ("betalinear30" for letters, "cosine" for
        structures) and context ("sqrt").

    Example:
        >>> import torch, graphattn as ga
        >>> model = ga.models.ProteinModel(16, depth=1, heads=2)
        >>> objective = ga.train.MaskedTokens(model.mask_token, "betalinear30")
        >>> batch = objective.collate(
        ...     [{"tokens": model.tokenizer.encode(text)} for text in ("MKVLAGHW", "GWKLM")])
        >>> batch["tokens"].shape, batch["valid"].sum(1)
        (torch.Size([2, 8]), tensor([8, 5]))
        >>> loss = objective.loss(model, batch)
        >>> loss.mean.backward()
        >>> sorted(objective.evaluate(model, [batch]))
        ['accuracy', 'loss', 'perplexity']
        >>> both = ga.models.ProteinModel(16, depth=1, heads=2, tracks={"structure": 512})
        >>> objective = ga.train.MaskedTokens(21, "betalinear30", tracks={"structure": "cosine"})
        >>> example = {"tokens": both.tokenizer.encode("MKVLAGHW")}
        >>> example["tracks"] = {"structure": torch.randint(512, (8,))}
        >>> report = objective.evaluate(both, [objective.collate([example])])
        >>> [name for name in report if "structure" in name]
        ['loss_structure', 'accuracy_structure']
    """

    name = "masked"

    def __init__(
        self,
        mask_token: int,
        schedule: Schedule = "constant",
        mask_ratio: float = 0.15,
        *,
        replace: bool = False,
        vocab_size: int | None = None,
        weight: Literal["none", "1/ratio"] = "none",
        tracks: Mapping[str, Schedule | Literal["together"]] | None = None,
        context_schedule: Schedule | None = None,
        packed: bool = False,
    ) -> None:
        self.mask_token = as_int("mask_token", mask_token, 0)
        self.schedule, self.mask_ratio = schedule, mask_ratio
        self._ratios = MaskSchedule(schedule, mask_ratio)
        self.replace = as_choice("replace", replace, (False, True))
        self.vocab_size = vocab_size
        self.weight = as_choice("weight", weight, ("none", "1/ratio"))
        self.packed = as_choice("packed", packed, (False, True))
        if vocab_size is not None and not replace:
            raise ValueError(
                f"vocab_size must be None without replace=True, got {vocab_size}: only random "
                "tokens need it"
            )
        self.tracks, self._tracks = tracks, _checked_tracks(tracks)
        self.context_schedule = context_schedule
        if context_schedule is not None:
            as_choice("context_schedule", context_schedule, SCHEDULES)
        for option, off in (("replace", False), ("weight", "none")):
            if self._tracks and (given := getattr(self, option)) != off:
                raise ValueError(
                    f"{option} must be {off!r} with tracks, got {given!r}: it is defined for the "
                    "letters alone"
                )
        # This raises an error if the vocabulary leaves no random token.
        mask_tokens(torch.zeros(0).long(), mask_token, replace=replace, vocab_size=vocab_size)

    def collate(self, examples: Sequence[Example]) -> Batch:
        """Join sequences into one batch, with structures, context and source tracks."""
        return collate_tokens(examples)

    def guesses(
        self, model: nn.Module, batch: Batch, generator: Generator | None = None
    ) -> Guesses:
        """Return logits [n, vocab_size] of the masked tokens, and the original tokens, [n].

        With source tracks, those of the letters come first. All have the width of the largest
        vocabulary, with -inf where a vocabulary is smaller.
        """
        return _joined(self._guesses(model, batch, generator)[0])

    def loss(self, model: nn.Module, batch: Batch, generator: Generator | None = None) -> Loss:
        """Return the nats of the masked tokens with `weight`; "accuracy" if it is "none"."""
        if self.weight == "none" and not self._tracks:
            return super().loss(model, batch, generator)
        of_tracks, ratio = self._guesses(model, batch, generator)
        losses = {name: nats(*guesses) for name, guesses in of_tracks.items()}
        guesses = _joined(of_tracks)
        if self.weight == "1/ratio":
            valid = batch.get("valid", torch.ones_like(batch["tokens"], dtype=torch.bool))
            count = int(guessed_here(model, valid, batch).sum())
            return loss_of(losses[LETTERS] / ratio, count, guesses=guesses)
        sums = {"accuracy": num_right(*guesses)}
        for name in losses:
            sums[f"nats_{name}"] = float(losses[name].detach().sum())
            sums[f"right_{name}"] = num_right(*of_tracks[name])
            sums[f"count_{name}"] = float(len(losses[name]))
        return loss_of(torch.cat([*losses.values()]), len(guesses[1]), sums, guesses)

    def report(self, mean: float, means: dict[str, float]) -> dict[str, float]:
        """Return loss, perplexity and accuracy; with source tracks, also loss and accuracy of
        each."""
        means = dict(means)
        of_tracks: dict[str, float] = {}
        for name in (LETTERS, *self._tracks):
            count, total, right = (
                means.pop(f"{of}_{name}", 0) for of in ("count", "nats", "right")
            )
            if count:
                of_tracks |= {f"loss_{name}": total / count, f"accuracy_{name}": right / count}
        return {**super().report(mean, means), **of_tracks}

    def _guesses(
        self, model: nn.Module, batch: Batch, generator: Generator | None
    ) -> tuple[dict[str, Guesses], Tensor]:
        """Return logits [n, codes] and the truth [n] of the masked tokens of every track, and the
        mask ratio of the sequence of each masked letter, [n]."""
        tokens = batch["tokens"]
        inside = unwrapped(model)
        vocab_size = getattr(inside, "vocab_size", None)
        if isinstance(vocab_size, int) and self.mask_token >= vocab_size:
            raise ValueError(
                f"mask_token must be one of the {vocab_size} tokens that this "
                f"{type(inside).__name__} reads, got {self.mask_token}"
            )
        ratios = self._ratios.draw(len(tokens), generator=generator, device=tokens.device)
        inputs, masked = mask_tokens(
            tokens,
            self.mask_token,
            mask_ratio=ratios[:, None],
            valid=batch.get("valid"),
            generator=generator,
            replace=self.replace,
            vocab_size=self.vocab_size,
            at_least_one=self.weight == "none",
        )
        truth, where = {LETTERS: tokens}, {LETTERS: masked}
        tracks = dict(batch.get("tracks") or {})
        for name, schedule in self._tracks.items():
            if name not in tracks:
                raise ValueError(
                    f"examples must contain codes of tracks[{name!r}], which the objective asks "
                    f"for, got {', '.join(tracks) or 'no tracks'}"
                )
            truth[name] = codes = tracks[name]
            where[name] = self._masked_codes(codes, schedule, masked, generator)
            tracks[name] = codes.masked_fill(where[name], UNKNOWN)
        changed = {"tracks": tracks}
        if self.context_schedule is not None:
            if not batch.get("context") and not getattr(inside, "context", None):
                raise ValueError(
                    "context_schedule must be None for a model and examples without context, got "
                    f"{self.context_schedule!r}: make ProteinModel(..., context=...), and give "
                    "examples a 'context'"
                )
            changed["context"] = self._corrupted(batch.get("context") or {}, generator)
        given = {**batch, **{key: value for key, value in changed.items() if value}}
        where = {name: guessed_here(model, places, batch) for name, places in where.items()}
        logits = outputs_of_tracks(model, inputs, given, where, packed=self.packed)
        of_tracks = {name: (logits[name], truth[name][where[name]]) for name in where}
        return of_tracks, ratios[:, None].expand_as(masked)[where[LETTERS]]

    def _masked_codes(
        self, codes: Tensor, schedule: str, letters: Tensor, generator: Generator | None
    ) -> Tensor:
        """Draw which codes of a track are masked, bool [B, N]; those that are unknown never are."""
        known = codes >= 0
        if schedule == TOGETHER:
            return letters & known
        ratios = self._draw(schedule, codes, generator)
        _, masked = mask_tokens(
            codes, 0, mask_ratio=ratios, valid=known, generator=generator, at_least_one=True
        )
        return masked

    def _corrupted(self, context: Any, generator: Generator | None) -> dict[str, Tensor]:
        """Make a share of the rows of every track of context unknown."""
        corrupted = {}
        for name, track in context.items():
            drawn = torch.rand(track.shape[:2], generator=generator, device=track.device)
            hidden = drawn < self._draw(self.context_schedule, track, generator)
            unknown = torch.nan if track.is_floating_point() else UNKNOWN
            hidden = hidden.view(*hidden.shape, *[1] * (track.dim() - 2))
            corrupted[name] = track.masked_fill(hidden, unknown)
        return corrupted

    def _draw(self, schedule: Any, track: Tensor, generator: Generator | None) -> Tensor:
        """Draw a ratio per sequence, [B, 1]."""
        drawn = MaskSchedule(schedule, self.mask_ratio)
        return drawn.draw(len(track), generator=generator, device=track.device)[:, None]


def _checked_tracks(tracks: Any) -> dict[str, str]:
    if tracks is None:
        return {}
    if not isinstance(tracks, Mapping):
        raise ValueError(
            "tracks must be a dict of names of source tracks and schedules, such as "
            f"{{'structure': 'cosine'}}, got {type(tracks).__name__}"
        )
    for name, schedule in tracks.items():
        if name == LETTERS:
            raise ValueError(
                f"tracks must not contain {LETTERS!r}: the letters have the argument schedule"
            )
        as_choice(f"tracks[{name!r}]", schedule, (*SCHEDULES, TOGETHER))
    return dict(tracks)


def _joined(of_tracks: Mapping[str, Guesses]) -> Guesses:
    """Join the guesses of all tracks, with -inf for codes that a track does not have."""
    if len(of_tracks) == 1:
        return of_tracks[LETTERS]
    most = max(logits.shape[-1] for logits, _ in of_tracks.values())
    rows = [
        functional.pad(logits, (0, most - logits.shape[-1]), value=-torch.inf)
        for logits, _ in of_tracks.values()
    ]
    return torch.cat(rows), torch.cat([truth for _, truth in of_tracks.values()])

"""Masked-token modelling: a model guesses hidden tokens from the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Generator, Tensor, nn

from graphattn.graphs.arguments import as_choice, as_int
from graphattn.train.batches import collate_tokens, outputs_at, unwrapped
from graphattn.train.objectives.masking import MaskSchedule, Schedule, mask_tokens
from graphattn.train.objectives.objective import (
    Batch,
    Example,
    Guesses,
    LikelihoodObjective,
    Loss,
    loss_of,
    nats,
)


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
        packed: pack sequences of unequal lengths into one row, over graphs without edges between
            them, instead of padding rows. The outputs do not change.

    Raises:
        ValueError: if an argument is not allowed; the message names it and says what is allowed.

    Source:
        BERT (Devlin et al., 2019), Section 3.1 and Appendix A.1; ESM3 (Hayes et al., 2024),
        Appendix A.2.2; for ``weight="1/ratio"`` MDLM (Sahoo et al., 2024), Equation 10, and LLaDA
        (Nie et al., 2025), Equation 3.

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
        # This raises an error if the vocabulary leaves no random token.
        mask_tokens(torch.zeros(0).long(), mask_token, replace=replace, vocab_size=vocab_size)

    def collate(self, examples: Sequence[Example]) -> Batch:
        """Join sequences into one batch, with structures and context."""
        return collate_tokens(examples)

    def guesses(
        self, model: nn.Module, batch: Batch, generator: Generator | None = None
    ) -> Guesses:
        """Return logits [n, vocab_size] of the masked tokens, and the original tokens, [n]."""
        logits, truth, _ = self._guesses(model, batch, generator)
        return logits, truth

    def loss(self, model: nn.Module, batch: Batch, generator: Generator | None = None) -> Loss:
        """Return the nats of the masked tokens with `weight`; "accuracy" if it is "none"."""
        if self.weight == "none":
            return super().loss(model, batch, generator)
        logits, truth, ratio = self._guesses(model, batch, generator)
        valid = batch.get("valid")
        count = batch["tokens"].numel() if valid is None else int(valid.sum())
        return loss_of(nats(logits, truth) / ratio, count, guesses=(logits, truth))

    def _guesses(
        self, model: nn.Module, batch: Batch, generator: Generator | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits [n, vocab_size], the truth [n], and the mask ratio of each one's sequence
        [n]."""
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
        logits = outputs_at(model, inputs, batch, masked, packed=self.packed)
        return logits, tokens[masked], ratios[:, None].expand_as(masked)[masked]

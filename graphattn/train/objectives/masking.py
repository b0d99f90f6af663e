"""Masks of tokens: how many are masked, and which, and the loss of guessing them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Generator, Tensor
from torch.nn import functional

from graphattn.distributed.losses import token_mean
from graphattn.graphs.arguments import as_choice, as_float, as_int
from graphattn.ops.inputs import compute_dtype
from graphattn.train.checks import check_masked_logits, check_range, described, is_integer

Schedule = Literal["constant", "linear", "cosine", "sqrt", "betalinear30"]
SCHEDULES: tuple[Schedule, ...] = ("constant", "linear", "cosine", "sqrt", "betalinear30")

_RATIOS: dict[str, Callable[[Tensor], Tensor]] = {  # functions of t, which is uniform in [0, 1)
    "linear": lambda t: 1 - t,
    "cosine": lambda t: torch.cos(t * (math.pi / 2)),
    "sqrt": lambda t: 1 - t.sqrt(),
}
_MEANS = {"linear": 1 / 2, "cosine": 2 / math.pi, "sqrt": 1 / 3, "betalinear30": 0.3}
_BETA_SHARE = 0.8  # betalinear30: share of sequences with a ratio from Beta(3, 9)


@dataclass(frozen=True)
class MaskSchedule:
    r"""The distribution of the share of tokens that are masked in a sequence.

    ================ ============================================= =========================== =====
    name             ratio                                         density p(r), 0 < r < 1     mean
    ================ ============================================= =========================== =====
    ``constant``     `mask_ratio`                                  none                        ratio
    ``linear``       1 - t                                         1                           1/2
    ``cosine``       cos(pi t / 2)                                 2 / (pi sqrt(1 - r^2))      2/pi
    ``sqrt``         1 - sqrt(t)                                   2 (1 - r)                   1/3
    ``betalinear30`` of Beta(3, 9) with 80 %, else of 0..1         396 r^2 (1 - r)^8 + 0.2     0.3
    ================ ============================================= =========================== =====

    where t is uniform in [0, 1).

    Args:
        name: name of the schedule.
        mask_ratio: the ratio of "constant", in (0, 1]; other schedules ignore it.

    Raises:
        ValueError: if an argument is not allowed; the message names it and says what is allowed.

    Source:
        MaskGIT (Chang et al., 2022), masking design, for "linear", "cosine" and "sqrt"; ESM3 (Hayes
        et al., 2024), Appendix A.2.2, for "betalinear30". BERT (Devlin et al., 2019) has a constant
        ratio of 0.15. The consensus paper masks proteins and DNA by "betalinear30", structures by
        "cosine" and tracks of context by "sqrt".

    Example:
        >>> import torch, graphattn as ga
        >>> schedule = ga.train.MaskSchedule("betalinear30")
        >>> schedule.mean
        0.3
        >>> ratios = schedule.draw(100_000, generator=torch.Generator().manual_seed(0))
        >>> round(float(ratios.mean()), 2)
        0.3
    """

    name: Schedule
    mask_ratio: float = 0.15

    def __post_init__(self) -> None:
        as_choice("schedule", self.name, SCHEDULES)
        if as_float("mask_ratio", self.mask_ratio, positive=True) > 1:
            raise ValueError(f"mask_ratio must be in (0, 1], got {self.mask_ratio}")

    @property
    def mean(self) -> float:
        """Return the mean ratio."""
        return self.mask_ratio if self.name == "constant" else _MEANS[self.name]

    def draw(
        self,
        size: int,
        *,
        generator: Generator | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Draw independent ratios of `size` sequences, float32 [size]."""
        size = as_int("size", size, 0)
        if self.name == "constant":
            return torch.full((size,), self.mask_ratio, device=device)
        if self.name == "betalinear30":
            # The third smallest of 11 uniform numbers has the distribution Beta(3, 11 - 3 + 1).
            uniform = torch.rand(size, 13, generator=generator, device=device)
            beta = uniform[:, :11].sort(1).values[:, 2]
            return torch.where(uniform[:, 11] < _BETA_SHARE, beta, uniform[:, 12])
        return _RATIOS[self.name](torch.rand(size, generator=generator, device=device))

    def density(self, ratio: Tensor) -> Tensor:
        """Return the density p(r) at ratios in (0, 1).

        Raises: ValueError: if the schedule is "constant", which has no density.
        """
        if self.name == "constant":
            raise ValueError("name must be a schedule with a density, got 'constant'")
        if self.name == "linear":
            return torch.ones_like(ratio)
        if self.name == "cosine":
            return 2 / (math.pi * (1 - ratio.square()).sqrt())
        if self.name == "sqrt":
            return 2 * (1 - ratio)
        beta = 495 * ratio.square() * (1 - ratio) ** 8  # 11! / (2! 8!)
        return _BETA_SHARE * beta + (1 - _BETA_SHARE)


def mask_ratios(
    schedule: Schedule,
    size: int,
    *,
    mask_ratio: float = 0.15,
    generator: Generator | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Draw the shares of tokens to mask in `size` sequences from a :class:`MaskSchedule`.

    Args:
        schedule: "constant", "linear", "cosine", "sqrt" or "betalinear30".
        size: number of sequences.
        mask_ratio: the ratio of "constant".
        generator: source of the random numbers.
        device: device on which they are drawn.

    Returns:
        float32 [size], in [0, 1].

    Raises:
        ValueError: if an argument is not allowed; the message names it and says what is allowed.

    Example:
        >>> import torch, graphattn as ga
        >>> ga.train.mask_ratios("constant", 2)
        tensor([0.1500, 0.1500])
        >>> ga.train.mask_ratios("cosine", 3, generator=torch.Generator().manual_seed(0))
        tensor([0.7113, 0.3561, 0.9904])
    """
    return MaskSchedule(schedule, mask_ratio).draw(size, generator=generator, device=device)


def mask_tokens(
    tokens: Tensor,
    mask_token: int,
    *,
    mask_ratio: float | Tensor = 0.15,
    valid: Tensor | None = None,
    generator: Generator | None = None,
    replace: bool = False,
    vocab_size: int | None = None,
    at_least_one: bool = False,
) -> tuple[Tensor, Tensor]:
    """Replace a random share of the tokens by `mask_token`, and return which ones.

    Every token is masked independently with probability `mask_ratio` (BERT, Devlin et al. 2019).
    All masked tokens become mask tokens. If tokens are divided among ranks, mask all of them with
    equal random numbers on every rank, and divide the results (``shard.split``). With
    ``replace=True``, as in BERT, only 80 % do; 10 % become a random token, and 10 % do not change.
    The model has to guess all of them.

    Args:
        tokens: integers of any shape.
        mask_token: the token of a masked position, often the last of the vocabulary.
        mask_ratio: in (0, 1]; or a floating-point tensor in [0, 1], broadcastable to `tokens`, such
            as [B, 1] for one ratio per sequence (:func:`mask_ratios`).
        valid: bool, broadcastable to `tokens`; padding (False) is never masked.
        generator: source of the random numbers.
        replace: whether to use BERT's 80/10/10 rule.
        vocab_size: with `replace`, random tokens are drawn from 0 .. vocab_size - 1 without the
            mask token; `mask_token` if None.
        at_least_one: if no token of a sequence (a row of the last dimension) was masked, mask one
            valid token of it, each with the same probability.

    Returns:
        (inputs, masked): the input of the model, in which masked tokens are replaced, and a bool
        tensor of the same shape.

    Raises:
        ValueError: if an argument is not allowed; the message names it and says what is allowed.

    Example:
        >>> import torch, graphattn as ga
        >>> tokens = torch.arange(8)
        >>> inputs, masked = ga.train.mask_tokens(
        ...     tokens, mask_token=9, mask_ratio=0.5, generator=torch.Generator().manual_seed(0))
        >>> inputs
        tensor([9, 1, 9, 9, 9, 5, 9, 7])
        >>> bool((inputs[~masked] == tokens[~masked]).all())
        True
    """
    _check_tokens(tokens)
    mask_token = as_int("mask_token", mask_token, 0)
    if mask_token > torch.iinfo(tokens.dtype).max:
        raise ValueError(
            f"mask_token must be a number that fits the dtype of tokens, {tokens.dtype}, got "
            f"{mask_token}"
        )
    if isinstance(mask_ratio, Tensor):
        _check_ratios(mask_ratio, tokens)
    elif as_float("mask_ratio", mask_ratio, positive=True) > 1:
        raise ValueError(f"mask_ratio must be in (0, 1], got {mask_ratio}")
    letters = _letters(mask_token, vocab_size) if replace else 0
    drawn = torch.rand(tokens.shape, generator=generator, device=tokens.device)
    masked = drawn < mask_ratio
    if valid is not None:
        if not isinstance(valid, Tensor) or valid.dtype != torch.bool:
            raise ValueError(f"valid must be a bool tensor, got {described(valid)}")
        try:
            masked &= valid
        except RuntimeError:
            raise ValueError(
                f"valid must be broadcastable to tokens {list(tokens.shape)}, "
                f"got {list(valid.shape)}"
            ) from None
    if at_least_one and tokens.dim() and tokens.shape[-1]:
        masked |= _smallest(drawn, valid) & ~masked.any(-1, keepdim=True)
    if not replace:
        return tokens.masked_fill(masked, mask_token), masked
    kind = torch.rand(tokens.shape, generator=generator, device=tokens.device)
    other = torch.randint(
        letters, tokens.shape, generator=generator, device=tokens.device, dtype=tokens.dtype
    )
    other += (other >= mask_token).to(other.dtype)  # all tokens except the mask token
    inputs = tokens.masked_fill(masked & (kind < 0.8), mask_token)
    return torch.where(masked & (kind >= 0.8) & (kind < 0.9), other, inputs), masked


def masked_token_loss(
    logits: Tensor, tokens: Tensor, masked: Tensor, *, group: Any = None
) -> Tensor:
    """Return the mean cross-entropy of the masked tokens, in nats per token.

    Args:
        logits: [*, vocab_size].
        tokens: the original tokens, integers [*].
        masked: bool [*], from :func:`mask_tokens`.
        group: all ranks that share the parameters, if tokens are divided among ranks. The mean is
            then over the masked tokens of all ranks, and its gradient is right after ranks have
            averaged theirs (:func:`graphattn.distributed.token_mean`). None for the tokens of this
            process alone.

    Returns:
        A scalar; 0 (with zero gradients) if nothing is masked.

    Raises:
        ValueError: if the shapes do not fit.

    Example:
        >>> import torch, graphattn as ga
        >>> tokens = torch.tensor([1, 0, 2])
        >>> logits = torch.zeros(3, 4)  # every token equally likely: log 4
        >>> ga.train.masked_token_loss(logits, tokens, torch.tensor([True, False, True]))
        tensor(1.3863)
    """
    _check_tokens(tokens)
    check_masked_logits(logits, tokens, masked)
    guessed = logits[masked].to(compute_dtype(logits.dtype))  # half precision would overflow
    truth = tokens[masked].long()
    check_range(truth, logits.shape[-1], note=" where masked")
    if group is not None:
        losses = functional.cross_entropy(guessed, truth, reduction="none")
        return token_mean(losses, group=group)
    total = functional.cross_entropy(guessed, truth, reduction="sum")
    return total / masked.sum().clamp_min(1)


def _smallest(drawn: Tensor, valid: Tensor | None) -> Tensor:
    """Mark the smallest number of every row, among valid positions.

    If no number of a row is below the ratio, all have the same distribution, so the smallest is at
    each position with the same probability.
    """
    if valid is not None:
        drawn = drawn.masked_fill(~valid, 2.0)
    first = drawn.argmin(-1, keepdim=True)
    is_smallest = torch.zeros_like(drawn, dtype=torch.bool).scatter_(-1, first, True)
    return is_smallest if valid is None else is_smallest & valid


def _letters(mask_token: int, vocab_size: int | None) -> int:
    """Return the number of tokens without the mask token."""
    letters = mask_token
    if vocab_size is not None:
        letters = as_int("vocab_size", vocab_size, 1) - (mask_token < vocab_size)
    if letters < 1:
        raise ValueError(
            "vocab_size must leave at least one token besides the mask token with replace=True, "
            f"got {vocab_size} with mask_token={mask_token}"
        )
    return letters


def _check_ratios(mask_ratio: Tensor, tokens: Tensor) -> None:
    if not mask_ratio.is_floating_point():
        raise ValueError(f"mask_ratio must be a floating-point tensor, got {mask_ratio.dtype}")
    try:
        torch.broadcast_to(mask_ratio, tokens.shape)
    except RuntimeError:
        raise ValueError(
            f"mask_ratio must be broadcastable to tokens {list(tokens.shape)}, "
            f"got {list(mask_ratio.shape)}"
        ) from None
    # Check values only on a CPU, where reading them is cheap.
    if mask_ratio.device.type == "cpu" and not ((mask_ratio >= 0) & (mask_ratio <= 1)).all():
        wrong = mask_ratio[~((mask_ratio >= 0) & (mask_ratio <= 1))][0]
        raise ValueError(f"mask_ratio must be in [0, 1], got {float(wrong)}")


def _check_tokens(tokens: object) -> None:
    if not is_integer(tokens):
        raise ValueError(f"tokens must be an integer tensor, got {described(tokens)}")

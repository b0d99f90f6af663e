"""Choose the next token from logits: the most likely one, or a random one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from graphattn.graphs.arguments import as_float, as_int


@dataclass(frozen=True)
class Sampling:
    """Settings for the choice of the next token.

    Attributes:
        temperature: logits are divided by it; with 0 the most likely token is taken.
        top_k: draw from this number of most likely tokens; None for all. Tokens that are as likely
            as the last of them are included.
        top_p: draw from the smallest set of most likely tokens that together have this probability,
            after `top_k`; None for all.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    @classmethod
    def checked(cls, temperature: Any, top_k: Any, top_p: Any) -> Self:
        """Check the settings and make an instance, or raise a ValueError."""
        temperature = as_float("temperature", temperature, positive=False)
        if top_k is not None:
            top_k = as_int("top_k", top_k, 1)
        if top_p is not None and not 0 < (top_p := as_float("top_p", top_p, positive=True)) <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {top_p}")
        for name, value in (("top_k", top_k), ("top_p", top_p)):
            if value is not None and temperature == 0:
                raise ValueError(
                    f"{name} must be None at temperature 0, which always takes the most likely "
                    f"token, got {value}: give a temperature > 0"
                )
        return cls(temperature, top_k, top_p)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken, without a draw."""
        return self.temperature == 0

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probability of every token, [*, V], in float32 or float64; 0 if excluded."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            # Before the temperature, because a very large temperature makes all tokens equally
            # likely.
            least = logits.topk(self.top_k).values[..., -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        # The largest logit becomes 0, so no temperature gives inf or NaN.
        kind = torch.finfo(logits.dtype)
        temperature = min(max(self.temperature, kind.tiny), kind.max)
        logits = (logits - logits.amax(-1, keepdim=True)) / temperature
        probabilities = logits.softmax(-1)
        if self.top_p is not None and self.top_p < 1:
            ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
            before = ordered.cumsum(-1) - ordered  # probability of all more likely tokens
            left_out = before >= self.top_p  # this is False for the most likely token
            left_out = torch.zeros_like(left_out).scatter(-1, order, left_out)
            probabilities = logits.masked_fill(left_out, -torch.inf).softmax(-1)
        return probabilities

    def choose(self, logits: Tensor, generator: torch.Generator | None) -> Tensor:
        """Choose the next tokens, [*], from logits [*, V]."""
        if self.is_greedy:
            return logits.argmax(-1)
        return draw(self.probabilities(logits), generator)


def draw(probabilities: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw one token per row, [*], from probabilities [*, V]."""
    rows = probabilities.reshape(-1, probabilities.shape[-1])
    if len(rows) == 0:
        return torch.zeros(probabilities.shape[:-1], dtype=torch.int64, device=rows.device)
    drawn = torch.multinomial(rows, 1, generator=generator)
    return drawn.view(probabilities.shape[:-1])

"""The next token from logits: the likeliest, or one drawn at a temperature from the likelier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from graphattn.graphs.arguments import as_float, as_int


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen.

    Attributes:
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_k: how many of the likeliest take part; all if None. Tokens that are as likely as the
            last of them take part, too.
        top_p: the fewest likeliest tokens that together have this probability take part, after
            `top_k`; all if None.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    @classmethod
    def checked(cls, temperature: Any, top_k: Any, top_p: Any) -> Self:
        """One of these, or a ValueError."""
        temperature = as_float("temperature", temperature, positive=False)
        if top_k is not None:
            top_k = as_int("top_k", top_k, 1)
        if top_p is not None and not 0 < (top_p := as_float("top_p", top_p, positive=True)) <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {top_p}")
        for name, value in (("top_k", top_k), ("top_p", top_p)):
            if value is not None and temperature == 0:
                raise ValueError(
                    f"{name} must be None at temperature 0, which takes the likeliest token, "
                    f"got {value}: give a temperature > 0"
                )
        return cls(temperature, top_k, top_p)

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probability of every token, [*, V], at least in float32; 0 for those that take
        no part.
        """
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            # Before the temperature: a huge one makes all as likely as the last.
            least = logits.topk(self.top_k).values[..., -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        # The likeliest stands at 0, which no temperature turns into inf or NaN.
        kind = torch.finfo(logits.dtype)
        temperature = min(max(self.temperature, kind.tiny), kind.max)
        logits = (logits - logits.amax(-1, keepdim=True)) / temperature
        found = logits.softmax(-1)
        if self.top_p is not None and self.top_p < 1:
            ordered, order = found.sort(dim=-1, descending=True, stable=True)
            before = ordered.cumsum(-1) - ordered  # probability of the likelier tokens
            left_out = before >= self.top_p  # never the likeliest
            left_out = torch.zeros_like(left_out).scatter(-1, order, left_out)
            found = logits.masked_fill(left_out, -torch.inf).softmax(-1)
        return found

    def choose(self, logits: Tensor, generator: torch.Generator | None) -> Tensor:
        """The next tokens, [*], from logits [*, V]."""
        if self.is_greedy:
            return logits.argmax(-1)
        return draw(self.probabilities(logits), generator)


def draw(probabilities: Tensor, generator: torch.Generator | None) -> Tensor:
    """One token of every row, [*], from probabilities [*, V]."""
    rows = probabilities.reshape(-1, probabilities.shape[-1])
    if len(rows) == 0:
        return torch.zeros(probabilities.shape[:-1], dtype=torch.int64, device=rows.device)
    drawn = torch.multinomial(rows, 1, generator=generator)
    return drawn.view(probabilities.shape[:-1])

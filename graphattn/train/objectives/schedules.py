"""Mask schedules: distributions of the share of masked tokens in a sequence."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from graphattn.graphs.arguments import as_choice, as_float, as_int

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
    mask_ratio: float = field(default=0.15)

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
        generator: torch.Generator | None = None,
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
    generator: torch.Generator | None = None,
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

"""Exponentials and logarithms: base 2 inside kernels (one instruction), natural outside."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def level_of(b_max):
    """Return the number to subtract before exponentials: the maximum, or 0 if it is -inf.

    The maximum of a row without edges is -inf, and -inf - -inf is NaN. Any shape.
    """
    return tl.where(b_max == float("-inf"), 0.0, b_max)


@triton.jit
def weights_from(b_logit):
    """Weights from base-2 logits minus their row's log-sum, of any shape.

    They are at most 1, however the logits are rounded. NaN stays NaN.
    """
    return tl.exp2(tl.minimum(b_logit, 0.0, propagate_nan=tl.PropagateNan.ALL))


def saved_log_sums(lse: Tensor, shift: Tensor | None = None) -> Tensor:
    """Base-2 log-sums as backward kernels subtract them from logits: +inf leaves a row no weight.

    `lse` are natural ones, -inf for rows without edges. What kernels leave out of the logits of a
    row, they leave out of its log-sum, too: `shift`, a number in base 2 per row, is added.
    """
    saved = lse * LOG2E.value
    if shift is not None:
        saved += shift
    return torch.where(lse == -torch.inf, torch.inf, saved)

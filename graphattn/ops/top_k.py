"""The rule of top-k: the largest logits are selected, of equal ones those with the smaller index.

Everything in Python that selects sources asks this file. Kernels repeat the rule: in C++
`kernels/cpu/band_top_k.h`, `band_diagonals.h`, `rows.cpp` and `steps.cpp`, in Triton
`kernels/bands/top_k.py`, `kernels/edges/top_k.py` and `kernels/generation/step.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def order_of_selection(logits: Tensor, dim: int = -1) -> Tensor:
    """Indices along `dim`, in the order in which top-k selects them; NaN counts as the largest.

    torch.topk promises no order of equal numbers, so this sorts, stably.
    """
    return logits.detach().argsort(dim=dim, descending=True, stable=True)


def top_k_mask(logits: Tensor, k: int) -> Tensor:
    """Mark the `k` selected logits of every row [..., m], bool; all if there are no more."""
    best = order_of_selection(logits)[..., :k]
    return torch.zeros_like(logits, dtype=torch.bool).scatter(-1, best, True)


def among_best(logits: Tensor, k: int) -> Tensor:
    """:func:`top_k_mask` for k < m without a sort, which takes longest in a row of few queries.

    Of a row that holds NaN, it may mark fewer or more.
    """
    last = logits.topk(k, dim=-1).values[..., -1:]
    larger, equal = ~(logits <= last), logits == last
    return larger | (equal & (equal.cumsum(-1) <= k - larger.sum(-1, keepdim=True)))

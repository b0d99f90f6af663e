"""The softmax over the sources of every row, and the choice of the top_k sources."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from graphattn.ops.top_k import top_k_mask

EXACT = 1 << 14  # how many exact logits are computed at a time

Rows = Callable[[tuple[Tensor, ...]], Tensor]


def softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Weights [..., m] and log-sums [...]; for a row of -inf only, zeros and -inf."""
    highest = logits.amax(dim=-1)
    empty = highest == -torch.inf
    some_empty = bool(empty.any())
    if some_empty:
        logits = logits.masked_fill(empty[..., None], 0)
    weights = torch.softmax(logits, dim=-1)
    if logits.requires_grad and torch.is_grad_enabled():
        lse = logits.logsumexp(dim=-1)
    else:
        lse = highest - weights.amax(dim=-1).log()  # the largest weight is exp(0) / sum
    if some_empty:
        weights, lse = weights.masked_fill(empty[..., None], 0), lse.masked_fill(empty, -torch.inf)
    return weights, lse


def keep_best(
    logits: Tensor, top_k: int, rounding: Callable[[Tensor], Tensor], exact: Rows
) -> Tensor:
    """Mark the `top_k` largest logits of every row, bool; of equal ones the earlier; never -inf.

    Products of matrices may give equal sources logits that differ by rounding. So if more than
    `top_k` logits of a row are within `rounding` of the least selected one or above, the choice is
    made by the `exact` logits [rows, m], which are computed as in the reference.
    """
    logits = logits.detach()
    ranked = logits.masked_fill(logits.isnan(), torch.inf)  # NaN is the largest, as in a sort
    least = ranked.topk(top_k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    least = least.clamp(min=torch.finfo(logits.dtype).min)
    best = ranked >= least
    near = rounding(least)
    near = ranked >= least - torch.where(near.isnan(), torch.inf, near)
    places = ((near & (ranked > -torch.inf)).sum(-1) > top_k).nonzero()
    for few in places.split(max(1, EXACT // logits.shape[-1])):
        place = few.unbind(1)
        row, hidden = exact(place), ranked[place] == -torch.inf
        row = row.masked_fill(row.isnan(), torch.inf).masked_fill(hidden, -torch.inf)
        best[place] = top_k_mask(row, top_k) & (row > -torch.inf)
    return best

"""The softmax over the sources of every row, of all of them or of the largest few."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

EXACT = 1 << 14  # logits at a time that are computed one by one

Rows = Callable[[tuple[Tensor, ...]], Tensor]


def softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Weights [..., m] and log-sums [...]; a row of -inf alone has zeros and -inf."""
    highest = logits.amax(dim=-1)
    empty = highest == -torch.inf
    some_empty = bool(empty.any())
    if some_empty:
        logits = logits.masked_fill(empty[..., None], 0)
    weights = torch.softmax(logits, dim=-1)
    if logits.requires_grad and torch.is_grad_enabled():
        lse = logits.logsumexp(dim=-1)
    else:
        lse = highest - weights.amax(dim=-1).log()  # the largest weight is exp(0) over the sum
    if some_empty:
        weights, lse = weights.masked_fill(empty[..., None], 0), lse.masked_fill(empty, -torch.inf)
    return weights, lse


def keep_best(
    logits: Tensor, top_k: int, rounding: Callable[[Tensor], Tensor], exact: Rows
) -> Tensor:
    """Bool: the `top_k` largest of every row, of equal ones the earlier; -inf and its like never.

    Products round equal sources apart. So rows with more than `top_k` within `rounding` of their
    least one are judged by `exact` logits [rows, m], one by one as the reference has them.
    """
    logits = logits.detach()
    ranked = logits.masked_fill(
        logits.isnan(), torch.inf
    )  # NaN counts as the largest, as in a sort
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
        order = row.argsort(dim=-1, descending=True, stable=True)[:, :top_k]
        first = torch.zeros_like(hidden).scatter(
            -1, order, torch.ones_like(order, dtype=torch.bool)
        )
        best[place] = first & (row > -torch.inf)
    return best

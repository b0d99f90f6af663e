"""Scores of all pairs of a few queries and keys, and the way back for gradients.

RBF scores come from ``q - k`` itself: nothing cancels, and what a pair gives depends on no other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Sure = Tensor | bool

SURE = 1e7  # ||q||^2 + ||k||^2 in units of sigma^2: float64 rounds their product by less than 1e-8


def sure_pairs(query: Tensor, key: Tensor, scale: Tensor) -> Sure:
    """Pairs [*, n, m] of which products in float64 are as good as differences; or all, or none.

    Queries [*, n, D] and keys [*, m, D] are float32, which leaves room for that; `scale` [*, 1, 1].
    """
    if query.dtype == torch.float64 or query.device.type == "mps" or query.shape[-2] == 1:
        return False
    if query.numel() == 0 or key.numel() == 0:
        return False
    of_query, of_key = (scale * x.detach().square().sum(-1, keepdim=True) for x in (query, key))
    if bool(of_query.amax() + of_key.amax() < SURE):
        return True
    return of_query + of_key.mT < SURE  # False for NaN


def half_squares(query: Tensor, key: Tensor, sure: Sure) -> Tensor:
    """-||q - k||^2 / 2 of all pairs, [*, n, m]."""
    if sure is False:
        return _by_differences(query, key)
    q, k = query.double(), key.double()
    qq, kk = (x.square().sum(-1, keepdim=True) / -2 for x in (q, k))
    wide_q, wide_k = torch.cat([q, qq, torch.ones_like(qq)], -1), [k, torch.ones_like(kk), kk]
    found = (wide_q @ torch.cat(wide_k, -1).mT).to(query.dtype).clamp_(max=0)
    return found if sure is True else torch.where(sure, found, _by_differences(query, key))


def drawn(pull: Tensor, query: Tensor, key: Tensor, sure: Sure) -> tuple[Tensor, Tensor]:
    """The sums of ``pull * (k - q)`` over keys and of ``pull * (q - k)`` over queries."""
    if sure is True:
        return _drawn_by_products(pull, query, key)
    others = pull if sure is False else torch.where(sure, 0, pull)
    found = _drawn_by_differences(others, query, key), _drawn_by_differences(others.mT, key, query)
    if sure is False:
        return found
    both = _drawn_by_products(torch.where(sure, pull, 0), query, key)
    return found[0] + both[0], found[1] + both[1]


class HalfSquares(torch.autograd.Function):
    """:func:`half_squares` that can be differentiated any number of times, in their memory."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, sure: Sure) -> Tensor:
        ctx.save_for_backward(query, key)
        return half_squares(query, key, sure)

    @staticmethod
    def backward(ctx: Any, pull: Tensor) -> tuple[Tensor, Tensor, None]:
        return *_drawn_by_products(pull, *ctx.saved_tensors), None


def _by_differences(query: Tensor, key: Tensor) -> Tensor:
    found = torch.cdist(query, key, compute_mode="donot_use_mm_for_euclid_dist")
    return found.square_().div_(-2)


def _drawn_by_products(pull: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    dtype, wide = pull.dtype, pull.dtype if pull.device.type == "mps" else torch.float64
    pull, query, key = pull.to(wide), query.to(wide), key.to(wide)
    d_query = pull @ key - pull.sum(-1)[..., None] * query
    d_key = pull.mT @ query - pull.sum(-2)[..., None] * key
    return d_query.to(dtype), d_key.to(dtype)


def _drawn_by_differences(pull: Tensor, query: Tensor, key: Tensor) -> Tensor:
    if query.device.type == "cpu":  # as far as this derivative knows, all distances are 1
        distance = torch.ones_like(pull, memory_format=torch.contiguous_format)
        return -torch.ops.aten._cdist_backward(pull.contiguous(), query, key, 2.0, distance)
    features = zip(query.unbind(-1), key.unbind(-1), strict=True)
    return torch.stack(
        [(pull * (k[..., None, :] - q[..., None])).sum(-1) for q, k in features], dim=-1
    )


def product(weights: Tensor, x: Tensor, keep: Tensor | None, finite: bool) -> Tensor:
    """weights @ x over the kept pairs: NaN in x reaches the rows that keep it and no other."""
    if finite:
        return weights @ x
    return spoilt(weights @ cleaned(x), x, weights, keep)


def cleaned(x: Tensor) -> Tensor:
    """Replace NaN and infinity by 0."""
    return x.masked_fill(~x.isfinite(), 0)


def spoilt(found: Tensor, x: Tensor, weights: Tensor, keep: Tensor | None) -> Tensor:
    """`found` [*, n, D] with NaN where a row keeps one in x [*, m, D]; `weights` [*, n, m]."""
    kept = torch.ones_like(weights) if keep is None else keep.expand_as(weights).to(x.dtype)
    return found.masked_fill(kept @ (~x.isfinite()).to(x.dtype) > 0, torch.nan)

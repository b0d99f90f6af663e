"""Scores of all pairs of a few queries and keys, and the way back for gradients.

RBF scores come from ``q - k`` itself: nothing cancels, and what a pair gives depends on no other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SURE = 1e7  # ||q||^2 + ||k||^2 in units of sigma^2: float64 rounds their product by less than 1e-8


def half_squares(query: Tensor, key: Tensor, scale: Tensor) -> Tensor:
    """-||q - k||^2 / 2 of queries [*, n, D] and keys [*, m, D]: [*, n, m]; `scale` [*, 1, 1].

    By differences; of float32 by products in float64, which are faster, where these are as good.
    """
    if query.dtype == torch.float64 or query.device.type == "mps" or query.shape[-2] == 1:
        return _by_differences(query, key)
    q, k = query.double(), key.double()
    qq, kk = (x.square().sum(-1, keepdim=True) / -2 for x in (q, k))
    one_q, one_k = torch.ones_like(qq), torch.ones_like(kk)
    products = torch.cat([q, qq, one_q], -1) @ torch.cat([k, one_k, kk], -1).mT
    found = products.to(query.dtype).clamp(max=0)
    if bool(scale.detach().amax() * (qq.amin() + kk.amin()) > SURE / -2):
        return found
    sure = scale.detach() * (qq + kk.mT) > SURE / -2  # pair by pair: False for NaN
    return torch.where(sure, found, _by_differences(query, key))


def _by_differences(query: Tensor, key: Tensor) -> Tensor:
    found = torch.cdist(query, key, compute_mode="donot_use_mm_for_euclid_dist")
    return found.square_().div_(-2)


class HalfSquares(torch.autograd.Function):
    """:func:`half_squares` that can be differentiated any number of times, in their memory."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(query, key)
        return half_squares(query, key, scale)

    @staticmethod
    def backward(ctx: Any, pull: Tensor) -> tuple[Tensor, Tensor, None]:
        wide = pull.dtype if pull.device.type == "mps" else torch.float64
        query, key = (x.to(wide) for x in ctx.saved_tensors)
        pull, dtype = pull.to(wide), pull.dtype
        d_query = pull @ key - pull.sum(-1)[..., None] * query
        d_key = pull.mT @ query - pull.sum(-2)[..., None] * key
        return d_query.to(dtype), d_key.to(dtype), None


def drawn(pull: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The sum of ``pull * (k - q)`` over keys, [*, n, D], of pull [*, n, m]: by differences."""
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
    """0 in place of NaN and infinity."""
    return x.masked_fill(~x.isfinite(), 0)


def spoilt(found: Tensor, x: Tensor, weights: Tensor, keep: Tensor | None) -> Tensor:
    """`found` [*, n, D] with NaN where a row keeps one in x [*, m, D]; `weights` [*, n, m]."""
    kept = torch.ones_like(weights) if keep is None else keep.expand_as(weights).to(x.dtype)
    return found.masked_fill(kept @ (~x.isfinite()).to(x.dtype) > 0, torch.nan)

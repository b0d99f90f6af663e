"""Squared distances of all pairs of a few queries and keys, and their gradients.

Distances are computed from ``q - k``, or from products in float64, so that no large numbers cancel
and every pair is independent of the others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Sure = Tensor | bool  # whether products are accurate enough, per pair or for all pairs

SURE = 1e7  # ||q||^2 + ||k||^2 in units of sigma^2: float64 rounds their product by less than 1e-8


def sure_pairs(query: Tensor, key: Tensor, scale: Tensor) -> Sure:
    """Mark the pairs [*, n, m] for which products in float64 are as accurate as differences.

    True stands for all pairs, False for none. Queries [*, n, D] and keys [*, m, D] must be float32,
    so that float64 has digits to spare; `scale` is [*, 1, 1].
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


def half_square_gradients(
    pull: Tensor, query: Tensor, key: Tensor, sure: Sure
) -> tuple[Tensor, Tensor]:
    """The gradients of queries and keys from those of :func:`half_squares`, `pull` [*, n, m].

    They are the sums of ``pull * (k - q)`` over keys, and of ``pull * (q - k)`` over queries.
    """
    if sure is True:
        return _gradients_by_products(pull, query, key)
    others = pull if sure is False else torch.where(sure, 0, pull)
    d_query = _gradients_by_differences(others, query, key)
    d_key = _gradients_by_differences(others.mT, key, query)
    if sure is False:
        return d_query, d_key
    of_sure = _gradients_by_products(torch.where(sure, pull, 0), query, key)
    return d_query + of_sure[0], d_key + of_sure[1]


class HalfSquares(torch.autograd.Function):
    """:func:`half_squares` with gradients that can be differentiated again, in little memory."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, sure: Sure) -> Tensor:
        ctx.save_for_backward(query, key)
        return half_squares(query, key, sure)

    @staticmethod
    def backward(ctx: Any, pull: Tensor) -> tuple[Tensor, Tensor, None]:
        return *_gradients_by_products(pull, *ctx.saved_tensors), None


def _by_differences(query: Tensor, key: Tensor) -> Tensor:
    found = torch.cdist(query, key, compute_mode="donot_use_mm_for_euclid_dist")
    return found.square_().div_(-2)


def _gradients_by_products(pull: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    dtype, wide = pull.dtype, pull.dtype if pull.device.type == "mps" else torch.float64
    pull, query, key = pull.to(wide), query.to(wide), key.to(wide)
    d_query = pull @ key - pull.sum(-1)[..., None] * query
    d_key = pull.mT @ query - pull.sum(-2)[..., None] * key
    return d_query.to(dtype), d_key.to(dtype)


def _gradients_by_differences(pull: Tensor, query: Tensor, key: Tensor) -> Tensor:
    if query.device.type == "cpu":  # with distances of 1 it gives pull * (q - k)
        distance = torch.ones_like(pull, memory_format=torch.contiguous_format)
        return -torch.ops.aten._cdist_backward(pull.contiguous(), query, key, 2.0, distance)
    features = zip(query.unbind(-1), key.unbind(-1), strict=True)
    return torch.stack(
        [(pull * (k[..., None, :] - q[..., None])).sum(-1) for q, k in features], dim=-1
    )


def product(weights: Tensor, x: Tensor, keep: Tensor | None, finite: bool) -> Tensor:
    """weights @ x over the pairs of `keep`: NaN in x reaches only rows that keep it."""
    if finite:
        return weights @ x
    return with_nan(weights @ finite_part(x), x, weights, keep)


def finite_part(x: Tensor) -> Tensor:
    """x with 0 in place of NaN and infinity."""
    return x.masked_fill(~x.isfinite(), 0)


def with_nan(found: Tensor, x: Tensor, weights: Tensor, keep: Tensor | None) -> Tensor:
    """`found` [*, n, D] with NaN where a row keeps a NaN or infinity of x [*, m, D].

    `weights` are [*, n, m].
    """
    selected = torch.ones_like(weights) if keep is None else keep.expand_as(weights).to(x.dtype)
    return found.masked_fill(selected @ (~x.isfinite()).to(x.dtype) > 0, torch.nan)

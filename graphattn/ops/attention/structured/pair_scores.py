"""The logits of all pairs of a chunk and their gradients: one class per score.

Each is computed from queries [B, H, T, n, D], keys [B, H, T, m, D] and a factor [H, 1, 1, 1]. In a
row where rounding could change the choice of top_k, the `exact` logits decide: they equal those of
the reference to the bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphattn.ops.attention.logits.score import Score, capped, edge_logits, pair_logits_of, slope
from graphattn.ops.attention.structured.recompute import PlanOptions

Gradients = tuple[Tensor, Tensor, Tensor]  # of queries, keys and the factor
Sure = Tensor | bool  # whether products are accurate enough, per pair or for all pairs

SURE = 1e7  # ||q||^2 + ||k||^2 in units of sigma^2: float64 rounds their product by less than 1e-8


class PairScores:
    """Base class of the logits of a chunk, without biases."""

    def __init__(
        self, options: PlanOptions, query: Tensor, key: Tensor, scale: Tensor, finite: bool
    ) -> None:
        self.score, self.softcap = options.score, options.softcap
        self.query, self.key, self.scale, self.finite = query, key, scale, finite
        uncapped = self.uncapped()
        self.logits = uncapped if self.softcap is None else capped(uncapped, self.softcap)

    def exact(self, place: tuple[Tensor, ...]) -> Tensor:
        """The logits of rows (b, h, t, i), computed as in the reference, [rows, m]."""
        uncapped = self.exact_uncapped(place)
        return uncapped if self.softcap is None else capped(uncapped, self.softcap)

    def gradients(self, d_logits: Tensor, keep: Tensor | None) -> Gradients:
        """Gradients from those of the logits, over the selected pairs (None: all)."""
        if self.softcap is not None:
            d_logits = self.hidden(d_logits * slope(self.logits, self.softcap), keep)
        return self.uncapped_gradients(d_logits, keep)

    def hidden(self, x: Tensor, keep: Tensor | None) -> Tensor:
        """Replace `x` by 0 at pairs that are not selected, where it may be NaN."""
        return x if self.finite or keep is None else torch.where(keep, x, 0)

    def rows(self, place: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """The query [rows, 1, D], the keys [rows, m, D] and the factor of some rows."""
        b, h, t, i = place
        query, key = self.query[b, h, t, i, None].detach(), self.key[b, h, t].detach()
        return query, key, self.scale.detach()[h, 0, 0]

    # What a score defines.

    def uncapped(self) -> Tensor:
        """The logits [B, H, T, n, m] before the softcap."""
        raise NotImplementedError

    def size(self, least: Tensor) -> Tensor:
        """The size of the numbers whose rounding changes logits near `least` [..., 1]."""
        raise NotImplementedError

    def exact_uncapped(self, place: tuple[Tensor, ...]) -> Tensor:
        """:meth:`exact` before the softcap."""
        raise NotImplementedError

    def uncapped_gradients(self, d_logits: Tensor, keep: Tensor | None) -> Gradients:
        """:meth:`gradients` from those of the logits before the softcap."""
        raise NotImplementedError


class DotPairs(PairScores):
    """The logits of scaled dot products."""

    def uncapped(self) -> Tensor:
        return (self.scale * self.query) @ self.key.mT

    def size(self, least: Tensor) -> Tensor:
        of_query, of_key = (
            torch.linalg.vector_norm(x.detach(), dim=-1, keepdim=True)
            for x in (self.query, self.key)
        )
        return self.scale.detach().abs() * of_query * of_key.amax(-2, keepdim=True)

    def exact_uncapped(self, place: tuple[Tensor, ...]) -> Tensor:
        query, key, scale = self.rows(place)
        return scale * (query * key).sum(-1)

    def uncapped_gradients(self, d_logits: Tensor, keep: Tensor | None) -> Gradients:
        d_query = product(d_logits, self.key, keep, self.finite)
        d_key = product(d_logits.mT, self.scale * self.query, transposed(keep), self.finite)
        return d_query * self.scale, d_key, (d_query * self.query).sum((0, 2, 3, 4))


class GaussianPairs(PairScores):
    """The logits of Gaussian kernels of the distance."""

    def uncapped(self) -> Tensor:
        self.sure = sure_pairs(self.query, self.key, self.scale.detach())
        function: Any = HalfSquares.apply if torch.is_grad_enabled() else half_squares
        self.affinity: Tensor = function(self.query, self.key, self.sure)
        return self.scale * self.affinity

    def size(self, least: Tensor) -> Tensor:
        return least.abs()

    def exact_uncapped(self, place: tuple[Tensor, ...]) -> Tensor:
        query, key, scale = self.rows(place)
        return -scale / 2 * (query - key).square().sum(-1)

    def uncapped_gradients(self, d_logits: Tensor, keep: Tensor | None) -> Gradients:
        pull, query, key = self.scale * d_logits, self.query, self.key
        if not self.finite:
            query, key = finite_part(query), finite_part(key)
        d_query, d_key = half_square_gradients(pull, query, key, self.sure)
        if not self.finite:
            d_query = with_nan(d_query, self.key, pull, keep)
            d_key = with_nan(d_key, self.query, pull.mT, transposed(keep))
        d_scale = self.hidden(d_logits * self.affinity, keep)
        return d_query, d_key, d_scale.sum((0, 2, 3, 4))


class WrittenPairs(PairScores):
    """The logits of a score of your own; autograd computes its gradients, chunk by chunk."""

    score: Score

    def uncapped(self) -> Tensor:
        query, key = self.query.transpose(1, 2), self.key.transpose(1, 2)
        return pair_logits_of(self.score, query, key).transpose(1, 2)

    def size(self, least: Tensor) -> Tensor:
        logits = self.logits.detach()
        return logits.abs().masked_fill(~logits.isfinite(), 0).amax(-1, keepdim=True)

    def exact_uncapped(self, place: tuple[Tensor, ...]) -> Tensor:
        b, h, t, i = place
        query, key = self.query[b, :, t, i].detach(), self.key[b, :, t].detach()
        shape = len(query), key.shape[2], *query.shape[1:]
        rows = query[:, None].expand(shape), key.transpose(1, 2)
        logits = edge_logits(self.score, *rows).detach()  # [rows, m, H]
        return logits.gather(-1, h[:, None, None].expand(-1, logits.shape[1], 1))[..., 0]


def pair_scores(
    options: PlanOptions, query: Tensor, key: Tensor, scale: Tensor, finite: bool
) -> PairScores:
    """The logits of a chunk, by the class of its score."""
    kinds: dict[Any, type[PairScores]] = {"dot": DotPairs, "rbf": GaussianPairs}
    return kinds.get(options.score, WrittenPairs)(options, query, key, scale, finite)


# Squared distances. They are computed from ``q - k``, or from products in float64, so that no large
# numbers cancel and every pair is independent of the others.


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
    halves = (wide_q @ torch.cat(wide_k, -1).mT).to(query.dtype).clamp_(max=0)
    return halves if sure is True else torch.where(sure, halves, _by_differences(query, key))


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
    distances = torch.cdist(query, key, compute_mode="donot_use_mm_for_euclid_dist")
    return distances.square_().div_(-2)


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


# Products of matrices in which NaN reaches only rows that keep it.


def product(weights: Tensor, x: Tensor, keep: Tensor | None, finite: bool) -> Tensor:
    """weights @ x over the pairs of `keep`: NaN in x reaches only rows that keep it."""
    if finite:
        return weights @ x
    return with_nan(weights @ finite_part(x), x, weights, keep)


def finite_part(x: Tensor) -> Tensor:
    """x with 0 in place of NaN and infinity."""
    return x.masked_fill(~x.isfinite(), 0)


def with_nan(sums: Tensor, x: Tensor, weights: Tensor, keep: Tensor | None) -> Tensor:
    """`sums` [*, n, D] with NaN where a row keeps a NaN or infinity of x [*, m, D].

    `weights` are [*, n, m].
    """
    selected = torch.ones_like(weights) if keep is None else keep.expand_as(weights).to(x.dtype)
    return sums.masked_fill(selected @ (~x.isfinite()).to(x.dtype) > 0, torch.nan)


def transposed(keep: Tensor | None) -> Tensor | None:
    """A mask of pairs with sources as rows and targets as columns."""
    return None if keep is None else keep.mT

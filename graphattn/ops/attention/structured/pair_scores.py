"""The logits of all pairs of a chunk and their gradients: one class per score.

Each is computed from queries [B, H, T, n, D], keys [B, H, T, m, D] and a factor [H, 1, 1, 1]. In a
row where rounding could change the choice of top_k, the `exact` logits decide: they equal those of
the reference to the bit.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from graphattn.ops.attention.logits.score import Score, edge_logits, pair_logits_of
from graphattn.ops.attention.logits.softcap import capped, slope
from graphattn.ops.attention.structured.options import PlanOptions
from graphattn.ops.attention.structured.squares import (
    HalfSquares,
    finite_part,
    half_square_gradients,
    half_squares,
    product,
    sure_pairs,
    with_nan,
)

Gradients = tuple[Tensor, Tensor, Tensor]  # of queries, keys and the factor


class PairScores:
    """Base class of the logits of a chunk."""

    def __init__(
        self, options: PlanOptions, query: Tensor, key: Tensor, scale: Tensor, finite: bool
    ) -> None:
        self.score, self.softcap = options.score, options.softcap
        self.query, self.key, self.scale, self.finite = query, key, scale, finite

    @cached_property
    def logits(self) -> Tensor:
        """The logits [B, H, T, n, m] without biases."""
        raise NotImplementedError

    def size(self, least: Tensor) -> Tensor:
        """The size of the numbers whose rounding changes logits near `least` [..., 1]."""
        raise NotImplementedError

    def exact(self, place: tuple[Tensor, ...]) -> Tensor:
        """The logits of rows (b, h, t, i), computed as in the reference, [rows, m]."""
        raise NotImplementedError

    def gradients(self, d_logits: Tensor, keep: Tensor | None) -> Gradients:
        """Gradients from those of the logits, over the selected pairs (None: all)."""
        raise NotImplementedError

    def hidden(self, x: Tensor, keep: Tensor | None) -> Tensor:
        """Replace `x` by 0 at pairs that are not selected, where it may be NaN."""
        return x if self.finite or keep is None else torch.where(keep, x, 0)

    def rows(self, place: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """The query [rows, 1, D], the keys [rows, m, D] and the factor of some rows."""
        b, h, t, i = place
        query, key = self.query[b, h, t, i, None].detach(), self.key[b, h, t].detach()
        return query, key, self.scale.detach()[h, 0, 0]


class DotPairs(PairScores):
    """The logits of scaled dot products."""

    @cached_property
    def logits(self) -> Tensor:
        return capped((self.scale * self.query) @ self.key.mT, self.softcap)

    def size(self, least: Tensor) -> Tensor:
        of_query, of_key = (
            torch.linalg.vector_norm(x.detach(), dim=-1, keepdim=True)
            for x in (self.query, self.key)
        )
        return self.scale.detach().abs() * of_query * of_key.amax(-2, keepdim=True)

    def exact(self, place: tuple[Tensor, ...]) -> Tensor:
        query, key, scale = self.rows(place)
        return capped(scale * (query * key).sum(-1), self.softcap)

    def gradients(self, d_logits: Tensor, keep: Tensor | None) -> Gradients:
        if self.softcap is not None:
            d_logits = self.hidden(d_logits * slope(self.logits, self.softcap), keep)
        d_query = product(d_logits, self.key, keep, self.finite)
        d_key = product(d_logits.mT, self.scale * self.query, transposed(keep), self.finite)
        return d_query * self.scale, d_key, (d_query * self.query).sum((0, 2, 3, 4))


class GaussianPairs(PairScores):
    """The logits of Gaussian kernels of the distance."""

    @cached_property
    def logits(self) -> Tensor:
        return capped(self.scale * self.affinity, self.softcap)

    @cached_property
    def affinity(self) -> Tensor:
        """-||q - k||^2 / 2 of every pair."""
        function: Any = HalfSquares.apply if torch.is_grad_enabled() else half_squares
        found: Tensor = function(self.query, self.key, self.sure)
        return found

    @cached_property
    def sure(self) -> Tensor | bool:
        """Pairs whose distance is computed by products."""
        return sure_pairs(self.query, self.key, self.scale.detach())

    def size(self, least: Tensor) -> Tensor:
        return least.abs()

    def exact(self, place: tuple[Tensor, ...]) -> Tensor:
        query, key, scale = self.rows(place)
        return capped(-scale / 2 * (query - key).square().sum(-1), self.softcap)

    def gradients(self, d_logits: Tensor, keep: Tensor | None) -> Gradients:
        if self.softcap is not None:
            d_logits = self.hidden(d_logits * slope(self.logits, self.softcap), keep)
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

    @cached_property
    def logits(self) -> Tensor:
        assert isinstance(self.score, Score)
        query, key = self.query.transpose(1, 2), self.key.transpose(1, 2)
        found = pair_logits_of(self.score, query, key)
        return capped(found.transpose(1, 2), self.softcap)

    def size(self, least: Tensor) -> Tensor:
        known = self.logits.detach()
        return known.abs().masked_fill(~known.isfinite(), 0).amax(-1, keepdim=True)

    def exact(self, place: tuple[Tensor, ...]) -> Tensor:
        assert isinstance(self.score, Score)
        b, h, t, i = place
        query, key = self.query[b, :, t, i].detach(), self.key[b, :, t].detach()
        shape = len(query), key.shape[2], *query.shape[1:]
        rows = query[:, None].expand(shape), key.transpose(1, 2)
        logits = edge_logits(self.score, *rows).detach()  # [rows, m, H]
        own = logits.gather(-1, h[:, None, None].expand(-1, logits.shape[1], 1))
        return capped(own[..., 0], self.softcap)


def pair_scores(
    options: PlanOptions, query: Tensor, key: Tensor, scale: Tensor, finite: bool
) -> PairScores:
    """The logits of a chunk, by the class of its score."""
    kinds: dict[Any, type[PairScores]] = {"dot": DotPairs, "rbf": GaussianPairs}
    return kinds.get(options.score, WrittenPairs)(options, query, key, scale, finite)


def transposed(keep: Tensor | None) -> Tensor | None:
    """Return a mask of pairs with sources as rows and targets as columns."""
    return None if keep is None else keep.mT

"""Attention in one chunk, forward and backward.

A chunk holds several tiles of equal size. A tile is a block of targets and all the sources that any
of them sees, and its logits are a product of matrices. In a graph of listed edges, every target is
a tile of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cached_property, reduce
from typing import NamedTuple

import torch
from torch import Tensor

from graphattn.ops.attention.calls import Inputs
from graphattn.ops.attention.structured.pair_scores import pair_scores, product, transposed
from graphattn.ops.attention.structured.recompute import Gradients, PlanOptions
from graphattn.ops.dropout import Kept, keeps
from graphattn.ops.top_k import top_k_mask

EXACT = 1 << 14  # how many exact logits are computed at a time

Whole = tuple[Tensor, Tensor]


class Chunk(NamedTuple):
    """T tiles of n targets and m sources.

    Attributes:
        targets: the indices of the targets, [T, n].
        sources: the indices of the sources, [T, m].
        edges: which pairs are edges, bool [T or 1, n, m]; all if None.
        entries: the row of the bias that a pair reads, [T or 1, n, m]; None without a bias.
    """

    targets: Tensor
    sources: Tensor
    edges: Tensor | None
    entries: Tensor | None


class ChunkAttention:
    """A chunk's tensors: query [B, H, T, n, D], key [B, H, T, m, D] and value [B, H, T, m, Dv].

    A product of matrices reads every pair, edge or not, and 0 * NaN is NaN. Unless `finite` says
    that all numbers are finite, slower code keeps NaN and infinity from spreading. The rows that
    `unused` marks, bool [B, N, H], add nothing to any gradient.

    Gradients of some of the edges of a graph start from `whole`: of all edges of every row, the
    log-sums (+inf for none) and output . d_out - d_lse, both [B, N, H].
    """

    def __init__(
        self,
        options: PlanOptions,
        chunk: Chunk,
        inputs: Inputs,
        finite: bool,
        unused: Tensor | None = None,
        whole: Whole | None = None,
    ) -> None:
        self.options, self.chunk, self.finite = options, chunk, finite
        query, key, value, scale, self.bias, self.masks = inputs
        self.repeats = query.shape[2] // key.shape[2]
        self.query = gathered(query, chunk.targets)
        self.key, self.value = (
            gathered(x, chunk.sources).repeat_interleave(self.repeats, dim=1) for x in (key, value)
        )
        self.unused = None if unused is None else gathered(unused[..., None], chunk.targets)
        if self.unused is not None:
            self.query = self.query.masked_fill(self.unused, 0)
        self.whole = None
        if whole is not None:
            self.whole = tuple(gathered(x[..., None], chunk.targets) for x in whole)
        per_pair = scale[:, None, None, None]
        self.pairs = pair_scores(options, self.query, self.key, per_pair, finite)

    @cached_property
    def allowed(self) -> Tensor | None:
        """Edges between valid tokens, bool, broadcastable to [B, H, T, n, m]; all if None."""
        targets, sources, _ = self.masks
        masks = [self.chunk.edges, None if self.unused is None else ~self.unused]
        if targets is not None:
            masks.append(targets[:, None, self.chunk.targets, None])
        if sources is not None:
            masks.append(sources[:, None, self.chunk.sources].unsqueeze(-2))
        given = [mask for mask in masks if mask is not None]
        return reduce(operator.and_, given) if given else None

    @cached_property
    def kept_by_dropout(self) -> Kept | None:
        """The pairs that dropout keeps, [B, H, T, n, m]; None without dropout."""
        dropout = self.masks.dropout
        if dropout is None:
            return None
        rows = gathered(dropout.rows[..., None], self.chunk.targets)
        columns = dropout.columns[self.chunk.sources].unsqueeze(-2)
        return Kept(dropout.p, keeps(dropout.p, rows, columns))

    @cached_property
    def biases(self) -> Tensor | None:
        """The bias of every pair, [1 or B, H, T or 1, n, m]."""
        if self.bias is None:
            return None
        assert self.chunk.entries is not None
        bias = self.bias if self.bias.dim() == 3 else self.bias[None]
        biases = gathered(bias[..., None], self.chunk.entries.flatten(1))
        return biases.unflatten(3, self.chunk.entries.shape[1:])[..., 0]

    @cached_property
    def weighed(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Weights [B, H, T, n, m], log-sums [B, H, T, n], and the selected pairs (None: all)."""
        logits, keep, top_k = self.pairs.logits, self.allowed, self.options.top_k
        if self.biases is not None:
            logits = logits + self.biases
        if keep is not None:
            logits = torch.where(keep, logits, -torch.inf)
        if self.whole is not None:
            return (logits - self.whole[0]).exp(), self.whole[0][..., 0], keep
        if top_k is not None and top_k < logits.shape[-1]:
            keep = keep_best(logits, top_k, self._rounding, self._exact)
            logits = torch.where(keep, logits, -torch.inf)
        return *softmax(logits), keep

    def _rounding(self, least: Tensor) -> Tensor:
        """The largest difference to :meth:`_exact` of logits near the `least` selected, [..., 1].

        It is many times the rounding error. If no other logit is as near to the least selected one,
        both computations select the same sources. Pairs that are no edges can only make it larger.
        """
        size = self.pairs.size(least)
        if self.biases is not None:
            biases = self.biases.detach().abs()
            biases = biases.masked_fill(biases.isinf(), 0)
            size = size + 2 * biases.amax((-1, -2), keepdim=True)
        return 4 * (self.query.shape[-1] ** 0.5 + 4) * torch.finfo(size.dtype).eps * size

    def _exact(self, place: tuple[Tensor, ...]) -> Tensor:
        """The logits of rows (b, h, t, i), computed as in the reference, [rows, m]."""
        logits = self.pairs.exact(place)
        if self.biases is None:
            return logits
        b, h, t, i = place
        shape = len(self.query), -1, self.query.shape[2], -1, -1
        return logits + self.biases.detach().expand(shape)[b, h, t, i]

    def attend(self) -> tuple[Tensor, Tensor]:
        """Output [B, H, T, n, Dv], with dropout, and log-sums [B, H, T, n], without."""
        weights, lse, keep = self.weighed
        if self.kept_by_dropout is not None:
            weights = self.kept_by_dropout.weights(weights)
            keep = self.kept_by_dropout.among(keep)
        return product(weights, self.value, keep, self.finite), lse

    def add_gradients(self, sums: Gradients, d_out: Tensor, d_lse: Tensor | None) -> None:
        """Add this chunk's part of the gradients to `sums`, from d_out [B, N, H, Dv]."""
        d_out = gathered(d_out, self.chunk.targets)
        d_lse = None if d_lse is None else gathered(d_lse[..., None], self.chunk.targets)
        weights, _, keep = self.weighed
        if self.unused is not None:
            d_out = d_out.masked_fill(self.unused, 0)
            d_lse = None if d_lse is None else d_lse.masked_fill(self.unused, 0)
        weights = self.pairs.hidden(weights, keep)
        averaged, read = weights, keep
        if self.kept_by_dropout is not None:
            averaged = self.kept_by_dropout.weights(weights)
            read = self.kept_by_dropout.among(keep)
        d_value = product(averaged.mT, d_out, transposed(read), self.finite)
        d_weights = d_out @ self.value.mT
        if self.kept_by_dropout is not None:
            d_weights = self.kept_by_dropout.weights(d_weights)
        d_weights = self.pairs.hidden(d_weights, keep)
        if self.whole is not None:
            less = self.whole[1]
        else:
            less = (weights * d_weights).sum(-1, keepdim=True)
            less = less if d_lse is None else less - d_lse
        d_logits = (d_weights - less).mul_(weights)
        d_logits = self.pairs.hidden(d_logits, keep)
        d_query, d_key, d_scale = self.pairs.gradients(d_logits, keep)
        into_query, into_key, into_value, into_scale, into_bias = sums
        scatter(into_query, self.chunk.targets, d_query)
        for into, gradient in ((into_key, d_key), (into_value, d_value)):
            if self.repeats > 1:
                gradient = gradient.unflatten(1, (-1, self.repeats)).sum(2)
            index = self.chunk.sources.flatten()
            into.transpose(1, 2).index_add_(2, index, gradient.flatten(2, 3))
        into_scale += d_scale
        if into_bias is not None:
            self._add_to_bias(into_bias, d_logits)

    def _add_to_bias(self, into: Tensor, d_logits: Tensor) -> None:
        """Add gradients of pairs to the rows that they read, `into` [R, H] or [1 or B, R, H]."""
        entries = self.chunk.entries
        assert entries is not None
        if len(entries) < d_logits.shape[2]:
            d_logits = d_logits.sum(2, keepdim=True)
        if into.dim() == 2 or len(into) < len(d_logits):
            d_logits = d_logits.sum(0, keepdim=True)
        into = into if into.dim() == 3 else into[None]
        into.transpose(1, 2).index_add_(2, entries.flatten(), d_logits.flatten(2))


def gathered(x: Tensor, index: Tensor) -> Tensor:
    """Gather x [B, N, H, D] at index [T, n]: [B, H, T, n, D], contiguous."""
    return x.transpose(1, 2).index_select(2, index.flatten()).unflatten(2, index.shape)


def scatter(into: Tensor, index: Tensor, x: Tensor) -> None:
    """Write x [B, H, T, n, D] into [B, N, H, D] at index [T, n]."""
    into.transpose(1, 2).index_copy_(2, index.flatten(), x.flatten(2, 3))


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
    logits: Tensor,
    top_k: int,
    rounding: Callable[[Tensor], Tensor],
    exact: Callable[[tuple[Tensor, ...]], Tensor],
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

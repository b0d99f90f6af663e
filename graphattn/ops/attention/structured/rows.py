"""Attention over any edge list: the sources of a few targets at a time are gathered.

Targets of like degree stand together, so little is padded and a hub is a chunk of its own. Memory
beside inputs and outputs is that of a chunk, or of one row where a single row is larger.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from graphattn.ops.attention.softcap import capped, slope
from graphattn.ops.attention.structured import explicit
from graphattn.ops.attention.structured.modifiers import NONE, Modifiers
from graphattn.ops.attention.structured.recompute import (
    Gradients,
    Inputs,
    all_sound,
    largest,
    silent,
    zeros_like,
)
from graphattn.ops.dropout import Kept, keeps
from graphattn.ops.inputs import ValidPair, repeat_heads

CHUNK = 1 << 18  # numbers of a chunk's gathered keys: a megabyte of float32


class Chunk(NamedTuple):
    """Some targets [n] and their edges [n, w]; where `present` is False, any edge as padding."""

    targets: Tensor
    edges: Tensor
    present: Tensor


@dataclass
class RowPlan:
    """Attention over the edges of every target; see :class:`~.recompute.Plan`.

    `bias` is [E, H], or [B, E, H] where every sample has its own.
    """

    rowptr: Tensor  # [N + 1]
    source: Tensor  # [E]
    score: str
    top_k: int | None
    valid: ValidPair  # [B, N] and [B, M], or None
    modifiers: Modifiers = NONE

    @cached_property
    def degree(self) -> Tensor:
        """Sources of every target, [N]."""
        return self.rowptr.diff()

    @cached_property
    def order(self) -> Tensor:
        """Targets with the most sources first."""
        return self.degree.argsort(descending=True, stable=True)

    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """Output, log-sums, and the log-sums again."""
        query, _, value, _, _ = inputs
        out = query.new_zeros((*query.shape[:-1], value.shape[-1]))
        lse = query.new_full(query.shape[:-1], -torch.inf)
        finite = _all_sound(inputs)
        for chunk in self._chunks(inputs):
            rows = _Rows(self, chunk, inputs, finite)
            out[:, chunk.targets], lse[:, chunk.targets] = rows.attend()
        return out, lse, lse

    def backward(
        self, inputs: Inputs, out: Tensor, saved: Tensor, d_out: Tensor, d_lse: Tensor | None
    ) -> Gradients:
        """Gradients of the five inputs; every chunk is computed again."""
        sums = zeros_like(inputs)
        finite = _all_sound(inputs, d_out, d_lse)
        for chunk in self._chunks(inputs):
            rows = _Rows(self, chunk, inputs, finite)
            part = None if d_lse is None else d_lse[:, chunk.targets]
            rows.add_gradients(sums, d_out[:, chunk.targets], part)
        return sums

    def plainly(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Output and log-sums in plain autograd."""
        finite = _all_sound(inputs)
        pieces = [_Rows(self, c, inputs, finite).attend() for c in self._chunks(inputs, empty=True)]
        back = self.order.argsort()
        outs, sums = (torch.cat(x, dim=1).index_select(1, back) for x in zip(*pieces, strict=True))
        return outs, sums

    def _chunks(self, inputs: Inputs, *, empty: bool = False) -> Iterator[Chunk]:
        """Chunks of targets; those without edges only if wanted."""
        query = inputs[0]
        features = max(query.shape[3], inputs[2].shape[3])
        width = max(query.shape[0] * query.shape[2] * features, 1)
        ordered = self.degree[self.order].tolist()
        start = 0
        while start < len(ordered) and (ordered[start] or empty):
            longest = ordered[start]
            stop = min(start + max(CHUNK // (width * max(longest, 1)), 1), len(ordered))
            targets = self.order[start:stop]
            slot = torch.arange(longest, device=targets.device)
            present = slot < self.degree[targets, None]
            edges = torch.where(present, self.rowptr[targets, None] + slot, 0)
            yield Chunk(targets, edges, present)
            start = stop


@dataclass
class TablePlan:
    """The same with a table of offsets as `bias`; `index` [E] says which row an edge reads."""

    rows: RowPlan
    index: Tensor

    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        return self.rows.forward(self._per_edge(inputs))

    def backward(
        self, inputs: Inputs, out: Tensor, saved: Tensor, d_out: Tensor, d_lse: Tensor | None
    ) -> Gradients:
        *others, d_bias = self.rows.backward(self._per_edge(inputs), out, saved, d_out, d_lse)
        d_query, d_key, d_value, d_scale = others
        table = inputs[4]
        assert table is not None
        assert d_bias is not None
        d_table = torch.zeros_like(table).index_add_(0, self.index, d_bias)
        return d_query, d_key, d_value, d_scale, d_table

    def plainly(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        return self.rows.plainly(self._per_edge(inputs))

    def _per_edge(self, inputs: Inputs) -> Inputs:
        query, key, value, scale, table = inputs
        assert table is not None
        return query, key, value, scale, table[self.index]


def _all_sound(inputs: Inputs, *upstream: Tensor | None) -> bool:
    """Whether nothing has to be kept from spreading; a bias of -inf takes an edge away, no more."""
    *tensors, scale, bias = inputs
    limit = largest(scale)
    finite = all_sound(limit, *tensors, *upstream)
    if not finite or bias is None or bias.numel() == 0:
        return finite
    return bool(bias.detach().amax() <= limit)


class _Rows:
    """The tensors of a chunk: query [B, n, H, D], key and value [B, n, w, H, D]."""

    def __init__(self, plan: RowPlan, chunk: Chunk, inputs: Inputs, finite: bool) -> None:
        query, key, value, self.scale, bias = inputs
        self.plan, self.chunk, self.finite = plan, chunk, finite
        self.source = plan.source[chunk.edges]  # [n, w]
        self.query = query.index_select(1, chunk.targets)
        self.heads, self.kv_heads = query.shape[2], key.shape[2]
        self.key, self.value = (self._gathered(x) for x in (key, value))
        self.bias = None if bias is None else self._bias_of(bias)
        of_target, of_source = plan.valid
        self.allowed = chunk.present[:, None]  # bool, broadcastable to [B, n, H, w]
        if of_target is not None:
            self.allowed = self.allowed & of_target[:, chunk.targets, None, None]
        if of_source is not None:
            self.allowed = self.allowed & of_source[:, self.source][:, :, None]
        if not finite:  # what no edge shows is not read
            hidden = ~self.allowed.transpose(-1, -2)[..., None]
            self.key, self.value = (x.masked_fill(hidden, 0) for x in (self.key, self.value))

    def _gathered(self, x: Tensor) -> Tensor:
        found = x.index_select(1, self.source.flatten()).unflatten(1, self.source.shape)
        return repeat_heads(found, self.heads)

    def _bias_of(self, bias: Tensor) -> Tensor:
        """[n, H, w], or [B, n, H, w] where every sample has its own."""
        edges = self.chunk.edges
        found = bias.index_select(-2, edges.flatten()).unflatten(-2, edges.shape)
        return found.transpose(-1, -2)

    @cached_property
    def affinity(self) -> Tensor:
        """q . k or -|q - k|^2 / 2 of every edge, [B, n, H, w]."""
        query = self.query[:, :, None]
        if self.plan.score == "rbf":
            found = (query - self.key).square().sum(-1) / -2
        else:
            found = (query * self.key).sum(-1)
        return found.transpose(-1, -2)

    @property
    def logits(self) -> Tensor:
        """Of every edge, without its bias, [B, n, H, w]."""
        return capped(self.scale[:, None] * self.affinity, self.plan.modifiers.softcap)

    @cached_property
    def kept(self) -> Kept | None:
        """Which edges dropout leaves, [B, n, H, w]; None: there is no dropout."""
        dropout = self.plan.modifiers.dropout
        if dropout is None:
            return None
        rows = dropout.rows.index_select(1, self.chunk.targets)[..., None]
        return Kept(dropout.p, keeps(dropout.p, rows, dropout.columns[self.source][:, None]))

    def softmax(self) -> tuple[Tensor, Tensor, Tensor]:
        """Weights [B, n, H, w], log-sums [B, n, H], and the edges that are kept."""
        logits = self.logits if self.bias is None else self.logits + self.bias
        options = self.allowed, self.plan.top_k, self.finite
        weights, lse, keep = explicit.softmax(logits, *options)
        assert keep is not None
        return weights, lse, keep.expand_as(weights)

    def attend(self) -> tuple[Tensor, Tensor]:
        """Output [B, n, H, Dv] and log-sums [B, n, H]."""
        weights, lse, keep = self.softmax()
        if self.kept is not None:
            weights, keep = self.kept.weights(weights), self.kept.among(keep)
        return (_per_edge(weights) * self._seen(self.value, keep)).sum(2), lse

    def _seen(self, x: Tensor, keep: Tensor) -> Tensor:
        """0 where an edge is not kept and may hold NaN."""
        return x if self.finite else x.masked_fill(~_per_edge(keep), 0)

    def add_gradients(self, sums: Gradients, d_out: Tensor, d_lse: Tensor | None) -> None:
        """Adds what this chunk gives back to the gradients of the inputs."""
        weights, lse, keep = self.softmax()
        if not self.finite:
            keep = keep & ~silent(d_out, d_lse)[..., None]
            weights = weights.masked_fill(~keep, 0)  # 0 / NaN
        averaged, read = weights, keep
        if self.kept is not None:
            averaged, read = self.kept.weights(weights), self.kept.among(keep)
        value = self._seen(self.value, read)
        d_weights = (d_out[:, :, None] * value).sum(-1).transpose(-1, -2)
        if self.kept is not None:
            d_weights = self.kept.weights(d_weights)
        d_logits = d_weights - (weights * d_weights).sum(-1, keepdim=True)
        if d_lse is not None:
            d_logits = d_logits + d_lse.masked_fill(lse == -torch.inf, 0)[..., None]
        d_logits = (weights * d_logits).masked_fill(~keep, 0)
        d_products = d_logits
        if self.plan.modifiers.softcap is not None:
            d_products = d_logits * slope(self.logits, self.plan.modifiers.softcap)
            d_products = d_products.masked_fill(~keep, 0)  # 0 * NaN is NaN
        pull, query, d_out_i = _per_edge(self.scale[:, None] * d_products), self.query, d_out
        query_i, d_out_i = query[:, :, None], d_out[:, :, None]
        key = self._seen(self.key, keep)
        if not self.finite:
            hidden = ~_per_edge(keep)
            query_i = query_i.masked_fill(hidden, 0)
            d_out_i = d_out_i.masked_fill(~_per_edge(read), 0)
        d_query, d_key, d_value, d_scale, d_bias = sums
        if self.plan.score == "rbf":
            to_key = pull * (query_i - key)
            d_query[:, self.chunk.targets] = -to_key.sum(2)
        else:
            to_key = pull * query_i
            d_query[:, self.chunk.targets] = (pull * key).sum(2)
        self._add_at_sources(d_key, to_key)
        self._add_at_sources(d_value, _per_edge(averaged) * d_out_i)
        affinity = self.affinity if self.finite else self.affinity.masked_fill(~keep, 0)
        d_scale += (d_products * affinity).sum((0, 1, 3))
        if d_bias is not None:
            d_logits = d_logits.masked_fill(~self.chunk.present[:, None], 0)
            per_slot = d_logits if d_bias.dim() == 3 else d_logits.sum(0)
            per_edge = per_slot.transpose(-1, -2).flatten(-3, -2)
            d_bias.index_add_(-2, self.chunk.edges.flatten(), per_edge)

    def _add_at_sources(self, into: Tensor, per_edge: Tensor) -> None:
        """into [B, M, Hk, D] += per_edge [B, n, w, H, D] at the source of every edge."""
        if self.kv_heads < self.heads:
            per_edge = per_edge.unflatten(3, (self.kv_heads, -1)).sum(4)
        into.index_add_(1, self.source.flatten(), per_edge.flatten(1, 2))


def _per_edge(x: Tensor) -> Tensor:
    """[B, n, H, w] -> [B, n, w, H, 1]."""
    return x.transpose(-1, -2)[..., None]

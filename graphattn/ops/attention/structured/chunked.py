"""Attention over one graph, a chunk at a time: of tiles, or of listed edges.

Memory beside inputs and outputs is that of a chunk, or of one row where a single row is larger.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from graphattn.graphs.structures.structure import GraphStructure
from graphattn.kernels.shared.stored import kept_for_training
from graphattn.ops.attention.logits.score import Score
from graphattn.ops.attention.part_numbers import are_moderate
from graphattn.ops.attention.structured.chunks import Chunk, ChunkAttention, Whole, scatter
from graphattn.ops.attention.structured.options import PlanOptions
from graphattn.ops.attention.structured.recompute import (
    Gradients,
    Inputs,
    products_are_finite,
    unused_rows,
    zeros_like,
)
from graphattn.ops.attention.structured.tiles import tiles_of

PAIRS = 1 << 21  # the most logits of a chunk: 8 megabytes of float32
FEATURES = 1 << 20  # the most numbers of the keys of a chunk


@dataclass
class _Chunked:
    """See :class:`~.recompute.Plan`."""

    options: PlanOptions

    def chunks(self, inputs: Inputs) -> Iterator[Chunk]:
        """Chunks that hold every edge exactly once, and every target with edges exactly once."""
        raise NotImplementedError

    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """Output, log-sums, and the log-sums again."""
        query, _, value, _, _ = inputs
        out = query.new_zeros((*query.shape[:-1], value.shape[-1]))
        lse = query.new_full(query.shape[:-1], -torch.inf)
        finite = products_are_finite(inputs)
        for chunk in self.chunks(inputs):
            own_out, own_lse = ChunkAttention(self.options, chunk, _flat(inputs), finite).attend()
            scatter(out, chunk.targets, own_out)
            scatter(lse[..., None], chunk.targets, own_lse[..., None])
        return out, lse, lse

    def backward(
        self, inputs: Inputs, out: Tensor, saved: Tensor, d_out: Tensor, d_lse: Tensor | None
    ) -> Gradients:
        """Gradients of the five inputs; the logits of every chunk are computed again."""
        return self._gradients(inputs, d_out, d_lse, None)

    def backward_from_log_sums(
        self, inputs: Inputs, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor
    ) -> Gradients | None:
        """Gradients from outputs and log-sums over more edges than the plan has.

        The result is None with top_k, with dropout, with a score of your own, which only autograd
        differentiates, and for numbers that this is not exact for.
        """
        options = self.options
        if options.top_k is not None or options.dropout is not None:
            return None
        empty = lse == -torch.inf
        if isinstance(options.score, Score) or not are_moderate(
            (*inputs[:4], out, d_out, d_lse), (lse.masked_fill(empty, 0),)
        ):
            return None
        delta = (out * d_out).sum(-1) - d_lse
        whole = lse.masked_fill(empty, torch.inf), delta
        return self._gradients(inputs, d_out, d_lse, whole)

    def _gradients(
        self, inputs: Inputs, d_out: Tensor, d_lse: Tensor | None, whole: Whole | None
    ) -> Gradients:
        sums = zeros_like(inputs)
        finite = products_are_finite(inputs, d_out, d_lse)
        unused = None if finite else unused_rows(d_out, d_lse)
        for chunk in self.chunks(inputs):
            attention = ChunkAttention(self.options, chunk, _flat(inputs), finite, unused, whole)
            attention.add_gradients(_flat(sums), d_out, d_lse)
        return sums

    def by_autograd(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Output and log-sums in operations that can be differentiated any number of times."""
        query, _, value, _, _ = inputs
        out = query.new_zeros((*query.shape[:-1], value.shape[-1]))
        lse = query.new_full((*query.shape[:-1], 1), -torch.inf)
        finite = products_are_finite(inputs)
        places, outs, sums = [], [], []
        for chunk in self.chunks(inputs):
            own_out, own_lse = self._attend_again(chunk, inputs, finite)
            places.append(chunk.targets.flatten())
            outs.append(own_out.flatten(2, 3).transpose(1, 2))
            sums.append(own_lse.flatten(2).transpose(1, 2)[..., None])
        if places:
            where = torch.cat(places)
            out = out.index_copy(1, where, torch.cat(outs, dim=1))
            lse = lse.index_copy(1, where, torch.cat(sums, dim=1))
        else:  # without edges, all gradients are zeros, which can be differentiated again
            nothing = sum(x.flatten()[:0].sum() for x in inputs if x is not None)
            out, lse = out + nothing, lse + nothing
        return out, lse[..., 0]

    def _attend_again(self, chunk: Chunk, inputs: Inputs, finite: bool) -> tuple[Tensor, Tensor]:
        """Attend within a chunk, in operations of torch that autograd differentiates.

        With a score of your own, the pairs of the chunk are computed again in the backward pass.
        """

        def attend() -> tuple[Tensor, Tensor]:
            return ChunkAttention(self.options, chunk, _flat(inputs), finite).attend()

        if not isinstance(self.options.score, Score):
            return attend()
        found: tuple[Tensor, Tensor] = checkpoint(attend, use_reentrant=False)
        return found

    @property
    def forms_features(self) -> bool:
        """Whether the score has no `pairs`, so that a pair needs memory for all its features."""
        score = self.options.score
        return isinstance(score, Score) and type(score).pairs is Score.pairs


@dataclass
class TilePlan(_Chunked):
    """Attention over tiles.

    A bias is a table of offsets [offsets, H], or on a complete graph has a number per pair,
    [1 or B, N, M, H].
    """

    structure: GraphStructure

    def chunks(self, inputs: Inputs) -> Iterator[Chunk]:
        (B, _, H, D), (_, M, _, Dv), bias = inputs[0].shape, inputs[2].shape, inputs[4]
        tiles = tiles_of(self.structure, inputs[0].device)
        assert tiles is not None
        per_pair = D if self.forms_features else 1
        for targets, sources, edges, offsets in tiles:
            (n, m), width = (targets.shape[1], sources.shape[1]), max(B * H, 1) * per_pair
            height = min(max(PAIRS // (width * m), 1), n)
            most = min(PAIRS // (width * m * height), FEATURES // (width * m * max(D, Dv, 1)))
            few = zip(targets.split(max(most, 1)), sources.split(max(most, 1)), strict=True)
            for i, j in few:
                for start in range(0, n, height):
                    own = slice(start, start + height)
                    entries = None if bias is None or offsets is None else offsets[:, own]
                    if bias is not None and bias.dim() == 4:
                        entries = i[:, own, None] * M + j[:, None]
                    yield Chunk(i[:, own], j, None if edges is None else edges[:, own], entries)


@dataclass
class RowPlan(_Chunked):
    """Attention over listed edges: the sources of every target are gathered.

    Targets are sorted by degree, so that rows of a chunk are about equally long and need little
    padding. A target with very many sources is a chunk of its own. A bias is [E, H] or [B, E, H],
    or with `index` [E] a table, of which edge e reads row index[e]. Lists keep the integer dtype
    that the graph stores, and are converted to int64 chunk by chunk.
    """

    rowptr: Tensor  # [N + 1]
    source: Tensor  # [E]
    index: Tensor | None = None

    @cached_property
    def degree(self) -> Tensor:
        """Sources of every target, [N]."""
        with kept_for_training():
            return self.rowptr.diff()

    @cached_property
    def order(self) -> Tensor:
        """Targets with the most sources first."""
        with kept_for_training():
            return self.degree.argsort(descending=True, stable=True)

    def chunks(self, inputs: Inputs) -> Iterator[Chunk]:
        (B, _, H, D), Dv = inputs[0].shape, inputs[2].shape[-1]
        width = max(B * H * max(D, Dv), 1)
        ordered = self.degree[self.order].tolist()
        start = 0
        while start < len(ordered) and ordered[start]:
            longest = ordered[start]
            stop = min(start + max(FEATURES // (width * longest), 1), len(ordered))
            targets = self.order[start:stop, None]
            slot = torch.arange(longest, device=targets.device)
            present = slot < self.degree[targets]
            edges = torch.where(present, self.rowptr[targets] + slot, 0)  # padding reads edge 0
            entries = edges if self.index is None else self.index[edges]
            yield Chunk(targets, self.source[edges].long(), present[:, None], entries[:, None])
            start = stop


def _flat(inputs: Inputs) -> Inputs:
    """The inputs, with a bias of all pairs [B, N, M, H] as a view [B, N * M, H]."""
    bias = inputs[4]
    return *inputs[:4], bias.flatten(1, 2) if bias is not None and bias.dim() == 4 else bias

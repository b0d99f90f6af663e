"""Operations that a ring computes in parts: linear attention, softmax attention, and top-k."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphattn.distributed.local_graph import unlike_edges
from graphattn.distributed.ring.rounds import RingBlock
from graphattn.ops.attention.api import attend
from graphattn.ops.attention.candidates import candidates_by_score, merge_top_k
from graphattn.ops.attention.merge import merged
from graphattn.ops.attention.part_gradients import Pairs, part_gradients
from graphattn.ops.inputs import compute_dtype, full_precision, repeat_heads
from graphattn.ops.linear_attention.api import linear_attention_sums

Tensors = tuple[Tensor, ...]
Given = Sequence[Any]  # tensors, or None for a missing one


class Results(NamedTuple):
    """The shape [*, N, H] of all results of an operation, their numbers of features, and dtypes."""

    shape: Sequence[int]
    widths: Sequence[int]
    dtypes: Sequence[torch.dtype]


class RingOperation:
    """An operation that can be computed in parts, each over some of the sources.

    All tensors of targets and sources have the shape [*, tokens, heads, features], and masks
    [*, tokens]; some may be None.

    ``type(operation)(layer, *tensors)`` is an equal operation.

    Attributes:
        layer: the layer whose operation it is, and whose parameters it differentiates; None for an
            operation without parameters.
        tensors: others that it depends on, or None for a missing one.
        both: whether it moves both ends of an edge.
        needs_its_part: the reason why gradients of a part need its own results; None if
            :meth:`from_results` computes them.
    """

    both: bool = False
    needs_its_part: str | None = None

    def __init__(self, layer: Any, *tensors: Tensor | None) -> None:
        self.layer = layer
        self.tensors: tuple[Any, ...] = tensors

    def results(self, targets: Given, sources: Given) -> Results:
        """Return what the results are, before they are computed."""
        query, value = targets[0], sources[1]
        dtype = compute_dtype(query.dtype)
        return Results(query.shape[:-1], (value.shape[-1], 1), (dtype, dtype))

    def part(self, targets: Given, sources: Given, block: RingBlock) -> Tensors:
        """Compute the results over a block, each [*, N, H, features]; they are differentiated."""
        raise NotImplementedError

    def merge(self, whole: Tensors, part: Tensors) -> Tensors:
        """Merge the results over some blocks with those over another."""
        raise NotImplementedError

    def upstream(self, part: Tensors, whole: Tensors, d_whole: Tensors) -> Tensors:
        """Return the gradients of the results of a part, from those of the whole."""
        raise NotImplementedError

    def from_results(
        self, targets: Given, sources: Given, block: RingBlock, whole: Tensors, d_whole: Tensors
    ) -> Pairs | None:
        """Return what a block gives to the gradients, without computing its results again.

        The result are tensors that depend on the given ones, each with its gradient; None if the
        results are needed because of the numbers in these tensors.
        """
        raise NotImplementedError


class SumParts(RingOperation):
    """Sums over sources; the parts add up."""

    needs_its_part = "its gradients are those of autograd"

    def merge(self, whole: Tensors, part: Tensors) -> Tensors:
        return tuple(x + y for x, y in zip(whole, part, strict=True))

    def upstream(self, part: Tensors, whole: Tensors, d_whole: Tensors) -> Tensors:
        return d_whole


class LinearParts(SumParts):
    """Numerators and denominators of linear attention."""

    def __init__(self, layer: None = None) -> None:
        super().__init__(layer)

    def part(self, targets: Given, sources: Given, block: RingBlock) -> Tensors:
        query, turned_query, of_targets = targets
        key, value, turned_key, of_sources = sources
        rotated = None
        if turned_query is not None and turned_key is not None:
            rotated = turned_query, turned_key
        return linear_attention_sums(
            query, key, value, block.graph, rotated=rotated, valid=(of_targets, of_sources)
        )


class SoftmaxParts(RingOperation):
    """Softmax attention; its parts are merged by their log-sums.

    Args:
        layer: an attention layer; its score is made for every part.
        edge_bias: a table per offset of the whole graph, or None.
        seed: that of dropout, a LongTensor; None without dropout.
    """

    def __init__(
        self, layer: Any, edge_bias: Tensor | None = None, seed: Tensor | None = None
    ) -> None:
        super().__init__(layer, edge_bias, seed)
        if seed is not None:
            self.needs_its_part = "dropout draws the edges of every part"

    def part(self, targets: Given, sources: Given, block: RingBlock) -> Tensors:
        (query, of_targets), (key, value, of_sources) = targets, sources
        layer, (_, seed) = self.layer, self.tensors
        dropout, generator = 0.0, None
        if seed is not None:
            # Not of the mode: `eval()` may have been called before the backward pass.
            dropout = layer.attention_dropout
            generator = torch.Generator().manual_seed(int(seed) + block.number)
        out, lse = attend(
            query,
            key,
            value,
            block.graph,
            (of_targets, of_sources),
            layer.score(),
            softcap=layer.softcap,
            eps=0.0,
            top_k=None,
            edge_bias=self._bias_of(block),
            backend=layer.backend,
            sink=None,
            dropout=dropout,
            generator=generator,
        )
        return out.to(lse.dtype), lse[..., None]

    def _bias_of(self, block: RingBlock) -> Tensor | None:
        """Return the biases of a block, from the table per offset of the whole graph."""
        table = self.tensors[0]
        if table is None:
            return None
        if block.offsets is None:
            return unlike_edges(table, block.graph)
        return table.index_select(0, block.offsets)[None]

    def merge(self, whole: Tensors, part: Tensors) -> Tensors:
        outs = [out.masked_fill(lse == -torch.inf, 0) for out, lse in (whole, part)]
        out, lse = merged(outs, [lse[..., 0] for _, lse in (whole, part)])
        return out, lse[..., None]

    def upstream(self, part: Tensors, whole: Tensors, d_whole: Tensors) -> Tensors:
        (out, lse), (whole_out, whole_lse), (d_out, d_lse) = part, whole, d_whole
        share = (lse - whole_lse).exp().masked_fill(lse == -torch.inf, 0)
        out = out.masked_fill(lse == -torch.inf, 0)
        change = (d_out * (out - whole_out)).sum(-1, keepdim=True)
        return share * d_out, share * (change + d_lse)

    def from_results(
        self, targets: Given, sources: Given, block: RingBlock, whole: Tensors, d_whole: Tensors
    ) -> Pairs | None:
        (query, of_targets), (key, value, of_sources) = targets, sources
        (out, lse), (d_out, d_lse) = whole, d_whole
        return part_gradients(
            query,
            key,
            value,
            block.graph,
            self.layer.score(),
            valid=(of_targets, of_sources),
            whole=(out, lse[..., 0]),
            d_whole=(d_out, d_lse[..., 0]),
            edge_bias=self._bias_of(block),
            softcap=self.layer.softcap,
            backend=self.layer.backend,
        )


class BestParts(RingOperation):
    """The k best sources of every target and head of a layer with top-k; only keys travel.

    The results are logits and tokens of the whole graph, both [*, N, H, k]; -1 where a row has
    fewer sources.
    """

    def results(self, targets: Given, sources: Given) -> Results:
        query, k = targets[0], self.layer.top_k
        return Results(query.shape[:-1], (k, k), (compute_dtype(query.dtype), torch.int64))

    def part(self, targets: Given, sources: Given, block: RingBlock) -> Tensors:
        (query, of_targets), (key, of_sources) = targets, sources
        logits, index = candidates_by_score(
            query,
            key,
            block.graph,
            self.layer.top_k,
            self.layer.score(),
            valid=(of_targets, of_sources),
        )
        if len(block.tokens):
            index = torch.where(index < 0, index, block.tokens[index.clamp(min=0)])
        return logits, index

    def merge(self, whole: Tensors, part: Tensors) -> Tensors:
        pairs = ((logits, index) for logits, index in (whole, part))
        return merge_top_k(pairs, self.layer.top_k)


class TopKParts(SoftmaxParts):
    """Softmax attention over sources that are selected already, per target and head.

    Args:
        layer: an attention layer.
        index: LongTensor [*, N, H, k], the tokens that every row selects; -1 for none.
    """

    needs_its_part = "its sources are selected"

    def __init__(self, layer: Any, index: Tensor) -> None:
        RingOperation.__init__(self, layer, index)

    def part(self, targets: Given, sources: Given, block: RingBlock) -> Tensors:
        (query, _), (key, value, _) = targets, sources
        heads = query.shape[-2]
        dtype = compute_dtype(query.dtype)
        start, stop = block.targets
        index = self.tensors[0][..., start:stop, :, :]
        place = torch.searchsorted(block.tokens, index.clamp(min=0))
        place = place.clamp(max=max(len(block.tokens) - 1, 0))
        is_here = (index >= 0) & (block.tokens[place] == index) if len(block.tokens) else index < -1
        with full_precision(query.device):
            score = self.layer.score().ready(heads, query)
            keys, values = (
                _rows_of_heads(repeat_heads(x.to(dtype), heads), place, is_here)
                for x in (key, value)
            )
            logits = score.edges(
                query.to(dtype)[..., None, :, :], keys.transpose(-2, -3)
            ).transpose(-1, -2)
            logits = logits.masked_fill(~is_here, -torch.inf)
            empty = ~is_here.any(-1, keepdim=True)
            lse = logits.masked_fill(empty, 0).logsumexp(-1, keepdim=True)
            weights = (logits - lse).exp().masked_fill(~is_here, 0)
            out = (weights[..., None] * values).sum(-2)
        return out, lse.masked_fill(empty, -torch.inf)


def _rows_of_heads(x: Tensor, place: Tensor, is_here: Tensor) -> Tensor:
    """Gather x [*, M, H, D] at `place` [*, N, H, k], and 0 where not `is_here`: [*, N, H, k, D]."""
    if x.shape[-3] == 0:
        return x.new_zeros(*place.shape, x.shape[-1])
    by_head = x.transpose(-2, -3)  # [*, H, M, D]
    index = (
        place.transpose(-2, -3).flatten(-2)[..., None].expand(*x.shape[:-3], -1, -1, x.shape[-1])
    )
    rows = by_head.gather(-2, index).unflatten(-2, (place.shape[-3], place.shape[-1]))
    return rows.transpose(-3, -4).masked_fill(~is_here[..., None], 0)

"""Attention on narrow bands, without listing edges: one pass per offset over contiguous slices.

Target i of a band sees i + dilation * o for a few offsets o, so for each offset the keys and values
of neighbouring targets are one slice, and nothing is gathered. Targets go in chunks that stay in
cache, the backward computes a chunk again, and memory beside the inputs and outputs is that of a
chunk. Same rules as reference.py, which it is tested against.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from graphattn.graphs.composites import Parts
from graphattn.graphs.structure import Band
from graphattn.graphs.token_graph import TokenGraph
from graphattn.ops.inputs import ValidPair, clear_invalid, repeat_heads

MOST_OFFSETS = 64  # wider bands are for products of tiles
CHUNK = 1 << 18  # numbers of a chunk's queries: a megabyte of float32


def why_not(graph: TokenGraph, *, edge_bias: bool = False) -> str | None:
    """Why this file cannot run a case; None where it can."""
    if edge_bias:
        return "no edge_bias yet"
    bands = _bands(graph)
    if bands is None:
        return (
            "only windows along a sequence yet (paths, causal and dilated windows, their batches)"
        )
    if graph.num_edges == 0:
        return "there are no edges"
    offsets = max(_num_offsets(band) for band in bands)
    if offsets > MOST_OFFSETS:
        return f"only windows of at most {MOST_OFFSETS} tokens yet, got {offsets}"
    return None


def _bands(graph: TokenGraph) -> tuple[Band, ...] | None:
    """The one band, or the bands of a batch, which must have the same offsets."""
    structure = graph.structure
    parts = structure.parts if isinstance(structure, Parts) else (structure,)
    bands = tuple(part for part in parts if isinstance(part, Band))
    kinds = {(b.before, b.after, b.dilation, b.self_loops) for b in bands}
    return bands if len(bands) == len(parts) and len(kinds) == 1 else None


def _num_offsets(band: Band) -> int:
    return band._reach(band.before) + band._reach(band.after) + 1


class _Plan:
    """Which targets a chunk holds, which sources its slices, and which pairs of them are edges."""

    def __init__(
        self,
        graph: TokenGraph,
        query: Tensor,
        *,
        score: str,
        top_k: int | None,
        valid: ValidPair,
        finite: bool,
    ) -> None:
        bands = _bands(graph)
        assert bands is not None
        first = max(bands, key=lambda band: band.num_tokens)
        before, after = first._reach(first.before), first._reach(first.after)
        self.hops = [h for h in range(-before, after + 1) if h or first.self_loops]
        self.dilation = first.dilation
        self.before, self.after = before * self.dilation, after * self.dilation
        self.sizes = [band.num_tokens for band in bands]
        self.num_tokens, self.device = graph.num_targets, query.device
        self.score, self.top_k, self.valid, self.finite = score, top_k, valid, finite
        width = max(1, query.shape[:-3].numel() * query.shape[-2:].numel())
        self.rows = max(16, CHUNK // width)

    @cached_property
    def borders(self) -> tuple[Tensor, Tensor] | None:
        """First and last + 1 token of every token's own sequence, [N]; None for one sequence."""
        if len(self.sizes) == 1:
            return None
        sizes = torch.tensor(self.sizes, device=self.device)
        end = sizes.cumsum(0)
        return (end - sizes).repeat_interleave(sizes), end.repeat_interleave(sizes)

    def chunks(self) -> Iterator[tuple[int, int]]:
        """First and last + 1 target of every chunk."""
        for start in range(0, self.num_tokens, self.rows):
            yield start, min(start + self.rows, self.num_tokens)

    def reach(self, start: int, stop: int) -> tuple[slice, tuple[int, int]]:
        """The sources that targets start .. stop - 1 see, and how many lie beyond either end."""
        low, high = start - self.before, stop + self.after
        inside = slice(max(low, 0), min(high, self.num_tokens))
        return inside, (inside.start - low, high - inside.stop)

    def chunk(
        self, query: Tensor, key: Tensor, value: Tensor, scale: Tensor, start: int, stop: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What :meth:`attend_rows` takes for targets start .. stop - 1; zeros beyond the ends."""
        inside, missing = self.reach(start, stop)
        key, value = (
            functional.pad(x[..., inside, :, :], (0, 0, 0, 0, *missing))
            if any(missing)
            else x[..., inside, :, :]
            for x in (key, value)
        )
        return query[..., start:stop, :, :], key, value, scale, self.allowed(start, stop)

    def allowed(self, start: int, stop: int) -> Tensor:
        """Bool [*, n, offsets]: which pairs are edges between valid tokens."""
        i = torch.arange(start, stop, device=self.device)
        hops = torch.tensor(self.hops, dtype=torch.int64, device=self.device)
        j = i[:, None] + hops * self.dilation
        if self.borders is None:
            inside = (j >= 0) & (j < self.num_tokens)
        else:
            low, high = (border[start:stop, None] for border in self.borders)
            inside = (j >= low) & (j < high)
        of_target, of_source = self.valid
        if of_target is not None:
            inside = inside & of_target[..., start:stop, None]
        if of_source is not None:
            inside = inside & of_source[..., j.clamp(0, self.num_tokens - 1)]
        return inside

    def attend_rows(
        self, query: Tensor, key: Tensor, value: Tensor, scale: Tensor, allowed: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Output [*, n, H, Dv] and log-sums [*, n, H] of a chunk, from its slices of sources."""
        heads = query.shape[-2]
        key, value = repeat_heads(key, heads), repeat_heads(value, heads)
        affinity = self._affinity(query, key, allowed)
        weights, lse, keep = self._softmax(scale[:, None] * affinity, allowed[..., None, :])
        out = query.new_zeros((*query.shape[:-1], value.shape[-1]))
        for t in range(len(self.hops)):
            value_j = self._seen(value, t, query.shape[-3], keep)
            out = torch.addcmul(out, weights[..., t, None], value_j)
        return out, lse

    def gradient_rows(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: Tensor,
        allowed: Tensor,
        d_out: Tensor,
        d_lse: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What :meth:`attend_rows` gives back to its four tensors."""
        n, heads = query.shape[-3:-1]
        kv_heads = key.shape[-2]
        key, value = repeat_heads(key, heads), repeat_heads(value, heads)
        affinity = self._affinity(query, key, allowed)
        weights, lse, keep = self._softmax(scale[:, None] * affinity, allowed[..., None, :])
        weights = weights if self.finite else weights.masked_fill(~keep, 0)  # 0 / NaN
        d_weights = torch.stack(
            [(d_out * self._seen(value, t, n, keep)).sum(-1) for t in range(len(self.hops))], -1
        )
        mean = (weights * d_weights).sum(-1, keepdim=True)
        d_lse = d_lse.masked_fill(lse == -torch.inf, 0)[..., None]
        d_logits = (weights * (d_weights - mean + d_lse)).masked_fill(~keep, 0)
        d_query, d_key, d_value = map(torch.zeros_like, (query, key, value))
        strength = d_logits * scale[:, None]
        for t, place in enumerate(self.places):
            to_key, to_value = d_key.narrow(-3, place, n), d_value.narrow(-3, place, n)
            pull = strength[..., t, None]
            key_j = self._seen(key, t, n, allowed[..., None, :])
            query_i, d_out_i = query, d_out
            if not self.finite:
                query_i = query.masked_fill(~allowed[..., t, None, None], 0)
                d_out_i = d_out.masked_fill(~keep[..., t, None], 0)
            if self.score == "rbf":  # of -|q - k|^2 / 2
                both = pull * (query_i - key_j)
                d_query -= both
                to_key += both
            else:
                d_query.addcmul_(pull, key_j)
                to_key.addcmul_(pull, query_i)
            to_value.addcmul_(weights[..., t, None], d_out_i)
        if kv_heads < heads:
            d_key, d_value = (x.unflatten(-2, (kv_heads, -1)).sum(-2) for x in (d_key, d_value))
        d_scale = (d_logits * affinity.masked_fill(~keep, 0)).sum(-1)
        return d_query, d_key, d_value, d_scale.flatten(0, -2).sum(0)

    @cached_property
    def places(self) -> list[int]:
        """Where every offset's sources begin in a slice."""
        return [self.before + hop * self.dilation for hop in self.hops]

    def _seen(self, x: Tensor, t: int, n: int, keep: Tensor) -> Tensor:
        """The sources of offset t; 0 where one that is not kept may hold NaN (0 * NaN is NaN)."""
        x_j = x.narrow(-3, self.places[t], n)
        return x_j if self.finite else x_j.masked_fill(~keep[..., t, None], 0)

    def _affinity(self, query: Tensor, key: Tensor, allowed: Tensor) -> Tensor:
        """q . k, or -|q - k|^2 / 2, for every offset: [*, n, H, offsets]."""
        found = []
        for t in range(len(self.hops)):
            key_j = self._seen(key, t, query.shape[-3], allowed[..., None, :])
            if self.score == "rbf":
                found.append((query - key_j).square().sum(-1) / -2)
            else:
                found.append((query * key_j).sum(-1))
        return torch.stack(found, dim=-1)

    def _softmax(self, logits: Tensor, keep: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Over the offsets, the last dimension; as in segments.py."""
        keep = keep.expand_as(logits)
        if self.top_k is not None and self.top_k < len(self.hops):
            candidates = logits.detach().masked_fill(~keep, -torch.inf)
            order = candidates.argsort(dim=-1, descending=True, stable=True)
            keep = keep & (order.argsort(dim=-1) < self.top_k)
        logits = logits.masked_fill(~keep, -torch.inf)
        highest = logits.detach().amax(dim=-1, keepdim=True)
        highest = torch.where(highest.isfinite(), highest, 0)
        exponential = (logits - highest).exp()
        total = exponential.sum(dim=-1, keepdim=True)
        empty = total == 0
        total = total.masked_fill(empty, 1)
        lse = (total.log() + highest).masked_fill(empty, -torch.inf)
        return exponential / total, lse.squeeze(-1), keep


class _ChunkedAttention(torch.autograd.Function):
    """Chunk by chunk; the backward computes each again. Its own backward is plain autograd."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: Tensor, plan: _Plan
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(query, key, value, scale)
        ctx.plan = plan
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        lse = query.new_empty(query.shape[:-1])
        for start, stop in plan.chunks():
            out[..., start:stop, :, :], lse[..., start:stop, :] = plan.attend_rows(
                *plan.chunk(query, key, value, scale, start, stop)
            )
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, scale = inputs = ctx.saved_tensors
        plan: _Plan = ctx.plan
        if torch.is_grad_enabled():  # create_graph=True: somebody differentiates this again
            results = _attend_plainly(query, key, value, scale, plan)
            wanted = [x for x, needed in zip(inputs, ctx.needs_input_grad, strict=False) if needed]
            found = iter(
                torch.autograd.grad(
                    results, wanted, (d_out, d_lse), create_graph=True, allow_unused=True
                )
            )
            return (*(next(found) if n else None for n in ctx.needs_input_grad[:4]), None)
        plan = copy(plan)  # the forward pass, and another backward, may still be finite
        plan.finite = plan.finite and all(bool(x.isfinite().all()) for x in (d_out, d_lse))
        d_query, d_scale = torch.empty_like(query), torch.zeros_like(scale)
        d_key, d_value = torch.zeros_like(key), torch.zeros_like(value)
        for start, stop in plan.chunks():
            inside, (before, _) = plan.reach(start, stop)
            length = inside.stop - inside.start
            gradients = plan.gradient_rows(
                *plan.chunk(query, key, value, scale, start, stop),
                d_out[..., start:stop, :, :],
                d_lse[..., start:stop, :],
            )
            d_query[..., start:stop, :, :] = gradients[0]
            d_key[..., inside, :, :] += gradients[1].narrow(-3, before, length)
            d_value[..., inside, :, :] += gradients[2].narrow(-3, before, length)
            d_scale += gradients[3]
        return d_query, d_key, d_value, d_scale, None


def _attend_plainly(
    query: Tensor, key: Tensor, value: Tensor, scale: Tensor, plan: _Plan
) -> tuple[Tensor, Tensor]:
    """The same chunks in plain autograd."""
    pieces = [
        plan.attend_rows(*plan.chunk(query, key, value, scale, start, stop))
        for start, stop in plan.chunks()
    ]
    outs, sums = zip(*pieces, strict=True)
    return torch.cat(outs, dim=-3), torch.cat(sums, dim=-2)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    graph: TokenGraph,
    *,
    score: str,
    scale: Tensor,
    top_k: int | None = None,
    valid: ValidPair = (None, None),
) -> tuple[Tensor, Tensor]:
    """Output [*, N, H, Dv] and log-sums [*, N, H]: every target averages the values it sees."""
    query = clear_invalid(query, valid[0])
    key, value = clear_invalid(key, valid[1]), clear_invalid(value, valid[1])
    # Elsewhere, reading the answer would wait for the device: there every slice is masked.
    finite = query.device.type == "cpu" and all(
        bool(x.detach().isfinite().all()) for x in (query, key, value)
    )
    plan = _Plan(graph, query, score=score, top_k=top_k, valid=valid, finite=finite)
    return _ChunkedAttention.apply(query, key, value, scale, plan)

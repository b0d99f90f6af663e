"""Attention over bands in loops: one row after the other in float64, gradients by autograd.

Which source a target sees, and which entry of a table it reads there, is written down here for
every kind of graph; nothing is asked of the library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import graphattn as ga


class Seen(NamedTuple):
    """A graph, bool [N, M] who sees whom, [N, M] entries of a table, and how many it has, or 0."""

    graph: ga.TokenGraph
    mask: Tensor
    entry: Tensor
    offsets: int


def hops(targets: int, sources: int, past: int = 0) -> Tensor:
    """How far source j stands behind target i, [N, M]."""
    return torch.arange(sources) - (torch.arange(targets) + past)[:, None]


def causal_window(n: int, window: int, past: int) -> Seen:
    hop = hops(n, past + n, past)
    graph = ga.causal_window_graph(n, window, past=past)
    return Seen(graph, (hop <= 0) & (hop > -window), hop + window - 1, window)


def causal(n: int, past: int) -> Seen:
    hop, last = hops(n, past + n, past), max(past + n - 1, 0)
    return Seen(ga.causal_graph(n, past=past), hop <= 0, hop + last, last + 1)


def path(n: int, window: int, loops: bool) -> Seen:
    hop = hops(n, n)
    mask = (hop.abs() <= window) & (loops | (hop != 0))
    return Seen(
        ga.window_path_graph(n, window, self_loops=loops), mask, hop + window, 2 * window + 1
    )


def dilated(n: int, window: int, step: int, loops: bool) -> Seen:
    hop = hops(n, n)
    mask = (hop % step == 0) & (hop.abs() <= window * step) & (loops | (hop != 0))
    graph = ga.dilated_window_graph(n, window, step, self_loops=loops)
    return Seen(graph, mask, hop.div(step, rounding_mode="floor") + window, 2 * window + 1)


def blocks(n: int, size: int, shift: int) -> Seen:
    block = (torch.arange(n) - shift).div(size, rounding_mode="floor")
    mask = block == block[:, None]
    graph = ga.block_window_graph(n, size, shift=shift)
    return Seen(graph, mask, hops(n, n) + size - 1, 2 * size - 1)


def complete(n: int, loops: bool) -> Seen:
    hop, last = hops(n, n), max(n - 1, 0 if loops else 1)
    graph = ga.complete_graph(n, self_loops=loops)
    return Seen(graph, loops | (hop != 0), hop + last, 2 * last + 1)


def bipartite(n: int, m: int) -> Seen:
    hop, last = hops(n, m), max(n - 1, 0)
    graph = ga.bipartite_complete_graph(n, m)
    return Seen(
        graph, torch.ones(n, m, dtype=torch.bool), hop + last, 2 * last + 1 if n == m else 0
    )


def section(whole: Seen, start: int, stop: int) -> Seen:
    """Some targets of a graph, with the run of sources that they see."""
    graph, run = whole.graph.targets(start, stop)
    rows, columns = slice(start, stop), slice(run.start, run.stop)
    return Seen(graph, whole.mask[rows, columns], whole.entry[rows, columns], whole.offsets)


def side_by_side(parts: list[Seen]) -> Seen:
    """A batch of sequences; without a common table where they differ in it."""
    offsets = {part.offsets for part in parts}
    return Seen(
        ga.batch([part.graph for part in parts]),
        torch.block_diag(*(part.mask for part in parts)).bool(),
        torch.block_diag(*(part.entry for part in parts)),
        offsets.pop() if len(offsets) == 1 else 0,
    )


def numbers(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Normal numbers, the same in every dtype but for rounding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Seen,
    affinity: Callable[[Tensor, Tensor], Tensor],
    scale: Tensor,
    table: Tensor | None = None,
    *,
    softcap: float | None = None,
    top_k: int | None = None,
    valid: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor]:
    """Output [B, N, H, Dv] and log-sums [B, N, H] of attention over [B, N, H, D], row by row."""
    repeats = query.shape[2] // max(key.shape[2], 1)
    of_target, of_source = valid
    outs, sums = [], []
    for i in range(query.shape[1]):
        sources = seen.mask[i].nonzero().flatten()
        keys, values = (
            x[:, sources].repeat_interleave(repeats, 2).transpose(1, 2) for x in (key, value)
        )
        logits = affinity(query[:, i, :, None], keys) * scale[:, None]
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if table is not None:
            logits = logits + table[seen.entry[i, sources]].T
        keep = torch.ones_like(logits, dtype=torch.bool)
        if of_source is not None:
            keep &= of_source[:, None, sources]
        if of_target is not None:
            keep &= of_target[:, i, None, None]
        keep &= logits != -torch.inf
        if top_k is not None:
            ranked = logits.masked_fill(~keep, -torch.inf)
            ranked = ranked.argsort(dim=-1, descending=True, stable=True)
            first = torch.zeros_like(keep).scatter_(-1, ranked[..., :top_k], True)
            keep &= first
        some = keep.any(-1, keepdim=True)
        logits = logits.masked_fill(~keep, -torch.inf)
        logits = torch.where(some, logits, torch.zeros_like(logits))
        weights = logits.softmax(-1) * some
        outs.append((weights[..., None] * values).sum(-2))
        lse = logits.logsumexp(-1) if len(sources) else logits.sum(-1)
        sums.append(lse.masked_fill(~some[..., 0], -torch.inf))
    shape = (*query.shape[:3], value.shape[-1])
    out = torch.stack(outs, 1) if outs else query.new_zeros(shape)
    return out, torch.stack(sums, 1) if sums else query.new_zeros(shape[:3])


def products(query: Tensor, key: Tensor) -> Tensor:
    """q . k"""
    return (query * key).sum(-1)


def distances(query: Tensor, key: Tensor) -> Tensor:
    """-|q - k|^2 / 2"""
    return (query - key).square().sum(-1) / -2


AFFINITIES: dict[str, Any] = {"dot": products, "rbf": distances}

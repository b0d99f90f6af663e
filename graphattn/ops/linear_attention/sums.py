r"""The sums that linear attention is made of, without the matrix of its weights.

.. math::
    o_i = \sum_{j \in N(i)} (a_i \cdot b_j) \, c_j

for rows a_i of targets, b_j and c_j of sources, all [G, tokens, features], where G counts the heads
of all samples. If targets see all sources, o_i is a_i times one matrix, the sum of b_j c_j^T. If
they see all sources before them, it is a_i times a running sum, which is stored once per chunk of
tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from graphattn.graphs.token_graph import TokenGraph
from graphattn.kernels.shared.stored import stores_results
from graphattn.ops.backends import is_known_finite
from graphattn.ops.edge_cache import cached_by_edges
from graphattn.ops.inputs import keep_freed_memory
from graphattn.ops.linear_attention.intervals import Interval, IntervalRun, runs_of

CHUNK = 64  # tokens of a chunk of a running sum; about as many as features if these are more
AT_ONCE = 1 << 22  # the most numbers of a piece: 16 megabytes of float32


def sums_over_graph(
    a: Tensor, b: Tensor, c: Tensor, graph: TokenGraph, *, transposed: bool
) -> Tensor:
    """The sums [G, targets, features of c], over a graph or its transpose.

    A row of zeros in a, b or c adds nothing, even if the other rows are NaN. A source that a target
    does not see changes no bit of its sum, even if it is NaN or so large that its square overflows.
    """
    if a.device.type == "cpu":
        keep_freed_memory()
    out = _sums(a, b, c, graph, transposed)
    if is_known_finite(out):
        return out
    there = (b != 0).any(-1) & (c != 0).any(-1)
    bad = there & ~(b.isfinite().all(-1) & c.isfinite().all(-1))
    hidden = (~there | bad)[..., None]
    out = _sums(a, b.masked_fill(hidden, 0), c.masked_fill(hidden, 0), graph, transposed)
    marks = bad[..., None].to(out.dtype)
    seen = _sums(torch.ones_like(a[..., :1]), marks, marks, graph, transposed)
    out = out.masked_fill(seen > 0, torch.nan)
    return out.masked_fill((a == 0).all(-1, keepdim=True), 0)


def plain_sums(a: Tensor, b: Tensor, c: Tensor, graph: TokenGraph, *, transposed: bool) -> Tensor:
    """:func:`sums_over_graph` without care for NaN, which may spread; callers check the sums."""
    if a.device.type == "cpu":
        keep_freed_memory()
    return _sums(a, b, c, graph, transposed)


def _sums(a: Tensor, b: Tensor, c: Tensor, graph: TokenGraph, transposed: bool) -> Tensor:
    runs = graph.derived(runs_of, lambda: runs_of(graph.structure))
    if runs is None:
        source, target = _edges(graph)
        return over_edges(a, b, c, *((target, source) if transposed else (source, target)))
    if len(runs) == 1:
        return _over_run(a, b, c, runs[0].transpose() if transposed else runs[0])
    out, t, s = [], 0, 0
    for run in runs:
        if transposed:
            run = run.transpose()
        targets, sources = (run.times * n for n in run.intervals[0][:2])
        here, there = slice(t, t + targets), slice(s, s + sources)
        out.append(_over_run(a[:, here], b[:, there], c[:, there], run))
        t, s = t + targets, s + sources
    return torch.cat(out, dim=1) if out else c.new_zeros(len(a), 0, c.shape[-1])


def _over_run(a: Tensor, b: Tensor, c: Tensor, run: IntervalRun) -> Tensor:
    """The sums over equal parts of a graph, as one batch."""
    first, *others = run.intervals
    groups = len(a)
    if run.times > 1:
        a = a.reshape(groups * run.times, first.targets, a.shape[-1])
        b, c = (x.reshape(groups * run.times, first.sources, x.shape[-1]) for x in (b, c))
    total = over_interval(a, b, c, first)
    for interval in others:
        total = total + over_interval(a, b, c, interval)
    return total.reshape(groups, run.times * first.targets, c.shape[-1])


# Intervals.


def over_interval(a: Tensor, b: Tensor, c: Tensor, interval: Interval) -> Tensor:
    """The sums over an interval, in which target i sees the sources i + first .. i + last."""
    N, M, first, last = interval
    if N == 0 or M == 0 or last < first or first >= M or last <= -N:
        return c.new_zeros(len(a), N, c.shape[-1])
    before, after = first + N <= 1, last >= M - 1
    if before and after:
        return a @ (b.transpose(1, 2) @ c)
    if before:  # target i sees all sources up to i + last
        out = running_sums(a, _rows(b, last, N), _rows(c, last, N))
        return _add_all(out, a, b[:, : max(last, 0)], c[:, : max(last, 0)])
    if after:
        out = running_sums(a, _rows(b, first, N), _rows(c, first, N), backward=True)
        return _add_all(out, a, b[:, max(first + N, 0) :], c[:, max(first + N, 0) :])
    if N <= CHUNK and M <= CHUNK:  # few tokens: all pairs at once
        pairs = torch.bmm(a, b.transpose(1, 2)).masked_fill_(_outside(interval, a.device), 0)
        return torch.bmm(pairs, c)
    if last - first + 1 > 4 * a.shape[-1]:
        return _long_windows(a, b, c, interval)
    return _windows(a, b, c, interval)


@stores_results(64)
def _outside(interval: Interval, device: torch.device) -> Tensor:
    """Mark the pairs that are not in an interval of a few tokens, bool [N, M]."""
    N, M, first, last = interval
    hop = torch.arange(M, device=device) - torch.arange(N, device=device)[:, None]
    return (hop < first) | (hop > last)


def _rows(x: Tensor, first: int, count: int) -> Tensor:
    """Rows first .. first + count - 1 of x [G, M, F], with zeros for rows that do not exist."""
    M = x.shape[1]
    start, stop = min(max(first, 0), M), min(max(first + count, 0), M)
    inside = x[:, start:stop]
    left = min(max(-first, 0), count)
    right = count - left - (stop - start)
    return inside if left == right == 0 else functional.pad(inside, (0, 0, left, right))


def _add_all(out: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Add to `out` the sums over sources that all targets see."""
    if b.shape[1] == 0:
        return out
    return out + a @ (b.transpose(1, 2) @ c)


def running_sums(
    a: Tensor, b: Tensor, c: Tensor, *, backward: bool = False, strict: bool = False
) -> Tensor:
    """The sums over sources j <= i of target i, with `backward` j >= i, with `strict` not j = i.

    Within a chunk, products of all pairs are computed. Earlier chunks enter by a running sum of
    b c^T, with one matrix [D, Dv] per chunk. A chunk has about D tokens, so the matrices need about
    as much memory as the tokens.
    """
    G, N, D = a.shape
    size = min(CHUNK * max(1, round(D / CHUNK)), N)
    chunks = -(-N // size)
    a, b, c = (_rows(x, 0, chunks * size).reshape(G * chunks, size, x.shape[-1]) for x in (a, b, c))
    pairs = a @ b.transpose(1, 2)
    inside = int(strict)
    pairs = pairs.triu_(inside) if backward else pairs.tril_(-inside)
    if chunks == 1:
        return pairs @ c
    # For every chunk, the sum of the matrices of all chunks before it (after it if `backward`).
    matrices = (b.transpose(1, 2) @ c).unflatten(0, (G, chunks))
    known = matrices.new_zeros(matrices.shape)
    if backward:
        known[:, :-1] = matrices[:, 1:].flip(1).cumsum(1).flip(1)
    else:
        torch.cumsum(matrices[:, :-1], 1, out=known[:, 1:])
    out = (pairs @ c).baddbmm_(a, known.flatten(0, 1))
    return out.view(G, chunks * size, c.shape[-1])[:, :N]


def _windows(a: Tensor, b: Tensor, c: Tensor, interval: Interval) -> Tensor:
    """The sums over windows, from products of a block of targets and the sources that it sees."""
    G, (N, _, first, last) = len(a), interval
    seen = last - first + 1
    size = min(max(CHUNK, 1 << (seen - 1).bit_length()), N)
    blocks, width = -(-N // size), size + seen - 1
    a = _rows(a, 0, blocks * size).unflatten(1, (blocks, size))
    b, c = (
        _rows(x, first, blocks * size + seen - 1).unfold(1, width, size).transpose(2, 3)
        for x in (b, c)
    )
    ones = torch.ones(size, width, dtype=torch.bool, device=a.device)
    outside = ~(ones.triu() & ones.tril(seen - 1))
    at_once = max(1, AT_ONCE // (G * size * width))
    out = []
    for start in range(0, blocks, at_once):
        here = slice(start, start + at_once)
        pairs = a[:, here] @ b[:, here].transpose(2, 3)
        out.append(pairs.masked_fill_(outside, 0) @ c[:, here])
    total = out[0] if len(out) == 1 else torch.cat(out, dim=1)
    return total.flatten(1, 2)[:, :N]


def _long_windows(a: Tensor, b: Tensor, c: Tensor, interval: Interval) -> Tensor:
    """The sums over windows, from running sums that start again in every block of their length.

    A window that ends in a block consists of the first part of that block and the last part of the
    block before (van Herk and Gil-Werman). Nothing is subtracted, so nothing cancels.
    """
    G, (N, _, first, last) = len(a), interval
    size = last - first + 1
    blocks = -(-N // size)
    a = _rows(a, 0, blocks * size).reshape(G * blocks, size, a.shape[-1])
    current, before = (
        [_rows(x, start, blocks * size).reshape(G * blocks, size, x.shape[-1]) for x in (b, c)]
        for start in (last, last - size)
    )
    total = running_sums(a, *current) + running_sums(a, *before, backward=True, strict=True)
    return total.reshape(G, blocks * size, c.shape[-1])[:, :N]


# Edges.


def _edges(graph: TokenGraph) -> Tensor:
    """The edge list of a graph, [2, E]."""
    return cached_by_edges(graph, _of_table) if graph.is_table else graph.compact_edges


def _of_table(graph: TokenGraph, _: Tensor) -> Tensor:
    return graph.compact_edges


def over_edges(a: Tensor, b: Tensor, c: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """The sums from one product per edge, for some edges at a time."""
    out = c.new_zeros(len(a), a.shape[1], c.shape[-1])
    at_once = max(1, AT_ONCE // max(1, len(a) * (a.shape[-1] + c.shape[-1])))
    for j, i in zip(source.split(at_once), target.split(at_once), strict=True):
        weight = (a.index_select(1, i) * b.index_select(1, j)).sum(-1, keepdim=True)
        out.index_add_(1, i, weight * c.index_select(1, j))
    return out

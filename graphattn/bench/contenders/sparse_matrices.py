"""Attention over listed edges: with sparse matrices by torch.sparse, and with loops by numba.

Both read the edges row by row, and backward the rows of the transposed list: nothing is scattered.
"""

from __future__ import annotations

import math
import warnings
from functools import cache
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor
from torch.autograd import Function

import graphattn as ga
from graphattn.bench.cases.inputs import AttentionInputs
from graphattn.bench.contenders.peers import check_memory, installed, only_on_a_cpu


class SparseRows(NamedTuple):
    """Edges in the order of their targets and of their sources; int32 unless stated otherwise."""

    rowptr: Tensor  # [N + 1]
    source: Tensor  # [E]
    degree: Tensor  # [N], int64
    equal: int | None  # the degree if all targets have the same, else None
    of_sources: Tensor  # row pointers of the transposed list, [M + 1]
    target: Tensor  # [E]
    edge: Tensor  # [E], int64, index of each edge in the order of the targets

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rowptr) - 1, len(self.of_sources) - 1


def sparse_rows(graph: ga.TokenGraph) -> SparseRows:
    rowptr, source = graph.csr()
    degree = rowptr.diff()
    target = torch.arange(graph.num_targets).repeat_interleave(degree)
    edge = source.argsort(stable=True)
    count = torch.bincount(source, minlength=graph.num_sources)
    of_sources = torch.nn.functional.pad(count.cumsum(0), (1, 0))
    equal = int(degree[0]) if bool((degree == degree[:1]).all()) else None
    return SparseRows(
        rowptr.int(), source.int(), degree, equal, of_sources.int(), target[edge].int(), edge
    )


def rows_of(x: AttentionInputs) -> SparseRows:
    return x.once("rows", lambda: sparse_rows(x.graph))


# torch.sparse


def torch_sparse(x: AttentionInputs) -> Tensor:
    """Compute RBF attention one head after another, with inner products only at the edges."""
    only_on_a_cpu(x.query.device)
    rows = rows_of(x)
    check_memory(2.0 * len(rows.source) * x.query.shape[1], "its weights", x.query)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns once that CSR is in beta state
        return Sparse.apply(x.query, x.key, x.value, x.sigma, rows)


class Sparse(Function):
    """RBF attention by sparse products, which read one head, [N, D], at a time."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sigma: float, rows: SparseRows
    ) -> Tensor:
        q, k, v = (t.transpose(0, 1).contiguous() for t in (query, key, value))
        logits = at_edges(q, k, rows)
        logits -= (k.square().sum(-1) / 2).index_select(1, rows.source)
        weight = softmax_of_rows(logits.div_(sigma**2), rows)
        out = torch.stack([matrix(w, rows) @ t for w, t in zip(weight, v, strict=True)])
        ctx.save_for_backward(q, k, v, weight, out)
        ctx.given = sigma, rows
        return out.transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        q, k, v, weight, out = ctx.saved_tensors
        sigma, rows = ctx.given
        d = d_out.transpose(0, 1).contiguous()
        pull = at_edges(d, v, rows)
        pull -= of_targets((out * d).sum(-1), rows)
        pull *= weight
        pull /= sigma**2
        weight_t, pull_t = (t.index_select(1, rows.edge) for t in (weight, pull))
        d_query, d_key, d_value = (torch.empty_like(t) for t in (q, k, v))
        ones = q.new_ones(rows.shape[0], 1)
        for h in range(len(q)):
            # The pulls on a target sum to 0, so the term with the query itself vanishes. The pulls
            # on a source do not sum to 0, so the term with the key is subtracted.
            d_query[h] = matrix(pull[h], rows) @ k[h]
            transposed = matrix_t(pull_t[h], rows)
            d_key[h] = transposed @ q[h] - (transposed @ ones) * k[h]
            d_value[h] = matrix_t(weight_t[h], rows) @ d[h]
        return *(t.transpose(0, 1) for t in (d_query, d_key, d_value)), None, None


def matrix(values: Tensor, rows: SparseRows) -> Tensor:
    """Return a sparse matrix [N, M]; its values are in the order of the targets."""
    return torch.sparse_csr_tensor(
        rows.rowptr, rows.source, values, rows.shape, check_invariants=False
    )


def matrix_t(values: Tensor, rows: SparseRows) -> Tensor:
    """Return a sparse matrix [M, N]; its values are in the order of the sources."""
    return torch.sparse_csr_tensor(
        rows.of_sources, rows.target, values, rows.shape[::-1], check_invariants=False
    )


def at_edges(of_targets: Tensor, of_sources: Tensor, rows: SparseRows) -> Tensor:
    """Compute the inner product of target and source of every edge, [H, E]."""
    pattern = matrix(of_targets.new_zeros(len(rows.source)), rows)
    per_head = [
        torch.sparse.sampled_addmm(pattern, a, b.T, beta=0.0).values()
        for a, b in zip(of_targets, of_sources, strict=True)
    ]
    return torch.stack(per_head)


def softmax_of_rows(logits: Tensor, rows: SparseRows) -> Tensor:
    """Take the softmax of [H, E] over the edges of every target."""
    if rows.equal:
        return logits.unflatten(1, (-1, rows.equal)).softmax(-1).flatten(1)
    highest = segments(logits, "max", rows)
    weight = (logits - of_targets(highest, rows)).exp_()
    return weight.div_(of_targets(segments(weight, "sum", rows), rows))


def segments(values: Tensor, reduce: str, rows: SparseRows) -> Tensor:
    """Reduce the values of every row by "sum" or "max", [H, E] -> [H, N]."""
    return torch.segment_reduce(values.T.contiguous(), reduce, lengths=rows.degree, axis=0).T


def of_targets(values: Tensor, rows: SparseRows) -> Tensor:
    """Repeat the value of every target for each of its edges, [H, N] -> [H, E]."""
    return values.repeat_interleave(rows.degree if rows.equal is None else rows.equal, 1)


# numba


def numba_rows(x: AttentionInputs) -> Tensor:
    """Compute RBF attention by loops over rows, which numba compiles with fast mathematics."""
    only_on_a_cpu(x.query.device)
    numba = installed("numba")
    forward, backward = compiled_loops()
    numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
    return Looped.apply(x.query, x.key, x.value, x.sigma, rows_of(x), forward, backward)


# Loops over rows of edges, in float32. Numba compiles them, but Python can also run them. One
# target or source is one step of a parallel loop, so two threads never add to the same row. Without
# constants of the dtype float32, numba would use float64 for all sums with them.
prange: Any = range  # replaced by numba.prange before numba compiles the loops
ZERO, ONE, HALF = numpy.float32(0), numpy.float32(1), numpy.float32(0.5)
LOWEST = numpy.float32(-3e38)  # fast mathematics has no infinity


def forward_loops(
    query: Any, key: Any, value: Any, rowptr: Any, source: Any, out: Any, log_sum: Any, scale: Any
) -> None:
    """Write outputs [N, H, D] and log-sums [N, H]; the output of a row without edges is 0."""
    N, H, D = query.shape
    for i in prange(N):
        begin = rowptr[i]
        count = rowptr[i + 1] - begin
        weight = numpy.empty((H, count), numpy.float32)
        for e in range(count):
            j = source[begin + e]
            for h in range(H):
                distance = ZERO
                for d in range(D):
                    difference = query[i, h, d] - key[j, h, d]
                    distance += difference * difference
                weight[h, e] = -HALF * scale * distance
        for h in range(H):
            highest, total = LOWEST, ZERO
            for e in range(count):
                highest = max(highest, weight[h, e])
            for e in range(count):
                weight[h, e] = math.exp(weight[h, e] - highest)
                total += weight[h, e]
            share = ONE / max(total, ONE)  # the largest term is 1 unless the row is empty
            for e in range(count):
                weight[h, e] *= share
            log_sum[i, h] = highest + math.log(max(total, ONE))
            for d in range(D):
                out[i, h, d] = ZERO
        for e in range(count):
            j = source[begin + e]
            for h in range(H):
                w = weight[h, e]
                for d in range(D):
                    out[i, h, d] += w * value[j, h, d]


def backward_loops(
    query: Any,
    key: Any,
    value: Any,
    rowptr: Any,
    source: Any,
    of_sources: Any,
    target: Any,
    edge: Any,
    out: Any,
    log_sum: Any,
    d_out: Any,
    d_query: Any,
    d_key: Any,
    d_value: Any,
    weight: Any,
    pull: Any,
    scale: Any,
) -> None:
    """Write the gradients; `weight` and `pull`, [E, H], are stored for the loop over sources."""
    N, H, D = query.shape
    for i in prange(N):
        mean = numpy.empty(H, numpy.float32)
        for h in range(H):
            inner = ZERO
            for d in range(D):
                inner += out[i, h, d] * d_out[i, h, d]
                d_query[i, h, d] = ZERO
            mean[h] = inner
        for e in range(rowptr[i], rowptr[i + 1]):
            j = source[e]
            for h in range(H):
                distance, along = ZERO, ZERO
                for d in range(D):
                    difference = query[i, h, d] - key[j, h, d]
                    distance += difference * difference
                    along += d_out[i, h, d] * value[j, h, d]
                w = numpy.float32(math.exp(-HALF * scale * distance - log_sum[i, h]))
                force = scale * w * (along - mean[h])
                weight[e, h], pull[e, h] = w, force
                for d in range(D):
                    d_query[i, h, d] += force * (key[j, h, d] - query[i, h, d])
    for j in prange(len(key)):
        for h in range(H):
            for d in range(D):
                d_key[j, h, d] = ZERO
                d_value[j, h, d] = ZERO
        for e in range(of_sources[j], of_sources[j + 1]):
            i = target[e]
            for h in range(H):
                w, force = weight[edge[e], h], pull[edge[e], h]
                for d in range(D):
                    d_key[j, h, d] += force * (query[i, h, d] - key[j, h, d])
                    d_value[j, h, d] += w * d_out[i, h, d]


@cache
def compiled_loops() -> tuple[Any, Any]:
    global prange
    numba = installed("numba")
    prange = numba.prange
    compiled = numba.njit(parallel=True, fastmath=True, boundscheck=False)
    return compiled(forward_loops), compiled(backward_loops)


class Looped(Function):
    """RBF attention by loops that read and write the memory of the tensors directly."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sigma: float,
        rows: SparseRows,
        forward: Any,
        backward: Any,
    ) -> Tensor:
        query, key, value = (t.detach().contiguous() for t in (query, key, value))
        out, log_sum = torch.empty_like(query), query.new_empty(query.shape[:2])
        scale = query.new_tensor(1 / sigma**2)
        given = (query, key, value, rows.rowptr, rows.source, out, log_sum)
        forward(*(t.numpy() for t in given), scale.numpy()[()])
        ctx.save_for_backward(query, key, value, out, log_sum, scale)
        ctx.given = rows, backward
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        query, key, value, out, log_sum, scale = ctx.saved_tensors
        rows, backward = ctx.given
        gradients = [torch.empty_like(t) for t in (query, key, value)]
        of_edges = (rows.rowptr, rows.source, rows.of_sources, rows.target, rows.edge)
        kept = [query.new_empty(len(rows.source), query.shape[1]) for _ in "wp"]
        given = (
            *(query, key, value, *of_edges, out, log_sum, d_out.contiguous()),
            *(*gradients, *kept),
        )
        backward(*(t.numpy() for t in given), scale.numpy()[()])
        return *gradients, None, None, None, None

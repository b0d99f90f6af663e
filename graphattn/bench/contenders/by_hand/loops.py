"""RBF attention over rows of edges, as loops in float32.

Numba compiles the loops, but Python can also run them. One target or one source is one step of a
parallel loop, so two threads never add to the same row. Constants have the dtype float32. Otherwise
numba would use float64 for the constants and for all sums with them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy

prange: Any = range  # replaced by numba.prange before numba compiles the loops
ZERO, ONE, HALF = numpy.float32(0), numpy.float32(1), numpy.float32(0.5)
LOWEST = numpy.float32(-3e38)  # fast mathematics has no infinity


def forward(
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
                own = weight[h, e]
                for d in range(D):
                    out[i, h, d] += own * value[j, h, d]


def backward(
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
    """Write the gradients of query, key and value.

    The loop over targets stores `weight` and `pull`, [E, H], which the loop over sources reads.
    """
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
                own = numpy.float32(math.exp(-HALF * scale * distance - log_sum[i, h]))
                force = scale * own * (along - mean[h])
                weight[e, h], pull[e, h] = own, force
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
                own, force = weight[edge[e], h], pull[edge[e], h]
                for d in range(D):
                    d_key[j, h, d] += force * (query[i, h, d] - key[j, h, d])
                    d_value[j, h, d] += own * d_out[i, h, d]

"""Arrays and edges as short text that the page reads into typed arrays."""

from __future__ import annotations

import base64
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from graphattn.graphs import TokenGraph

Array = NDArray[Any]


class SortedEdges(NamedTuple):
    """Edges sorted by target: token i sees ``source[rowptr[i]:rowptr[i + 1]]``."""

    rowptr: Array
    source: Array

    @property
    def target(self) -> Array:
        """The target of every edge."""
        return np.repeat(np.arange(len(self.rowptr) - 1), np.diff(self.rowptr))


def rows_of(graph: TokenGraph) -> SortedEdges:
    """List the edges of a graph."""
    rowptr, source = graph.compact_rowptr, graph.compact_edges[0]
    return SortedEdges(rowptr.cpu().numpy().astype(np.int64), source.cpu().numpy().astype(np.int64))


def rows_from(target: Array, source: Array, num_tokens: int) -> SortedEdges:
    """Make rows of edges that are sorted already."""
    rowptr = np.zeros(num_tokens + 1, dtype=np.int64)
    np.cumsum(np.bincount(target, minlength=num_tokens), out=rowptr[1:])
    return SortedEdges(rowptr, source.astype(np.int64))


def packed(numbers: Any, dtype: str) -> str:
    """Return numbers as base64 text, in the order of bytes that browsers have ("<u2", "<f4")."""
    return base64.b64encode(np.ascontiguousarray(numbers, dtype=dtype).tobytes()).decode()


def packed_rows(rows: SortedEdges) -> dict[str, str]:
    """Pack edges as runs of neighbouring sources (first, length), or one by one if that is shorter.

    A window is one run per token, so also all pairs of 2,000 tokens are short.
    """
    target, source = rows.target, rows.source
    is_first = np.ones(len(source), dtype=bool)
    is_first[1:] = (np.diff(source) != 1) | (np.diff(target) != 0)
    first = np.flatnonzero(is_first)
    if 2 * len(first) >= len(source):
        counts = np.diff(rows.rowptr)
        return {"counts": packed(counts, "<u2"), "sources": packed(source, "<u2")}
    counts = np.bincount(target[first], minlength=len(rows.rowptr) - 1)
    runs = np.stack([source[first], np.diff(first, append=len(source))], axis=1)
    return {"counts": packed(counts, "<u2"), "runs": packed(runs, "<u2")}

"""Facts about a graph on the page: its edges, its spectrum, and how far information travels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import graphattn.spectral as spectral
from graphattn.explorer.packing import SortedEdges, packed, packed_rows, rows_of
from graphattn.graphs import TokenGraph

WHOLE = 2_000  # tokens up to which all eigenvalues and all reaches are computed, in seconds
AT_ONCE = 200_000  # edges whose sources are gathered together: 50 MB for 2,000 tokens


def graph_data(graph: TokenGraph) -> dict[str, Any]:
    """Collect what the page shows of one graph."""
    rows = rows_of(graph)
    settled = layers_until_settled(rows) if graph.num_tokens <= WHOLE else None
    return {
        "edges": packed_rows(rows),
        "num_edges": graph.num_edges,
        "layers": settled and settled[0],
        "reach": _words_of_reach(settled),
        **_spectrum(graph),
    }


def layers_until_settled(rows: SortedEdges) -> tuple[int, bool]:
    """Count the layers after which nothing new arrives anywhere; has everything then arrived?

    A token keeps what it has, as by the residual connection of a layer. Sets of tokens are rows of
    bits, so a window over N tokens takes about N^3 / 4 bytes of copying, whatever its width is.
    """
    N = len(rows.rowptr) - 1
    everyone = np.zeros((N + 1, -(-N // 64) * 64), dtype=bool)
    everyone[np.arange(N), np.arange(N)] = everyone[N, :N] = True
    bits = np.packbits(everyone, axis=1).view(np.uint64)  # 64 tokens at a time
    known, full = bits[:N], bits[N]
    layers = 0
    while not (known == full).all():
        grown = known.copy()
        first = 0
        while first < N:
            last = int(np.searchsorted(rows.rowptr, rows.rowptr[first] + AT_ONCE, side="right")) - 1
            last = min(max(last, first + 1), N)
            begin, end = rows.rowptr[first], rows.rowptr[last]
            seeing = first + np.flatnonzero(np.diff(rows.rowptr[first : last + 1]))
            if len(seeing):
                seen = known[rows.source[begin:end]]
                starts = rows.rowptr[seeing] - begin
                grown[seeing] |= np.bitwise_or.reduceat(seen, starts, axis=0)
            first = last
        if (grown == known).all():
            return layers, False
        known, layers = grown, layers + 1
    return layers, True


def _words_of_reach(settled: tuple[int, bool] | None) -> str:
    if settled is None:
        return f"Beyond {WHOLE:,} tokens, the layers that all tokens need are not counted."
    layers, everything = settled
    after = f"After {_count(layers, 'layer')}"
    if everything:
        return f"{after}, everything has reached everything."
    return f"{after}, nothing new arrives: some tokens never reach others."


def _spectrum(graph: TokenGraph) -> dict[str, Any]:
    if graph.num_tokens > WHOLE:
        fiedler = spectral.fiedler_value(graph)
        largest = spectral.max_eigenvalue(graph)
        words = _words_of(fiedler, largest, 0 if fiedler else 2)
        note = f"All eigenvalues are computed up to {WHOLE:,} tokens; these are two of them."
        return {"spectrum": None, "fiedler": fiedler, "words": f"{words} {note}"}
    values = spectral.spectrum(graph).cpu().numpy()
    largest, parts = float(values[-1]), int((values == 0).sum())
    fiedler = float(values[1]) if len(values) > 1 else 0.0
    if fiedler < 1e-6 * largest:  # the errors of all eigenvalues are shares of the largest
        fiedler = spectral.fiedler_value(graph)
    words = _words_of(fiedler, largest, parts)
    return {"spectrum": packed(values, "<f4"), "fiedler": fiedler, "words": words}


def _words_of(fiedler: float, largest: float, parts: int) -> str:
    """Say what the Fiedler value means; `parts` is the number of connected parts, 0 for one."""
    if parts > 1:
        many = f"{parts:,}" if largest or parts > 2 else "at least 2"
        return (
            f"The Fiedler value is 0, because the graph has {many} separate parts: between them, "
            "nothing is exchanged."
        )
    if not fiedler:
        return "The Fiedler value of a single token is 0."
    text = f"The Fiedler value is {fiedler:.4g}, and the largest eigenvalue is {largest:.4g}. "
    left = 1 - fiedler / largest  # after a step of size 1 / (2 lambda_max), Eq. 13
    if left < 1e-9:
        return text + "One consensus step of the largest size removes all disagreement."
    steps = math.ceil(math.log(0.5) / math.log(left) - 1e-9)
    return text + (
        f"One consensus step of the largest size removes {100 - 100 * left:.2g}% of the slowest "
        f"disagreement; half of it is left after {_count(steps, 'step')}."
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"

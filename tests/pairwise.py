"""Covering designs: few rows of a table of options that hold all pairs of options."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations


def pairwise(rows: Sequence[Mapping[str, Hashable]]) -> list[int]:
    """Choose rows that together hold every pair of options that any row holds.

    Most bugs show in one option or in two that meet, and of n options with v values each about
    v² log n rows hold all pairs, where a full sweep has vⁿ (Cohen, Dalal, Fredman and Patton, The
    AETG System, 1997). Rows are chosen greedily: next comes the row with most pairs that are new,
    and of equal rows the first.

    Args:
        rows: a value for each option. Rows that do not exist are no loss: only pairs of those
            that do are asked for.

    Returns:
        The indices of chosen rows, ascending. With one option or two these are all distinct rows.

    Example:
        >>> import itertools
        >>> full = [dict(zip("abc", row)) for row in itertools.product((0, 1), repeat=3)]
        >>> [tuple(full[k].values()) for k in pairwise(full)]
        [(0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0)]
    """
    pairs = [set(combinations(row.items(), min(2, len(row)))) for row in rows]
    new = set().union(*pairs)
    best = [(-len(held), index) for index, held in enumerate(pairs)]
    heapq.heapify(best)
    chosen = []
    while new:
        before, index = heapq.heappop(best)
        now = -len(pairs[index] & new)  # another row may have taken some of its pairs since
        if now == before:
            chosen.append(index)
            new -= pairs[index]
        elif now:
            heapq.heappush(best, (now, index))
    return sorted(chosen)

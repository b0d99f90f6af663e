"""Covering arrays: few rows of a table of options that hold all pairs of options."""

from __future__ import annotations

import heapq
import random
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations


def covering(rows: Sequence[Mapping[str, Hashable]], strength: int = 2) -> list[int]:
    """Choose rows that together hold every pair of values that any row holds.

    Most bugs show in one option or in two that meet. Of n options with v values each about
    v² log n rows hold all pairs, and a full sweep has vⁿ (Cohen, Dalal, Fredman and Patton, The
    AETG System, 1997). Rows are chosen greedily: next comes the row with most pairs that are new.

    Args:
        rows: a value for each option. Only pairs of rows that exist are asked for.
        strength: 2 for pairs, 3 for triples, 1 for every value once.

    Returns:
        The indices of chosen rows, ascending. With no more options than `strength` these are all
        distinct rows.

    Example:
        >>> import itertools
        >>> full = [dict(zip("abc", row)) for row in itertools.product((0, 1), repeat=3)]
        >>> [tuple(full[k].values()) for k in covering(full)]
        [(0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0)]
    """
    # pytest gives names that are parametrized together equal indices: they are one option.
    columns = dict.fromkeys(zip(*(row.values() for row in rows), strict=True))
    table = list(zip(*columns, strict=True)) if columns else [()] * len(rows)
    held = [set(combinations(enumerate(row), min(strength, len(row)))) for row in table]
    new = set().union(*held)
    # Of equal rows any comes first: taken in order, the third option would follow the first two.
    order = random.Random(0).sample(range(len(rows)), len(rows))
    best = [(-len(held[index]), place, index) for place, index in enumerate(order)]
    heapq.heapify(best)
    chosen = []
    while new:
        before, place, index = heapq.heappop(best)
        now = -len(held[index] & new)  # another row may have taken some of its pairs since
        if now == before:
            chosen.append(index)
            new -= held[index]
        elif now:
            heapq.heappush(best, (now, place, index))
    return sorted(chosen)

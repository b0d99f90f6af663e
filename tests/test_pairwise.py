"""Covering designs hold all pairs of options, with few rows."""

from __future__ import annotations

import itertools

import pytest
from pairwise import pairwise

Pair = tuple[tuple[str, int], tuple[str, int]]


def pairs_by_loops(rows: list[dict[str, int]]) -> set[Pair]:
    return {
        ((first, row[first]), (second, row[second]))
        for row in rows
        for first in row
        for second in row
        if first < second
    }


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("sizes", "most"),
    [((2, 2, 2), 4), ((3, 3, 3, 3), 9), ((10, 6, 3, 2, 2), 60), ((5, 4), 20), ((7,), 7)],
)
def test_every_pair_is_in_a_row_and_there_are_few_rows(sizes: tuple[int, ...], most: int) -> None:
    names = "abcde"[: len(sizes)]
    rows = [dict(zip(names, row, strict=True)) for row in itertools.product(*map(range, sizes))]
    chosen = pairwise(rows)
    assert chosen == sorted(set(chosen))
    some = [rows[k] for k in chosen]
    assert pairs_by_loops(some) == pairs_by_loops(rows)
    for name in names:
        assert {row[name] for row in some} == {row[name] for row in rows}
    assert len(chosen) <= most


def test_rows_that_do_not_exist_are_not_asked_for() -> None:
    rows = [
        {"a": a, "b": b, "c": c}
        for a, b, c in itertools.product(range(4), repeat=3)
        if a != b and (b, c) != (1, 2)
    ]
    some = [rows[k] for k in pairwise(rows)]
    assert pairs_by_loops(some) == pairs_by_loops(rows)
    assert len(some) < len(rows) / 2
    assert pairwise([]) == []

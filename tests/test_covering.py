"""Covering arrays hold all pairs of options, with few rows."""

from __future__ import annotations

import itertools

import pytest
from covering import covering

Row = dict[str, int]


def held(rows: list[Row], strength: int) -> set[tuple[tuple[str, int], ...]]:
    return {
        tuple((name, row[name]) for name in names)
        for row in rows
        for names in itertools.combinations(sorted(row), min(strength, len(row)))
    }


def full(*sizes: int) -> list[Row]:
    return [
        dict(zip("abcde"[: len(sizes)], row, strict=True))
        for row in itertools.product(*map(range, sizes))
    ]


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("sizes", "strength", "most"),
    [
        ((2, 2, 2), 2, 4),
        ((3, 3, 3, 3), 2, 11),  # no design has less than 9
        ((3, 3, 3, 3), 1, 3),
        ((3, 3, 3, 3), 3, 33),  # nor less than 27
        ((10, 6, 3, 2, 2), 2, 63),  # nor less than 60
        ((5, 4), 2, 20),
        ((7,), 2, 7),
        ((), 2, 1),
    ],
)
def test_every_pair_is_in_a_row_and_there_are_few_rows(sizes, strength, most) -> None:
    rows = full(*sizes)
    chosen = covering(rows, strength)
    assert chosen == sorted(set(chosen))
    assert held([rows[k] for k in chosen], strength) == held(rows, strength)
    assert len(chosen) <= most


def test_rows_that_do_not_exist_are_not_asked_for() -> None:
    rows = [row for row in full(4, 4, 4) if row["a"] != row["b"] and (row["b"], row["c"]) != (1, 2)]
    chosen = covering(rows)
    assert held([rows[k] for k in chosen], 2) == held(rows, 2)
    assert len(chosen) < len(rows) / 2
    assert covering([]) == []


def test_an_option_that_repeats_another_asks_for_no_more_rows() -> None:
    rows = full(3, 3, 3)
    assert covering([row | {"a again": row["a"]} for row in rows]) == covering(rows)


def test_the_third_option_does_not_follow_the_first_two() -> None:
    """Nearly half of all triples are held, too, and not one for every pair of the others."""
    rows = full(30, 3, 2)
    some = [rows[k] for k in covering(rows)]
    assert len(some) <= 95
    pairs = {(row["b"], row["c"]) for row in some}
    assert len(pairs) == 6
    for pair in pairs:
        assert 5 <= sum((row["b"], row["c"]) == pair for row in some) <= 25

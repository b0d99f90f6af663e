"""Ranks that call a layer with tensors that are not alike: errors that name the argument."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_failures import SOON

Outcome = Callable[[str], list[dict[str, Any]]]

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or sys.platform != "linux", reason="forks ranks"
)

DIFFERENT = {
    "batch_of_the_first_call": (
        "x must be alike on all ranks, got float32 [2, tokens, 8] on ranks 0 and 2, "
        "float32 [3, tokens, 8] on rank 1"
    ),
    "batch": (
        "x must be alike on all ranks, got float32 [2, tokens, 8] on ranks 0 and 2, "
        "float32 [3, tokens, 8] on rank 1"
    ),
    "batch_on_a_ring": "float32 [2, tokens, 8] on ranks 0 and 2, float32 [1, tokens, 8] on rank 1",
    "batch_with_global_tokens": "x must be alike on all ranks, got float32 [2, tokens, 8]",
    "dtype": "float32 [2, tokens, 8] on ranks 0 and 2, float64 [2, tokens, 8] on rank 1",
    "dtype_with_as_many_bytes": "float64 [1, tokens, 8] on rank 1",
    "autocast": "autocast must be alike on all ranks, got none on ranks 0 and 2, bfloat16 on",
    "valid": (
        "valid of sources must be alike on all ranks, got None on ranks 0 and 2, bool [tokens] on "
        "rank 1"
    ),
    "valid_on_a_ring": "valid of sources must be alike on all ranks, got None on ranks 0 and 2",
    "layer": (
        "layer must be alike on all ranks, got DotProductAttention on ranks 0 and 2, "
        "LinearAttention on rank 1"
    ),
    "gathered": (
        "tensor to gather must be alike on all ranks, got float32 [2, tokens, 3] on ranks 0 and 2, "
        "float32 [2, tokens, 4] on rank 1"
    ),
}


@pytest.mark.parametrize("scenario", DIFFERENT)
def test_every_rank_says_what_differs_and_where(outcome: Outcome, scenario: str) -> None:
    for rank, got in enumerate(outcome(scenario)):
        assert DIFFERENT[scenario] in got.get("message", ""), got
        assert got["error"] in (("ValueError",) if rank == 1 else ("ValueError", "RankFailure"))
        assert got["seconds"] < SOON


@pytest.mark.every_case
@pytest.mark.parametrize(
    "scenario", ["goes_on", "one_is_late", "nothing_travels", "only_surprises"]
)
def test_ranks_are_not_kept_from_calls_that_are_alike(
    outcome: Outcome,
    scenario: str,
) -> None:
    assert [got.get("error") for got in outcome(scenario)] == [""] * 3


def test_a_rank_that_is_late_and_differs_is_named(outcome: Outcome) -> None:
    for got in outcome("late_and_expected"):
        assert "float32 [2, tokens, 8] on ranks 0 and 2" in got.get("message", ""), got
        assert "float32 [1, tokens, 8] on rank 1" in got["message"]


def test_a_rank_that_compares_nothing_is_waited_for_no_longer_than_the_limit(
    outcome: Outcome,
) -> None:
    found = outcome("one_compares_nothing")
    assert [got.get("error") for got in found] == [""] * 3
    assert all(got["seconds"] < SOON for got in found)

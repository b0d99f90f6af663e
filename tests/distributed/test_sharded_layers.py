"""Layers over a graph on several ranks compute what one process computes."""

import pytest
import torch
from sharded_cases import (
    DIM,
    GRAPHS,
    bytes_are_those_of_the_plan,
    bytes_of_consensus,
    every_layer_over,
    global_tokens_sent,
    poisoned,
    random_consensus,
    rows_sent_by_a_causal_window,
    trips_of_a_ring,
    two_branches,
)

from graphattn.ops.backends import why_not_native

NO_CODE = why_not_native(torch.zeros(1))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("number", range(len(GRAPHS)), ids=list(GRAPHS))
def test_outputs_and_gradients_equal_those_of_one_process(ranks, size, number):
    counts = ranks.run(every_layer_over, size, name=list(GRAPHS)[number], way=(size + number) % 4)
    assert min(counts) > 4


@pytest.mark.every_case
@pytest.mark.parametrize("graph", ["causal", "window", "two tracks, complete"])
def test_one_rank_may_own_two_runs_that_see_the_same_tokens(ranks, graph):
    assert min(ranks.run(every_layer_over, 1, name=graph, way=2)) > 4


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_branch_sees_the_nearby_edges_over_all_ranks(ranks, size):
    assert ranks.run(two_branches, size) == [5] * size


@pytest.mark.parametrize("way", [4, 5], ids=["runs", "zigzag"])
@pytest.mark.parametrize("graph", ["global tokens", "class token"])
def test_queries_of_global_tokens_are_sent_to_all_ranks(ranks, graph, way):
    assert min(ranks.run(every_layer_over, 4, name=graph, way=way)) > 4
    assert ranks.run(global_tokens_sent, 4, name=graph) == [True] * 4


@pytest.mark.parametrize("exchange", ["rows", "ring"])
@pytest.mark.parametrize("graph", ["window", "edges", "longformer", "causal", "two tracks"])
def test_nothing_that_nobody_sees_leaves_a_rank_or_changes_a_bit(ranks, graph, exchange):
    assert min(ranks.run(poisoned, 3, name=graph, exchange=exchange)) > 4


@pytest.mark.every_case
def test_a_causal_window_of_256_sends_255_rows_over_every_border(ranks):
    by_rank = ranks.run(rows_sent_by_a_causal_window, 4, window=256, num_tokens=2048)
    for rank, sent in enumerate(by_rank):
        to_next, to_previous = [0] * 4, [0] * 4
        if rank < 3:
            to_next[rank + 1] = 255
        if rank > 0:
            to_previous[rank - 1] = 255
        assert sent["rows"] == [to_next, to_previous]  # keys and values, then their gradients
        assert sent["numbers"] == 2 * DIM * (sum(to_next) + sum(to_previous))


@pytest.mark.long
def test_bytes_that_are_sent_are_those_of_the_plan(ranks):
    assert ranks.run(bytes_are_those_of_the_plan, 3) == [len(GRAPHS)] * 3


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_many_random_steps_of_consensus_on_a_ring(ranks, size):
    seeds = list(range(1000 * size, 1000 * size + 167))
    assert ranks.run(random_consensus, size, seeds=seeds, limit=3000) == [len(seeds)] * size


def test_consensus_on_a_ring_sends_the_bytes_of_its_plan(ranks):
    assert ranks.run(bytes_of_consensus, 3) == [10] * 3


@pytest.mark.skipif(NO_CODE is not None, reason=f"there is no compiled code: {NO_CODE}")
@pytest.mark.every_case
def test_a_call_on_a_ring_enters_few_files(ranks):
    """The most files that a second call and its backward pass enter, and the most returns."""
    most = (24, 48), (27, 76)  # one rank computes two blocks, and merges them
    for trips in ranks.run(trips_of_a_ring, 2):
        for (files, returns), (most_files, most_returns) in zip(trips, most, strict=True):
            assert files <= most_files
            assert returns <= most_returns

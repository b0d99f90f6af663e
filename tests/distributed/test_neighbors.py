"""Graphs of neighbours that are found over all ranks are those of one process."""

import pytest
from neighbor_cases import neighbours_equal_those_of_one_process, refusals, search_is_counted

FEW = 8


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.every_case
def test_edges_outputs_and_gradients_equal_those_of_one_process(ranks, size):
    seeds = list(range(100 * size, 100 * size + FEW))
    assert ranks.run(neighbours_equal_those_of_one_process, size, seeds=seeds) == [FEW] * size


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_many_random_cases(ranks, size):
    seeds = list(range(1000 * size, 1000 * size + 167))
    counts = ranks.run(neighbours_equal_those_of_one_process, size, seeds=seeds, limit=3000)
    assert counts == [len(seeds)] * size


def test_the_search_sends_the_bytes_of_its_plan(ranks):
    assert ranks.run(search_is_counted, 3) == [True] * 3


def test_errors_name_the_argument_on_every_rank(ranks):
    texts = (
        "k must be <= 11",
        "search must be equal on all ranks",
        "x must have the 4 tokens of rank 0 of 3",
        "radius must be",
        "source must be coordinates of the",
        "batch must be None with shard",
        "shard must be a ShardedGraph, got TokenGraph",
        "of must be 'targets' or 'sources' for a graph of neighbours",
        "counts rows and does not list them",
    )
    for messages in ranks.run(refusals, 3):
        for text, message in zip(texts, messages, strict=True):
            assert text in message

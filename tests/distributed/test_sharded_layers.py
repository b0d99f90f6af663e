"""Layers over a graph on several ranks compute what one process computes."""

import pytest
from sharded_cases import GRAPHS, every_layer_over


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("number", range(len(GRAPHS)), ids=list(GRAPHS))
def test_outputs_and_gradients_equal_those_of_one_process(ranks, size, number):
    counts = ranks.run(every_layer_over, size, name=list(GRAPHS)[number], way=size + number)
    assert min(counts) > 4

"""Targets that see no other rank are computed while rows and their gradients travel."""

import overlap_cases as cases
import pytest
from ranks import Ranks
from sharded_cases import DIM


def test_results_and_bytes_are_those_without_an_overlap(ranks: Ranks) -> None:
    by_rank = ranks.run(cases.quick, 3)
    for rank, found in enumerate(by_rank):
        assert found["equal"] > 20
        assert min(found["poisoned"]) > 4
        assert found["overlaps"] > 10
        assert found["second"] < 1e-12
        assert found["checkpoints"] == [True, True]
        to_next, to_previous = [0] * 3, [0] * 3
        if rank < 2:
            to_next[rank + 1] = 15
        if rank > 0:
            to_previous[rank - 1] = 15
        sent = found["sent"]
        assert sent["rows"] == [to_next, to_previous]  # keys and values, then their gradients
        assert sent["numbers"] == 2 * DIM * (sum(to_next) + sum(to_previous))
        forward, backward = found["order"]
        assert forward == ["send", "compute inside", "wait", "compute outside"]
        assert backward == ["gradients of outside", "send", "gradients of inside", "wait"]
        first, second = ["compute", "compute", "send back"], ["compute", "add", "send back", "add"]
        assert found["ring"] == first + second


@pytest.mark.long
def test_a_layer_takes_as_long_as_the_slower_of_both(ranks: Ranks) -> None:
    """Transfers are delayed without work for a processor: gloo would take that from the layer."""
    for times in ranks.run(cases.times_on_a_slow_network, 2):
        # Projections and the targets at borders, an eighth of the work, are not computed meanwhile.
        for share, most in ((0.7, 1.1), (1.5, 1.2)):
            assert times["meanwhile", share].of_slower < most, times
            assert times["after", share].of_slower > 1.5, times  # what it would show otherwise

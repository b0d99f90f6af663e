import pytest
import unusual_inputs as cases
from ranks import Ranks


def test_a_token_may_move_and_yet_not_be_seen(ranks: Ranks) -> None:
    assert ranks.run(cases.masks_that_differ, 3) == [81] * 3


def test_ranks_divide_tokens_alike_if_only_one_of_them_keeps_an_earlier_graph(ranks: Ranks) -> None:
    by_rank = ranks.run(cases.graph_kept_by_one_rank, 3)
    assert by_rank == [[True, False]] * 3


def test_a_bias_is_not_taken_for_a_table(ranks: Ranks) -> None:
    by_rank = ranks.run(cases.bias_as_long_as_a_table, 3)
    for differ, ambiguous, short in by_rank:
        assert "edge_bias must be equal on all ranks, got a table per offset (for one" in differ
        assert "on rank 0, values per edge on ranks 1 and 2" in differ
        assert "edge_bias with 3 rows is ambiguous: rank" in ambiguous
        assert "edge_bias must have shape [" in short  # of rank 1; the others are told


def test_a_learned_table_of_biases_gets_its_gradient_once(ranks: Ranks) -> None:
    assert ranks.run(cases.learned_tables, 3) == [6] * 3


def test_the_first_use_may_be_in_inference_mode(ranks: Ranks) -> None:
    counts = ranks.run(cases.inference_first, 3)
    assert min(counts) > 50


@pytest.mark.parametrize("exchange", ["rows", "ring"])
def test_second_derivatives_are_right_or_refused(ranks: Ranks, exchange: str) -> None:
    for messages in ranks.run(cases.second_derivatives, 3, exchange=exchange):
        if exchange == "rows":
            assert messages == ["right"] * 5
        else:  # states of linear attention can be differentiated, rows on a ring cannot
            assert messages[0] == "right"
            assert all("no second derivative" in text for text in messages[1:])


def test_own_mix_and_fused_run_or_are_refused(ranks: Ranks) -> None:
    for mixed, fused in ranks.run(cases.own_mix_or_fused, 3):
        assert "_Mixed has its own mix()" in mixed
        assert "_Fused has its own fused()" in fused


def test_vmap_is_refused(ranks: Ranks) -> None:
    for text in ranks.run(cases.inside_vmap, 3):
        assert text.startswith("torch.vmap cannot be used")

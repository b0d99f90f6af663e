"""Generation after a prompt that ranks divide: the texts of one process."""

import generation_cases as cases
import pytest


@pytest.mark.parametrize("size", [2, 3, 4])
def test_texts_after_a_divided_prompt_are_those_of_one_process(ranks, size):
    counts = ranks.run(cases.texts_are_those_of_one_process, size, cases=len(cases.MODELS))
    assert counts == [17 * len(cases.MODELS)] * size


@pytest.mark.nightly
@pytest.mark.parametrize("size", [2, 3, 4])
def test_many_texts_after_a_divided_prompt_are_those_of_one_process(ranks, size):
    given = {"cases": 14 * len(cases.MODELS), "seed": size}
    assert ranks.run(cases.texts_are_those_of_one_process, size, limit=3000, **given)


def test_every_rank_stores_its_part_of_the_tokens(ranks):
    for size in (2, 4):
        for whole, first, far in ranks.run(cases.every_rank_stores_its_part, size):
            assert whole == 400
            assert 400 // size <= first <= 400 // size + 1
            assert far[-1] == (400 + 8) // size  # new tokens go to all ranks in turn


def test_equal_logits_of_several_ranks_select_the_earlier_token(ranks):
    ranks.run(cases.equal_logits_select_the_earlier_token, 3)


def test_layers_whose_results_cannot_be_merged_are_refused(ranks):
    ranks.run(cases.what_cannot_be_merged_is_refused, 2)

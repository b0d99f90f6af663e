"""Training over sequences that ranks divide: every objective has the loss of one process."""

import divided_cases
import pytest

import graphattn as ga
from graphattn.train.runs.divided import Divided


@pytest.mark.parametrize("size", [2, 3, 4])
def test_objectives_over_divided_sequences_are_those_of_one_process(ranks, size):
    assert (
        ranks.run(divided_cases.objectives_are_the_same, size) == [list(divided_cases.CASES)] * size
    )


def test_a_rank_guesses_at_its_own_tokens_only(ranks):
    counts = ranks.run(divided_cases.no_rank_has_the_logits_of_all_tokens, 4)
    assert all(logits == truth <= 11 for logits, truth in counts)
    assert sum(logits for logits, _ in counts) == 40


def test_masks_that_differ_between_ranks_are_an_error(ranks):
    ranks.run(divided_cases.other_masks_on_other_ranks_are_an_error, 3)


def test_models_whose_tokens_are_not_divided_are_refused():
    image = ga.models.VisionTransformer.from_preset("digits")
    with pytest.raises(ValueError, match="context_parallel must be 1 for a model that is not"):
        Divided(image, None)
    protein = ga.models.ProteinModel(8, depth=1, heads=2, context={"chain": "sequence"})
    with pytest.raises(ValueError, match="context_parallel must be 1 for a model with tracks"):
        Divided(protein, None)

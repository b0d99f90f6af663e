"""Sharded layers under checkpointing, torch.compile, autocast, dropout; and what is refused."""

import re

import pytest
import torch
from combinations import (
    a_score_with_a_foreign_parameter,
    checkpointed,
    compiled,
    compiled_by_inductor,
    compiled_once_for_all_layers,
    compiled_rings,
    dropped,
    half_precision,
    refusals,
)


@pytest.mark.every_case
def test_checkpointing_changes_no_bit(ranks):
    assert ranks.run(checkpointed, 3) == [20] * 3


@pytest.mark.nightly
def test_two_compilations_serve_all_lengths(ranks):
    """Rings are one operator of a compiled function."""
    for name, counts in ranks.run(compiled, 2, limit=1200)[0]:
        assert counts == [1, 2, 2], name


@pytest.mark.long
def test_a_compiled_ring_gives_what_a_plain_one_gives(ranks):
    assert ranks.run(compiled_rings, 3) == [4] * 3


@pytest.mark.long
def test_a_ring_is_compiled_once_for_all_layers_of_a_kind(ranks):
    assert ranks.run(compiled_once_for_all_layers, 2) == [1] * 2


@pytest.mark.slow
def test_inductor_gives_the_same(ranks):
    assert ranks.run(compiled_by_inductor, 2, limit=600) == [8] * 2


def test_half_precision_is_that_of_one_process(ranks):
    assert ranks.run(half_precision, 2) == [8] * 2


def test_ranks_drop_different_edges_and_keep_the_mean(ranks):
    by_rank = ranks.run(dropped, 2)
    for first, second in zip(*by_rank, strict=True):
        assert not torch.equal(first, second)
        mean = float(torch.cat([first, second]).mean())
        whole = 0.1 + 1.6 * (0.1 + 1.6)  # without dropout: output bias, and 16 equal values
        assert abs(mean - whole) < 0.1 * whole


def test_errors_name_the_argument_on_every_rank(ranks):
    texts = (
        r"x must have the 8 tokens of rank \d of 3",
        "return_attention_weights must be False",
        "edge_bias must be a table per offset",
        "top_k = 2 cannot be used",
        "graph must have at least 3 targets",
        "graph must be a TokenGraph",
        "group must be a DeviceMesh",
        "order must be one of",
        r"tensors\[0\] must have 24 targets",
        r"tensors\[0\] must have 24 targets in dimension -1, got shape \[\]",
        "tensor must have 8 targets",
        "tensor must have 8 targets in dimension 2",
        "cannot be copied or pickled",
    )
    for messages in ranks.run(refusals, 3):
        for text, message in zip(texts, messages, strict=True):
            assert re.search(text, message), message


def test_no_gradient_is_lost_on_a_ring(ranks):
    for rows, *on_ring in ranks.run(a_score_with_a_foreign_parameter, 2):
        assert rows == "no error"
        for ring in on_ring:
            assert "score must depend on parameters of its layer only" in ring

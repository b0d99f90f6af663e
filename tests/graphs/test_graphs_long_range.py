"""Longformer and BigBird: windows, global tokens, and honest randomness."""

from collections import Counter

import pytest
import scipy.stats
import torch
from masked_attention import check_attention

import graphattn as ga
from graphattn.graphs.pattern import pattern_of

SIZES = [1, 2, 3, 6, 11]


def some_global_tokens(num_tokens: int) -> list[list[int]]:
    """No global token, the first, the last, several, all."""
    every = list(range(num_tokens))
    return [[], every[:1], every[-1:], every[::3], every[1:4], every]


@pytest.mark.parametrize("num_tokens", SIZES)
@pytest.mark.parametrize("dilation", [1, 2, 4])
def test_longformer_is_a_window_and_tokens_that_see_and_are_seen_by_all(
    num_tokens, dilation, check_graph, mask_of
):
    for window in (1, 2, num_tokens + 2):
        hops = {h * dilation for h in range(window + 1)}
        for tokens in some_global_tokens(num_tokens):

            def sees(i, j, hops=hops, tokens=tokens):
                return abs(i - j) in hops or i in tokens or j in tokens

            check_graph(
                ga.longformer_graph(num_tokens, window, tokens, dilation=dilation),
                mask_of(sees, num_tokens),
            )


@pytest.mark.parametrize("num_tokens", [0, *SIZES])
def test_causal_longformer_is_a_window_and_the_first_tokens_and_never_the_future(
    num_tokens, check_graph, mask_of
):
    for window in (1, 2, 3, num_tokens + 2):
        for num_global in range(num_tokens + 1):

            def sees(i, j, window=window, num_global=num_global):
                return j <= i and (i - j < window or j < num_global)

            graph = ga.causal_longformer_graph(num_tokens, window, num_global)
            assert graph.is_causal
            check_graph(graph, mask_of(sees, num_tokens))


def test_causal_longformer_is_longformer_and_a_causal_window_where_these_agree():
    both_ways = ga.longformer_graph(30, 4, range(3)).to_mask()
    expected = ga.from_mask(both_ways & torch.ones(30, 30, dtype=torch.bool).tril())
    assert ga.causal_longformer_graph(30, 5, 3) == expected
    assert ga.causal_longformer_graph(30, 5, 0) == ga.causal_window_graph(30, 5)
    assert ga.causal_longformer_graph(30, 5, 30) == ga.causal_graph(30)


def test_a_long_causal_longformer_is_stored_in_closed_form():
    N, window, num_global = 10_000, 64, 3
    graph = ga.causal_longformer_graph(N, window, num_global)
    assert graph.structure is not None
    in_windows = sum(min(i + 1, window) for i in range(N))
    assert graph.num_edges == in_windows + sum(N - j - window for j in range(num_global))
    assert pattern_of(graph) == "first 3 tokens + causal window 64"


@pytest.mark.parametrize(("window", "num_global"), [(1, 1), (3, 2), (2, 9), (60, 4)])
def test_attention_over_a_causal_longformer_is_that_of_its_mask(window, num_global):
    check_attention(ga.causal_longformer_graph(40, window, num_global))


def test_longformer_without_tokens_is_empty(check_graph):
    check_graph(ga.longformer_graph(0, 2, []), [])
    check_graph(ga.bigbird_graph(0, 2, 3, [], seed=0), [])


def test_global_tokens_are_a_set_of_integers_however_they_come():
    expected = ga.longformer_graph(9, 1, [0, 4])
    for tokens in ([4, 0, 4], (0, 4), {4, 0}, range(0, 8, 4), torch.tensor([4, 0]), iter([0, 4])):
        assert ga.longformer_graph(9, 1, tokens) == expected


def test_longformer_without_global_tokens_is_a_window():
    assert ga.longformer_graph(9, 2, []) == ga.window_path_graph(9, 2, self_loops=True)
    assert ga.longformer_graph(9, 2, [], dilation=3) == ga.dilated_window_graph(9, 2, 3)


def test_bigbird_without_random_sources_is_longformer():
    assert ga.bigbird_graph(12, 2, 0, [0, 7], seed=3) == ga.longformer_graph(12, 2, [0, 7])


@pytest.mark.parametrize("num_tokens", SIZES)
@pytest.mark.parametrize("num_random", [1, 2, 12])
def test_bigbird_adds_exactly_num_random_new_sources_to_every_row_or_all_that_are_left(
    num_tokens, num_random, check_graph
):
    for window in (1, 2):
        for tokens in some_global_tokens(num_tokens):
            graph = ga.bigbird_graph(num_tokens, window, num_random, tokens, seed=5)
            drawn = ga.bigbird_graph(num_tokens, window, num_random, tokens, seed=5).to_mask()
            for i in range(num_tokens):
                seen = {
                    j
                    for j in range(num_tokens)
                    if abs(i - j) <= window or i in tokens or j in tokens
                }
                row = set(drawn[i].nonzero().flatten().tolist())
                assert seen <= row
                assert len(row - seen) == min(num_random, num_tokens - len(seen))
            check_graph(graph, drawn.tolist())


def test_bigbird_depends_on_the_seed_alone():
    def build(seed):
        return ga.bigbird_graph(60, 2, 3, [0, 9], seed)

    first = build(7).edge_index
    torch.manual_seed(123)
    torch.rand(5)
    assert torch.equal(build(7).edge_index, first)
    graphs = [build(seed) for seed in range(20)]
    assert all(a != b for k, a in enumerate(graphs) for b in graphs[:k])


def test_bigbird_leaves_the_global_random_numbers_alone():
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    assert ga.bigbird_graph(60, 2, 3, [0], seed=1).edge_index.shape[0] == 2
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.long
def test_bigbird_draws_every_set_of_sources_equally_often():
    # 9 tokens, window 1: the inner token 4 has 6 sources left, so 20 sets of three.
    draws = 1000
    sets = Counter()
    for seed in range(draws):
        source = ga.bigbird_graph(9, 1, 3, [], seed).to_mask()[4].nonzero().flatten().tolist()
        sets[frozenset(source) - {3, 4, 5}] += 1
    assert len(sets) == 20
    assert scipy.stats.chisquare(list(sets.values())).pvalue > 1e-6


@pytest.mark.long
def test_bigbird_rows_draw_independently_of_each_other():
    # Tokens 0 and 1 of 12, window 1: how often both draw token 9, against chance.
    draws, both = 1000, 0
    for seed in range(draws):
        mask = ga.bigbird_graph(12, 1, 3, [], seed).to_mask()
        both += bool(mask[0, 9] and mask[1, 9])
    chance = 3 / 10 * 3 / 9
    assert scipy.stats.binomtest(both, draws, chance).pvalue > 1e-6

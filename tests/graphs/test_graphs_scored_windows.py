"""The best sources of a window, by scores, against loops in plain Python."""

import re

import pytest
import torch
from masked_attention import check_attention

import graphattn as ga


def random_scores(*shape: int, seed: int = 0) -> torch.Tensor:
    """Few different numbers, so that there are ties, and some -inf."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-1, 4, shape, generator=generator).double()
    return scores.masked_fill(scores < 0, -torch.inf)


def best(scores: list[list[float]], k: int, causal: bool) -> list[list[int]]:
    """The sources of every target, the best first."""
    N, w = len(scores), len(scores[0]) // 2 if scores else 0
    seen = []
    for i in range(N):
        sources = [j for j in range(max(0, i - w), min(N, i + w + 1)) if not (causal and j > i)]
        sources = [j for j in sources if scores[i][j - i + w] > -torch.inf]
        seen.append(sorted(sources, key=lambda j: (-scores[i][j - i + w], j))[:k])
    return seen


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 5, 20])
def test_a_token_sees_the_best_sources_of_its_window(num_tokens, causal, check_graph, mask_of):
    for w in (0, 1, 3, 30):
        scores = random_scores(num_tokens, 2 * w + 1, seed=w)
        for k in (1, 2, 2 * w + 1, 100):
            graph, kept = ga.scored_window_graph(scores, k, causal=causal, return_scores=True)
            seen = best(scores.tolist(), k, causal)
            check_graph(graph, mask_of(lambda i, j, seen=seen: j in seen[i], num_tokens))
            assert graph.is_causal == causal
            assert graph == ga.scored_window_graph(scores, k, causal=causal)
            source, target = graph.edge_index
            assert torch.equal(kept, scores[target, source - target + w])


def test_several_sequences_are_packed():
    scores = random_scores(2, 3, 8, 5)
    graph, kept = ga.scored_window_graph(scores, 2, return_scores=True)
    alone = [ga.scored_window_graph(each, 2, return_scores=True) for each in scores.flatten(0, 1)]
    assert graph == ga.batch([each for each, _ in alone])
    assert graph.sizes == ((8, 8),) * 6
    assert torch.equal(kept, torch.cat([each for _, each in alone]))
    one = ga.scored_window_graph(scores[0, :1], 2)
    assert one.sizes == ((8, 8),)
    assert one == alone[0][0]


def test_what_does_not_exist_may_have_any_score():
    scores = torch.zeros(3, 3)
    scores[0, 0] = scores[2, 2] = torch.nan
    assert ga.scored_window_graph(scores, 3) == ga.window_path_graph(3, 1, self_loops=True)
    scores[:, 2] = torch.nan
    causal = ga.scored_window_graph(scores, 2, causal=True)
    assert causal == ga.causal_window_graph(3, 2)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_over_the_best_is_that_of_their_mask(causal):
    check_attention(ga.scored_window_graph(random_scores(40, 9), 3, causal=causal))


def test_gradients_reach_the_scores_of_edges_through_both_kinds_of_layers():
    torch.manual_seed(0)
    x = torch.randn(12, 8, dtype=torch.float64)
    attention = ga.nn.DotProductAttention(8, heads=2).double()
    consensus = ga.nn.SelfConsensus(8, heads=2, edge_hidden=4, edge_features=1).double()

    def loss(scores: torch.Tensor) -> torch.Tensor:
        graph, kept = ga.scored_window_graph(scores, 3, return_scores=True)
        y = attention(x, graph, edge_bias=kept[:, None].expand(-1, 2))
        return (y + consensus(y, graph, edge_features=kept[:, None])).square().sum()

    scores = torch.randn(12, 5, dtype=torch.float64, requires_grad=True)
    loss(scores).backward()
    is_kept = torch.zeros_like(scores, dtype=torch.bool)
    source, target = ga.scored_window_graph(scores, 3).edge_index
    is_kept[target, source - target + 2] = True
    assert scores.grad is not None
    assert (scores.grad[is_kept] != 0).all()
    assert (scores.grad[~is_kept] == 0).all()
    torch.autograd.gradcheck(loss, (scores,))


@pytest.mark.parametrize(
    ("scores", "k", "words"),
    [
        ([[0.0]], 1, "scores must be a tensor, got list"),
        (torch.zeros(5), 1, "scores must have shape [*, N, 2 w + 1]"),
        (torch.zeros(5, 4), 1, "an odd number of columns"),
        (torch.zeros(5, 3).long(), 1, "scores must be floating-point, got torch.int64"),
        (torch.zeros(5, 3).fill_(torch.nan), 1, "got scores[0, 1] = nan"),
        (torch.zeros(5, 3), 0, "k must be"),
    ],
)
def test_bad_input_is_named(scores, k, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        ga.scored_window_graph(scores, k)

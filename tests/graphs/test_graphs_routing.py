"""Routing attention: tokens of the same k-means cluster, against loops in plain Python."""

import math
import re

import pytest
import torch
from masked_attention import check_attention, inputs_of

import graphattn as ga


def features(num_tokens: int, C: int = 3, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, C, generator=generator, dtype=torch.float64)


def nearest(token: list[float], centroids: list[list[float]]) -> int:
    """The nearest centroid; the first of several."""
    distances = [
        sum((a - b) ** 2 for a, b in zip(token, centroid, strict=True)) for centroid in centroids
    ]
    return distances.index(min(distances))


def k_means(tokens: list[list[float]], k: int) -> list[list[float]]:
    """Farthest tokens first, then ten iterations of Lloyd's algorithm."""
    centroids = tokens[:1]
    while len(centroids) < min(k, len(tokens)):
        gaps = [min(math.dist(t, c) ** 2 for c in centroids) for t in tokens]
        centroids = [*centroids, tokens[gaps.index(max(gaps))]]
    for _ in range(10):
        which = [nearest(token, centroids) for token in tokens]
        for c in range(len(centroids)):
            members = [t for t, own in zip(tokens, which, strict=True) if own == c]
            if members:
                centroids[c] = [sum(column) / len(members) for column in zip(*members, strict=True)]
    return centroids


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 7, 20])
def test_a_token_sees_the_tokens_with_the_same_nearest_centroid(
    num_tokens, causal, check_graph, mask_of
):
    x = features(num_tokens)
    for k in (1, 2, 5, 30):
        for clusters in (k, features(k, seed=1)):
            tokens = x.tolist()
            found = k_means(tokens, k) if clusters is k else clusters.tolist()
            which = [nearest(token, found) for token in tokens]

            def sees(i, j, which=which):
                return which[i] == which[j] and (j <= i or not causal)

            graph = ga.routing_graph(x, clusters, causal=causal)
            assert graph.is_causal == causal
            check_graph(graph, mask_of(sees, num_tokens))


def test_ties_go_to_the_centroid_with_the_smaller_index():
    x = torch.tensor([[-1.0], [0.0], [1.0]])
    for centroids, alone in (([[-1.0], [1.0]], 2), ([[1.0], [-1.0]], 0)):
        mask = ga.routing_graph(x, torch.tensor(centroids)).to_mask()
        assert mask[alone].sum() == 1
    assert ga.routing_graph(x, torch.zeros(2, 1)) == ga.complete_graph(3)
    assert ga.routing_graph(torch.ones(5, 2), 3) == ga.complete_graph(5)


def test_clusters_that_are_far_apart_are_found_and_always_the_same():
    which = torch.randint(8, (500,), generator=torch.Generator().manual_seed(2))
    x = 100 * features(8, 16)[which] + features(500, 16, seed=3)
    graph = ga.routing_graph(x, 8)
    assert graph == ga.from_mask(which[:, None] == which)
    state = torch.random.get_rng_state()
    assert torch.equal(ga.routing_graph(x.clone(), 8).edge_index, graph.edge_index)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_causal_token_does_not_see_what_comes_after_it():
    x, centroids = features(30), features(4, seed=1)
    graph = ga.routing_graph(x, centroids, causal=True)
    assert graph == ga.from_mask(ga.routing_graph(x, centroids).to_mask().tril())
    changed = torch.cat([x[:20], -x[20:]])
    mask = ga.routing_graph(changed, centroids, causal=True).to_mask()
    assert torch.equal(mask[:20], graph.to_mask()[:20])


@pytest.mark.parametrize("causal", [False, True])
def test_attention_over_clusters_is_that_of_their_mask(causal):
    check_attention(ga.routing_graph(inputs_of(40)[1].flatten(1), 5, causal=causal))


X = torch.zeros(4, 2)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ga.routing_graph(X[0], 2), "x must be a floating-point tensor"),
        (lambda: ga.routing_graph([[0.0]], 2), "x must be a tensor"),
        (lambda: ga.routing_graph(X / 0, 2), "x must be finite and within"),
        (lambda: ga.routing_graph(X + torch.inf, 2), "got x[0] = [inf, inf]"),
        (lambda: ga.routing_graph(X.double() - 1e160, 2), "x must be finite and within"),
        (lambda: ga.routing_graph(X, X / 0), "clusters must be finite"),
        (lambda: ga.routing_graph(X, X[:0]), "clusters must be a number or centroids [k, 2]"),
        (lambda: ga.routing_graph(X, X[:, :1]), "of shape [4, 1]"),
        (lambda: ga.routing_graph(X, X[0]), "clusters must be a number or centroids"),
        (lambda: ga.routing_graph(X, X.double()), "clusters must have the dtype and device of x"),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        call()

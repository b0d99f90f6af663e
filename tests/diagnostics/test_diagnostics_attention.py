"""Sinks, entropy, diversity and rollout against plain loops over dense matrices."""

import itertools
import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import graphattn as ga
from graphattn import diagnostics

GRAPHS = {
    "complete": lambda: ga.complete_graph(7),
    "causal": lambda: ga.causal_graph(6),
    "window": lambda: ga.causal_window_graph(9, 3),
    "image": lambda: ga.grid_window_graph(3, 4, radius=1, class_token=True),
    "rows without edges": lambda: ga.from_mask(torch.rand(8, 8, generator=seeded(3)) < 0.2),
}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def weights_of(graph, heads=3, *, batch=(), seed=0, top_k=None):
    """Weights of dot-product attention between random tokens, float64."""
    shape = (*batch, graph.num_tokens, heads, 4)
    q, k = (2 * torch.randn(shape, generator=seeded(seed + s), dtype=torch.float64) for s in (0, 1))
    return ga.attention_weights(q, k, graph, top_k=top_k)


def dense(weights, graph):
    """One matrix [N][N] of floats per head."""
    N, H = graph.num_tokens, weights.shape[-1]
    matrices = [[[0.0] * N for _ in range(N)] for _ in range(H)]
    for e, (j, i) in enumerate(graph.edge_index.T.tolist()):
        for h in range(H):
            matrices[h][i][j] = weights[e, h].item()
    return matrices


def mean(numbers):
    numbers = list(numbers)
    return sum(numbers) / len(numbers)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("token", [0, 2])
def test_sink_share_is_the_mean_of_a_column(name, token):
    graph = GRAPHS[name]()
    weights = weights_of(graph)
    expected = [
        mean(row[token] for i, row in enumerate(A) if i != token and sum(row) > 0)
        for A in dense(weights, graph)
    ]
    share = diagnostics.sink_share(weights, graph, token)
    assert share.tolist() == pytest.approx(expected, rel=1e-12)


def test_sink_share_of_the_first_token_leaves_the_first_query_out():
    graph = ga.causal_graph(2)  # token 0 can only look at itself
    assert diagnostics.sink_share(torch.tensor([[1.0], [0.25], [0.75]]), graph).item() == 0.25


def test_in_packed_sequences_everyone_has_a_first_token():
    one, two = ga.causal_graph(4), ga.causal_graph(6)
    parts = [weights_of(one, seed=1), weights_of(two, seed=2)]
    together = diagnostics.sink_share(torch.cat(parts), ga.batch([one, two]))
    apart = [diagnostics.sink_share(w, g) for w, g in zip(parts, (one, two), strict=True)]
    torch.testing.assert_close(together, (3 * apart[0] + 5 * apart[1]) / 8)


def test_the_first_token_of_another_track_is_looked_at_by_all():
    graph = ga.bipartite_complete_graph(2, 3)
    weights = torch.tensor([0.5, 0.25, 0.25, 0.1, 0.2, 0.7])[:, None]
    assert diagnostics.sink_share(weights, graph).item() == pytest.approx(0.3)


@pytest.mark.parametrize("name", GRAPHS)
def test_entropy_is_the_mean_of_every_row(name):
    graph = GRAPHS[name]()
    weights = weights_of(graph, top_k=2)  # some weights are exactly 0
    expected = [
        mean(-sum(a * math.log(a) for a in row if a > 0) for row in A if sum(row) > 0)
        for A in dense(weights, graph)
    ]
    assert diagnostics.attention_entropy(weights, graph).tolist() == pytest.approx(expected)


def test_entropy_of_rows_beside_eps_is_that_of_their_shares():
    graph = ga.complete_graph(5)
    x = torch.randn(5, 2, 4, generator=seeded(), dtype=torch.float64)
    entropy = diagnostics.attention_entropy(ga.attention_weights(x, x, graph, sigma=2.0), graph)
    beside = ga.attention_weights(x, x, graph, sigma=2.0, eps=3.0)
    assert beside.sum() < 6  # of 10 rows
    torch.testing.assert_close(diagnostics.attention_entropy(beside, graph), entropy)


def test_entropy_lies_between_one_token_and_all():
    graph = ga.complete_graph(6)
    certain = torch.eye(6).reshape(-1, 1)
    assert diagnostics.attention_entropy(certain, graph).item() == 0
    uniform = torch.full((36, 1), 1 / 6, dtype=torch.float64)
    assert diagnostics.attention_entropy(uniform, graph).item() == pytest.approx(math.log(6))


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("heads", [2, 3, 6])
def test_diversity_is_the_mean_distance_of_all_pairs_of_heads(name, heads):
    graph = GRAPHS[name]()
    weights = weights_of(graph, heads)
    matrices = dense(weights, graph)
    expected = mean(
        sum(abs(a - b) for a, b in zip(A[i], B[i], strict=True)) / 2
        for A, B in itertools.combinations(matrices, 2)
        for i in range(graph.num_tokens)
        if sum(A[i]) > 0
    )
    assert diagnostics.head_diversity(weights, graph).item() == pytest.approx(expected, rel=1e-12)


def test_diversity_is_0_for_equal_heads_and_1_for_heads_without_a_common_token():
    graph = ga.complete_graph(3)
    w = weights_of(graph, 1)
    assert diagnostics.head_diversity(w.repeat(1, 4), graph).item() == pytest.approx(0, abs=1e-12)
    shifts = [torch.eye(3).roll(s, dims=1).reshape(-1) for s in range(3)]
    assert diagnostics.head_diversity(torch.stack(shifts, -1), graph).item() == pytest.approx(1)


def test_statistics_of_a_batch_are_those_of_its_sequences():
    graph = ga.causal_window_graph(8, 4)
    weights = weights_of(graph, batch=(2, 3))
    for statistic in (
        diagnostics.sink_share,
        diagnostics.attention_entropy,
        diagnostics.head_diversity,
        lambda w, g: diagnostics.rollout([w, w], g, discard=0.5),
    ):
        together = statistic(weights, graph)
        assert together.shape[:2] == (2, 3)
        for b in itertools.product(range(2), range(3)):
            torch.testing.assert_close(together[b], statistic(weights[b], graph))


def test_padding_changes_no_statistic():
    long, short = ga.causal_graph(7), ga.causal_graph(5)
    q = torch.randn(7, 2, 4, generator=seeded())
    padded = ga.attention_weights(q, q, long, valid=torch.arange(7) < 5)
    weights = ga.attention_weights(q[:5], q[:5], short)
    for statistic in (
        diagnostics.sink_share,
        diagnostics.attention_entropy,
        diagnostics.head_diversity,
    ):
        torch.testing.assert_close(statistic(padded, long), statistic(weights, short))
    reach = diagnostics.rollout([padded] * 2, long)
    torch.testing.assert_close(reach[:5, :5], diagnostics.rollout([weights] * 2, short))
    assert torch.equal(reach[5:], torch.eye(7)[5:])


def rollout_by_loops(weights_per_layer, graphs, residual, discard):
    N = graphs[0].num_tokens
    R = [[float(i == j) for j in range(N)] for i in range(N)]
    for weights, graph in zip(weights_per_layer, graphs, strict=True):
        heads = dense(weights, graph)
        sees = graph.to_mask()
        A = [[mean(head[i][j] for head in heads) for j in range(N)] for i in range(N)]
        for i in range(N):
            edges = sorted(A[i][j] for j in range(N) if sees[i, j])
            if edges:
                least = edges[int(round(discard * len(edges), 9))]
                A[i] = [a if a >= least else 0.0 for a in A[i]]
            row = [(1 - residual) * a + residual * (i == j) for j, a in enumerate(A[i])]
            A[i] = [a / sum(row) for a in row] if sum(row) else [float(i == j) for j in range(N)]
        R = [[sum(A[i][k] * R[k][j] for k in range(N)) for j in range(N)] for i in range(N)]
    return torch.tensor(R, dtype=torch.float64)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("residual", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("discard", [0.0, 0.5, 0.9])
def test_rollout_is_the_product_of_the_layers_by_loops(name, residual, discard):
    graph = GRAPHS[name]()
    layers = [weights_of(graph, seed=10 * layer) for layer in range(3)]
    shares = diagnostics.rollout(layers, graph, residual=residual, discard=discard)
    expected = rollout_by_loops(layers, [graph] * 3, residual, discard)
    torch.testing.assert_close(shares, expected, rtol=1e-12, atol=1e-12)


def test_rollout_takes_a_graph_per_layer_and_applies_the_first_layer_first():
    graphs = [ga.causal_window_graph(6, 2), ga.complete_graph(6)]
    layers = [weights_of(graph, seed=s) for s, graph in enumerate(graphs)]
    shares = diagnostics.rollout(layers, graphs)
    torch.testing.assert_close(shares, rollout_by_loops(layers, graphs, 0.5, 0.0))
    other_way = diagnostics.rollout(layers[::-1], graphs[::-1])
    assert not torch.allclose(shares, other_way)


def test_rollout_in_blocks_of_columns_is_the_same(monkeypatch):
    graph = ga.causal_graph(13)
    layers = [weights_of(graph, seed=s) for s in range(3)]
    whole = diagnostics.rollout(layers, graph)
    monkeypatch.setattr(sys.modules["graphattn.diagnostics.attention.rollout"], "BLOCK", 5 * 13)
    torch.testing.assert_close(diagnostics.rollout(layers, graph), whole, rtol=1e-14, atol=0)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    residual=st.floats(0, 1),
    discard=st.floats(0, 0.99),
    layers=st.integers(1, 4),
)
def test_rows_of_the_rollout_are_shares_that_sum_to_1(seed, residual, discard, layers):
    graph = ga.from_mask(torch.rand(9, 9, generator=seeded(seed)) < 0.3)
    weights = [weights_of(graph, seed=seed + layer) for layer in range(layers)]
    reach = diagnostics.rollout(weights, graph, residual=residual, discard=discard)
    assert (reach >= 0).all()
    torch.testing.assert_close(reach.sum(-1), torch.ones(9, dtype=torch.float64))


def test_discard_drops_the_weakest_edges_of_every_row_before_rows_are_normalised():
    graph = ga.complete_graph(10)
    rows = torch.rand(10, 10, generator=seeded(), dtype=torch.float64)
    rows /= rows.sum(-1, keepdim=True)
    for discard, kept in ((0.0, 10), (0.3, 7), (0.5, 5), (0.7, 3), (0.9, 1)):
        reach = diagnostics.rollout([rows.view(-1, 1)], graph, residual=0, discard=discard)
        assert ((reach > 0).sum(-1) == kept).all()
        for i in range(10):
            strongest = rows[i].argsort(descending=True)[:kept]
            torch.testing.assert_close(
                reach[i, strongest], rows[i, strongest] / rows[i, strongest].sum()
            )


def test_discard_shifts_a_row_towards_its_own_token():
    """The residual comes after the cut: what is dropped is not given to the other edges alone."""
    graph = ga.complete_graph(2)
    weights = torch.tensor([0.4, 0.6, 0.3, 0.7], dtype=torch.float64)[:, None]
    reach = diagnostics.rollout([weights], graph, residual=0.5, discard=0.5)
    expected = [[0.5 / 0.8, 0.3 / 0.8], [0.0, 1.0]]
    torch.testing.assert_close(reach, torch.tensor(expected, dtype=torch.float64))


def test_discard_cuts_nothing_from_uniform_attention():
    graph = ga.complete_graph(8)
    uniform = torch.full((64, 2), 1 / 8)
    full = diagnostics.rollout([uniform] * 2, graph)
    torch.testing.assert_close(diagnostics.rollout([uniform] * 2, graph, discard=0.9), full)


GRAPH = ga.causal_graph(3)
W = torch.ones(6, 2) / 3


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: diagnostics.sink_share(W, GRAPH.edge_index), "graph must be a TokenGraph"),
        (lambda: diagnostics.sink_share(W[:5], GRAPH), r"weights must have shape \[\*, 6, heads\]"),
        (lambda: diagnostics.sink_share(W.long(), GRAPH), "weights must be a floating-point"),
        (lambda: diagnostics.sink_share(-W, GRAPH), "weights must be finite and >= 0"),
        (lambda: diagnostics.sink_share(W, GRAPH, 3), "token must be < 3, the number of sources"),
        (lambda: diagnostics.sink_share(W, GRAPH, -1), "token must be >= 0"),
        (lambda: diagnostics.attention_entropy(W * torch.nan, GRAPH), "weights must be finite"),
        (lambda: diagnostics.head_diversity(W[:, :1], GRAPH), "at least 2 heads"),
        (lambda: diagnostics.rollout(W, GRAPH), "weights_per_layer must be a sequence"),
        (lambda: diagnostics.rollout([], GRAPH), "at least one layer"),
        (
            lambda: diagnostics.rollout([W], [GRAPH, GRAPH]),
            r"a list of 1 graphs \(one per layer\), got 2",
        ),
        (lambda: diagnostics.rollout([W], GRAPH, residual=1.1), "residual must be in 0 .. 1"),
        (lambda: diagnostics.rollout([W], GRAPH, discard=1), "discard must be >= 0 and < 1, got 1"),
        (
            lambda: diagnostics.rollout([torch.ones(6, 1)], ga.bipartite_complete_graph(2, 3)),
            "got 2 targets and 3 sources",
        ),
        (lambda: diagnostics.rollout([W, W[None]], GRAPH), "same batch dimensions"),
    ],
)
def test_bad_input_is_named(call, says):
    with pytest.raises(ValueError, match=says):
        call()

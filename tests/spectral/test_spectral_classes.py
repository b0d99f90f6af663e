"""Closed classes against networkx, and the eigenvalue 1 against dense matrices."""

import networkx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import graphattn as ga
from graphattn.spectral import closed_classes, eigenvalue_one_multiplicity


def dense(graph, weight):
    """A [target, source] of one head, float64."""
    A = np.zeros((graph.num_targets, graph.num_targets))
    source, target = graph.edge_index.numpy()
    A[target, source] = weight.double().numpy()
    return A


def numerical_multiplicity(A):
    """N - rank(A - I): 1 is a semisimple eigenvalue of a (sub)stochastic matrix."""
    singular = np.linalg.svd(A - np.eye(len(A)), compute_uv=False)
    return int((singular < 1e-10).sum())


def random_stochastic(num_tokens, seed, density):
    """Rows that sum to 1, or have no edge."""
    rng = np.random.default_rng(seed)
    graph = ga.from_mask(torch.from_numpy(rng.random((num_tokens, num_tokens)) < density))
    weight = torch.from_numpy(rng.uniform(0.2, 1, graph.num_edges))
    weight *= torch.from_numpy(rng.random(graph.num_edges) < 0.8)  # zeros are no edges
    total = torch.zeros(num_tokens, dtype=torch.float64).index_add(0, graph.edge_index[1], weight)
    return graph, weight / total.clamp_min(1e-300)[graph.edge_index[1]]


def attracting(graph, weight):
    """networkx's attracting components of the chain, ascending."""
    chain = networkx.DiGraph()
    chain.add_nodes_from(range(graph.num_targets))
    edges = graph.edge_index.T.tolist()
    chain.add_edges_from((i, j) for (j, i), w in zip(edges, weight.tolist(), strict=True) if w > 0)
    return sorted(sorted(tokens) for tokens in networkx.attracting_components(chain))


@pytest.mark.long
@settings(max_examples=100, deadline=None)
@given(num_tokens=st.integers(0, 12), seed=st.integers(0, 2**32 - 1), density=st.floats(0, 0.6))
def test_closed_classes_are_networkx_s_attracting_components(num_tokens, seed, density):
    graph, weight = random_stochastic(num_tokens, seed, density)
    ours = [tokens.tolist() for tokens in closed_classes(graph, weight)]
    assert ours == attracting(graph, weight)
    ours = [tokens.tolist() for tokens in closed_classes(graph)]
    assert ours == attracting(graph, torch.ones(graph.num_edges))


@pytest.mark.long
@settings(max_examples=100, deadline=None)
@given(num_tokens=st.integers(1, 12), seed=st.integers(0, 2**32 - 1), density=st.floats(0.05, 0.6))
def test_multiplicity_is_the_numerical_one_rows_of_zeros_included(num_tokens, seed, density):
    graph, weight = random_stochastic(num_tokens, seed, density)
    expected = numerical_multiplicity(dense(graph, weight))
    assert eigenvalue_one_multiplicity(graph, weight) == expected


def krause_weights(num_groups, size, seed, top_k):
    """RBF attention among groups of tokens that do not see each other."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(2, size + 1, (num_groups,), generator=generator).tolist()
    graph = ga.batch([ga.complete_graph(n) for n in sizes])
    q, moved = torch.randn(2, graph.num_targets, 1, 2, generator=generator, dtype=torch.float64)
    k = q + 0.3 * moved  # tokens look for their like
    return graph, ga.attention_weights(q, k, graph, sigma=1.5, top_k=top_k)[:, 0]


@pytest.mark.parametrize("top_k", [None, 1, 2, 3])
def test_groups_out_of_reach_give_at_least_as_many_ones_and_top_k_can_give_more(top_k):
    more = 0
    for seed in range(50):
        num_groups = 1 + seed % 4
        graph, weight = krause_weights(num_groups, 14, seed, top_k)
        multiplicity = eigenvalue_one_multiplicity(graph, weight)
        assert multiplicity == numerical_multiplicity(dense(graph, weight))
        assert multiplicity == len(closed_classes(graph, weight))
        assert multiplicity >= num_groups
        more += multiplicity > num_groups
    assert (more == 0) if top_k is None else (more > 0)


def test_every_causal_graph_has_one_closed_class_the_first_token():
    for graph in (ga.causal_graph(7), ga.causal_window_graph(7, 3)):
        assert [tokens.tolist() for tokens in closed_classes(graph)] == [[0]]
    batch = ga.batch([ga.causal_graph(3), ga.causal_graph(2)])
    assert [tokens.tolist() for tokens in closed_classes(batch)] == [[0], [3]]


def test_a_token_without_edges_keeps_itself_and_its_row_of_zeros_adds_no_eigenvalue():
    graph = ga.from_edge_index(torch.tensor([[1, 0], [0, 1]]), 3)
    assert [tokens.tolist() for tokens in closed_classes(graph)] == [[0, 1], [2]]
    assert eigenvalue_one_multiplicity(graph, torch.ones(2)) == 1
    leads_there = ga.from_edge_index(torch.tensor([[2], [0]]), 3)
    assert [tokens.tolist() for tokens in closed_classes(leads_there)] == [[1], [2]]
    assert eigenvalue_one_multiplicity(leads_there, torch.ones(1)) == 0
    loop = ga.from_edge_index(torch.tensor([[2], [2]]), 3)
    assert eigenvalue_one_multiplicity(loop, torch.ones(1)) == 1


def test_a_weak_link_is_a_link_and_an_exact_zero_is_none():
    graph = ga.window_path_graph(4, 1, self_loops=True)
    for crossing, expected in ((1e-300, 1), (0.0, 2)):
        weight = torch.zeros(graph.num_edges, dtype=torch.float64)
        source, target = graph.edge_index
        same = (source < 2) == (target < 2)
        weight[same] = 0.5
        weight[~same] = crossing
        assert eigenvalue_one_multiplicity(graph, weight) == expected
        assert len(closed_classes(graph, weight)) == expected


def test_classes_come_in_order_of_their_first_token():
    graph = ga.from_edge_index(torch.tensor([[3, 0, 2, 1, 0], [0, 3, 1, 2, 4]]), 5)
    assert [tokens.tolist() for tokens in closed_classes(graph)] == [[0, 3], [1, 2]]
    assert closed_classes(graph)[0].dtype == torch.int64
    assert closed_classes(ga.complete_graph(0)) == []


def test_attention_weights_in_single_precision_are_row_stochastic_enough():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 500, 2, 16, generator=generator)
    graph = ga.complete_graph(500)
    weights = ga.attention_weights(q, k, graph, top_k=40)
    assert eigenvalue_one_multiplicity(graph, weights[:, 1]) >= 1


def test_rows_that_do_not_sum_to_one_are_refused():
    graph = ga.complete_graph(2)
    weight = torch.tensor([0.5, 0.5, 0.5, 0.49], dtype=torch.float64)
    with pytest.raises(ValueError, match=r"edge_weight must sum to 1 .*, got 0\.99 for target 1"):
        eigenvalue_one_multiplicity(graph, weight)
    assert eigenvalue_one_multiplicity(graph, weight + torch.tensor([0, 0, 0, 0.01 + 5e-7])) == 1
    with pytest.raises(ValueError, match=r"edge_weight must have shape \[4\] .*, got \[4, 2\]"):
        eigenvalue_one_multiplicity(graph, torch.ones(4, 2) / 2)
    with pytest.raises(ValueError, match=r"edge_weight must be a tensor .*, got NoneType"):
        eigenvalue_one_multiplicity(graph, None)
    with pytest.raises(ValueError, match=r"must be finite and >= 0, got edge_weight\[0\] = -1"):
        closed_classes(graph, -torch.ones(4))
    with pytest.raises(ValueError, match="graph must have the same tokens"):
        closed_classes(ga.bipartite_complete_graph(2, 3))

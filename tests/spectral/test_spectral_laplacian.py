"""The Laplacian of the symmetrised weights against networkx and matrices built by hand."""

import numpy as np
import pytest
import torch
from random_graphs import as_dense, random_digraph, weights_by_hand

import graphattn as ga
from graphattn.spectral import energy, laplacian

LAYOUTS = ("scipy", "torch", "dense")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_degrees_minus_symmetrised_weights(layout):
    for seed in range(5):
        graph, edge_weight, _ = random_digraph(9, seed)
        W = weights_by_hand(graph, edge_weight)
        L = as_dense(laplacian(graph, edge_weight, layout=layout), layout)
        np.testing.assert_allclose(L, np.diag(W.sum(axis=1)) - W, rtol=1e-14, atol=1e-14)
        np.testing.assert_array_equal(L, L.T)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_graphs_without_edges_or_tokens_have_a_zero_laplacian(layout):
    for num_tokens in (0, 1, 4):
        graph = ga.from_edge_index(torch.empty((2, 0), dtype=torch.int64), num_tokens)
        L = as_dense(laplacian(graph, layout=layout), layout)
        np.testing.assert_array_equal(L, np.zeros((num_tokens, num_tokens)))


def test_a_one_sided_edge_weighs_half_of_a_mutual_one():
    one_sided = ga.from_edge_index(torch.tensor([[0], [1]]), 2)
    mutual = ga.from_edge_index(torch.tensor([[0, 1], [1, 0]]), 2)
    np.testing.assert_array_equal(2 * laplacian(one_sided).toarray(), laplacian(mutual).toarray())


def test_the_papers_laplacian_is_right_where_in_and_out_degrees_agree():
    ring = ga.from_edge_index(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), 4)
    W = np.roll(np.eye(4), -1, axis=1)
    papers = np.eye(4) - W
    np.testing.assert_array_equal(laplacian(ring).toarray(), (papers + papers.T) / 2)


def test_scipy_layout_stores_no_zeros_and_is_float64():
    graph = ga.window_path_graph(4, 1)
    edge_weight = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 0.0])  # tokens 2 and 3 are isolated
    L = laplacian(graph, edge_weight)
    assert L.format == "csr"
    assert L.dtype == np.float64
    assert L.nnz == 4


def test_tensor_layouts_follow_the_weights_dtype():
    graph = ga.window_path_graph(4, 1)
    for dtype in (torch.float32, torch.float64):
        ones = torch.ones(graph.num_edges, dtype=dtype)
        assert laplacian(graph, ones, layout="dense").dtype == dtype
    assert laplacian(graph, layout="dense").dtype == torch.float32
    assert laplacian(graph, ones.long(), layout="dense").dtype == torch.float32
    sparse = laplacian(graph, ones, layout="torch")
    assert sparse.layout == torch.sparse_coo
    assert sparse.is_coalesced()


@pytest.mark.parametrize("layout", ["torch", "dense"])
def test_tensor_layouts_are_differentiable_in_the_weights(layout):
    graph, edge_weight, _ = random_digraph(4, seed=2)
    u = torch.randn(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def quadratic_form(weight):
        return (u * (laplacian(graph, weight, layout=layout) @ u)).sum()

    assert torch.autograd.gradcheck(quadratic_form, edge_weight.requires_grad_())


@pytest.mark.parametrize(
    ("edge_weight", "message"),
    [
        (torch.tensor([1.0, -0.5]), r"edge_weight must be finite and >= 0, got .*\[1\] = -0.5"),
        (torch.tensor([float("nan"), 1.0]), r"edge_weight .* >= 0, got edge_weight\[0\] = nan"),
        (torch.tensor([float("inf"), 1.0]), r"edge_weight .* >= 0, got edge_weight\[0\] = inf"),
        (torch.ones(3), r"edge_weight must have shape \[2\] .*, got \[3\]"),
        (torch.ones(2, 1), r"edge_weight must have shape \[2\] .*, got \[2, 1\]"),
        (torch.tensor(1.0), r"edge_weight must have shape \[2\] .*, got \[\]"),
        ([1.0, 1.0], r"edge_weight must be a tensor of shape \[2\] .*, got list"),
        (np.ones(2), r"edge_weight must be a tensor of shape \[2\] .*, got ndarray"),
        (torch.ones(2, dtype=torch.complex64), "edge_weight must hold real numbers"),
    ],
)
def test_bad_weights_are_refused_by_every_function(edge_weight, message):
    graph = ga.window_path_graph(2, 1)
    s = ga.spectral
    for function in (s.laplacian, s.fiedler_value, s.max_eigenvalue, s.max_step_size):
        with pytest.raises(ValueError, match=message):
            function(graph, edge_weight)
    with pytest.raises(ValueError, match=message):
        energy(graph, torch.zeros(2), edge_weight)


def test_graphs_of_unknown_or_unequal_sizes_are_refused():
    bipartite = ga.bipartite_complete_graph(num_targets=2, num_sources=3)
    s = ga.spectral
    for function in (s.laplacian, s.fiedler_value, s.max_eigenvalue, s.max_step_size):
        with pytest.raises(ValueError, match=r"graph must have the same tokens .* 2 targets and 3"):
            function(bipartite)
        with pytest.raises(ValueError, match="got Tensor: an edge list does not say how many"):
            function(bipartite.edge_index)
        with pytest.raises(ValueError, match="graph must be a TokenGraph, got str"):
            function("path")
    with pytest.raises(ValueError, match="layout must be one of 'scipy', 'torch', 'dense'"):
        laplacian(ga.complete_graph(3), layout="csr")

"""The matrix-weighted Fiedler value and its sandwich against dense eigenvalues (Appendix A)."""

import numpy as np
import pytest
import torch

import graphattn as ga
from graphattn.spectral import fiedler_value, laplacian, matrix_fiedler_bounds, matrix_fiedler_value
from graphattn.spectral.matrix_weighted import matrix_weights


def random_blocks(num_edges, size, seed, *, rank=None):
    generator = torch.Generator().manual_seed(seed)
    shape = (num_edges, size, size if rank is None else rank)
    factor = torch.randn(shape, generator=generator, dtype=torch.float64)
    return factor @ factor.mT / shape[2]


def test_bounds_meet_where_every_edge_weighs_the_same_multiple_of_one():
    for graph in (ga.window_path_graph(9, 2), ga.causal_window_graph(9, 3), ga.causal_graph(5)):
        R = 3 * torch.eye(2, dtype=torch.float64).expand(graph.num_edges, 2, 2)
        lower, upper = matrix_fiedler_bounds(graph, R)
        assert lower == pytest.approx(3 * fiedler_value(graph), rel=1e-12)
        assert upper == pytest.approx(3 * fiedler_value(graph), rel=1e-12)
        assert matrix_fiedler_value(graph, R) == pytest.approx(lower, rel=1e-9)


def test_an_edge_and_its_reverse_count_with_their_mean():
    """R and 0 one way and the other: half of R both ways. Their own extremes would be 0 and 4."""
    graph = ga.window_path_graph(2, 1)
    R = torch.stack([4 * torch.eye(2), torch.zeros(2, 2)]).double()
    assert matrix_fiedler_bounds(graph, R) == pytest.approx((4.0, 4.0))
    assert matrix_fiedler_value(graph, R) == pytest.approx(4.0)


def test_a_one_sided_edge_counts_half_on_both_sides_of_the_sandwich():
    one_sided = ga.from_edge_index(torch.tensor([[0], [1]]), 2)
    R = torch.diag(torch.tensor([1.0, 5.0])).double()[None]
    assert matrix_fiedler_value(one_sided, R) == pytest.approx(1.0)
    assert matrix_fiedler_bounds(one_sided, R) == pytest.approx((1.0, 5.0))


def test_self_loops_count_nowhere():
    graph = ga.window_path_graph(4, 1, self_loops=True)
    R = torch.eye(2, dtype=torch.float64).repeat(graph.num_edges, 1, 1)
    R[graph.edge_index[0] == graph.edge_index[1]] *= 1000
    assert matrix_fiedler_bounds(graph, R) == pytest.approx((fiedler_value(graph),) * 2)


def test_disconnected_graphs_have_value_and_bounds_zero():
    graph = ga.block_window_graph(6, 3)
    R = random_blocks(graph.num_edges, 2, 0)
    assert matrix_fiedler_value(graph, R) == 0.0
    assert matrix_fiedler_bounds(graph, R) == (0.0, 0.0)
    path = ga.window_path_graph(3, 1)
    R = random_blocks(path.num_edges, 2, 0)
    R[(path.edge_index == 2).any(dim=0)] = 0  # connected, but by matrices of zeros
    assert matrix_fiedler_value(path, R) == 0.0
    assert matrix_fiedler_bounds(path, R)[0] == 0.0
    assert matrix_fiedler_value(ga.complete_graph(1), torch.ones(1, 2, 2)) == 0.0


def test_semidefinite_matrices_can_stop_a_coordinate_on_a_connected_graph():
    """All edges look at the first coordinate alone: the second never mixes."""
    graph = ga.window_path_graph(5, 1)
    R = torch.diag(torch.tensor([1.0, 0.0])).double().expand(graph.num_edges, 2, 2)
    assert matrix_fiedler_value(graph, R) == pytest.approx(0, abs=1e-14)
    assert fiedler_value(graph) > 0.3


LARGE = {
    "banded": (ga.window_path_graph(500, 3), None),
    "one-sided": (ga.causal_window_graph(500, 3), None),
    "factorised": (ga.grid_window_graph(20, 20, 1), 0),
}


@pytest.mark.long
@pytest.mark.parametrize("name", LARGE)
def test_large_problems_agree_with_dense_eigenvalues(name, monkeypatch):
    graph, stored = LARGE[name]
    if stored is not None:
        monkeypatch.setattr(matrix_weights, "STORED", stored)
    monkeypatch.setattr(matrix_weights, "DENSE", 100)
    R = random_blocks(graph.num_edges, 3, 1) + 0.05 * torch.eye(3, dtype=torch.float64)
    expected = np.linalg.eigvalsh(laplacian(graph, R).toarray())[3]
    assert matrix_fiedler_value(graph, R) == pytest.approx(expected, rel=1e-8)


def test_large_problems_with_singular_matrices_are_solved(monkeypatch):
    """Two tokens at the end hold on to the first coordinate alone."""
    monkeypatch.setattr(matrix_weights, "DENSE", 10)
    graph = ga.complete_graph(40, self_loops=False)
    R = torch.eye(2, dtype=torch.float64).repeat(graph.num_edges, 1, 1)
    R[(graph.edge_index >= 38).any(dim=0), 1, 1] = 0
    assert matrix_fiedler_value(graph, R) == pytest.approx(0, abs=1e-9)


def test_rank_one_matrices_of_different_directions_mix_all_coordinates():
    graph = ga.window_path_graph(30, 3)
    R = random_blocks(graph.num_edges, 3, 4, rank=1)
    lower, upper = matrix_fiedler_bounds(graph, R)
    value = matrix_fiedler_value(graph, R)
    assert lower == pytest.approx(0, abs=1e-12)  # one pair's mean of two of them has rank 2
    assert 1e-3 < value < upper

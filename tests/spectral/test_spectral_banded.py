"""The banded way to both ends of a spectrum, against scipy's shift-invert and the elimination."""

import numpy as np
import pytest
import scipy.sparse
import torch
from random_graphs import weighted
from scipy.sparse.linalg import eigsh

import graphattn as ga
from graphattn.spectral import eigenvalues
from graphattn.spectral.laplacians import banded
from graphattn.spectral.laplacians.elimination import elimination_order
from graphattn.spectral.laplacians.laplacian import laplacian_of


def parts(graph, edge_weight=None):
    adjacency, scale = eigenvalues._scaled_adjacency(graph, edge_weight)
    return laplacian_of(adjacency), adjacency, scale


GRAPHS = {
    "path": ga.window_path_graph(3000, 5),
    "thin path": ga.window_path_graph(2000, 1),
    "cycle, every value double": ga.window_cycle_graph(1500, 4),
    "causal": ga.causal_window_graph(1000, 7),
    "grid, four values equal or nearly": ga.grid_window_graph(30, 30, 1),
    "shuffled": ga.from_edge_index(
        torch.randperm(900, generator=torch.Generator().manual_seed(1))[
            ga.window_path_graph(900, 3).edge_index
        ],
        900,
    ),
}


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("is_weighted", [False, True])
def test_the_slowest_mode_is_that_of_shift_invert_lanczos(name, is_weighted):
    graph = GRAPHS[name]
    edge_weight = weighted(graph) if is_weighted else None
    L, adjacency, _ = parts(graph, edge_weight)
    mode = banded.slowest_mode(L, adjacency)
    expected = eigsh(scipy.sparse.csc_matrix(L), k=2, sigma=-1e-9, which="LM")[0].max()
    assert mode.value == pytest.approx(expected, rel=1e-9)
    residual = np.linalg.norm(L @ mode.vector - mode.value * mode.vector)
    assert residual < 1e-4 * mode.value
    assert mode.residual == pytest.approx(residual, rel=0.1)
    assert np.linalg.norm(mode.vector) == pytest.approx(1)
    assert abs(mode.vector.sum()) < 1e-8


def test_values_as_small_as_those_of_millions_of_tokens_are_accepted():
    """Temple's bound is above 1e-11 for any vector in float64 where lambda_1 * lambda_2 = 1e-21.

    Elimination, which takes ten times as long, was the way then.
    """
    graph = ga.window_path_graph(2000, 1)
    source, target = graph.edge_index
    weak = torch.tensor([499, 999, 1499])
    edge_weight = torch.ones(graph.num_edges, dtype=torch.float64)
    edge_weight[torch.isin(torch.minimum(source, target), weak)] = 4e-9
    L, adjacency, _ = parts(graph, edge_weight)
    mode = banded.slowest_mode(L, adjacency, eigenvalues.REFINEMENTS)
    expected, _ = eigenvalues._slowest_pair_by_elimination(adjacency, elimination_order(adjacency))
    assert mode is not None
    assert mode.value == pytest.approx(expected, rel=1e-11)
    assert mode.residual < 1e-15
    # A path of four groups of 500 tokens.
    assert mode.value == pytest.approx(4e-9 / 500 * (2 - 2**0.5), rel=1e-5)


@pytest.mark.nightly
def test_a_million_tokens_take_as_long_per_token_as_fewer():
    mode = ga.spectral.fiedler_pair(ga.window_path_graph(1_000_000, 1))
    assert mode.value == pytest.approx(4 * np.sin(np.pi / 2e6) ** 2, rel=1e-10)


def test_uneven_weights_and_wide_graphs_are_left_to_others():
    path = ga.window_path_graph(500, 2)
    edge_weight = weighted(path)
    source, target = path.edge_index
    edge_weight[(source < 250) != (target < 250)] = 1e-12
    assert banded.slowest_mode(*parts(path, edge_weight)[:2]) is None
    assert 0 < ga.spectral.fiedler_value(path, edge_weight) < 1e-12
    star = ga.from_edge_index(torch.tensor([[0] * 9999, list(range(1, 10_000))]), 10_000)
    L, adjacency, _ = parts(star)
    assert (
        banded.BandedMatrix(L).stored > banded.STORED or banded.slowest_mode(L, adjacency) is None
    )
    assert 2 * ga.spectral.fiedler_value(star) == pytest.approx(1, rel=1e-11)


def test_a_shifted_solver_says_when_the_matrix_is_not_positive_definite():
    L, _, _ = parts(ga.window_path_graph(300, 2))
    largest = np.linalg.eigvalsh(L.toarray())[-1]
    bands = banded.BandedMatrix(scipy.sparse.csr_array(-L))
    assert bands.solver(0.999 * largest) is None
    u = np.random.default_rng(0).standard_normal(300)
    solved = bands.solver(1.001 * largest)(u)
    assert np.allclose(1.001 * largest * solved - L @ solved, u, atol=1e-9)

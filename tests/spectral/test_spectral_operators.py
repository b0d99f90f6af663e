"""Laplacians that are only applied, and normalised ones, against matrices written out by hand."""

import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import as_dense, random_digraph, weights_by_hand

import graphattn as ga
from graphattn.graphs import TokenGraph
from graphattn.spectral import laplacian

LAYOUTS = ("scipy", "torch", "dense", "operator")
NORMALIZATIONS = (None, "symmetric", "random_walk")


def by_hand(graph, edge_weight=None, normalization=None):
    W = weights_by_hand(graph, edge_weight)
    degree = W.sum(axis=1)
    L = np.diag(degree) - W
    with np.errstate(divide="ignore"):
        share = np.where(degree > 0, 1 / degree, 0.0)
    if normalization == "symmetric":
        return np.sqrt(share)[:, None] * L * np.sqrt(share)
    return share[:, None] * L if normalization == "random_walk" else L


STRUCTURED = {
    "path": ga.window_path_graph(11, 3),
    "path of one token": ga.window_path_graph(1, 3),
    "no token": ga.window_path_graph(0, 3),
    "window longer than the path": ga.window_path_graph(5, 9, self_loops=True),
    "causal window": ga.causal_window_graph(12, 4),
    "causal": ga.causal_graph(9),
    "self only": ga.causal_window_graph(5, 1),
    "dilated": ga.dilated_window_graph(13, 2, 3),
    "dilated, beyond the ends": ga.dilated_window_graph(7, 3, 4),
    "cycle": ga.window_cycle_graph(9, 3),
    "complete": ga.complete_graph(6),
    "complete without loops": ga.complete_graph(6, self_loops=False),
    "blocks": ga.block_window_graph(11, 4, shift=2),
    "grid": ga.grid_window_graph(4, 5, 1),
    "wide grid with a class token": ga.grid_window_graph(3, 4, 2, class_token=True),
    "diamond": ga.grid_window_graph(4, 4, 2, metric="manhattan"),
    "batch": ga.batch([ga.causal_graph(3), ga.window_cycle_graph(7, 2), ga.complete_graph(1)]),
}


@pytest.mark.parametrize("name", STRUCTURED)
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_a_structured_operator_is_the_matrix_by_hand_and_lists_no_edge(
    name, normalization, monkeypatch
):
    expected = by_hand(STRUCTURED[name], normalization=normalization)
    fresh = TokenGraph(structure=STRUCTURED[name].structure)
    forbidden = property(lambda self: pytest.fail("edges were listed"))
    monkeypatch.setattr(TokenGraph, "edge_index", forbidden)
    L = laplacian(fresh, layout="operator", normalization=normalization)
    N = fresh.num_targets
    np.testing.assert_allclose(L @ np.eye(N), expected, rtol=1e-14, atol=1e-13)
    np.testing.assert_allclose(L.rmatmat(np.eye(N)), expected.T, rtol=1e-14, atol=1e-13)
    u = np.random.default_rng(0).standard_normal(N)
    np.testing.assert_allclose(L @ u, expected @ u, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(L.rmatvec(u), expected.T @ u, rtol=1e-12, atol=1e-12)


UNSTRUCTURED = {
    "longformer": ga.longformer_graph(15, 2, (0, 7)),
    "bigbird": ga.bigbird_graph(15, 1, 2, (0,), 0),
    "random digraph": ga.from_mask(
        torch.rand(9, 9, generator=torch.Generator().manual_seed(0)) < 0.4
    ),
    "two of four tokens alone": ga.from_edge_index(torch.tensor([[0, 1], [1, 0]]), 4),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("is_weighted", [False, True])
def test_every_layout_and_normalisation_is_the_matrix_by_hand(layout, normalization, is_weighted):
    for graph in (*UNSTRUCTURED.values(), STRUCTURED["path"], STRUCTURED["blocks"]):
        edge_weight = None
        if is_weighted:
            generator = torch.Generator().manual_seed(1)
            edge_weight = torch.rand(graph.num_edges, generator=generator, dtype=torch.float64)
            edge_weight[edge_weight < 0.2] = 0
        L = laplacian(graph, edge_weight, layout=layout, normalization=normalization)
        expected = by_hand(graph, edge_weight, normalization)
        rounding = 1e-13 if is_weighted or layout in ("scipy", "operator") else 1e-6  # float32
        np.testing.assert_allclose(as_dense(L, layout), expected, rtol=rounding, atol=rounding)


@settings(max_examples=30, deadline=None)
@given(num_tokens=st.integers(1, 10), seed=st.integers(0, 2**32 - 1), density=st.floats(0, 1))
def test_normalised_eigenvalues_are_the_same_and_lie_between_0_and_2(num_tokens, seed, density):
    graph, edge_weight, _ = random_digraph(num_tokens, seed, density)
    symmetric = laplacian(graph, edge_weight, normalization="symmetric").toarray()
    walk = laplacian(graph, edge_weight, normalization="random_walk").toarray()
    values = np.linalg.eigvalsh(symmetric)
    assert values[0] >= -1e-12
    assert values[-1] <= 2 + 1e-12
    np.testing.assert_allclose(np.sort(np.linalg.eigvals(walk).real), values, atol=1e-10)
    averages = np.eye(num_tokens) - walk
    assert (averages > -1e-12).all()
    np.testing.assert_allclose(averages.sum(axis=1), 1, atol=1e-12)


@pytest.mark.parametrize("normalization", ["symmetric", "random_walk"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_isolated_token_has_a_zero_row_and_column(normalization, layout):
    graph = ga.from_edge_index(torch.tensor([[0, 1, 2], [1, 0, 2]]), 3)  # 2 sees itself alone
    L = as_dense(laplacian(graph, layout=layout, normalization=normalization), layout)
    np.testing.assert_allclose(L, [[1, -1, 0], [-1, 1, 0], [0, 0, 0]], atol=1e-7)


@pytest.mark.parametrize("normalization", ["symmetric", "random_walk"])
def test_normalised_tensors_are_differentiable_where_a_token_is_isolated(normalization):
    graph = ga.from_edge_index(torch.tensor([[0, 1, 2, 0, 3], [1, 0, 1, 2, 3]]), 4)
    u = torch.randn(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def form(weight):
        L = laplacian(graph, weight, layout="dense", normalization=normalization)
        return (u * (L @ u)).sum()

    weight = torch.tensor([0.3, 0.7, 1.1, 0.2, 5.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(form, weight)


def test_a_million_tokens_are_applied_without_a_matrix():
    """lambda_k = 4 sin^2(pi k / 2N) with the vector cos(pi k (i + 1/2) / N), at window 1."""
    N, k = 1_000_000, 400_000
    graph = ga.window_path_graph(N, 1)
    u = np.cos(math.pi * k * (np.arange(N) + 0.5) / N)
    start = time.perf_counter()
    L = laplacian(graph, layout="operator")
    moved = L @ u
    seconds = time.perf_counter() - start
    assert np.abs(moved - 4 * math.sin(math.pi * k / (2 * N)) ** 2 * u).max() < 1e-8
    assert graph._edge_index is None
    assert seconds < 1  # a hundredth of it, unless the machine is busy; listing edges takes longer


def test_constants_give_exactly_zero_and_complex_vectors_both_parts():
    rng = np.random.default_rng(0)
    for graph in (*STRUCTURED.values(), *UNSTRUCTURED.values()):
        L = laplacian(graph, layout="operator")
        N = graph.num_targets
        assert (L @ np.full(N, 0.1) == 0).all()
        if N:
            u, v = rng.standard_normal((2, N))
            np.testing.assert_array_equal(L @ (u + 1j * v), L @ u + 1j * (L @ v))


# Matrices for weights (Appendix A).


def random_blocks(num_edges, size, seed, *, rank=None):
    generator = torch.Generator().manual_seed(seed)
    shape = (num_edges, size, size if rank is None else rank)
    factor = torch.randn(shape, generator=generator, dtype=torch.float64)
    R = factor @ factor.mT
    return R if rank is not None else R + 0.1 * torch.eye(size, dtype=torch.float64)


def blocks_by_hand(graph, R):
    """The energy's matrix, edge by edge: 1/2 (u_i - u_j)^T R_ij (u_i - u_j)."""
    N, C = graph.num_targets, R.shape[1]
    L = np.zeros((N * C, N * C))
    for (j, i), block in zip(graph.edge_index.T.tolist(), R.numpy(), strict=True):
        pick = np.zeros((C, N * C))
        pick[:, i * C : i * C + C] += np.eye(C)
        pick[:, j * C : j * C + C] -= np.eye(C)
        L += 0.5 * pick.T @ block @ pick
    return L


@pytest.mark.parametrize("layout", LAYOUTS)
def test_matrix_weights_give_the_matrix_of_their_energy(layout):
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        graph = ga.from_mask(torch.rand(6, 6, generator=generator) < 0.5)
        R = random_blocks(graph.num_edges, 3, seed)
        L = as_dense(laplacian(graph, R, layout=layout), layout)
        np.testing.assert_allclose(L, blocks_by_hand(graph, R), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(L, L.T, atol=1e-13)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_of_one_number_are_weights_and_multiples_of_one_are_copies(layout):
    graph = ga.from_mask(torch.rand(7, 7, generator=torch.Generator().manual_seed(5)) < 0.4)
    weight = torch.rand(graph.num_edges, dtype=torch.float64)
    plain = laplacian(graph, weight).toarray()
    single = as_dense(laplacian(graph, weight[:, None, None], layout=layout), layout)
    np.testing.assert_allclose(single, plain, atol=1e-14)
    R = weight[:, None, None] * torch.eye(2, dtype=torch.float64)
    copies = as_dense(laplacian(graph, R, layout=layout), layout)
    np.testing.assert_allclose(copies, np.kron(plain, np.eye(2)), atol=1e-14)


def test_the_matrix_weighted_laplacian_is_differentiable():
    graph = ga.causal_graph(3)
    factor = random_blocks(graph.num_edges, 2, 0).requires_grad_()
    u = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def form(factor):
        return u @ laplacian(graph, factor @ factor.mT, layout="dense") @ u

    assert torch.autograd.gradcheck(form, factor)


def test_kernel_of_matrix_weights_is_one_constant_per_coordinate_not_the_vector_of_eq_24():
    """Erratum to Eq. 24: 1_N (x) e_k is in the kernel, cat(1_d, 0, ..., 0) is not."""
    graph = ga.window_path_graph(5, 2)
    L = laplacian(graph, random_blocks(graph.num_edges, 3, 2)).toarray()
    values = np.linalg.eigvalsh(L)
    assert (np.abs(values[:3]) < 1e-12).all()
    assert values[3] > 0.01  # D zero eigenvalues, and no more, where the graph is connected
    for k in range(3):
        assert np.abs(L @ np.kron(np.ones(5), np.eye(3)[k])).max() < 1e-12
    papers = np.concatenate([np.ones(3), np.zeros(12)])
    assert np.linalg.norm(L @ papers) > 1


@pytest.mark.parametrize(
    ("R", "message"),
    [
        (torch.zeros(1, 2, 2), r"shape \[2, C, C\] .*, got \[1, 2, 2\]"),
        (torch.zeros(2, 2, 3), r"shape \[2, C, C\] .*, got \[2, 2, 3\]"),
        (torch.zeros(2, 0, 0), r"C >= 1\), got \[2, 0, 0\]"),
        (torch.zeros(2, 2, 2, dtype=torch.int64), "real floating-point matrices, got torch.int64"),
        (torch.full((2, 1, 1), float("nan")), r"finite, got edge_weight\[0\]"),
        (torch.tensor([[[1.0, 0.5], [0.0, 1.0]]] * 2), r"symmetric matrices.*\[0\], .* by 0\.5"),
        (
            torch.stack([torch.eye(2), -torch.eye(2)]),
            r"semidefinite .*\[1\], which has the eigenvalue -1",
        ),
    ],
)
def test_bad_matrices_are_refused(R, message):
    graph = ga.window_path_graph(2, 1)
    s = ga.spectral
    for function in (s.laplacian, s.matrix_fiedler_value, s.matrix_fiedler_bounds, s.spectrum):
        with pytest.raises(ValueError, match=message):
            function(graph, R)


def test_unknown_normalisations_are_refused():
    with pytest.raises(ValueError, match="normalization must be one of None, 'symmetric', 'random"):
        laplacian(ga.complete_graph(3), normalization="left")
    R = torch.eye(2).expand(6, 2, 2)
    with pytest.raises(ValueError, match=r"normalization must be None if .* got 'symmetric'"):
        laplacian(ga.complete_graph(3, self_loops=False), R, normalization="symmetric")


def test_single_precision_matrices_of_a_layer_count_as_symmetric_and_semidefinite():
    """alpha I + beta Lambda^T Lambda, rounded as float32 rounds it."""
    generator = torch.Generator().manual_seed(0)
    shear = torch.randn(40, 4, 64, generator=generator)
    R = shear.mT @ shear + 1e-7 * torch.eye(64)
    graph = ga.window_path_graph(21, 1)
    L = laplacian(graph, R, layout="operator")
    assert L.shape == (21 * 64, 21 * 64)

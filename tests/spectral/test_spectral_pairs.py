"""Fiedler pairs and whole spectra against dense solvers and closed forms."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import random_digraph, weighted

import graphattn as ga
from graphattn.spectral import eigenvalues, fiedler_pair, fiedler_value, laplacian, spectrum


def check(graph, edge_weight=None, relative=1e-7):
    """Value, norm, mean, and a residual that is small and that of the matrix."""
    value, vector, residual = fiedler_pair(graph, edge_weight)
    L = laplacian(graph, edge_weight)
    u = vector.numpy()
    assert vector.dtype == torch.float64
    assert np.linalg.norm(u) == pytest.approx(1, rel=1e-12)
    assert abs(u.sum()) < 1e-9
    rounding = 1e-14 * L.diagonal().max()
    assert np.linalg.norm(L @ u - value * u) == pytest.approx(residual, abs=20 * rounding)
    assert residual <= relative * value + rounding
    assert value == pytest.approx(fiedler_value(graph, edge_weight), rel=1e-11)
    return value, u


@settings(max_examples=40, deadline=None)
@given(num_tokens=st.integers(2, 14), seed=st.integers(0, 2**32 - 1), density=st.floats(0.2, 1))
def test_random_digraphs_have_numpys_second_pair(num_tokens, seed, density):
    graph, edge_weight, _ = random_digraph(num_tokens, seed, density)
    L = laplacian(graph, edge_weight).toarray()
    value, vector, residual = fiedler_pair(graph, edge_weight)
    assert value == pytest.approx(np.linalg.eigvalsh(L)[1], abs=1e-12 * max(L.max(), 1))
    assert residual <= 1e-12 * max(L.max(), 1)
    assert np.linalg.norm(L @ vector.numpy() - value * vector.numpy()) <= 1e-11 * max(L.max(), 1)


ROUTES = {
    "dense": (ga.window_path_graph(150, 4), {}),
    "banded": (ga.window_path_graph(3000, 4), {}),
    "elimination": (ga.window_path_graph(900, 4), {"slowest_mode": lambda *_: None}),
    "hubs": (ga.longformer_graph(700, 3, (0, 300)), {}),
    "wide": (ga.bigbird_graph(500, 2, 4, (), 0), {"slowest_mode": lambda *_: None, "WIDE": 0}),
    "wide, factorised": (
        ga.grid_window_graph(30, 20, 1),
        {"slowest_mode": lambda *_: None, "WIDE": 0, "BRIEFLY": (20, 1)},
    ),
}


@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize("is_weighted", [False, True])
def test_every_route_gives_an_eigenpair(name, is_weighted, monkeypatch):
    graph, patches = ROUTES[name]
    for attribute, value in patches.items():
        monkeypatch.setattr(eigenvalues, attribute, value)
    edge_weight = weighted(graph) if is_weighted else None
    value, _ = check(graph, edge_weight, relative=1e-4 if "wide" in name else 1e-7)
    dense = np.linalg.eigvalsh(laplacian(graph, edge_weight).toarray())
    assert value == pytest.approx(dense[1], rel=1e-8)


def test_path_has_the_cosine_for_its_vector():
    for N in (2, 50, 5000):
        pair = fiedler_pair(ga.window_path_graph(N, 1))
        cosine = np.cos(math.pi * (np.arange(N) + 0.5) / N)
        np.testing.assert_allclose(pair.vector, cosine / np.linalg.norm(cosine), atol=1e-7)
        assert pair.value == pytest.approx(4 * math.sin(math.pi / (2 * N)) ** 2, rel=1e-10)


def test_disconnected_graphs_have_value_zero_and_a_vector_constant_on_components():
    for graph in (ga.block_window_graph(10, 4), ga.batch([ga.causal_graph(3)] * 2)):
        value, vector, residual = fiedler_pair(graph)
        assert (value, residual) == (0.0, 0.0)
        moved = laplacian(graph, layout="operator") @ vector.numpy()
        assert (moved == 0).all()
        assert vector.norm().item() == pytest.approx(1)
        assert abs(vector.sum().item()) < 1e-12
        assert vector[0] > 0 > vector[-1]


def test_fewer_than_two_tokens_have_a_vector_of_zeros():
    for N in (0, 1):
        value, vector, residual = fiedler_pair(ga.complete_graph(N))
        assert (value, residual, vector.tolist()) == (0.0, 0.0, [0.0] * N)


def test_scale_of_the_weights_is_the_scale_of_value_and_residual():
    graph = ga.window_path_graph(300, 3)
    edge_weight = weighted(graph)
    once = fiedler_pair(graph, edge_weight)
    scaled = fiedler_pair(graph, 2.0**-600 * edge_weight)
    assert scaled.value == 2.0**-600 * once.value
    assert scaled.residual == 2.0**-600 * once.residual
    assert torch.equal(scaled.vector, once.vector)


# All eigenvalues.


def test_spectra_have_their_closed_forms():
    k = np.arange(12)
    np.testing.assert_allclose(
        spectrum(ga.window_path_graph(12, 1)), 4 * np.sin(math.pi * k / 24) ** 2, atol=1e-13
    )
    ring = sorted(sum(4 * np.sin(math.pi * j * k / 12) ** 2 for j in (1, 2)))
    np.testing.assert_allclose(spectrum(ga.window_cycle_graph(12, 2)), ring, atol=1e-13)
    np.testing.assert_allclose(spectrum(ga.complete_graph(5)), [0, 5, 5, 5, 5], atol=1e-13)
    assert spectrum(ga.complete_graph(0)).tolist() == []


def test_remarks_4_1_and_4_2_hold_for_the_second_number_of_the_spectrum():
    for N, w in ((7, 2), (20, 5), (41, 20), (60, 1)):
        cycle = spectrum(ga.window_cycle_graph(N, w))[1].item()
        assert cycle == pytest.approx(ga.spectral.cycle_fiedler_value(N, w), rel=1e-11)
        path = spectrum(ga.window_path_graph(N, w))[1].item()
        lower, upper = ga.spectral.path_fiedler_bounds(N, w)
        slack = 1e-13 * N * w
        assert lower - slack <= path <= upper + slack
        pair = fiedler_pair(ga.window_path_graph(N, w))
        assert lower - pair.residual <= pair.value <= upper + pair.residual + 1e-14 * N


def test_the_spectrum_has_an_exact_zero_for_every_component():
    graph = ga.block_window_graph(10, 4)
    values = spectrum(graph, weighted(graph))
    assert (values == 0).tolist() == [True] * 3 + [False] * 7
    assert (
        spectrum(ga.from_edge_index(torch.empty((2, 0), dtype=torch.int64), 3)).tolist()
        == [0.0] * 3
    )


def test_the_spectrum_of_matrix_weights_has_c_zeros_per_component():
    graph = ga.block_window_graph(4, 2)
    factor = torch.randn(graph.num_edges, 3, 3, generator=torch.Generator().manual_seed(0))
    values = spectrum(graph, factor @ factor.mT)
    assert values.shape == (12,)
    assert (values == 0).sum() == 6
    assert (values.diff() >= 0).all()


def test_more_than_five_thousand_eigenvalues_are_refused():
    with pytest.raises(
        ValueError, match=r"at most 5000 tokens .*, got 5001: .* use fiedler_value and"
    ):
        spectrum(ga.window_path_graph(5001, 1))
    graph = ga.window_path_graph(1300, 1)
    R = torch.eye(4).expand(graph.num_edges, 4, 4)
    with pytest.raises(ValueError, match=r"at most 1250 tokens .*matrices of 4 rows\), got 1300"):
        spectrum(graph, R)

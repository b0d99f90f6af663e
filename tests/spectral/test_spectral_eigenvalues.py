"""Fiedler values and largest eigenvalues against closed forms, numpy and networkx."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import graphattn as ga
from graphattn.spectral import eigenvalues, fiedler_value, max_eigenvalue, max_step_size


def star_graph(num_tokens):
    """One-sided: the leaves look at token 0, which looks at nobody."""
    leaves = torch.arange(1, num_tokens)
    return ga.from_edge_index(torch.stack([torch.zeros_like(leaves), leaves]), num_tokens)


def path_weights(edge_values):
    """A path of two-sided edges with the given weights, and their edge_weight."""
    graph = ga.window_path_graph(len(edge_values) + 1, window=1)
    return graph, edge_values[graph.edge_index.amin(dim=0)]


def spectrum(graph, edge_weight):
    """All eigenvalues by numpy, of a Laplacian summed up edge by edge."""
    L = np.zeros((graph.num_targets, graph.num_targets))
    source, target = graph.edge_index.numpy()
    half = np.where(source == target, 0.0, edge_weight.numpy() / 2)
    for row, column, value in (
        (source, source, half),
        (target, target, half),
        (source, target, -half),
        (target, source, -half),
    ):
        np.add.at(L, (row, column), value)
    return np.linalg.eigvalsh(L)


# Closed forms.


def test_causal_complete_graph_has_half_of_it():
    """Every edge is one-sided, so every symmetrised weight is one half."""
    for N in (2, 9, 300):
        assert fiedler_value(ga.causal_graph(N)) == pytest.approx(N / 2, rel=1e-11)
        assert max_eigenvalue(ga.causal_graph(N)) == pytest.approx(N / 2, rel=1e-11)


def test_star_has_fiedler_value_one_and_largest_eigenvalue_n():
    for N in (3, 20, 5000):
        assert 2 * fiedler_value(star_graph(N)) == pytest.approx(1, rel=1e-11)
        assert 2 * max_eigenvalue(star_graph(N)) == pytest.approx(N, rel=1e-11)


def test_cycle_has_the_fiedler_value_of_remark_4_1():
    for N in (3, 4, 11, 60, 301):
        for w in range(1, (N + 1) // 2, max(N // 20, 1)):
            assert fiedler_value(ga.window_cycle_graph(N, w)) == pytest.approx(
                ga.spectral.cycle_fiedler_value(N, w), rel=1e-11
            )


def test_path_spectrum_is_that_of_the_cosine_transform():
    for N in (2, 3, 50, 199, 202, 3000):
        graph = ga.window_path_graph(N, 1)
        assert fiedler_value(graph) == pytest.approx(
            4 * math.sin(math.pi / (2 * N)) ** 2, rel=1e-11
        )
        assert max_eigenvalue(graph) == pytest.approx(
            4 * math.cos(math.pi / (2 * N)) ** 2, rel=1e-9
        )


def test_weighted_triangle_keeps_its_digits_across_many_magnitudes():
    """lambda = s +- sqrt(a^2 + b^2 + c^2 - ab - bc - ca), s = a + b + c."""
    triangle = ga.complete_graph(3, self_loops=False)
    sides = {frozenset(p): k for k, p in enumerate(((0, 1), (1, 2), (2, 0)))}
    side = torch.tensor([sides[frozenset(edge)] for edge in triangle.edge_index.T.tolist()])
    for a, b, c in ((1, 2, 3), (1, 1e-30, 1e-60), (1e-9, 1e9, 1), (1e-200, 1e-200, 1), (5, 5, 5)):
        root = math.sqrt(((a - b) ** 2 + (b - c) ** 2 + (c - a) ** 2) / 2)
        largest = a + b + c + root
        smallest = 3 * (a * b + b * c + c * a) / largest
        edge_weight = torch.tensor([a, b, c], dtype=torch.float64)[side]
        assert fiedler_value(triangle, edge_weight) == pytest.approx(smallest, rel=1e-13)
        assert max_eigenvalue(triangle, edge_weight) == pytest.approx(largest, rel=1e-13)


# Disconnected and degenerate graphs.


def test_disconnected_graphs_have_fiedler_value_exactly_zero():
    path, edge_weight = path_weights(torch.tensor([1.0, 0.0, 1.0]))
    assert fiedler_value(path, edge_weight) == 0.0
    assert fiedler_value(ga.block_window_graph(900, 30)) == 0.0
    assert fiedler_value(ga.dilated_window_graph(2000, 3, 2)) == 0.0
    assert fiedler_value(ga.batch([ga.complete_graph(3), ga.window_path_graph(4, 1)])) == 0.0


def test_graphs_without_edges_take_any_step():
    for N in (0, 1, 2, 5, 2000):
        graph = ga.from_edge_index(torch.empty((2, 0), dtype=torch.int64), N)
        assert fiedler_value(graph) == 0.0
        assert max_eigenvalue(graph) == 0.0
        assert max_step_size(graph) == math.inf
    loops = ga.causal_window_graph(5, 1)  # every token sees itself only
    assert (max_eigenvalue(loops), max_step_size(loops)) == (0.0, math.inf)
    weightless = torch.zeros(ga.complete_graph(4).num_edges)
    assert (fiedler_value(ga.complete_graph(4), weightless)) == 0.0
    assert (max_step_size(ga.complete_graph(4), weightless)) == math.inf


def test_two_tokens_have_one_edge_and_one_eigenvalue():
    graph = ga.from_edge_index(torch.tensor([[0], [1]]), 2)
    for weight in (1e-300, 3.0, 1e300):
        edge_weight = torch.tensor([weight], dtype=torch.float64)
        assert fiedler_value(graph, edge_weight) == pytest.approx(weight, rel=1e-15)
        assert max_eigenvalue(graph, edge_weight) == pytest.approx(weight, rel=1e-15)


# Other libraries.


@pytest.mark.long
@settings(max_examples=100, deadline=None)
@given(num_tokens=st.integers(2, 12), seed=st.integers(0, 2**32 - 1), density=st.floats(0.05, 1))
def test_random_weighted_digraphs_agree_with_numpy(num_tokens, seed, density):
    rng = np.random.default_rng(seed)
    graph = ga.from_mask(torch.from_numpy(rng.random((num_tokens, num_tokens)) < density))
    edge_weight = torch.from_numpy(10 ** rng.uniform(-3, 3, graph.num_edges))
    expected = spectrum(graph, edge_weight)
    rounding = 1e-13 * max(expected[-1], 1e-300)
    assert fiedler_value(graph, edge_weight) == pytest.approx(expected[1], abs=rounding)
    assert max_eigenvalue(graph, edge_weight) == pytest.approx(expected[-1], abs=rounding)


@settings(max_examples=50, deadline=None)
@given(num_tokens=st.integers(2, 12), seed=st.integers(0, 2**32 - 1), scale=st.floats(-250, 250))
def test_eigenvalues_scale_with_the_weights_and_ignore_names_and_directions(
    num_tokens, seed, scale
):
    rng = np.random.default_rng(seed)
    graph = ga.from_mask(torch.from_numpy(rng.random((num_tokens, num_tokens)) < 0.5))
    edge_weight = torch.from_numpy(10 ** rng.uniform(-20, 0, graph.num_edges))
    names = torch.from_numpy(rng.permutation(num_tokens))
    renamed, order = ga.from_edge_index(
        names[graph.edge_index], num_tokens, return_permutation=True
    )
    factor = 10.0**scale
    for function in (fiedler_value, max_eigenvalue):
        value = function(graph, edge_weight)
        assert function(renamed, edge_weight[order]) == pytest.approx(value, rel=1e-11)
        flipped = function(graph.transpose(), edge_weight[graph.transpose_permutation()])
        assert flipped == pytest.approx(value, rel=1e-11)
        assert function(graph, factor * edge_weight) == pytest.approx(factor * value, rel=1e-11)


# Accuracy where it is lost easily.


@pytest.mark.long
def test_cycle_of_100_000_tokens_matches_the_closed_form():
    assert fiedler_value(ga.window_cycle_graph(100_000, 8)) == pytest.approx(
        ga.spectral.cycle_fiedler_value(100_000, 8), rel=1e-11
    )


@pytest.mark.long
def test_crowded_top_of_a_long_cycle_is_resolved_from_above():
    """Lanczos on the Laplacian itself stops short here: eigenvalues lie 1e-7 apart."""
    N, w = 20_000, 8
    angle = 2 * np.pi * np.arange(N) / N
    expected = sum(4 * np.sin(j * angle / 2) ** 2 for j in range(1, w + 1)).max()
    value = max_eigenvalue(ga.window_cycle_graph(N, w))
    assert 0 <= value / expected - 1 <= 2e-10


def count_eigenvalues_below(values, bound):
    """Count the eigenvalues of a weighted path's Laplacian below a bound, in exact arithmetic.

    They are as many as the negative pivots of L - bound I.
    """
    values = [Fraction(value) for value in values]
    diagonal = [a + b for a, b in zip([Fraction(0), *values], [*values, Fraction(0)], strict=True)]
    # Leading principal minors; their sign changes are the count (Sturm).
    previous, minor, count = Fraction(1), diagonal[0] - bound, 0
    count += minor < 0
    for k, value in enumerate(values, start=1):
        previous, minor = minor, (diagonal[k] - bound) * minor - value**2 * previous
        count += (minor < 0) != (previous < 0)
    return count


@pytest.mark.parametrize("magnitudes", [3, 30, 200])
def test_uneven_weights_keep_relative_accuracy_in_exact_arithmetic(magnitudes):
    """The Fiedler value of a path with very uneven weights is right to a relative 1e-12.

    Gaussian weights between distant tokens are so uneven. Exact arithmetic checks it, since dense
    eigenvalues are lost below 1e-16.
    """
    rng = np.random.default_rng(magnitudes)
    for N in (5, 40):
        values = 10 ** rng.uniform(-magnitudes, 0, N - 1)
        fiedler = Fraction(fiedler_value(*path_weights(torch.from_numpy(values))))
        margin = Fraction(1, 10**12)
        assert count_eigenvalues_below(values, fiedler * (1 - margin)) == 1
        assert count_eigenvalues_below(values, fiedler * (1 + margin)) == 2


@pytest.mark.parametrize("num_tokens", [200, 3000])
def test_two_halves_on_a_thread_mix_at_the_rate_of_the_thread(num_tokens):
    """lambda_1 -> weight * N / (N1 N2) as the weight between two halves vanishes."""
    values = torch.ones(num_tokens - 1, dtype=torch.float64)
    values[num_tokens // 2 - 1] = 1e-40
    assert fiedler_value(*path_weights(values)) == pytest.approx(1e-40 * 4 / num_tokens, rel=1e-11)


# The routes for large graphs.


@pytest.mark.long
def test_large_graphs_agree_with_dense_eigenvalues(monkeypatch):
    graphs = [
        ga.window_path_graph(190, 7),
        ga.causal_window_graph(190, 5),
        ga.dilated_window_graph(191, 3, 5),
        ga.longformer_graph(190, 4, (0, 60, 120)),
        ga.bigbird_graph(190, 2, 3, (0,), 0),
        ga.grid_window_graph(13, 14, 2, class_token=True),
    ]
    rng = np.random.default_rng(0)
    for graph in graphs:
        edge_weight = torch.from_numpy(rng.exponential(size=graph.num_edges))
        expected = spectrum(graph, edge_weight)
        for dense, wide in ((200, 1e99), (100, 1e99), (100, 0)):
            monkeypatch.setattr(eigenvalues, "DENSE", dense)
            monkeypatch.setattr(eigenvalues, "WIDE", wide)
            assert fiedler_value(graph, edge_weight) == pytest.approx(expected[1], rel=1e-9)
            assert max_eigenvalue(graph, edge_weight) == pytest.approx(expected[-1], rel=1e-9)


def test_wide_graphs_are_factorised_where_lanczos_gives_up(monkeypatch):
    monkeypatch.setattr(eigenvalues, "WIDE", 0)
    monkeypatch.setattr(eigenvalues, "BRIEFLY", (20, 1))
    height, width = 40, 25
    # Chebyshev radius 1 is more than the product of two paths; Manhattan radius 1 is exactly that.
    graph = ga.grid_window_graph(height, width, 1, metric="manhattan")
    assert fiedler_value(graph) == pytest.approx(
        4 * math.sin(math.pi / (2 * height)) ** 2, rel=1e-9
    )
    largest = sum(4 * math.cos(math.pi / (2 * n)) ** 2 for n in (height, width))
    assert max_eigenvalue(graph) == pytest.approx(largest, rel=1e-9)


def test_uneven_weights_on_wide_graphs_fall_back_to_elimination(monkeypatch):
    graph = ga.bigbird_graph(600, 1, 2, (0,), 0)
    edge_weight = torch.from_numpy(10 ** np.random.default_rng(0).uniform(-40, 0, graph.num_edges))
    expected = fiedler_value(graph, edge_weight)
    monkeypatch.setattr(eigenvalues, "WIDE", 0)
    assert fiedler_value(graph, edge_weight) == pytest.approx(expected, rel=1e-12)


# The step size.


def test_the_step_for_a_large_window_graph_is_never_too_large():
    N = 5000
    exact = 1 / (8 * math.cos(math.pi / (2 * N)) ** 2)
    assert 1 - 2e-10 <= max_step_size(ga.window_path_graph(N, 1)) / exact <= 1


@pytest.mark.parametrize("num_tokens", [34, 64, 100, 200])
def test_degenerate_spectra_are_solved(num_tokens):
    # Hundreds of equal eigenvalues: LAPACK's solver for a few of them gives up on these.
    complete = ga.complete_graph(num_tokens)
    assert ga.spectral.max_eigenvalue(complete) == pytest.approx(num_tokens, rel=1e-12)
    assert ga.spectral.fiedler_value(complete) == pytest.approx(num_tokens, rel=1e-12)
    blocks = ga.block_window_graph(num_tokens, block_size=32)
    assert ga.spectral.max_eigenvalue(blocks) == pytest.approx(32, rel=1e-12)
    # Of a causal graph symmetrised: every pair weighs 1/2, so half the complete graph's.
    assert ga.spectral.max_eigenvalue(ga.causal_graph(num_tokens)) == pytest.approx(num_tokens / 2)

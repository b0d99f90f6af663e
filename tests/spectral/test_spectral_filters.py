"""Consensus as a filter: rates, steps and gradients against matrix powers and autograd."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import random_digraph

import graphattn as ga
from graphattn.spectral import (
    energy,
    energy_gradient,
    filter_response,
    laplacian,
    max_step_size,
    smoothing_rate,
    spectrum,
    steps_until_consensus,
)


def filter_matrix(graph, step_size, edge_weight=None):
    L = laplacian(graph, edge_weight).toarray()
    return np.eye(len(L)) - 2 * step_size * L


# The response.


def test_response_is_the_spectrum_of_the_filter():
    graph, edge_weight, _ = random_digraph(8, 0)
    for eta in (0.01, 0.3, 5.0):
        response = filter_response(spectrum(graph, edge_weight), eta)
        expected = np.linalg.eigvalsh(filter_matrix(graph, eta, edge_weight))[::-1]
        np.testing.assert_allclose(response, expected, atol=1e-12)


def test_response_keeps_dtype_and_shape_and_is_differentiable():
    values = torch.rand(2, 3, requires_grad=True)
    response = filter_response(values, 0.25)
    assert (response.dtype, response.shape) == (torch.float32, (2, 3))
    response.sum().backward()
    assert (values.grad == -0.5).all()


# The rate.


@settings(max_examples=40, deadline=None)
@given(
    num_tokens=st.integers(1, 9),
    seed=st.integers(0, 2**32 - 1),
    density=st.floats(0.05, 1),
    step_size=st.floats(0.001, 3),
)
def test_rate_is_the_norm_of_the_filter_off_the_signals_constant_on_components(
    num_tokens, seed, density, step_size
):
    graph, edge_weight, _ = random_digraph(num_tokens, seed, density=density)
    L = laplacian(graph, edge_weight).toarray()
    values, modes = np.linalg.eigh(L)
    moving = modes[:, values > 1e-9]
    H = filter_matrix(graph, step_size, edge_weight)
    expected = np.linalg.norm(H @ moving @ moving.T, 2) if moving.size else 0.0
    rate = smoothing_rate(graph, step_size, edge_weight)
    assert rate == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_rate_of_a_disconnected_graph_is_that_of_its_slowest_part():
    parts = [ga.window_path_graph(9, 1), ga.complete_graph(4), ga.window_path_graph(1, 1)]
    whole = ga.batch(parts)
    eta = max_step_size(whole)
    rates = [smoothing_rate(part, eta) for part in parts]
    assert rates[2] == 0.0
    assert smoothing_rate(whole, eta) == pytest.approx(max(rates), rel=1e-12)
    assert steps_until_consensus(whole, eta) == math.inf


def test_without_edges_there_is_nothing_to_smooth():
    for N in (0, 1, 3):
        graph = ga.from_edge_index(torch.empty((2, 0), dtype=torch.int64), N)
        assert smoothing_rate(graph, 0.5) == 0.0
        assert steps_until_consensus(graph, 0.5) == (0 if N < 2 else math.inf)


# The steps.


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(
    num_tokens=st.integers(2, 8),
    seed=st.integers(0, 2**32 - 1),
    share=st.floats(0.05, 1.9),
    tolerance=st.floats(1e-4, 0.9),
)
def test_steps_are_the_first_power_within_the_tolerance(num_tokens, seed, share, tolerance):
    graph, edge_weight, _ = random_digraph(num_tokens, seed, density=0.9)
    if ga.spectral.fiedler_value(graph, edge_weight) == 0:
        return
    eta = share * max_step_size(graph, edge_weight)
    n = steps_until_consensus(graph, eta, tolerance=tolerance, edge_weight=edge_weight)
    H = filter_matrix(graph, eta, edge_weight)
    away = np.eye(num_tokens) - 1 / num_tokens
    assert isinstance(n, int)

    def left(steps):
        return np.linalg.norm(np.linalg.matrix_power(H, steps) @ away, 2)

    assert left(n) <= tolerance * (1 + 1e-9)
    if n > 1:
        assert left(n - 1) > tolerance * (1 - 1e-9)


def test_a_power_that_meets_the_tolerance_exactly_takes_no_step_more():
    graph = ga.complete_graph(10)
    for digits in range(1, 12):  # the rate is 0.1
        assert steps_until_consensus(graph, 0.045, tolerance=10.0**-digits) == digits


def test_steps_are_infinite_where_a_mode_does_not_shrink():
    graph = ga.complete_graph(4)
    assert steps_until_consensus(graph, 0.24) < math.inf
    assert steps_until_consensus(graph, 0.25) == math.inf  # every mode turns around for ever
    assert steps_until_consensus(graph, 1.0) == math.inf
    assert steps_until_consensus(graph, max_step_size(graph)) == 1  # all modes at once


def test_steps_are_counted_where_the_rate_rounds_to_one():
    """1 - 2 eta lambda is 1 in float64, and its logarithm is not."""
    graph = ga.complete_graph(2, self_loops=False)
    tiny = torch.full((2,), 1e-20, dtype=torch.float64)
    assert smoothing_rate(graph, 1.0, tiny) == 1.0
    steps = steps_until_consensus(graph, 1.0, tolerance=0.5, edge_weight=tiny)
    assert steps == pytest.approx(math.log(2) / 4e-20, rel=1e-9)


# The gradient.


def test_gradient_is_autograds_and_twice_the_laplacian():
    for columns in ((), (3,)):
        graph, edge_weight, rng = random_digraph(9, 1)
        signal = torch.from_numpy(rng.standard_normal((9, *columns))).requires_grad_()
        ours = energy_gradient(graph, signal, edge_weight)
        (theirs,) = torch.autograd.grad(energy(graph, signal, edge_weight), signal)
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        matrix = 2 * laplacian(graph, edge_weight, layout="dense") @ signal
        torch.testing.assert_close(ours, matrix, rtol=1e-12, atol=1e-12)


def test_gradient_is_differentiable_in_signal_and_weights():
    graph, edge_weight, rng = random_digraph(5, 2)
    signal = torch.from_numpy(rng.standard_normal((5, 2))).requires_grad_()
    inputs = (signal, edge_weight.requires_grad_())
    assert torch.autograd.gradcheck(lambda u, w: energy_gradient(graph, u, w), inputs)


def test_gradient_takes_raw_edges_in_their_own_order():
    graph, edge_weight, rng = random_digraph(6, 3)
    signal = torch.from_numpy(rng.standard_normal(6))
    shuffle = torch.randperm(graph.num_edges, generator=torch.Generator().manual_seed(0))
    raw = energy_gradient(graph.edge_index[:, shuffle], signal, edge_weight[shuffle])
    torch.testing.assert_close(raw, energy_gradient(graph, signal, edge_weight))


def test_gradient_of_half_precision_is_float32():
    u = torch.tensor([0.0, 1.0, 3.0])
    expected = energy_gradient(ga.complete_graph(3), u)
    for dtype in (torch.float16, torch.bfloat16):
        gradient = energy_gradient(ga.complete_graph(3), u.to(dtype))
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, expected)


def test_bad_arguments_are_refused():
    graph = ga.complete_graph(3)
    for function in (smoothing_rate, steps_until_consensus):
        for step in (0, -1.0, math.inf, math.nan, "auto"):
            with pytest.raises(ValueError, match="step_size must be a finite number > 0, got"):
                function(graph, step)
        with pytest.raises(ValueError, match="graph must be a TokenGraph, got str"):
            function("path", 0.1)
        with pytest.raises(ValueError, match=r"edge_weight must have shape \[9\]"):
            function(graph, 0.1, edge_weight=torch.ones(4))
    with pytest.raises(ValueError, match=r"tolerance must be between 0 and 1 .*, got 1\.0"):
        steps_until_consensus(graph, 0.1, tolerance=1.0)
    with pytest.raises(ValueError, match="tolerance must be a finite number > 0, got 0"):
        steps_until_consensus(graph, 0.1, tolerance=0)
    with pytest.raises(ValueError, match="eigenvalues must be a floating-point tensor, got list"):
        filter_response([0.0, 1.0], 0.1)
    with pytest.raises(ValueError, match=r"eigenvalues must be .*, got torch.int64"):
        filter_response(torch.arange(3), 0.1)
    with pytest.raises(ValueError, match="signal must be a floating-point tensor"):
        energy_gradient(graph, torch.arange(3))
    with pytest.raises(
        ValueError, match=r"graph has 3 targets .* the tensors have 5 targets and 5 sources"
    ):
        energy_gradient(graph, torch.zeros(5))

"""The energy of Eq. 5 against its double sum, the Laplacian and autograd."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import graphattn as ga
from graphattn.spectral import energy, laplacian


def random_case(num_tokens, seed, *, columns=None):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(num_tokens, num_tokens, generator=generator) < 0.5
    graph = ga.from_mask(mask)
    weight = torch.rand(graph.num_edges, generator=generator, dtype=torch.float64) + 0.1
    shape = (num_tokens,) if columns is None else (num_tokens, columns)
    signal = torch.randn(shape, generator=generator, dtype=torch.float64)
    return graph, signal, weight


def double_sum(graph, signal, weight):
    """Eq. 5, term by term, in the paper's order: i updates, j is looked at."""
    u = signal.reshape(len(signal), -1).tolist()
    total = 0.0
    for (j, i), w in zip(graph.edge_index.T.tolist(), weight.tolist(), strict=True):
        total += 0.5 * w * sum((a - b) ** 2 for a, b in zip(u[i], u[j], strict=True))
    return total


@settings(max_examples=50, deadline=None)
@given(num_tokens=st.integers(1, 10), seed=st.integers(0, 2**63 - 1), columns=st.integers(0, 3))
def test_energy_is_the_double_sum_and_the_quadratic_form(num_tokens, seed, columns):
    graph, signal, weight = random_case(num_tokens, seed, columns=columns or None)
    E = energy(graph, signal, weight)
    assert E.shape == ()
    assert E.item() == pytest.approx(double_sum(graph, signal, weight), rel=1e-12, abs=1e-14)
    u = signal.reshape(num_tokens, -1).numpy()
    L = laplacian(graph, weight).toarray()
    assert E.item() == pytest.approx(np.trace(u.T @ L @ u), rel=1e-12, abs=1e-12)


def test_gradients_are_right_in_signal_and_weights_twice():
    graph, signal, weight = random_case(5, seed=3, columns=2)
    inputs = (signal.requires_grad_(), weight.requires_grad_())
    assert torch.autograd.gradcheck(lambda u, w: energy(graph, u, w), inputs)
    assert torch.autograd.gradgradcheck(lambda u, w: energy(graph, u, w), inputs)


def test_unweighted_energy_counts_every_edge_once():
    u = torch.tensor([0.0, 1.0, 3.0])
    assert energy(ga.window_path_graph(3, 1), u).item() == 1 + 4
    assert energy(ga.causal_window_graph(3, 2), u).item() == (1 + 4) / 2
    assert energy(ga.complete_graph(3), u).item() == 1 + 4 + 9


def test_constants_have_no_energy_and_shifts_do_not_matter():
    graph, signal, weight = random_case(7, seed=4)
    assert energy(graph, torch.full((7,), 3.7), weight).item() == 0.0
    shifted = energy(graph, signal + 100.0, weight)
    torch.testing.assert_close(shifted, energy(graph, signal, weight), rtol=1e-11, atol=0)


def test_weights_of_a_raw_edge_index_follow_its_own_order():
    graph, signal, weight = random_case(6, seed=6)
    shuffle = torch.randperm(graph.num_edges, generator=torch.Generator().manual_seed(1))
    raw = energy(graph.edge_index[:, shuffle], signal, weight[shuffle])
    torch.testing.assert_close(raw, energy(graph, signal, weight))


def test_half_precision_is_accumulated_in_float32():
    graph = ga.window_path_graph(5000, 1)
    u = (torch.arange(5000) % 2).half() * 8  # 9998 edges of energy 32: beyond float16
    E = energy(graph, u)
    assert E.dtype == torch.float32
    assert E.item() == 9998 * 32


def test_graphs_without_edges_have_no_energy():
    for num_tokens in (0, 3):
        graph = ga.from_edge_index(torch.empty((2, 0), dtype=torch.int64), num_tokens)
        signal = torch.ones(num_tokens, 2, requires_grad=True)
        E = energy(graph, signal)
        E.backward()
        assert E.item() == 0.0
        assert signal.grad.abs().sum() == 0.0


def test_bad_signals_are_refused():
    graph = ga.window_path_graph(4, 1)
    with pytest.raises(
        ValueError, match=r"graph has 4 targets .* the tensors have 5 targets and 5 sources"
    ):
        energy(graph, torch.zeros(5))
    with pytest.raises(
        ValueError, match=r"signal must have shape \[N\] or \[N, C\], got \[2, 4, 3\]"
    ):
        energy(graph, torch.zeros(2, 4, 3))
    with pytest.raises(ValueError, match=r"signal must be a floating-point tensor .* torch.int64"):
        energy(graph, torch.arange(4))
    with pytest.raises(ValueError, match=r"signal must be a floating-point tensor .* list"):
        energy(graph, [0.0, 1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="is not a source"):
        energy(torch.tensor([[4], [0]]), torch.zeros(4))

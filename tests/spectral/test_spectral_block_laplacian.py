"""Ends of spectra of matrix-weighted Laplacians against dense eigenvalues, and their enclosures."""

import numpy as np
import pytest
import scipy.linalg
from hypothesis import example, given, settings
from hypothesis import strategies as st

import graphattn as ga
from graphattn.spectral.matrix_weighted import block_laplacian, spectrum_ends
from graphattn.spectral.matrix_weighted.block_laplacian import BlockLaplacian
from graphattn.spectral.matrix_weighted.spectrum_ends import largest_eigenvalue, smallest_eigenvalue


def laplacians(graph, features, *, rank=2, heads=3, seed=0, uneven=0.0):
    """Heads with random R = alpha I + rows^T rows; `uneven` decades between the weakest and 1."""
    source, target = graph.edge_index.numpy()
    edge = source != target
    source, target = source[edge], target[edge]
    rng = np.random.default_rng(seed)
    of_heads = []
    for _ in range(heads):
        alpha = 10 ** rng.uniform(-uneven, 0, len(source))
        rows = rng.standard_normal((len(source), rank, features)) / np.sqrt(rank * features)
        step = np.full(graph.num_targets, rng.uniform(0.05, 0.2))
        of_heads.append(BlockLaplacian(source, target, alpha, rows, step))
    return of_heads


def plain_matrix(head):
    """Make a head's matrix edge by edge: sum_e eta (e_t - e_s)(e_t - e_s)^T x R_e."""
    N, D = head.num_tokens, head.features
    M = np.zeros((N, D, N, D))
    for s, t, alpha, rows in zip(head.source, head.target, head.alpha, head.rows, strict=True):
        R = alpha * np.eye(D) + rows.T @ rows
        eta_R = {(i, j): head.root[i] * head.root[j] * R for i in (s, t) for j in (s, t)}
        M[t, :, t] += eta_R[t, t]
        M[s, :, s] += eta_R[s, s]
        M[t, :, s] -= eta_R[t, s]
        M[s, :, t] -= eta_R[s, t]
    return M.reshape(N * D, N * D)


GRAPHS = {
    "window": ga.window_path_graph(40, 2),
    "window, self-loops": ga.window_path_graph(31, 3, self_loops=True),
    "ring": ga.window_cycle_graph(24, 3),
    "grid": ga.grid_window_graph(6, 6, 1),
    "complete": ga.complete_graph(15),
    "star and path": ga.longformer_graph(30, 1, [0]),
    "causal": ga.causal_window_graph(25, 4),
}


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("uneven", [0.0, 3.0])
@pytest.mark.parametrize("countable", [True, False])
def test_both_ends_are_those_of_a_dense_solver(name, uneven, countable, monkeypatch):
    monkeypatch.setattr(spectrum_ends, "DENSE", 0)
    if not countable:
        monkeypatch.setattr(block_laplacian, "COUNTABLE", 0)
    heads = laplacians(GRAPHS[name], 5, uneven=uneven)
    values = [np.linalg.eigvalsh(plain_matrix(head)) for head in heads]
    top, low = largest_eigenvalue(heads), smallest_eigenvalue(heads)
    assert top.value == pytest.approx(max(v[-1] for v in values), abs=1e-9)
    assert low.value == pytest.approx(min(v[5] for v in values), abs=1e-9)
    assert (top.enclosed, low.enclosed) == (countable, countable)
    assert abs(top.value - max(v[-1] for v in values)) <= top.error + 1e-12
    assert abs(low.value - min(v[5] for v in values)) <= low.error + 1e-12


@settings(max_examples=40, deadline=None)
@example(num_tokens=2, window=1, features=3, seed=2, share=0.5)  # pivots of 1e-17
@given(
    num_tokens=st.integers(2, 30),
    window=st.integers(1, 6),
    features=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
    share=st.floats(0.01, 0.99),
)
def test_a_count_is_the_number_of_dense_eigenvalues_beyond(
    num_tokens, window, features, seed, share
):
    graph = ga.window_path_graph(num_tokens, window)
    head = laplacians(graph, features, heads=1, seed=seed)[0]
    values = np.linalg.eigvalsh(plain_matrix(head))
    shift = share * values[-1]
    if np.abs(values - shift).min() < 1e-9:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_laplacian, "BLOCK", 1)  # many small blocks
        for side, expected in ((1, (values < shift).sum()), (-1, (values > shift).sum())):
            number = head.count(shift, side)
            # A pivot is 0 where the shift is an eigenvalue of the first tokens alone.
            assert number == expected or (number is None and is_eigenvalue_of_a_corner(head, shift))


def is_eigenvalue_of_a_corner(head, shift):
    """Whether elimination meets a block that is singular to rounding."""
    matrix = plain_matrix(head)
    width = len(matrix) // head.num_tokens
    corners = (matrix[:stop, :stop] for stop in range(width, len(matrix) + 1, width))
    return any(np.abs(np.linalg.eigvalsh(corner) - shift).min() < 1e-9 for corner in corners)


def test_a_shift_at_the_middle_of_two_tokens_is_not_counted():
    """L = [[a, -a], [-a, a]] has 0 and 2 a; at a the first pivot is 0, whatever follows."""
    head = laplacians(ga.window_path_graph(2, 1), 1, heads=1, seed=0)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_laplacian, "BLOCK", 1)
        assert head.count(np.linalg.eigvalsh(plain_matrix(head))[-1] / 2, 1) is None


def test_what_iterations_miss_the_counts_find(monkeypatch):
    """Estimates that are wrong by a per cent end in an enclosure of the truth all the same."""
    heads = laplacians(ga.window_path_graph(30, 2), 3)
    values = [np.linalg.eigvalsh(plain_matrix(head)) for head in heads]
    monkeypatch.setattr(spectrum_ends, "DENSE", 0)
    lanczos, lobpcg = spectrum_ends._by_lanczos, spectrum_ends._by_lobpcg
    monkeypatch.setattr(spectrum_ends, "_by_lanczos", lambda head: (0.99 * lanczos(head)[0], 1e-9))
    monkeypatch.setattr(
        spectrum_ends, "_by_lobpcg", lambda *given: (1.01 * lobpcg(*given)[0], 1e-9)
    )
    assert largest_eigenvalue(heads).value == pytest.approx(max(v[-1] for v in values), abs=1e-9)
    assert smallest_eigenvalue(heads).value == pytest.approx(min(v[3] for v in values), abs=1e-9)


def test_a_graph_in_parts_has_more_modes_that_stay():
    low = smallest_eigenvalue(laplacians(ga.block_window_graph(12, 4), 3))
    assert low.value == 0
    assert low.enclosed


@pytest.mark.long
def test_the_banded_solver_of_lapack_agrees_at_the_width_of_a_head():
    """16 tokens of 64 features, where the matrix is still a band that LAPACK takes."""
    heads = laplacians(ga.window_path_graph(16, 2), 64, rank=4, heads=2)
    ends = largest_eigenvalue(heads), smallest_eigenvalue(heads)
    assert all(end.enclosed and end.error <= 1.01e-10 * max(1, end.value) for end in ends)
    values = []
    for head in heads:
        M = plain_matrix(head)
        band = np.zeros((192, len(M)))
        for k in range(192):  # two tokens before, and itself
            band[k, : len(M) - k] = np.diagonal(M, -k)
        values.append(scipy.linalg.eig_banded(band, lower=True, eigvals_only=True))
    assert ends[0].value == pytest.approx(max(v[-1] for v in values), abs=1e-9)
    assert ends[1].value == pytest.approx(min(v[64] for v in values), abs=1e-9)

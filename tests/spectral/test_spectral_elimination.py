"""Subtraction-free elimination against exact rational arithmetic."""

from fractions import Fraction

import numpy as np
import pytest
import scipy.sparse

import graphattn as ga
from graphattn.spectral.laplacians import elimination
from graphattn.spectral.laplacians.elimination import (
    GroundedLaplacian,
    elimination_order,
    grounded_inverse,
)
from graphattn.spectral.laplacians.laplacian import symmetrised_adjacency


def exact_inverse(weight, leak):
    """Inverse of diag(row sums + leak) - weight by Gauss-Jordan on Fractions."""
    n = len(leak)
    W = [[Fraction(weight[i, j]) if i != j else Fraction(0) for j in range(n)] for i in range(n)]
    rows = [
        [(sum(W[i]) + Fraction(leak[i]) if i == j else -W[i][j]) for j in range(n)]
        + [Fraction(int(i == j)) for j in range(n)]
        for i in range(n)
    ]
    for k in range(n):
        rows[k] = [entry / rows[k][k] for entry in rows[k]]
        for i in range(n):
            if i != k:
                rows[i] = [a - rows[i][k] * b for a, b in zip(rows[i], rows[k], strict=True)]
    return [row[n:] for row in rows]


@pytest.mark.parametrize("block", [2, 32])  # the recursion, and the loop it ends in
@pytest.mark.parametrize("magnitudes", [0, 20, 100])
def test_every_entry_of_the_inverse_is_accurate(block, magnitudes, monkeypatch):
    monkeypatch.setattr(elimination, "BLOCK", block)
    rng = np.random.default_rng(magnitudes)
    n = 9
    weight = 10 ** rng.uniform(-magnitudes, 0, (n, n)) * (rng.random((n, n)) < 0.6)
    weight = np.triu(weight, 1) + np.triu(weight, 1).T
    leak = 10 ** rng.uniform(-magnitudes, 0, n)
    ignored_diagonal = np.diag(np.full(n, np.pi))
    inverse = grounded_inverse(weight + ignored_diagonal, leak)
    exact = exact_inverse(weight, leak)
    for i in range(n):
        for j in range(n):
            error = Fraction(inverse[i, j]) - exact[i][j]
            assert abs(error) <= Fraction(1, 10**14) * exact[i][j]


@pytest.mark.parametrize(
    "graph",
    [
        ga.window_path_graph(2, 1),
        ga.window_path_graph(300, 5),
        ga.window_cycle_graph(301, 40),
        ga.causal_graph(150),
        ga.longformer_graph(300, 2, (0, 7, 100)),
        ga.grid_window_graph(17, 18, 1, class_token=True),
        ga.bigbird_graph(200, 1, 3, (0,), 0),
    ],
    ids=repr,
)
def test_solutions_solve_the_grounded_system(graph):
    adjacency = symmetrised_adjacency(graph, np.ones(graph.num_edges))
    order = elimination_order(adjacency)
    N = graph.num_targets
    assert sorted(order.tokens) == list(range(N))
    ground = order.tokens[-1]
    L = scipy.sparse.csgraph.laplacian(adjacency.toarray())
    kept = np.delete(np.arange(N), ground)
    right = np.random.default_rng(0).standard_normal((N, 3))
    before = right.copy()
    solution = GroundedLaplacian.of(adjacency, order).solve(right)
    expected = np.linalg.solve(L[np.ix_(kept, kept)], right[kept])
    np.testing.assert_allclose(solution[kept], expected, rtol=1e-9, atol=1e-9 * abs(expected).max())
    np.testing.assert_array_equal(solution[ground], 0)
    np.testing.assert_array_equal(right, before)


def test_global_tokens_are_eliminated_last():
    adjacency = symmetrised_adjacency(
        graph := ga.longformer_graph(2000, 4, (0, 900)), np.ones(graph.num_edges)
    )
    order = elimination_order(adjacency)
    assert set(order.tokens[order.block_ends[-1] :]) == {0, 900}
    assert max(np.diff(order.block_ends)) <= 64

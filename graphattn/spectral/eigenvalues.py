"""The two ends of a Laplacian's spectrum: the Fiedler value and the largest eigenvalue."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import scipy.sparse
from numpy.typing import NDArray
from scipy.sparse.csgraph import connected_components
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh, splu
from torch import Tensor

from graphattn.graphs import TokenGraph
from graphattn.spectral.arguments import as_edge_weight, as_square_graph
from graphattn.spectral.banded import STORED, Bands, slowest_mode
from graphattn.spectral.elimination import (
    EliminationOrder,
    GroundedLaplacian,
    elimination_order,
)
from graphattn.spectral.laplacian import float64_weights, laplacian_of, symmetrised_adjacency

Array = NDArray[np.float64]

# Tokens up to which a dense eigensolver is used: the one for all eigenvalues. LAPACK's for a few
# of them fails ("Internal Error") on spectra as degenerate as those of blocks and complete graphs.
DENSE = 200
WIDE = 2e10  # multiplications from which a graph is called wide: elimination takes many seconds
TOLERANCE = 1e-9  # of a Lanczos residual; the eigenvalue itself is then usually good to 1e-14

# Lanczos attempts: (basis size, restarts). Most graphs are done with the first; hubs crowd the
# spectrum of the inverse, which takes a larger basis.
THOROUGHLY = ((20, 2), (80, 1000))
BRIEFLY = (80, 8)


def fiedler_value(graph: TokenGraph, edge_weight: Tensor | None = None) -> float:
    r"""The second-smallest eigenvalue of the Laplacian, the algebraic connectivity.

    It is the rate of mixing: the slowest mode of the low-pass filter I - 2 eta L shrinks by
    omega_1 = 1 - 2 eta lambda_1 per step (Eq. 13).

    Computed in float64 on the CPU. The *relative* error is 1e-9 at worst and 1e-13 as a rule,
    however small the value and however uneven the weights: two groups of tokens that hang together
    by a weight of 1e-40 have a Fiedler value of that order, not of the order of rounding. Window
    graphs take inverse iteration with a banded factor, half a second per 100,000 tokens; where
    weights are very uneven, elimination that never subtracts (``spectral/elimination.py``), some
    seconds; wide graphs, such as random ones, mix fast and take Lanczos.

    Source: Stabilizing Transformer Training Through Consensus, Sections 2.3 and 4.

    Args:
        graph: N tokens; direction does not matter, see :func:`laplacian`.
        edge_weight: weights >= 0 in the order of ``graph.edge_index``, [E]; ones if None.

    Returns:
        lambda_1 > 0; exactly 0.0 if the edges of positive weight leave the graph disconnected, or
        N < 2.

    Raises:
        ValueError: if `graph` is not a TokenGraph or is bipartite (N != M), or `edge_weight` is not
            a tensor [E] of finite numbers >= 0, or spans more magnitudes than float64 has.

    Example:
        >>> import graphattn as ga
        >>> round(ga.spectral.fiedler_value(ga.complete_graph(7)), 9)
        7.0
        >>> ga.spectral.fiedler_value(ga.block_window_graph(8, block_size=4))
        0.0
    """
    adjacency, scale = _scaled_adjacency(graph, edge_weight)
    num_tokens = adjacency.shape[0]
    if num_tokens < 2 or connected_components(adjacency, directed=False)[0] > 1:
        return 0.0
    if num_tokens > DENSE:
        mode = slowest_mode(laplacian_of(adjacency), adjacency)
        if mode is not None:
            return mode.value * scale
    order = elimination_order(adjacency)
    value = _fiedler_value_of_wide_graph(adjacency) if order.cost > WIDE else None
    if value is None:
        value = _fiedler_value_by_elimination(adjacency, order)
    return float(value) * scale


def max_eigenvalue(graph: TokenGraph, edge_weight: Tensor | None = None) -> float:
    """The largest eigenvalue of the Laplacian; 0.0 without edges.

    Computed in float64 on the CPU, to a relative accuracy of 1e-9 or better. The top of a large
    window graph's spectrum is too crowded for Lanczos; there the value is an upper bound that
    exceeds the eigenvalue by 1e-10 of it at most, so that a step that is safe for it is safe.

    Source: Stabilizing Transformer Training Through Consensus, Section 2.2.

    Args:
        graph: N tokens; direction does not matter, see :func:`laplacian`.
        edge_weight: weights >= 0 in the order of ``graph.edge_index``, [E]; ones if None.

    Raises:
        ValueError: as :func:`fiedler_value`.

    Example:
        >>> import graphattn as ga
        >>> round(ga.spectral.max_eigenvalue(ga.window_cycle_graph(6, window=1)), 9)
        4.0
    """
    adjacency, scale = _scaled_adjacency(graph, edge_weight)
    if adjacency.nnz == 0:
        return 0.0
    L = laplacian_of(adjacency)
    num_tokens = adjacency.shape[0]
    if num_tokens <= DENSE:
        return float(np.linalg.eigvalsh(L.toarray())[-1]) * scale
    found = _lanczos(lambda u: L @ u, num_tokens, "LA", (THOROUGHLY[0],))
    if found is None and elimination_order(adjacency).cost > WIDE:
        found = _lanczos(lambda u: L @ u, num_tokens, "LA", (BRIEFLY,))
    return float(_max_eigenvalue_from_above(L) if found is None else found) * scale


def max_step_size(graph: TokenGraph, edge_weight: Tensor | None = None) -> float:
    r"""The largest non-oscillating step, eta = 1 / (2 lambda_max); infinity without edges.

    Up to this step no mode of the low-pass filter I - 2 eta L changes sign. The energy still falls
    up to twice the step, but modes near lambda_max then flip sign while they shrink. Weights are
    numbers here (R = I without any): what a layer's learned matrices allow is
    ``SelfConsensus(step_size="auto")``.

    Source: Stabilizing Transformer Training Through Consensus, Section 2.2.

    Args:
        graph: N tokens; direction does not matter, see :func:`laplacian`.
        edge_weight: weights >= 0 in the order of ``graph.edge_index``, [E]; ones if None.

    Raises:
        ValueError: as :func:`fiedler_value`.

    Example:
        >>> import graphattn as ga
        >>> round(ga.spectral.max_step_size(ga.complete_graph(10)), 9)
        0.05
    """
    largest = max_eigenvalue(graph, edge_weight)
    return 1 / (2 * largest) if largest > 0 else float("inf")


def _scaled_adjacency(
    graph: TokenGraph, edge_weight: Tensor | None
) -> tuple[scipy.sparse.csr_array, float]:
    """W_sym divided by a power of two that brings its largest weight near 1, and that power."""
    graph = as_square_graph(graph)
    if edge_weight is not None:
        edge_weight = as_edge_weight(edge_weight, graph.num_edges)
    weight = float64_weights(edge_weight, graph.num_edges)
    largest = weight.max(initial=0.0)
    exponent = int(np.frexp(largest)[1]) - 1
    adjacency = symmetrised_adjacency(graph, np.ldexp(weight, -exponent))
    return adjacency, float(np.ldexp(1.0, exponent))


def _fiedler_value_by_elimination(
    adjacency: scipy.sparse.csr_array, order: EliminationOrder
) -> float:
    """1 / the largest eigenvalue of the pseudo-inverse of the Laplacian of a connected graph."""
    num_tokens = adjacency.shape[0]
    try:
        with np.errstate(divide="raise", over="raise", invalid="raise"):
            grounded = GroundedLaplacian.of(adjacency, order)
            if num_tokens <= DENSE:
                inverse = _centred(grounded.solve(_centred(np.eye(num_tokens))))
            else:
                start = _centred(_start_vector(num_tokens))
                size = np.abs(grounded.solve(start)).max()
    except FloatingPointError as error:
        raise ValueError(
            "edge_weight spans more magnitudes than float64 can hold, got weights from "
            f"{adjacency.data.min():.1e} to 1 (relative to the largest)"
        ) from error
    if num_tokens <= DENSE:
        return 1 / np.linalg.eigvalsh(inverse)[-1]

    def pseudo_inverse(u: Array) -> Array:
        # Scaled to the order of 1, because Lanczos squares what it gets.
        return _centred(grounded.solve(_centred(u)) / size)

    largest = _lanczos(pseudo_inverse, num_tokens, "LA", THOROUGHLY)
    if largest is None:
        raise RuntimeError("the Fiedler value has not converged")
    return 1 / (largest * size)


def _fiedler_value_of_wide_graph(adjacency: scipy.sparse.csr_array) -> float | None:
    """The Fiedler value without elimination by blocks; None where rounding would drown it."""
    num_tokens = adjacency.shape[0]
    L = laplacian_of(adjacency)
    bound = 2 * L.diagonal().max()  # on the largest eigenvalue

    def constants_moved_up(u: Array) -> Array:
        return L @ u + bound * u.mean()

    value = _lanczos(constants_moved_up, num_tokens, "SA", (BRIEFLY,))
    if value is None:
        # Not an expander, then: a fill-reducing factorisation has a chance, as on large grids.
        ground = int(L.diagonal().argmax())
        kept = np.delete(np.arange(num_tokens), ground)
        solve = _positive_definite_solver(scipy.sparse.csc_matrix(L[kept][:, kept]))
        if solve is None:
            return None

        def pseudo_inverse(u: Array) -> Array:
            solution = np.zeros(num_tokens)
            solution[kept] = solve(_centred(u)[kept])
            return _centred(solution)

        largest = _lanczos(pseudo_inverse, num_tokens, "LA", THOROUGHLY)
        value = None if largest is None else 1 / largest
    # Both ways make errors of the order of rounding next to `bound`.
    return value if value is not None and value > 1e-6 * bound else None


def _max_eigenvalue_from_above(L: scipy.sparse.csr_array) -> float:
    """An upper bound within 1e-10, by factorising shift * I - L for ever smaller shifts.

    Windows have so many eigenvalues near the largest one that Lanczos on L itself would take as
    many steps as there are tokens. A factorisation without pivoting tells by the signs of its
    pivots whether the shift is still above all eigenvalues.
    """
    degree = L.diagonal().max()
    upper = 2.001 * degree  # twice the largest degree is never less than the eigenvalue ...
    roughly = _lanczos(lambda u: L @ u, L.shape[0], "LA", ((20, 20),), tolerance=1e-2)
    lower = degree if roughly is None else roughly  # ... and a Rayleigh quotient never more
    shift = min(1.01 * lower, upper)
    inverse_of = _shifted_solvers(scipy.sparse.csr_array(-L))
    while upper - lower > 1e-10 * upper:
        inverse = inverse_of(shift)
        if inverse is None:
            lower, shift = shift, (shift + upper) / 2
            continue
        upper = shift
        largest = _lanczos(inverse, L.shape[0], "LA", ((20, 50),), tolerance=1e-3)
        if largest is not None:
            lower = max(lower, upper - 1 / largest)
        shift = lower + 0.002 * (upper - lower)
    return upper


def _shifted_solvers(
    matrix: scipy.sparse.csr_array,
) -> Callable[[float], Callable[[Array], Array] | None]:
    """shift -> (u -> (shift I + matrix)^-1 u), or None unless that is positive definite."""
    bands = Bands(matrix)
    if bands.stored <= STORED:
        return bands.solver
    identity = scipy.sparse.csc_matrix(scipy.sparse.identity(matrix.shape[0]))
    whole = scipy.sparse.csc_matrix(matrix)
    return lambda shift: _positive_definite_solver(shift * identity + whole)


def _positive_definite_solver(
    matrix: scipy.sparse.csc_matrix,
) -> Callable[[Array], Array] | None:
    """u -> matrix^-1 u, or None unless the symmetric `matrix` is positive definite."""
    try:
        factor = splu(
            matrix,
            permc_spec="MMD_AT_PLUS_A",
            diag_pivot_thresh=0.0,
            options={"SymmetricMode": True},
        )
    except RuntimeError:  # exactly singular
        return None
    on_diagonal = np.array_equal(factor.perm_r, factor.perm_c)
    return factor.solve if on_diagonal and (factor.U.diagonal() > 0).all() else None


def _lanczos(
    apply: Callable[[Array], Array],
    num_tokens: int,
    which: str,
    attempts: tuple[tuple[int, int], ...],
    tolerance: float = TOLERANCE,
) -> float | None:
    """One extreme eigenvalue; `attempts` are (basis size, restarts); None if none converges."""
    operator = LinearOperator(
        (num_tokens, num_tokens), matvec=lambda u: apply(u.ravel()), dtype=np.float64
    )
    for basis, restarts in attempts:
        try:
            return eigsh(
                operator,
                k=1,
                which=which,
                ncv=basis,
                maxiter=restarts,
                tol=tolerance,
                v0=_start_vector(num_tokens),
                return_eigenvectors=False,
            )[0]
        except ArpackNoConvergence:
            continue
    return None


def _start_vector(num_tokens: int) -> Array:
    return np.random.default_rng(0).standard_normal(num_tokens)


def _centred(u: Array) -> Array:
    return u - u.mean(axis=0)

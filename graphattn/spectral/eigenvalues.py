"""The two ends of a Laplacian's spectrum: the Fiedler pair and the largest eigenvalue."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import scipy.sparse
import torch
from numpy.typing import NDArray
from scipy.sparse.csgraph import connected_components
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh, splu
from torch import Tensor

from graphattn.graphs import TokenGraph
from graphattn.spectral.arguments import as_edge_weight, as_square_graph
from graphattn.spectral.laplacians.banded import STORED, BandedMatrix, slowest_mode
from graphattn.spectral.laplacians.elimination import (
    EliminationOrder,
    GroundedLaplacian,
    elimination_order,
)
from graphattn.spectral.laplacians.laplacian import (
    float64_weights,
    laplacian_of,
    symmetrised_adjacency,
)
from graphattn.spectral.laplacians.operators import by_pairs

Array = NDArray[np.float64]

# Tokens up to which a dense eigensolver is used: the one for all eigenvalues. LAPACK's for a few
# of them fails ("Internal Error") on spectra as degenerate as those of blocks and complete graphs.
DENSE = 200
WIDE = 2e10  # multiplications from which a graph is called wide: elimination takes many seconds
REFINEMENTS = 4  # of a banded Fiedler vector, beyond what the value needs
TOLERANCE = 1e-9  # of a Lanczos residual; the eigenvalue itself is then usually good to 1e-14

# Lanczos attempts: (basis size, restarts). Most graphs are done with the first; hubs crowd the
# spectrum of the inverse, which takes a larger basis.
THOROUGHLY = ((20, 2), (80, 1000))
BRIEFLY = (80, 8)


class FiedlerPair(NamedTuple):
    """The slowest mode of a graph, see :func:`fiedler_pair`.

    Example:
        >>> import graphattn as ga
        >>> value, vector, residual = ga.spectral.fiedler_pair(ga.window_path_graph(9, window=2))
        >>> vector.shape, residual < 1e-12
        (torch.Size([9]), True)
    """

    value: float
    vector: Tensor  # [N], float64, norm 1
    residual: float  # ||L u - value u||


def fiedler_value(graph: TokenGraph, edge_weight: Tensor | None = None) -> float:
    r"""The second-smallest eigenvalue of the Laplacian, the algebraic connectivity.

    It is the rate of mixing: the slowest mode of the low-pass filter I - 2 eta L shrinks by
    omega_1 = 1 - 2 eta lambda_1 per step (Eq. 13).

    Computed in float64 on the CPU. The *relative* error is 1e-9 at worst and 1e-13 as a rule,
    however small the value and however uneven the weights: two groups of tokens that hang together
    by a weight of 1e-40 have a Fiedler value of that order, not of the order of rounding. Window
    graphs take inverse iteration with a banded factor, half a second per 100,000 tokens; where
    weights are very uneven, elimination that never subtracts
    (``spectral/laplacians/elimination.py``), some seconds; wide graphs, such as random ones, mix
    fast and take Lanczos.

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
    return slowest_pair(adjacency)[0] * scale


def fiedler_pair(graph: TokenGraph, edge_weight: Tensor | None = None) -> FiedlerPair:
    r"""The Fiedler value and its eigenvector: the signal that consensus forgets last.

    The signs of the vector split the tokens into two groups that exchange least; it is what a
    window graph carries slowest from one end of a sequence to the other.

    Computed on the CPU by the routes of :func:`fiedler_value`: all modes of a small graph, inverse
    iteration with a banded factor for windows, elimination or Lanczos otherwise.

    Source: Stabilizing Transformer Training Through Consensus, Section 2.3, footnote 2.

    Args:
        graph: N tokens; direction does not matter, see :func:`laplacian`.
        edge_weight: weights >= 0 in the order of ``graph.edge_index``, [E]; ones if None.

    Returns:
        ``(value, vector, residual)``: :func:`fiedler_value`; the vector u [N], float64, on the
        graph's device, of norm 1 and mean 0, its first entry that is not nearly zero positive; and
        ||L u - value u||, with L u from differences u_i - u_j. Where the value is a multiple
        eigenvalue, u is one of its vectors. Of a disconnected graph, the value and the residual are
        0.0, and u is one number on the tokens connected with token 0 and another on the rest.
        A graph of fewer than two tokens has no such mode: value 0.0, a vector of zeros.

    Raises:
        ValueError: as :func:`fiedler_value`.

    Example:
        >>> import graphattn as ga
        >>> value, vector, residual = ga.spectral.fiedler_pair(ga.window_path_graph(4, window=1))
        >>> round(value, 12), vector.sign()
        (0.585786437627, tensor([ 1.,  1., -1., -1.], dtype=torch.float64))
        >>> residual < 1e-14
        True
    """
    adjacency, scale = _scaled_adjacency(graph, edge_weight)
    num_tokens = adjacency.shape[0]
    if num_tokens < 2:
        none = torch.zeros(num_tokens, dtype=torch.float64, device=graph.device)
        return FiedlerPair(0.0, none, 0.0)
    num_components, component = connected_components(adjacency, directed=False)
    if num_components > 1:
        own = component == component[0]
        u = np.where(own, (~own).sum(), -float(own.sum()))
        vector = torch.from_numpy(u / np.linalg.norm(u)).to(graph.device)
        return FiedlerPair(0.0, vector, 0.0)
    value, u = slowest_pair(adjacency, refinements=REFINEMENTS)
    u = _centred(u)
    u /= np.linalg.norm(u)
    u *= np.sign(u[np.argmax(np.abs(u) > 1e-6 * np.abs(u).max())])
    pairs = scipy.sparse.triu(adjacency, k=1, format="coo")
    moved = by_pairs(pairs.row, pairs.col, pairs.data, num_tokens)(u)
    residual = float(np.linalg.norm(moved - value * u))
    return FiedlerPair(value * scale, torch.from_numpy(u).to(graph.device), residual * scale)


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
    found = lanczos_pair(lambda u: L @ u, num_tokens, "LA", (THOROUGHLY[0],))
    if found is None and elimination_order(adjacency).cost > WIDE:
        found = lanczos_pair(lambda u: L @ u, num_tokens, "LA", (BRIEFLY,))
    return float(_max_eigenvalue_from_above(L) if found is None else found[0]) * scale


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


def connected_adjacencies(
    graph: TokenGraph, edge_weight: Tensor | None
) -> tuple[list[scipy.sparse.csr_array], float]:
    """The adjacency matrix of every connected part, each scaled, and the one scale."""
    adjacency, scale = _scaled_adjacency(graph, edge_weight)
    if adjacency.shape[0] < 2:
        return [adjacency], scale
    component = connected_components(adjacency, directed=False)[1]
    order = np.argsort(component, kind="stable")
    ends = np.cumsum(np.bincount(component)).tolist()
    side_by_side = adjacency[order][:, order]
    parts = zip([0, *ends[:-1]], ends, strict=True)
    return [side_by_side[start:end, start:end] for start, end in parts], scale


def slowest_pair(adjacency: scipy.sparse.csr_array, refinements: int = 0) -> tuple[float, Array]:
    """The Fiedler value and vector of a connected graph of two tokens or more.

    Args:
        adjacency: its weights, the largest near 1, symmetric, without loops.
        refinements: see :func:`slowest_mode`.
    """
    if adjacency.shape[0] > DENSE:
        mode = slowest_mode(laplacian_of(adjacency), adjacency, refinements)
        if mode is not None:
            return mode.value, mode.vector
    order = elimination_order(adjacency)
    pair = _slowest_pair_of_wide_graph(adjacency) if order.cost > WIDE else None
    return _slowest_pair_by_elimination(adjacency, order) if pair is None else pair


def _slowest_pair_by_elimination(
    adjacency: scipy.sparse.csr_array, order: EliminationOrder
) -> tuple[float, Array]:
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
        values, vectors = np.linalg.eigh(inverse)
        return float(1 / values[-1]), vectors[:, -1]

    def pseudo_inverse(u: Array) -> Array:
        # Scaled to the order of 1, because Lanczos squares what it gets.
        return _centred(grounded.solve(_centred(u)) / size)

    found = lanczos_pair(pseudo_inverse, num_tokens, "LA", THOROUGHLY)
    if found is None:
        raise RuntimeError("the Fiedler value has not converged")
    largest, u = found
    return float(1 / (largest * size)), polished(pseudo_inverse, u)


def _slowest_pair_of_wide_graph(
    adjacency: scipy.sparse.csr_array,
) -> tuple[float, Array] | None:
    """The Fiedler pair without elimination by blocks; None where rounding would drown it."""
    num_tokens = adjacency.shape[0]
    L = laplacian_of(adjacency)
    bound = 2 * L.diagonal().max()  # on the largest eigenvalue

    def constants_moved_up(u: Array) -> Array:
        return L @ u + bound * u.mean()

    found = lanczos_pair(constants_moved_up, num_tokens, "SA", (BRIEFLY,))
    if found is None:
        # Not an expander, then: a fill-reducing factorisation has a chance, as on large grids.
        ground = int(L.diagonal().argmax())
        kept = np.delete(np.arange(num_tokens), ground)
        solve = positive_definite_solver(scipy.sparse.csc_matrix(L[kept][:, kept]))
        if solve is None:
            return None

        def pseudo_inverse(u: Array) -> Array:
            solution = np.zeros(num_tokens)
            solution[kept] = solve(_centred(u)[kept])
            return _centred(solution)

        inverse = lanczos_pair(pseudo_inverse, num_tokens, "LA", THOROUGHLY)
        if inverse is None:
            return None
        found = 1 / inverse[0], polished(pseudo_inverse, inverse[1])
    # Both ways make errors of the order of rounding next to `bound`.
    return (float(found[0]), found[1]) if found[0] > 1e-6 * bound else None


def polished(pseudo_inverse: Callable[[Array], Array], u: Array) -> Array:
    """Remove the rest of fast modes from a Lanczos vector by two steps of inverse iteration."""
    for _ in range(2):
        u = pseudo_inverse(u / np.linalg.norm(u))
    return u / np.linalg.norm(u)


def _max_eigenvalue_from_above(L: scipy.sparse.csr_array) -> float:
    """An upper bound within 1e-10, by factorising shift * I - L for ever smaller shifts.

    Windows have so many eigenvalues near the largest one that Lanczos on L itself would take as
    many steps as there are tokens. A factorisation without pivoting tells by the signs of its
    pivots whether the shift is still above all eigenvalues.
    """
    degree = L.diagonal().max()
    upper = 2.001 * degree  # twice the largest degree is never less than the eigenvalue ...
    roughly = lanczos_pair(lambda u: L @ u, L.shape[0], "LA", ((20, 20),), tolerance=1e-2)
    lower = degree if roughly is None else roughly[0]  # ... and a Rayleigh quotient never more
    shift = min(1.01 * lower, upper)
    inverse_of = _shifted_solvers(scipy.sparse.csr_array(-L))
    while upper - lower > 1e-10 * upper:
        inverse = inverse_of(shift)
        if inverse is None:
            lower, shift = shift, (shift + upper) / 2
            continue
        upper = shift
        largest = lanczos_pair(inverse, L.shape[0], "LA", ((20, 50),), tolerance=1e-3)
        if largest is not None:
            lower = max(lower, upper - 1 / largest[0])
        shift = lower + 0.002 * (upper - lower)
    return upper


def _shifted_solvers(
    matrix: scipy.sparse.csr_array,
) -> Callable[[float], Callable[[Array], Array] | None]:
    """shift -> (u -> (shift I + matrix)^-1 u), or None unless that is positive definite."""
    bands = BandedMatrix(matrix)
    if bands.stored <= STORED:
        return bands.solver
    identity = scipy.sparse.csc_matrix(scipy.sparse.identity(matrix.shape[0]))
    whole = scipy.sparse.csc_matrix(matrix)
    return lambda shift: positive_definite_solver(shift * identity + whole)


def positive_definite_solver(
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


def lanczos_pair(
    apply: Callable[[Array], Array],
    num_tokens: int,
    which: str,
    attempts: tuple[tuple[int, int], ...],
    tolerance: float = TOLERANCE,
) -> tuple[float, Array] | None:
    """An extreme eigenpair; `attempts` are (basis size, restarts); None if none converges."""
    operator = LinearOperator(
        (num_tokens, num_tokens), matvec=lambda u: apply(u.ravel()), dtype=np.float64
    )
    for basis, restarts in attempts:
        try:
            values, vectors = eigsh(
                operator,
                k=1,
                which=which,
                ncv=min(basis, num_tokens),
                maxiter=restarts,
                tol=tolerance,
                v0=_start_vector(num_tokens),
            )
        except ArpackNoConvergence:
            continue
        return float(values[0]), vectors[:, 0]
    return None


def _start_vector(num_tokens: int) -> Array:
    return np.random.default_rng(0).standard_normal(num_tokens)


def _centred(u: Array) -> Array:
    return u - u.mean(axis=0)

"""The smallest and the largest eigenvalues of a Laplacian: the Fiedler pair and lambda_max."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

# Tokens up to which a dense solver computes all eigenvalues. LAPACK's solver for a few eigenvalues
# fails ("Internal Error") if many are equal, as for blocks and complete graphs.
DENSE = 200
WIDE = 2e10  # multiplications above which a graph is wide, and elimination takes many seconds
REFINEMENTS = 4  # iterations for the Fiedler vector after the value is accurate
TOLERANCE = 1e-9  # relative residual of Lanczos; the eigenvalue is usually accurate to 1e-14 then

# Attempts of Lanczos: (basis size, restarts). The first one is enough for most graphs. Graphs with
# hubs need a larger basis, because many eigenvalues of the inverse are close together.
THOROUGHLY = ((20, 2), (80, 1000))
BRIEFLY = (80, 8)


class FiedlerPair(NamedTuple):
    """The slowest mode of a graph, from :func:`fiedler_pair`.

    Attributes:
        value: the Fiedler value.
        vector: its eigenvector, float64 [N], with norm 1.
        residual: the norm of L u - value u, where u is the vector.

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
    r"""Compute the second-smallest eigenvalue of the Laplacian, the algebraic connectivity.

    It is the rate of mixing: every step of the low-pass filter I - 2 eta L multiplies the slowest
    mode by omega_1 = 1 - 2 eta lambda_1 (Eq. 13).

    It is computed in float64 on the CPU. The *relative* error is at most 1e-9, and usually 1e-13,
    however small the value is, and however uneven the weights are. For example, if two groups of
    tokens are connected only by a weight of 1e-40, the result is of this order. For window graphs,
    it is computed by inverse iteration with a banded factor, which takes half a second per 100,000
    tokens. If weights are very uneven, it is computed by elimination without subtractions
    (``spectral/laplacians/elimination.py``), which takes some seconds. For wide graphs, such as
    random ones, it is computed by Lanczos, which converges fast because they mix fast.

    Source: Stabilizing Transformer Training Through Consensus, Sections 2.3 and 4.

    Args:
        graph: N tokens; direction does not matter, see :func:`laplacian`.
        edge_weight: weights >= 0 in the order of ``graph.edge_index``, [E]; ones if None.

    Returns:
        lambda_1 > 0; exactly 0.0 if the graph of edges with positive weight is disconnected, or
        N < 2.

    Raises:
        ValueError: if `graph` is not a TokenGraph or is bipartite (N != M), or `edge_weight` is not
            a tensor [E] of finite numbers >= 0, or the ratio of its largest and smallest weight is
            too large for float64.

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
    r"""Compute the Fiedler value and its eigenvector, the signal that consensus smooths last.

    The signs of the vector divide the tokens into two groups that exchange little. It is computed
    on the CPU by the methods of :func:`fiedler_value`.

    Source: Stabilizing Transformer Training Through Consensus, Section 2.3, footnote 2.

    Args:
        graph: N tokens; direction does not matter, see :func:`laplacian`.
        edge_weight: weights >= 0 in the order of ``graph.edge_index``, [E]; ones if None.

    Returns:
        ``(value, vector, residual)``. The value is that of :func:`fiedler_value`. The vector u is
        float64 [N] on the graph's device, with norm 1 and mean 0; its first entry that is not
        nearly zero is positive. If the eigenvalue is multiple, u is one of its eigenvectors. The
        residual is ||L u - value u||, where L u is computed from differences u_i - u_j. For a
        disconnected graph, the value and the residual are 0.0, and u has one value for all tokens
        that are connected with token 0, and another value for the rest. For fewer than two tokens,
        the value is 0.0 and the vector is zero.

    Raises:
        ValueError: in the same cases as :func:`fiedler_value`.

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
        with_first = component == component[0]
        u = np.where(with_first, (~with_first).sum(), -float(with_first.sum()))
        vector = torch.from_numpy(u / np.linalg.norm(u)).to(graph.device)
        return FiedlerPair(0.0, vector, 0.0)
    value, u = slowest_pair(adjacency, refinements=REFINEMENTS)
    u = _centred(u)
    u /= np.linalg.norm(u)
    u *= np.sign(u[np.argmax(np.abs(u) > 1e-6 * np.abs(u).max())])
    pairs = scipy.sparse.triu(adjacency, k=1, format="coo")
    L_u = by_pairs(pairs.row, pairs.col, pairs.data, num_tokens)(u)
    residual = float(np.linalg.norm(L_u - value * u))
    return FiedlerPair(value * scale, torch.from_numpy(u).to(graph.device), residual * scale)


def max_eigenvalue(graph: TokenGraph, edge_weight: Tensor | None = None) -> float:
    """Compute the largest eigenvalue of the Laplacian; 0.0 without edges.

    It is computed in float64 on the CPU, to a relative accuracy of 1e-9 or better. For large window
    graphs, so many eigenvalues are near the largest one that Lanczos does not converge. Then the
    result is an upper bound that is larger than the eigenvalue by at most 1e-10 of it, so a step
    size computed from it is safe.

    Source: Stabilizing Transformer Training Through Consensus, Section 2.2.

    Args:
        graph: N tokens; direction does not matter, see :func:`laplacian`.
        edge_weight: weights >= 0 in the order of ``graph.edge_index``, [E]; ones if None.

    Raises:
        ValueError: in the same cases as :func:`fiedler_value`.

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
    pair = lanczos_pair(lambda u: L @ u, num_tokens, "LA", (THOROUGHLY[0],))
    if pair is None and elimination_order(adjacency).cost > WIDE:
        pair = lanczos_pair(lambda u: L @ u, num_tokens, "LA", (BRIEFLY,))
    return float(_max_eigenvalue_from_above(L) if pair is None else pair[0]) * scale


def max_step_size(graph: TokenGraph, edge_weight: Tensor | None = None) -> float:
    r"""Compute the largest step without oscillation, eta = 1 / (2 lambda_max).

    It is infinity without edges. With this step or a smaller one, no mode of the low-pass filter
    I - 2 eta L changes sign. With up to twice this step, the energy still falls, but modes near
    lambda_max change sign in every step while they shrink. The edges have numbers as weights here.
    For the learned matrices of a layer, use ``SelfConsensus(step_size="auto")``.

    Source: Stabilizing Transformer Training Through Consensus, Section 2.2.

    Args:
        graph: N tokens; direction does not matter, see :func:`laplacian`.
        edge_weight: weights >= 0 in the order of ``graph.edge_index``, [E]; ones if None.

    Raises:
        ValueError: in the same cases as :func:`fiedler_value`.

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
    """Return W_sym divided by a power of two, so that its largest weight is near 1; and this."""
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
    """Return the scaled adjacency matrices of all connected parts, and their common scale."""
    adjacency, scale = _scaled_adjacency(graph, edge_weight)
    if adjacency.shape[0] < 2:
        return [adjacency], scale
    component = connected_components(adjacency, directed=False)[1]
    order = np.argsort(component, kind="stable")
    ends = np.cumsum(np.bincount(component)).tolist()
    by_component = adjacency[order][:, order]
    parts = zip([0, *ends[:-1]], ends, strict=True)
    return [by_component[start:end, start:end] for start, end in parts], scale


@contextmanager
def ratios_in_float64(adjacency: scipy.sparse.csr_array) -> Iterator[None]:
    """Raise a ValueError that names `edge_weight` where an elimination overflows."""
    try:
        with np.errstate(divide="raise", over="raise", invalid="raise"):
            yield
    except FloatingPointError as error:
        raise ValueError(
            "edge_weight must have weights whose ratios float64 can represent, got weights from "
            f"{adjacency.data.min():.1e} to 1 (relative to the largest)"
        ) from error


def slowest_pair(adjacency: scipy.sparse.csr_array, refinements: int = 0) -> tuple[float, Array]:
    """Compute the Fiedler value and vector of a connected graph with at least two tokens.

    Args:
        adjacency: its weights, symmetric, without self-loops, the largest of them near 1.
        refinements: the argument of :func:`slowest_mode`.
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
    """Compute the Fiedler pair from the largest eigenvalue of the Laplacian's pseudo-inverse."""
    num_tokens = adjacency.shape[0]
    with ratios_in_float64(adjacency):
        grounded = GroundedLaplacian.of(adjacency, order)
        if num_tokens <= DENSE:
            inverse = _centred(grounded.solve(_centred(np.eye(num_tokens))))
        else:
            start = _centred(start_vector(num_tokens))
            size = np.abs(grounded.solve(start)).max()
    if num_tokens <= DENSE:
        values, vectors = np.linalg.eigh(inverse)
        return float(1 / values[-1]), vectors[:, -1]

    def pseudo_inverse(u: Array) -> Array:
        # The result is scaled to the order of 1, because Lanczos squares it.
        return _centred(grounded.solve(_centred(u)) / size)

    pair = lanczos_pair(pseudo_inverse, num_tokens, "LA", THOROUGHLY)
    if pair is None:
        raise RuntimeError(
            "the Lanczos iteration for the Fiedler value has not converged: use a graph whose "
            "weights are more even"
        )
    largest, u = pair
    return float(1 / (largest * size)), polished(pseudo_inverse, u)


def _slowest_pair_of_wide_graph(adjacency: scipy.sparse.csr_array) -> tuple[float, Array] | None:
    """Compute the Fiedler pair without elimination; None if rounding errors would be too large."""
    num_tokens = adjacency.shape[0]
    L = laplacian_of(adjacency)
    bound = 2 * L.diagonal().max()  # an upper bound of the largest eigenvalue

    def with_shifted_constants(u: Array) -> Array:
        # The eigenvalue 0 of constants becomes `bound`, so that the Fiedler value is the smallest.
        return L @ u + bound * u.mean()

    pair = lanczos_pair(with_shifted_constants, num_tokens, "SA", (BRIEFLY,))
    if pair is None:
        # The graph is no expander. A fill-reducing factorisation may be fast, as for large grids.
        ground = int(L.diagonal().argmax())
        others = np.delete(np.arange(num_tokens), ground)
        solve = positive_definite_solver(scipy.sparse.csc_matrix(L[others][:, others]))
        if solve is None:
            return None

        def pseudo_inverse(u: Array) -> Array:
            solution = np.zeros(num_tokens)
            solution[others] = solve(_centred(u)[others])
            return _centred(solution)

        inverse = lanczos_pair(pseudo_inverse, num_tokens, "LA", THOROUGHLY)
        if inverse is None:
            return None
        pair = 1 / inverse[0], polished(pseudo_inverse, inverse[1])
    # Both methods have absolute errors of about one rounding of `bound`.
    return (float(pair[0]), pair[1]) if pair[0] > 1e-6 * bound else None


def polished(pseudo_inverse: Callable[[Array], Array], u: Array) -> Array:
    """Remove fast modes that are left in a Lanczos vector, by two steps of inverse iteration."""
    for _ in range(2):
        u = pseudo_inverse(u / np.linalg.norm(u))
    return u / np.linalg.norm(u)


def _max_eigenvalue_from_above(L: scipy.sparse.csr_array) -> float:
    """Compute an upper bound within 1e-10, by factorising shift * I - L for decreasing shifts.

    Windows have so many eigenvalues near the largest one that Lanczos with L would take as many
    steps as there are tokens. The signs of the pivots of a factorisation without pivoting say
    whether the shift is larger than all eigenvalues.
    """
    degree = L.diagonal().max()
    upper = 2.001 * degree  # The eigenvalue is at most twice the largest degree,
    roughly = lanczos_pair(lambda u: L @ u, L.shape[0], "LA", ((20, 20),), tolerance=1e-2)
    lower = degree if roughly is None else roughly[0]  # and at least any Rayleigh quotient.
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
    """Return a function of a shift that makes a solver for (shift I + matrix).

    The function returns u -> (shift I + matrix)^-1 u, or None unless the matrix is positive
    definite.
    """
    bands = BandedMatrix(matrix)
    if bands.stored <= STORED:
        return bands.solver
    identity = scipy.sparse.csc_matrix(scipy.sparse.identity(matrix.shape[0]))
    whole = scipy.sparse.csc_matrix(matrix)
    return lambda shift: positive_definite_solver(shift * identity + whole)


def positive_definite_solver(matrix: scipy.sparse.csc_matrix) -> Callable[[Array], Array] | None:
    """Return u -> matrix^-1 u, or None unless the symmetric `matrix` is positive definite."""
    try:
        factor = splu(
            matrix,
            permc_spec="MMD_AT_PLUS_A",
            diag_pivot_thresh=0.0,
            options={"SymmetricMode": True},
        )
    except RuntimeError:  # The matrix is exactly singular.
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
    """Compute an extreme eigenpair by Lanczos; None if no attempt converges.

    Args:
        apply: multiplies a vector by the matrix.
        num_tokens: the size of the matrix.
        which: "LA" for the largest eigenvalue, "SA" for the smallest.
        attempts: pairs (basis size, restarts).
        tolerance: the relative residual to reach.
    """
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
                v0=start_vector(num_tokens),
            )
        except ArpackNoConvergence:
            continue
        return float(values[0]), vectors[:, 0]
    return None


def start_vector(num_tokens: int) -> Array:
    return np.random.default_rng(0).standard_normal(num_tokens)


def _centred(u: Array) -> Array:
    return u - u.mean(axis=0)

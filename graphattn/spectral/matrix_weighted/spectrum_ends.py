"""The largest eigenvalue of matrix-weighted Laplacians, and the smallest without constant modes.

Lanczos and LOBPCG find a Rayleigh quotient, which bounds an eigenvalue from one side. A count of
eigenvalues bounds it from the other side (:meth:`BlockLaplacian.count`). So the result is a proven
interval, not an estimate. Of several heads, only the extreme one is solved; for the others, a count
is enough.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import scipy.sparse
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh, lobpcg, splu

from graphattn.spectral.eigenvalues import slowest_pair
from graphattn.spectral.matrix_weighted.block_laplacian import Array, BlockLaplacian

DENSE = 400  # rows up to which a dense solver computes all eigenvalues
WITHIN = 1e-10  # width of an interval, relative to the larger of 1 and the eigenvalue
TOGETHER = 8  # the most vectors that LOBPCG iterates
ATTEMPTS = ((1e-7, 40), (1e-9, 400))  # residuals and iterations of LOBPCG
NUDGES = (0.5, 0.6, 0.75, 1.0)  # shares of the width at which a count is tried


class End(NamedTuple):
    """A computed smallest or largest eigenvalue, with its error."""

    value: float
    error: float  # a bound if `enclosed`; otherwise the distance to some eigenvalue (the residual)
    enclosed: bool


def largest_eigenvalue(heads: Sequence[BlockLaplacian]) -> End:
    """Compute the largest eigenvalue of all heads."""
    if not heads or heads[0].size == 0:
        return End(0.0, 0.0, True)
    if heads[0].size <= DENSE:
        value = max(float(head.dense_eigenvalues()[-1]) for head in heads)
        return End(max(value, 0.0), _rounding(heads), True)
    pairs = [_by_lanczos(head) for head in heads]
    value, residual = max(pairs)
    if not all(head.countable for head in heads):
        return End(value, residual, False)
    width = upper = WITHIN * max(1.0, value)
    for head in heads:

        def below(shift: float, head: BlockLaplacian = head) -> bool | None:
            count = head.count(shift, -1)
            return None if count is None else count == 0

        if not _certain(below, value, width):
            # Lanczos missed the largest eigenvalue, which is very unlikely with a random start.
            low, high = _bisect(below, True, value, head.bound, width)
            value, upper = max(value, low), max(upper, high - low)
    return End(value, upper, True)


def smallest_eigenvalue(heads: Sequence[BlockLaplacian]) -> End:
    """Compute the smallest eigenvalue of all heads without constant modes; 0 if disconnected."""
    if not heads or heads[0].num_tokens < 2:
        return End(np.inf, 0.0, True)
    if not all(head.connected for head in heads):
        return End(0.0, 0.0, True)
    constants = heads[0].features
    if heads[0].size <= max(DENSE, 6 * constants):
        value = min(float(head.dense_eigenvalues()[constants]) for head in heads)
        return End(max(value, 0.0), _rounding(heads), True)
    starts = [_smooth(head) for head in heads]
    if not all(head.countable for head in heads):
        pairs = [
            _by_lobpcg(head, u, *ATTEMPTS[0]) for head, (_, u) in zip(heads, starts, strict=True)
        ]
        h = pairs.index(min(pairs))
        value, residual = min(pairs[h], _by_lobpcg(heads[h], starts[h][1], *ATTEMPTS[1]))
        return End(value, residual, False)
    value, width = np.inf, WITHIN
    for h in np.argsort([guess for guess, _ in starts]):
        head = heads[h]

        def none_below(shift: float, head: BlockLaplacian = head) -> bool | None:
            count = head.count(shift, 1) if shift > 0 else constants
            return None if count is None else count == constants

        if value < np.inf and _certain(none_below, value, -width):
            continue
        for attempt in ATTEMPTS:
            estimate, _ = _by_lobpcg(head, starts[h][1], *attempt)
            if certain := _certain(none_below, estimate, -WITHIN):
                break
        if not certain:
            low, estimate = _bisect(none_below, False, 0.0, estimate, WITHIN)
            width = max(width, estimate - low)
        value = min(value, estimate)
    return End(value, min(width, value), True)


def _certain(claim: Callable[[float], bool | None], value: float, width: float) -> bool:
    """Whether the claim holds at a distance of at most `width` from the value."""
    for share in NUDGES:
        holds = claim(value + share * width)
        if holds is not None:  # It is None if an eigenvalue is too near the shift.
            return holds
    return False


def _bisect(
    claim: Callable[[float], bool | None], upwards: bool, low: float, high: float, width: float
) -> tuple[float, float]:
    """Find two numbers at most `width` apart between which a claim begins (or stops) to hold."""
    while high - low > width:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if (claim(middle) is True) == upwards:
            high = middle
        else:
            low = middle
    return low, high


def _rounding(heads: Sequence[BlockLaplacian]) -> float:
    return float(np.finfo(np.float64).eps * heads[0].size * max(head.bound for head in heads))


def _by_lanczos(head: BlockLaplacian) -> tuple[float, float]:
    """Compute a lower bound of the largest eigenvalue, and its residual."""
    start = np.random.default_rng(0).standard_normal(head.size)
    for tolerance, restarts in ((1e-8, 100), (1e-4, 100)):
        try:
            _, vectors = eigsh(
                head.operator,
                k=1,
                which="LA",
                tol=tolerance,
                ncv=min(40, head.size),
                maxiter=restarts,
                v0=start,
            )
        except ArpackNoConvergence:
            continue
        return _rayleigh(head, vectors[:, 0])
    return _rayleigh(head, start)


def _rayleigh(head: BlockLaplacian, u: Array) -> tuple[float, float]:
    """Compute the Rayleigh quotient of a vector and the norm of its residual."""
    u = u / np.linalg.norm(u)
    product = head.apply(u)
    value = float(u @ product)
    return value, float(np.linalg.norm(product - value * u))


def _smooth(head: BlockLaplacian) -> tuple[float, Array]:
    """Compute a good guess of the slowest modes, and its value.

    The guesses are the slowest mode of the graph with scalar weights, times vectors of features.
    """
    D = head.features
    adjacency = head.adjacency
    f = slowest_pair(adjacency / adjacency.data.max())[1]
    f = f - f.mean()
    f /= np.linalg.norm(f)
    modes = np.kron(f[:, None], np.eye(D))  # [N D, D]
    values, mix = np.linalg.eigh(modes.T @ head.apply(modes))
    few = max(1, min(TOGETHER, D, (head.size - D) // 5))  # LOBPCG needs five times as many rows
    return float(values[0]), modes @ mix[:, :few]


def _by_lobpcg(
    head: BlockLaplacian, start: Array, tolerance: float, iterations: int
) -> tuple[float, float]:
    """Compute an upper bound of the smallest eigenvalue without constants, and its residual."""
    N, D = head.num_tokens, head.features
    constants = np.kron(np.full((N, 1), N**-0.5), np.eye(D))
    shape = head.size, head.size
    solve = _bare_solver(head)
    inverse = LinearOperator(shape, matvec=solve, matmat=solve, dtype=np.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It warns if it stops early, but the residual says so.
        _, vectors = lobpcg(
            head.operator,
            start,
            M=inverse,
            Y=constants,
            tol=tolerance,
            maxiter=iterations,
            largest=False,
        )
    vectors -= constants @ (constants.T @ vectors)
    return min(_rayleigh(head, u) for u in vectors.T)


def _bare_solver(head: BlockLaplacian) -> Callable[[Array], Array]:
    """Return the pseudo-inverse of the Laplacian with scalar weights, as a preconditioner of M."""
    adjacency = head.adjacency
    L = scipy.sparse.diags_array(np.asarray(adjacency.sum(axis=1)).ravel()) - adjacency
    factor = splu(scipy.sparse.csc_matrix(L.tocsr()[:-1, :-1]))  # one token is fixed at zero

    def solve(u: Array) -> Array:
        right = u.reshape(head.num_tokens, -1)
        right = right - right.mean(axis=0)
        out = np.zeros_like(right)
        out[:-1] = factor.solve(right[:-1])
        return (out - out.mean(axis=0)).reshape(u.shape)

    return solve

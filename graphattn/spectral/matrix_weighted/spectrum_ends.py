"""The largest eigenvalue, and the smallest beyond constants, of matrix-weighted Laplacians.

What Lanczos and LOBPCG find is a Rayleigh quotient, which lies on one side of the truth; a count of
eigenvalues bounds the other (:meth:`BlockLaplacian.count`). Together they are an enclosure, not an
estimate. Of several heads only the extreme one is solved: for the others a count is enough.
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

DENSE = 400  # rows of a matrix up to which all its eigenvalues are taken
WITHIN = 1e-10  # width of an enclosure, next to the larger of 1 and the eigenvalue
TOGETHER = 8  # vectors that LOBPCG iterates
ATTEMPTS = ((1e-7, 40), (1e-9, 400))  # residuals and iterations of LOBPCG
NUDGES = (0.5, 0.6, 0.75, 1.0)  # shares of the width where a count is tried


class End(NamedTuple):
    """An eigenvalue at an end of a spectrum, and how far it may be from the true one."""

    value: float
    error: float  # a bound if `enclosed`; else the residual: some eigenvalue lies that near
    enclosed: bool


def largest_eigenvalue(heads: Sequence[BlockLaplacian]) -> End:
    """The largest eigenvalue of all heads."""
    if not heads or heads[0].size == 0:
        return End(0.0, 0.0, True)
    if heads[0].size <= DENSE:
        value = max(float(head.dense_eigenvalues()[-1]) for head in heads)
        return End(max(value, 0.0), _rounding(heads), True)
    found = [_by_lanczos(head) for head in heads]
    value, residual = max(found)
    if not all(head.countable for head in heads):
        return End(value, residual, False)
    width = upper = WITHIN * max(1.0, value)
    for head in heads:

        def below(shift: float, head: BlockLaplacian = head) -> bool | None:
            count = head.count(shift, -1)
            return None if count is None else count == 0

        if not _certain(below, value, width):
            # Lanczos missed the top, which its random start makes very unlikely.
            low, high = _bisect(below, True, value, head.bound, width)
            value, upper = max(value, low), max(upper, high - low)
    return End(value, upper, True)


def smallest_eigenvalue(heads: Sequence[BlockLaplacian]) -> End:
    """The smallest eigenvalue of all heads beyond those of constants; 0 if a graph is in parts."""
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
        found = [
            _by_lobpcg(head, u, *ATTEMPTS[0]) for head, (_, u) in zip(heads, starts, strict=True)
        ]
        h = found.index(min(found))
        value, residual = min(found[h], _by_lobpcg(heads[h], starts[h][1], *ATTEMPTS[1]))
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
            own, _ = _by_lobpcg(head, starts[h][1], *attempt)
            if certain := _certain(none_below, own, -WITHIN):
                break
        if not certain:
            low, own = _bisect(none_below, False, 0.0, own, WITHIN)
            width = max(width, own - low)
        value = min(value, own)
    return End(value, min(width, value), True)


def _certain(claim: Callable[[float], bool | None], value: float, width: float) -> bool:
    """Whether the claim holds at a distance of at most `width` from the value."""
    for share in NUDGES:
        answer = claim(value + share * width)
        if answer is not None:  # None: an eigenvalue too near the shift
            return answer
    return False


def _bisect(
    claim: Callable[[float], bool | None], upwards: bool, low: float, high: float, width: float
) -> tuple[float, float]:
    """Two numbers at most `width` apart, between which a claim starts to hold (or ends to)."""
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
    """The largest eigenvalue from below, and its residual."""
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
    """The Rayleigh quotient of a vector and the norm of its residual."""
    u = u / np.linalg.norm(u)
    moved = head.apply(u)
    value = float(u @ moved)
    return value, float(np.linalg.norm(moved - value * u))


def _smooth(head: BlockLaplacian) -> tuple[float, Array]:
    """The slowest modes among multiples of the bare graph's: a good guess and its value."""
    D = head.features
    adjacency = head.adjacency
    f = slowest_pair(adjacency / adjacency.data.max())[1]
    f = f - f.mean()
    f /= np.linalg.norm(f)
    modes = np.kron(f[:, None], np.eye(D))  # [N D, D]
    values, mix = np.linalg.eigh(modes.T @ head.apply(modes))
    few = max(1, min(TOGETHER, D, (head.size - D) // 5))  # LOBPCG wants five times as many rows
    return float(values[0]), modes @ mix[:, :few]


def _by_lobpcg(
    head: BlockLaplacian, start: Array, tolerance: float, iterations: int
) -> tuple[float, float]:
    """The smallest eigenvalue beyond constants from above, and its residual."""
    N, D = head.num_tokens, head.features
    constants = np.kron(np.full((N, 1), N**-0.5), np.eye(D))
    shape = head.size, head.size
    solve = _bare_solver(head)
    inverse = LinearOperator(shape, matvec=solve, matmat=solve, dtype=np.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it stopped early: the residual tells
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
    """The pseudo-inverse of the bare graph's Laplacian, per feature: M is never far from it."""
    adjacency = head.adjacency
    L = scipy.sparse.diags_array(np.asarray(adjacency.sum(axis=1)).ravel()) - adjacency
    factor = splu(scipy.sparse.csc_matrix(L.tocsr()[:-1, :-1]))  # one token held at zero

    def solve(u: Array) -> Array:
        right = u.reshape(head.num_tokens, -1)
        right = right - right.mean(axis=0)
        out = np.zeros_like(right)
        out[:-1] = factor.solve(right[:-1])
        return (out - out.mean(axis=0)).reshape(u.shape)

    return solve

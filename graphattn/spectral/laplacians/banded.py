"""Banded Cholesky factorisation of Laplacians, which is fast for window graphs.

A window of w tokens has a Laplacian of bandwidth w, so a factorisation takes N w^2 multiplications.
Rounding errors of the factor do no harm, because it is only used for corrections. The residual that
is corrected is computed from differences u_i - u_j, without cancellation (see
:func:`slowest_mode`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import scipy.sparse
from numpy.typing import NDArray
from scipy.linalg import cho_solve_banded, cholesky_banded
from scipy.sparse.csgraph import reverse_cuthill_mckee

Array = NDArray[np.float64]

STORED = 2e7  # the most numbers in a factor, tokens x bandwidth, which take 160 MB
# The smallest ratio of weights. Smaller ones may be lost in the rounding of the factor.
UNEVEN = 1e-9
BLOCK = 4  # vectors that are iterated together
STEPS = 40  # the most iterations; a window needs about ten
PRECISION = 1e-11  # the bound of the relative error; the actual error is much smaller


class Mode(NamedTuple):
    """An approximate eigenpair of a Laplacian, with its residual."""

    value: float
    vector: Array  # [N], norm 1
    residual: float  # ||L u - value u||


class BandedMatrix:
    """A symmetric sparse matrix [N, N] with tokens in an order in which its bandwidth is small."""

    def __init__(self, matrix: scipy.sparse.csr_array) -> None:
        num_tokens = matrix.shape[0]
        rows = np.repeat(np.arange(num_tokens), np.diff(matrix.indptr))
        natural = np.arange(num_tokens)
        tokens = reverse_cuthill_mckee(scipy.sparse.csr_matrix(matrix), symmetric_mode=True)
        place = np.empty_like(natural)
        place[tokens] = natural
        unsorted_width, sorted_width = (
            int(np.abs(p[rows] - p[matrix.indices]).max(initial=0)) for p in (natural, place)
        )
        if unsorted_width <= sorted_width:
            tokens, place = natural, natural
        self.tokens, self.width = tokens, min(unsorted_width, sorted_width)
        self.num_tokens = num_tokens
        row, column = place[rows], place[matrix.indices]
        lower = row >= column
        self._place = row[lower] - column[lower], column[lower]
        self._numbers = matrix.data[lower]

    @property
    def stored(self) -> float:
        """The number of entries of the factor."""
        return float(self.num_tokens) * (self.width + 1)

    def solver(self, shift: float = 0.0, grounded: bool = False) -> Callable[[Array], Array] | None:
        """Return u -> (shift I + matrix)^-1 u for u [N] or [N, k].

        The result is None unless the matrix is positive definite.

        Args:
            shift: a number that is added to the diagonal.
            grounded: whether one token is fixed at zero, so that a Laplacian is invertible.
        """
        bands = np.zeros((self.width + 1, self.num_tokens))
        bands[self._place] = self._numbers
        bands[0] += shift
        if grounded:  # The last token gets a row and a column of the identity matrix.
            bands[0, -1] = 1
            reach = np.arange(1, min(self.width + 1, self.num_tokens))
            bands[reach, self.num_tokens - 1 - reach] = 0
        try:
            factor = cholesky_banded(bands, overwrite_ab=True, lower=True, check_finite=False)
        except np.linalg.LinAlgError:
            return None

        def solve(u: Array) -> Array:
            right = u[self.tokens]
            if grounded:
                right[-1] = 0
            solution = np.empty_like(right)
            solution[self.tokens] = cho_solve_banded((factor, True), right, check_finite=False)
            return solution

        return solve


def slowest_mode(
    L: scipy.sparse.csr_array, adjacency: scipy.sparse.csr_array, refinements: int = 0
) -> Mode | None:
    r"""Compute the Fiedler value and vector of a connected graph with a small bandwidth.

    The method is inverse iteration with a few vectors at once, in the form of a correction:
    u - L^-1 (L u - lambda u). The residual is computed from differences, L u = B^T W B u. The value
    is the Rayleigh quotient, whose error is the square of the vector's error. It is accepted if
    r^T L^-1 r / (value * (1 - value / next)) is below 1e-11, where `next` is the next eigenvalue
    that is not near this one. This bounds the relative error as Temple's ||r||^2 / (gap * value)
    does, because (lambda_k - value)^2 / lambda_k >= (lambda_k - value) (1 - value / next) for all
    other modes. But it hardly sees the rounding of u, which is in fast modes, where Temple's bound
    exceeds 1e-11 from a million tokens on. The result is None if the bandwidth is too large, the
    weights are too uneven, or the iteration does not converge.

    Args:
        L: the Laplacian [N, N].
        adjacency: its weights >= 0, symmetric, without self-loops.
        refinements: further iterations after the value is accepted, which make the vector more
            accurate; each multiplies its error by about value / (fifth value).
    """
    bands = BandedMatrix(L)
    if bands.stored > STORED or adjacency.data.min() < UNEVEN * adjacency.data.max():
        return None
    solve = bands.solver(grounded=True)
    if solve is None:
        return None
    num_tokens = bands.num_tokens
    differences, weight = _incidence(adjacency)
    back, weight = differences.T.tocsr(), weight[:, None]
    u = np.random.default_rng(0).standard_normal((num_tokens, min(BLOCK, num_tokens - 1)))
    for _ in range(STEPS):
        u, _ = np.linalg.qr(u - u.mean(axis=0))
        L_u = back @ (weight * (differences @ u))
        value, mix = np.linalg.eigh(u.T @ L_u)
        u, residual = u @ mix, L_u @ mix - value * (u @ mix)
        # Values near the first one are treated together; the gap is between them and the next.
        near = int(np.searchsorted(value, 1.5 * value[0]))
        correction = solve(residual)
        correction -= correction.mean(axis=0)
        size = np.abs((residual * correction)[:, :near].sum(axis=0)).sum()
        if near == len(value) or size > PRECISION * value[0] * (1 - value[near - 1] / value[near]):
            u = u - correction
        elif refinements > 0:
            refinements -= 1
            u = u - correction
        else:
            first = u[:, 0]
            quotient = (weight[:, 0] * (differences @ first) ** 2).sum() / (first @ first)
            return Mode(float(quotient), first, float(np.linalg.norm(residual[:, 0])))
    return None


def _incidence(adjacency: scipy.sparse.csr_array) -> tuple[scipy.sparse.csr_array, Array]:
    """Return B [pairs, N], with 1 and -1 for the two tokens of a pair, and the pairs' weights."""
    upper = scipy.sparse.triu(adjacency, k=1, format="coo")
    pair = np.arange(upper.nnz)
    ends = np.concatenate([upper.row, upper.col])
    signs = np.repeat([1.0, -1.0], upper.nnz)
    shape = (upper.nnz, adjacency.shape[0])
    B = scipy.sparse.coo_array((signs, (np.concatenate([pair, pair]), ends)), shape=shape)
    return scipy.sparse.csr_array(B), upper.data

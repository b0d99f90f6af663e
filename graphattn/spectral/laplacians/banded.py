"""Banded Cholesky: what window graphs allow, and most others do not.

A window of w tokens has a Laplacian of bandwidth w, so a factorisation takes N w^2 multiplications.
Rounding there does no harm: what is solved is only a correction, and the residual it corrects is
taken from differences u_i - u_j, which lose nothing (see :func:`slowest_mode`).
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

STORED = 2e7  # numbers of a factor, tokens x bandwidth: 160 megabytes
UNEVEN = 1e-9  # smallest weight next to the largest; beyond, the factor may miss weak links
BLOCK = 4  # vectors iterated together
STEPS = 40  # of the iteration; a window takes about ten
PRECISION = 1e-11  # of the eigenvalue, relative: what Temple allows; the error is smaller by far


class Mode(NamedTuple):
    """An eigenpair of a Laplacian, and how far it is from one."""

    value: float
    vector: Array  # [N], norm 1
    residual: float  # ||L u - value u||


class BandedMatrix:
    """A symmetric sparse matrix [N, N] with its tokens in an order that keeps it narrow."""

    def __init__(self, matrix: scipy.sparse.csr_array) -> None:
        num_tokens = matrix.shape[0]
        rows = np.repeat(np.arange(num_tokens), np.diff(matrix.indptr))
        natural = np.arange(num_tokens)
        tokens = reverse_cuthill_mckee(scipy.sparse.csr_matrix(matrix), symmetric_mode=True)
        place = np.empty_like(natural)
        place[tokens] = natural
        as_is, sorted_ = (
            int(np.abs(p[rows] - p[matrix.indices]).max(initial=0)) for p in (natural, place)
        )
        if as_is <= sorted_:
            tokens, place = natural, natural
        self.tokens, self.width = tokens, min(as_is, sorted_)
        self.num_tokens = num_tokens
        row, column = place[rows], place[matrix.indices]
        lower = row >= column
        self._place = row[lower] - column[lower], column[lower]
        self._numbers = matrix.data[lower]

    @property
    def stored(self) -> float:
        """How many numbers the factor has."""
        return float(self.num_tokens) * (self.width + 1)

    def solver(self, shift: float = 0.0, grounded: bool = False) -> Callable[[Array], Array] | None:
        """u -> (shift I + matrix)^-1 u, [N] or [N, k]; None unless it is positive definite.

        Args:
            shift: what to add to the diagonal.
            grounded: hold one token at zero, as a Laplacian needs it to be invertible.
        """
        bands = np.zeros((self.width + 1, self.num_tokens))
        bands[self._place] = self._numbers
        bands[0] += shift
        if grounded:  # the last in the order: its row and column are nobody else's then
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
    r"""The Fiedler value and vector of a connected graph; None where this is not the way.

    Inverse iteration on a few vectors at once, written as a correction: u - L^-1 (L u - lambda u),
    with the residual from differences, L u = B^T W B u. The value is their Rayleigh quotient, which
    has the square of the vector's error. It is accepted when ||r||^2 / (gap * value) is below
    1e-11 (Temple's bound on the relative error), with the gap to the next vectors' values.

    Args:
        L: the Laplacian [N, N].
        adjacency: its weights >= 0, symmetric, without loops.
        refinements: iterations after the value is accepted, for more digits of the vector; each
            leaves a share of about value / (fifth value) of its error.
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
        moved = back @ (weight * (differences @ u))
        value, mix = np.linalg.eigh(u.T @ moved)
        u, residual = u @ mix, moved @ mix - value * (u @ mix)
        # Values that crowd around the first share its error; the gap is to those beyond them.
        crowd = int(np.searchsorted(value, 1.5 * value[0]))
        size = np.square(residual[:, :crowd]).sum()
        if crowd < len(value) and size <= PRECISION * value[0] * (value[crowd] - value[crowd - 1]):
            if refinements > 0:
                refinements -= 1
                u = u - solve(residual)
                continue
            first = u[:, 0]
            quotient = (weight[:, 0] * (differences @ first) ** 2).sum() / (first @ first)
            return Mode(float(quotient), first, float(np.linalg.norm(residual[:, 0])))
        u = u - solve(residual)
    return None


def _incidence(adjacency: scipy.sparse.csr_array) -> tuple[scipy.sparse.csr_array, Array]:
    """B [pairs, N], 1 at one end of a pair and -1 at the other, and the pairs' weights."""
    upper = scipy.sparse.triu(adjacency, k=1, format="coo")
    pair = np.arange(upper.nnz)
    ends = np.concatenate([upper.row, upper.col])
    signs = np.repeat([1.0, -1.0], upper.nnz)
    shape = (upper.nnz, adjacency.shape[0])
    B = scipy.sparse.coo_array((signs, (np.concatenate([pair, pair]), ends)), shape=shape)
    return scipy.sparse.csr_array(B), upper.data

"""Laplacians with a matrix on every edge, R = alpha I + rows^T rows: products, and counts.

No matrix of size N D x N D is formed. The cost of a product is proportional to the numbers that the
edges have. If the graph is a window, the matrix is block banded, and elimination can count the
eigenvalues above or below a shift (Sylvester's law of inertia). A count bounds an eigenvalue from
one side, and a Rayleigh quotient from the other side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property

import numpy as np
import scipy.sparse
from numpy.typing import NDArray
from scipy.linalg import cholesky, solve_triangular
from scipy.sparse.csgraph import connected_components, reverse_cuthill_mckee
from scipy.sparse.linalg import LinearOperator

Array = NDArray[np.float64]
Tokens = NDArray[np.integer]

COUNTABLE = 4e9  # the most multiplications for a count, which take about half a second
BLOCK = 64  # the fewest rows of a block, because small blocks need more calls


class BlockLaplacian:
    r"""The matrix M = S G^T R G S of one head, where G takes differences u_i - u_j of all edges.

    For update "energy", I - M is one step of consensus: R_e counts once in each direction, and S is
    the diagonal matrix of the square roots of the step sizes (which are equal for connected
    tokens).

    Args:
        source, target: the tokens of the edges, [E], without self-loops.
        alpha: alpha of every edge, [E].
        rows: rows of every edge, [E, r, D], so that R_e = alpha_e I + rows_e^T rows_e.
        step: the step size of every token, [N].
    """

    def __init__(
        self, source: Tokens, target: Tokens, alpha: Array, rows: Array, step: Array
    ) -> None:
        self.source, self.target, self.alpha, self.rows = source, target, alpha, rows
        self.root = np.sqrt(step)
        self.num_tokens, self.features = len(step), rows.shape[2]
        self.size = self.num_tokens * self.features

    def apply(self, u: Array) -> Array:
        """Compute M u for u [N D] or [N D, k]."""
        wide = u.shape[1] if u.ndim == 2 else 1
        columns = u.reshape(self.num_tokens, self.features * wide)
        d = self._differences @ (self.root[:, None] * columns)
        d = d.reshape(len(self.source), self.features, wide)
        force = self.alpha[:, None, None] * d
        force += self.rows.transpose(0, 2, 1) @ (self.rows @ d)
        out = self._differences.T @ force.reshape(len(self.source), self.features * wide)
        return (self.root[:, None] * out).reshape(u.shape)

    @cached_property
    def _differences(self) -> scipy.sparse.csr_array:
        edges = len(self.source)
        edge = np.arange(edges)
        numbers = np.repeat([1.0, -1.0], edges)
        places = np.concatenate([edge, edge]), np.concatenate([self.target, self.source])
        shape = edges, self.num_tokens
        return scipy.sparse.csr_array(scipy.sparse.coo_array((numbers, places), shape=shape))

    @cached_property
    def operator(self) -> LinearOperator:
        shape = self.size, self.size
        return LinearOperator(shape, matvec=self.apply, matmat=self.apply, dtype=np.float64)

    @cached_property
    def adjacency(self) -> scipy.sparse.csr_array:
        """The graph with one weight per pair of tokens, the mean eigenvalue of R, [N, N]."""
        mean = self.alpha + np.square(self.rows).sum(axis=(1, 2)) / self.features
        mean = mean * self.root[self.source] * self.root[self.target]
        shape = self.num_tokens, self.num_tokens
        half = scipy.sparse.coo_array((mean, (self.source, self.target)), shape=shape).tocsr()
        adjacency = scipy.sparse.csr_array(half + half.T)
        adjacency.eliminate_zeros()
        return adjacency

    @cached_property
    def connected(self) -> bool:
        if self.num_tokens == 0:
            return True
        return bool(connected_components(self.adjacency, directed=False)[0] == 1)

    @cached_property
    def bound(self) -> float:
        """An upper bound of the largest eigenvalue, by Gershgorin's theorem for blocks."""
        norm = self.alpha + np.square(self.rows).sum(axis=(1, 2))
        degree = np.bincount(self.source, norm, self.num_tokens)
        degree += np.bincount(self.target, norm, self.num_tokens)
        return float(2 * (self.root**2 * degree).max(initial=0.0))

    def dense_eigenvalues(self) -> Array:
        """Compute all eigenvalues by a dense solver."""
        values: Array = np.asarray(np.linalg.eigvalsh(self.apply(np.eye(self.size))), np.float64)
        return values

    # Counting the eigenvalues above or below a shift.

    @cached_property
    def _order(self) -> tuple[Tokens, int]:
        """The place of every token in an order with a small bandwidth, and the tokens per block."""
        natural = np.arange(self.num_tokens)
        order = reverse_cuthill_mckee(scipy.sparse.csr_matrix(self.adjacency), symmetric_mode=True)
        sorted_ = np.empty_like(natural)
        sorted_[order] = natural
        reaches = [
            int(np.abs(p[self.source] - p[self.target]).max(initial=1)) for p in (natural, sorted_)
        ]
        place = natural if reaches[0] <= reaches[1] else sorted_
        return place, max(min(reaches), -(-BLOCK // self.features))

    @property
    def countable(self) -> bool:
        """Whether eigenvalues can be counted in a reasonable time."""
        tokens = self._order[1]
        starts = np.arange(0, self.num_tokens, tokens)
        rows = self.features * np.minimum(tokens, self.num_tokens - starts).astype(np.float64)
        # The multiplications for the factors, and for updating the next block.
        cost = (rows**3 / 3).sum()
        cost += (rows[:-1] ** 2 * rows[1:] + 2 * rows[:-1] * rows[1:] ** 2).sum()
        return bool(cost <= COUNTABLE)

    def _blocks(self) -> Iterator[tuple[Array, Array]]:
        """Yield the blocks of the block tridiagonal M: (diagonal block, block to its left)."""
        place, tokens = self._order
        D = self.features
        source, target = place[self.source], place[self.target]
        first, second = np.minimum(source, target), np.maximum(source, target)
        by_first, by_second = (np.argsort(end, kind="stable") for end in (first, second))
        root = np.empty(self.num_tokens)
        root[place] = self.root
        before = 0
        for start in range(0, self.num_tokens, tokens):
            stop = min(start + tokens, self.num_tokens)
            here = np.zeros((stop - start, D, stop - start, D))
            back = np.zeros((stop - start, D, start - before, D))
            touching = [
                order[np.searchsorted(end[order], start) : np.searchsorted(end[order], stop)]
                for order, end in ((by_first, first), (by_second, second))
            ]
            edges = np.unique(np.concatenate(touching))
            rows = self.rows[edges]
            matrices = rows.transpose(0, 2, 1) @ rows
            matrices += self.alpha[edges, None, None] * np.eye(D)
            for e, R in zip(edges.tolist(), matrices, strict=True):
                i, j = int(first[e]), int(second[e])
                if i >= start:
                    here[i - start, :, i - start] += root[i] ** 2 * R
                if j < stop:
                    here[j - start, :, j - start] += root[j] ** 2 * R
                    R = root[i] * root[j] * R
                    if i >= start:
                        here[i - start, :, j - start] -= R
                        here[j - start, :, i - start] -= R
                    else:
                        back[j - start, :, i - before] -= R
            yield here.reshape(-1, (stop - start) * D), back.reshape((stop - start) * D, -1)
            before = start

    def count(self, shift: float, side: int) -> int | None:
        """Count the eigenvalues below `shift` (side 1) or above it (side -1).

        Their number is the number of negative pivots in a block elimination of
        side * (M - shift I). The result is None if a pivot is so near 0 that rounding could change
        its sign.
        """
        negative = 0
        carried: tuple[Callable[[Array], Array], Array | None] | None = None
        for here, back in self._blocks():
            scale = abs(shift) + float(np.abs(here).max(initial=0.0))
            pivot = side * here
            pivot.flat[:: len(pivot) + 1] -= side * shift
            if carried is not None:
                half_of, signs = carried  # the previous pivot is half_of^-1 signs half_of^-T
                half = half_of(back.T)
                pivot -= half.T @ (half if signs is None else signs[:, None] * half)
            try:
                factor = cholesky(pivot, lower=True, check_finite=False)
            except np.linalg.LinAlgError:
                values, vectors = np.linalg.eigh(pivot)
                if np.abs(values).min() < 1e-12 * scale:
                    return None
                negative += int((values < 0).sum())
                carried = _times(vectors.T / np.sqrt(np.abs(values))[:, None]), np.sign(values)
            else:
                if factor.diagonal().min(initial=np.inf) ** 2 < 1e-12 * scale:
                    return None
                carried = _solving(factor), None
        return negative


def _times(matrix: Array) -> Callable[[Array], Array]:
    return lambda B: matrix @ B


def _solving(factor: Array) -> Callable[[Array], Array]:
    return lambda B: solve_triangular(factor, B, lower=True, check_finite=False)

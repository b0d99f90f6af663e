"""Solving with a Laplacian to full relative accuracy, however small its eigenvalues are.

A Laplacian stored as a matrix has already lost its weak edges: next to a weight of 1, a weight of
1e-20 vanishes in the rounding of the diagonal. Elimination that works on the weights alone and
forms every diagonal as a sum of them never subtracts, so each intermediate number keeps its
relative accuracy (Grassmann, Taksar & Heyman 1985; for the smallest eigenvalue: Alfa, Xue & Ye,
Accurate computation of the smallest eigenvalue of a diagonally dominant M-matrix, 2002).

One token, the ground, is held at zero to make the Laplacian invertible. The weights that lead
there are the `leak` of a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.sparse
from numpy.typing import NDArray
from scipy.sparse.csgraph import reverse_cuthill_mckee

Array = NDArray[np.float64]

BLOCK = 32  # tokens eliminated together: large enough for BLAS, small enough for a window's band
HUB = 16  # a token with so many times the mean number of neighbours is eliminated last


@dataclass(frozen=True)
class EliminationOrder:
    """Tokens in blocks whose edges reach no further than the next block, hubs, and the ground."""

    tokens: NDArray[np.intp]  # [N]: the tokens of the blocks, then the hubs, then the ground
    block_ends: list[int]  # where each block ends in `tokens`; the last end is the first hub

    @property
    def num_banded(self) -> int:
        """Tokens in blocks: all but the hubs and the ground."""
        return self.block_ends[-1]

    def blocks(self) -> list[tuple[int, int, int]]:
        """(start, end, end of the next block) of every block."""
        ends = self.block_ends
        return list(zip([0, *ends[:-1]], ends, [*ends[1:], ends[-1]], strict=True))

    @property
    def cost(self) -> float:
        """Multiplications of the elimination, roughly."""
        num_hubs = len(self.tokens) - 1 - self.num_banded
        in_blocks = sum(
            (end - start) * (next_end - start + num_hubs) ** 2
            for start, end, next_end in self.blocks()
        )
        return float(in_blocks + num_hubs**3)


def elimination_order(adjacency: scipy.sparse.csr_array) -> EliminationOrder:
    """An order for a symmetric adjacency matrix [N, N], N >= 2, that keeps blocks narrow."""
    num_tokens = adjacency.shape[0]
    degree = np.diff(adjacency.indptr)
    by_degree = np.argsort(degree, kind="stable")
    num_hubs = int((degree > max(HUB * degree.mean(), BLOCK)).sum())
    last = by_degree[num_tokens - max(num_hubs, 1) :]  # the hubs; the largest is the ground
    rest = np.setdiff1d(np.arange(num_tokens), last)
    band = scipy.sparse.csr_matrix(adjacency[rest][:, rest])
    order = reverse_cuthill_mckee(band, symmetric_mode=True)
    position = np.empty(len(rest), dtype=np.intp)
    position[order] = np.arange(len(rest))
    # How far to the right the edges of the tokens up to each position reach.
    reach = np.arange(len(rest))
    rows = np.repeat(position, np.diff(band.indptr))
    np.maximum.at(reach, rows, position[band.indices])
    reach = np.maximum.accumulate(reach)
    block_ends = [min(BLOCK, len(rest))]
    while block_ends[-1] < len(rest):
        end = block_ends[-1]
        block_ends.append(min(max(end + BLOCK, int(reach[end - 1]) + 1), len(rest)))
    return EliminationOrder(np.concatenate([rest[order], last]), block_ends)


@dataclass(frozen=True)
class GroundedLaplacian:
    """The Laplacian of a connected graph, its ground held at zero, ready to solve with."""

    order: EliminationOrder
    inverses: list[Array]  # of every block, grounded by all tokens after it
    shares: list[Array]  # of a block's tokens [n] in the next block's and the hubs' [m + h]
    hub_inverse: Array

    @classmethod
    def of(cls, adjacency: scipy.sparse.csr_array, order: EliminationOrder) -> GroundedLaplacian:
        """Eliminate one block after another from a symmetric adjacency matrix without loops."""
        adjacency = adjacency[order.tokens][:, order.tokens]
        indptr, indices, data = adjacency.indptr, adjacency.indices, adjacency.data
        num_banded = order.num_banded
        num_last = len(order.tokens) - num_banded  # hubs and ground
        hubs = adjacency[num_banded:, num_banded:].toarray()
        inverses, shares = [], []
        # What eliminating the block before has added to the rows of the block at hand.
        added = np.zeros((order.block_ends[0], order.block_ends[0] + num_last))
        for start, end, next_end in order.blocks():
            size, num_next = end - start, next_end - end
            entries = slice(indptr[start], indptr[end])
            column, weight = indices[entries], data[entries]
            row = np.repeat(np.arange(size), np.diff(indptr[start : end + 1]))
            # The rows of the block, with the columns [block, next block, hubs, ground].
            front = np.zeros((size, size + num_next + num_last))
            ahead = column >= start
            gap = np.where(column < num_banded, 0, num_banded - next_end)
            front[row[ahead], (column - start - gap)[ahead]] = weight[ahead]
            front[:, :size] += added[:, :size]
            front[:, size + num_next :] += added[:, size:]
            outside = front[:, size:]
            inverse = grounded_inverse(front[:, :size], outside.sum(axis=1))
            share = inverse @ outside
            added = outside[:, :num_next].T @ share
            hubs += outside[:, num_next:].T @ share[:, num_next:]
            inverses.append(inverse)
            shares.append(share[:, :-1])
        return cls(order, inverses, shares, grounded_inverse(hubs[:-1, :-1], hubs[:-1, -1]))

    def solve(self, right: Array) -> Array:
        """u with L u = `right` except at the ground, where u = 0; [N] or [N, k]."""
        right = right[self.order.tokens]
        num_banded = self.order.num_banded
        blocks = list(zip(self.order.blocks(), self.inverses, self.shares, strict=True))
        hubs = right[num_banded:-1]
        for (start, end, next_end), _, share in blocks:
            moved = share.T @ right[start:end]
            right[end:next_end] += moved[: next_end - end]
            hubs += moved[next_end - end :]
        hubs = self.hub_inverse @ hubs
        solution = np.zeros_like(right)
        solution[num_banded:-1] = hubs
        for (start, end, next_end), inverse, share in reversed(blocks):
            after = np.concatenate([solution[end:next_end], hubs])
            solution[start:end] = inverse @ right[start:end] + share @ after
        unsorted = np.empty_like(solution)
        unsorted[self.order.tokens] = solution
        return unsorted


def grounded_inverse(weight: Array, leak: Array) -> Array:
    """Inverse of diag(row sums of `weight` + `leak`) - `weight`, every entry accurate.

    Args:
        weight: symmetric, >= 0, [n, n]; the diagonal is ignored.
        leak: weight to everything outside, >= 0, [n]; it must be reachable from every token.
    """
    n = len(leak)
    if n <= BLOCK:
        return _small_grounded_inverse(weight, leak)
    # Eliminate the first half, A, from the second, B. Nothing is ever subtracted.
    a, b = slice(None, n // 2), slice(n // 2, None)
    across = weight[a, b]
    inverse_a = grounded_inverse(weight[a, a], leak[a] + across.sum(axis=1))
    share = inverse_a @ across
    inverse_b = grounded_inverse(weight[b, b] + across.T @ share, leak[b] + share.T @ leak[a])
    inverse_ab = share @ inverse_b
    return np.block([[inverse_a + inverse_ab @ share.T, inverse_ab], [inverse_ab.T, inverse_b]])


def _small_grounded_inverse(weight: Array, leak: Array) -> Array:
    # The matrix is C^-T diag(pivot) C^-1: row i of the unit upper triangular C says how much of
    # token i passes through each later token when the tokens between them are gone.
    n = len(leak)
    left = np.column_stack([weight, leak])
    pivot = np.empty(n)
    for k in range(n):
        row = left[k, k + 1 :]
        pivot[k] = row.sum()
        row /= pivot[k]
        through = left[:, k].copy()
        through[k] = 0.0  # the row of k itself is final
        left[:, k + 1 :] += through[:, None] * row
    passage = np.triu(left[:, :n], 1) + np.eye(n)
    return (passage / pivot) @ passage.T

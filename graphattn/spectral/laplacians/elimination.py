"""Solving with a Laplacian with full relative accuracy, however small its eigenvalues are.

The matrix of a Laplacian has lost its weak edges: in the sum on the diagonal, a weight of 1e-20 is
rounded away beside a weight of 1. The elimination here uses only the weights, and computes every
diagonal entry as a sum of weights. It never subtracts, so every intermediate number has full
relative accuracy (Grassmann, Taksar & Heyman 1985; for the smallest eigenvalue: Alfa, Xue & Ye,
Accurate computation of the smallest eigenvalue of a diagonally dominant M-matrix, 2002).

One token, the ground, is fixed at zero, so that the Laplacian is invertible. The `leak` of a token
is its weight to the ground.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.sparse
from numpy.typing import NDArray
from scipy.sparse.csgraph import reverse_cuthill_mckee

Array = NDArray[np.float64]

BLOCK = 32  # tokens that are eliminated together: a compromise between BLAS and small windows
HUB = 16  # tokens with this many times the mean number of neighbours are eliminated last


@dataclass(frozen=True)
class EliminationOrder:
    """An order of tokens: blocks with edges only to the same and the next block, hubs, ground."""

    tokens: NDArray[np.intp]  # [N]: the tokens of the blocks, then the hubs, then the ground
    block_ends: list[int]  # the end of each block in `tokens`; the last one is the first hub

    @property
    def num_banded(self) -> int:
        """The number of tokens in blocks, which are all except the hubs and the ground."""
        return self.block_ends[-1]

    def blocks(self) -> list[tuple[int, int, int]]:
        """List (start, end, end of the next block) of every block."""
        ends = self.block_ends
        return list(zip([0, *ends[:-1]], ends, [*ends[1:], ends[-1]], strict=True))

    @property
    def cost(self) -> float:
        """The approximate number of multiplications of the elimination."""
        num_hubs = len(self.tokens) - 1 - self.num_banded
        in_blocks = sum(
            (end - start) * (next_end - start + num_hubs) ** 2
            for start, end, next_end in self.blocks()
        )
        return float(in_blocks + num_hubs**3)


def elimination_order(adjacency: scipy.sparse.csr_array) -> EliminationOrder:
    """Find an order for a symmetric adjacency matrix [N, N], N >= 2, with small blocks."""
    num_tokens = adjacency.shape[0]
    degree = np.diff(adjacency.indptr)
    by_degree = np.argsort(degree, kind="stable")
    num_hubs = int((degree > max(HUB * degree.mean(), BLOCK)).sum())
    # The ground, which comes last, is the token with the most weight: where it is tied weakly, the
    # other tokens are all far from it, and differences between them are lost.
    ground = int(adjacency.sum(axis=1).argmax())
    hubs = by_degree[num_tokens - num_hubs :]
    last = np.append(hubs[hubs != ground], ground)
    rest = np.setdiff1d(np.arange(num_tokens), last)
    band = scipy.sparse.csr_matrix(adjacency[rest][:, rest])
    order = reverse_cuthill_mckee(band, symmetric_mode=True)
    position = np.empty(len(rest), dtype=np.intp)
    position[order] = np.arange(len(rest))
    # The last position that an edge from any token up to each position leads to.
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
    """The factorised Laplacian of a connected graph, with its ground fixed at zero."""

    order: EliminationOrder
    inverses: list[Array]  # the inverse of every block, with all later tokens as ground
    shares: list[Array]  # the shares [n, m + h] of n tokens of a block in the next block and hubs
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
        # The weights that the elimination of the previous block adds to the current one.
        added = np.zeros((order.block_ends[0], order.block_ends[0] + num_last))
        for start, end, next_end in order.blocks():
            size, num_next = end - start, next_end - end
            entries = slice(indptr[start], indptr[end])
            column, weight = indices[entries], data[entries]
            row = np.repeat(np.arange(size), np.diff(indptr[start : end + 1]))
            # The rows of this block, with the columns [block, next block, hubs, ground].
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
        """Solve L u = `right`, except at the ground, where u = 0; [N] or [N, k]."""
        right = right[self.order.tokens]
        num_banded = self.order.num_banded
        blocks = list(zip(self.order.blocks(), self.inverses, self.shares, strict=True))
        hubs = right[num_banded:-1]
        for (start, end, next_end), _, share in blocks:
            change = share.T @ right[start:end]
            right[end:next_end] += change[: next_end - end]
            hubs += change[next_end - end :]
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
    """Invert diag(row sums of `weight` + `leak`) - `weight`, with every entry accurate.

    Args:
        weight: symmetric, >= 0, [n, n]; the diagonal is ignored.
        leak: the weight of every token to the outside, >= 0, [n]. From every token, a path of
            positive weights must lead to the outside.
    """
    n = len(leak)
    if n <= BLOCK:
        return _small_grounded_inverse(weight, leak)
    # Eliminate the first half, A, from the second half, B. There are no subtractions.
    a, b = slice(None, n // 2), slice(n // 2, None)
    across = weight[a, b]
    inverse_a = grounded_inverse(weight[a, a], leak[a] + across.sum(axis=1))
    share = inverse_a @ across
    inverse_b = grounded_inverse(weight[b, b] + across.T @ share, leak[b] + share.T @ leak[a])
    inverse_ab = share @ inverse_b
    return np.block([[inverse_a + inverse_ab @ share.T, inverse_ab], [inverse_ab.T, inverse_b]])


def _small_grounded_inverse(weight: Array, leak: Array) -> Array:
    # The matrix is C^-T diag(pivot) C^-1, with a unit upper triangular matrix C. Row i of C says
    # which share of token i passes through each later token after the tokens between are removed.
    n = len(leak)
    left = np.column_stack([weight, leak])
    pivot = np.empty(n)
    for k in range(n):
        row = left[k, k + 1 :]
        pivot[k] = row.sum()
        row /= pivot[k]
        through = left[:, k].copy()
        through[k] = 0.0  # the row of token k is final
        left[:, k + 1 :] += through[:, None] * row
    passage = np.triu(left[:, :n], 1) + np.eye(n)
    return (passage / pivot) @ passage.T

"""How fast signals mix where every edge weighs with a matrix (Appendix A)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import scipy.sparse
import torch
from numpy.typing import NDArray
from torch import Tensor

from graphattn.graphs import TokenGraph
from graphattn.spectral.arguments import as_edge_blocks, as_square_graph
from graphattn.spectral.eigenvalues import (
    fiedler_value,
    lanczos_pair,
    polished,
    positive_definite_solver,
)
from graphattn.spectral.laplacians.banded import STORED, BandedMatrix
from graphattn.spectral.laplacians.laplacian import laplacian
from graphattn.spectral.laplacians.operators import component_of

Array = NDArray[np.float64]

DENSE = 1200  # rows of a matrix up to which all its eigenvalues are taken
PRECISION = 1e-11  # of what Lanczos leaves
ATTEMPTS = ((40, 400),)  # (basis size, restarts)


class MatrixFiedlerBounds(NamedTuple):
    """Result of :func:`matrix_fiedler_bounds`.

    Example:
        >>> import torch, graphattn as ga
        >>> graph = ga.window_path_graph(5, window=1)
        >>> R = torch.diag(torch.tensor([1.0, 2.0])).expand(graph.num_edges, 2, 2)
        >>> lower, upper = ga.spectral.matrix_fiedler_bounds(graph, R)
        >>> round(upper / lower, 9)
        2.0
    """

    lower: float
    upper: float


class _Pairs(NamedTuple):
    """Every pair of tokens with an edge between them, in whichever direction."""

    first: NDArray[np.int64]
    second: NDArray[np.int64]
    block: Array  # [P, C, C], the symmetrised block
    weight: Array  # [P], the symmetrised weight of the unweighted graph: 1, or 1/2 if one-sided


def matrix_fiedler_value(graph: TokenGraph, edge_weight: Tensor) -> float:
    r"""The smallest eigenvalue of the matrix-weighted Laplacian beyond its C constant modes.

    .. math:: \lambda = \min \Big\{ \tfrac12 \sum_{(i,j)} (u_i - u_j)^\top R_{ij} (u_i - u_j) :
        \sum_i u_i = 0, \ \sum_i \lVert u_i \rVert^2 = 1 \Big\}

    the rate at which one step of consensus with these matrices (update "energy") mixes what tokens
    hold, as :func:`fiedler_value` is where weights are numbers. Up to N C = 1,200 by a dense solver
    (errors are roundings of the largest eigenvalue); beyond, by Lanczos on a factorised inverse,
    and from differences, to a relative accuracy of about 1e-8.

    Source: Stabilizing Transformer Training Through Consensus, Appendix A.1 (Eq. 21-24).

    Args:
        graph: N tokens; direction does not matter, see :func:`laplacian`.
        edge_weight: symmetric positive semidefinite matrices R in the order of
            ``graph.edge_index``, [E, C, C].

    Returns:
        The value; exactly 0.0 if the edges of non-zero matrices leave the graph disconnected, or
        N < 2. Matrices that are only semidefinite can make it 0 (to rounding) on a connected graph.

    Raises:
        ValueError: if `graph` is not a TokenGraph or is bipartite, or `edge_weight` is otherwise.
        RuntimeError: if a large problem with singular matrices does not converge.

    Example:
        >>> import torch, graphattn as ga
        >>> graph = ga.complete_graph(5, self_loops=False)
        >>> R = torch.diag(torch.tensor([2.0, 3.0])).expand(graph.num_edges, 2, 2)
        >>> round(ga.spectral.matrix_fiedler_value(graph, R), 9)  # twice that of the graph
        10.0
    """
    graph = as_square_graph(graph)
    blocks = as_edge_blocks(edge_weight, graph.num_edges).detach()
    num_tokens, channels = graph.num_targets, blocks.shape[2]
    if num_tokens < 2 or component_of(graph, blocks).any():
        return 0.0
    L = laplacian(graph, blocks)
    if num_tokens * channels <= DENSE:
        return max(float(np.linalg.eigvalsh(L.toarray())[channels]), 0.0)
    u = _slowest_vector(L, num_tokens, channels).reshape(num_tokens, channels)
    u -= u.mean(axis=0)
    pairs = _pairs(graph, blocks)
    gap = u[pairs.first] - u[pairs.second]
    energy = np.einsum("ea,eab,eb->", gap, pairs.block, gap, optimize=True)
    return max(float(energy / np.square(u).sum()), 0.0)


def matrix_fiedler_bounds(graph: TokenGraph, edge_weight: Tensor) -> MatrixFiedlerBounds:
    r"""Bounds on :func:`matrix_fiedler_value` from the unweighted graph and the extremes of R.

    .. math:: a \, \lambda_1 \le \lambda \le b \, \lambda_1

    with lambda_1 the Fiedler value of the unweighted graph, and a, b the smallest and the largest
    eigenvalue over all edges. An edge and its reverse count with their mean
    :math:`(R_{ij} + R_{ji}) / 2`. A one-sided edge counts with R itself: the Laplacian has half of
    it, and lambda_1 belongs to a graph where such an edge weighs a half. Self-loops do not count.
    The bounds meet where R is the same multiple of I on all edges.

    Source: Stabilizing Transformer Training Through Consensus, end of Section 4, and Appendix A.

    Args:
        graph: N tokens; direction does not matter, see :func:`laplacian`.
        edge_weight: as in :func:`matrix_fiedler_value`.

    Returns:
        ``(lower, upper)``; zeros if the graph (its edges, whatever they weigh) is disconnected.

    Raises:
        ValueError: as :func:`matrix_fiedler_value`.

    Example:
        >>> import torch, graphattn as ga
        >>> graph = ga.complete_graph(5, self_loops=False)
        >>> R = torch.diag(torch.tensor([2.0, 3.0])).expand(graph.num_edges, 2, 2)
        >>> lower, upper = ga.spectral.matrix_fiedler_bounds(graph, R)
        >>> round(lower, 9), round(upper, 9)
        (10.0, 15.0)
    """
    graph = as_square_graph(graph)
    blocks = as_edge_blocks(edge_weight, graph.num_edges).detach()
    unweighted = fiedler_value(graph)
    if unweighted == 0.0:
        return MatrixFiedlerBounds(0.0, 0.0)
    pairs = _pairs(graph, blocks)
    values = np.linalg.eigvalsh(pairs.block / pairs.weight[:, None, None])
    lower = max(float(values[:, 0].min()), 0.0)
    return MatrixFiedlerBounds(lower * unweighted, float(values[:, -1].max()) * unweighted)


def _pairs(graph: TokenGraph, blocks: Tensor) -> _Pairs:
    source, target = graph.edge_index.cpu()
    edge = source != target
    blocks = blocks.to("cpu", torch.float64)[edge]
    ends = torch.stack([source[edge], target[edge]]).sort(dim=0).values
    num_tokens = max(graph.num_targets, 1)
    key, pair = (ends[0] * num_tokens + ends[1]).unique(return_inverse=True)
    block = blocks.new_zeros(len(key), *blocks.shape[1:]).index_add(0, pair, blocks / 2)
    weight = torch.bincount(pair, minlength=len(key)).double() / 2
    first, second = key // num_tokens, key % num_tokens
    return _Pairs(first.numpy(), second.numpy(), block.numpy(), weight.numpy())


def _slowest_vector(L: scipy.sparse.csr_array, num_tokens: int, channels: int) -> Array:
    """An eigenvector of the smallest eigenvalue beyond the constants, [N * C]."""

    def centred(u: Array) -> Array:
        v = u.reshape(num_tokens, channels)
        return (v - v.mean(axis=0)).reshape(-1)

    # One token held at zero makes the matrix invertible, unless blocks are singular.
    kept = slice(channels, None)
    grounded = scipy.sparse.csr_array(L[kept, kept])
    bands = BandedMatrix(grounded)
    if bands.stored <= STORED:
        solve = bands.solver()
    else:
        solve = positive_definite_solver(scipy.sparse.csc_matrix(grounded))
    if solve is None:
        bound = 2 * abs(L).sum(axis=1).max()

        def constants_moved_up(u: Array) -> Array:
            return L @ u + bound * (u - centred(u))

        return _extreme_vector(constants_moved_up, L.shape[0], "SA")

    def pseudo_inverse(u: Array) -> Array:
        solution = np.zeros_like(u)
        solution[kept] = solve(centred(u)[kept])
        return centred(solution)

    u = _extreme_vector(pseudo_inverse, L.shape[0], "LA")
    return polished(pseudo_inverse, u)


def _extreme_vector(apply: Callable[[Array], Array], size: int, which: str) -> Array:
    found = lanczos_pair(apply, size, which, ATTEMPTS, tolerance=PRECISION)
    if found is None:
        raise RuntimeError("the Fiedler value of the matrix weights has not converged")
    return found[1]

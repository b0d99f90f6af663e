"""The Fiedler value of graphs with a matrix on every edge (Appendix A)."""

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

DENSE = 1200  # rows up to which a dense solver computes all eigenvalues
PRECISION = 1e-11  # relative residual of Lanczos
ATTEMPTS = ((40, 400),)  # (basis size, restarts)


class MatrixFiedlerBounds(NamedTuple):
    """The result of :func:`matrix_fiedler_bounds`: a lower and an upper bound.

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
    """All pairs of tokens with an edge between them in any direction."""

    first: NDArray[np.int64]
    second: NDArray[np.int64]
    block: Array  # [P, C, C], the symmetrised block
    weight: Array  # [P], the symmetrised weight of the unweighted graph: 1, or 1/2 for one edge


def matrix_fiedler_value(graph: TokenGraph, edge_weight: Tensor) -> float:
    r"""Compute the smallest eigenvalue of the matrix-weighted Laplacian, without constant modes.

    .. math:: \lambda = \min \Big\{ \tfrac12 \sum_{(i,j)} (u_i - u_j)^\top R_{ij} (u_i - u_j) :
        \sum_i u_i = 0, \ \sum_i \lVert u_i \rVert^2 = 1 \Big\}

    It is the rate at which consensus with these matrices (update "energy") mixes the tokens, as
    :func:`fiedler_value` is for weights that are numbers. There are C constant modes. Up to
    N C = 1,200, it is computed by a dense solver, whose absolute error is a few roundings of the
    largest eigenvalue. For larger graphs, it is computed by Lanczos with a factorised inverse and a
    Rayleigh quotient of differences, to a relative accuracy of about 1e-8.

    Source: Stabilizing Transformer Training Through Consensus, Appendix A.1 (Eq. 21-24).

    Args:
        graph: N tokens; direction does not matter, see :func:`laplacian`.
        edge_weight: symmetric positive semidefinite matrices R in the order of
            ``graph.edge_index``, [E, C, C].

    Returns:
        The value; exactly 0.0 if the graph of edges with non-zero matrices is disconnected, or
        N < 2. With semidefinite matrices, it can be 0 (up to rounding) on a connected graph.

    Raises:
        ValueError: if `graph` is not a TokenGraph or is bipartite, or `edge_weight` has another
            shape or other matrices.
        RuntimeError: if Lanczos does not converge for a large graph with singular matrices.

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
    r"""Compute bounds of :func:`matrix_fiedler_value` from the unweighted graph and from R.

    .. math:: a \, \lambda_1 \le \lambda \le b \, \lambda_1

    Here lambda_1 is the Fiedler value of the unweighted graph, and a and b are the smallest and the
    largest eigenvalue of R over all edges. For an edge and its reverse, R is the mean
    :math:`(R_{ij} + R_{ji}) / 2`. For an edge without a reverse, it is R itself, because it counts
    half in the Laplacian, and also half in lambda_1. Self-loops do not count. The two bounds are
    equal if R is the same multiple of I on all edges.

    Source: Stabilizing Transformer Training Through Consensus, end of Section 4, and Appendix A.

    Args:
        graph: N tokens; direction does not matter, see :func:`laplacian`.
        edge_weight: matrices R, [E, C, C], as in :func:`matrix_fiedler_value`.

    Returns:
        ``(lower, upper)``; zeros if the graph without weights is disconnected.

    Raises:
        ValueError: in the same cases as :func:`matrix_fiedler_value`.

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
    """Compute an eigenvector of the smallest eigenvalue without constant modes, [N * C]."""

    def centred(u: Array) -> Array:
        v = u.reshape(num_tokens, channels)
        return (v - v.mean(axis=0)).reshape(-1)

    # Without the rows of one token, the matrix is invertible, unless blocks are singular.
    others = slice(channels, None)
    grounded = scipy.sparse.csr_array(L[others, others])
    bands = BandedMatrix(grounded)
    if bands.stored <= STORED:
        solve = bands.solver()
    else:
        solve = positive_definite_solver(scipy.sparse.csc_matrix(grounded))
    if solve is None:
        bound = 2 * abs(L).sum(axis=1).max()

        def with_shifted_constants(u: Array) -> Array:
            # The eigenvalue 0 of constants becomes `bound`, so that the next one is the smallest.
            return L @ u + bound * (u - centred(u))

        return _extreme_vector(with_shifted_constants, L.shape[0], "SA")

    def pseudo_inverse(u: Array) -> Array:
        solution = np.zeros_like(u)
        solution[others] = solve(centred(u)[others])
        return centred(solution)

    u = _extreme_vector(pseudo_inverse, L.shape[0], "LA")
    return polished(pseudo_inverse, u)


def _extreme_vector(apply: Callable[[Array], Array], size: int, which: str) -> Array:
    pair = lanczos_pair(apply, size, which, ATTEMPTS, tolerance=PRECISION)
    if pair is None:
        raise RuntimeError(
            "the Lanczos iteration for the Fiedler value of matrix weights has not converged: use "
            "matrices that are not singular"
        )
    return pair[1]

"""The graph Laplacian of the symmetrised weights."""

from __future__ import annotations

from typing import Literal, overload

import numpy as np
import scipy.sparse
import torch
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator
from torch import Tensor

from graphattn.graphs import TokenGraph
from graphattn.graphs.arguments import as_choice
from graphattn.spectral.arguments import as_edge_blocks, as_edge_weight, as_square_graph, has_blocks
from graphattn.spectral.laplacians.operators import laplacian_operator

Normalization = Literal["symmetric", "random_walk"] | None


@overload
def laplacian(
    graph: TokenGraph,
    edge_weight: Tensor | None = None,
    *,
    layout: Literal["scipy"] = "scipy",
    normalization: Normalization = None,
) -> scipy.sparse.csr_array: ...


@overload
def laplacian(
    graph: TokenGraph,
    edge_weight: Tensor | None = None,
    *,
    layout: Literal["torch", "dense"],
    normalization: Normalization = None,
) -> Tensor: ...


@overload
def laplacian(
    graph: TokenGraph,
    edge_weight: Tensor | None = None,
    *,
    layout: Literal["operator"],
    normalization: Normalization = None,
) -> LinearOperator: ...


def laplacian(
    graph: TokenGraph,
    edge_weight: Tensor | None = None,
    *,
    layout: Literal["scipy", "torch", "dense", "operator"] = "scipy",
    normalization: Normalization = None,
) -> scipy.sparse.csr_array | Tensor | LinearOperator:
    r"""Compute the Laplacian L of the symmetrised weights, for which E(u) = u^T L u is the energy.

    .. math::
        W_{sym} = \tfrac12 (W + W^\top), \qquad
        L = D(W_{sym}) - W_{sym}, \qquad
        \nabla E(u) = 2 L u

    Here D is the diagonal matrix of row sums. L is symmetric and positive semidefinite, constants
    are in its kernel, and self-loops have no effect. The normalised Laplacians, with the degrees of
    W_sym without self-loops, are

    .. math::
        L_{symmetric} = D^{-1/2} L D^{-1/2}, \qquad L_{random\ walk} = D^{-1} L

    The first one is symmetric, with eigenvalues in [0, 2]. The second one has the same eigenvalues,
    but is not symmetric; I - L_random_walk is the random walk that averages over the neighbours. A
    token without neighbours has a row and a column of zeros in both (not a 1 on the diagonal), as
    in L, so its value does not change.

    If the weights are matrices :math:`R_{ij}`, ``edge_weight`` [E, C, C], L is the matrix-weighted
    Laplacian of Appendix A. It is for signals with C numbers per token, flattened token by token
    (``signal.reshape(-1)``). Its block (i, j) is :math:`-(R_{ij} + R_{ji}) / 2`, and the blocks of
    a row sum to zero. Its kernel contains the C constants :math:`\mathbf 1_N \otimes e_k`, one per
    coordinate. (**Erratum**: Eq. 24 gives a vector that is constant on one token and zero on the
    others, but it is in the kernel only if the token has no neighbours.)

    Source: Stabilizing Transformer Training Through Consensus, Eq. 4-6 and 21-24, with an
    **erratum**. The paper computes L = D_out - W with the out-degrees of Eq. 4 first, and then
    L_sym = (L + L^T) / 2. If in- and out-degrees differ, this matrix is not positive semidefinite,
    and is not the matrix of the energy: a random directed graph on 5 tokens has E(u) = 4.710, but
    u^T L_sym u = 4.289 and an eigenvalue -0.143. If the weights are symmetrised first, as here,
    Eq. 5 and the gradient of Eq. 6 are exact for any directed graph. If in- and out-degrees are
    equal, both are the same.

    Args:
        graph: N tokens. Direction does not matter: an edge counts half in each direction.
        edge_weight: weights >= 0 in the order of ``graph.edge_index``, [E], or symmetric positive
            semidefinite matrices, [E, C, C]; ones if None.
        layout: the type of the result. ``"scipy"`` is a ``csr_array`` of float64, without stored
            zeros. ``"torch"`` is a coalesced sparse COO tensor, and ``"dense"`` a dense tensor.
            Tensors are on the graph's device, have the dtype of `edge_weight` (the default dtype
            for integers and None) and are differentiable with respect to it. ``"operator"`` is a
            ``scipy.sparse.linalg.LinearOperator`` of float64 on the CPU, without a matrix. For a
            graph of windows, blocks or an image (or a batch of these) without weights, it works
            with shifted slices, and lists no edges; for other graphs it stores the edges.
        normalization: None, ``"symmetric"`` or ``"random_walk"``; it must be None if the weights
            are matrices.

    Returns:
        L, [N, N] or [N C, N C].

    Raises:
        ValueError: if `graph` is not a TokenGraph or is bipartite (N != M), if `edge_weight` is
            neither a tensor [E] of finite numbers >= 0 nor one of matrices as above, if `layout` or
            `normalization` is unknown, or `normalization` is given for matrices.

    Example:
        >>> import torch, graphattn as ga
        >>> ga.spectral.laplacian(ga.window_path_graph(3, window=1), layout="dense")
        tensor([[ 1., -1.,  0.],
                [-1.,  2., -1.],
                [ 0., -1.,  1.]])
        >>> ga.spectral.laplacian(ga.causal_graph(3), layout="dense")  # every edge one-sided
        tensor([[ 1.0000, -0.5000, -0.5000],
                [-0.5000,  1.0000, -0.5000],
                [-0.5000, -0.5000,  1.0000]])
        >>> long = ga.window_path_graph(1_000_000, window=2)
        >>> line = torch.arange(1_000_000).numpy()
        >>> result = ga.spectral.laplacian(long, layout="operator") @ line
        >>> result[:4].tolist(), result[-4:].tolist()  # 0, except near the ends of the line
        ([-3.0, -2.0, 0.0, 0.0], [0.0, 0.0, 2.0, 3.0])
        >>> R = torch.tensor([[2.0, 1.0], [1.0, 2.0]]).expand(2, 2, 2)
        >>> ga.spectral.laplacian(ga.window_path_graph(2, window=1), R, layout="dense")
        tensor([[ 2.,  1., -2., -1.],
                [ 1.,  2., -1., -2.],
                [-2., -1.,  2.,  1.],
                [-1., -2.,  1.,  2.]])
    """
    graph = as_square_graph(graph)
    as_choice("layout", layout, ("scipy", "torch", "dense", "operator"))
    as_choice("normalization", normalization, (None, "symmetric", "random_walk"))
    if has_blocks(edge_weight):
        edge_weight = as_edge_blocks(edge_weight, graph.num_edges)
        if normalization is not None:
            raise ValueError(
                "normalization must be None if edge_weight has matrices [E, C, C], "
                f"got {normalization!r}"
            )
    elif edge_weight is not None:
        edge_weight = as_edge_weight(edge_weight, graph.num_edges)
    if layout == "operator":
        return laplacian_operator(graph, edge_weight, normalization)
    if layout == "scipy":
        if edge_weight is not None and edge_weight.dim() == 3:
            blocks = edge_weight.detach().to("cpu", torch.float64)
            sparse = _torch_laplacian(graph.to("cpu"), blocks, None)
            entries = (sparse.values().numpy(), tuple(sparse.indices().numpy()))
            L = scipy.sparse.csr_array(scipy.sparse.coo_array(entries, shape=tuple(sparse.shape)))
            L.eliminate_zeros()
            return L
        adjacency = symmetrised_adjacency(graph, float64_weights(edge_weight, graph.num_edges))
        return laplacian_of(adjacency, normalization)
    sparse = _torch_laplacian(graph, edge_weight, normalization)
    return sparse if layout == "torch" else sparse.to_dense()


def float64_weights(edge_weight: Tensor | None, num_edges: int) -> NDArray[np.float64]:
    """Convert checked weights [E] to a numpy array of float64; ones if None."""
    if edge_weight is None:
        return np.ones(num_edges)
    return edge_weight.detach().to("cpu", torch.float64).numpy()


def symmetrised_adjacency(graph: TokenGraph, weight: NDArray[np.float64]) -> scipy.sparse.csr_array:
    """Compute W_sym = (W + W^T) / 2 [N, N], without self-loops and stored zeros."""
    source, target = graph.compact_edges.cpu().numpy()
    edge = (source != target) & (weight > 0)
    tokens = graph.num_targets
    ends = np.zeros(tokens + 1, dtype=source.dtype)  # of the rows: edges are sorted by target
    np.cumsum(np.bincount(target[edge], minlength=tokens), out=ends[1:])
    half = scipy.sparse.csr_array((weight[edge] / 2, source[edge], ends), shape=(tokens, tokens))
    return half + half.T


def laplacian_of(
    adjacency: scipy.sparse.csr_array, normalization: Normalization = None
) -> scipy.sparse.csr_array:
    """Compute D(A) - A, or a normalised form, of a symmetric adjacency matrix A without loops."""
    token = np.arange(adjacency.shape[0])
    degree = adjacency @ np.ones(len(token))
    if normalization is not None:
        share = np.divide(1.0, degree, out=np.zeros(len(degree)), where=degree > 0)
        row = np.repeat(token, np.diff(adjacency.indptr))
        if normalization == "symmetric":
            per_edge = np.sqrt(share[row]) * np.sqrt(share[adjacency.indices])
        else:
            per_edge = share[row]
        entries = (adjacency.data * per_edge, adjacency.indices, adjacency.indptr)
        adjacency = scipy.sparse.csr_array(entries, shape=adjacency.shape)
        degree = (degree > 0).astype(np.float64)  # the diagonal of a normalised form is exactly 1
    ends = np.arange(len(degree) + 1)
    L = scipy.sparse.csr_array((degree, token, ends), shape=adjacency.shape) - adjacency
    L.eliminate_zeros()  # removes the diagonal entries of isolated tokens
    return L


def _torch_laplacian(
    graph: TokenGraph, edge_weight: Tensor | None, normalization: Normalization
) -> Tensor:
    edge_index = graph.edge_index
    dtype = torch.get_default_dtype()
    if edge_weight is None:
        edge_weight = torch.ones(graph.num_edges, dtype=dtype, device=edge_index.device)
    elif not edge_weight.is_floating_point():
        edge_weight = edge_weight.to(dtype)
    edge = edge_index[0] != edge_index[1]
    source, target = edge_index[:, edge]
    half = edge_weight[edge] / 2
    # Each edge adds half of its weight to the degrees of both tokens, and subtracts it from the
    # two entries off the diagonal.
    at_source = at_target = to_target = to_source = half
    if normalization is not None:
        degree = half.new_zeros(graph.num_targets)
        degree = degree.index_add(0, source, half).index_add(0, target, half)
        # 1 / 0 must not be computed even where it is masked out, because its gradient is NaN.
        share = torch.where(degree > 0, 1 / degree.where(degree > 0, 1), 0)
        at_source, at_target = half * share[source], half * share[target]
        to_target, to_source = at_source, at_target
        if normalization == "symmetric":
            root = torch.where(degree > 0, degree.where(degree > 0, 1).rsqrt(), 0)
            to_target = to_source = half * (root[source] * root[target])
    rows = torch.cat([source, target, source, target])
    columns = torch.cat([source, target, target, source])
    values = torch.cat([at_source, at_target, -to_target, -to_source])
    size = graph.num_targets
    if values.dim() == 3:  # Every entry is a block of C rows and C columns.
        channel = torch.arange(values.shape[2], device=values.device)
        size *= len(channel)
        rows = (rows[:, None, None] * len(channel) + channel[:, None]).expand_as(values)
        columns = (columns[:, None, None] * len(channel) + channel).expand_as(values)
    return torch.sparse_coo_tensor(
        torch.stack([rows.reshape(-1), columns.reshape(-1)]),
        values.reshape(-1),
        (size, size),
        check_invariants=False,
    ).coalesce()

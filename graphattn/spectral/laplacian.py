"""The graph Laplacian of the symmetrised weights."""

from __future__ import annotations

from typing import Literal, overload

import numpy as np
import scipy.sparse
import torch
from numpy.typing import NDArray
from torch import Tensor

from graphattn.graphs import TokenGraph
from graphattn.graphs.arguments import as_choice
from graphattn.spectral.arguments import as_edge_weight, as_square_graph


@overload
def laplacian(
    graph: TokenGraph,
    edge_weight: Tensor | None = None,
    *,
    layout: Literal["scipy"] = "scipy",
) -> scipy.sparse.csr_array: ...


@overload
def laplacian(
    graph: TokenGraph,
    edge_weight: Tensor | None = None,
    *,
    layout: Literal["torch", "dense"],
) -> Tensor: ...


def laplacian(
    graph: TokenGraph,
    edge_weight: Tensor | None = None,
    *,
    layout: Literal["scipy", "torch", "dense"] = "scipy",
) -> scipy.sparse.csr_array | Tensor:
    r"""The Laplacian L of the symmetrised weights: the matrix of the energy, E(u) = u^T L u.

    .. math::
        W_{sym} = \tfrac12 (W + W^\top), \qquad
        L = D(W_{sym}) - W_{sym}, \qquad
        \nabla E(u) = 2 L u

    with D the diagonal matrix of row sums. L is symmetric and positive semidefinite, constants are
    in its kernel, and self-loops drop out.

    Source: Stabilizing Transformer Training Through Consensus, Eq. 4-6, with an **erratum**. The
    paper symmetrises later: it takes L = D_out - W with the out-degrees of Eq. 4, and
    L_sym = (L + L^T) / 2. Where in- and out-degrees differ, that matrix is neither positive
    semidefinite nor the matrix of the energy: a random digraph on 5 tokens has E(u) = 4.710, but
    u^T L_sym u = 4.289 and an eigenvalue -0.143. Symmetrising the weights first gives Eq. 5 and the
    gradient of Eq. 6 exactly, for any directed graph; where in- and out-degrees agree, the two are
    the same.

    Args:
        graph: N tokens. Direction does not matter: an edge counts half in each.
        edge_weight: weights >= 0 in the order of ``graph.edge_index``, [E]; ones if None.
        layout: ``"scipy"``: a ``csr_array`` of float64 (zeros are not stored); ``"torch"``: a
            coalesced sparse COO tensor; ``"dense"``: a tensor. Tensors lie where the graph lies,
            have the dtype of `edge_weight` (the default dtype for integers and None) and are
            differentiable in it.

    Returns:
        L, [N, N].

    Raises:
        ValueError: if `graph` is not a TokenGraph or is bipartite (N != M), if `edge_weight` is not
            a tensor [E] of finite numbers >= 0, or `layout` is unknown.

    Example:
        >>> import graphattn as ga
        >>> ga.spectral.laplacian(ga.window_path_graph(3, window=1), layout="dense")
        tensor([[ 1., -1.,  0.],
                [-1.,  2., -1.],
                [ 0., -1.,  1.]])
        >>> ga.spectral.laplacian(ga.causal_graph(3), layout="dense")  # every edge one-sided
        tensor([[ 1.0000, -0.5000, -0.5000],
                [-0.5000,  1.0000, -0.5000],
                [-0.5000, -0.5000,  1.0000]])
    """
    graph = as_square_graph(graph)
    as_choice("layout", layout, ("scipy", "torch", "dense"))
    if edge_weight is not None:
        edge_weight = as_edge_weight(edge_weight, graph.num_edges)
    if layout == "scipy":
        adjacency = symmetrised_adjacency(graph, float64_weights(edge_weight, graph.num_edges))
        return laplacian_of(adjacency)
    sparse = _torch_laplacian(graph, edge_weight)
    return sparse if layout == "torch" else sparse.to_dense()


def float64_weights(edge_weight: Tensor | None, num_edges: int) -> NDArray[np.float64]:
    """Checked weights [E] as a numpy array; ones if None."""
    if edge_weight is None:
        return np.ones(num_edges)
    return edge_weight.detach().to("cpu", torch.float64).numpy()


def symmetrised_adjacency(graph: TokenGraph, weight: NDArray[np.float64]) -> scipy.sparse.csr_array:
    """W_sym = (W + W^T) / 2 [N, N] without self-loops and stored zeros."""
    source, target = graph.edge_index.cpu().numpy()
    edge = (source != target) & (weight > 0)
    shape = (graph.num_targets, graph.num_targets)
    half = scipy.sparse.coo_array((weight[edge] / 2, (target[edge], source[edge])), shape=shape)
    half = half.tocsr()
    return scipy.sparse.csr_array(half + half.T)


def laplacian_of(adjacency: scipy.sparse.csr_array) -> scipy.sparse.csr_array:
    """D(A) - A of a symmetric adjacency matrix without self-loops."""
    degree = np.asarray(adjacency.sum(axis=1)).ravel()
    token = np.arange(len(degree))
    diagonal = scipy.sparse.coo_array((degree, (token, token)), shape=adjacency.shape)
    L = scipy.sparse.csr_array(diagonal.tocsr() - adjacency)
    L.eliminate_zeros()  # isolated tokens
    return L


def _torch_laplacian(graph: TokenGraph, edge_weight: Tensor | None) -> Tensor:
    edge_index = graph.edge_index
    dtype = torch.get_default_dtype()
    if edge_weight is None:
        edge_weight = torch.ones(graph.num_edges, dtype=dtype, device=edge_index.device)
    elif not edge_weight.is_floating_point():
        edge_weight = edge_weight.to(dtype)
    edge = edge_index[0] != edge_index[1]
    source, target = edge_index[:, edge]
    half = edge_weight[edge] / 2
    # Each edge adds half its weight to the degrees of both ends, and to both entries off them.
    rows = torch.cat([source, target, source, target])
    columns = torch.cat([source, target, target, source])
    return torch.sparse_coo_tensor(
        torch.stack([rows, columns]),
        torch.cat([half, half, -half, -half]),
        (graph.num_targets, graph.num_targets),
        check_invariants=False,
    ).coalesce()

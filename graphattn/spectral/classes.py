"""Closed classes: groups of tokens that see no token outside, and the eigenvalue 1."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from graphattn.graphs import TokenGraph
from graphattn.spectral.arguments import as_edge_weight, as_square_graph
from graphattn.spectral.laplacians.operators import connections

ROUNDING = 1e-6  # the largest difference between the sum of a row and 1


def closed_classes(graph: TokenGraph, edge_weight: Tensor | None = None) -> list[Tensor]:
    r"""Find the closed classes of a graph: groups of tokens that see no token outside the group.

    The term is from Markov chains. Attention is such a chain, in which target i moves to source j
    if the weight of j is positive. Tokens that reach each other form a class. A class is closed if
    no token in it sees a token outside. However often attention is repeated, the tokens of a closed
    class depend only on each other. All other tokens become mixtures of the closed classes. With
    one closed class, all tokens agree in the end; several are the clusters of Krause's model. A
    causal graph has one closed class, token 0, which is the sink.

    A weight of exactly 0 is no edge, and any other weight is an edge, however small. So a weight
    that underflowed to 0 is no edge; without `edge_weight`, all edges count. A token without edges
    does not change, and is a closed class with one token.

    Source: Krause Synchronization Transformers, multi-cluster synchronization (a reducible,
    block-diagonal attention matrix); Seneta, Non-negative Matrices and Markov Chains, Section 1.2.

    Args:
        graph: N tokens.
        edge_weight: weights >= 0 of one head, in the order of ``graph.edge_index``, [E]; ones if
            None.

    Returns:
        A list with the tokens of every closed class, as LongTensors in ascending order on the
        graph's device. The classes are in the order of their first tokens.

    Raises:
        ValueError: if `graph` is not a TokenGraph or is bipartite (N != M), or `edge_weight` is not
            a tensor [E] of finite numbers >= 0.

    Example:
        >>> import graphattn as ga
        >>> ga.spectral.closed_classes(ga.block_window_graph(5, block_size=3))
        [tensor([0, 1, 2]), tensor([3, 4])]
        >>> ga.spectral.closed_classes(ga.causal_graph(5))  # everyone sees token 0, which sees 0
        [tensor([0])]
    """
    graph = as_square_graph(graph)
    if edge_weight is not None:
        edge_weight = as_edge_weight(edge_weight, graph.num_edges)
    label = _closed_label(graph, edge_weight)
    order = np.argsort(label, kind="stable")
    order = order[label[order] >= 0]
    classes = np.split(order, np.flatnonzero(np.diff(label[order])) + 1) if len(order) else []
    classes.sort(key=lambda tokens: int(tokens[0]))
    return [torch.from_numpy(tokens.astype(np.int64)).to(graph.device) for tokens in classes]


def eigenvalue_one_multiplicity(graph: TokenGraph, edge_weight: Tensor) -> int:
    r"""Count how often the attention matrix has the eigenvalue 1.

    For a matrix whose rows are non-negative and sum to 1, this is the number of closed classes (see
    :func:`closed_classes`). It is counted on the graph of positive weights, so it is exact, while a
    numerical count of eigenvalues would depend on a tolerance. If tokens form m groups without
    edges between them, the result is at least m. With top-k, it may be larger, because a group can
    split.

    A weight of exactly 0 is no edge (it is masked, or not selected by top-k), and any other weight
    is an edge. Weights that underflowed count as 0: to avoid this, compute them in float64 or with
    a larger sigma.

    Source: Krause Synchronization Transformers, multi-cluster synchronization (multiplicity >= m;
    here it is exact); Seneta, Non-negative Matrices and Markov Chains, Theorem 1.7 and Section 4.1.

    Args:
        graph: N tokens.
        edge_weight: the attention weights of one head in the order of ``graph.edge_index``, [E],
            such as ``ga.attention_weights(query, key, graph, sigma=1.0, top_k=8)[:, 0]``. Every row
            must sum to 1, to within 1e-6, or have no positive weight. In the second case, attention
            returns 0 for the token, its row of the matrix is zero, and it does not count here.

    Raises:
        ValueError: in the same cases as :func:`closed_classes`, and if a row has another sum.

    Example:
        >>> import torch, graphattn as ga
        >>> x = torch.tensor([0.0, 0.1, 7.0, 7.1]).view(4, 1, 1)
        >>> graph = ga.complete_graph(4)
        >>> weights = ga.attention_weights(x, x, graph, sigma=1.0)[:, 0]
        >>> ga.spectral.eigenvalue_one_multiplicity(graph, weights)  # weak links are links
        1
        >>> weights = ga.attention_weights(x, x, graph, sigma=1.0, top_k=2)[:, 0]
        >>> ga.spectral.eigenvalue_one_multiplicity(graph, weights)
        2
    """
    graph = as_square_graph(graph)
    weight = as_edge_weight(edge_weight, graph.num_edges).detach().double()
    target = graph.edge_index[1].to(weight.device)
    row_sum = weight.new_zeros(graph.num_targets).index_add(0, target, weight)
    wrong = ((row_sum - 1).abs() > ROUNDING) & (row_sum != 0)
    if wrong.any():
        i = int(wrong.nonzero()[0])
        raise ValueError(
            "edge_weight must sum to 1 over the sources of every target (row-stochastic, to within "
            f"{ROUNDING:g}), or be 0 for all of them, got {row_sum[i].item():.9g} for target {i}"
        )
    label = _closed_label(graph, weight)
    label[row_sum.cpu().numpy() == 0] = -1  # These classes are closed, but their row is zero.
    return len(np.unique(label[label >= 0]))


def _closed_label(graph: TokenGraph, edge_weight: Tensor | None) -> NDArray[np.int64]:
    """Number the closed classes; [N], the class of every token, or -1 if it is in none."""
    if graph.num_targets == 0:
        return np.empty(0, dtype=np.int64)
    links = connections(graph, edge_weight)
    label = connected_components(links, directed=True, connection="strong")[1].astype(np.int64)
    target = np.repeat(np.arange(graph.num_targets), np.diff(links.indptr))
    leaves = np.zeros(label.max() + 1, dtype=bool)
    leaves[label[target[label[target] != label[links.indices]]]] = True
    return cast(NDArray[np.int64], np.where(leaves[label], -1, label))

"""Graphs from edge lists, masks, networkx and scipy. ``TokenGraph.to_*`` convert back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from graphattn.graphs.batches.batch_vectors import BatchVector, pair_sizes, with_borders
from graphattn.graphs.edges.lists import sorted_edge_list
from graphattn.graphs.token_graph import TokenGraph
from graphattn.warn import warn_caller

if TYPE_CHECKING:
    import networkx


@overload
def from_edge_index(
    edge_index: Tensor,
    num_targets: int,
    num_sources: int | None = None,
    *,
    return_permutation: Literal[False] = False,
    batch: BatchVector | None = None,
) -> TokenGraph: ...


@overload
def from_edge_index(
    edge_index: Tensor,
    num_targets: int,
    num_sources: int | None = None,
    *,
    return_permutation: Literal[True],
    batch: BatchVector | None = None,
) -> tuple[TokenGraph, Tensor]: ...


def from_edge_index(
    edge_index: Tensor,
    num_targets: int,
    num_sources: int | None = None,
    *,
    return_permutation: bool = False,
    batch: BatchVector | None = None,
) -> TokenGraph | tuple[TokenGraph, Tensor]:
    """Make a graph from an edge list in PyG's order: row 0 is the source j, row 1 the target i.

    The graph sorts its edges by target, then source. With ``return_permutation=True``, the
    permutation is returned as well: ``graph.edge_index == edge_index[:, permutation]``. So
    ``edge_weight[permutation]`` are your values per edge in the order of the graph.

    Args:
        edge_index: integer tensor [2, E], or a PyG EdgeIndex.
        num_targets: N.
        num_sources: M; N if None.
        return_permutation: whether the permutation, a LongTensor [E], is returned as well.
        batch: the item of a batch to which every token belongs, [N] in ascending order, as in PyG;
            a pair (targets, sources) if these are different tokens. Positions restart in every
            item.

    Raises:
        ValueError: if the shape of `edge_index` is not [2, E], an edge is out of range or occurs
            twice; if `batch` is not in ascending order, or an edge joins two items.

    Example:
        >>> import torch, graphattn as ga
        >>> graph, permutation = ga.from_edge_index(
        ...     torch.tensor([[0, 2, 1], [2, 0, 0]]), num_targets=3, return_permutation=True
        ... )
        >>> graph.edge_index
        tensor([[1, 2, 0],
                [0, 0, 2]])
        >>> permutation
        tensor([2, 1, 0])
        >>> bonds = torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]])  # of two molecules
        >>> ga.from_edge_index(bonds, 4, batch=torch.tensor([0, 0, 1, 1])).positions
        tensor([0, 1, 0, 1])
    """
    if num_sources is None:
        num_sources = num_targets
    edges, permutation = sorted_edge_list(
        edge_index, num_targets, num_sources, return_permutation=return_permutation
    )
    graph = TokenGraph(edge_index=edges, num_targets=int(num_targets), num_sources=int(num_sources))
    if batch is not None:
        sizes = pair_sizes(batch, graph.num_targets, graph.num_sources)
        graph = with_borders(graph, sizes, "edge_index")
    return graph if permutation is None or not return_permutation else (graph, permutation)


def from_mask(mask: Tensor) -> TokenGraph:
    """Make a graph from a boolean mask [N, M] that is True where target i sees source j.

    PyTorch's ``scaled_dot_product_attention`` reads boolean masks in the same way.

    Raises:
        ValueError: if `mask` is not a boolean tensor [N, M]. (Convert an additive mask, which holds
            floats, by ``mask == 0`` or ``mask > -inf``.)

    Example:
        >>> import torch, graphattn as ga
        >>> ga.from_mask(torch.ones(3, 3).tril().bool()) == ga.causal_graph(3)
        True
    """
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.dim() != 2:
        got = f"{mask.dtype} of shape {list(mask.shape)}" if isinstance(mask, Tensor) else mask
        raise ValueError(
            f"mask must be a bool tensor of shape [N, M], got {got}: use mask[0, 0] of a mask "
            "[1, 1, N, M], and mask > -inf of one that is added to logits"
        )
    return TokenGraph(
        edge_index=mask.nonzero().T.flip(0),
        num_targets=mask.shape[0],
        num_sources=mask.shape[1],
    )


@overload
def from_networkx(graph: networkx.Graph, *, edge_weight: None = None) -> TokenGraph: ...


@overload
def from_networkx(graph: networkx.Graph, *, edge_weight: str) -> tuple[TokenGraph, Tensor]: ...


def from_networkx(
    graph: networkx.Graph, *, edge_weight: str | None = None
) -> TokenGraph | tuple[TokenGraph, Tensor]:
    """Make a graph from a networkx graph: of an edge a -> b, a is the source and b the target.

    An undirected edge becomes two edges, one per direction, with the same weight. Tokens are the
    nodes in the order of iteration.

    Args:
        graph: a networkx graph. A multigraph must not have two edges between the same nodes in the
            same direction.
        edge_weight: the name of an edge attribute, such as networkx's usual "weight". Its values
            are returned as well, as a tensor [E] in the order of ``graph.edge_index``; its dtype is
            torch's default floating-point dtype unless all values are integers. With None, only
            the graph is returned, with a warning if edges have a "weight" other than 1.

    Raises:
        ValueError: if `graph` is not a networkx graph, a multigraph has an edge twice, or
            the attribute `edge_weight` of an edge is not a number.

    Example:
        >>> import networkx, graphattn as ga
        >>> ga.from_networkx(networkx.path_graph(5)) == ga.window_path_graph(5, window=1)
        True
        >>> roads = networkx.DiGraph()
        >>> roads.add_weighted_edges_from([("c", "a", 0.5), ("a", "c", 2.0), ("b", "c", 1.0)])
        >>> list(roads)  # tokens 0, 1, 2
        ['c', 'a', 'b']
        >>> graph, weights = ga.from_networkx(roads, edge_weight="weight")
        >>> graph.edge_index, weights
        (tensor([[1, 2, 0],
                [0, 0, 1]]), tensor([2.0000, 1.0000, 0.5000]))
    """
    if not callable(getattr(graph, "is_directed", None)) or not hasattr(graph, "nodes"):
        raise ValueError(f"graph must be a networkx graph, got {type(graph).__name__}")
    if edge_weight is not None and not isinstance(edge_weight, str):
        raise ValueError(
            "edge_weight must be the name of an edge attribute, such as 'weight', or None, "
            f"got {edge_weight!r}"
        )
    token = {node: i for i, node in enumerate(graph.nodes)}
    edges = list(graph.edges(data=True))
    if graph.is_multigraph():
        _check_no_parallel_edges(graph, edges)
    pairs = [(token[a], token[b]) for a, b, _ in edges]
    way_back = [] if graph.is_directed() else [e for e, (i, j) in enumerate(pairs) if i != j]
    pairs += [pairs[e][::-1] for e in way_back]
    edge_index = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T
    if edge_weight is None:
        if not all(_number(data.get("weight", 1)) == 1 for _, _, data in edges):
            warn_caller(
                "from_networkx does not use the weights of the edges: to get them, too, call it "
                "with edge_weight='weight'",
            )
        return from_edge_index(edge_index, len(token))
    one_way = [_weight(edge_weight, *edge) for edge in edges]
    values = one_way + [one_way[e] for e in way_back]
    result, permutation = from_edge_index(edge_index, len(token), return_permutation=True)
    weights = torch.tensor(values) if values else torch.empty(0)
    return result, weights[permutation]


def _check_no_parallel_edges(graph: networkx.Graph, edges: list[tuple[Any, Any, Any]]) -> None:
    seen = set()
    for a, b, _ in edges:
        if (a, b) in seen or (not graph.is_directed() and (b, a) in seen):
            simple = "DiGraph" if graph.is_directed() else "Graph"
            raise ValueError(
                f"graph must have each edge once, but this {type(graph).__name__} has the edge "
                f"({a!r}, {b!r}) more than once. Use networkx.{simple}(graph) to keep one of them, "
                "or graphattn.from_scipy(networkx.to_scipy_sparse_array(graph), "
                "return_edge_weight=True) to add up their weights"
            )
        seen.add((a, b))


def _number(value: Any) -> int | float | None:
    """Return `value` as an int or a float; None if it is not a number."""
    if getattr(value, "ndim", None) == 0:  # numpy's and torch's scalars
        value = value.item()
    return value if isinstance(value, int | float) else None


def _weight(name: str, a: Any, b: Any, data: dict[str, Any]) -> int | float:
    """Return the number that is the attribute `name` of an edge."""
    value = _number(data.get(name))
    if value is None:
        has = ", ".join(map(repr, data)) or "none"
        raise ValueError(
            f"edge_weight = {name!r} must be an attribute that is a number for every edge, but for "
            f"the edge ({a!r}, {b!r}) it is {data.get(name)!r}; the attributes of this edge are: "
            f"{has}"
        )
    return value


@overload
def from_scipy(matrix: Any, *, return_edge_weight: Literal[False] = False) -> TokenGraph: ...


@overload
def from_scipy(matrix: Any, *, return_edge_weight: Literal[True]) -> tuple[TokenGraph, Tensor]: ...


def from_scipy(
    matrix: Any, *, return_edge_weight: bool = False
) -> TokenGraph | tuple[TokenGraph, Tensor]:
    """Make a graph from a sparse matrix ``A[source, target]`` [M, N]: its non-zeros are the edges.

    Zeros that the matrix stores are not edges.

    Args:
        matrix: a scipy.sparse array or matrix, in any format.
        return_edge_weight: whether the values of the matrix are returned as well: a tensor [E] of
            the same dtype, in the order of ``graph.edge_index``. With False, there is a warning if
            the matrix has values other than 0 and 1.

    Raises:
        ValueError: if `matrix` is not sparse, or a COO matrix stores an entry twice.

    Example:
        >>> import scipy.sparse, graphattn as ga
        >>> ga.from_scipy(scipy.sparse.eye_array(4, k=1)).edge_index  # A[j, j + 1] = 1
        tensor([[0, 1, 2],
                [1, 2, 3]])
        >>> matrix = scipy.sparse.csr_array([[0.0, 0.5], [2.0, 0.0]])
        >>> graph, weights = ga.from_scipy(matrix, return_edge_weight=True)
        >>> weights
        tensor([2.0000, 0.5000], dtype=torch.float64)
        >>> (graph.to_scipy(weights) != matrix).nnz
        0
    """
    if not hasattr(matrix, "tocoo") or len(matrix.shape) != 2:
        got = f"shape {matrix.shape}" if hasattr(matrix, "tocoo") else type(matrix).__name__
        raise ValueError(f"matrix must be a scipy.sparse matrix [M, N], got {got}")
    coo = matrix.tocoo()
    edge = coo.data != 0
    values = coo.data[edge]
    ends = torch.stack([torch.from_numpy(coo.row[edge]), torch.from_numpy(coo.col[edge])])
    num_sources, num_targets = coo.shape
    if return_edge_weight:
        graph, permutation = from_edge_index(
            ends, num_targets, num_sources, return_permutation=True
        )
        return graph, torch.from_numpy(values)[permutation]
    graph = from_edge_index(ends, num_targets, num_sources)
    if (values != 1).any():
        warn_caller(
            "from_scipy does not use the values of the matrix: to get them, too, call it with "
            "return_edge_weight=True",
        )
    return graph

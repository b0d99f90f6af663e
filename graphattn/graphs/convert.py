"""Graphs from the ecosystem's own types. (The way back: ``TokenGraph.to_*``.)"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from graphattn.graphs.arguments import as_edge_type
from graphattn.graphs.edge_lists import sorted_edge_list
from graphattn.graphs.token_graph import TokenGraph

if TYPE_CHECKING:
    import networkx


@overload
def from_edge_index(
    edge_index: Tensor,
    num_targets: int,
    num_sources: int | None = None,
    *,
    return_permutation: Literal[False] = False,
) -> TokenGraph: ...


@overload
def from_edge_index(
    edge_index: Tensor,
    num_targets: int,
    num_sources: int | None = None,
    *,
    return_permutation: Literal[True],
) -> tuple[TokenGraph, Tensor]: ...


def from_edge_index(
    edge_index: Tensor,
    num_targets: int,
    num_sources: int | None = None,
    *,
    return_permutation: bool = False,
) -> TokenGraph | tuple[TokenGraph, Tensor]:
    """A graph of an edge list in PyG's order: row 0 = source j, row 1 = target i.

    Edges are sorted by target, then source. With ``return_permutation=True`` the permutation that
    does so comes too: ``graph.edge_index == edge_index[:, permutation]``, and per-edge values of
    the caller follow as ``edge_weight[permutation]``.

    Args:
        edge_index: integer tensor [2, E], or a PyG EdgeIndex.
        num_targets: N.
        num_sources: M; N if None.
        return_permutation: also return the LongTensor [E] described above.

    Raises:
        ValueError: if an edge is out of range or stands there twice, or the shape is not [2, E].

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
    """
    if num_sources is None:
        num_sources = num_targets
    edges, permutation = sorted_edge_list(edge_index, num_targets, num_sources)
    graph = TokenGraph(edge_index=edges, num_targets=int(num_targets), num_sources=int(num_sources))
    return (graph, permutation) if return_permutation else graph


def from_mask(mask: Tensor) -> TokenGraph:
    """A graph of a boolean mask [N, M]: True where target i sees source j (SDPA's reading).

    Raises:
        ValueError: if `mask` is not a boolean matrix (additive masks hold floats: use ``mask == 0``
            or ``mask > -inf``).

    Example:
        >>> import torch, graphattn as ga
        >>> ga.from_mask(torch.ones(3, 3).tril().bool()) == ga.causal_graph(3)
        True
    """
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.dim() != 2:
        got = f"{mask.dtype} of shape {list(mask.shape)}" if isinstance(mask, Tensor) else mask
        raise ValueError(f"mask must be a bool tensor of shape [N, M], got {got}")
    target, source = mask.nonzero().T
    return TokenGraph(
        edge_index=torch.stack([source, target]),
        num_targets=mask.shape[0],
        num_sources=mask.shape[1],
    )


def from_networkx(graph: networkx.Graph) -> TokenGraph:
    """A graph of a networkx graph; an edge a -> b makes a the source and b the target.

    An undirected edge gives both directions. Tokens are the nodes in iteration order.

    Raises:
        ValueError: if it is no networkx graph, or a multigraph holds an edge twice.

    Example:
        >>> import networkx, graphattn as ga
        >>> ga.from_networkx(networkx.path_graph(5)) == ga.window_path_graph(5, window=1)
        True
    """
    if not callable(getattr(graph, "is_directed", None)) or not hasattr(graph, "nodes"):
        raise ValueError(f"graph must be a networkx graph, got {type(graph).__name__}")
    token = {node: i for i, node in enumerate(graph.nodes)}
    pairs = [(token[a], token[b]) for a, b in graph.edges()]
    if not graph.is_directed():
        pairs += [(j, i) for i, j in pairs if i != j]
    edge_index = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T
    return from_edge_index(edge_index, len(token))


def from_scipy(matrix: Any) -> TokenGraph:
    """A graph of the non-zeros of a sparse matrix ``A[source, target]``, shape [M, N].

    Stored zeros are not edges.

    Raises:
        ValueError: if `matrix` is not sparse, or a COO matrix stores an entry twice.

    Example:
        >>> import scipy.sparse, graphattn as ga
        >>> ga.from_scipy(scipy.sparse.eye_array(4, k=1)).edge_index  # A[j, j + 1] = 1
        tensor([[0, 1, 2],
                [1, 2, 3]])
    """
    if not hasattr(matrix, "tocoo") or len(matrix.shape) != 2:
        got = f"shape {matrix.shape}" if hasattr(matrix, "tocoo") else type(matrix).__name__
        raise ValueError(f"matrix must be a scipy.sparse matrix [M, N], got {got}")
    coo = matrix.tocoo()
    edge = coo.data != 0
    rows = torch.from_numpy(coo.row[edge].astype("int64"))
    columns = torch.from_numpy(coo.col[edge].astype("int64"))
    num_sources, num_targets = coo.shape
    return from_edge_index(torch.stack([rows, columns]), num_targets, num_sources)


def from_pyg(data: Any, edge_type: tuple[str, str, str] | None = None) -> TokenGraph:
    """A graph of a PyG ``Data``, ``EdgeIndex``, or of one edge type of a ``HeteroData``.

    Sizes are read from it: a Data's ``num_nodes``, an EdgeIndex's ``sparse_size``. In a PyG
    ``Batch`` positions restart in every graph, as in :func:`batch`.

    Args:
        data: a Data, Batch, EdgeIndex or HeteroData.
        edge_type: (source node type, relation, target node type) of a HeteroData; may be left out
            where it has one only.

    Raises:
        ValueError: if it has no edges, does not know its numbers of nodes, or the edge type is
            missing or unknown.

    Example:
        >>> import torch, graphattn as ga
        >>> from torch_geometric.data import Data, HeteroData
        >>> edge_index = torch.tensor([[0, 1], [1, 2]])
        >>> ga.from_pyg(Data(edge_index=edge_index, num_nodes=4))
        TokenGraph(num_tokens=4, num_edges=2)
        >>> tracks = HeteroData()
        >>> tracks["dna"].num_nodes, tracks["protein"].num_nodes = 6, 3
        >>> tracks["dna", "read_by", "protein"].edge_index = edge_index
        >>> ga.from_pyg(tracks, ("dna", "read_by", "protein"))
        TokenGraph(num_targets=3, num_sources=6, num_edges=2)
    """
    if hasattr(data, "edge_types"):  # a HeteroData
        return _from_hetero(data, edge_type)
    if edge_type is not None:
        raise ValueError(
            f"edge_type is for a HeteroData, got {edge_type!r} with a {type(data).__name__}"
        )
    if isinstance(data, Tensor) and hasattr(data, "sparse_size"):  # an EdgeIndex
        num_sources, num_targets = data.sparse_size()
        if num_sources is None or num_targets is None:
            raise ValueError(
                "data is an EdgeIndex that does not know its sparse_size: "
                "use from_edge_index(edge_index, num_targets, num_sources)"
            )
        return from_edge_index(data, num_targets, num_sources)
    edge_index = getattr(data, "edge_index", None)
    if edge_index is None:
        raise ValueError(
            "data must be a PyG Data with an edge_index, an EdgeIndex or a HeteroData, "
            f"got {type(data).__name__}"
        )
    num_nodes = _num_nodes(data, "data")
    return _with_borders(from_edge_index(edge_index, num_nodes), data, data)


def _from_hetero(data: Any, edge_type: tuple[str, str, str] | None) -> TokenGraph:
    if edge_type is None:
        if len(data.edge_types) != 1:
            raise ValueError(
                f"edge_type must say which of the edge types {data.edge_types} is meant"
            )
        edge_type = data.edge_types[0]
    if as_edge_type(edge_type) not in data.edge_types:
        raise ValueError(f"edge_type must be one of {data.edge_types}, got {edge_type}")
    source, _, target = edge_type
    num_targets = _num_nodes(data[target], f"data[{target!r}]")
    num_sources = _num_nodes(data[source], f"data[{source!r}]")
    edge_index = getattr(data[edge_type], "edge_index", None)
    if edge_index is None:
        raise ValueError(f"data[{edge_type}] must have an edge_index, it has {data[edge_type]}")
    graph = from_edge_index(edge_index, num_targets, num_sources)
    return _with_borders(graph, data[target], data[source])


def _num_nodes(store: Any, name: str) -> int:
    """The number of nodes that a Data or a node store tells by itself."""
    if not any(key in store for key in ("num_nodes", "x", "pos")):
        # PyG would guess from the largest index and lose isolated tokens at the end.
        raise ValueError(f"{name} must have num_nodes (or x, or pos): edges do not tell it")
    return store.num_nodes


def _with_borders(graph: TokenGraph, targets: Any, sources: Any) -> TokenGraph:
    """The graph with the borders that a PyG Batch draws: positions restart there."""
    of_targets = _sizes_in_batch(targets, graph.num_targets)
    of_sources = _sizes_in_batch(sources, graph.num_sources)
    if of_targets is None and of_sources is None:
        return graph
    if of_targets is None or of_sources is None or len(of_targets) != len(of_sources):
        parts = ["none" if sizes is None else len(sizes) for sizes in (of_targets, of_sources)]
        raise ValueError(
            "data must be batched alike in targets and sources, got parts: "
            f"{parts[0]} and {parts[1]}"
        )
    count = torch.arange(len(of_targets), device=of_targets.device)
    part_of_target, part_of_source = (
        count.repeat_interleave(sizes).to(graph.device) for sizes in (of_targets, of_sources)
    )
    source, target = graph.edge_index
    crossing = (part_of_target[target] != part_of_source[source]).nonzero()
    if len(crossing) > 0:
        j, i = graph.edge_index[:, int(crossing[0])].tolist()
        raise ValueError(f"the edge (source {j}, target {i}) of data crosses the border of a part")
    return TokenGraph(
        edge_index=graph.edge_index,
        num_targets=graph.num_targets,
        num_sources=graph.num_sources,
        sizes=tuple(zip(of_targets.tolist(), of_sources.tolist(), strict=True)),
    )


def _sizes_in_batch(store: Any, num_nodes: int) -> Tensor | None:
    """How many nodes every part of a Batch has, [parts]; None for what is no Batch.

    From `batch` where it is there: PyG's subgraph keeps that up to date, and not `ptr`.
    """
    ptr, batch = (getattr(store, name, None) for name in ("ptr", "batch"))
    if ptr is None:
        return None
    if not isinstance(ptr, Tensor) or ptr.dim() != 1 or len(ptr) == 0 or ptr.is_floating_point():
        raise ValueError(f"ptr of data must be an integer tensor [parts + 1], got {ptr}")
    if isinstance(batch, Tensor):
        if batch.shape != (num_nodes,) or (batch.diff() < 0).any():
            raise ValueError(
                f"batch of data must hold {num_nodes} parts in ascending order, got {batch}"
            )
        return torch.bincount(batch, minlength=len(ptr) - 1)
    sizes = ptr.diff()
    if int(ptr[0]) != 0 or int(ptr[-1]) != num_nodes or (sizes < 0).any():
        raise ValueError(
            f"ptr of data must ascend from 0 to the number of nodes, {num_nodes}, got {ptr}"
        )
    return sizes

"""Graphs from PyTorch Geometric's types. ``TokenGraph.to_pyg`` converts back."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from graphattn.graphs.arguments import as_edge_type
from graphattn.graphs.batches.batch_vectors import with_borders
from graphattn.graphs.conversions.from_libraries import from_edge_index
from graphattn.graphs.token_graph import TokenGraph
from graphattn.warn import warn_caller

EdgeType = tuple[str, str, str]


@overload
def from_pyg(data: Any, edge_type: EdgeType | None = None) -> TokenGraph: ...


@overload
def from_pyg(
    data: Any, edge_type: EdgeType | None = None, *, return_edge_attr: Literal[True]
) -> tuple[TokenGraph, Tensor]: ...


@overload
def from_pyg(
    data: Any, edge_type: EdgeType | None = None, *, return_edge_weight: Literal[True]
) -> tuple[TokenGraph, Tensor]: ...


@overload
def from_pyg(
    data: Any, edge_type: EdgeType | None = None, *, return_permutation: Literal[True]
) -> tuple[TokenGraph, Tensor]: ...


@overload
def from_pyg(
    data: Any,
    edge_type: EdgeType | None = None,
    *,
    return_edge_attr: bool = ...,
    return_edge_weight: bool = ...,
    return_permutation: bool = ...,
) -> Any: ...


def from_pyg(
    data: Any,
    edge_type: EdgeType | None = None,
    *,
    return_edge_attr: bool = False,
    return_edge_weight: bool = False,
    return_permutation: bool = False,
) -> Any:
    """Make a graph from a PyG ``Data`` or ``EdgeIndex``, or from one edge type of a ``HeteroData``.

    The numbers of tokens are the ``num_nodes`` of a Data, or the ``sparse_size`` of an EdgeIndex.
    If `data` is a PyG ``Batch``, positions restart in every graph, as in :func:`batch`.

    The graph sorts its edges, so values per edge have to be sorted in the same way. Each argument
    `return_...` adds one tensor to the result, in the order of the list below. If `data` has an
    ``edge_attr`` or ``edge_weight`` that is not returned, there is a warning, unless
    `return_permutation` is True, with which you can sort the values yourself.

    Args:
        data: a Data, Batch, EdgeIndex or HeteroData.
        edge_type: (source node type, relation, target node type) of a HeteroData. It may be None if
            there is only one edge type.
        return_edge_attr: whether ``edge_attr`` [E, ...] is returned as well, in the order of
            ``graph.edge_index``.
        return_edge_weight: whether ``edge_weight`` [E] is returned as well, in that order.
        return_permutation: whether the LongTensor [E] with
            ``graph.edge_index == data.edge_index[:, permutation]`` is returned as well.

    Raises:
        ValueError: if `data` has no edges, its numbers of nodes are unknown, `edge_type` is missing
            or unknown, or a tensor that is to be returned does not exist.

    Example:
        >>> import torch, graphattn as ga
        >>> from torch_geometric.data import Data, HeteroData
        >>> edge_index = torch.tensor([[0, 1], [1, 2]])
        >>> ga.from_pyg(Data(edge_index=edge_index, num_nodes=4))
        TokenGraph(num_tokens=4, num_edges=2)
        >>> bonds = Data(edge_index=edge_index.flip(1), num_nodes=4)
        >>> bonds.edge_attr = torch.tensor([12, 1])
        >>> graph, edge_attr = ga.from_pyg(bonds, return_edge_attr=True)
        >>> edge_attr  # of the edges 0 -> 1 and 1 -> 2
        tensor([ 1, 12])
        >>> tracks = HeteroData()
        >>> tracks["dna"].num_nodes, tracks["protein"].num_nodes = 6, 3
        >>> tracks["dna", "read_by", "protein"].edge_index = edge_index
        >>> ga.from_pyg(tracks, ("dna", "read_by", "protein"))
        TokenGraph(num_targets=3, num_sources=6, num_edges=2)
    """
    if hasattr(data, "edge_types"):  # a HeteroData
        edge_type = source, _, target = _edge_type_of(data, edge_type)
        store, name = data[edge_type], f"data[{edge_type}]"
        if getattr(store, "edge_index", None) is None:
            raise ValueError(f"{name} must have an edge_index, got {store}")
        ends = [(data[node_type], f"data[{node_type!r}]") for node_type in (target, source)]
        graph, permutation = _from_stores(store, ends)
    elif edge_type is not None:
        raise ValueError(
            f"edge_type must be None unless data is a HeteroData, got {edge_type!r} with a "
            f"{type(data).__name__}"
        )
    else:
        store, name = data, "data"
        graph, permutation = _from_homogeneous(data)
    results: list[Any] = [graph]
    left = []
    wanted = {"edge_attr": return_edge_attr, "edge_weight": return_edge_weight}
    for key, is_wanted in wanted.items():
        value = getattr(store, key, None)
        if is_wanted:
            results.append(_in_order(value, permutation, f"return_{key}", f"{name}.{key}"))
        elif value is not None and not return_permutation:
            left.append(key)
    if left:
        warn_caller(
            f"from_pyg does not use {name}.{f' and {name}.'.join(left)}: with "
            f"{', '.join(f'return_{key}=True' for key in left)} it returns them in the order of "
            "the graph's edges, with return_permutation=True it returns how the edges were sorted",
        )
    if return_permutation:
        results.append(permutation)
    return tuple(results) if len(results) > 1 else graph


def _in_order(value: Any, permutation: Tensor, argument: str, name: str) -> Tensor:
    """Sort values per edge as the graph sorted its edges, after checking their shape."""
    count = len(permutation)
    if not isinstance(value, Tensor) or value.dim() == 0 or len(value) != count:
        got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"{argument} must be False unless {name} is a tensor with one entry for each of "
            f"{count} edges, got {got}"
        )
    return value[permutation.to(value.device)]


def _from_homogeneous(data: Any) -> tuple[TokenGraph, Tensor]:
    """Return the graph of a Data or EdgeIndex, and the permutation that sorted its edges."""
    if isinstance(data, Tensor) and hasattr(data, "sparse_size"):  # an EdgeIndex
        num_sources, num_targets = data.sparse_size()
        if num_sources is None or num_targets is None:
            raise ValueError(
                "data must be an EdgeIndex with a sparse_size, got one without: "
                "use from_edge_index(edge_index, num_targets, num_sources)"
            )
        return from_edge_index(data, num_targets, num_sources, return_permutation=True)
    if getattr(data, "edge_index", None) is None:
        raise ValueError(
            "data must be a PyG Data with an edge_index, an EdgeIndex or a HeteroData, "
            f"got {type(data).__name__}"
        )
    return _from_stores(data, [(data, "data"), (data, "data")])


def _edge_type_of(data: Any, edge_type: EdgeType | None) -> EdgeType:
    if edge_type is None:
        if len(data.edge_types) != 1:
            raise ValueError(f"edge_type must be one of the edge types {data.edge_types}, got None")
        edge_type = data.edge_types[0]
    if as_edge_type(edge_type) not in data.edge_types:
        raise ValueError(f"edge_type must be one of {data.edge_types}, got {edge_type}")
    return edge_type


def _from_stores(edges: Any, ends: list[tuple[Any, str]]) -> tuple[TokenGraph, Tensor]:
    """Return the graph between the stores of targets and sources, which have names for errors."""
    sizes = [_num_nodes(store, name) for store, name in ends]
    graph, permutation = from_edge_index(edges.edge_index, *sizes, return_permutation=True)
    return _with_borders(graph, *(store for store, _ in ends)), permutation


def _num_nodes(store: Any, name: str) -> int:
    """Return the number of nodes of a Data or a node store, but never guess it from the edges."""
    if not any(key in store for key in ("num_nodes", "x", "pos")):
        # PyG would guess from the largest index and lose isolated tokens at the end.
        raise ValueError(
            f"{name} must have num_nodes (or x, or pos): the number of nodes does not follow from "
            "the edges"
        )
    return store.num_nodes


def _with_borders(graph: TokenGraph, targets: Any, sources: Any) -> TokenGraph:
    """Return the graph as a batch with the sizes of a PyG Batch, so that positions restart."""
    of_targets = _sizes_in_batch(targets, graph.num_targets)
    of_sources = _sizes_in_batch(sources, graph.num_sources)
    if of_targets is None and of_sources is None:
        return graph
    if of_targets is None or of_sources is None or len(of_targets) != len(of_sources):
        parts = ["none" if sizes is None else len(sizes) for sizes in (of_targets, of_sources)]
        raise ValueError(
            "data must have equally many graphs in the batches of its targets and sources, got "
            f"{parts[0]} and {parts[1]}"
        )
    sizes = tuple(zip(of_targets.tolist(), of_sources.tolist(), strict=True))
    return with_borders(graph, sizes, "data")


def _sizes_in_batch(store: Any, num_nodes: int) -> Tensor | None:
    """Count the nodes of every graph in a Batch, [graphs]; None if `store` is not of a Batch.

    If there is a `batch`, it is used, because PyG's `subgraph` updates `batch` but not `ptr`.
    """
    ptr, batch = (getattr(store, name, None) for name in ("ptr", "batch"))
    if ptr is None:
        return None
    if not isinstance(ptr, Tensor) or ptr.dim() != 1 or len(ptr) == 0 or ptr.is_floating_point():
        raise ValueError(f"ptr of data must be an integer tensor [graphs + 1], got {ptr}")
    if isinstance(batch, Tensor):
        if batch.shape != (num_nodes,) or (batch.diff() < 0).any():
            raise ValueError(
                f"batch of data must have {num_nodes} entries in ascending order, got {batch}"
            )
        return torch.bincount(batch, minlength=len(ptr) - 1)
    sizes = ptr.diff()
    if int(ptr[0]) != 0 or int(ptr[-1]) != num_nodes or (sizes < 0).any():
        raise ValueError(
            f"ptr of data must ascend from 0 to the number of nodes, {num_nodes}, got {ptr}"
        )
    return sizes

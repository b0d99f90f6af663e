"""A token graph as the ecosystem's own types: what ``TokenGraph.to_*`` return."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from graphattn.graphs.arguments import as_edge_type

if TYPE_CHECKING:
    import networkx
    import scipy.sparse
    from torch_geometric.data import Data, HeteroData

    from graphattn.graphs.token_graph import TokenGraph


def pyg_of(
    graph: TokenGraph,
    edge_type: tuple[str, str, str] | None,
    edge_attr: Tensor | None,
    edge_weight: Tensor | None,
) -> Any:
    """An EdgeIndex, a Data or a HeteroData: see ``TokenGraph.to_pyg``."""
    from torch_geometric import EdgeIndex
    from torch_geometric.data import Data, HeteroData

    if edge_attr is not None:
        _check_per_edge(graph, "edge_attr", edge_attr)
    if edge_weight is not None:
        _check_per_edge(graph, "edge_weight", edge_weight, dims=1)
    stores: tuple[Any, Any, Any]  # targets, sources, edges
    data: Data | HeteroData
    if edge_type is None:
        if edge_attr is None and edge_weight is None:
            return EdgeIndex(
                graph.edge_index,
                sparse_size=(graph.num_sources, graph.num_targets),
                sort_order="col",
            )
        if any(targets != sources for targets, sources in graph.sizes):
            raise ValueError(
                "edge_type must name the nodes, as in ('source', 'to', 'target'): a Data has "
                f"one kind of them, but the graph has as many targets and sources as "
                f"{graph.sizes}"
            )
        data = Data(edge_index=graph.edge_index)
        stores = (data, data, data)
    else:
        source, _, target = as_edge_type(edge_type)
        if source == target and any(targets != sources for targets, sources in graph.sizes):
            raise ValueError(
                f"edge_type {edge_type} names one node type, but the graph has as many targets "
                f"and sources as {graph.sizes}"
            )
        data = HeteroData()
        stores = (data[target], data[source], data[edge_type])
        stores[2].edge_index = graph.edge_index  # PyG cannot coalesce its EdgeIndex here
    for side in (0, 1):
        sizes = torch.tensor([size[side] for size in graph.sizes], device=graph.device)
        stores[side].num_nodes = int(sizes.sum())
        if len(sizes) > 1:
            stores[side].ptr = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
            count = torch.arange(len(sizes), device=graph.device)
            stores[side].batch = count.repeat_interleave(sizes)
    if edge_attr is not None:
        stores[2].edge_attr = edge_attr
    if edge_weight is not None:
        stores[2].edge_weight = edge_weight
    return data


def networkx_of(graph: TokenGraph, edge_weight: Tensor | None) -> networkx.DiGraph:
    """A DiGraph: see ``TokenGraph.to_networkx``."""
    import networkx

    other = networkx.DiGraph()
    sources, targets = graph.edge_index.tolist()
    if graph.num_targets == graph.num_sources:
        other.add_nodes_from(range(graph.num_targets))
    else:
        other.add_nodes_from((("target", i) for i in range(graph.num_targets)), bipartite=0)
        other.add_nodes_from((("source", j) for j in range(graph.num_sources)), bipartite=1)
        sources, targets = [("source", j) for j in sources], [("target", i) for i in targets]
    if edge_weight is None:
        other.add_edges_from(zip(sources, targets, strict=True))
    else:
        _check_per_edge(graph, "edge_weight", edge_weight, dims=1)
        other.add_weighted_edges_from(zip(sources, targets, edge_weight.tolist(), strict=True))
    return other


def scipy_of(graph: TokenGraph, edge_weight: Tensor | None) -> scipy.sparse.csr_array:
    """A CSR array: see ``TokenGraph.to_scipy``."""
    import numpy as np
    import scipy.sparse

    source, target = graph.edge_index.cpu().numpy()
    if edge_weight is None:
        values = np.ones(len(source))
    else:
        _check_per_edge(graph, "edge_weight", edge_weight, dims=1)
        if edge_weight.dtype in (torch.float16, torch.bfloat16):  # scipy knows neither
            edge_weight = edge_weight.float()
        values = edge_weight.detach().cpu().numpy()
    shape = (graph.num_sources, graph.num_targets)
    return scipy.sparse.coo_array((values, (source, target)), shape=shape).tocsr()


def _check_per_edge(graph: TokenGraph, name: str, value: Any, dims: int | None = None) -> None:
    shape = value.shape if isinstance(value, Tensor) else ()
    if len(shape) == 0 or shape[0] != graph.num_edges or dims not in (None, len(shape)):
        got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        more = "" if dims == 1 else ", ..."
        raise ValueError(
            f"{name} must be a tensor of shape [{graph.num_edges}{more}] (one per edge), got {got}"
        )

"""A token graph as the ecosystem's own types: what ``TokenGraph.to_*`` return."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from graphattn.graphs.arguments import as_edge_type
from graphattn.graphs.conversions.to_pyg_batch import pyg_batch_of_parts
from graphattn.graphs.edges.storage import HeldGraph

if TYPE_CHECKING:
    import networkx
    import scipy.sparse
    from torch_geometric.data import Data, HeteroData


def pyg_of(
    graph: HeldGraph,
    edge_type: tuple[str, str, str] | None,
    edge_attr: Tensor | None,
    edge_weight: Tensor | None,
    *,
    as_data: bool = False,
) -> Any:
    """An EdgeIndex, a Data or a HeteroData: see ``TokenGraph.to_pyg``.

    With `as_data` a Data also where there are no values of edges.
    """
    from torch_geometric import EdgeIndex
    from torch_geometric.data import Data, HeteroData

    if edge_attr is not None:
        _check_per_edge(graph, "edge_attr", edge_attr)
    if edge_weight is not None:
        _check_per_edge(graph, "edge_weight", edge_weight, dims=1)
    stores: tuple[Any, Any, Any]  # targets, sources, edges
    data: Data | HeteroData
    if edge_type is None:
        if edge_attr is None and edge_weight is None and not as_data:
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
        if len(graph.sizes) > 1:
            return _pyg_parts(graph, edge_type, edge_attr, edge_weight)
        data = Data(edge_index=graph.edge_index)
        stores = (data, data, data)
    else:
        source, _, target = as_edge_type(edge_type)
        if source == target and any(targets != sources for targets, sources in graph.sizes):
            raise ValueError(
                f"edge_type {edge_type} names one node type, but the graph has as many targets "
                f"and sources as {graph.sizes}"
            )
        if len(graph.sizes) > 1:
            return _pyg_parts(graph, edge_type, edge_attr, edge_weight)
        data = HeteroData()
        stores = (data[target], data[source], data[edge_type])
        stores[2].edge_index = graph.edge_index  # PyG cannot coalesce its EdgeIndex here
    for side in (0, 1):
        stores[side].num_nodes = graph.num_sources if side else graph.num_targets
    if edge_attr is not None:
        stores[2].edge_attr = edge_attr
    if edge_weight is not None:
        stores[2].edge_weight = edge_weight
    return data


def _pyg_parts(
    graph: HeldGraph,
    edge_type: tuple[str, str, str] | None,
    edge_attr: Tensor | None,
    edge_weight: Tensor | None,
) -> Any:
    """A PyG Batch of the graphs that stand side by side in `graph`."""
    given = {"edge_attr": edge_attr, "edge_weight": edge_weight}
    values = {name: value for name, value in given.items() if value is not None}

    def of_part(part: HeldGraph, values: dict[str, Tensor]) -> Any:
        own = values.get("edge_attr"), values.get("edge_weight")
        return pyg_of(part, edge_type, *own, as_data=True)

    return pyg_batch_of_parts(graph, edge_type, values, of_part)


def pyg_batch_of_items(
    sizes: tuple[tuple[int, int], ...], edges: list[Tensor], fields: list[dict[str, Any]]
) -> Any:
    """A PyG Batch of the items of a TokenBatch: see ``TokenBatch.to_pyg``.

    Args:
        sizes: (targets, sources) of every item.
        edges: [2, E] of every item, numbered from its own first token.
        fields: of every item, by name.
    """
    from torch_geometric.data import Batch, Data

    if any(targets != sources for targets, sources in sizes):
        raise ValueError(
            "to_pyg needs targets and sources that are the same tokens, a Data has one kind of "
            f"nodes, but the (targets, sources) of the items are {sizes}"
        )
    items = []
    for (num_tokens, _), own_edges, own in zip(sizes, edges, fields, strict=True):
        data = Data(edge_index=own_edges, **own)
        data.num_nodes = num_tokens
        items.append(data)
    return Batch.from_data_list(items)


def networkx_of(graph: HeldGraph, edge_weight: Tensor | None) -> networkx.DiGraph:
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


def scipy_of(graph: HeldGraph, edge_weight: Tensor | None) -> scipy.sparse.csr_array:
    """A CSR array: see ``TokenGraph.to_scipy``."""
    import numpy as np
    import scipy.sparse

    begin, source = (x.cpu().numpy() for x in graph.compact_csr())
    if edge_weight is None:
        values = np.ones(len(source))
    else:
        _check_per_edge(graph, "edge_weight", edge_weight, dims=1)
        if edge_weight.dtype in (torch.float16, torch.bfloat16):  # scipy knows neither
            edge_weight = edge_weight.float()
        values = edge_weight.detach().cpu().numpy()
    shape = (graph.num_sources, graph.num_targets)
    # Edges are sorted by target, which is the column.
    return scipy.sparse.csc_array((values, source, begin), shape=shape).tocsr()


def _check_per_edge(graph: HeldGraph, name: str, value: Any, dims: int | None = None) -> None:
    shape = value.shape if isinstance(value, Tensor) else ()
    if len(shape) == 0 or shape[0] != graph.num_edges or dims not in (None, len(shape)):
        got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        more = "" if dims == 1 else ", ..."
        raise ValueError(
            f"{name} must be a tensor of shape [{graph.num_edges}{more}] (one per edge), got {got}"
        )

"""Conversions of a token graph to the types of PyG, networkx and scipy, for ``TokenGraph.to_*``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from graphattn.graphs.arguments import as_edge_type
from graphattn.graphs.edges.storage import StoredGraph

if TYPE_CHECKING:
    import networkx
    import scipy.sparse


def pyg_of(
    graph: StoredGraph,
    edge_type: tuple[str, str, str] | None,
    edge_attr: Tensor | None = None,
    edge_weight: Tensor | None = None,
    *,
    as_data: bool = False,
) -> Any:
    """Convert to an EdgeIndex, a Data or a HeteroData: see ``TokenGraph.to_pyg``.

    With `as_data`, the result is a Data even if there are no values per edge.
    """
    from torch_geometric import EdgeIndex
    from torch_geometric.data import Data, HeteroData

    if edge_attr is not None:
        _check_per_edge(graph, "edge_attr", edge_attr)
    if edge_weight is not None:
        _check_per_edge(graph, "edge_weight", edge_weight, dims=1)
    given = {"edge_attr": edge_attr, "edge_weight": edge_weight}
    values = {name: value for name, value in given.items() if value is not None}
    differ = any(targets != sources for targets, sources in graph.sizes)
    source = target = ""
    if edge_type is not None:
        source, _, target = as_edge_type(edge_type)
        if source == target and differ:
            raise ValueError(
                "edge_type must name two node types if targets and sources are not equally many, "
                f"got {edge_type} for a graph whose (targets, sources) are {graph.sizes}"
            )
    elif not values and not as_data:
        sparse_size = graph.num_sources, graph.num_targets
        return EdgeIndex(graph.edge_index, sparse_size=sparse_size, sort_order="col")
    elif differ:
        raise ValueError(
            "edge_type must be given, such as ('source', 'to', 'target'), if targets and sources "
            "are not equally many, because a Data has one kind of nodes; the (targets, sources) of "
            f"this graph are {graph.sizes}"
        )
    if len(graph.sizes) > 1:
        return _pyg_batch_of_parts(graph, edge_type, values)
    data: Any = Data() if edge_type is None else HeteroData()
    edges = data if edge_type is None else data[edge_type]
    # A plain tensor, because PyG cannot coalesce a HeteroData that has an EdgeIndex.
    edges.edge_index = graph.edge_index
    for node_type, count in ((target, graph.num_targets), (source, graph.num_sources)):
        (data if edge_type is None else data[node_type]).num_nodes = count
    for name, value in values.items():
        edges[name] = value
    return data


def pyg_batch_of_items(
    sizes: tuple[tuple[int, int], ...], edges: list[Tensor], fields: list[dict[str, Any]]
) -> Any:
    """Make a PyG Batch of the items of a TokenBatch: see ``TokenBatch.to_pyg``.

    In `edges` [2, E] of every item, the first token of the item has the number 0.
    """
    from torch_geometric.data import Batch, Data

    if any(targets != sources for targets, sources in sizes):
        raise ValueError(
            "to_pyg() needs items whose targets and sources are the same tokens, because a Data "
            f"has one kind of nodes, but the (targets, sources) of the items are {sizes}"
        )
    items = []
    for (num_tokens, _), edge_index, values in zip(sizes, edges, fields, strict=True):
        data = Data(edge_index=edge_index, **values)
        data.num_nodes = num_tokens
        items.append(data)
    return Batch.from_data_list(items)


def networkx_of(graph: StoredGraph, edge_weight: Tensor | None) -> networkx.DiGraph:
    """Convert to a DiGraph: see ``TokenGraph.to_networkx``."""
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


def scipy_of(graph: StoredGraph, edge_weight: Tensor | None) -> scipy.sparse.csr_array:
    """Convert to a CSR array: see ``TokenGraph.to_scipy``."""
    import numpy as np
    import scipy.sparse

    begin, source = (x.cpu().numpy() for x in graph.compact_csr())
    if edge_weight is None:
        values = np.ones(len(source))
    else:
        _check_per_edge(graph, "edge_weight", edge_weight, dims=1)
        if edge_weight.dtype in (torch.float16, torch.bfloat16):  # scipy has neither dtype
            edge_weight = edge_weight.float()
        values = edge_weight.detach().cpu().numpy()
    shape = (graph.num_sources, graph.num_targets)
    # Edges are sorted by target, which is the column.
    return scipy.sparse.csc_array((values, source, begin), shape=shape).tocsr()


def _check_per_edge(graph: StoredGraph, name: str, value: Any, dims: int | None = None) -> None:
    shape = value.shape if isinstance(value, Tensor) else ()
    if len(shape) == 0 or shape[0] != graph.num_edges or dims not in (None, len(shape)):
        got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        more = "" if dims == 1 else ", ..."
        raise ValueError(
            f"{name} must be a tensor of shape [{graph.num_edges}{more}] (one per edge), got {got}"
        )


def _pyg_batch_of_parts(
    graph: StoredGraph, edge_type: tuple[str, str, str] | None, values: dict[str, Tensor]
) -> Any:
    """Make a PyG Batch of the two graphs or more in a batch, without a loop over them.

    PyG joins two empty graphs to a Batch, which has all its attributes. Then the values of edges
    and nodes are replaced by those of `graph`, which are in the same order already.
    """
    from torch_geometric.data import Batch

    device = graph.device
    no_edges = torch.empty((2, 0), dtype=torch.int64, device=device)
    none = type(graph)(edge_index=no_edges, num_targets=0, num_sources=0)
    of_no_edges = {name: value[:0] for name, value in values.items()}
    empty = pyg_of(none, edge_type, **of_no_edges, as_data=True)
    batch = Batch.from_data_list([empty, empty])
    targets, sources = (torch.tensor([size[side] for size in graph.sizes]) for side in (0, 1))
    first_target, first_source = (_starts(sizes) for sizes in (targets, sources))
    count = len(graph.sizes)
    item = torch.arange(count)
    nodes = [(batch, targets, first_target)]
    edges, of_edges, increments = batch, batch._slice_dict, batch._inc_dict
    shift = first_source[:-1]
    if edge_type is not None:
        source, _, target = edge_type
        nodes = [
            (batch[target], targets, first_target),
            (batch[source], sources, first_source),
        ]
        edges = batch[edge_type]
        of_edges, increments = batch._slice_dict[edge_type], batch._inc_dict[edge_type]
        shift = torch.stack([shift, first_target[:-1]], dim=1)[:, :, None]
        # PyG has no entry for node types without features, and could not separate them then.
        for node_type in (source, target):
            batch._slice_dict.setdefault(node_type, {})
            batch._inc_dict.setdefault(node_type, {})
    for store, sizes, first in nodes:
        store.num_nodes = int(first[-1])
        store._num_nodes = sizes.tolist()
        store.batch = item.repeat_interleave(sizes).to(device)
        store.ptr = first.to(device)
    borders = graph.compact_rowptr[first_target.to(device)].long().cpu()
    for name, value in {"edge_index": graph.edge_index, **values}.items():
        edges[name] = value
        of_edges[name] = borders
        increments[name] = shift if name == "edge_index" else torch.zeros_like(item)
    batch._num_graphs = count
    return batch


def _starts(sizes: Tensor) -> Tensor:
    """Return the first index of every graph, and the end of the last one."""
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])

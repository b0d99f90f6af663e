"""Conversion of a batch of graphs to PyG's ``Batch`` in one step, without a loop over graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from graphattn.graphs.edges.storage import G


def pyg_batch_of_parts(
    graph: G,
    edge_type: tuple[str, str, str] | None,
    values: dict[str, Tensor],
    pyg_of_part: Callable[[G, dict[str, Tensor]], Any],
) -> Any:
    """Make a PyG Batch of the graphs in a batch.

    PyG joins two empty graphs to a Batch, which has all its attributes. Then the values of edges
    and nodes are replaced by those of `graph`, which are in the same order already.

    Args:
        graph: a batch of two graphs or more. If `edge_type` is None, each must have as many targets
            as sources.
        edge_type: (source node type, relation, target node type) of a HeteroData.
        values: "edge_attr" and "edge_weight", if they are given.
        pyg_of_part: makes a Data or HeteroData of a graph and its values per edge.
    """
    from torch_geometric.data import Batch

    device = graph.device
    none = type(graph)(
        edge_index=torch.empty((2, 0), dtype=torch.int64, device=device),
        num_targets=0,
        num_sources=0,
    )
    empty = pyg_of_part(none, {name: value[:0] for name, value in values.items()})
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

"""Combinations of graphs: unions of their edges, and batches of sequences."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor

from graphattn.graphs.edges.index_width import as_stored
from graphattn.graphs.structures.composites import Parts, Union, union_of
from graphattn.graphs.structures.structure import GraphStructure
from graphattn.graphs.token_graph import TokenGraph


def union(a: TokenGraph, b: TokenGraph) -> TokenGraph:
    """Return a graph with all edges of `a` and of `b`, over the same tokens.

    An edge that both have is in the result once. If both graphs are structured, so is the result,
    and no edge is listed.

    Raises:
        ValueError: if the numbers of tokens, the positions or the devices differ.

    Example:
        >>> import graphattn as ga
        >>> near, far = ga.window_path_graph(9, 1), ga.dilated_window_graph(9, 2, dilation=4)
        >>> ga.union(near, far).edge_index[0, :4]  # what token 0 sees
        tensor([0, 1, 4, 8])
    """
    for name, graph in (("a", a), ("b", b)):
        if not isinstance(graph, TokenGraph):
            raise ValueError(f"{name} must be a TokenGraph, got {type(graph).__name__}")
    if (a.num_targets, a.num_sources) != (b.num_targets, b.num_sources):
        raise ValueError(
            f"a and b must have the same tokens, but a has {a.num_targets} targets and "
            f"{a.num_sources} sources, and b has {b.num_targets} and {b.num_sources}"
        )
    if a.device != b.device:
        raise ValueError(f"a and b must be on one device, got {a.device} and {b.device}")
    for difference, of_a, of_b in (
        ("their sequences have different (target, source) sizes", a.sizes, b.sizes),
        ("their (target, source) positions begin at different numbers", a.starts, b.starts),
    ):
        if of_a != of_b:
            raise ValueError(
                f"a and b must have the same tokens, but {difference}: {of_a} and {of_b}"
            )
    if not a.has_positions_of(b):
        raise ValueError(
            "a and b must have the same tokens, but their positions differ: if one of them is the "
            "result of TokenGraph.permute, permute the other one, too"
        )
    if a.structure is not None and b.structure is not None:
        parts: list[GraphStructure] = []
        for part_structure in (a.structure, b.structure):
            inner = part_structure.parts if isinstance(part_structure, Union) else (part_structure,)
            parts.extend(part for part in inner if part not in parts)
        structure = union_of(parts)
        edge_index = None
    else:
        structure = None
        key = torch.cat(
            [
                graph.compact_edges[1].long() * a.num_sources + graph.compact_edges[0]
                for graph in (a, b)
            ]
        ).unique()
        edge_index = torch.stack([key % max(a.num_sources, 1), key // max(a.num_sources, 1)])
    return TokenGraph(
        structure=structure,
        edge_index=edge_index,
        num_targets=a.num_targets,
        num_sources=a.num_sources,
        sizes=a.sizes,
        starts=a.starts,
        is_causal=a.is_causal and b.is_causal,
        has_causal_part=a.has_causal_part and b.has_causal_part,
        device=a.device,
        positions=a.own_positions or b.own_positions,
    )


def batch(graphs: Iterable[TokenGraph]) -> TokenGraph:
    """Join graphs into one graph over their concatenated tokens: a batch of packed sequences.

    No edge joins tokens of two graphs, and positions restart in each. The features of the batch are
    ``torch.cat([x_0, x_1, ...])``, [N_total, C]. If all graphs are structured, so is the batch; if
    all store a table of neighbours, so does the batch. In both cases no edge is listed.

    Raises:
        ValueError: if `graphs` is empty, has an entry that is not a TokenGraph, or the devices
            differ.

    Example:
        >>> import graphattn as ga
        >>> packed = ga.batch([ga.causal_graph(2), ga.causal_graph(3)])
        >>> packed.positions
        tensor([0, 1, 0, 1, 2])
        >>> packed.num_edges
        9
    """
    if isinstance(graphs, TokenGraph) or not isinstance(graphs, Iterable):
        raise ValueError(f"graphs must be a list of TokenGraphs, got {type(graphs).__name__}")
    graphs = list(graphs)
    if not graphs:
        raise ValueError("graphs must hold at least one TokenGraph, got an empty list")
    for graph in graphs:
        if not isinstance(graph, TokenGraph):
            raise ValueError(f"graphs must hold only TokenGraphs, got a {type(graph).__name__}")
    devices = {graph.device for graph in graphs}
    if len(devices) > 1:
        raise ValueError(f"graphs must be on one device, got {sorted(map(str, devices))}")
    structure = edge_index = neighbors = None
    if all(graph.structure is not None for graph in graphs):
        inner = [graph.structure for graph in graphs]
        parts = [s.parts if isinstance(s, Parts) else (s,) for s in inner if s is not None]
        structure = Parts(tuple(itertools.chain.from_iterable(parts)))
    elif all(graph.is_table for graph in graphs):
        neighbors = _joined_tables(graphs)
    else:
        edge_index = _joined_lists(graphs)
    return TokenGraph(
        structure=structure,
        edge_index=edge_index,
        neighbors=neighbors,
        num_targets=sum(graph.num_targets for graph in graphs),
        num_sources=sum(graph.num_sources for graph in graphs),
        sizes=tuple(size for graph in graphs for size in graph.sizes),
        starts=tuple(start for graph in graphs for start in graph.starts),
        is_causal=all(graph.is_causal for graph in graphs),
        has_causal_part=any(graph.has_causal_part for graph in graphs),
        device=graphs[0].device,
        positions=_joined_positions(graphs),
    )


def _joined_lists(graphs: list[TokenGraph]) -> Tensor:
    """Join the edge lists of all graphs to one sorted list."""
    lists = [graph.compact_edges for graph in graphs]
    sizes = [[graph.num_sources for graph in graphs], [graph.num_targets for graph in graphs]]
    edges = as_stored(torch.cat(lists, dim=1), *map(sum, sizes), sum(x.shape[1] for x in lists))
    count = torch.tensor([x.shape[1] for x in lists], device=edges.device)
    size = torch.tensor(sizes, dtype=edges.dtype, device=edges.device)
    start = size.cumsum(1, dtype=edges.dtype) - size
    for ends, first in zip(edges, start, strict=True):
        ends += first.repeat_interleave(count, output_size=len(ends))
    return edges


def _joined_tables(graphs: list[TokenGraph]) -> Tensor:
    """Join the neighbour tables of all graphs to one table, as wide as the widest of them."""
    tables = [neighbors for graph in graphs if (neighbors := graph.compact_neighbors) is not None]
    most, start, shifted = max(table.shape[1] for table in tables), 0, []
    places = most * sum(len(table) for table in tables)
    num_sources = sum(graph.num_sources for graph in graphs)
    for graph, table in zip(graphs, tables, strict=True):
        table = as_stored(table, num_sources, places)
        table = table.where(table < 0, table + start)
        shifted.append(torch.nn.functional.pad(table, (most - table.shape[1], 0), value=-1))
        start += graph.num_sources
    return torch.cat(shifted)


def _joined_positions(graphs: list[TokenGraph]) -> tuple[Tensor, Tensor] | None:
    """Join the positions of all graphs; None if every graph just counts its tokens."""
    if all(graph.own_positions is None for graph in graphs):
        return None
    of_targets = torch.cat([graph.positions for graph in graphs])
    if all(graph.source_positions is graph.positions for graph in graphs):
        return of_targets, of_targets
    return of_targets, torch.cat([graph.source_positions for graph in graphs])

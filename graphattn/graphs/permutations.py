"""Numbering the tokens of a graph in another order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphattn.graphs.edges.lists import sorted_edge_list
from graphattn.graphs.edges.storage import G, StoredGraph

Permutations = Tensor | tuple[Tensor, Tensor]


def permuted(graph: G, permutation: Permutations, *, with_edges: bool = False) -> tuple[G, Any]:
    """Implement :meth:`graphattn.TokenGraph.permute`, which has the description.

    The second result is the permutation of edges; for a table it is None without `with_edges`.
    """
    of_targets, of_sources = checked_pair(graph, permutation)
    same = of_targets is of_sources
    target_number = inverse(of_targets)
    source_number = target_number if same else inverse(of_sources)
    neighbors = edge_index = edges = None
    if graph.compact_neighbors is None or with_edges:
        edge_index, edges = _renumbered_edges(graph, target_number, source_number)
    if graph.compact_neighbors is not None:
        rows, edge_index = graph.compact_neighbors[of_targets], None
        neighbors = _renumbered_table(rows, source_number)
    positions = graph.positions[of_targets]
    if same and graph.source_positions is graph.positions:
        source_positions = positions
    else:
        source_positions = graph.source_positions[of_sources]
    renumbered = type(graph)(
        edge_index=edge_index,
        neighbors=neighbors,
        num_targets=graph.num_targets,
        num_sources=graph.num_sources,
        sizes=graph.sizes,
        starts=graph.starts,
        # Every token still sees the same tokens, so an operation that leaks the future still does.
        has_causal_part=graph.has_causal_part,
        positions=(positions, source_positions),
    )
    return renumbered, edges


def inverse(permutation: Tensor) -> Tensor:
    """Return the new number of every token, given the token at every new number."""
    number = torch.empty_like(permutation)
    number[permutation] = torch.arange(len(permutation), device=permutation.device)
    return number


def _renumbered_edges(
    graph: StoredGraph, target_number: Tensor, source_number: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the sorted edges between new numbers, and the edge of this graph that each one was."""
    source, target = graph.compact_edges
    source_number, target_number = (x.to(source.dtype) for x in (source_number, target_number))
    renumbered = torch.stack([source_number[source], target_number[target]])
    return sorted_edge_list(renumbered, graph.num_targets, graph.num_sources)


def _renumbered_table(rows: Tensor, number: Tensor) -> Tensor:
    """Renumber the sources of a table and sort every row again; -1 stays at the front."""
    if not len(number):
        return rows
    return number[rows.clamp(min=0)].where(rows >= 0, -1).sort(dim=1).values


def checked_pair(graph: StoredGraph, permutation: Any) -> tuple[Tensor, Tensor]:
    """Check permutations of targets and sources; the same tensor twice if one is for both."""
    if isinstance(permutation, tuple):
        if len(permutation) != 2:
            raise ValueError(
                "permutation must be a tensor or a pair (targets, sources) of tensors, got "
                f"{len(permutation)} entries"
            )
        of_targets, of_sources = (
            _checked(f"permutation[{side}]", of_side, graph, side)
            for side, of_side in enumerate(permutation)
        )
        return of_targets, of_sources
    if isinstance(permutation, Tensor) and not graph.has_same_tokens:
        raise ValueError(
            "permutation must be a pair (targets, sources) if these are different tokens, got "
            f"one tensor for a graph of {graph.num_targets} targets and {graph.num_sources} "
            "sources"
        )
    permutation = _checked("permutation", permutation, graph, 0)
    return permutation, permutation


def _checked(name: str, permutation: Any, graph: StoredGraph, side: int) -> Tensor:
    """Check a permutation, and return it in int64 on the graph's device.

    It must hold every token once, and must not move a token to another sequence of a batch.
    """
    count = graph.num_sources if side else graph.num_targets
    allowed = f"must hold every token 0 .. {count - 1} once" if count else "must be empty"
    if not isinstance(permutation, Tensor):
        raise ValueError(f"{name} {allowed}, as a tensor, got {type(permutation).__name__}")
    dtype = permutation.dtype
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise ValueError(f"{name} {allowed}, as integers, got {dtype}")
    if permutation.shape != (count,):
        raise ValueError(f"{name} {allowed}, got the shape {list(permutation.shape)}")
    permutation = permutation.to(graph.device, torch.int64)
    outside = ((permutation < 0) | (permutation >= count)).nonzero()
    if len(outside):
        i = int(outside[0])
        raise ValueError(f"{name} {allowed}, got {name}[{i}] = {int(permutation[i])}")
    ascending, place = permutation.sort(stable=True)
    twice = (ascending[1:] == ascending[:-1]).nonzero()
    if len(twice):
        i = int(twice[0])
        raise ValueError(
            f"{name} {allowed}, got {int(ascending[i])} at both {name}[{int(place[i])}] and "
            f"{name}[{int(place[i + 1])}]"
        )
    item = items_of(graph, side)
    crossing = (item[permutation] != item).nonzero()
    if len(crossing):
        i = int(crossing[0])
        raise ValueError(
            f"{name} must leave every token in its own part of the batch, got {name}[{i}] = "
            f"{int(permutation[i])}: place {i} belongs to part {int(item[i])}, but token "
            f"{int(permutation[i])} belongs to part {int(item[permutation[i]])}"
        )
    return permutation


def items_of(graph: StoredGraph, side: int = 0) -> Tensor:
    """Return the part of a batch to which every target (side 0) or source (side 1) belongs."""
    sizes = torch.tensor([size[side] for size in graph.sizes], device=graph.device)
    return torch.arange(len(sizes), device=graph.device).repeat_interleave(sizes)

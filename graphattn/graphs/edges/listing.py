"""Listing the edges of large structures into an int32 list, a few rows at a time.

A structure lists its edges in int64 and makes tables of all candidates, which take several times
the memory of the final list. For a few rows at a time, these tables are small and stay in cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphattn.graphs.edges.index_width import are_narrow
from graphattn.graphs.structures.composites import Parts
from graphattn.graphs.structures.structure import Band, GraphStructure, pieces_of_rows

AT_ONCE = 1 << 18  # edges of a piece, roughly: a few megabytes including the tables


def edges_of_structure(structure: GraphStructure, device: torch.device) -> Tensor:
    """List all edges [2, E] in order; int32 for large structures on a CPU, int64 for others.

    Example:
        >>> import torch, graphattn as ga
        >>> from graphattn.graphs.edges.listing import edges_of_structure
        >>> windows = ga.window_path_graph(100_000, 8).structure
        >>> edges_of_structure(windows, torch.device("cpu"))[:, :3]
        tensor([[1, 2, 3],
                [0, 0, 0]], dtype=torch.int32)
    """
    if torch.compiler.is_compiling() or device.type != "cpu" or not structure.lists_rows:
        return structure.edges(device)
    with device:
        count = structure.num_edges()
    if count <= AT_ONCE or not are_narrow(
        device, structure.num_targets, structure.num_sources, count
    ):
        return structure.edges(device)
    edges = torch.empty((2, count), dtype=torch.int32, device=device)
    _fill(structure, edges)
    return edges


def _fill(structure: GraphStructure, edges: Tensor) -> None:
    """Write all edges of a structure into the tensor `edges` [2, E]."""
    if isinstance(structure, Parts):
        _fill_parts(structure, edges)
    elif isinstance(structure, Band):
        structure.write_edges(edges)
    else:
        count, first = edges.shape[1], 0
        for piece in pieces_of_rows(structure, count, AT_ONCE, edges.device):
            edges[:, first : first + piece.shape[1]] = piece
            first += piece.shape[1]
        assert first == count, (structure, first, count)


def _fill_parts(parts: Parts, edges: Tensor) -> None:
    first = 0
    for part, t0, s0 in zip(parts.parts, parts.target_ptr, parts.source_ptr, strict=False):
        part_edges = edges[:, first : first + part.num_edges()]
        if part_edges.shape[1] > AT_ONCE:
            _fill(part, part_edges)
        else:
            part_edges.copy_(part.edges(edges.device))
        part_edges[0] += s0
        part_edges[1] += t0
        first += part_edges.shape[1]

"""Listing the edges of large structures into an int32 list, a few rows at a time.

A structure lists its edges in int64 and makes tables of all candidates, which take several times
the memory of the final list. For a few rows at a time, these tables are small and stay in cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphattn.graphs.edges.index_width import are_narrow
from graphattn.graphs.structures.composites import Parts, Union
from graphattn.graphs.structures.grid_blocks import GridBlocks
from graphattn.graphs.structures.grid_windows import GridWindows
from graphattn.graphs.structures.sections import Section, edges_of_rows
from graphattn.graphs.structures.structure import (
    Band,
    Blocks,
    Complete,
    Cycle,
    GlobalTokens,
    GraphStructure,
    Grid,
)
from graphattn.kernels.cpu.edge_order import Wrong, has_edge_order, sorted_edges

AT_ONCE = 1 << 18  # edges of a piece, roughly: a few megabytes including the tables
BY_ROWS = (Band, Blocks, Complete, Cycle, GlobalTokens, Grid, GridBlocks, GridWindows)


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
    if torch.compiler.is_compiling() or device.type != "cpu" or not _lists_rows(structure):
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


def _lists_rows(structure: GraphStructure) -> bool:
    """Whether a few rows of the structure can be listed without listing the others."""
    if isinstance(structure, Section):
        whole = structure.whole
        return not isinstance(whole, Union | Parts | Section) and _lists_rows(whole)
    if isinstance(structure, Union | Parts):
        return all(_lists_rows(part) for part in structure.parts)
    if isinstance(structure, GridWindows):  # every piece computes the tables of the axes again
        windows = zip(structure.shape, structure.before, structure.after, strict=True)
        return sum(size * (before + after + 1) for size, before, after in windows) <= AT_ONCE
    return isinstance(structure, BY_ROWS)


def _fill(structure: GraphStructure, edges: Tensor) -> None:
    """Write all edges of a structure into the tensor `edges` [2, E]."""
    if isinstance(structure, Parts):
        _fill_parts(structure, edges)
    elif isinstance(structure, Band):
        _fill_band(structure, edges)
    else:
        _fill_rows(structure, edges)


def _fill_rows(structure: GraphStructure, edges: Tensor) -> None:
    count, first = edges.shape[1], 0
    rows = max(AT_ONCE * structure.num_targets // max(count, 1), 1)
    for start in range(0, structure.num_targets, rows):
        piece = _rows_of(structure, start, min(start + rows, structure.num_targets), edges.device)
        edges[:, first : first + piece.shape[1]] = piece
        first += piece.shape[1]
    assert first == count, (structure, first, count)


def _fill_parts(parts: Parts, edges: Tensor) -> None:
    first = 0
    for part, t0, s0 in zip(parts.parts, parts.target_ptr, parts.source_ptr, strict=False):
        own = edges[:, first : first + part.num_edges()]
        if own.shape[1] > AT_ONCE:
            _fill(part, own)
        else:
            own.copy_(part.edges(edges.device))
        own[0] += s0
        own[1] += t0
        first += own.shape[1]


def _fill_band(band: Band, edges: Tensor) -> None:
    """Write the edges of a band: one broadcast sum, except for targets near the two ends."""
    before, after = band._reach(band.before), band._reach(band.after)
    offsets = (
        torch.arange(-before, after + 1, dtype=edges.dtype, device=edges.device) * band._stride
    )
    if not band.self_loops:
        offsets = offsets[offsets != 0]
    N = band.num_tokens
    inside = range(before * band._stride, N - after * band._stride)
    if not inside:
        inside = range(N, N)
    head = edges_of_rows(band, 0, inside.start, edges.device)
    tail = edges_of_rows(band, inside.stop, N, edges.device)
    a, b = head.shape[1], edges.shape[1] - tail.shape[1]
    edges[:, :a], edges[:, b:] = head, tail
    i = torch.arange(inside.start, inside.stop, dtype=edges.dtype, device=edges.device)[:, None]
    source, target = (row.view(len(inside), len(offsets)) for row in edges[:, a:b])
    torch.add(i, offsets, out=source)
    target.copy_(i.expand_as(target))


def _rows_of(structure: GraphStructure, start: int, stop: int, device: torch.device) -> Tensor:
    """List the edges of targets start .. stop - 1, in order."""
    if isinstance(structure, Section):
        first = structure.start
        rows = edges_of_rows(structure.whole, start + first, stop + first, device)
        return structure._inside(rows)
    if not isinstance(structure, Union):
        return edges_of_rows(structure, start, stop, device)
    lists = [
        structure._not_earlier(k, _rows_of(part, start, stop, device))
        for k, part in enumerate(structure.parts)
    ]
    edges = torch.cat(lists, dim=1)
    edges[1] -= start
    if has_edge_order(edges):
        found = sorted_edges(edges, stop - start, structure.num_sources, permutation=False)
        assert not isinstance(found, Wrong), found
        edges = found[0]
    else:
        edges = edges[:, (edges[1] * structure.num_sources + edges[0]).argsort()]
    edges[1] += start
    return edges

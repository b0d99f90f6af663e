"""Offsets of edges, T5's buckets and ALiBi's slopes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from graphattn.graphs.structures.composites import Parts
from graphattn.graphs.structures.grid_blocks import GridBlocks
from graphattn.graphs.structures.grid_windows import Grid, GridWindows
from graphattn.graphs.structures.structure import GraphStructure, GridOffsets
from graphattn.graphs.token_graph import TokenGraph

AXES = {
    "sequence": 1,
    "image": 2,
}  # number of axes of a table of offsets with the same form along each axis


def t5_bucket(
    offset: Tensor, num_buckets: int, max_distance: int, *, bidirectional: bool
) -> Tensor:
    """Return the bucket of every offset (source - target), as in T5's published code."""
    bucket = torch.zeros_like(offset)
    if bidirectional:
        num_buckets //= 2
        bucket = (offset > 0).to(offset.dtype) * num_buckets
        distance = offset.abs()
    else:
        distance = (-offset).clamp(min=0)
    exact = num_buckets // 2
    # In float32, as in that code, so that values at a border fall into the same bucket.
    far = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = (exact + (far * (num_buckets - exact)).to(offset.dtype)).clamp(max=num_buckets - 1)
    return bucket + torch.where(distance < exact, distance, far)


def alibi_slopes(heads: int) -> list[float]:
    """Return the slope of every head, as in ALiBi's published code."""
    power = 2 ** (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (h + 1) / power) for h in range(power)]
    between = [2.0 ** (-8 * (h + 1) / (2 * power)) for h in range(0, 2 * power, 2)]
    return slopes + between[: heads - power]


def offsets_of_table(graph: TokenGraph, axes: int) -> tuple[Tensor, ...] | None:
    """Return the offset of every row of a graph's table, one tensor [rows] per axis, or None."""
    table = axes_of_table(graph)
    if table is None or len(table) != axes:
        return None
    along = [
        torch.arange(first, last + 1, device=graph.device) * step for first, last, step in table
    ]
    return tuple(x.flatten() for x in torch.meshgrid(*along, indexing="ij"))


def axes_of_table(graph: TokenGraph) -> list[tuple[int, int, int]] | None:
    """Return (first hop, last hop, tokens per hop) for every axis of a graph's table, or None."""
    match None if graph.structure is None else graph.structure.offset_table:
        case GridOffsets(firsts, lasts, steps):
            return list(zip(firsts, lasts, steps, strict=True))
        case (str(kind), int(first), int(last), int(step)):
            return [(first, last, step)] * AXES[kind]
    return None


def positions_of(
    graph: TokenGraph, positions: Any, more: tuple[int, ...] = ()
) -> tuple[Tensor, Tensor]:
    """Return integer positions of targets and sources: those given, or those of the graph."""
    if positions is None:
        return graph.positions, graph.source_positions
    if isinstance(positions, Tensor) and graph.num_targets != graph.num_sources:
        raise ValueError(
            "positions must be a pair (targets, sources) on a bipartite graph, got one tensor"
        )
    pair = (positions, positions) if isinstance(positions, Tensor) else positions
    shown = ", ".join(map(str, ("*", "N", *more)))
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ValueError(
            f"positions must be a tensor [{shown}] or a pair (targets, sources) of them, got "
            f"{type(positions).__name__}"
        )
    for places, count in zip(pair, (graph.num_targets, graph.num_sources), strict=True):
        wanted = (count, *more)
        if (
            not isinstance(places, Tensor)
            or places.is_floating_point()
            or places.dtype == torch.bool
            or places.shape[places.dim() - len(wanted) :] != wanted
        ):
            got = (
                f"{places.dtype} of shape {list(places.shape)}"
                if isinstance(places, Tensor)
                else type(places).__name__
            )
            raise ValueError(
                f"positions must be an integer tensor of shape [{shown}] with N = {count}, got "
                f"{got}"
            )
    return pair[0].to(graph.device), pair[1].to(graph.device)


def cells_of(
    structure: GraphStructure | None, device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """Return the place of every token on a grid, [N, axes], and whether it has one, [N]."""
    if isinstance(structure, Parts):
        cells_of_parts = [cells_of(part, device) for part in structure.parts]
        parts = [cells for cells in cells_of_parts if cells is not None]
        if len(parts) < len(cells_of_parts):
            return None
        return torch.cat([place for place, _ in parts]), torch.cat([known for _, known in parts])
    match structure:
        case Grid() | GridBlocks():
            shape: tuple[int, ...] = (structure.height, structure.width)
        case GridWindows():
            shape = structure.shape
        case _:
            return None
    cell = torch.arange(math.prod(shape), device=device)
    place = torch.stack(torch.unravel_index(cell, shape), dim=-1)
    known = torch.ones_like(cell, dtype=torch.bool)
    if not isinstance(structure, GridBlocks) and structure.class_token:
        place, known = (torch.cat([torch.zeros_like(x[:1]), x]) for x in (place, known))
    return place, known


def unlike_a_table(bias: Tensor, graph: TokenGraph) -> Tensor:
    """Add a leading dimension to values of edges if they could be mistaken for those of offsets."""
    rows = None if graph.structure is None else graph.structure.num_offsets
    return bias[None] if bias.dim() == 2 and len(bias) == rows and len(bias) > 1 else bias

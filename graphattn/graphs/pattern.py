"""Short descriptions of graphs, for titles and tables."""

from __future__ import annotations

from collections.abc import Sequence

from graphattn.graphs.structures.composites import Parts, RandomSources, Section, Union
from graphattn.graphs.structures.grid_blocks import GridBlocks
from graphattn.graphs.structures.grid_windows import Grid, GridWindows
from graphattn.graphs.structures.structure import (
    Band,
    Blocks,
    Complete,
    Cycle,
    GlobalTokens,
    GraphStructure,
)
from graphattn.graphs.token_graph import TokenGraph


def pattern_of(graph: TokenGraph) -> str:
    """Describe in a few words which tokens see which; no edge is listed.

    Examples are "all tokens", "window 2" (tokens on each side) and "causal window 128" (keys
    including the token itself, as in :func:`~graphattn.causal_window_graph`). For a graph without a
    structure, the description says how the edges are stored.
    """
    if graph.structure is not None:
        return _of_structure(graph.structure)
    if graph.compact_neighbors is not None:
        return f"{_counted(graph.compact_neighbors.shape[1], 'neighbour')} each"
    return "a list of edges"


def _of_structure(structure: GraphStructure) -> str:
    match structure:
        case Complete(targets=targets, sources=sources):
            return "all tokens" if targets == sources else f"all of {_counted(sources, 'token')}"
        case Band():
            return _of_band(structure)
        case Cycle(window=window):
            return f"window {window:,} on a ring"
        case Blocks(block_size=size, shift=shift):
            return f"blocks of {size:,}" + (f", shifted by {shift:,}" if shift else "")
        case Grid():
            words = f"radius {structure.radius} on {structure.height} × {structure.width}"
            return words + ", class token" * structure.class_token
        case GridBlocks(height=height, width=width, block=block, shift=shift):
            shifted = f", shifted by {_product(shift)}" if any(shift) else ""
            return f"blocks of {_product(block)} on {height} × {width}{shifted}"
        case GridWindows():
            return _of_windows(structure)
        case GlobalTokens(tokens=tokens):
            return _counted(len(tokens), "global token")
        case RandomSources(num_random=number):
            return f"{number:,} random"
        case Union(parts=parts):
            return " + ".join(map(_of_structure, parts))
        case Parts(parts=(Section(whole=Band(after=0), source_start=0) as first, Complete(0))):
            return f"first {_counted(first.num_sources, 'token')}"  # of a causal Longformer
        case Parts(parts=parts):
            seeing = [part for part in parts if part.num_edges()]
            if len(seeing) == 1 < len(parts):  # for example, consensus leaves out a class token
                alone = sum(part.num_targets for part in parts) - seeing[0].num_targets
                return f"{_of_structure(seeing[0])}, {_counted(alone, 'token')} apart"
            kinds = list(dict.fromkeys(map(_of_structure, parts)))
            each = kinds[0] if len(kinds) == 1 else "several patterns"
            return f"{_counted(len(parts), 'sequence')}: {each}"
        case Section(whole=whole):
            return f"part of {_of_structure(whole)}"
    return type(structure).__name__


def _of_band(band: Band) -> str:
    N, before, after = band.num_tokens, band.before, band.after
    whole = max(N - 1, 0)
    hops = f", every {band.dilation:,}th" if band.dilation > 1 else ""
    if after == 0 and (before or N <= 1):
        if before * band.dilation >= whole:
            return f"all before{hops}"
        return f"causal window {before + band.self_loops:,}{hops}"
    if before == after == 0:
        return "itself" if band.self_loops else "nothing"
    if min(before, after) * band.dilation >= whole:
        return f"all {'tokens' if band.self_loops else 'others'}{hops}"
    if before == after:
        return f"window {before:,}{hops}"
    return f"{before:,} before, {after:,} after{hops}"


def _of_windows(grid: GridWindows) -> str:
    wide = [before + after + 1 for before, after in zip(grid.before, grid.after, strict=True)]
    words = f"{_product(wide)} on {_product(grid.shape)}"
    if any(dilation > 1 for dilation in grid.dilation):
        words += f", dilated by {_product(grid.dilation)}"
    if any(stride > 1 for stride in grid.stride):
        words += f", stride {_product(grid.stride)}"
    return words + ", class token" * grid.class_token


def _product(sizes: Sequence[int]) -> str:
    return " × ".join(map(str, sizes))


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + "s" * (number != 1)

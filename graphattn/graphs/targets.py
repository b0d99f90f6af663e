"""A run of targets of a graph as a new graph, with the run of sources that they see."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from graphattn.graphs.arguments import as_int
from graphattn.graphs.edges.storage import G, StoredGraph
from graphattn.graphs.structures.composites import Parts, Section, Union, union_of
from graphattn.graphs.structures.grid_windows import Grid
from graphattn.graphs.structures.structure import (
    Band,
    Blocks,
    Complete,
    Cycle,
    GlobalTokens,
    GraphStructure,
)

Run = tuple[int, int]  # the first token, and the one after the last


def targets_of(graph: G, start: Any, stop: Any) -> tuple[G, range]:
    """Implement :meth:`graphattn.TokenGraph.targets`, which has the description."""
    start, stop = as_int("start", start, 0), as_int("stop", stop, 0)
    if stop > graph.num_targets:
        raise ValueError(f"stop must be <= num_targets = {graph.num_targets}, got {stop}")
    if start > stop:
        raise ValueError(f"start must be <= stop = {stop}, got {start}")
    structure = edge_index = neighbors = None
    if graph.structure is not None:
        first, last = sources_seen(graph.structure, start, stop) or (0, 0)
        structure = section_of(graph.structure, start, stop, first, last)
        if structure is graph.structure:
            return graph, range(first, last)
    elif graph.compact_neighbors is not None:
        rows = graph.compact_neighbors[start:stop]
        first, last = _hull(rows[rows >= 0]) or (0, 0)
        neighbors = torch.where(rows < 0, rows, rows - first)
    else:
        begin, end = graph.compact_rowptr[[start, stop]].tolist()
        edges = graph.compact_edges[:, begin:end]
        first, last = _hull(edges[0]) or (0, 0)
        edge_index = edges - edges.new_tensor([[first], [start]])
    sizes, starts = _cut_sequences(graph, (start, stop), (first, last))
    part = type(graph)(
        structure=structure,
        edge_index=edge_index,
        neighbors=neighbors,
        num_targets=stop - start,
        num_sources=last - first,
        sizes=sizes,
        starts=starts,
        is_causal=graph.is_causal,
        has_causal_part=graph.has_causal_part,
        device=graph.device,
        positions=_cut_positions(graph, (start, stop), (first, last)),
    )
    return part, range(first, last)


def block_of(graph: G, targets: Run, sources: Run) -> G | None:
    """Return the edges between a run of targets and a run of sources.

    Both are numbered from 0 again, but have the same positions as in `graph`. The result is None if
    the graph has no structure.
    """
    if graph.structure is None:
        return None
    structure = section_of(graph.structure, *targets, *sources)
    if structure is graph.structure:
        return graph
    sizes, starts = _cut_sequences(graph, targets, sources)
    return type(graph)(
        structure=structure,
        sizes=sizes,
        starts=starts,
        device=graph.device,
        positions=_cut_positions(graph, targets, sources),
    )


def _hull(sources: Tensor) -> Run | None:
    """Return the shortest run that contains these sources; None if there are none."""
    return (int(sources.min()), int(sources.max()) + 1) if sources.numel() else None


def _cut_positions(graph: StoredGraph, targets: Run, sources: Run) -> tuple[Tensor, Tensor] | None:
    if graph.own_positions is None:
        return None
    of_targets, of_sources = graph.own_positions
    cut = of_targets[slice(*targets)]
    if of_sources is of_targets and sources == targets:
        return cut, cut
    return cut, of_sources[slice(*sources)]


def _cut_sequences(
    graph: StoredGraph, targets: Run, sources: Run
) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """Return sizes and first positions of the sequences of a batch within the two runs."""
    sizes, starts, t0, s0 = [], [], 0, 0
    for (n, m), (target, source) in zip(graph.sizes, graph.starts, strict=True):
        cut, seen = _overlap(targets, (t0, t0 + n)), _overlap(sources, (s0, s0 + m))
        if cut[0] < cut[1] or seen[0] < seen[1]:
            sizes.append((cut[1] - cut[0], seen[1] - seen[0]))
            starts.append((target + cut[0] - t0, source + seen[0] - s0))
        t0, s0 = t0 + n, s0 + m
    return tuple(sizes or [(0, 0)]), tuple(starts or [(0, 0)])


def _overlap(a: Run, b: Run) -> Run:
    """Intersect two runs; if they do not overlap, return an empty run within b."""
    first = min(max(a[0], b[0]), b[1])
    return first, max(min(a[1], b[1]), first)


def section_of(
    whole: GraphStructure, start: int, stop: int, source_start: int, source_stop: int
) -> GraphStructure:
    """Return the section of a structure with these targets and sources, in its simplest form."""
    cut = start, stop, source_start, source_stop
    if cut == (0, whole.num_targets, 0, whole.num_sources):
        return whole
    match whole:
        case Section():
            t, s = whole.start, whole.source_start
            return section_of(whole.whole, start + t, stop + t, source_start + s, source_stop + s)
        case Complete(targets, sources) if targets != sources:  # it has no table of offsets
            return Complete(stop - start, source_stop - source_start)
        case Cycle(N, w) if w <= start < stop <= N - w:  # no window wraps around
            return Section(Band(N, w, w, 1, self_loops=False), *cut)
        case Union(parts):
            return union_of([section_of(part, *cut) for part in parts])
        case Parts():
            return _section_of_parts(whole, (start, stop), (source_start, source_stop))
    return Section(whole, *cut)


def _section_of_parts(whole: Parts, targets: Run, sources: Run) -> GraphStructure:
    """Cut a batch to two runs; if only one part is left, return it without a batch."""
    selected = []
    for part, t0, s0 in whole.placed():
        t = _overlap(targets, (t0, t0 + part.num_targets))
        s = _overlap(sources, (s0, s0 + part.num_sources))
        if t[0] < t[1] or s[0] < s[1]:
            selected.append(section_of(part, t[0] - t0, t[1] - t0, s[0] - s0, s[1] - s0))
    if not selected:
        return section_of(whole.parts[0], 0, 0, 0, 0)
    return selected[0] if len(selected) == 1 else Parts(tuple(selected))


def sources_seen(structure: GraphStructure, start: int, stop: int) -> Run | None:
    """Find the shortest run that contains all sources of targets start .. stop - 1.

    The result is None if they see no sources. Edges are listed only for structures that give the
    run in no other way.
    """
    if start >= stop:
        return None
    match structure:
        case Complete(_, sources):
            return (0, sources) if sources else None
        case Band():
            return _seen_in_band(structure, start, stop)
        case Cycle():  # Tokens 0 and N - 1 do not see themselves, but their neighbours see them.
            return _seen_at_ends(structure, start, stop, 2)
        case Blocks():
            first, last = structure._bounds(torch.tensor([start, stop - 1]))
            return int(first[0]), int(last[1])
        case GlobalTokens(N, tokens):
            if any(start <= token < stop for token in tokens):
                return 0, N
            return (tokens[0], tokens[-1] + 1) if tokens else None
        case Grid(height, width, radius):
            down, right = min(radius, height - 1), min(radius, width - 1)
            return _seen_at_ends(structure, start, stop, down * width + right + 1)
        case Section() if (seen_in_section := _seen_in_section(structure, start, stop)) is not None:
            return seen_in_section[0]
        case Union(parts):
            return _joined(sources_seen(part, start, stop) for part in parts)
        case Parts():
            runs = []
            for part, t0, s0 in structure.placed():
                rows = _overlap((start - t0, stop - t0), (0, part.num_targets))
                if (run := sources_seen(part, *rows)) is not None:
                    runs.append((run[0] + s0, run[1] + s0))
            return _joined(runs)
    return _hull(structure.edges_of_rows(start, stop)[0])


def _joined(runs: Iterable[Run | None]) -> Run | None:
    nonempty = [run for run in runs if run is not None]
    return (min(a for a, _ in nonempty), max(b for _, b in nonempty)) if nonempty else None


def _seen_at_ends(structure: GraphStructure, start: int, stop: int, rows: int) -> Run | None:
    """Find the run that targets see of which only the first and last few rows see the farthest."""
    ends = (start, min(start + rows, stop)), (max(stop - rows, start), stop)
    return _joined(_hull(structure.edges_of_rows(*end)[0]) for end in ends)


def _seen_in_band(band: Band, start: int, stop: int) -> Run | None:
    N = band.num_tokens
    first = _lowest(band, start, stop)
    # The last source is the first one of the reversed band.
    mirrored = _lowest(band.transpose(), N - stop, N - start)
    return None if first is None or mirrored is None else (first, N - mirrored)


def _lowest(band: Band, start: int, stop: int) -> int | None:
    """Find the first source that any of these targets sees; None if there is none.

    Targets with equally many hops before them form a run of `dilation` tokens, and the first of a
    run sees the earliest source. The first two runs are enough: the first one sees the earliest
    source, unless it has no hops before it.
    """
    step = band._stride
    before, after = band._reach(band.before), band._reach(band.after)
    lowest = []
    for i in (start, (start // step + 1) * step):
        if i >= stop:
            continue
        hops = min(before, i // step)
        if hops or band.self_loops:
            lowest.append(i - hops * step)
        elif after and i + step < band.num_tokens:
            lowest.append(i + step)
    return min(lowest) if lowest else None  # torch.compile does not support min(default=)


def _seen_in_section(section: Section, start: int, stop: int) -> tuple[Run | None] | None:
    """Return a tuple with the run of sources of a section; None if it is not known.

    The run of the whole is cut to the section. If the cut changes it, the end of the run may be a
    source that no target sees, and the result is None. This cannot happen in a complete graph, or
    in an undilated band with self-loops, because their runs have no holes.
    """
    run = sources_seen(section.whole, start + section.start, stop + section.start)
    if run is None:
        return (None,)
    first, last = max(run[0], section.source_start), min(run[1], section.source_stop)
    match section.whole:
        case Complete() | Band(dilation=1, self_loops=True):
            pass
        case _ if run != (first, last):
            return None
    if first >= last:
        return (None,)
    return ((first - section.source_start, last - section.source_start),)

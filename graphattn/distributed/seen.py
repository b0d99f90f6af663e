"""The sources that a run of targets sees, exactly, as runs.

:func:`graphattn.graphs.targets.sources_seen` gives the shortest single run that contains them.
What is sent to another rank must be neither more nor less than what its targets see.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from graphattn.graphs.structures.composites import Parts, Section, Union
from graphattn.graphs.structures.grid_windows import Grid
from graphattn.graphs.structures.structure import (
    Band,
    Blocks,
    Complete,
    Cycle,
    GlobalTokens,
    GraphStructure,
)
from graphattn.graphs.targets import Run
from graphattn.graphs.token_graph import TokenGraph

Runs = list[Run]
MOST_GLOBAL = 64  # global tokens whose queries are sent to all ranks


def seen_by(graph: TokenGraph, start: int, stop: int) -> Runs:
    """Return the sources that targets start .. stop - 1 see, as disjoint runs in ascending order.

    No edge is listed for windows, blocks, cycles, causal and complete graphs, global tokens, and
    batches and unions of these.

    Example:
        >>> import graphattn as ga
        >>> from graphattn.distributed.seen import seen_by
        >>> seen_by(ga.longformer_graph(1000, window=4, global_tokens=[0]), 500, 600)
        [(0, 1), (496, 604)]
    """
    if start >= stop:
        return []
    if graph.structure is not None:
        return joined(_of_structure(graph.structure, start, stop))
    if (table := graph.compact_neighbors) is not None:
        rows = table[start:stop]
        return runs_of(rows[rows >= 0])
    first, last = graph.compact_rowptr[[start, stop]].tolist()
    return runs_of(graph.compact_edges[0, first:last])


def seen_by_runs(graph: TokenGraph, runs: Iterable[range]) -> Runs:
    """Return the sources that any target of some runs sees, as :func:`seen_by` does for one."""
    return joined(seen for run in runs for seen in seen_by(graph, run.start, run.stop))


def runs_of(tokens: Tensor) -> Runs:
    """Return the runs of consecutive tokens in a tensor of tokens, which may repeat."""
    if not tokens.numel():
        return []
    distinct = tokens.unique().cpu()
    cut = (distinct.diff() != 1).nonzero().flatten()
    starts = torch.cat([distinct[:1], distinct[cut + 1]])
    stops = torch.cat([distinct[cut], distinct[-1:]]) + 1
    return list(zip(starts.tolist(), stops.tolist(), strict=True))


def joined(runs: Iterable[Run]) -> Runs:
    """Join runs that overlap or touch; the result is disjoint and in ascending order."""
    result: Runs = []
    for start, stop in sorted(run for run in runs if run[0] < run[1]):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(stop, result[-1][1])
        else:
            result.append((start, stop))
    return result


def common(runs: Iterable[Run], within: Iterable[range]) -> Runs:
    """Cut disjoint runs to other disjoint runs, both in ascending order."""
    result = []
    others = list(within)
    for start, stop in runs:
        for other in others:
            low, high = max(start, other.start), min(stop, other.stop)
            if low < high:
                result.append((low, high))
    return result


def without(runs: Iterable[range], tokens: Sequence[int]) -> list[range]:
    """Leave some tokens out of runs, in ascending order."""
    result = []
    for run in runs:
        start = run.start
        for token in (*(t for t in sorted(tokens) if t in run), run.stop):
            if start < token:
                result.append(range(start, token))
            start = token + 1
    return result


def global_tokens(structure: GraphStructure | None) -> tuple[int, ...]:
    """Return the tokens that see all tokens and are seen by all of them, if they are few."""
    match structure:
        case GlobalTokens(_, tokens):
            return tokens if len(tokens) <= MOST_GLOBAL else ()
        case Grid(class_token=True):
            return (0,)
        case Union(parts):
            of_parts = sorted({token for part in parts for token in global_tokens(part)})
            return tuple(of_parts) if len(of_parts) <= MOST_GLOBAL else ()
    return ()


def count(runs: Iterable[Run]) -> int:
    """Count the tokens of disjoint runs."""
    return sum(stop - start for start, stop in runs)


def tokens_of(runs: Iterable[Run]) -> Tensor:
    """Return the tokens of runs one after another, a LongTensor."""
    lists = [torch.arange(start, stop) for start, stop in runs]
    return torch.cat(lists) if lists else torch.empty(0, dtype=torch.int64)


def _of_structure(structure: GraphStructure, start: int, stop: int) -> Iterator[Run]:
    """Yield runs that together are the sources of a run of targets, which is not empty."""
    match structure:
        case Band():
            yield from _of_band(structure, start, stop)
        case Complete(_, sources):
            yield 0, sources
        case Blocks():
            starts, stops = structure._bounds(torch.tensor([start, stop - 1]))
            yield int(starts[0]), int(stops[1])
        case Cycle(N, w):
            for low, high in ((start - w, stop - 1), (start + 1, stop + w)):
                for turn in (-N, 0, N):
                    yield max(low + turn, 0), min(high + turn, N)
        case GlobalTokens(N, tokens):
            if any(start <= token < stop for token in tokens):
                yield 0, N
            else:
                yield from ((token, token + 1) for token in tokens)
        case Section():
            whole = joined(
                _of_structure(structure.whole, start + structure.start, stop + structure.start)
            )
            first, last = structure.source_start, structure.source_stop
            for low, high in common(whole, (range(first, last),)):
                yield low - first, high - first
        case Union(parts):
            for part in parts:
                yield from _of_structure(part, start, stop)
        case Parts():
            number = bisect_right(structure.target_ptr, start) - 1  # there may be many sequences
            while (t0 := structure.target_ptr[number]) < stop:
                part, s0 = structure.parts[number], structure.source_ptr[number]
                low, high = max(start - t0, 0), min(stop - t0, part.num_targets)
                for begin, end in _of_structure(part, low, high):
                    yield begin + s0, end + s0
                number += 1
        case _:
            yield from runs_of(structure.edges_of_rows(start, stop)[0])


def _of_band(band: Band, start: int, stop: int) -> Iterator[Run]:
    """Yield the sources of a run of targets of a band.

    Runs at neighbouring offsets touch, unless the dilation is longer than the run of targets.
    """
    N, step = band.num_tokens, band._stride
    before, after = band._reach(band.before), band._reach(band.after)
    if band.self_loops:
        yield start, stop
    if step <= stop - start:
        sides = [(start - before * step, stop - step)] if before else []
        sides += [(start + step, stop + after * step)] if after else []
    else:
        hops = [*range(-before, 0), *range(1, after + 1)]
        sides = [(start + hop * step, stop + hop * step) for hop in hops]
    for low, high in sides:
        yield max(low, 0), min(high, N)

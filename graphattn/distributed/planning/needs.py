"""Rows that ranks need, and numbers of their edges, read from a graph."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from graphattn.distributed.layout import Layout
from graphattn.distributed.planning.run_tables import RunTable
from graphattn.distributed.seen import seen_by, without
from graphattn.graphs.structures.composites import Parts, Section, Union
from graphattn.graphs.structures.structure import (
    Band,
    Blocks,
    Complete,
    Cycle,
    GlobalTokens,
    GraphStructure,
)
from graphattn.graphs.token_graph import TokenGraph


def remote_runs(
    graph: TokenGraph,
    targets: Layout,
    sources: Layout,
    both: bool,
    left_out: tuple[int, ...] = (),
) -> RunTable:
    """Return the runs of sources that every rank needs and does not own, joined.

    Args:
        graph: the graph.
        targets: which targets a rank owns.
        sources: which sources a rank owns.
        both: whether a rank also needs the targets that see its sources.
        left_out: targets for which no sources travel.

    Example:
        >>> import graphattn as ga
        >>> from graphattn.distributed.layout import Layout
        >>> from graphattn.distributed.planning.needs import remote_runs
        >>> halves = Layout(100, ranks=2)
        >>> remote_runs(ga.causal_window_graph(100, 8), halves, halves, both=False).by_rank()
        [(1, [(43, 50)])]
    """
    # An empty table comes first, since there may be no edges at all.
    tables = [RunTable.of_runs([]), *_seen(graph, targets, sources, both, left_out)]
    needs = RunTable.concatenated(tables).joined(graph.num_sources)
    needs = without_own(needs, torch.arange(sources.ranks), sources, sources.borders())
    return needs.joined(graph.num_sources)


def without_own(table: RunTable, rank: Tensor, sources: Layout, borders: Tensor) -> RunTable:
    """Take what a rank owns itself out of the runs of every item of a table.

    Args:
        table: runs of tokens, or of whatever else lies in chunks; `table.rank` counts its items.
        rank: LongTensor, the rank of every item.
        sources: who owns the chunks.
        borders: LongTensor [chunks + 1], where the chunks begin, in the numbers of the runs.
    """
    for own in (rank, sources.num_chunks - 1 - rank) if sources.zigzag else (rank,):
        chunk = own[table.rank]
        table = table.without(borders[chunk], borders[chunk + 1])
    return table


def edges_per_rank(graph: TokenGraph, targets: Layout) -> Tensor:
    """Count the edges that lead to the targets of every rank, a LongTensor [ranks].

    Example:
        >>> import graphattn as ga
        >>> from graphattn.distributed.layout import Layout
        >>> from graphattn.distributed.planning.needs import edges_per_rank
        >>> edges_per_rank(ga.causal_graph(6), Layout(6, ranks=3))
        tensor([ 3,  7, 11])
    """
    return targets.per_rank(_edges_before(graph, targets.borders()).diff())


def _seen(
    graph: TokenGraph, targets: Layout, sources: Layout, both: bool, left_out: tuple[int, ...]
) -> Iterator[RunTable]:
    """Yield runs that together are all sources that every rank needs, some of them its own."""
    structure = graph.structure
    for part in structure.parts if isinstance(structure, Union) else (structure,):
        if part is not None and _has_runs(part):
            flipped = part.transpose() if both else part
            for seen in (part, flipped) if flipped != part else (part,):
                assert seen is not None  # A structure with runs has a transpose.
                whole = TokenGraph(structure=seen)
                yield RunTable.of_runs(
                    (rank, sources_seen)
                    for rank in range(targets.ranks)
                    for run in without(targets.runs(rank), left_out)
                    for sources_seen in seen_by(whole, run.start, run.stop)
                )
            continue
        for source, target in _pieces(graph, part):
            receiver, sender = targets.owner(target), sources.owner(source)
            remote = receiver != sender
            if left_out:
                remote &= ~torch.isin(target, torch.tensor(left_out))
            yield RunTable.of_tokens(receiver[remote], source[remote])
            if both:
                yield RunTable.of_tokens(sender[remote], target[remote])


def _has_runs(structure: GraphStructure) -> bool:
    """Whether :func:`seen_by` lists no edges of this structure."""
    match structure:
        case Section():
            return _has_runs(structure.whole)
        case Union() | Parts():
            return all(map(_has_runs, structure.parts))
    return isinstance(structure, Band | Blocks | Complete | Cycle | GlobalTokens)


def _pieces(graph: TokenGraph, part: GraphStructure | None) -> Iterator[Tensor]:
    """Yield the edges of a part of a graph, or of a graph without a structure, in pieces."""
    if part is not None:
        yield from part.pieces()
    elif (table := graph.compact_neighbors) is not None:
        table = table.cpu().long()
        target, place = (table >= 0).nonzero().T
        yield torch.stack([table[target, place], target])
    else:
        yield graph.compact_edges.cpu().long()


def _edges_before(graph: TokenGraph, targets: Tensor) -> Tensor:
    """Count the edges of the targets before each of some targets."""
    structure = graph.structure
    match structure:
        case Complete() | Band(dilation=1):  # in closed form
            stops, M = targets.tolist(), graph.num_sources
            return torch.tensor([Section(structure, 0, stop, 0, M).num_edges() for stop in stops])
    if structure is not None:
        degree = structure.in_degree()
    elif (table := graph.compact_neighbors) is not None:
        degree = (table >= 0).sum(1).cpu()
    else:
        return graph.compact_rowptr.cpu().long()[targets]
    return torch.cat([degree.new_zeros(1), degree.cumsum(0)])[targets]

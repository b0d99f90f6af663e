"""Targets whose sources are all on their own rank: they are computed while rows travel."""

from __future__ import annotations

import torch

from graphattn.distributed.layout import Layout
from graphattn.distributed.planning.needs import RunTable, remote_runs
from graphattn.graphs.token_graph import TokenGraph


def runs_inside(
    graph: TokenGraph, targets: Layout, sources: Layout, *, both: bool = False
) -> RunTable:
    """Return for every chunk the longest run of targets that see no source of another rank.

    If `both`, no target of another rank sees them, either.

    The column `rank` of the result counts the chunks of `targets`. A run may be empty. A chunk has
    one run, so that a graph with a structure keeps it.

    Example:
        >>> import graphattn as ga
        >>> from graphattn.distributed.layout import Layout
        >>> from graphattn.distributed.planning.inside import runs_inside
        >>> layout = Layout(num_tokens=12, ranks=3)
        >>> runs_inside(ga.causal_window_graph(12, 2), layout, layout)[1:]
        (tensor([0, 5, 9]), tensor([ 4,  8, 12]))
    """
    seeing = remote_runs(graph.transpose(), sources, targets, both=both)
    zeros = torch.zeros_like(seeing.rank)
    outside = RunTable(zeros, seeing.start, seeing.stop).joined(targets.num_tokens)
    edge = outside.start.new_zeros(1)
    start, stop = torch.cat([edge, outside.stop]), torch.cat([outside.start, edge])
    stop[-1] = targets.num_tokens
    start, stop = start[start < stop], stop[start < stop]
    chunks, borders = torch.arange(targets.num_chunks), targets.borders()
    if not len(start):
        return RunTable(chunks, borders[:-1], borders[:-1])
    _, chunk, start, stop = targets.cut_at_chunks(start, stop)
    order = (stop - start).argsort(stable=True)
    order = order[chunk[order].argsort(stable=True)]  # by chunk, the longest run last
    longest = order[torch.searchsorted(chunk[order], chunks, right=True) - 1]
    there = chunk[longest] == chunks  # others have no such target
    start, stop = (torch.where(there, x[longest], borders[:-1]) for x in (start, stop))
    return RunTable(chunks, start, stop)

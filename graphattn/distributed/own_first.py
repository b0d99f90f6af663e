"""The edges of one rank in two parts: from its own tokens, and those whose rows must travel.

The first part is computed while the rows travel. Its results are merged with those of the second.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphattn.distributed.exchange import RowExchange
from graphattn.distributed.local_graph import LocalPart
from graphattn.distributed.seen import Run
from graphattn.graphs.targets import block_of
from graphattn.graphs.token_graph import TokenGraph


class OwnFirst(NamedTuple):
    """The edges of one rank in two parts, whose sums add up.

    Attributes:
        own: the edges from tokens of the rank to its targets, over all of these.
        rest: the other edges. Its sources are the rows that arrive, its targets the `rows`. If both
            ends of an edge move, its tokens are the rows that arrive, and then the `rows`.
        exchange: makes the sources of `rest`.
        rows: LongTensor, targets of the rank.
    """

    own: TokenGraph
    rest: TokenGraph
    exchange: RowExchange
    rows: Tensor


def own_first_of(part: LocalPart, num_own: int, *, both: bool) -> OwnFirst:
    """Divide the edges of a part, whose rank owns `num_own` sources.

    The graph of the part is that of both ends of an edge if `both`.
    """
    graph, exchange, device = part.graph, part.exchange, part.graph.device
    arrived = sum(exchange.received)
    kept = torch.arange(num_own, device=device)[exchange.kept] + arrived
    number = torch.cat([torch.arange(arrived, device=device), kept])
    if exchange.place is None:
        number = torch.cat([number[: exchange.before], kept, number[exchange.before : arrived]])
    else:
        number = number[exchange.place]
    # Source i of the graph is now row number[i] in [rows that arrive, the rank's own rows].
    is_own = number >= arrived
    first = int(is_own.long().argmax()) if len(kept) else 0
    sources = first, first + num_own
    own: TokenGraph | None = None
    # Whether the rank's own tokens are one run of sources; two runs may see some of them twice.
    if torch.equal(number[is_own], number[slice(*sources)]) and len(kept) == num_own:
        targets = sources if both else (0, graph.num_targets)
        own = block_of(graph, targets, sources)
    if own is not None:  # no edge of `own` is listed
        others = (0, first), (first + num_own, graph.num_sources)
        blocks = [(targets, run) for run in others] + [(run, sources) for run in others if both]
        edges = torch.cat([_edges_of_block(graph, *block) for block in blocks], dim=1)
    else:
        edges = graph.edge_index
    source, target = number[edges[0]], number[edges[1]] if both else edges[1]
    if own is None:
        is_own = (source >= arrived) & ((target >= arrived) if both else True)
        ends = source[is_own] - arrived, target[is_own] - (arrived if both else 0)
        count = num_own if both else graph.num_targets
        own = _of_edges(*ends, num_targets=count, num_sources=num_own)
        source, target = source[~is_own], target[~is_own]
    place = torch.empty(arrived + num_own, dtype=torch.int64, device=device)
    place[number] = torch.arange(len(number), device=device)
    if both:
        used = torch.cat([source, target]).unique()
        rows = used[used >= arrived]
        tokens = torch.cat([torch.arange(arrived, device=device), rows])
        source, target = torch.searchsorted(tokens, source), torch.searchsorted(tokens, target)
        of_targets = of_sources = graph.positions[place[tokens]]
        rows -= arrived
    else:
        rows, target = target.unique(return_inverse=True)
        of_targets, of_sources = graph.positions[rows], graph.source_positions[place[:arrived]]
    rest = _of_edges(
        source,
        target,
        num_targets=len(of_targets),
        num_sources=len(of_sources),
        starts=((0, 0 if both else 1),),
        positions=(of_targets, of_sources),
    )
    kept_rows = rows if both else slice(0, 0)
    exchange = replace(exchange, kept=kept_rows, place=None, before=arrived)
    return OwnFirst(own, rest, exchange, rows)


def _edges_of_block(graph: TokenGraph, targets: Run, sources: Run) -> Tensor:
    """List the edges between two runs, as tokens of a graph with a structure."""
    block = block_of(graph, targets, sources)
    assert block is not None
    return block.edge_index + torch.tensor([[sources[0]], [targets[0]]], device=graph.device)


def _of_edges(source: Tensor, target: Tensor, **sizes: Any) -> TokenGraph:
    """Return a graph of these edges, which are put in order."""
    edges = torch.stack([source, target])
    order = (target * max(sizes["num_sources"], 1) + source).argsort()
    return TokenGraph(edge_index=edges[:, order], **sizes)

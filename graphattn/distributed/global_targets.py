"""Global tokens, which see all others: their queries go to all ranks, and partial results back.

Their owner would otherwise fetch the rows of all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphattn.distributed.exchange import RowExchange, head_token_dim, in_places_of
from graphattn.distributed.layout import Layout
from graphattn.distributed.local_graph import LocalPart
from graphattn.distributed.ring.operations import RingOperation, Tensors
from graphattn.distributed.ring.rounds import RingBlock
from graphattn.graphs.builders.windows import bipartite_complete_graph


class GlobalTargets(NamedTuple):
    """The targets of one rank without global tokens, and the global tokens of all ranks.

    Attributes:
        others: the graph and the exchange of this rank's other targets.
        rows: LongTensor, these targets among this rank's own.
        queries: gives every rank the tensors of all global tokens.
        block: the edges from the sources of this rank to all global tokens.
        results: sends the partial results of global tokens to their owners.
        own: LongTensor, the global tokens of this rank among all of them.
        place: LongTensor, this rank's targets in [other targets, global tokens].
    """

    others: LocalPart
    rows: Tensor
    queries: RowExchange
    block: RingBlock
    results: RowExchange
    own: Tensor
    place: Tensor

    def computed(
        self, operation: RingOperation, targets: Sequence[Any], sources: Sequence[Any]
    ) -> Tensors:
        """Return the results of this rank's global tokens over the sources of all ranks.

        Args:
            operation: what is computed.
            targets: this rank's tensors [*, tokens, heads, features] of targets, or masks
                [*, tokens]; some may be None.
            sources: those of its sources.
        """
        there = [x for x in targets if x is not None]
        queries = self.queries(*there, dims=[head_token_dim(x) for x in there])
        parts = operation.part(in_places_of(targets, queries), sources, self.block)
        dims = [-3] * len(parts)
        arrived = self.results.finish(self.results.start(parts, dims), parts, dims)
        whole: Tensors = tuple(x.index_select(-3, self.own) for x in parts)
        count = len(self.own)
        for other in range(sum(self.results.received) // count if count else 0):
            part = tuple(x.narrow(-3, other * count, count) for x in arrived)
            whole = operation.merge(whole, part)
        if not count:  # gradients must reach the exchange on every rank
            whole = tuple(torch.cat([x, y], dim=-3) for x, y in zip(whole, arrived, strict=True))
        return whole


def global_block(tokens: Sequence[int], num_sources: int, rank: int, device: Any) -> RingBlock:
    """Return the edges from the sources of a rank to all global tokens."""
    return RingBlock(
        number=rank,
        run=0,
        targets=(0, len(tokens)),
        sources=(0, num_sources),
        tokens=torch.arange(num_sources, device=device),
        graph=bipartite_complete_graph(len(tokens), num_sources).to(device),
    )


def results_exchange(
    tokens: Sequence[int], layout: Layout, rank: int, group: Any, device: Any
) -> tuple[RowExchange, Tensor]:
    """Return the exchange of partial results, and which global tokens are this rank's own."""
    owner = layout.owner(torch.tensor(tokens))
    own = (owner == rank).nonzero().flatten()
    send = [(owner == other).nonzero().flatten() for other in range(layout.ranks)]
    send[rank] = own[:0]
    received = [0 if other == rank else len(own) for other in range(layout.ranks)]
    exchange = RowExchange(
        group=group,
        send=torch.cat(send).to(device),
        sent=tuple(map(len, send)),
        received=tuple(received),
        total=len(tokens) * (layout.ranks - 1),
    )
    return exchange, own.to(device)

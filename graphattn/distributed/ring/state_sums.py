"""Linear attention over the sources of all ranks, of which states travel in place of rows.

A rank computes the states that others need from its own keys and values, and exchanges them once.
The states that a group of targets sees add up to one, and a product of their queries with it gives
what all sources of other ranks add. Edges within a rank are computed as on a ring. Everything is
differentiated by autograd, so there are second derivatives.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graphattn.distributed.ring.operations import Given, LinearParts, Tensors
from graphattn.distributed.ring.passes import in_order, over_own_sources
from graphattn.distributed.ring.rounds import RingRound
from graphattn.distributed.ring.states import StateGroup, StatesOfRank
from graphattn.distributed.seen import Run
from graphattn.graphs.token_graph import TokenGraph
from graphattn.ops.inputs import clear_invalid, full_precision, repeat_heads
from graphattn.ops.linear_attention.api import by_head
from graphattn.ops.linear_attention.operators import linear_sums


def linear_with_states(
    states: StatesOfRank, rounds: Sequence[RingRound], targets: Given, sources: Given
) -> Tensors:
    """Return the numerators [*, N, H, Dv] and denominators [*, N, H, 1] over all sources.

    Args:
        states: what this rank exchanges.
        rounds: this rank's rounds on a ring, of which only the first one is computed.
        targets: features of queries [*, N, H, D], rotated ones or None, and a mask or None.
        sources: features of keys [*, M, Hk, D], values [*, M, Hk, Dv], rotated features of keys or
            None, and a mask or None.
    """
    query, turned_query, of_targets = targets
    key, value, turned_key, of_sources = sources
    turned_query = query if turned_query is None else turned_query
    turned_key = key if turned_key is None else turned_key
    with full_precision(query.device):
        key, value, turned_key = (clear_invalid(x, of_sources) for x in (key, value, turned_key))
        own = [_state(key, value, turned_key, run) for run in states.pieces]
        sent = [torch.stack(own, dim=-3)]
        on_their_way = states.exchange.start(sent, [-3])
        (arrived,) = states.exchange.finish(on_their_way, sent, [-3])
        others = in_order(
            [
                _products(query, turned_query, arrived, group, graph)
                for group, graph in zip(states.groups, states.graphs(query.shape[-1]), strict=True)
            ]
        )
    within = over_own_sources(LinearParts(), rounds, targets, sources)
    return tuple(x + clear_invalid(y, of_targets) for x, y in zip(within, others, strict=True))


def _state(key: Tensor, value: Tensor, turned_key: Tensor, run: Run) -> Tensor:
    """Return the state of a run of sources, [*, Hk, D * (Dv + 1)]: first all k v^T, then all k."""
    key, value, turned_key = (
        x.narrow(-3, run[0], run[1] - run[0]) for x in (key, value, turned_key)
    )
    products = turned_key.movedim(-3, -1) @ value.transpose(-3, -2)
    return torch.cat([products.flatten(-2), key.sum(-3)], dim=-1)


def _products(
    query: Tensor, turned_query: Tensor, arrived: Tensor, group: StateGroup, graph: TokenGraph
) -> Tensors:
    """Return what states of other ranks add to the numerators and denominators of a group.

    Each feature of a state is taken for a source that all targets see, whose key is a unit vector.
    So NaN spreads, and stays out of gradients, as it does within a rank.
    """
    heads, width = query.shape[-2:]
    total = arrived.index_select(-3, group.rows).sum(-3, keepdim=True)
    state = repeat_heads(total, heads).squeeze(-3)  # [*, H, D * (Dv + 1)]
    above, below = state.split([state.shape[-1] - width, width], dim=-1)
    units = torch.eye(width, dtype=state.dtype, device=state.device)
    units = units.expand(*state.shape[:-1], width, width)
    sums = []
    for rows, matrix in ((turned_query, above), (query, below)):
        rows = rows.narrow(-3, group.start, group.stop - group.start)
        if not len(group.rows):  # these targets see nothing, but gradients of states travel
            rows = torch.zeros_like(rows)
        sums.append(linear_sums(by_head(rows), units, matrix.unflatten(-1, (width, -1)), graph))
    return tuple(x.transpose(-3, -2) for x in sums)

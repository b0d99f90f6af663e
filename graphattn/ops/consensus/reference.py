"""Consensus in its readable form: one difference per edge, times its matrix, summed at its ends.

Everything is computed per edge, in the order of ``graph.edge_index``, so memory is
O(E * H * (xi + r * D)). Exact in float64, twice differentiable; the other backends are tested
against it.
"""

from __future__ import annotations

from torch import Tensor

from graphattn.graphs.token_graph import TokenGraph
from graphattn.ops.consensus.edge_network import (
    EdgeHidden,
    EdgeMatrix,
    EdgeNetworkParameters,
    edge_matrix,
    form,
)
from graphattn.ops.consensus.step_size import automatic_move, bounds_of_degrees, degrees
from graphattn.ops.inputs import ValidPair, clear_invalid, valid_edges
from graphattn.ops.segments import segment_sum


def edge_matrices(
    target_hidden: Tensor,
    source_hidden: Tensor,
    network: EdgeNetworkParameters,
    graph: TokenGraph,
    valid: ValidPair = (None, None),
    edge_hidden: EdgeHidden = None,
) -> EdgeMatrix:
    """R of every edge, from the edge network's hidden vectors of its two tokens, and its own."""
    source, target = graph.edge_index
    hidden_i = clear_invalid(target_hidden, valid[0]).index_select(-3, target)
    hidden_j = clear_invalid(source_hidden, valid[1]).index_select(-3, source)
    hidden_sum = hidden_i + hidden_j
    if edge_hidden is not None:
        hidden_sum = hidden_sum + form(edge_hidden, valid_edges(valid, *graph.edge_index))
    return edge_matrix(hidden_sum, network)


def consensus_update(
    state: Tensor,
    target_hidden: Tensor,
    source_hidden: Tensor,
    network: EdgeNetworkParameters,
    graph: TokenGraph,
    step_size: Tensor | None,
    *,
    update: str,
    disagreement: tuple[Tensor, Tensor],
    valid: ValidPair,
    edge_hidden: EdgeHidden = None,
) -> Tensor:
    """Compute u' = u - step * g; `step_size` is broadcastable to [*, N, H], None if automatic."""
    gradient, degree = sums_over_edges(
        target_hidden,
        source_hidden,
        network,
        graph,
        update=update,
        disagreement=disagreement,
        valid=valid,
        edge_hidden=edge_hidden,
        with_degrees=step_size is None,
    )
    if degree is not None:
        return automatic_move(state, gradient, bounds_of_degrees(degree, graph, update))
    assert step_size is not None
    return state - step_size[..., None] * gradient


def sums_over_edges(
    target_hidden: Tensor,
    source_hidden: Tensor,
    network: EdgeNetworkParameters,
    graph: TokenGraph,
    *,
    update: str,
    disagreement: tuple[Tensor, Tensor],
    valid: ValidPair,
    edge_hidden: EdgeHidden = None,
    with_degrees: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The sums g [*, N, H, D], and the degrees [*, N, H] if they are wanted."""
    source, target = graph.edge_index
    u, v = clear_invalid(disagreement[0], valid[0]), clear_invalid(disagreement[1], valid[1])
    R = edge_matrices(target_hidden, source_hidden, network, graph, valid, edge_hidden)
    message = R.apply(u.index_select(-3, target) - v.index_select(-3, source))
    keep = valid_edges(valid, source, target)
    if keep is not None:
        message = message.masked_fill(~keep[..., None], 0)
    gradient = segment_sum(message, target, graph.num_targets)
    if update == "energy":
        gradient = gradient.index_add(-3, source, message, alpha=-1)
    if not with_degrees:
        return gradient, None
    strength = R.alpha + R.beta  # lambda_max(R) <= alpha + beta: Lambda's rows sum to norm 1
    if keep is not None:
        strength = strength.masked_fill(~keep, 0)
    return gradient, degrees(strength, graph, update)

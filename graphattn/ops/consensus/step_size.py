"""The automatic step size, which never overshoots."""

from __future__ import annotations

from torch import Tensor

from graphattn.graphs.token_graph import TokenGraph


def automatic_step(strength: Tensor, graph: TokenGraph, update: str) -> Tensor:
    """A step that never overshoots, [*, N, H], from upper bounds on ||R|| per edge, [*, E, H].

    "energy": with d_i the sum of the bounds over the in- and out-edges of i,
    lambda_max(L_sym) <= max_i d_i (Gershgorin, blockwise: L_sym has diagonal blocks of norm
    <= d_i / 2 and off-diagonal norms that sum to <= d_i / 2), so eta = 1 / (2 max d_i); the
    maximum is per head over one sequence. "target": per row, eta_i = 1 / d_i over its own edges,
    because a maximum over tokens would depend on later tokens. A token (or under "energy" a
    sequence) without edges has eta = 0.

    Under "energy" a self-loop does not count, because its parts at target and source cancel. Under
    "target" it does, and the row becomes an average that includes the token itself.
    """
    source, target = graph.edge_index
    if update == "energy":
        strength = strength.masked_fill((source == target)[:, None], 0)
    degree = strength.new_zeros(*strength.shape[:-2], graph.num_targets, strength.shape[-1])
    degree = degree.index_add(-2, target, strength)
    if update == "energy":
        degree = degree.index_add(-2, source, strength)
    return step_of_degrees(degree, graph, update)


def step_of_degrees(degree: Tensor, graph: TokenGraph, update: str) -> Tensor:
    """The step of :func:`automatic_step` from the degrees d_i, [*, N, H]."""
    if update == "energy":
        bound = 2 * graph.maximum_per_sequence(degree)
    else:
        bound = degree
    still = bound == 0
    return bound.masked_fill(still, 1).reciprocal().masked_fill(still, 0)

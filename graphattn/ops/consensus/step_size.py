"""The automatic step size, which never overshoots."""

from __future__ import annotations

import torch
from torch import Tensor

from graphattn.graphs.token_graph import TokenGraph


def automatic_bounds(strength: Tensor, graph: TokenGraph, update: str) -> Tensor:
    """The numbers whose reciprocals are the automatic step, from those of :func:`degrees`."""
    return bounds_of_degrees(degrees(strength, graph, update), graph, update)


def degrees(strength: Tensor, graph: TokenGraph, update: str) -> Tensor:
    """The sums d_i of upper bounds on ||R|| over the edges of every token, [*, N, H].

    `strength` has these bounds per edge, [*, E, H].

    "energy": with d_i the sum of the bounds over the in- and out-edges of i,
    lambda_max(L_sym) <= max_i d_i (Gershgorin, blockwise: L_sym has diagonal blocks of norm
    <= d_i / 2 and off-diagonal norms that sum to <= d_i / 2), so eta = 1 / (2 max d_i); the
    maximum is per head over one sequence. "target": per row, eta_i = 1 / d_i over its own edges,
    because a maximum over tokens would depend on later tokens. A token (or under "energy" a
    sequence) without edges has eta = 0, and so has one whose matrices are nearly zero.

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
    return degree


def bounds_of_degrees(degree: Tensor, graph: TokenGraph, update: str) -> Tensor:
    """The numbers whose reciprocals are the automatic step, from degrees d_i, [*, N, H]."""
    return 2 * graph.maximum_per_sequence(degree) if update == "energy" else degree


def is_still(bound: Tensor) -> Tensor:
    """Return where there is no step: all matrices are zero, or below 3e-36 in float32.

    Below it, gradients divided by `bound` would overflow.
    """
    return bound < 256 * torch.finfo(bound.dtype).tiny


def automatic_step(bound: Tensor) -> Tensor:
    """Return the automatic step, 1 / bound, or 0 where there is none."""
    still = is_still(bound)
    return bound.masked_fill(still, 1).reciprocal().masked_fill(still, 0)


def automatic_move(state: Tensor, gradient: Tensor, bound: Tensor) -> Tensor:
    """Make the automatic step, state - gradient / bound, [*, N, H, D]; `bound` is [*, N, H].

    The scale of the edges' matrices cancels in the result, and it must in the backward pass, too,
    where the derivative 1 / bound^2 overflows for matrices of 1e-20. So the sums are divided by the
    size of `bound` first, and what is differentiated is `bound` relative to its size, 1.
    """
    still = is_still(bound)
    bound = bound.masked_fill(still, 1)
    size = bound.detach()
    step = (bound / size).reciprocal().masked_fill(still, 0)
    return torch.addcmul(state, step[..., None], gradient / size[..., None], value=-1)

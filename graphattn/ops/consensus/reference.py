"""Consensus, readable: one disagreement per edge, weighted by its matrix, summed at the ends.

Everything is stated per edge, in the order of ``graph.edge_index``, so memory is
O(E * H * (xi + r * D)). Exact in float64, twice differentiable; the other backends are tested
against it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from graphattn.graphs.token_graph import TokenGraph
from graphattn.ops.consensus.parameters import EdgeNetworkParameters
from graphattn.ops.inputs import ValidPair, clear_invalid, valid_edges
from graphattn.ops.segments import segment_sum


class EdgeMatrix(NamedTuple):
    """R = alpha I + beta Lambda^T Lambda of every edge and head, without forming it.

    alpha, beta [*, E, H]; unit_rows [*, E, H, r, D] holds sqrt(r) Lambda, rows of norm 1 (or 0).
    """

    alpha: Tensor
    beta: Tensor
    unit_rows: Tensor

    def apply(self, d: Tensor) -> Tensor:
        """R d = alpha d + (beta / r) sum_k row_k (row_k . d), for d [*, E, H, D]."""
        along_rows = (self.unit_rows * d[..., None, :]).sum(-1, keepdim=True)
        low_rank = (self.unit_rows * along_rows).sum(-2)
        rank = self.unit_rows.shape[-2]
        return self.alpha[..., None] * d + (self.beta / rank)[..., None] * low_rank

    def dense(self) -> Tensor:
        """R itself, [*, E, H, D, D]."""
        rank, features = self.unit_rows.shape[-2:]
        gram = self.unit_rows.transpose(-1, -2) @ self.unit_rows
        identity = torch.eye(features, dtype=gram.dtype, device=gram.device)
        return self.alpha[..., None, None] * identity + (self.beta / rank)[..., None, None] * gram


def edge_matrix(pre_activation: Tensor, network: EdgeNetworkParameters) -> EdgeMatrix:
    """The edge network (Algorithm 2) from its first layer's sum, [*, E, G, xi or 3 xi], G = H or 1.

    With 3 xi features the thirds feed alpha, beta and Lambda (one trunk each); with xi one trunk
    feeds all three.
    """
    hidden = functional.gelu(pre_activation)
    xi = network.alpha.shape[-1]
    thirds = hidden.split(xi, dim=-1) if hidden.shape[-1] == 3 * xi else (hidden,) * 3
    alpha = functional.softplus((thirds[0] * network.alpha).sum(-1) + network.alpha_bias)
    beta = functional.softplus((thirds[1] * network.beta).sum(-1) + network.beta_bias)
    shared = thirds[2].expand(*alpha.shape, xi)  # one trunk for all heads where G = 1
    raw = torch.einsum("...hx,hrdx->...hrd", shared, network.shear) + network.shear_bias
    return EdgeMatrix(alpha, beta, _unit_rows(raw))


def _unit_rows(rows: Tensor) -> Tensor:
    """Rows divided by their norm; a zero row stays zero (RN of Eq. 36)."""
    # Dividing by the largest entry first changes nothing but keeps the squares in range.
    largest = rows.detach().abs().amax(-1, keepdim=True)
    rows = rows / torch.where(largest > 0, largest, 1)
    squared = rows.square().sum(-1, keepdim=True)
    return rows * torch.where(squared == 0, 1, squared).rsqrt()


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
) -> Tensor:
    """u' = u - step * g; `step_size` broadcastable to [*, N, H], None for the automatic one."""
    source, target = graph.edge_index
    u, v = clear_invalid(disagreement[0], valid[0]), clear_invalid(disagreement[1], valid[1])
    pre_activation = clear_invalid(target_hidden, valid[0]).index_select(
        -3, target
    ) + clear_invalid(source_hidden, valid[1]).index_select(-3, source)
    R = edge_matrix(pre_activation, network)
    message = R.apply(u.index_select(-3, target) - v.index_select(-3, source))
    keep = valid_edges(valid, source, target)
    if keep is not None:
        message = message.masked_fill(~keep[..., None], 0)
    gradient = segment_sum(message, target, graph.num_targets)
    if update == "energy":
        gradient = gradient.index_add(-3, source, message, alpha=-1)
    if step_size is None:
        strength = R.alpha + R.beta  # lambda_max(R) <= alpha + beta: Lambda's rows sum to norm 1
        if keep is not None:
            strength = strength.masked_fill(~keep, 0)
        step_size = automatic_step(strength, graph, update)
    return state - step_size[..., None] * gradient


def automatic_step(strength: Tensor, graph: TokenGraph, update: str) -> Tensor:
    """A step that never overshoots, [*, N, H], from upper bounds on ||R|| per edge, [*, E, H].

    "energy": with d_i the sum of the bounds over the in- and out-edges of i,
    lambda_max(L_sym) <= max_i d_i (Gershgorin, blockwise: L_sym has diagonal blocks of norm
    <= d_i / 2 and off-diagonal norms that sum to <= d_i / 2), so eta = 1 / (2 max d_i); the
    maximum is per head over one sequence. "target": per row, eta_i = 1 / d_i over its own edges;
    a maximum over tokens would let the future in. A token (sequence) without edges stays: eta = 0.
    """
    source, target = graph.edge_index
    degree = strength.new_zeros(*strength.shape[:-2], graph.num_targets, strength.shape[-1])
    degree = degree.index_add(-2, target, strength)
    if update == "energy":
        degree = degree.index_add(-2, source, strength)
        degree = 2 * _maximum_per_sequence(degree, graph)
    still = degree == 0
    return degree.masked_fill(still, 1).reciprocal().masked_fill(still, 0)


def _maximum_per_sequence(degree: Tensor, graph: TokenGraph) -> Tensor:
    """The largest entry over the tokens of each sequence of a batch, at each of its tokens."""
    if degree.shape[-2] == 0:
        return degree
    pieces = degree.split([targets for targets, _ in graph.sizes], dim=-2)
    return torch.cat(
        [p.amax(-2, keepdim=True).expand_as(p) if p.shape[-2] else p for p in pieces], dim=-2
    )

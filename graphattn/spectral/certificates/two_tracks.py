"""Certificates of consensus between two tracks: every target takes a gradient step of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from graphattn.graphs import TokenGraph
from graphattn.nn import CrossConsensus
from graphattn.nn.base.graph_layer import Positions
from graphattn.ops.consensus.edge_network import EdgeMatrix
from graphattn.spectral.certificates.facts import PAPER, SLACK, Fact, constants_stay, energy_falls
from graphattn.spectral.certificates.frozen_steps import (
    AGREE,
    edge_hidden_of,
    largest_iteration,
    step_sizes,
)

THEOREMS = "no overshoot", "energy falls", "constants stay"
NUMBERS = 1 << 22  # entries of matrices in memory at a time


def cross_facts(
    layer: CrossConsensus,
    x: Tensor,
    context: Tensor,
    graph: TokenGraph,
    positions: Positions,
    edge_features: Tensor | None,
) -> list[Fact]:
    r"""State what holds for one step of targets x [N, dim] towards sources [M, context_dim].

    With the sources v held fixed, :math:`E(u) = \frac{1}{2} \sum_e (u_i - v_j)^T R_e (u_i - v_j)`
    has the gradient :math:`\sum_j R_{ij} (u_i - v_j)` at target i, which the step follows. So E
    falls if eta times the largest eigenvalue of every target's :math:`\sum_j R_{ij}` is below 2.
    """
    rotations = layer.rotations(x, context, graph, positions)
    u = layer.split(layer.source_proj(x), layer.heads)
    v = layer.split(layer.context_proj(context), layer.heads)
    compared = layer.rotate(u, v, rotations)
    net = layer.edge_net
    hidden = net.target_hidden(x), net.source_hidden(context)
    of_edges = edge_hidden_of(layer, edge_features, graph)
    source, target = graph.edge_index
    R = net.edge_matrix(hidden[0][target] + hidden[1][source], of_edges.get("edge_hidden"))
    eta = step_sizes(layer, R, graph, "target")

    def moved(states: tuple[Tensor, Tensor]) -> Tensor:
        """Make the layer's own step of the first of two tracks, in the rotated frame."""
        return layer.mix(
            states[0], states, hidden, graph, (None, None), **largest_iteration(layer), **of_edges
        )

    def gradient(states: tuple[Tensor, Tensor]) -> Tensor:
        message = R.apply(states[0][target] - states[1][source])
        return torch.zeros_like(states[0]).index_add(0, target, message)

    ours = compared[0] - eta[..., None] * gradient(compared)
    reason = ""
    if not bool((moved(compared) - ours).norm() <= AGREE * (ours.norm() + compared[0].norm())):
        reason = (
            f"{type(layer).__name__} overrides message() or another part of the step, so the "
            "theorems about it do not apply"
        )
    elif layer.rotary is not None and not layer.isometric:
        reason = (
            "rope=True compares rotated tokens but changes unrotated ones (Eq. 43), so it is no "
            "gradient step. The theorem holds for rope='isometric'"
        )
    if reason:
        return [Fact(name, "not applicable", reason) for name in THEOREMS]

    def energy(of_targets: Tensor) -> float:
        d = of_targets[target] - compared[1][source]
        return float((d * R.apply(d)).sum()) / 2

    least = 1 - _largest_pull(R, target, eta)
    before, after = energy(compared[0]), energy(ours)
    drift = 0.0
    if u.numel():
        equal = torch.ones_like(u) * u[:1], torch.ones_like(v) * u[:1]
        drift = float((moved(equal) - equal[0]).abs().amax() / equal[0].abs().amax().clamp(1e-300))
    return [
        Fact(
            "no overshoot",
            "holds" if least >= -SLACK else "violated",
            "no target moves beyond its sources in any direction, because 1 - eta lambda_max >= 0"
            if least >= -SLACK
            else "some target moves beyond its sources, because the step is larger than 1 over the "
            "largest eigenvalue of the sum of its matrices",
            {"1 - eta lambda_max": least},
            f"{PAPER}, Section 2.2, for one target",
        ),
        energy_falls(
            before,
            after,
            "in this step, on these tokens, with the sources held fixed; on all tokens if "
            "1 - eta lambda_max > -1",
        ),
        constants_stay(drift, "targets that are equal to their sources do not change"),
    ]


def _largest_pull(R: EdgeMatrix, target: Tensor, eta: Tensor) -> float:
    """Compute the largest eigenvalue of eta_i sum_j R_ij for targets and heads."""
    N, heads = eta.shape
    features = R.unit_rows.shape[-1]
    largest, step = 0.0, max(1, NUMBERS // max(1, heads * features**2))
    for i in range(0, N, step):
        last = min(i + step, N)
        sums = torch.zeros(last - i, heads, features, features, dtype=torch.float64)
        edges = slice(*torch.searchsorted(target.contiguous(), torch.tensor([i, last])).tolist())
        for e in range(edges.start, edges.stop, step):
            some = slice(e, min(e + step, edges.stop))
            dense = EdgeMatrix(*(part[some] for part in R)).dense()
            sums.index_add_(0, target[some] - i, dense)
        pulls = torch.linalg.eigvalsh(eta[i:last, :, None, None] * sums)
        largest = max(largest, float(pulls.amax()) if pulls.numel() else 0.0)
    return largest

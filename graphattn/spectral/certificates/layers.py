"""Certificates of a layer on the tokens of one sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from graphattn.graphs import TokenGraph
from graphattn.nn import (
    CrossConsensus,
    DotProductAttention,
    GaussianKernelAttention,
    KrauseAttention,
    LinearAttention,
    SelfConsensus,
)
from graphattn.ops.consensus.calls import check_energy_graph
from graphattn.spectral.certificates.facts import (
    PAPER,
    SLACK,
    Certificate,
    Fact,
    constants_stay,
    energy_falls,
)
from graphattn.spectral.certificates.frozen_steps import FrozenStep
from graphattn.spectral.classes import eigenvalue_one_multiplicity
from graphattn.spectral.eigenvalues import fiedler_value
from graphattn.spectral.laplacians.linear_maps import (
    largest_singular_value,
    operator_of,
    spectral_radius,
)
from graphattn.spectral.matrix_weighted.spectrum_ends import (
    End,
    largest_eigenvalue,
    smallest_eigenvalue,
)

THEOREMS = "low-pass filter", "energy falls", "constants stay"
NO_BOUND = (
    "the bounds of Appendix A need a fixed step that is at most 1 / (2 lambda_max), and here the "
    "step depends on the tokens or is larger"
)
CERTIFIED = (
    SelfConsensus,
    CrossConsensus,
    DotProductAttention,
    KrauseAttention,
    GaussianKernelAttention,
    LinearAttention,
)


def certify_sequence(
    layer: nn.Module,
    x: Tensor,
    graph: TokenGraph,
    positions: Tensor | None,
    edge_features: Tensor | None = None,
    measure: bool = False,
) -> Certificate:
    """Make the certificate of a layer in float64 on the CPU, on tokens x [N, dim]."""
    if graph.num_targets != graph.num_sources:
        reason = f"{type(layer).__name__} across two tracks"
        facts = [Fact("eigenvalues", "not applicable", reason)]
    else:
        with torch.no_grad():
            facts = (
                _consensus_facts(layer, x, graph, positions, edge_features, measure)
                if isinstance(layer, SelfConsensus)
                else _attention_facts(layer, x, graph, positions)
            )
    return Certificate(f"{layer!r} over {graph!r}", tuple(facts))


# Consensus.


def _consensus_facts(
    layer: SelfConsensus,
    x: Tensor,
    graph: TokenGraph,
    positions: Tensor | None,
    edge_features: Tensor | None,
    measure: bool,
) -> list[Fact]:
    reason = ""
    if layer.update_rule == "target":
        reason = (
            "update='target' changes only one end of an edge, so it is no gradient step, and its "
            "map can have eigenvalues of negative real part for any step size"
        )
    else:
        check_energy_graph(graph)
        if layer.rotary is not None and not layer.isometric:
            reason = (
                "rope=True compares rotated tokens but changes unrotated ones (Eq. 42), so it is "
                "no gradient step. The theorem holds for rope='isometric'"
            )
    if reason and not measure:
        return [Fact(name, "not applicable", reason) for name in THEOREMS]
    step = FrozenStep(layer, x, graph, positions, edge_features)
    ours = step.is_of_layer()
    if not ours:
        reason = (
            f"{type(layer).__name__} overrides message() or another part of Algorithm 1, so the "
            "theorems about Algorithm 1 do not apply"
        )
    if not reason:
        return _energy_facts(layer, step, measure)
    facts = [Fact(name, "not applicable", reason) for name in THEOREMS]
    if not measure:
        return facts
    T = step.operator() if ours else operator_of(step.of_layer, step.shape)
    radius = _radius_of_triangle(step) if ours else None
    numbers = {
        "norm": largest_singular_value(T),
        "spectral radius": spectral_radius(T) if radius is None else radius,
    }
    what = "one step with R held fixed, the largest over heads"
    return [*facts, Fact("map", "measured", what, numbers)]


def _radius_of_triangle(step: FrozenStep) -> float | None:
    """Compute the spectral radius if no token sees a later one, or none sees an earlier one.

    Otherwise the result is None. The map is block triangular then, and its eigenvalues are exactly
    those of the diagonal blocks. Arnoldi's iteration would be inaccurate, because the matrix is far
    from normal.
    """
    if step.layer.update_rule != "target":
        return None
    ahead = step.source > step.target
    if ahead.any() and not ahead.all():
        return None
    blocks = step.diagonal_blocks()
    solve = np.linalg.eigvalsh if step.rotations is None else np.linalg.eigvals
    return float(np.abs(solve(blocks)).max(initial=0.0))


def _energy_facts(layer: SelfConsensus, step: FrozenStep, measure: bool) -> list[Fact]:
    heads = step.heads()
    top = largest_eigenvalue(heads)
    lowest = 1 - top.value  # 1 - 2 eta lambda_max of the worst head
    u = step.states
    updated = step.of_layer(u)
    before, after = step.energy(u), step.energy(updated)
    constant = layer.rotate_back(torch.ones_like(u) * u[:1], step.rotations)
    what = "equal tokens do not change"
    if layer.isometric:
        what = "tokens that are equal after rotation do not change"
    drift = _largest(step.of_layer(constant) - constant) / max(_largest(constant), 1e-300)
    facts = [
        Fact(
            "low-pass filter",
            "holds" if lowest >= -SLACK else "violated",
            "no mode changes sign, because 1 - 2 eta lambda_max >= 0"
            if lowest >= -SLACK
            else "a mode changes sign in every step, because the step is larger than "
            "1 / (2 lambda_max)",
            {"1 - 2 eta lambda_max": lowest, **_accuracy(top)},
            f"{PAPER}, Section 2.2 and Appendix A",
        ),
        energy_falls(
            before,
            after,
            "in this step, on these tokens; on all tokens if 1 - 2 eta lambda_max > -1",
        ),
        constants_stay(drift, what),
    ]
    if layer.isometric:
        return facts
    mean = _largest(updated.mean(0) - u.mean(0))
    facts.append(
        Fact(
            "mean stays",
            "holds" if mean <= SLACK * float(1 + u.abs().max()) else "violated",
            "every edge changes both ends by opposite amounts",
            {"drift": mean},
            f"{PAPER}, Algorithm 1",
        )
    )
    eta = layer.step_tensor()
    bounded = isinstance(eta, float) and lowest >= -SLACK
    if bounded or measure:
        low = smallest_eigenvalue(heads)
        facts.append(_rate_fact(step, top, low, eta if bounded else None))
    else:
        facts.append(Fact("rate", "not applicable", NO_BOUND))
    return facts


def _rate_fact(step: FrozenStep, top: End, low: End, eta: float | None) -> Fact:
    """Compare the rate of the slowest mode that is not constant with the bound of Appendix A.

    With eta None, there is no bound.
    """
    ends = [abs(1 - top.value), *([abs(1 - low.value)] if low.value < np.inf else [])]
    slowest = max(ends)
    numbers = {"slowest mode": slowest, **_accuracy(top if slowest == ends[0] else low)}
    if eta is None:
        return Fact("rate", "measured", f"the slowest mode over all heads; {NO_BOUND}", numbers)
    # The bound uses the smallest eigenvalue of R over all edges and heads, times the Fiedler value
    # of the graph without weights.
    bound = 1 - 2 * eta * step.smallest_matrix_eigenvalue * fiedler_value(step.graph)
    return Fact(
        "rate",
        "holds" if slowest <= bound + SLACK else "violated",
        "the slowest mode shrinks at least as fast as the bounds of Appendix A say",
        {**numbers, "bound": bound},
        f"{PAPER}, Appendix A",
    )


def _accuracy(end: End) -> dict[str, float]:
    """Return the error bound of an eigenvalue if it is known, or else the residual."""
    return {"error bound" if end.enclosed else "residual": end.error}


def _largest(u: Tensor) -> float:
    return float(u.abs().max()) if u.numel() else 0.0


# Attention.


def _attention_facts(
    layer: nn.Module, x: Tensor, graph: TokenGraph, positions: Tensor | None
) -> list[Fact]:
    given: dict[str, Any] = {"positions": positions, "return_attention_weights": True}
    if getattr(layer, "embeds_values", False):  # any tokens, because weights do not read values
        given["tokens"] = torch.zeros(len(x), dtype=torch.int64)
    _, weights = layer(x, graph, **given)  # [E, H]
    target = graph.edge_index[1]
    sums = torch.zeros(graph.num_targets, weights.shape[-1], dtype=weights.dtype)
    sums.index_add_(0, target, weights)
    has_edges = graph.in_degree() > 0
    error = float((sums[has_edges] - 1).abs().max()) if bool(has_edges.any()) else 0.0
    averages = error <= 1e-9 and bool((weights >= 0).all())
    facts = [
        Fact(
            "rows are averages",
            "holds" if averages else "not applicable",
            "every token's new value is an average of the values that it sees, so values stay in "
            "their convex hull"
            if averages
            else "weights are negative or rows do not sum to 1 (because of eps > 0, a sink or, in "
            "linear attention, the rotation)",
            {"largest |row sum - 1|": error},
        )
    ]
    if averages and bool(has_edges.all()):
        classes = [
            eigenvalue_one_multiplicity(graph, weights[:, h]) for h in range(weights.shape[-1])
        ]
        facts.append(
            Fact(
                "eigenvalue 1",
                "holds",
                "its multiplicity is the number of closed classes of tokens, per head",
                {f"head {h}": float(count) for h, count in enumerate(classes)},
                "Krause attention, multi-cluster formation",
            )
        )
    reason = "attention is no gradient step of an energy, because its rows are normalised"
    facts.append(Fact("energy falls", "not applicable", reason))
    return facts

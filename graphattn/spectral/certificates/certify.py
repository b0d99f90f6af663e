"""Certificates: claims of theory about a graph or a layer, beside measurements."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from graphattn.graphs import TokenGraph
from graphattn.graphs.structures.structure import Band
from graphattn.spectral.arguments import as_square_graph, check_finite
from graphattn.spectral.bounds import path_fiedler_bounds
from graphattn.spectral.certificates.facts import SLACK, Certificate, Fact
from graphattn.spectral.classes import closed_classes
from graphattn.spectral.eigenvalues import fiedler_pair, max_eigenvalue
from graphattn.spectral.energy import energy
from graphattn.spectral.filters import energy_gradient, steps_of_rates

if TYPE_CHECKING:
    from torch import nn

STEPS = 200  # of the filter, at most, to measure its rate


def certify(
    graph_or_layer: TokenGraph | nn.Module,
    x: Tensor | None = None,
    graph: TokenGraph | Tensor | Sequence[TokenGraph] | None = None,
    *,
    valid: Tensor | None = None,
    positions: Tensor | None = None,
    edge_features: Tensor | None = None,
    **given: Any,
) -> Certificate:
    r"""Every theorem that speaks of a graph or a layer, checked on it, and which do not and why.

    Of a graph: whether it hangs together, its Fiedler value beside closed form and bounds, the
    largest step, the predicted rate of smoothing. With a signal `x`, that rate is measured on it.

    Of a layer, on tokens `x` over `graph`. For :class:`~graphattn.nn.SelfConsensus`, R is held at
    what these tokens give, and one step is a linear map: is it a low-pass filter, does the energy
    fall, do constants stay? With ``update="target"`` or ``rope=True`` (Eq. 42) the theorems do not
    apply; the certificate says so and gives the measured norm. For attention layers: are rows
    averages, and how many closed classes of tokens are there?

    Of a block, an encoder or any module with ``forward(x, graph)``: every layer in it on the tokens
    that reach it when the module runs on `x`. The certificate's own facts are the worst over layers
    and ``parts`` holds one certificate per layer. Of a batch (x [*, N, dim], or a packed graph) in
    the same way: one certificate per sequence, without its padding, and the worst. A module that
    holds none of these layers is measured: how much its derivative at `x` amplifies.

    Everything is computed in float64 on the CPU; a layer is copied, put in evaluation mode, and
    left as it is. Of a consensus layer, no matrix N D x N D is formed: eigenvalues come from
    products with the edges' matrices, and where the graph is narrow (a window), elimination counts
    the eigenvalues beyond them, which bounds the error: the number "error bound". Where that would
    take too long (wide graphs of wide heads), the certificate gives the residual in its place: some
    eigenvalue lies that near, and that it is the extreme one is as good as certain, not proven.

    Source: Stabilizing Transformer Training Through Consensus, Sections 2-4 and Appendices A, B,
    with the errata of the documentation; Krause attention's multi-cluster theorem.

    Args:
        graph_or_layer: a TokenGraph with N tokens, a layer of ``graphattn.nn``, or a module with
            ``forward(x, graph)``.
        x: for a graph, a signal [N] or [N, C]; for a layer, tokens [*, N, dim]; for another module,
            what it takes first, such as the token numbers of a
            :class:`~graphattn.models.SequenceEncoder`.
        graph: for a layer or module, the graph over which it runs; may be left out where the
            module's ``forward`` has a default.
        valid: for a layer or module, bool [N] or [*, N], True where a token is real.
        positions: for a layer or module, as its ``forward`` takes them.
        edge_features: likewise, where its networks see features of edges.
        given: what else a module's ``forward`` takes, such as the `noise_level` of an encoder or
            the `structure` of a protein.

    Returns:
        A :class:`Certificate`; a table at the prompt and in a notebook, a list where printed, and
        ``to_json()``.

    Raises:
        ValueError: if a layer comes without `x` or `graph`, a module has no ``forward(x, graph)``,
            shapes disagree, or `x` is not finite.

    Example:
        >>> import torch, graphattn as ga
        >>> certificate = ga.spectral.certify(ga.window_path_graph(100, window=2))
        >>> certificate.sound
        True
        >>> print(certificate["Fiedler value"].status)
        holds
        >>> model = ga.models.SequenceEncoder(9, 8, depth=2, heads=2, mixer="mix", edge_hidden=4)
        >>> certificate = ga.spectral.certify(model, torch.randint(9, (3, 20)))
        >>> list(certificate.parts), certificate.sound
        (['blocks.0.mixer', 'blocks.1.mixer'], True)
    """
    if isinstance(graph_or_layer, torch.nn.Module):
        from graphattn.spectral.certificates.modules import certify_module  # it needs PyG

        return certify_module(graph_or_layer, x, graph, valid, positions, edge_features, given)
    of_layers = {"valid": valid, "positions": positions, "edge_features": edge_features, **given}
    for name, value in {"graph": graph, **of_layers}.items():
        if value is not None:
            raise ValueError(f"{name} is for layers; pass the graph itself as the first argument")
    return _certify_graph(as_square_graph(graph_or_layer), x)


def _certify_graph(graph: TokenGraph, x: Tensor | None) -> Certificate:
    largest = max_eigenvalue(graph)
    mode = fiedler_pair(graph)
    facts = [
        _connectedness(graph, mode.value),
        _fiedler_fact(graph, mode.value, mode.residual),
        _step_fact(largest),
        _rate_fact(mode.value, largest),
        _classes_fact(graph),
        _direction_fact(graph),
    ]
    if x is not None:
        facts += _facts_of_signal(graph, x, mode.value, largest)
    return Certificate(f"{graph!r}", tuple(facts))


def _connectedness(graph: TokenGraph, fiedler: float) -> Fact:
    if fiedler > 0 or graph.num_targets < 2:
        return Fact("connected", "holds", "every token reaches every other, directions aside")
    return Fact(
        "connected",
        "not applicable",
        "the graph falls into parts; each has a mean of its own, and theorems about one consensus "
        "hold within the parts only",
    )


def _fiedler_fact(graph: TokenGraph, value: float, residual: float) -> Fact:
    numbers = {"lambda_1": value, "residual": residual}
    band = graph.structure
    within = (
        isinstance(band, Band)
        and band.dilation == 1
        and band.before == band.after
        and 1 <= 2 * band.before < graph.num_targets
    )
    if not within:
        return Fact(
            "Fiedler value", "measured", "bounds are known for windows on a path only", numbers
        )
    assert isinstance(band, Band)
    lower, upper = path_fiedler_bounds(graph.num_targets, band.before)
    inside = lower <= value * (1 + SLACK) and value <= upper * (1 + SLACK)
    return Fact(
        "Fiedler value",
        "holds" if inside else "violated",
        "between 2 S and 4 S, S = sum_j sin^2(pi j / 2N)",
        {"2 S": lower, **numbers, "4 S": upper},
        "Stabilizing Transformer Training Through Consensus, Remark 4.2",
    )


def _step_fact(largest: float) -> Fact:
    if largest == 0:
        return Fact("step", "not applicable", "without edges every step changes nothing")
    return Fact(
        "step",
        "holds",
        "up to 1 / (2 lambda_max) no mode changes sign; up to 1 / lambda_max the energy falls",
        {
            "lambda_max": largest,
            "1 / (2 lambda_max)": 1 / (2 * largest),
            "1 / lambda_max": 1 / largest,
        },
        "Stabilizing Transformer Training Through Consensus, Section 2.2",
    )


def _rate_fact(fiedler: float, largest: float) -> Fact:
    if fiedler == 0:
        return Fact("rate", "not applicable", "a graph in parts has no rate of consensus")
    steps = steps_of_rates((fiedler, largest), 1 / (2 * largest), 1e-3)
    return Fact(
        "rate",
        "holds",
        "at the step 1 / (2 lambda_max) every step shrinks the slowest mode by "
        "omega_1 = 1 - 2 eta lambda_1",
        {"omega_1": 1 - fiedler / largest, "steps until a thousandth is left": float(steps)},
        "Stabilizing Transformer Training Through Consensus, Eq. 13",
    )


def _classes_fact(graph: TokenGraph) -> Fact:
    return Fact(
        "closed classes",
        "holds",
        "so many groups of tokens see nobody outside. Attention on these edges has the eigenvalue "
        "1 once for each (but not for tokens without an edge, whose rows are zero)",
        {"classes": float(len(closed_classes(graph)))},
        "Krause attention, multi-cluster formation",
    )


def _direction_fact(graph: TokenGraph) -> Fact:
    if graph.has_causal_part:
        return Fact(
            "energy updates",
            "not applicable",
            "on a causal graph they leak the future: an edge moves its source too. Use "
            "update='target', of which the theorems do not speak",
        )
    return Fact("energy updates", "holds", "the Laplacian above is what they descend")


def _facts_of_signal(
    graph: TokenGraph, x: Tensor, fiedler: float, largest: float
) -> tuple[Fact, ...]:
    """The filter at its largest non-oscillating step, run on a signal."""
    N = graph.num_targets
    if not isinstance(x, Tensor) or x.dim() not in (1, 2) or x.shape[0] != N:
        got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"x must be a signal of shape [{N}] or [{N}, C], got {got}")
    check_finite(x)
    if fiedler == 0:
        reason = "a graph in parts has no rate of consensus"
        return (Fact("measured rate", "not applicable", reason),)
    u = x.detach().to("cpu", torch.float64).reshape(N, -1)
    mean, eta = u.mean(0), 1 / (2 * largest)
    before = float(energy(graph, u))
    energies, distances = [before], [float((u - mean).norm())]
    for _ in range(STEPS):
        u = u - eta * energy_gradient(graph, u)
        energies.append(float(energy(graph, u)))
        distances.append(float((u - mean).norm()))
        if distances[-1] <= 1e-9 * distances[0]:
            break
    predicted = 1 - fiedler / largest
    worst = max((b / a for a, b in pairwise(distances) if a), default=0.0)
    last = distances[-1] / distances[-2] if distances[-2] else 0.0
    falls = all(b <= a * (1 + SLACK) for a, b in pairwise(energies))
    drift = float((u.mean(0) - mean).abs().max())
    return (
        Fact(
            "measured rate",
            "holds" if worst <= predicted + SLACK else "violated",
            "the distance from the mean never shrinks by less than omega_1 a step, and tends to it",
            {
                "predicted": predicted,
                "slowest step": worst,
                "last step": last,
                "steps": float(len(distances) - 1),
            },
            "Stabilizing Transformer Training Through Consensus, Eq. 13",
        ),
        Fact(
            "energy falls",
            "holds" if falls else "violated",
            "in every step",
            {"before": before, "after": energies[-1]},
            "Stabilizing Transformer Training Through Consensus, Eq. 5-7",
        ),
        Fact(
            "mean stays",
            "holds" if drift <= SLACK * (1 + float(mean.abs().max())) else "violated",
            "the limit is the mean of the signal",
            {"drift": drift},
            "Stabilizing Transformer Training Through Consensus, Eq. 12",
        ),
    )

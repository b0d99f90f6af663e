"""Certificates: theorems about a graph or a layer, compared with measurements."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from graphattn.graphs import TokenGraph
from graphattn.graphs.structures.structure import Band
from graphattn.spectral.arguments import as_edge_weight, as_square_graph, check_finite
from graphattn.spectral.bounds import path_fiedler_bounds
from graphattn.spectral.certificates.facts import PAPER, SLACK, Certificate, Fact
from graphattn.spectral.classes import closed_classes
from graphattn.spectral.eigenvalues import fiedler_pair, max_eigenvalue
from graphattn.spectral.energy import energy
from graphattn.spectral.filters import energy_gradient, steps_of_rates

if TYPE_CHECKING:
    from torch import nn

STEPS = 200  # the most steps of the filter to measure its rate


def certify(
    graph_or_layer: TokenGraph | nn.Module,
    x: Tensor | None = None,
    graph: TokenGraph | Tensor | Sequence[TokenGraph] | None = None,
    *,
    valid: Tensor | None = None,
    positions: Tensor | None = None,
    edge_features: Tensor | None = None,
    edge_weight: Tensor | None = None,
    progress: bool | None = None,
    measure: bool = False,
    **given: Any,
) -> Certificate:
    r"""Check which theorems about a graph, a layer or a model hold, and which do not apply.

    For a **graph**, the certificate says whether it is connected. It compares the Fiedler value
    with its bounds, and gives the largest step and the predicted rate of smoothing. With a signal
    `x`, the rate is also measured. With `edge_weight`, all numbers are those of the weighted
    Laplacian, for which no bounds of the Fiedler value are known.

    For a **layer**, the theorems are checked on tokens `x` with a `graph`. For
    :class:`~graphattn.nn.SelfConsensus`, the matrices R are computed once from these tokens, so one
    step is a linear map. The certificate says whether it is a low-pass filter, whether the energy
    falls, and whether constants do not change. With ``update="target"`` or ``rope=True`` (Eq. 42),
    these theorems do not apply, and the certificate says why. For
    :class:`~graphattn.nn.CrossConsensus`, with its `context`, every target takes a gradient step of
    its own while the sources are held fixed; the certificate says whether it overshoots, and
    whether the energy falls. For attention layers (also linear attention), it says whether rows are
    averages, and counts the closed classes of tokens.

    ``certificate.sound`` is True if no theorem is violated, and None if none applies.
    ``num_checked`` of ``num_facts`` says how many theorems apply.

    For a **block, an encoder or any module** with ``forward(x, graph)``, every layer in it is
    checked on the tokens that it gets when the module runs on `x`. ``parts`` has one certificate
    per layer, and the facts of the whole certificate are the worst over all layers. A **batch**
    (x [*, N, dim], or a packed graph) is handled in the same way, with one certificate per
    sequence, without padding.

    Where no theorem applies, nothing is computed, unless `measure` is True. The certificate then
    gives the norm and the spectral radius of such a step (for a module without any such layer, of
    its derivative at `x`), and the slowest mode of a step whose size is not fixed. This takes most
    of the time.

    Everything is computed in float64 on the CPU, with a copy of the layer in evaluation mode. For a
    consensus layer, no matrix N D x N D is formed. Eigenvalues are computed from products with the
    edges' matrices. If the graph is narrow (such as a window), elimination then counts the
    eigenvalues beyond the computed one, which bounds the error; this is the number "error bound".
    If that would take too long (for wide graphs and wide heads), the number "residual" is given
    instead. It proves that some eigenvalue is at most this far away. That it is the extreme
    eigenvalue is very likely then, but not proven.

    Source: Stabilizing Transformer Training Through Consensus, Sections 2-4 and Appendices A, B,
    with the errata in the documentation; Krause attention's multi-cluster theorem.

    Args:
        graph_or_layer: a TokenGraph with N tokens, a layer of ``graphattn.nn``, or a module with
            ``forward(x, graph)``.
        x: for a graph, a signal [N] or [N, C]; for a layer, tokens [*, N, dim]; for another module,
            its first argument, such as the token numbers for a
            :class:`~graphattn.models.SequenceEncoder`.
        graph: for a layer or module, its graph; it may be None if the module's ``forward`` has a
            default.
        valid: for a layer or module, bool [N] or [*, N], True where a token is real.
        positions: for a layer or module, the argument `positions` of its ``forward``.
        edge_features: the same, for layers whose networks take features of edges.
        edge_weight: for a graph, weights >= 0 in the order of ``graph.edge_index``, [E].
        progress: for a model, whether a bar on stderr counts its layers; if None, it does so if
            stderr is a terminal.
        measure: for a layer or module, whether to compute numbers that no theorem bounds.
        given: other arguments of a module's ``forward``, such as the `context` of a layer,
            the `noise_level` of an encoder or the `structure` of a protein.

    Returns:
        A :class:`Certificate`. It is shown as a table at the prompt and in a notebook, and as a
        list by ``print``. ``to_json()`` converts it.

    Raises:
        ValueError: if `x` or `graph` is missing for a layer, a module has no ``forward(x, graph)``,
            shapes do not fit, or `x` is not finite.

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

        if edge_weight is not None:
            raise ValueError(
                "edge_weight must be None for a layer or module, whose edges have matrices or "
                "weights of their own; it belongs to a graph"
            )
        arguments = x, graph, valid, positions, edge_features, given, progress, measure
        return certify_module(graph_or_layer, *arguments)
    of_layers = {"valid": valid, "positions": positions, "edge_features": edge_features, **given}
    for name, value in {"graph": graph, **of_layers}.items():
        if value is not None:
            raise ValueError(
                f"{name} must be None if the first argument is a graph, because {name} is an "
                "argument of layers"
            )
    graph = as_square_graph(graph_or_layer)
    if edge_weight is not None:
        edge_weight = as_edge_weight(edge_weight, graph.num_edges)
    return _certify_graph(graph, x, edge_weight)


def _certify_graph(graph: TokenGraph, x: Tensor | None, edge_weight: Tensor | None) -> Certificate:
    largest = max_eigenvalue(graph, edge_weight)
    mode = fiedler_pair(graph, edge_weight)
    facts = [
        _connectedness(graph, mode.value),
        _fiedler_fact(graph, mode.value, mode.residual, edge_weight),
        _step_fact(largest),
        _rate_fact(mode.value, largest),
        _classes_fact(graph, edge_weight),
        _direction_fact(graph),
    ]
    if x is not None:
        facts += _facts_of_signal(graph, x, mode.value, largest, edge_weight)
    weighted = "" if edge_weight is None else " with edge weights"
    return Certificate(f"{graph!r}{weighted}", tuple(facts))


def _connectedness(graph: TokenGraph, fiedler: float) -> Fact:
    if fiedler > 0 or graph.num_targets < 2:
        return Fact(
            "connected", "holds", "every token reaches every other, ignoring the edges' directions"
        )
    return Fact(
        "connected",
        "not applicable",
        "the graph is not connected; each of its parts has its own mean, and theorems about one "
        "consensus hold only within a part",
    )


def _fiedler_fact(
    graph: TokenGraph, value: float, residual: float, edge_weight: Tensor | None
) -> Fact:
    numbers = {"lambda_1": value, "residual": residual}
    band = graph.structure
    within = (
        edge_weight is None
        and isinstance(band, Band)
        and band.dilation == 1
        and band.before == band.after
        and 1 <= 2 * band.before < graph.num_targets
    )
    if not within:
        return Fact(
            "Fiedler value",
            "measured",
            "bounds are known for windows on a path without weights only",
            numbers,
        )
    assert isinstance(band, Band)
    lower, upper = path_fiedler_bounds(graph.num_targets, band.before)
    inside = lower <= value * (1 + SLACK) and value <= upper * (1 + SLACK)
    return Fact(
        "Fiedler value",
        "holds" if inside else "violated",
        "between 2 S and 4 S, S = sum_j sin^2(pi j / 2N)",
        {"2 S": lower, **numbers, "4 S": upper},
        f"{PAPER}, Remark 4.2",
    )


def _step_fact(largest: float) -> Fact:
    if largest == 0:
        return Fact("step", "not applicable", "without edges, no step changes anything")
    return Fact(
        "step",
        "holds",
        "up to 1 / (2 lambda_max) no mode changes sign; up to 1 / lambda_max the energy falls",
        {
            "lambda_max": largest,
            "1 / (2 lambda_max)": 1 / (2 * largest),
            "1 / lambda_max": 1 / largest,
        },
        f"{PAPER}, Section 2.2",
    )


def _rate_fact(fiedler: float, largest: float) -> Fact:
    if fiedler == 0:
        return Fact("rate", "not applicable", "a disconnected graph has no rate of consensus")
    steps = steps_of_rates((fiedler, largest), 1 / (2 * largest), 1e-3)
    return Fact(
        "rate",
        "holds",
        "with step size eta = 1 / (2 lambda_max), every step multiplies the slowest mode by "
        "omega_1 = 1 - 2 eta lambda_1",
        {"omega_1": 1 - fiedler / largest, "steps until a thousandth is left": float(steps)},
        f"{PAPER}, Eq. 13",
    )


def _classes_fact(graph: TokenGraph, edge_weight: Tensor | None) -> Fact:
    return Fact(
        "closed classes",
        "holds",
        "the number of groups of tokens that see no token outside. Attention on these edges has "
        "the eigenvalue 1 once for each (except for tokens without edges, whose rows are zero)",
        {"classes": float(len(closed_classes(graph, edge_weight)))},
        "Krause attention, multi-cluster formation",
    )


def _direction_fact(graph: TokenGraph) -> Fact:
    if graph.has_causal_part:
        return Fact(
            "energy updates",
            "not applicable",
            "on a causal graph they leak the future, because an edge also changes its source. Use "
            "update='target', for which there are no theorems",
        )
    return Fact("energy updates", "holds", "they reduce the energy of the Laplacian above")


def _facts_of_signal(
    graph: TokenGraph, x: Tensor, fiedler: float, largest: float, edge_weight: Tensor | None
) -> tuple[Fact, ...]:
    """Run the filter with its largest step without oscillation on a signal, and measure it."""
    N = graph.num_targets
    if not isinstance(x, Tensor) or x.dim() not in (1, 2) or x.shape[0] != N:
        got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"x must be a signal of shape [{N}] or [{N}, C], got {got}")
    check_finite(x)
    if fiedler == 0:
        reason = "a disconnected graph has no rate of consensus"
        return (Fact("measured rate", "not applicable", reason),)
    u = x.detach().to("cpu", torch.float64).reshape(N, -1)
    mean, eta = u.mean(0), 1 / (2 * largest)
    weight = None if edge_weight is None else edge_weight.detach().to("cpu", torch.float64)
    graph = graph.to("cpu")
    before = float(energy(graph, u, weight))
    energies, distances = [before], [float((u - mean).norm())]
    for _ in range(STEPS):
        u = u - eta * energy_gradient(graph, u, weight)
        energies.append(float(energy(graph, u, weight)))
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
            "every step multiplies the distance from the mean by at most omega_1, and in the end "
            "by omega_1",
            {
                "predicted": predicted,
                "slowest step": worst,
                "last step": last,
                "steps": float(len(distances) - 1),
            },
            f"{PAPER}, Eq. 13",
        ),
        Fact(
            "energy falls",
            "holds" if falls else "violated",
            "in every step",
            {"before": before, "after": energies[-1]},
            f"{PAPER}, Eq. 5-7",
        ),
        Fact(
            "mean stays",
            "holds" if drift <= SLACK * (1 + float(mean.abs().max())) else "violated",
            "the limit is the mean of the signal",
            {"drift": drift},
            f"{PAPER}, Eq. 12",
        ),
    )

"""What theory says of a graph or a layer, beside what is measured on it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from graphattn.graphs import TokenGraph
from graphattn.graphs.structure import Band
from graphattn.spectral.arguments import as_square_graph, check_finite
from graphattn.spectral.bounds import path_fiedler_bounds
from graphattn.spectral.classes import closed_classes
from graphattn.spectral.eigenvalues import fiedler_pair, max_eigenvalue
from graphattn.spectral.energy import energy
from graphattn.spectral.filters import energy_gradient, steps_until_consensus

if TYPE_CHECKING:
    from torch import nn

Status = Literal["holds", "violated", "not applicable", "measured"]

SLACK = 1e-7  # relative, for what is an equality in exact arithmetic
STEPS = 200  # of the filter, at most, to measure its rate


@dataclass(frozen=True)
class Fact:
    """One statement about a graph or a layer.

    Example:
        >>> import graphattn as ga
        >>> fact = ga.spectral.certify(ga.complete_graph(5))["step"]
        >>> fact.status, round(fact.numbers["lambda_max"], 9)
        ('holds', 5.0)
    """

    name: str
    status: Status
    statement: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    source: str = ""  # paper and equation


@dataclass(frozen=True)
class Certificate:
    """Facts about one subject; prints as a list, one fact after another.

    A fact "holds" or is "violated" where a theorem speaks of the subject and can be checked; it is
    "not applicable" where the theorem's conditions fail, and says which; "measured" where no
    theorem speaks, or none is needed.

    Example:
        >>> import graphattn as ga
        >>> certificate = ga.spectral.certify(ga.causal_graph(6))
        >>> certificate.sound, [fact.name for fact in certificate.facts][:3]
        (True, ['connected', 'Fiedler value', 'step'])
        >>> certificate["energy updates"].status
        'not applicable'
    """

    subject: str
    facts: tuple[Fact, ...]

    @property
    def sound(self) -> bool:
        """Whether nothing is violated."""
        return all(fact.status != "violated" for fact in self.facts)

    def __getitem__(self, name: str) -> Fact:
        for fact in self.facts:
            if fact.name == name:
                return fact
        raise KeyError(f"no fact {name!r}; there are {[fact.name for fact in self.facts]}")

    def __str__(self) -> str:
        lines = [self.subject]
        for fact in self.facts:
            lines.append(f"  [{fact.status}] {fact.name}: {fact.statement}")
            numbers = ", ".join(f"{name} {value:.6g}" for name, value in fact.numbers.items())
            lines += [f"      {text}" for text in (numbers, fact.source) if text]
        return "\n".join(lines)

    def to_json(self) -> str:
        """The same as JSON; numbers that JSON does not have (infinity, NaN) become strings."""

        def plain(value: float) -> float | str:
            return value if math.isfinite(value) else str(value)

        facts = [
            {**asdict(fact), "numbers": {name: plain(v) for name, v in fact.numbers.items()}}
            for fact in self.facts
        ]
        return json.dumps({"subject": self.subject, "sound": self.sound, "facts": facts}, indent=2)


def certify(
    graph_or_layer: TokenGraph | nn.Module,
    x: Tensor | None = None,
    *,
    graph: TokenGraph | None = None,
) -> Certificate:
    r"""Every theorem that speaks of a graph or a layer, checked on it, and which do not and why.

    Of a graph: whether it hangs together, its Fiedler value beside closed form and bounds, the
    largest step, the predicted rate of smoothing. With a signal `x`, that rate is measured on it.

    Of a layer, on tokens `x` over `graph`. For :class:`~graphattn.nn.SelfConsensus`, R is held at
    what these tokens give, and one step is a linear map: is it a low-pass filter, does the energy
    fall, do constants stay? With ``update="target"`` or ``rope=True`` (Eq. 42) the theorems do not
    apply; the certificate says so and gives the measured norm. For attention layers: are rows
    averages, and how many closed classes of tokens are there?

    Everything is computed in float64 on the CPU; a layer is copied, and left as it is.

    Source: Stabilizing Transformer Training Through Consensus, Sections 2-4 and Appendices A, B,
    with the errata of the documentation; Krause attention's multi-cluster theorem.

    Args:
        graph_or_layer: a TokenGraph with N tokens, or one of the layers of ``graphattn.nn``.
        x: for a graph, a signal [N] or [N, C]; for a layer, tokens [N, dim].
        graph: for a layer, the graph over which it runs.

    Returns:
        A :class:`Certificate`; print it, or take its ``to_json()``.

    Raises:
        ValueError: if a layer comes without `x` or `graph`, shapes disagree, or `x` is not finite.

    Example:
        >>> import graphattn as ga
        >>> certificate = ga.spectral.certify(ga.window_path_graph(100, window=2))
        >>> certificate.sound
        True
        >>> print(certificate["Fiedler value"].status)
        holds
    """
    if isinstance(graph_or_layer, torch.nn.Module):
        from graphattn.spectral.layer_certificates import certify_layer  # it needs PyG

        return certify_layer(graph_or_layer, x, graph)
    if graph is not None:
        raise ValueError("graph is for layers; pass the graph itself as the first argument")
    return _certify_graph(as_square_graph(graph_or_layer), x)


def _certify_graph(graph: TokenGraph, x: Tensor | None) -> Certificate:
    largest = max_eigenvalue(graph)
    mode = fiedler_pair(graph)
    facts = [
        _connectedness(graph, mode.value),
        _fiedler_fact(graph, mode.value, mode.residual),
        _step_fact(largest),
        _rate_fact(graph, mode.value, largest),
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


def _rate_fact(graph: TokenGraph, fiedler: float, largest: float) -> Fact:
    if fiedler == 0:
        return Fact("rate", "not applicable", "a graph in parts has no rate of consensus")
    steps = steps_until_consensus(graph, 1 / (2 * largest), tolerance=1e-3)
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

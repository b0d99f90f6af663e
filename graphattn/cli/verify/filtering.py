"""Sections 2.1 to 2.3: consensus steps are a low-pass filter up to a limit of the step size."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import graphattn as ga
from graphattn.cli.verify.claims import Size, claim
from graphattn.cli.verify.graphs import generator, random_digraph, star
from graphattn.plain_tables import counted

Array = NDArray[np.float64]
NEAR = 1e-6  # "just below" and "just above" a limit
SIGNALS = 8  # random signals per graph


def gradient_step(graph: ga.TokenGraph, u: Tensor, eta: float, weight: Tensor | None) -> Tensor:
    """Compute u - eta grad E(u) (Eq. 7) by autograd, so the Laplacian is not used."""
    u = u.detach().requires_grad_()
    (slope,) = torch.autograd.grad(ga.spectral.energy(graph, u, weight), u)
    return (u - eta * slope).detach()


def filter_matrix(graph: ga.TokenGraph, eta: float, weight: Tensor | None) -> Array:
    """Compute the matrix H of a step; its columns are the results of the unit vectors."""
    unit = torch.eye(graph.num_tokens, dtype=torch.float64)
    return gradient_step(graph, unit, eta, weight).numpy()


@dataclass(frozen=True)
class WeightedGraph:
    """A graph with weights [E] or None, and random signals."""

    name: str
    graph: ga.TokenGraph
    weight: Tensor | None = None
    seed: int = 0

    @property
    def signals(self) -> Tensor:
        shape = self.graph.num_tokens, SIGNALS
        return torch.randn(shape, dtype=torch.float64, generator=generator(self.seed))

    @property
    def laplacian(self) -> Array:
        return ga.spectral.laplacian(self.graph, self.weight).toarray()

    @property
    def modes(self) -> tuple[Array, Tensor]:
        """Eigenvalues of the Laplacian in ascending order, and eigenvectors as columns."""
        values, vectors = np.linalg.eigh(self.laplacian)
        return values, torch.from_numpy(vectors)

    @property
    def eta(self) -> float:
        """The largest step size with which no mode changes its sign."""
        return ga.spectral.max_step_size(self.graph, self.weight)

    @property
    def omega(self) -> float:
        """The factor of the slowest mode in a step of that size."""
        return 1 - 2 * self.eta * ga.spectral.fiedler_value(self.graph, self.weight)

    @property
    def filter(self) -> Array:
        return filter_matrix(self.graph, self.eta, self.weight)

    def step(self, u: Tensor, share: float) -> Tensor:
        """Take a gradient step from u; its size is a share of `eta`."""
        return gradient_step(self.graph, u, share * self.eta, self.weight)

    def energies(self, u: Tensor) -> Tensor:
        return torch.stack([ga.spectral.energy(self.graph, c, self.weight) for c in u.T])

    def steps_until_consensus(self, tolerance: float) -> int:
        return int(
            ga.spectral.steps_until_consensus(
                self.graph, self.eta, tolerance=tolerance, edge_weight=self.weight
            )
        )


def weighted_graphs(size: Size) -> Iterator[WeightedGraph]:
    families = {
        "path 24, w 2": ga.window_path_graph(24, 2),
        "cycle 21, w 3": ga.window_cycle_graph(21, 3),
        "complete 12": ga.complete_graph(12),
        "causal window 20, w 4": ga.causal_window_graph(20, 4),
        "star 9": star(8),
        "grid 5 x 5": ga.grid_window_graph(5, 5, 1),
        "Longformer 20": ga.longformer_graph(20, 2, [0]),
        "BigBird 20": ga.bigbird_graph(20, 1, 2, [0], seed=0),
    }
    for n, (name, graph) in enumerate(families.items()):
        yield WeightedGraph(name, graph, seed=n)
    for seed in range(size.draws):
        yield WeightedGraph(f"digraph {seed}", *random_digraph(seed), seed=len(families) + seed)


@claim("E(u) = uᵀ L u", "Eq. 5, corrected", weighted_graphs, "equation")
def energy_is_quadratic_form(case: WeightedGraph) -> tuple[float, float]:
    """The energy is the quadratic form of the Laplacian of the symmetrised weights."""
    u, expected = case.signals, case.energies(case.signals)
    error = ((u * (torch.from_numpy(case.laplacian) @ u)).sum(0) - expected).abs() / expected
    return -float(error.max()), 1e-11


@claim("gradient step = I - 2 η L", "Eq. 6, 7", weighted_graphs, "equation")
def step_is_filter(case: WeightedGraph) -> tuple[float, float]:
    """One gradient step on the energy is the filter I - 2 η L."""
    expected = np.eye(case.graph.num_tokens) - 2 * case.eta * case.laplacian
    return -float(np.abs(case.filter - expected).max()), 1e-12


@claim("L has no negative eigenvalue", "Section 2.2, corrected", weighted_graphs)
def laplacian_is_semidefinite(case: WeightedGraph) -> tuple[float, float]:
    """The Laplacian of the symmetrised weights is positive semidefinite."""
    values, _ = case.modes
    return float(values[0] / values[-1]), 1e-13


@claim("below 1 / (2 λ_max): signs stay", "Section 2.2", weighted_graphs)
def modes_keep_their_sign(case: WeightedGraph) -> tuple[float, float]:
    """No mode changes its sign with a step just below 1 / (2 λ_max)."""
    _, v = case.modes
    return float((v * case.step(v, 1 - NEAR)).sum(0).min()), 1e-12


@claim("above it: the top mode flips", "Section 2.2", weighted_graphs)
def top_mode_flips(case: WeightedGraph) -> tuple[float, float]:
    """The top mode changes its sign with a step just above 1 / (2 λ_max)."""
    _, v = case.modes
    return -float((v * case.step(v, 1 + NEAR)).sum(0)[-1]), 0.0


@claim("below 1 / λ_max: energy falls", "Section 2.2", weighted_graphs)
def energy_falls(case: WeightedGraph) -> tuple[float, float]:
    """The energy of every signal falls with a step just below 1 / λ_max."""
    u = torch.cat([case.signals, case.modes[1][:, -1:]], dim=1)
    before, after = case.energies(u), case.energies(case.step(u, 2 * (1 - NEAR)))
    return float(((before - after) / before).min()), 0.0


@claim("above it: energy can rise", "Section 2.2", weighted_graphs)
def energy_rises_beyond(case: WeightedGraph) -> tuple[float, float]:
    """The energy of the top mode rises with a step just above 1 / λ_max."""
    top = case.modes[1][:, -1:]
    before, after = case.energies(top), case.energies(case.step(top, 2 * (1 + NEAR)))
    return float((after - before) / before), 0.0


def graphs_that_mix_slowly(size: Size) -> Iterator[WeightedGraph]:
    """Yield the graphs on which a deviation from the mean outlasts a few steps."""
    return (case for case in weighted_graphs(size) if case.omega >= 0.05)


@claim(
    "measured rate of convergence = ω₁",
    "Section 2.3, Eq. 13",
    graphs_that_mix_slowly,
    "equation",
)
def convergence_rate(case: WeightedGraph) -> tuple[float, float]:
    """Deviations from the mean shrink by ω₁ = 1 - 2 η λ₁ per step; exponents agree within 1 %."""
    # The logarithms are compared, because all values of ω₁ near 1 would agree with each other.
    expected = math.log(case.omega)
    steps = max(4, math.ceil(math.log(1e-4) / expected))
    many = np.linalg.matrix_power(case.filter, steps)
    u = case.signals.numpy()
    for _ in range(40):  # the slowest mode remains; the last round is measured
        u = u - u.mean(0)
        u = u / np.linalg.norm(u)  # the step is linear, and a norm of 1 avoids rounding to 0
        u = many @ u
    measured = math.log(np.linalg.norm(u - u.mean(0))) / steps
    return -abs(measured / expected - 1), 0.01


@claim("smoothing rate = ω₁ of the filter", "Eq. 10", weighted_graphs, "equation")
def smoothing_rate_is_omega(case: WeightedGraph) -> tuple[float, float]:
    """The largest eigenvalue of the filter on what is no constant is the smoothing rate."""
    factors = np.sort(np.linalg.eigvalsh(case.filter))
    rate = ga.spectral.smoothing_rate(case.graph, case.eta, case.weight)
    return -abs(rate - factors[-2]), 1e-11


class Iterated(NamedTuple):
    """A number of steps on a graph."""

    case: WeightedGraph
    steps: int

    @property
    def name(self) -> str:
        return f"{self.case.name}, {counted(self.steps, 'step')}"


def graphs_and_steps(size: Size) -> Iterator[Iterated]:
    return (Iterated(case, n) for case in weighted_graphs(size) for n in (1, 10, 100))


@claim("‖Hⁿ u - mean‖ ≤ ω₁ⁿ ‖u‖", "Eq. 13", graphs_and_steps)
def deviation_is_bounded(iterated: Iterated) -> tuple[float, float]:
    """After n steps the deviation from the mean is at most ω₁ⁿ of the signal."""
    case, steps = iterated
    u = case.signals.numpy()
    deviation = np.linalg.matrix_power(case.filter, steps) @ u - u.mean(0)
    left, first = (np.linalg.norm(signal, axis=0) for signal in (deviation, u))
    return float((case.omega**steps - left / first).min()), 1e-12


@claim("the limit is the mean", "Eq. 12, corrected", weighted_graphs, "equation")
def limit_is_mean(case: WeightedGraph) -> tuple[float, float]:
    """Steps without end lead to (1/N) 1 1ᵀ u, the mean."""
    # So many steps that only rounding errors remain.
    steps, u = case.steps_until_consensus(1e-14), case.signals.numpy()
    moved = np.linalg.matrix_power(case.filter, steps) @ u
    return -float(np.abs(moved - u.mean(0)).max()), 1e-10


@claim("steps to consensus: enough, none idle", "Eq. 13", weighted_graphs)
def steps_are_enough(case: WeightedGraph) -> tuple[float, float]:
    """The promised number of steps brings the slowest mode below 1e-3, one step fewer does not."""
    tolerance = 1e-3
    steps, slowest = case.steps_until_consensus(tolerance), case.modes[1][:, 1].numpy()
    left, before = (
        float(np.linalg.norm(np.linalg.matrix_power(case.filter, n) @ slowest))
        for n in (steps, max(steps - 1, 0))
    )
    early = before - tolerance if steps > 0 else math.inf
    return min(tolerance - left, early) / tolerance, 1e-9

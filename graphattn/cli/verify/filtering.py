"""Sections 2.1 to 2.3: consensus steps are a low-pass filter, and where it stops being one."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import graphattn as ga
from graphattn.cli.verify.claims import Claim, ClaimCase, Size
from graphattn.cli.verify.graphs import generator, weighted_graphs
from graphattn.plain_tables import counted

Array = NDArray[np.float64]
NEAR = 1e-6  # "just below" and "just above" a limit
SIGNALS = 8  # random ones per graph


def gradient_step(graph: ga.TokenGraph, u: Tensor, eta: float, weight: Tensor | None) -> Tensor:
    """u - eta grad E(u) (Eq. 7), the gradient by autograd: no Laplacian is involved."""
    u = u.detach().requires_grad_()
    (slope,) = torch.autograd.grad(ga.spectral.energy(graph, u, weight), u)
    return (u - eta * slope).detach()


def filter_matrix(graph: ga.TokenGraph, eta: float, weight: Tensor | None) -> Array:
    """H, column by column: what a step makes of the unit vectors."""
    unit = torch.eye(graph.num_tokens, dtype=torch.float64)
    return gradient_step(graph, unit, eta, weight).numpy()


def modes(graph: ga.TokenGraph, weight: Tensor | None) -> tuple[Array, Tensor]:
    """Eigenvalues of the Laplacian, ascending, and its eigenvectors as columns."""
    values, vectors = np.linalg.eigh(ga.spectral.laplacian(graph, weight).toarray())
    return values, torch.from_numpy(vectors)


def energies(graph: ga.TokenGraph, u: Tensor, weight: Tensor | None) -> Tensor:
    """The energy of every column."""
    return torch.stack([ga.spectral.energy(graph, column, weight) for column in u.T])


def signals(num_tokens: int, seed: int) -> Tensor:
    """Random ones, [N, SIGNALS]."""
    return torch.randn(num_tokens, SIGNALS, dtype=torch.float64, generator=generator(seed))


def energy_is_quadratic_form(size: Size) -> Iterator[ClaimCase]:
    """E(u) = u^T L u with the Laplacian of the symmetrised weights, on digraphs too."""
    for n, (name, graph, weight) in enumerate(weighted_graphs(size.draws)):
        L = torch.from_numpy(ga.spectral.laplacian(graph, weight).toarray())
        u = signals(graph.num_tokens, n)
        expected = energies(graph, u, weight)
        error = ((u * (L @ u)).sum(0) - expected).abs() / expected
        yield ClaimCase(name, -float(error.max()), 1e-11)


def step_is_filter(size: Size) -> Iterator[ClaimCase]:
    """The gradient step is the matrix I - 2 eta L (Eq. 6, 7)."""
    for name, graph, weight in weighted_graphs(size.draws):
        eta = ga.spectral.max_step_size(graph, weight)
        L = ga.spectral.laplacian(graph, weight).toarray()
        H = filter_matrix(graph, eta, weight)
        yield ClaimCase(name, -float(np.abs(H - (np.eye(len(L)) - 2 * eta * L)).max()), 1e-12)


def laplacian_is_semidefinite(size: Size) -> Iterator[ClaimCase]:
    """No eigenvalue below 0, relative to the largest."""
    for name, graph, weight in weighted_graphs(size.draws):
        values, _ = modes(graph, weight)
        yield ClaimCase(name, float(values[0] / values[-1]), 1e-13)


def modes_keep_their_sign(size: Size) -> Iterator[ClaimCase]:
    """Check signs just below 1 / (2 lambda_max): what is left of every mode is >= 0."""
    for name, graph, weight in weighted_graphs(size.draws):
        _, v = modes(graph, weight)
        eta = (1 - NEAR) * ga.spectral.max_step_size(graph, weight)
        left = (v * gradient_step(graph, v, eta, weight)).sum(0)
        yield ClaimCase(name, float(left.min()), 1e-12)


def top_mode_flips(size: Size) -> Iterator[ClaimCase]:
    """Check the top mode just above 1 / (2 lambda_max): the top mode changes sign, so the limit
    cannot be raised.
    """
    for name, graph, weight in weighted_graphs(size.draws):
        _, v = modes(graph, weight)
        eta = (1 + NEAR) * ga.spectral.max_step_size(graph, weight)
        left = (v * gradient_step(graph, v, eta, weight)).sum(0)
        yield ClaimCase(name, -float(left[-1]))


def energy_falls(size: Size) -> Iterator[ClaimCase]:
    """Check the energy just below 1 / lambda_max, twice that limit: the energy of every signal
    still falls.
    """
    for n, (name, graph, weight) in enumerate(weighted_graphs(size.draws)):
        _, v = modes(graph, weight)
        u = torch.cat([signals(graph.num_tokens, n), v[:, -1:]], dim=1)
        eta = (1 - NEAR) * 2 * ga.spectral.max_step_size(graph, weight)
        before = energies(graph, u, weight)
        after = energies(graph, gradient_step(graph, u, eta, weight), weight)
        yield ClaimCase(name, float(((before - after) / before).min()))


def energy_rises_beyond(size: Size) -> Iterator[ClaimCase]:
    """Check the energy just above 1 / lambda_max: the energy of the top mode rises."""
    for name, graph, weight in weighted_graphs(size.draws):
        _, v = modes(graph, weight)
        eta = (1 + NEAR) * 2 * ga.spectral.max_step_size(graph, weight)
        before = energies(graph, v[:, -1:], weight)
        after = energies(graph, gradient_step(graph, v[:, -1:], eta, weight), weight)
        yield ClaimCase(name, float(((after - before) / before)[0]))


def convergence_rate(size: Size) -> Iterator[ClaimCase]:
    """Steps are counted and deviations measured: their logarithm falls by log(omega_1) a step.

    Comparing omega_1 itself would be too easy where it is near 1.
    """
    for n, (name, graph, weight) in enumerate(weighted_graphs(size.draws)):
        eta = ga.spectral.max_step_size(graph, weight)
        omega = 1 - 2 * eta * ga.spectral.fiedler_value(graph, weight)
        if omega < 0.05:  # gone after some steps: nothing to measure
            continue
        steps = max(4, math.ceil(math.log(1e-4) / math.log(omega)))
        many = np.linalg.matrix_power(filter_matrix(graph, eta, weight), steps)
        u = signals(graph.num_tokens, n).numpy()
        for _ in range(40):  # until the slowest mode is alone, and once more
            u = u - u.mean(0)
            u = u / np.linalg.norm(u)  # all is linear: this keeps it away from rounding
            u = many @ u
        measured = math.log(np.linalg.norm(u - u.mean(0))) / steps
        yield ClaimCase(name, -abs(measured / math.log(omega) - 1), 0.01)


def smoothing_rate_is_omega(size: Size) -> Iterator[ClaimCase]:
    """Check that the smoothing rate is the largest factor but that of constants."""
    for name, graph, weight in weighted_graphs(size.draws):
        eta = ga.spectral.max_step_size(graph, weight)
        factors = np.sort(np.linalg.eigvalsh(filter_matrix(graph, eta, weight)))
        found = ga.spectral.smoothing_rate(graph, eta, weight)
        yield ClaimCase(name, -abs(found - factors[-2]), 1e-11)


def deviation_is_bounded(size: Size) -> Iterator[ClaimCase]:
    """||H^n u - mean|| <= omega_1^n ||u|| for n = 1, 10, 100 (Eq. 13)."""
    for n, (name, graph, weight) in enumerate(weighted_graphs(size.draws)):
        eta = ga.spectral.max_step_size(graph, weight)
        omega = 1 - 2 * eta * ga.spectral.fiedler_value(graph, weight)
        H = filter_matrix(graph, eta, weight)
        u = signals(graph.num_tokens, n).numpy()
        for steps in (1, 10, 100):
            moved = np.linalg.matrix_power(H, steps) @ u - u.mean(0)
            bound = omega**steps * np.linalg.norm(u, axis=0)
            room = (bound - np.linalg.norm(moved, axis=0)) / np.linalg.norm(u, axis=0)
            yield ClaimCase(f"{name}, {counted(steps, 'step')}", float(room.min()), 1e-12)


def limit_is_mean(size: Size) -> Iterator[ClaimCase]:
    """After as many steps as it takes for rounding to be all that is left."""
    for n, (name, graph, weight) in enumerate(weighted_graphs(size.draws)):
        eta = ga.spectral.max_step_size(graph, weight)
        steps = ga.spectral.steps_until_consensus(graph, eta, tolerance=1e-14, edge_weight=weight)
        u = signals(graph.num_tokens, n).numpy()
        moved = np.linalg.matrix_power(filter_matrix(graph, eta, weight), int(steps)) @ u
        yield ClaimCase(name, -float(np.abs(moved - u.mean(0)).max()), 1e-10)


def steps_are_enough(size: Size) -> Iterator[ClaimCase]:
    """After the promised number of steps the slowest mode is below the tolerance, not before."""
    tolerance = 1e-3
    for name, graph, weight in weighted_graphs(size.draws):
        eta = ga.spectral.max_step_size(graph, weight)
        steps = ga.spectral.steps_until_consensus(
            graph, eta, tolerance=tolerance, edge_weight=weight
        )
        slowest = modes(graph, weight)[1][:, 1].numpy()
        H = filter_matrix(graph, eta, weight)
        left, before = (
            np.linalg.norm(np.linalg.matrix_power(H, max(n, 0)) @ slowest)
            for n in (int(steps), int(steps) - 1)
        )
        early = float(before - tolerance) if steps > 0 else math.inf
        yield ClaimCase(name, min(float(tolerance - left), early) / tolerance, 1e-9)


CLAIMS = [
    Claim(
        "E(u) = uᵀ L u",
        "Eq. 5, corrected",
        "The energy is the quadratic form of the Laplacian of the symmetrised weights.",
        energy_is_quadratic_form,
        "equation",
    ),
    Claim(
        "gradient step = I - 2 η L",
        "Eq. 6, 7",
        "One gradient step on the energy is the filter I - 2 η L.",
        step_is_filter,
        "equation",
    ),
    Claim(
        "L has no negative eigenvalue",
        "Section 2.2, corrected",
        "The Laplacian of the symmetrised weights is positive semidefinite.",
        laplacian_is_semidefinite,
    ),
    Claim(
        "below 1 / (2 λ_max): signs stay",
        "Section 2.2",
        "With a step just below 1 / (2 λ_max) no mode changes its sign.",
        modes_keep_their_sign,
    ),
    Claim(
        "above it: the top mode flips",
        "Section 2.2",
        "With a step just above 1 / (2 λ_max) the top mode changes its sign.",
        top_mode_flips,
    ),
    Claim(
        "below 1 / λ_max: energy falls",
        "Section 2.2",
        "With a step just below 1 / λ_max the energy of every signal falls.",
        energy_falls,
    ),
    Claim(
        "above it: energy can rise",
        "Section 2.2",
        "With a step just above 1 / λ_max the energy of the top mode rises.",
        energy_rises_beyond,
    ),
    Claim(
        "measured rate of convergence = ω₁",
        "Section 2.3, Eq. 13",
        "Deviations from the mean shrink by ω₁ = 1 - 2 η λ₁ per step; exponents agree within 1 %.",
        convergence_rate,
        "equation",
    ),
    Claim(
        "smoothing rate = ω₁ of the filter",
        "Eq. 10",
        "The largest eigenvalue of the filter on what is no constant is the smoothing rate.",
        smoothing_rate_is_omega,
        "equation",
    ),
    Claim(
        "‖Hⁿ u - mean‖ ≤ ω₁ⁿ ‖u‖",
        "Eq. 13",
        "After n steps the deviation from the mean is at most ω₁ⁿ of the signal.",
        deviation_is_bounded,
    ),
    Claim(
        "the limit is the mean",
        "Eq. 12, corrected",
        "Steps without end lead to (1/N) 1 1ᵀ u, the mean.",
        limit_is_mean,
        "equation",
    ),
    Claim(
        "steps to consensus: enough, none idle",
        "Eq. 13",
        "The promised number of steps brings the slowest mode below 1e-3, one step fewer does not.",
        steps_are_enough,
    ),
]

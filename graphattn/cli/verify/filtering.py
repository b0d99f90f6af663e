"""Sections 2.1 to 2.3: consensus steps are a low-pass filter up to a limit of the step size."""

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
SIGNALS = 8  # random signals per graph


def gradient_step(graph: ga.TokenGraph, u: Tensor, eta: float, weight: Tensor | None) -> Tensor:
    """Compute u - eta grad E(u) (Eq. 7).

    The gradient comes from autograd, so the Laplacian is not used.
    """
    u = u.detach().requires_grad_()
    (slope,) = torch.autograd.grad(ga.spectral.energy(graph, u, weight), u)
    return (u - eta * slope).detach()


def filter_matrix(graph: ga.TokenGraph, eta: float, weight: Tensor | None) -> Array:
    """Compute the matrix H of a step; its columns are the results of the unit vectors."""
    unit = torch.eye(graph.num_tokens, dtype=torch.float64)
    return gradient_step(graph, unit, eta, weight).numpy()


def modes(graph: ga.TokenGraph, weight: Tensor | None) -> tuple[Array, Tensor]:
    """Compute the eigenvalues of the Laplacian in ascending order, and eigenvectors as columns."""
    values, vectors = np.linalg.eigh(ga.spectral.laplacian(graph, weight).toarray())
    return values, torch.from_numpy(vectors)


def energies(graph: ga.TokenGraph, u: Tensor, weight: Tensor | None) -> Tensor:
    """Compute the energy of every column of u."""
    return torch.stack([ga.spectral.energy(graph, column, weight) for column in u.T])


def signals(num_tokens: int, seed: int) -> Tensor:
    """Draw random signals, [N, SIGNALS]."""
    return torch.randn(num_tokens, SIGNALS, dtype=torch.float64, generator=generator(seed))


def energy_is_quadratic_form(size: Size) -> Iterator[ClaimCase]:
    """Check E(u) = u^T L u with the Laplacian of the symmetrised weights, on digraphs too."""
    for n, (name, graph, weight) in enumerate(weighted_graphs(size.draws)):
        L = torch.from_numpy(ga.spectral.laplacian(graph, weight).toarray())
        u = signals(graph.num_tokens, n)
        expected = energies(graph, u, weight)
        error = ((u * (L @ u)).sum(0) - expected).abs() / expected
        yield ClaimCase(name, -float(error.max()), 1e-11)


def step_is_filter(size: Size) -> Iterator[ClaimCase]:
    """Check that the gradient step is the matrix I - 2 eta L (Eq. 6, 7)."""
    for name, graph, weight in weighted_graphs(size.draws):
        eta = ga.spectral.max_step_size(graph, weight)
        L = ga.spectral.laplacian(graph, weight).toarray()
        H = filter_matrix(graph, eta, weight)
        yield ClaimCase(name, -float(np.abs(H - (np.eye(len(L)) - 2 * eta * L)).max()), 1e-12)


def laplacian_is_semidefinite(size: Size) -> Iterator[ClaimCase]:
    """Check that no eigenvalue is below 0, relative to the largest one."""
    for name, graph, weight in weighted_graphs(size.draws):
        values, _ = modes(graph, weight)
        yield ClaimCase(name, float(values[0] / values[-1]), 1e-13)


def modes_keep_their_sign(size: Size) -> Iterator[ClaimCase]:
    """Check that no mode changes its sign in a step.

    The step size is just below 1 / (2 lambda_max). The factor of every mode is then >= 0.
    """
    for name, graph, weight in weighted_graphs(size.draws):
        _, v = modes(graph, weight)
        eta = (1 - NEAR) * ga.spectral.max_step_size(graph, weight)
        left = (v * gradient_step(graph, v, eta, weight)).sum(0)
        yield ClaimCase(name, float(left.min()), 1e-12)


def top_mode_flips(size: Size) -> Iterator[ClaimCase]:
    """Check that the top mode changes its sign with a step size just above 1 / (2 lambda_max).

    This limit of the step size is therefore the largest possible one.
    """
    for name, graph, weight in weighted_graphs(size.draws):
        _, v = modes(graph, weight)
        eta = (1 + NEAR) * ga.spectral.max_step_size(graph, weight)
        left = (v * gradient_step(graph, v, eta, weight)).sum(0)
        yield ClaimCase(name, -float(left[-1]))


def energy_falls(size: Size) -> Iterator[ClaimCase]:
    """Check that the energy of every signal falls in a step.

    The step size is just below 1 / lambda_max, which is twice the limit of `modes_keep_their_sign`.
    """
    for n, (name, graph, weight) in enumerate(weighted_graphs(size.draws)):
        _, v = modes(graph, weight)
        u = torch.cat([signals(graph.num_tokens, n), v[:, -1:]], dim=1)
        eta = (1 - NEAR) * 2 * ga.spectral.max_step_size(graph, weight)
        before = energies(graph, u, weight)
        after = energies(graph, gradient_step(graph, u, eta, weight), weight)
        yield ClaimCase(name, float(((before - after) / before).min()))


def energy_rises_beyond(size: Size) -> Iterator[ClaimCase]:
    """Check that the energy of the top mode rises with a step size just above 1 / lambda_max."""
    for name, graph, weight in weighted_graphs(size.draws):
        _, v = modes(graph, weight)
        eta = (1 + NEAR) * 2 * ga.spectral.max_step_size(graph, weight)
        before = energies(graph, v[:, -1:], weight)
        after = energies(graph, gradient_step(graph, v[:, -1:], eta, weight), weight)
        yield ClaimCase(name, float(((after - before) / before)[0]))


def convergence_rate(size: Size) -> Iterator[ClaimCase]:
    """Check that the logarithm of the deviation falls by log(omega_1) per step.

    The deviation from the mean is measured after a number of steps. The claim compares logarithms,
    because all values of omega_1 near 1 would agree with each other.
    """
    for n, (name, graph, weight) in enumerate(weighted_graphs(size.draws)):
        eta = ga.spectral.max_step_size(graph, weight)
        omega = 1 - 2 * eta * ga.spectral.fiedler_value(graph, weight)
        if omega < 0.05:  # the deviation vanishes after a few steps
            continue
        steps = max(4, math.ceil(math.log(1e-4) / math.log(omega)))
        many = np.linalg.matrix_power(filter_matrix(graph, eta, weight), steps)
        u = signals(graph.num_tokens, n).numpy()
        for _ in range(40):  # the slowest mode remains; the last round is measured
            u = u - u.mean(0)
            u = u / np.linalg.norm(u)  # the step is linear, and a norm of 1 avoids rounding to 0
            u = many @ u
        measured = math.log(np.linalg.norm(u - u.mean(0))) / steps
        yield ClaimCase(name, -abs(measured / math.log(omega) - 1), 0.01)


def smoothing_rate_is_omega(size: Size) -> Iterator[ClaimCase]:
    """Check that the smoothing rate is the largest factor of a mode that is not constant."""
    for name, graph, weight in weighted_graphs(size.draws):
        eta = ga.spectral.max_step_size(graph, weight)
        factors = np.sort(np.linalg.eigvalsh(filter_matrix(graph, eta, weight)))
        found = ga.spectral.smoothing_rate(graph, eta, weight)
        yield ClaimCase(name, -abs(found - factors[-2]), 1e-11)


def deviation_is_bounded(size: Size) -> Iterator[ClaimCase]:
    """Check ||H^n u - mean|| <= omega_1^n ||u|| for n = 1, 10, 100 (Eq. 13)."""
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
    """Check that the limit of many steps is the mean.

    The number of steps is so large that only rounding errors remain.
    """
    for n, (name, graph, weight) in enumerate(weighted_graphs(size.draws)):
        eta = ga.spectral.max_step_size(graph, weight)
        steps = ga.spectral.steps_until_consensus(graph, eta, tolerance=1e-14, edge_weight=weight)
        u = signals(graph.num_tokens, n).numpy()
        moved = np.linalg.matrix_power(filter_matrix(graph, eta, weight), int(steps)) @ u
        yield ClaimCase(name, -float(np.abs(moved - u.mean(0)).max()), 1e-10)


def steps_are_enough(size: Size) -> Iterator[ClaimCase]:
    """Check that `steps_until_consensus` returns the smallest sufficient number of steps.

    The slowest mode is below the tolerance after this number of steps, but not one step earlier.
    """
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

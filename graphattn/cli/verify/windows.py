"""Remarks 4.1 and 4.2: the Fiedler values of cycles and paths with windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

import graphattn as ga
from graphattn.cli.verify.claims import Claim, ClaimCase, Size

Array = NDArray[np.float64]
EPS = float(np.finfo(np.float64).eps)


def cycle_closed_form(size: Size) -> Iterator[ClaimCase]:
    """Compare 4 sum sin^2(pi j / N) with the spectrum of the Laplacian, for every cycle.

    The code checks that the Laplacian is circulant. The eigenvalues are then the Fourier
    transform of the first row.
    """
    for N in range(3, size.every + 1):
        spectra = circulant_spectrum(laplacians(ga.window_cycle_graph, N))
        for w, values in enumerate(spectra, start=1):
            closed = ga.spectral.cycle_fiedler_value(N, w)
            yield ClaimCase(f"N {N}, w {w}", -relative(values[1], closed), rounding(values, closed))


def cycle_monotone(size: Size) -> Iterator[ClaimCase]:
    """Check that lambda_1 of a cycle increases with the window."""
    for N in range(3, size.every + 1):
        values = [ga.spectral.cycle_fiedler_value(N, w) for w in windows(N)]
        for w, (narrow, wide) in enumerate(pairwise(values), start=1):
            yield ClaimCase(f"N {N}, w {w} to {w + 1}", (wide - narrow) / narrow)


def path_bounds(size: Size) -> Iterator[ClaimCase]:
    """Check 2 S <= lambda_1 <= 4 S for every path, with all eigenvalues of the Laplacian.

    For w = 1, lambda_1 is equal to the upper bound, so a rounding error can exceed it. The error of
    an eigenvalue is a few eps of the largest eigenvalue.
    """
    for N in range(3, size.every + 1):
        spectra = mirror_spectrum(laplacians(ga.window_path_graph, N))
        for w, values in enumerate(spectra, start=1):
            yield between(N, w, values[1], rounding(values, values[1]))


def long_path_bounds(size: Size) -> Iterator[ClaimCase]:
    """Check the bounds of lambda_1 for paths of up to 100,000 tokens.

    The residual gives the error of lambda_1: a Rayleigh quotient differs from lambda_1 by at most
    residual^2 / gap (Temple). The gap to the next eigenvalue of a path is about 3 lambda_1. To be
    safe, the code uses lambda_1.
    """
    for N, w in size.paths:
        value, _, residual = ga.spectral.fiedler_pair(ga.window_path_graph(N, w))
        yield between(N, w, value, (residual / value) ** 2 + 64 * EPS)


def cubic_growth(size: Size) -> Iterator[ClaimCase]:
    """Check lambda_1 = Theta(w^3 / N^2) with constants: 2/3 <= lambda_1 N^2 / w^3 <= pi^2.

    The constants follow from the bounds of Remark 4.2. The inequality sin x >= 2 x / pi gives
    S >= w^3 / (3 N^2). The inequality sin x <= x gives S <= pi^2 w^3 / (4 N^2). This bound is
    the one for w = 1, where the factor of w^3 / N^2 is largest.
    """
    for N, w in size.paths:
        constant = ga.spectral.fiedler_value(ga.window_path_graph(N, w)) * N**2 / w**3
        lower, upper = 2 / 3, math.pi**2
        yield ClaimCase(f"N {N:,}, w {w}", min(constant - lower, upper - constant) / constant)


def complete_and_separate(size: Size) -> Iterator[ClaimCase]:
    """Check lambda_1 of complete graphs and of graphs with two separate groups.

    The value is N for a complete graph of N tokens. The value is exactly 0 if no edge
    joins two groups.
    """
    for N in range(2, size.every + 1, max(1, size.every // 25)):
        found = ga.spectral.fiedler_value(ga.complete_graph(N))
        yield ClaimCase(f"complete graph, N {N}", -relative(found, N), 1e-12)
        apart = ga.spectral.fiedler_value(ga.block_window_graph(2 * N, block_size=N))
        yield ClaimCase(f"two groups of {N}", -apart, 0.0)


CLAIMS = [
    Claim(
        "cycle: λ₁ in closed form",
        "Remark 4.1, Eq. 15",
        "The Fiedler value of a cycle with window w < N/2 is 4 Σ_{j≤w} sin²(π j / N).",
        cycle_closed_form,
        "equation",
    ),
    Claim(
        "cycle: λ₁ grows with the window",
        "Remark 4.1",
        "For fixed N, λ₁ increases with w.",
        cycle_monotone,
    ),
    Claim(
        "path: 2 S ≤ λ₁ ≤ 4 S",
        "Remark 4.2, Eq. 16",
        "The Fiedler value of a window path, w < N/2, lies between 2 S and 4 S, "
        "S = Σ_{j≤w} sin²(π j / 2N).",
        path_bounds,
    ),
    Claim(
        "long path: 2 S ≤ λ₁ ≤ 4 S",
        "Remark 4.2, Eq. 16",
        "The same for paths of up to 100,000 tokens.",
        long_path_bounds,
    ),
    Claim(
        "path: λ₁ of the order w³ / N²",
        "Remark 4.2",
        "2/3 ≤ λ₁ N² / w³ ≤ π².",
        cubic_growth,
    ),
    Claim(
        "complete graph: λ₁ = N; apart: 0",
        "Section 4",
        "λ₁ is N for the complete graph and 0 for a graph in pieces.",
        complete_and_separate,
        "equation",
    ),
]


def windows(num_tokens: int) -> range:
    """Return the range of all w with 1 <= w < N / 2."""
    return range(1, (num_tokens - 1) // 2 + 1)


def laplacians(build: Callable[[int, int], ga.TokenGraph], N: int) -> Array:
    """Compute the Laplacians of all windows, [W, N, N], as one batch of graphs to save time.

    Raises:
        ArithmeticError: if the Laplacian of the batch joins two graphs.
    """
    L = ga.spectral.laplacian(ga.batch([build(N, w) for w in windows(N)])).tocoo()
    graph, row, column = L.row // N, L.row % N, L.col % N
    if not np.array_equal(graph, L.col // N):
        raise ArithmeticError("the Laplacian of a batch joins its graphs")
    blocks = np.zeros((len(windows(N)), N, N))
    blocks[graph, row, column] = L.data
    return blocks


def between(N: int, w: int, value: float, slack: float) -> ClaimCase:
    """Compare lambda_1 with the nearer bound of Remark 4.2."""
    lower, upper = ga.spectral.path_fiedler_bounds(N, w)
    return ClaimCase(f"N {N:,}, w {w}", min(value - lower, upper - value) / value, slack)


def relative(found: float, expected: float) -> float:
    """Compute the relative error of `found`."""
    return abs(found - expected) / abs(expected)


def rounding(values: Array, value: float) -> float:
    """Return the possible error of an eigensolver, relative to `value`.

    The absolute error is 64 eps of the largest eigenvalue.
    """
    return 64 * EPS * float(values[-1]) / float(value)


def circulant_spectrum(L: Array) -> Array:
    """Compute the eigenvalues [*, N] of symmetric circulant matrices [*, N, N], in ascending order.

    Every row of a circulant matrix is the first row, shifted.

    Raises:
        ArithmeticError: if a matrix is not circulant.
    """
    place = np.arange(L.shape[-1])
    shift = (place[None, :] - place[:, None]) % L.shape[-1]
    if not np.array_equal(L, L[..., 0, :][..., shift]):
        raise ArithmeticError("the Laplacian of a cycle is not circulant")
    return np.sort(np.fft.fft(L[..., 0, :]).real)


def mirror_spectrum(L: Array) -> Array:
    """Compute the eigenvalues [*, N] of symmetric matrices, in ascending order.

    Reversing the order of the tokens must not change the matrices. Every mode is then even or odd
    under reversal, which gives two problems of half the size.

    Raises:
        ArithmeticError: if reversing the order of the tokens changes a matrix.
    """
    if not np.array_equal(L, L[..., ::-1, ::-1]):
        raise ArithmeticError("the Laplacian of a path is not symmetric under reversal")
    half = L.shape[-1] // 2
    near, across = L[..., :half, :half], L[..., :half, ::-1][..., :half]
    even: Any = near + across
    if L.shape[-1] % 2:  # the token in the middle belongs to the even modes
        to_middle = math.sqrt(2) * L[..., :half, half : half + 1]
        middle = L[..., half : half + 1, half : half + 1]
        even = np.block([[even, to_middle], [to_middle.swapaxes(-1, -2), middle]])
    parts = [np.linalg.eigvalsh(even), np.linalg.eigvalsh(near - across)]
    return np.sort(np.concatenate(parts, axis=-1))

"""Remarks 4.1 and 4.2: the Fiedler values of cycles and paths with windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import graphattn as ga
from graphattn.cli.verify.claims import Size, claim

Array = NDArray[np.float64]
EPS = float(np.finfo(np.float64).eps)


class WindowGraph(NamedTuple):
    """A cycle or a path of N tokens with window w."""

    N: int
    w: int
    eigenvalues: Any = None  # of the Laplacian, in ascending order, if the claim needs them

    @property
    def name(self) -> str:
        return f"N {self.N:,}, w {self.w}"

    def rounding(self, value: float) -> float:
        """Return the possible error of an eigensolver: 64 eps of the largest eigenvalue."""
        return 64 * EPS * float(self.eigenvalues[-1]) / float(value)

    def room(self, value: float) -> float:
        """Return the distance of the Fiedler value of a path from the nearer bound, relative."""
        lower, upper = ga.spectral.path_fiedler_bounds(self.N, self.w)
        return min(value - lower, upper - value) / value


def windows(num_tokens: int) -> range:
    """Return the range of all w with 1 <= w < N / 2."""
    return range(1, (num_tokens - 1) // 2 + 1)


def laplacians(build: Callable[[int, int], ga.TokenGraph], N: int) -> Array:
    return np.stack([ga.spectral.laplacian(build(N, w)).toarray() for w in windows(N)])


def circulant_spectrum(L: Array) -> Array:
    """Compute the eigenvalues [*, N] of symmetric circulant matrices, in ascending order.

    Raises: ArithmeticError: if a row is not the first row, shifted.
    """
    place = np.arange(L.shape[-1])
    shift = (place[None, :] - place[:, None]) % L.shape[-1]
    if not np.array_equal(L, L[..., 0, :][..., shift]):
        raise ArithmeticError("the Laplacian of a cycle is not circulant")
    return np.sort(np.fft.fft(L[..., 0, :]).real)


def mirror_spectrum(L: Array) -> Array:
    """Compute the eigenvalues [*, N] of symmetric matrices, in ascending order.

    Every mode is even or odd under reversal of the tokens: two problems of half the size.

    Raises: ArithmeticError: if reversing the order of the tokens changes a matrix.
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


def cycles(size: Size) -> Iterator[WindowGraph]:
    for N in range(3, size.every + 1):
        spectra = circulant_spectrum(laplacians(ga.window_cycle_graph, N))
        yield from (WindowGraph(N, w, values) for w, values in enumerate(spectra, start=1))


def paths(size: Size) -> Iterator[WindowGraph]:
    for N in range(3, size.every + 1):
        spectra = mirror_spectrum(laplacians(ga.window_path_graph, N))
        yield from (WindowGraph(N, w, values) for w, values in enumerate(spectra, start=1))


def cycles_that_can_widen(size: Size) -> Iterator[WindowGraph]:
    """Yield every cycle that has a wider window than its own."""
    for N in range(3, size.every + 1):
        yield from (WindowGraph(N, w) for w in windows(N)[:-1])


def long_paths(size: Size) -> Iterator[WindowGraph]:
    yield from (WindowGraph(N, w) for N, w in size.paths)


@claim("cycle: λ₁ in closed form", "Remark 4.1, Eq. 15", cycles, "equation")
def cycle_closed_form(cycle: WindowGraph) -> tuple[float, float]:
    """The Fiedler value of a cycle with window w < N/2 is 4 Σ_{j≤w} sin²(π j / N)."""
    closed = ga.spectral.cycle_fiedler_value(cycle.N, cycle.w)
    return -abs(cycle.eigenvalues[1] - closed) / abs(closed), cycle.rounding(closed)


@claim("cycle: λ₁ grows with the window", "Remark 4.1", cycles_that_can_widen)
def cycle_monotone(cycle: WindowGraph) -> tuple[float, float]:
    """λ₁ increases with w for fixed N."""
    narrow, wide = (ga.spectral.cycle_fiedler_value(cycle.N, cycle.w + more) for more in (0, 1))
    return (wide - narrow) / narrow, 0.0


@claim("path: 2 S ≤ λ₁ ≤ 4 S", "Remark 4.2, Eq. 16", paths)
def path_bounds(path: WindowGraph) -> tuple[float, float]:
    """The Fiedler value of a window path, w < N/2, lies between 2 S and 4 S,
    S = Σ_{j≤w} sin²(π j / 2N)."""
    # For w = 1, λ₁ is equal to the upper bound, so a rounding error can exceed it.
    value = path.eigenvalues[1]
    return path.room(value), path.rounding(value)


@claim("long path: 2 S ≤ λ₁ ≤ 4 S", "Remark 4.2, Eq. 16", long_paths)
def long_path_bounds(path: WindowGraph) -> tuple[float, float]:
    """The Fiedler value of paths of up to 100,000 tokens lies between the same bounds."""
    value, _, residual = ga.spectral.fiedler_pair(ga.window_path_graph(path.N, path.w))
    # A Rayleigh quotient differs from λ₁ by at most residual² / gap (Temple). The gap to the next
    # eigenvalue of a path is about 3 λ₁; to be safe, λ₁ is used.
    return path.room(value), (residual / value) ** 2 + 64 * EPS


@claim("path: λ₁ of the order w³ / N²", "Remark 4.2", long_paths)
def cubic_growth(path: WindowGraph) -> tuple[float, float]:
    """2/3 ≤ λ₁ N² / w³ ≤ π²."""
    # The constants follow from 2 S ≤ λ₁ ≤ 4 S. With sin x >= 2 x / π, S >= w³ / (3 N²). With
    # sin x <= x, S <= π² w³ / (4 N²) for w = 1, where the factor of w³ / N² is largest.
    value = ga.spectral.fiedler_value(ga.window_path_graph(path.N, path.w))
    constant = value * path.N**2 / path.w**3
    return min(constant - 2 / 3, math.pi**2 - constant) / constant, 0.0


class KnownGraph(NamedTuple):
    """A graph whose Fiedler value is known."""

    name: str
    graph: ga.TokenGraph
    value: float


def complete_and_separate(size: Size) -> Iterator[KnownGraph]:
    """Yield complete graphs, and graphs of two separate groups."""
    for N in range(2, size.every + 1, max(1, size.every // 25)):
        yield KnownGraph(f"complete graph, N {N}", ga.complete_graph(N), N)
        yield KnownGraph(f"two groups of {N}", ga.block_window_graph(2 * N, block_size=N), 0)


@claim("complete graph: λ₁ = N; apart: 0", "Section 4", complete_and_separate, "equation")
def known_fiedler_values(known: KnownGraph) -> tuple[float, float]:
    """λ₁ is N for the complete graph and 0 for a graph in pieces."""
    error = abs(ga.spectral.fiedler_value(known.graph) - known.value)
    return (-error / known.value, 1e-12) if known.value else (-error, 0.0)

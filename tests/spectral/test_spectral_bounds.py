"""Remarks 4.1 and 4.2 of the consensus paper against dense eigenvalues."""

import math
from itertools import pairwise

import numpy as np
import pytest

import graphattn as ga
from graphattn.spectral import cycle_fiedler_value, path_fiedler_bounds

SIZES = [(N, w) for N in range(3, 61) for w in range(1, (N + 1) // 2)]


def fiedler_of_offsets(num_tokens, window, *, cyclic):
    """lambda_1 by numpy, of an adjacency matrix written down from |i - j| alone."""
    i = np.arange(num_tokens)
    hops = np.abs(i[:, None] - i)
    if cyclic:
        hops = np.minimum(hops, num_tokens - hops)
    W = ((hops >= 1) & (hops <= window)).astype(float)
    L = np.diag(W.sum(axis=1)) - W
    return L, np.linalg.eigvalsh(L)[1]


def test_remark_4_1_is_the_fiedler_value_of_the_cycle():
    assert len(SIZES) == 870
    for N, w in SIZES:
        L, expected = fiedler_of_offsets(N, w, cyclic=True)
        rounding = 1e-14 * N * L.max()
        assert cycle_fiedler_value(N, w) == pytest.approx(expected, abs=rounding), (N, w)
        cosines = 2 * w - 2 * sum(math.cos(2 * math.pi * j / N) for j in range(1, w + 1))
        assert cycle_fiedler_value(N, w) == pytest.approx(cosines, abs=rounding), (N, w)


def test_remark_4_1_grows_with_the_window():
    for N in range(3, 61):
        values = [cycle_fiedler_value(N, w) for w in range(1, (N + 1) // 2)]
        assert all(a < b for a, b in pairwise(values))


def test_remark_4_2_encloses_the_fiedler_value_of_the_path():
    for N, w in SIZES:
        L, fiedler = fiedler_of_offsets(N, w, cyclic=False)
        lower, upper = path_fiedler_bounds(N, w)
        # The upper bound is an equality at w = 1, so allow for the rounding of eigvalsh.
        slack = 1e-14 * N * L.max()
        assert lower - slack <= fiedler <= upper + slack, (N, w)
        S = sum(math.sin(math.pi * j / (2 * N)) ** 2 for j in range(1, w + 1))
        assert 2 - slack / S <= fiedler / S <= 4 + slack / S, (N, w)
        assert (lower, upper) == pytest.approx((2 * S, 4 * S), rel=1e-14)


def test_the_upper_bound_is_an_equality_at_window_one():
    for N in (3, 10, 1000, 10**6):
        assert path_fiedler_bounds(N, 1)[1] == pytest.approx(
            4 * math.sin(math.pi / (2 * N)) ** 2, rel=1e-15
        )


def test_the_path_approaches_the_upper_bound_for_narrow_windows_and_not_for_wide_ones():
    def ratio(N, w):
        return (
            ga.spectral.fiedler_value(ga.window_path_graph(N, w))
            * 4
            / (path_fiedler_bounds(N, w)[1])
        )

    assert ratio(4000, 2) == pytest.approx(4, abs=1e-3)
    assert ratio(400, 199) == pytest.approx(3.4, abs=0.05)


def test_the_fiedler_value_is_of_the_order_of_the_window_cubed():
    """Theta(w^3 / N^2): doubling w multiplies by 8, doubling N divides by 4."""
    value = cycle_fiedler_value(100_000, 100)
    assert cycle_fiedler_value(100_000, 200) / value == pytest.approx(8, rel=0.02)
    assert cycle_fiedler_value(200_000, 100) / value == pytest.approx(1 / 4, rel=0.02)
    assert value == pytest.approx(4 * math.pi**2 * 100**3 / (3 * 100_000**2), rel=0.02)


@pytest.mark.parametrize("bound", [cycle_fiedler_value, path_fiedler_bounds])
def test_windows_that_meet_are_refused(bound):
    for N, w in ((4, 2), (5, 3), (2, 1), (0, 1)):
        with pytest.raises(ValueError, match=f"window must be < num_tokens / 2 = .*, got {w}"):
            bound(N, w)
    with pytest.raises(ValueError, match="window must be >= 1, got 0"):
        bound(10, 0)
    with pytest.raises(ValueError, match="num_tokens must be >= 0, got -3"):
        bound(-3, 1)
    with pytest.raises(ValueError, match=r"window must be an integer >= 1, got 1\.5"):
        bound(10, 1.5)

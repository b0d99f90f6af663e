"""Sizes of the bounds of Remarks 4.1 and 4.2; `graphattn verify` compares them with spectra."""

import math

import pytest

import graphattn as ga
from graphattn.spectral import cycle_fiedler_value, path_fiedler_bounds


def test_the_bounds_are_twice_and_four_times_the_sum_of_sines():
    for N, w in ((3, 1), (10, 4), (1000, 499), (10**6, 8)):
        S = sum(math.sin(math.pi * j / (2 * N)) ** 2 for j in range(1, w + 1))
        assert path_fiedler_bounds(N, w) == pytest.approx((2 * S, 4 * S), rel=1e-14)


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

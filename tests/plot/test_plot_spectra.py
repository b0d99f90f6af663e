"""Figures of spectra show the eigenvalues, the bounds and the margins they are given."""

import math

import networkx
import numpy
import pytest
import torch
from matplotlib.figure import Figure

import graphattn as ga


def test_a_spectrum_is_networkx_s_in_ascending_order(ax):
    graph = ga.grid_window_graph(4, 5, 1, metric="manhattan")
    assert ga.plot.laplacian_spectrum(graph, ax=ax) is ax
    expected = networkx.laplacian_spectrum(networkx.grid_2d_graph(4, 5))
    numpy.testing.assert_allclose(ax.lines[0].get_ydata(), expected, atol=1e-12)


def test_the_scale_on_the_right_is_what_a_step_leaves(ax):
    graph = ga.window_cycle_graph(6, 1)  # largest eigenvalue 4
    ga.plot.laplacian_spectrum(graph, 0.2, ax=ax)
    (right,) = ax.child_axes
    ax.figure.draw_without_rendering()
    for value in (0.0, 1.0, 4.0):  # the same height on the picture
        height = ax.transData.transform((0, value))[1]
        assert right.transData.transform((0, 1 - 2 * 0.2 * value))[1] == pytest.approx(height)
    assert "0.2" in right.get_ylabel()


def test_a_step_that_flips_signs_is_marked_where_they_begin(ax):
    ga.plot.laplacian_spectrum(ga.window_cycle_graph(6, 1), 0.2, ax=ax)
    assert list(ax.lines[1].get_ydata()) == pytest.approx([2.5, 2.5])
    other = Figure().add_subplot()
    ga.plot.laplacian_spectrum(ga.window_cycle_graph(6, 1), ax=other)  # the largest safe one
    assert len(other.lines) == 1


def test_a_weighted_spectrum_scales_with_the_weights(ax):
    graph = ga.window_path_graph(9, 2)
    weight = torch.full((graph.num_edges,), 3.0, requires_grad=True)
    ga.plot.laplacian_spectrum(graph, edge_weight=weight, ax=ax)
    plain = numpy.linalg.eigvalsh(ga.spectral.laplacian(graph).toarray())
    numpy.testing.assert_allclose(ax.lines[0].get_ydata(), 3 * plain, atol=1e-6)


def test_a_graph_without_edges_has_a_spectrum_of_zeros(ax):
    graph = ga.from_edge_index(torch.empty(2, 0, dtype=torch.int64), 3)
    ga.plot.laplacian_spectrum(graph, ax=ax)
    ax.figure.draw_without_rendering()
    assert list(ax.lines[0].get_ydata()) == [0, 0, 0]


@pytest.mark.parametrize("tokens", [0, 1025])
def test_a_spectrum_of_no_or_too_many_tokens_is_refused(tokens, ax):
    with pytest.raises(ValueError, match=rf"1 to 1024 tokens, got {tokens}"):
        ga.plot.laplacian_spectrum(ga.window_path_graph(tokens, 1), ax=ax)
    with pytest.raises(ValueError, match="step_size"):
        ga.plot.laplacian_spectrum(ga.window_path_graph(4, 1), -1, ax=ax)


@pytest.mark.parametrize(
    ("tokens", "window", "pairs", "label"),
    [
        (60, [4, 1, 2], [(60, 1), (60, 2), (60, 4)], "window w"),
        ([50, 10, 20], 3, [(10, 3), (20, 3), (50, 3)], "tokens N"),
    ],
)
def test_fiedler_values_of_paths_stand_between_their_bounds(ax, tokens, window, pairs, label):
    ga.plot.path_fiedler_values(tokens, window, ax=ax)
    measured, upper, lower = (numpy.asarray(line.get_ydata()) for line in ax.lines)
    for (N, w), value in zip(pairs, measured, strict=True):
        L = networkx.laplacian_matrix(
            networkx.circulant_graph(2 * N, range(1, w + 1)).subgraph(range(N))
        )
        assert value == pytest.approx(numpy.linalg.eigvalsh(L.toarray())[1], rel=1e-9)
    S = [sum(math.sin(math.pi * j / 2 / N) ** 2 for j in range(1, w + 1)) for N, w in pairs]
    numpy.testing.assert_allclose(lower, 2 * numpy.array(S))
    numpy.testing.assert_allclose(upper, 4 * numpy.array(S))
    assert (measured >= lower).all()
    assert (measured <= upper * (1 + 1e-9)).all()
    assert (ax.get_xscale(), ax.get_yscale(), ax.get_xlabel()) == ("log", "log", label)


@pytest.mark.parametrize(
    ("tokens", "window", "match"),
    [
        (10, 2, "one of num_tokens and window must be a sequence"),
        ([10], [2], "one of num_tokens and window must be a sequence"),
        (10, [], "window must have at least one number"),
        (10, [1, 5], r"window must be < num_tokens / 2 = 5, got 5"),
        ([0, 10], 2, "num_tokens must be >= 1, got 0"),
    ],
)
def test_fiedler_values_need_one_sequence_and_small_windows(ax, tokens, window, match):
    with pytest.raises(ValueError, match=match):
        ga.plot.path_fiedler_values(tokens, window, ax=ax)


def test_margins_stand_at_their_values_and_violations_at_the_edge(ax):
    ga.plot.theorem_margins(
        {"holds": [0.5, 0.01], "broken": [0.1, -0.2, math.nan]},
        {"equal": ([1e-14, 0.0], 1e-12)},
        ax=ax,
    )
    marks = {}
    for line in ax.lines:
        marks.setdefault(line.get_marker(), []).append(list(line.get_xdata()))
    assert [0.5, 0.01] in marks["|"]
    assert [0.1] in marks["|"]
    assert marks["x"] == [[1e-17]]  # one cross, however many violations
    assert [1e-14, 1e-17] in marks["|"]
    assert [1e-12] in marks["|"]
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["holds", "broken", "equal"]


def test_margins_need_claims_with_cases(ax):
    with pytest.raises(ValueError, match="at least one claim"):
        ga.plot.theorem_margins({}, ax=ax)
    with pytest.raises(ValueError, match="none for 'empty'"):
        ga.plot.theorem_margins({"empty": []}, ax=ax)

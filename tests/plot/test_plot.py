"""Figures show the numbers they are given."""

import math

import numpy
import pytest
import torch
from matplotlib.figure import Figure

import graphattn as ga


def test_adjacency_is_the_mask_with_targets_down_and_a_dark_diagonal(ax):
    graph = ga.causal_window_graph(9, 3)
    assert ga.plot.adjacency(graph, ax=ax) is ax
    cells = numpy.asarray(ax.images[0].get_array())
    assert numpy.array_equal(cells > 0, graph.to_mask().numpy())
    assert numpy.array_equal(cells == 2, numpy.eye(9, dtype=bool))
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("source j", "target i")


def test_two_tracks_are_a_rectangle(ax):
    ga.plot.adjacency(ga.bipartite_complete_graph(2, 5), ax=ax)
    assert ax.images[0].get_array().shape == (2, 5)
    assert ax.images[0].get_array().max() == 1
    ga.plot.attention_weights(torch.ones(15) / 5, ga.bipartite_complete_graph(3, 5), ax=ax)
    assert ax.images[1].get_array().shape == (3, 5)


def test_a_large_graph_is_drawn_as_a_density_that_counts_every_edge(ax):
    graph = ga.window_path_graph(3001, 7)
    ga.plot.adjacency(graph, ax=ax)
    cells = ax.images[0].get_array()
    number = len(cells)
    assert 100 < number < 1000
    bounds = numpy.arange(number + 1) * 3001 // number
    pairs = numpy.outer(numpy.diff(bounds), numpy.diff(bounds))
    assert numpy.ma.filled(cells * pairs, 0).sum() == pytest.approx(graph.num_edges)
    assert numpy.array_equal(cells, cells.T)
    assert list(ax.images[0].get_extent()) == [-0.5, 3000.5, 3000.5, -0.5]
    far = numpy.abs(numpy.subtract.outer(range(number), range(number))) > 1
    assert not numpy.ma.filled(cells, 0)[far].any()


def test_ticks_of_tokens_are_whole_numbers(ax):
    ga.plot.adjacency(ga.complete_graph(4), ax=ax)
    ax.figure.draw_without_rendering()
    assert all(float(tick).is_integer() for tick in ax.get_xticks())


def test_attention_weights_stand_where_their_edges_are(ax):
    graph = ga.causal_window_graph(8, 3)
    weights = torch.rand(graph.num_edges, generator=torch.Generator().manual_seed(0))
    ga.plot.attention_weights(weights, graph, ax=ax)
    cells = numpy.ma.filled(ax.images[0].get_array(), numpy.nan)
    for weight, j, i in zip(weights.tolist(), *graph.edge_index.tolist(), strict=True):
        assert cells[i, j] == pytest.approx(weight, rel=1e-6)
    assert numpy.isnan(cells).sum() == 64 - graph.num_edges


def test_a_part_of_the_weights_keeps_its_token_numbers_and_labels(ax):
    graph = ga.window_path_graph(20, 2, self_loops=True)
    q = torch.randn(20, 1, 4)
    weights = ga.attention_weights(q, q, graph, sigma=1.0)[:, 0].requires_grad_()
    labels = list("a$_b\\c")
    ga.plot.attention_weights(weights, graph, tokens=(7, 13), labels=labels, vmax=0.5, ax=ax)
    assert list(ax.images[0].get_extent()) == [6.5, 12.5, 12.5, 6.5]
    assert ax.images[0].get_clim() == (0, 0.5)
    assert [tick.get_text() for tick in ax.get_xticklabels()] == labels
    cells = numpy.ma.filled(ax.images[0].get_array(), numpy.nan)
    dense = torch.full((20, 20), torch.nan)
    dense[graph.edge_index[1], graph.edge_index[0]] = weights.detach()
    numpy.testing.assert_array_equal(cells, dense[7:13, 7:13].numpy())
    ax.figure.draw_without_rendering()  # "$" is no mathematics


def test_the_filter_curve_is_its_formula_and_safe_steps_stay_above_zero(ax):
    graph = ga.window_path_graph(30, 2)
    ga.plot.filter_response(graph, steps=[1, 3], ax=ax)
    dense = ga.spectral.laplacian(graph, layout="dense").double().numpy()
    spectrum = numpy.linalg.eigvalsh(dense)
    curves = [line for line in ax.lines if len(line.get_xdata()) == 400]
    dots = [line for line in ax.lines if len(line.get_xdata()) == 30]
    assert len(curves) == len(dots) == 2
    for n, curve, dot in zip((1, 3), curves, dots, strict=True):
        x = numpy.asarray(curve.get_xdata())
        eta = 1 / (2 * spectrum[-1])
        numpy.testing.assert_allclose(curve.get_ydata(), (1 - 2 * eta * x) ** n, atol=1e-9)
        assert x[-1] == pytest.approx(spectrum[-1])
        numpy.testing.assert_allclose(dot.get_xdata(), spectrum, atol=1e-9)
        assert min(curve.get_ydata()) > -1e-9


def test_a_chosen_step_and_weights_are_what_is_drawn(ax):
    graph = ga.window_path_graph(2, 1)
    weight = torch.tensor([3.0, 3.0], dtype=torch.float64)
    ga.plot.filter_response(graph, 0.5, steps=[1], edge_weight=weight, ax=ax)
    curve = next(line for line in ax.lines if len(line.get_xdata()) == 400)
    assert curve.get_xdata()[-1] == pytest.approx(6)  # eigenvalues 0 and 2 * 3
    assert curve.get_ydata()[-1] == pytest.approx(1 - 2 * 0.5 * 6)


def test_a_graph_without_edges_is_left_as_it_is(ax):
    graph = ga.from_edge_index(torch.zeros(2, 0, dtype=torch.long), 4)
    ga.plot.filter_response(graph, steps=[5], ax=ax)
    curve = next(line for line in ax.lines if len(line.get_xdata()) == 400)
    assert set(curve.get_ydata()) == {1.0}


def test_loss_curves_are_the_points_given(ax):
    ga.plot.loss_curves({"a": [(0, 3.0), (5, 2.0)]}, reference={"guess": 2.5}, ax=ax)
    line, reference = ax.lines
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([0, 5], [3.0, 2.0])
    assert list(reference.get_ydata()) == [2.5, 2.5]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["a", "guess"]


ROW = {"case": "window", "passes": "forward", "contender": "index_add", "ratio": 9.0}


def test_ratios_stand_on_a_line_of_their_contender_with_their_number(ax):
    rows = [
        {**ROW, "contender": "graphattn", "ratio": 1.0},
        ROW,
        {**ROW, "passes": "forward + backward", "ratio": 0.25},
        {**ROW, "case": "knn", "contender": "$cdist_topk$", "ratio": 2.0},
        {**ROW, "case": "scaling", "contender": "512 tokens", "ratio": None},
    ]
    assert ga.plot.benchmark_ratios(rows, ax=ax) is ax
    labels = [tick.get_text() for tick in ax.get_yticklabels()]
    assert labels == ["window", "index_add", "knn", "$cdist_topk$"]
    drawn = {
        (float(x), labels[int(y)])
        for line in ax.lines
        if line.get_marker() != "None" and len(line.get_xdata())
        for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
    }
    assert drawn == {(9.0, "index_add"), (0.25, "index_add"), (2.0, "$cdist_topk$")}
    assert {text.get_text() for text in ax.texts} == {"9.0x", "0.25x", "2.0x"}
    low, high = ax.get_xlim()
    assert low < 0.25 < 9 < high
    ax.figure.draw_without_rendering()  # "$" is no mathematics


@pytest.mark.parametrize(("quantity", "exponent", "last"), [("time", 1.5, 8e3), ("memory", 1, 4.0)])
def test_growth_is_a_line_with_its_exponent(ax, quantity, exponent, last):
    rows = [
        {**ROW, "size": {"tokens": n}, "median": (n / 1000) ** 1.5, "peak": 1e3 * n}
        for n in (4000, 1000, 2000)
    ]
    ga.plot.benchmark_scaling(rows, quantity=quantity, ax=ax)
    (line,) = ax.lines
    assert list(line.get_xdata()) == [1000, 2000, 4000]
    assert line.get_ydata()[-1] == pytest.approx(last)  # milliseconds, megabytes
    assert f"N^{{{exponent:.2f}}}" in line.get_label()
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    ax.figure.draw_without_rendering()


weights = ga.plot.attention_weights
GRAPH = ga.causal_graph(3)
LONG = ga.window_path_graph(3000, 1)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: ga.plot.adjacency(torch.eye(3)), "graph must be a TokenGraph"),
        (lambda: ga.plot.adjacency(ga.complete_graph(0)), "graph must have targets and sources"),
        (lambda: weights(torch.ones(6, 2), GRAPH), r"shape \[6\], one .*got \[6, 2\]"),
        (lambda: weights(-torch.ones(6), GRAPH), "weights must be finite .* >= 0"),
        (lambda: weights(math.nan * torch.ones(6), GRAPH), "weights must be fin"),
        (lambda: weights(torch.ones(6), GRAPH, vmax=-1), "vmax must be"),
        (lambda: weights(torch.ones(6), GRAPH, tokens=5), "tokens must be"),
        (lambda: weights(torch.ones(6), GRAPH, tokens=(0.0, 2)), "tokens must be"),
        (lambda: weights(torch.ones(LONG.num_edges), LONG), "at most 2,048"),
        (lambda: ga.plot.filter_response(GRAPH, steps=[]), "steps must be a non-empty sequence"),
        (lambda: ga.plot.filter_response(GRAPH, steps=5), "steps must be a non-empty sequence"),
        (lambda: weights(torch.ones(6), GRAPH, tokens=(2, 2)), "tokens must be"),
        (lambda: weights(torch.ones(6), GRAPH, tokens=(0, 4)), r"last \+ 1 <= 3, got"),
        (lambda: weights(torch.ones(6), GRAPH, labels="ab"), "labels must be 3"),
        (lambda: ga.plot.filter_response(GRAPH, 0.0), "step_size must be a finite number > 0"),
        (lambda: ga.plot.filter_response(GRAPH, steps=[0]), "steps must be >= 1"),
        (lambda: ga.plot.loss_curves({}), "at least one curve"),
        (lambda: ga.plot.loss_curves({"a": []}), "got none for 'a'"),
        (lambda: ga.plot.benchmark_ratios([]), "at least one ratio"),
        (lambda: ga.plot.benchmark_scaling([]), "at least one case with two lengths"),
        (lambda: ga.plot.benchmark_scaling([], quantity="speed"), "quantity must be one of"),
    ],
)
def test_bad_input_is_named(call, says):
    with pytest.raises(ValueError, match=says):
        call()


def test_a_loss_of_nan_leaves_a_gap(ax):
    ga.plot.loss_curves({"a": [(0, 3.0), (1, math.nan), (2, 2.0)]}, ax=ax)
    assert [math.isnan(y) for y in ax.lines[0].get_ydata()] == [False, True, False]


def test_losses_and_weights_that_are_learned_are_read(ax):
    loss = torch.tensor(2.0, requires_grad=True)
    ga.plot.loss_curves({"$_a": [(0, loss), (1, loss)], "_b": [(0, 1.0)]}, ax=ax)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["$_a", "_b"]
    ax.figure.draw_without_rendering()
    weight = torch.ones(36, requires_grad=True)
    ga.plot.filter_response(ga.complete_graph(6), edge_weight=weight, ax=Figure().add_subplot())


def test_a_part_of_a_long_graph_can_be_drawn(ax):
    ga.plot.attention_weights(torch.ones(LONG.num_edges), LONG, tokens=(100, 120), ax=ax)
    assert ax.images[0].get_array().shape == (20, 20)


def test_without_axes_a_figure_is_made():
    import matplotlib.pyplot as plt

    ax = ga.plot.adjacency(ga.causal_graph(4))
    assert ax.figure in map(plt.figure, plt.get_fignums())
    plt.close("all")

"""Figures of the diagnostics show the numbers they are given."""

import math

import numpy
import pytest
import torch
from matplotlib.figure import Figure

import graphattn as ga
from graphattn.plot import diagnostics as plot


def cells_of(ax):
    return numpy.ma.filled(ax.images[0].get_array(), numpy.nan)


def colour_bar_of(ax):
    (bar,) = [other for other in ax.figure.axes if other is not ax]
    return bar.get_ylabel()


SIGMA = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, math.nan]])


def test_bandwidths_stand_at_their_layer_and_head(ax):
    assert plot.bandwidth_map(SIGMA, ax=ax) is ax
    numpy.testing.assert_array_equal(cells_of(ax), SIGMA.T.numpy())
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("layer", "head")
    assert colour_bar_of(ax) == "bandwidth σ (units of the features)"
    ax.figure.draw_without_rendering()


def test_bandwidths_over_depth_are_one_line_per_head(ax):
    plot.bandwidth_lines(SIGMA.clone().requires_grad_(), ax=ax)
    assert len(ax.lines) == 3
    for line, column in zip(ax.lines, SIGMA.detach().T, strict=True):
        numpy.testing.assert_array_equal(line.get_xdata(), [0, 1])
        numpy.testing.assert_array_equal(line.get_ydata(), column)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("layer", "bandwidth σ (units of the features)")
    ax.figure.draw_without_rendering()


def test_many_heads_can_be_told_apart_and_have_no_legend(ax):
    plot.bandwidth_lines(torch.rand(3, 20) + 1, ax=ax)
    assert len({(line.get_color(), line.get_linestyle()) for line in ax.lines}) == 20
    assert ax.get_legend() is None


def test_sinks_over_depth_have_their_mean(ax):
    values = torch.tensor([[0.1, 0.3], [0.5, math.nan]])
    plot.sink_shares(values, ax=ax)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["head 0", "head 1", "mean"]
    numpy.testing.assert_allclose(ax.lines[2].get_ydata(), [0.2, 0.5], rtol=1e-6)
    assert "share" in ax.get_ylabel()


def test_effective_ranks_are_the_points_given(ax):
    curves = {"$_a": torch.tensor([3.0, 2.0], requires_grad=True), "_b": [1.0, 1.5]}
    plot.effective_ranks(curves, ax=ax)
    assert [list(line.get_ydata()) for line in ax.lines] == [[3, 2], [1, 1.5]]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["$_a", "_b"]
    assert ax.get_ylabel() == "effective rank (dimensions)"
    ax.figure.draw_without_rendering()


def numbered(graph):
    """A different weight per edge, and the matrix of them."""
    weights = torch.arange(1.0, graph.num_edges + 1) / graph.num_edges
    dense = torch.full((graph.num_tokens, graph.num_tokens), math.nan)
    dense[graph.edge_index[1], graph.edge_index[0]] = weights
    return weights, dense


@pytest.mark.parametrize("border", ["cut", "shift"])
def test_the_class_token_is_seen_over_the_image(ax, border):
    graph = ga.grid_window_graph(3, 5, radius=1, class_token=True, border=border)
    weights, dense = numbered(graph)
    plot.class_token_attention(weights, graph, ax=ax)
    numpy.testing.assert_array_equal(cells_of(ax), dense[0, 1:].view(3, 5))
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("column (patches)", "row (patches)")
    assert colour_bar_of(ax) == "attention weight"


def test_a_patch_is_framed_and_its_missing_edges_are_grey(ax):
    graph = ga.grid_window_graph(4, 5, radius=1, class_token=True)
    weights, dense = numbered(graph)
    plot.patch_attention(weights, graph, (2, 3), vmax=0.5, ax=ax)
    numpy.testing.assert_array_equal(cells_of(ax), dense[1 + 2 * 5 + 3, 1:].view(4, 5))
    assert numpy.isnan(cells_of(ax)).sum() == 20 - 9
    (frame,) = ax.patches
    assert frame.get_xy() == (2.5, 1.5)
    assert ax.images[0].get_clim() == (0, 0.5)


def test_other_graphs_are_images_when_told_so(ax):
    graph = ga.complete_graph(13)
    weights, dense = numbered(graph)
    plot.class_token_attention(weights, graph, grid=(3, 4), ax=ax)
    numpy.testing.assert_array_equal(cells_of(ax), dense[0, 1:].view(3, 4))
    plain = Figure().add_subplot()
    weights, dense = numbered(ga.complete_graph(12))
    plot.patch_attention(weights, ga.complete_graph(12), (0, 2), grid=(3, 4), ax=plain)
    numpy.testing.assert_array_equal(cells_of(plain), dense[2].view(3, 4))


def test_without_the_diagonal_the_shades_go_to_the_other_weights(ax):
    graph = ga.causal_window_graph(8, 3)
    weights, dense = numbered(graph)
    on_diagonal = graph.edge_index[0] == graph.edge_index[1]
    weights[on_diagonal] = 100
    plot.off_diagonal_attention(weights, graph, ax=ax)
    dense.fill_diagonal_(math.nan)
    numpy.testing.assert_array_equal(cells_of(ax), dense)
    assert ax.images[0].get_clim()[1] == pytest.approx(weights[~on_diagonal].max().item())


def test_many_tokens_are_thinned_out_evenly_and_keep_their_numbers(ax):
    graph = ga.complete_graph(99)
    weights, dense = numbered(graph)
    plot.off_diagonal_attention(weights, graph, most_tokens=8, ax=ax)
    tokens = torch.linspace(0, 98, 8).round().long()
    expected = dense[tokens][:, tokens]
    expected.fill_diagonal_(math.nan)
    numpy.testing.assert_array_equal(cells_of(ax), expected)
    labels = [int(tick.get_text()) for tick in ax.get_xticklabels()]
    assert labels == tokens[: len(labels)].tolist()


GRAPH, TRACKS = ga.complete_graph(4), ga.bipartite_complete_graph(2, 3)
LOOPS = ga.from_mask(torch.eye(3).bool())
IMAGE = ga.grid_window_graph(2, 2, radius=1)
W = torch.ones(16)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: plot.bandwidth_map(torch.ones(3)), r"sigma must be a tensor \[layers, heads\]"),
        (lambda: plot.bandwidth_lines(-SIGMA), "sigma must be finite numbers > 0"),
        (lambda: plot.sink_shares(SIGMA), "values must be shares from 0 to 1, got 5"),
        (lambda: plot.effective_ranks({}), "at least one curve"),
        (lambda: plot.effective_ranks({"a": []}), r"got \[0\] for 'a'"),
        (lambda: plot.class_token_attention(W, GRAPH), "grid must be given"),
        (lambda: plot.class_token_attention(W, IMAGE), "must have a class token"),
        (lambda: plot.class_token_attention(W, GRAPH, grid=(2, 3)), "got 2 x 3 patches for"),
        (lambda: plot.patch_attention(W, IMAGE, (2, 0)), r"patch must lie .* got \(2, 0\)"),
        (lambda: plot.patch_attention(W, IMAGE, 3), "patch must be"),
        (lambda: plot.patch_attention(W[:3], IMAGE, (0, 0)), r"shape \[16\], one .* got \[3\]"),
        (lambda: plot.patch_attention(-W, IMAGE, (0, 0)), "finite numbers >= 0"),
        (lambda: plot.off_diagonal_attention(W, torch.eye(4)), "graph must be a TokenGraph"),
        (lambda: plot.off_diagonal_attention(W, GRAPH, most_tokens=1), "most_tokens must be >= 2"),
        (lambda: plot.off_diagonal_attention(W[:6], TRACKS), "got 2 targets and 3 sources"),
        (lambda: plot.off_diagonal_attention(W[:3], LOOPS), "edges between different tokens"),
    ],
)
def test_bad_input_is_named(call, says):
    with pytest.raises(ValueError, match=says):
        call()

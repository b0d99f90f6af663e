"""One page shows every graph of a model: which layers, what mixes, and the edges there are."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import graphattn as ga
from graphattn.graphs.pattern import pattern_of

OPTIONS = {"window": 3, "edge_hidden": 4, "rank": 2}
PIXELS = ga.models.VisionTransformer((8, 12), 2, 2, 8, 1, 1, mixer="consensus", pooling="mean")
SWIN = ga.models.SwinTransformer(8, 1, 4, 8, (2,), (1,), window_size=4)


def encoder(mixer) -> ga.models.SequenceEncoder:
    depth = len(mixer) if isinstance(mixer, list) else 6
    return ga.models.SequenceEncoder(9, 16, depth, 4, mixer=mixer, **OPTIONS)


def page(model, *sizes, **options):
    return ga.plot.model_graphs(model, *sizes, figure=Figure(layout="compressed"), **options)


def test_layers_that_are_alike_share_a_panel_which_lists_them():
    mixer = ["krause", "dot", "krause", "consensus", "consensus", "krause"]
    titles = [ax.get_title() for ax in page(encoder(mixer), 20)]
    window = sum(abs(i - j) <= 3 for i in range(20) for j in range(20))
    assert titles == [
        f"layers 0, 2, 5: krause\nwindow 3, {window} edges",
        "layer 1: dot\nall tokens, 400 edges",
        f"layers 3-4: consensus\nwindow 3, {window - 20} edges",
    ]


def test_every_layer_has_a_panel_where_that_is_asked_for():
    axes = page(encoder("mix"), 10, each=True)
    assert [ax.get_title().partition(":")[0] for ax in axes] == [f"layer {k}" for k in range(6)]


def test_panels_show_the_adjacency_of_the_graphs():
    model = encoder("mix")
    axes = page(model, 12)
    for ax, graph in zip(axes, (model.graphs(12)[0], model.graphs(12)[-1]), strict=True):
        mask = graph.to_mask().numpy()
        shown = np.asarray(ax.images[0].get_array())
        np.testing.assert_array_equal(shown > 0, mask)


def test_graphs_of_a_call_take_the_place_of_the_models_own():
    graphs = [ga.causal_window_graph(15, 4)] * 2 + [ga.causal_graph(15)] * 4
    titles = [ax.get_title() for ax in page(encoder("dot"), graphs=graphs)]
    assert titles == [
        f"layers 0-1: dot\ncausal window 4, {15 * 4 - 6} edges",
        "layers 2-5: dot\nall before, 120 edges",
    ]


def test_without_a_size_windows_are_a_quarter_of_the_tokens_that_are_drawn():
    models = ga.models
    for model, tokens in (
        (models.CausalLM(9, 8, depth=2, heads=2, mixer="krause", window=5), 64),
        (models.CausalLM(9, 8, depth=2, heads=2, mixer="krause", window=50), 200),
        (models.CausalLM(9, 8, depth=2, heads=2, mixer="dot"), 64),
        (encoder("mix"), 64),
        (models.ProteinModel(8, depth=1, heads=2), 64),
        (models.VisionTransformer((8, 12), 2, 2, 8, 1, 1), 25),  # patches and a class token
    ):
        shown = [ax.images[0].sizes for ax in page(model)]
        drawn = [ax.images[0].get_array().shape for ax in page(model)]
        sizes = {(n * a, m * b) for (n, m), (a, b) in zip(drawn, shown, strict=True)}
        assert sizes == {(tokens, tokens)}


def test_residues_near_in_space_are_named_by_what_the_model_chose_them_by():
    model = ga.models.ProteinModel(8, depth=2, heads=2, mixer="mix", neighbors=3, window=2)
    places = 5 * torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    structure = ga.data.Structure("ACDEFGHIKLMN", places)
    for ax in ga.plot.model_graphs(model, structure=structure):
        assert "\n3 nearest, 2 along the chain, " in ax.get_title()
    lists = [ga.from_edge_index(g.edge_index, 12) for g in model.graphs(structure=structure)]
    for ax in ga.plot.model_graphs(model, graphs=lists):  # somebody's own
        assert "a list of edges" in ax.get_title()


@pytest.mark.long
def test_long_sequences_have_one_scale_and_one_colour_bar():
    axes = page(encoder("mix"), 5000)
    figure = axes[0].figure
    FigureCanvasAgg(figure).draw()
    assert len(figure.axes) == len(axes) + 1
    limits = {image.get_clim() for ax in axes for image in ax.images}
    assert len(limits) == 1
    ((least, most),) = limits
    rows, columns = axes[0].images[0].sizes
    assert rows > 1
    assert most == 1
    assert least <= 1 / (rows * columns)  # of a single edge


@pytest.mark.long
@pytest.mark.parametrize(
    ("panels", "columns", "shape"), [(3, None, (1, 3)), (6, None, (2, 3)), (5, 2, (3, 2))]
)
def test_panels_stand_in_even_rows(panels, columns, shape):
    axes = page(encoder(["dot"] * panels), 6, each=True, columns=columns)
    grid = axes[0].get_gridspec()
    assert (grid.nrows, grid.ncols) == shape
    assert len(axes) == panels
    axes[0].figure.savefig(io.BytesIO(), format="svg")


def test_bad_input_is_refused_by_name():
    with pytest.raises(ValueError, match=r"graphs must have one graph per block \(6\), got 1"):
        page(encoder("dot"), graphs=[ga.complete_graph(3)])
    with pytest.raises(ValueError, match=r"model must be a model of graphattn\.models"):
        page(ga.nn.DotProductAttention(8, 2), 5)
    with pytest.raises(ValueError, match="columns must be"):
        page(encoder("dot"), 5, columns=0)


@pytest.mark.parametrize(
    ("graph", "words"),
    [
        (ga.complete_graph(5), "all tokens"),
        (ga.bipartite_complete_graph(5, 7), "all of 7 tokens"),
        (ga.complete_graph(5, self_loops=False), "all others"),
        (ga.causal_graph(5), "all before"),
        (ga.causal_window_graph(50, 8), "causal window 8"),
        (ga.causal_window_graph(5, 8), "all before"),
        (ga.window_path_graph(50, 3), "window 3"),
        (ga.window_cycle_graph(50, 3), "window 3 on a ring"),
        (ga.dilated_window_graph(50, 2, 4), "window 2, every 4th"),
        (ga.block_window_graph(50, 8, shift=3), "blocks of 8, shifted by 3"),
        (ga.batch([ga.complete_graph(3)] * 2), "2 sequences: all tokens"),
        (ga.batch([ga.complete_graph(3), ga.causal_graph(4)]), "2 sequences: several patterns"),
        (PIXELS.graphs()[0], "radius 1 on 4 × 6, 1 token apart"),
        (ga.grid_window_graph(4, 6, 1, class_token=True), "radius 1 on 4 × 6, class token"),
        (ga.neighborhood_graph((6, 9), 3), "3 × 3 on 6 × 9"),
        (SWIN.graphs()[1], "blocks of 4 × 4 on 8 × 8, shifted by 2 × 2"),
    ],
)
def test_patterns_have_their_usual_names(graph, words):
    assert pattern_of(graph) == words

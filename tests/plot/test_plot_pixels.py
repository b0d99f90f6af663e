"""No line of a graph is lost between two pixels, at any size; the pictures are read pixel by pixel.

What is compared with comes from networkx and scipy; nothing is compared with a stored picture.
"""

from __future__ import annotations

import base64
import io
import itertools
import re

import networkx
import numpy as np
import pytest
import scipy.sparse
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread

import graphattn as ga
from graphattn.plot.drawing.cells import Cut, edge_counts


def figure_of(graph: ga.TokenGraph, inches: float = 3.0, dpi: float = 100) -> Figure:
    figure = Figure(figsize=(inches, inches), dpi=dpi, layout="constrained")
    ga.plot.adjacency(graph, ax=figure.add_subplot())
    return figure


def luminance(rgb: np.ndarray) -> np.ndarray:
    """Relative luminance of sRGB in 0 .. 1 (WCAG 2.2)."""
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return linear @ np.array([0.2126, 0.7152, 0.0722])


class Pixels:
    """A drawn figure: the contrast of every pixel with white, and where tokens lie."""

    def __init__(self, figure: Figure) -> None:
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        rgb = np.asarray(canvas.buffer_rgba())[..., :3] / 255
        self.contrast = 1.05 / (luminance(rgb) + 0.05)
        self.ax = figure.axes[0]

    def place(self, target: np.ndarray, source: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Pixel rows and columns of the middles of pairs of tokens."""
        at = self.ax.transData.transform(np.column_stack([source, target]).astype(float))
        column, row = np.floor(at).astype(int).T
        return len(self.contrast) - 1 - row, column

    def near(self, target: np.ndarray, source: np.ndarray) -> np.ndarray:
        """The strongest contrast within a pixel of these pairs."""
        rows, columns = self.place(target, source)
        around = [self.contrast[rows + y, columns + x] for y in (-1, 0, 1) for x in (-1, 0, 1)]
        return np.max(around, axis=0)


PLAIN = 2.5  # contrast with white that nobody misses in a picture


def random_edges(tokens: int, edges: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Sources and targets of a random graph, by networkx."""
    looks = networkx.gnm_random_graph(tokens, edges, seed=seed, directed=True)
    source, target = np.array(looks.edges, dtype=int).reshape(-1, 2).T
    return source, target


@pytest.mark.parametrize("seed", range(12))
def test_every_edge_of_a_random_graph_is_seen_and_nothing_else_is(seed):
    generator = np.random.default_rng(seed)
    tokens = int(np.exp(generator.uniform(np.log(5), np.log(20_000))))
    source, target = random_edges(tokens, int(generator.integers(1, 60)), seed)
    graph = ga.from_edge_index(torch.from_numpy(np.stack([source, target])), tokens)
    pixels = Pixels(figure_of(graph, generator.uniform(2, 5), generator.choice([50, 72, 100, 220])))
    assert (pixels.near(target, source) > PLAIN).all(), (tokens, seed)

    # Every coloured pixel of the matrix lies within a cell of an edge.
    image = pixels.ax.images[0]
    left, top = pixels.place(np.array([-0.5]), np.array([-0.5]))[::-1]
    right, bottom = pixels.place(np.array([tokens - 0.5]), np.array([tokens - 0.5]))[::-1]
    inside = pixels.contrast[top[0] + 2 : bottom[0] - 1, left[0] + 2 : right[0] - 1]
    y, x = np.nonzero(inside > 1.05)
    origin, one = pixels.ax.transData.transform([(0, 0), image.sizes[::-1]])
    reach = max(abs(one - origin)) + 2
    rows, columns = pixels.place(target, source)
    apart = np.maximum(
        np.abs(y[:, None] + top + 2 - rows), np.abs(x[:, None] + left + 2 - columns)
    ).min(axis=1)
    assert (apart <= reach).all()


@pytest.mark.parametrize("tokens", [100, 512, 1000, 4096, 100_000])
def test_the_global_row_and_column_of_longformer_are_seen_along_all_their_length(tokens):
    for inches, dpi in ((2.6, 60), (3.5, 144)):
        pixels = Pixels(figure_of(ga.longformer_graph(tokens, 4, [0, tokens // 2]), inches, dpi))
        along = np.linspace(0, tokens - 1, 997).round().astype(int)
        for hub in (0, tokens // 2):
            assert (pixels.near(np.full(997, hub), along) > PLAIN).all()
            assert (pixels.near(along, np.full(997, hub)) > PLAIN).all()
        assert (pixels.near(along, along) > PLAIN).all()  # the window
        far = np.array([tokens // 4]), np.array([3 * tokens // 4])
        assert pixels.near(*far) == pytest.approx(1)  # white


def test_one_edge_among_a_million_tokens_is_seen():
    graph = ga.from_edge_index(torch.tensor([[123_456], [876_543]]), 1_000_000)
    pixels = Pixels(figure_of(graph))
    assert pixels.near(np.array([876_543]), np.array([123_456])) > PLAIN
    assert pixels.near(np.array([123_456]), np.array([876_543])) == pytest.approx(1)


def test_few_targets_of_many_sources_have_a_height():
    edges = torch.tensor([[10, 4000, 2500], [0, 1, 2]])
    graph = ga.from_edge_index(edges, num_targets=3, num_sources=5000)
    pixels = Pixels(figure_of(graph))
    rows, _ = pixels.place(np.arange(3), np.zeros(3))
    assert rows[1] - rows[0] > 20
    assert (pixels.near(np.arange(3), np.array([10, 4000, 2500])) > PLAIN).all()


@pytest.mark.long
def test_pictures_inside_vector_files_lose_no_line_either():
    for dpi in (30, 72, 300):
        file = io.BytesIO()
        figure_of(ga.longformer_graph(2000, 3, [0])).savefig(file, format="svg", dpi=dpi)
        svg = file.getvalue().decode()
        encoded = re.findall(r'xlink:href="data:image/png;base64,\s*([^"]+)"', svg)
        pictures = [imread(io.BytesIO(base64.b64decode(data)))[..., :3] for data in encoded]
        matrix = max(pictures, key=lambda picture: min(picture.shape[:2]))
        coloured = 1.05 / (luminance(matrix) + 0.05) > PLAIN
        # Some backends store pictures upside down; resampling may leave a margin of a pixel.
        assert coloured[:3].any(axis=0)[2:-2].all() or coloured[-3:].any(axis=0)[2:-2].all()
        assert coloured[:, :3].any(axis=1)[2:-2].all()


def builders() -> dict[str, ga.TokenGraph]:
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(50, 3, generator=generator)
    edges = torch.randint(0, 50, (2, 80), generator=generator)
    graphs = {
        "path": ga.window_path_graph(50, 3),
        "wide path": ga.window_path_graph(50, 10**12, self_loops=True),
        "causal": ga.causal_graph(50),
        "causal window": ga.causal_window_graph(50, 7),
        "cycle": ga.window_cycle_graph(50, 7),
        "blocks": ga.block_window_graph(50, 9, shift=4),
        "one block": ga.block_window_graph(50, 10**12),
        "dilated": ga.dilated_window_graph(50, 4, dilation=3),
        "dilated, wide": ga.dilated_window_graph(50, 40, dilation=2, self_loops=False),
        "longformer": ga.longformer_graph(50, 3, [0, 17]),
        "longformer, dilated": ga.longformer_graph(50, 3, [4], dilation=2),
        "bigbird": ga.bigbird_graph(50, 2, 3, [0, 3], 1),
        "grid": ga.grid_window_graph(7, 6, 2, metric="manhattan"),
        "grid with class token": ga.grid_window_graph(7, 6, 1, class_token=True),
        "complete": ga.complete_graph(50),
        "two tracks": ga.bipartite_complete_graph(7, 50),
        "nearest": ga.knn_graph(points, 5),
        "edges": ga.from_edge_index(edges.unique(dim=1), 50),
        "union": ga.union(ga.window_path_graph(50, 5), ga.block_window_graph(50, 9)),
    }
    mixed = [graphs[name] for name in ("causal", "grid with class token", "dilated", "two tracks")]
    return {**graphs, "batch": ga.batch(mixed)}


@pytest.mark.parametrize(("name", "graph"), builders().items())
def test_edges_per_cell_are_those_of_the_sparse_matrix(name, graph):
    generator = np.random.default_rng(0)
    source, target = graph.edge_index.numpy()
    A = scipy.sparse.coo_array(
        (np.ones(len(source), dtype=int), (target, source)),
        shape=(graph.num_targets, graph.num_sources),
    ).tocsr()
    for _ in range(40):
        cuts, gathers = [], []
        for number in A.shape:
            start, stop = np.sort(generator.choice(number + 1, 2, replace=False)).tolist()
            cells = int(generator.integers(1, min(stop - start, 14), endpoint=True))
            cuts.append(Cut(start, stop, cells))
            bounds = [start + cell * (stop - start) // cells for cell in range(cells + 1)]
            assert cuts[-1].bounds().tolist() == bounds
            gather = scipy.sparse.lil_array((cells, number), dtype=int)
            for cell in range(cells):
                gather[cell, bounds[cell] : bounds[cell + 1]] = 1
            gathers.append(gather.tocsr())
        expected = (gathers[0] @ A @ gathers[1].T).toarray()
        np.testing.assert_array_equal(edge_counts(graph, *cuts), expected, err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize(
    "graph",
    [
        ga.causal_graph(10**6),
        ga.complete_graph(10**6),
        ga.longformer_graph(10**6, 300_000, [0]),
        ga.block_window_graph(10**6, 100_000),
        ga.window_cycle_graph(10**6, 400_000),
    ],
    ids=lambda graph: type(graph.structure).__name__,
)
def test_closed_forms_of_a_million_tokens_are_drawn_without_a_list(graph, monkeypatch):
    monkeypatch.setattr(ga.TokenGraph, "edge_index", property(lambda self: pytest.fail("listed")))
    counts = edge_counts(graph, *[Cut(0, 10**6, 127)] * 2)
    assert counts.shape == (127, 127)
    assert int(counts.sum()) == graph.num_edges
    pixels = Pixels(figure_of(graph))
    assert (pixels.near(np.array([10**6 - 1]), np.array([10**6 - 1])) > PLAIN).all()


def cells_of(figure: Figure) -> tuple[int, int]:
    """How many cells lie side by side, and how many tokens share one."""
    FigureCanvasAgg(figure).draw()
    image = figure.axes[0].images[0]
    return image.get_array().shape[0], image.sizes[0]


@pytest.mark.long
def test_more_edges_in_a_cell_make_it_darker_and_one_is_plain():
    """Cells of a matrix with 1, 2, 4, ... of their pairs filled, along a row of cells."""
    number, size = cells_of(figure_of(ga.complete_graph(4000)))
    tokens = number * size  # so that all cells hold as many
    shares = 2 ** np.arange(int(np.log2(size**2)) + 1)
    starts = (3 * np.arange(len(shares)) + 2) * size
    edges = [
        (start + e % size, 5 * size + e // size)
        for start, share in zip(starts, shares, strict=True)
        for e in range(share)
    ]
    figure = figure_of(ga.from_edge_index(torch.tensor(edges).T, tokens))
    pixels = Pixels(figure)
    assert cells_of(figure) == (number, size)
    middle = starts + size // 2
    seen = pixels.near(np.full(len(middle), 5 * size + size // 2), middle)
    assert len(seen) > 6
    assert (np.diff(seen) > 0).all()
    assert seen[0] > PLAIN


def test_a_colour_bar_says_what_a_cell_is_where_it_is_more_than_a_pair():
    small, large = (figure_of(ga.causal_graph(tokens)) for tokens in (60, 3000))
    for figure in (small, large):
        figure.canvas.draw()
    assert small.axes[0].images[0].colorbar is None
    image = large.axes[0].images[0]
    rows, columns = image.sizes
    assert rows == columns > 1
    assert f"cells of {rows} × {columns} pairs" in image.colorbar.ax.get_ylabel()
    ticks = [tick.get_text() for tick in image.colorbar.ax.get_yticklabels()]
    assert ticks[-1] == "100 %"


@pytest.mark.long
def test_a_part_of_a_large_graph_is_shown_token_by_token():
    figure = figure_of(ga.window_path_graph(1_000_000, 1))
    ax = figure.axes[0]
    ax.set_xlim(500_000 - 0.5, 500_040 - 0.5)
    ax.set_ylim(500_040 - 0.5, 500_000 - 0.5)
    pixels = Pixels(figure)
    assert ax.images[0].sizes == (1, 1)
    i = np.arange(500_001, 500_039)
    rows, columns = pixels.place(i, i)
    assert np.allclose(pixels.contrast[rows, columns], 1)  # no self-loops
    rows, columns = pixels.place(i, i + 1)
    assert (pixels.contrast[rows, columns] > PLAIN).all()


def test_the_largest_weight_of_a_cell_is_what_a_large_picture_of_weights_shows():
    graph = ga.causal_graph(1200)
    weights = torch.zeros(graph.num_edges)
    chosen = torch.tensor([5, 70_000, 400_001, graph.num_edges - 9])
    weights[chosen] = 1.0
    figure = Figure(figsize=(3, 2.5), dpi=80, layout="constrained")
    ga.plot.attention_weights(weights, graph, ax=figure.add_subplot())
    pixels = Pixels(figure)
    source, target = graph.edge_index[:, chosen].numpy()
    assert (pixels.near(target, source) > 8).all()  # near black
    image = figure.axes[0].images[0]
    rows, columns = image.sizes
    assert rows > 1
    assert f"largest of {rows} × {columns}" in image.colorbar.ax.get_ylabel()


WORDS = [f"token{n}" * (1 + n % 3) for n in range(150)]


@pytest.mark.parametrize("tokens", [2, 12, 40, 150])
@pytest.mark.parametrize("letters", [True, False])
@pytest.mark.parametrize("own_axes", [True, False])
def test_labels_of_tokens_do_not_lie_on_one_another(tokens, letters, own_axes):
    import matplotlib.pyplot as plt

    graph = ga.causal_window_graph(tokens, 3)
    labels = [word[0] if letters else word for word in WORDS[:tokens]]
    ax = None if own_axes else Figure(figsize=(4.5, 4), layout="constrained").add_subplot()
    ax = ga.plot.attention_weights(torch.ones(graph.num_edges), graph, labels=labels, ax=ax)
    figure = ax.figure
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    for axis, side in ((ax.xaxis, "x"), (ax.yaxis, "y")):
        boxes = [text.get_window_extent(renderer) for text in axis.get_ticklabels()]
        spans = sorted((getattr(box, f"{side}0"), getattr(box, f"{side}1")) for box in boxes)
        assert len(spans) >= min(tokens, 40)
        # Boxes hold some empty room around the ink of a line.
        for (low, high), (after, _) in itertools.pairwise(spans):
            assert after - low >= 0.7 * (high - low), (tokens, side)
        assert [t.get_text() for t in axis.get_ticklabels()][:1] == labels[:1]
    assert ax.images[0].colorbar.ax.get_ylabel() == "attention weight"
    bar = ax.images[0].colorbar.ax
    for text in (*ax.get_xticklabels(), *ax.get_yticklabels(), ax.yaxis.label, bar.yaxis.label):
        box = text.get_window_extent(renderer)
        # Axes of others have the layout of others; some of it comes out a few pixels short.
        slack = 1 if own_axes else 8
        assert min(box.x0, box.y0) >= -slack, text
        assert box.x1 <= figure.bbox.x1 + slack, text
    plt.close("all")


def test_a_colour_bar_can_be_left_out():
    graph = ga.causal_graph(5)
    ax = Figure().add_subplot()
    ga.plot.attention_weights(torch.ones(graph.num_edges), graph, colorbar=False, ax=ax)
    assert len(ax.figure.axes) == 1
    assert ax.images[0].colorbar is None

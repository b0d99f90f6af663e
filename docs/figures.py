"""The pictures of the documentation, drawn with graphattn.plot.

python docs/figures.py            all of them, into docs/_figures (Sphinx does this by itself)
python docs/figures.py readme     docs/images/graphs.png, the picture of the README
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import graphattn as ga
from graphattn.plot.drawing.style import COLOURS, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
WIDEST = 4.8  # inches of a figure whose labels of 8 points can be read on a phone
BLUE, ORANGE, FAINT = *COLOURS[:2], "#e4e4e4"

Panel = tuple[str, ga.TokenGraph]


def new_figure(panels: int, *, side: float = 2.25) -> tuple[Figure, Sequence[Axes]]:
    """Square axes, at most `side` inches each, in rows that a phone can show; without pyplot."""
    from matplotlib.figure import Figure

    columns = 2 if panels == 4 else panels
    side = min(side, WIDEST / columns)
    rows = panels // columns
    figure = Figure(figsize=(columns * side, rows * (side + 0.25)), layout="compressed")
    return figure, figure.subplots(rows, columns, squeeze=False).flatten()


def adjacency(ax: Axes, title: str, graph: ga.TokenGraph) -> None:
    """The adjacency under its title."""
    from matplotlib.ticker import MaxNLocator

    ga.plot.adjacency(graph, ax=ax)
    ax.set_title(title, fontsize=8, color=INK)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(5, integer=True))


def matrices(*panels: Panel) -> Figure:
    """Adjacencies side by side, each under its title."""
    figure, axes = new_figure(len(panels))
    for ax, (title, graph) in zip(axes, panels, strict=True):
        adjacency(ax, title, graph)
    return figure


# One function per graph builder, in the order of docs/graphs.md.


def window_path_graph() -> Figure:
    return matrices(
        ("window=2", ga.window_path_graph(16, window=2)),
        ("window=2, self_loops=True", ga.window_path_graph(16, window=2, self_loops=True)),
    )


def window_cycle_graph() -> Figure:
    return matrices(("window=2", ga.window_cycle_graph(16, window=2)))


def dilated_window_graph() -> Figure:
    return matrices(("window=2, dilation=3", ga.dilated_window_graph(20, window=2, dilation=3)))


def causal_window_graph() -> Figure:
    return matrices(("window=5", ga.causal_window_graph(16, window=5)))


def causal_graph() -> Figure:
    return matrices(("causal_graph(16)", ga.causal_graph(16)))


def complete_graph() -> Figure:
    return matrices(
        ("complete_graph(16)", ga.complete_graph(16)),
        ("self_loops=False", ga.complete_graph(16, self_loops=False)),
    )


def block_window_graph() -> Figure:
    return matrices(
        ("block_size=4", ga.block_window_graph(18, block_size=4)),
        ("block_size=4, shift=2", ga.block_window_graph(18, block_size=4, shift=2)),
    )


def longformer_graph() -> Figure:
    return matrices(
        ("window=2, global_tokens=[0]", ga.longformer_graph(20, 2, [0])),
        ("..., dilation=3", ga.longformer_graph(20, 2, [0], dilation=3)),
    )


def causal_longformer_graph() -> Figure:
    return matrices(("window=3, num_global=2", ga.causal_longformer_graph(20, 3, 2)))


def bigbird_graph() -> Figure:
    graph = ga.bigbird_graph(24, window=1, num_random=2, global_tokens=[0], seed=0)
    return matrices(("window=1, num_random=2", graph))


def grid_window_graph() -> Figure:
    """The matrix, and the window of a pixel in the image plane."""
    figure, axes = new_figure(4)
    square = ga.grid_window_graph(5, 5, radius=1, class_token=True)
    adjacency(axes[0], "5 x 5, class_token=True", square)
    large = ga.grid_window_graph(7, 7, radius=2)
    diamond = ga.grid_window_graph(7, 7, radius=2, metric="manhattan")
    for ax, title, graph, pixel in (
        (axes[1], "radius=2", large, (3, 3)),
        (axes[2], "radius=2, at the border", large, (1, 0)),
        (axes[3], 'radius=2, "manhattan"', diamond, (3, 3)),
    ):
        image_plane(ax, graph, 7, 7, pixel)
        ax.set_title(title, fontsize=8, color=INK)
    return figure


def grid_block_graph() -> Figure:
    """The matrix of shifted blocks, and the block of a pixel in the image plane."""
    figure, axes = new_figure(4)
    plain = ga.grid_block_graph(8, 8, block_size=4)
    shifted = ga.grid_block_graph(8, 8, block_size=4, shift=2)
    adjacency(axes[0], "block_size=4, shift=2", shifted)
    for ax, title, graph, pixel in (
        (axes[1], "block_size=4", plain, (3, 4)),
        (axes[2], "shift=2", shifted, (3, 4)),
        (axes[3], "shift=2, at the border", shifted, (4, 1)),
    ):
        image_plane(ax, graph, 8, 8, pixel)
        ax.set_title(title, fontsize=8, color=INK)
    return figure


def volume_window_graph() -> Figure:
    """The frames of a video, and what one pixel of the third sees of them."""
    figure, axes = new_figure(4)
    video = ga.volume_window_graph(4, 5, 5, radius=(2, 1, 1), causal=(True, False, False))
    seen = video.to_mask()[62].view(4, 5, 5).int()
    seen[2, 2, 2] = 2
    for frame, ax in enumerate(axes):
        pixels(ax, seen[frame])
        ax.set_title(f"frame {frame}", fontsize=8, color=INK)
    return figure


def neighborhood_graph() -> Figure:
    """What pixels see: in the middle, in a corner, with dilation, and along a causal axis."""
    figure, axes = new_figure(4)
    square = ga.neighborhood_graph((7, 7), kernel_size=3)
    wide = ga.neighborhood_graph((7, 7), kernel_size=3, dilation=2)
    causal = ga.neighborhood_graph((7, 7), kernel_size=3, is_causal=(True, False))
    for ax, title, graph, pixel in (
        (axes[0], "kernel_size=3", square, (3, 3)),
        (axes[1], "in the corner", square, (0, 0)),
        (axes[2], "dilation=2", wide, (1, 4)),
        (axes[3], "is_causal=(True, False)", causal, (3, 3)),
    ):
        image_plane(ax, graph, 7, 7, pixel)
        ax.set_title(title, fontsize=8, color=INK)
    return figure


def matrix_and_plane(title: str, points: torch.Tensor, graph: ga.TokenGraph) -> Figure:
    figure, axes = new_figure(2)
    adjacency(axes[0], title, graph)
    plane(axes[1], points, graph, highlighted=5, matrix=axes[0])
    return figure


def knn_graph() -> Figure:
    points = cloud()
    return matrix_and_plane("knn_graph(points, k=3)", points, ga.knn_graph(points, k=3))


def routing_graph() -> Figure:
    points = cloud()
    return matrix_and_plane("routing_graph(points, 4)", points, ga.routing_graph(points, 4))


def scored_window_graph() -> Figure:
    scores = torch.randn(16, 9, generator=torch.Generator().manual_seed(0))
    return matrices(("w = 4, k=3", ga.scored_window_graph(scores, k=3)))


def radius_graph() -> Figure:
    from matplotlib.patches import Circle

    points, radius = cloud(), 0.3
    graph = ga.radius_graph(points, radius)
    figure = matrix_and_plane("radius_graph(points, 0.3)", points, graph)
    ring = {"fill": False, "edgecolor": ORANGE, "linestyle": (0, (4, 3)), "linewidth": 0.8}
    figure.axes[1].add_patch(Circle(tuple(points[5].tolist()), radius, **ring))
    return figure


def bipartite_window_graph() -> Figure:
    return two_tracks("num_tokens=10, window=1", ga.bipartite_window_graph(10, 1))


def bipartite_complete_graph() -> Figure:
    return two_tracks("6 targets, 10 sources", ga.bipartite_complete_graph(6, 10))


def union() -> Figure:
    near, far = ga.window_path_graph(18, 1), ga.dilated_window_graph(18, 2, dilation=5)
    return matrices(("near", near), ("far", far), ("union(near, far)", ga.union(near, far)))


def batch() -> Figure:
    parts = [ga.window_path_graph(8, 2), ga.causal_graph(5), ga.complete_graph(7)]
    return matrices(("path, causal, complete", ga.batch(parts)))


BUILDERS: dict[str, Callable[[], Figure]] = {
    draw.__name__: draw
    for draw in (
        window_path_graph,
        window_cycle_graph,
        dilated_window_graph,
        causal_window_graph,
        causal_graph,
        complete_graph,
        block_window_graph,
        longformer_graph,
        causal_longformer_graph,
        bigbird_graph,
        grid_window_graph,
        grid_block_graph,
        volume_window_graph,
        neighborhood_graph,
        knn_graph,
        radius_graph,
        routing_graph,
        scored_window_graph,
        bipartite_window_graph,
        bipartite_complete_graph,
        union,
        batch,
    )
}


# Pictures of other pages.


def filter_response() -> Figure:
    """spectral.md: the largest safe step, and a larger one."""
    from matplotlib.figure import Figure

    graph = ga.window_path_graph(64, window=2)
    eta = ga.spectral.max_step_size(graph)
    figure = Figure(figsize=(WIDEST, 5), layout="constrained")
    axes = figure.subplots(2, 1)
    for ax, title, step in zip(
        axes, ("the largest safe step", "1.5 times that step"), (eta, 1.5 * eta), strict=True
    ):
        ga.plot.filter_response(graph, step, steps=(1, 4, 16), ax=ax)
        ax.set_title(title, fontsize=9, color=INK)
    axes[0].set_xlabel("")
    return figure


def top_k_weights() -> Figure:
    """krause-attention.md: the same tokens, without and with top_k."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.tensor([[0.0, 0.0], [3.0, 0.0], [0.0, 3.0]])
    x = centres.repeat_interleave(8, 0) + 0.6 * torch.randn(24, 2, generator=generator)
    graph, q = ga.causal_window_graph(24, window=10), x[:, None]
    figure, axes = new_figure(2, side=2.7)
    for ax, top_k in zip(axes, (None, 3), strict=True):
        weights = ga.attention_weights(q, q, graph, sigma=1.0, top_k=top_k)
        ga.plot.attention_weights(weights[:, 0], graph, vmax=0.8, colorbar=ax is axes[-1], ax=ax)
        ax.set_title(f"top_k={top_k}", fontsize=8, color=INK)
    return figure


def benchmark_ratios() -> Figure:
    """benchmarks.md: all recorded cases but those by length, and models in parts."""
    from matplotlib.figure import Figure

    rows = [
        row
        for row in recorded_rows()
        if row["ratio"] is not None and not row["case"].startswith("mixer-")
    ]
    lines = len({(row["case"], row["contender"]) for row in rows})
    figure = Figure(figsize=(WIDEST, 0.9 + 0.2 * lines), layout="constrained")
    ga.plot.benchmark_ratios(rows, ax=figure.subplots())
    return figure


def benchmark_scaling() -> Figure:
    """benchmarks.md: time and memory of the cases by length."""
    from matplotlib.figure import Figure

    rows = [row for row in recorded_rows() if row["case"].startswith("scaling")]
    figure = Figure(figsize=(WIDEST, 8.8), layout="constrained")
    for ax, quantity in zip(figure.subplots(2, 1), ("time", "memory"), strict=True):
        ga.plot.benchmark_scaling(rows, quantity=quantity, ax=ax)
    return figure


def recorded_rows() -> list[dict[str, Any]]:
    """What docs/benchmarks holds, as graphattn.plot takes it."""
    from records import newest_rows  # beside this file

    return [asdict(row) for row in newest_rows()]


OTHERS: dict[str, Callable[[], Figure]] = {
    draw.__name__: draw
    for draw in (filter_response, top_k_weights, benchmark_ratios, benchmark_scaling)
}


# What several pictures share.


def cloud() -> torch.Tensor:
    """20 points of the unit square that keep some distance."""
    candidates = torch.rand(400, 2, generator=torch.Generator().manual_seed(3))
    points = candidates[:1]
    for point in candidates[1:]:
        if len(points) < 20 and (points - point).norm(dim=1).min() > 0.12:
            points = torch.cat([points, point[None]])
    return points


def image_plane(
    ax: Axes, graph: ga.TokenGraph, height: int, width: int, pixel: tuple[int, int]
) -> None:
    """What one pixel sees, as an image; the pixel itself is dark."""
    target = pixel[0] * width + pixel[1]
    seen = graph.to_mask()[target].int().view(height, width)
    seen[pixel] = 2
    pixels(ax, seen)


def pixels(ax: Axes, seen: torch.Tensor) -> None:
    """An image of 0 (not seen), 1 (seen) and 2 (who looks)."""
    from matplotlib.colors import ListedColormap

    height, width = seen.shape
    ax.imshow(seen.numpy(), cmap=ListedColormap([FAINT, BLUE, INK]), vmin=0, vmax=2)
    ax.set_xticks([x + 0.5 for x in range(width - 1)], [])
    ax.set_yticks([y + 0.5 for y in range(height - 1)], [])
    ax.tick_params(length=0)
    ax.grid(color="white", linewidth=1.5)
    ax.spines[:].set_visible(False)


def plane(
    ax: Axes, points: torch.Tensor, graph: ga.TokenGraph, highlighted: int, matrix: Axes
) -> None:
    """Points and all edges, with what one of them sees drawn strongly, here and in the matrix."""
    from matplotlib.patches import Rectangle

    for j, i in graph.edge_index.T.tolist():
        ax.plot(*points[[j, i]].T.tolist(), color=FAINT, linewidth=0.8, zorder=1)
    seen = graph.to_mask()[highlighted].nonzero().flatten()
    for j in seen.tolist():
        ax.annotate(
            "",
            xy=tuple(points[highlighted].tolist()),
            xytext=tuple(points[j].tolist()),
            arrowprops={"arrowstyle": "-|>", "color": BLUE, "shrinkA": 2, "shrinkB": 4},
        )
    colours = [INK] * len(points)
    for j in seen.tolist():
        colours[j] = BLUE
    colours[highlighted] = ORANGE
    ax.scatter(*points.T.tolist(), s=22, c=colours, zorder=3)
    for token, (x, y) in enumerate(points.tolist()):
        ax.annotate(str(token), (x, y), (3, 3), textcoords="offset points", fontsize=7.5, color=INK)
    ax.set_title(f"what token {highlighted} sees", fontsize=8, color=INK)
    ax.set_aspect("equal")
    ax.set_xlim(-0.1, 1.1)
    ax.set_ylim(-0.1, 1.1)
    ax.set_axis_off()
    row = (-0.5, highlighted - 0.5), graph.num_sources, 1
    matrix.add_patch(Rectangle(*row, fill=False, edgecolor=ORANGE, linewidth=1.2, clip_on=False))


def two_tracks(title: str, graph: ga.TokenGraph) -> Figure:
    """The matrix, and the same as two rows of tokens with edges between them."""
    figure, axes = new_figure(2)
    adjacency(axes[0], title, graph)
    middle = graph.num_targets // 2
    for j, i in graph.edge_index.T.tolist():
        of_middle = i == middle
        axes[1].plot(
            [j / (graph.num_sources - 1), i / (graph.num_targets - 1)],
            [1, 0],
            color=BLUE if of_middle else FAINT,
            linewidth=1.3 if of_middle else 0.8,
            zorder=2 if of_middle else 1,
        )
    for count, y, colour in ((graph.num_sources, 1, BLUE), (graph.num_targets, 0, INK)):
        axes[1].scatter(
            [n / (count - 1) for n in range(count)], [y] * count, s=22, c=colour, zorder=3
        )
    axes[1].text(0.5, 1.2, "sources j: another track", fontsize=8, color=INK, ha="center")
    axes[1].text(
        0.5, -0.4, f"targets i; what target {middle} sees", fontsize=8, color=INK, ha="center"
    )
    axes[1].set_ylim(-0.6, 1.6)
    axes[1].set_axis_off()
    return figure


def draw_all(folder: Path) -> None:
    """Every picture of the site, as ``folder/NAME.png``."""
    from pictures import save  # beside this file

    for name, draw in {**BUILDERS, **OTHERS}.items():
        save(draw(), folder / f"{name}.png", bbox_inches="tight", pad_inches=0.05)


def draw_readme(path: Path) -> None:
    """One row of adjacencies, 1600 pixels wide and readable at half of that."""
    from matplotlib.figure import Figure

    turn = torch.arange(24) * (2 * math.pi / 7)  # a helix of seven tokens a turn
    helix = torch.stack([turn.cos(), turn.sin(), 0.12 * turn], dim=1)
    parts = [ga.window_path_graph(9, 2), ga.causal_graph(6), ga.complete_graph(9)]
    panels = (
        ("window path", ga.window_path_graph(24, 2)),
        ("causal window", ga.causal_window_graph(24, 6)),
        ("Longformer", ga.longformer_graph(24, 2, [0])),
        ("image grid", ga.grid_window_graph(5, 5, 1, class_token=True)),
        ("nearest neighbours", ga.knn_graph(helix, k=6)),
        ("batch of three", ga.batch(parts)),
    )
    figure = Figure(figsize=(16, 3.1), layout="constrained")
    figure.get_layout_engine().set(wspace=0.02, h_pad=0.06)
    for ax, (title, graph) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        ga.plot.adjacency(graph, ax=ax)
        ax.set_title(title, fontsize=19, color=INK, pad=9)
        ax.set_xticks([])
        ax.set_yticks([])
        ax.set_xlabel("")
        ax.set_ylabel("")
        ax.spines[:].set_color("#999999")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=100, facecolor="white")


if __name__ == "__main__":
    if sys.argv[1:] == ["readme"]:
        draw_readme(HERE / "images" / "graphs.png")
    elif not sys.argv[1:]:
        draw_all(HERE / "_figures")
    else:
        sys.exit("usage: python docs/figures.py [readme]")

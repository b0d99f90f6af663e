"""Figure of the graphs of all layers of a model."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from graphattn.graphs import TokenGraph
from graphattn.graphs.arguments import as_int
from graphattn.models.overview import LayerRow, layer_rows
from graphattn.plot.drawing.style import INK
from graphattn.plot.matrices import adjacency, least_share, set_shares

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

PANEL = 1.95  # inches
COLUMNS = 4
FEWEST = 64  # tokens of a panel whose size is not given
WIDEST_LINE = 38  # characters that fit into a line of the title above a panel


def model_graphs(
    model: nn.Module,
    *sizes: Any,
    graphs: Sequence[TokenGraph] | None = None,
    each: bool = False,
    columns: int | None = None,
    figure: Figure | SubFigure | None = None,
    **named_sizes: Any,
) -> list[Axes]:
    """Draw the graphs of all layers of a model as matrices, next to each other.

    Layers of the same kind with the same graph share a panel. Its title has the numbers of the
    layers, the mixer, which tokens each token sees, and the number of edges. Panels are drawn by
    :func:`adjacency`; panels whose cells stand for several tokens share one colour bar.

    Args:
        model: a model of :mod:`graphattn.models`.
        sizes, named_sizes: the arguments of ``model.graphs``, such as the number of tokens. Without
            any, a model of sequences is shown on 64 tokens, or more if its windows are wide: four
            times the widest. A model of images is shown on its own size of images.
        graphs: one graph per block, if the model will be called with these graphs instead of its
            own.
        each: whether every layer has its own panel.
        columns: number of panels in a row; by default at most 4, chosen so that the rows are filled
            as evenly as possible.
        figure: an empty figure to draw in; a new one if None.

    Returns:
        The matplotlib axes, one per panel; their ``figure`` is the whole figure, as in
        ``model_graphs(model)[0].figure.savefig("layers.png")``.

    Raises:
        ValueError: if `model` does not have ``blocks`` and ``graphs``, or the number of graphs is
            not the number of blocks.

    Example:
        >>> import graphattn as ga
        >>> model = ga.models.SequenceEncoder(28, 32, depth=6, heads=4, mixer="mix")
        >>> for ax in ga.plot.model_graphs(model, 48):
        ...     print(ax.get_title())
        layers 0-2: dot
        all tokens, 2,304 edges
        layers 3-5: consensus
        window 2, 186 edges
    """
    block_graphs = _graphs(model, sizes, named_sizes, graphs)
    rows = layer_rows(model, block_graphs, each=each, own=graphs is None)
    width = _columns(len(rows)) if columns is None else as_int("columns", columns, 1)
    width = min(width, len(rows))
    height = math.ceil(len(rows) / width)
    if figure is None:
        import matplotlib.pyplot as plt

        size = (PANEL * width + 0.9, (PANEL + 0.55) * height + 0.2)
        figure = plt.figure(figsize=size, layout="compressed")
    grid: Any = figure.subplots(height, width, squeeze=False)
    for ax in grid.flat[len(rows) :]:
        ax.set_axis_off()
    axes: list[Axes] = list(grid.flat[: len(rows)])
    for number, (row, ax) in enumerate(zip(rows, axes, strict=True)):
        adjacency(row.graph, colorbar=False, ax=ax)
        ax.set_title(_title(row), fontsize=8, color=INK)
        ax.tick_params(labelsize=8)
        if number % width:
            ax.set_ylabel("")
        if number + width < len(rows):
            ax.set_xlabel("")
    _share_shades(axes)
    return axes


def _graphs(
    model: Any, sizes: Any, named_sizes: dict[str, Any], graphs: Sequence[TokenGraph] | None
) -> list[TokenGraph]:
    """Return one graph per block: the given ones, or the model's own."""
    has_blocks = isinstance(getattr(model, "blocks", None), nn.ModuleList)
    if not has_blocks or not hasattr(model, "graphs"):
        raise ValueError(
            f"model must be a model of graphattn.models, which has blocks and graphs, got a "
            f"{type(model).__name__}"
        )
    takes = inspect.signature(model.graphs).parameters
    if not sizes and not named_sizes and "num_tokens" in takes:
        windows = getattr(model, "windows", None) or [getattr(model, "window", None)]
        named_sizes = {"num_tokens": max([FEWEST, *(4 * window for window in windows if window)])}
    block_graphs = list(model.graphs(*sizes, **named_sizes) if graphs is None else graphs)
    if len(block_graphs) != len(model.blocks):
        raise ValueError(
            f"graphs must have one graph per block ({len(model.blocks)}), got {len(block_graphs)}"
        )
    return block_graphs


def _columns(panels: int) -> int:
    """Return the number of columns, at most 4, that leaves the fewest gaps in the last row."""
    rows = math.ceil(panels / COLUMNS)
    return math.ceil(panels / rows)


def _title(row: LayerRow) -> str:
    layers = "layer" if len(row.layers) == 1 else "layers"
    edges = f"{row.graph.num_edges:,} edges"
    fits = len(row.pattern) + len(edges) <= WIDEST_LINE
    pattern = row.pattern if len(row.pattern) <= WIDEST_LINE else row.pattern.replace(", ", ",\n")
    return f"{layers} {row.numbers}: {row.mixer}\n{pattern}{', ' if fits else chr(10)}{edges}"


def _share_shades(axes: list[Axes]) -> None:
    """Give one scale and one colour bar to all panels whose cells stand for several tokens."""
    images: list[Any] = [ax.images[0] for ax in axes]
    coarse = [image for image in images if image.on_new_cells is not None]
    if not coarse:
        return
    bar = axes[0].figure.colorbar(coarse[0], ax=axes, shrink=0.8, aspect=30, pad=0.02)
    bar.set_label("share of the pairs of a cell that are edges", color=INK, fontsize=8)
    bar.ax.tick_params(colors=INK, labelsize=8, width=0.6, length=3)
    bar.outline.set(color="#999999", linewidth=0.6)

    def update_scale(*_: int) -> None:
        least = min(least_share(*image.sizes) for image in coarse)
        for image in coarse:
            image.set_clim(least, 1)
        set_shares(bar, least)

    for image in coarse:
        image.on_new_cells = update_scale
    update_scale()

"""Figures of a graph, or of one number per edge, as a matrix with a row per target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from graphattn.graphs import TokenGraph
from graphattn.graphs.arguments import as_float, as_int
from graphattn.plot.drawing.cells import Cut, edge_counts
from graphattn.plot.drawing.style import COLOURS, INK, SHADES, axes_or_new, colour_bar, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colorbar import Colorbar
    from numpy.typing import NDArray

MOST_TOKENS = 2048  # A figure of weights needs memory for a dense matrix.
EXTREME = 16  # If one side is more than this times the other, cells are not drawn as squares.
EMPTY = "#e4e4e4"  # a cell without an edge; an edge of weight 0 is white
# The first colour is the palest that can still be seen well on white.
DENSITIES = ("#4f9bcf", COLOURS[0], "#00253d")


def adjacency(graph: TokenGraph, *, colorbar: bool = True, ax: Axes | None = None) -> Axes:
    """Draw the adjacency matrix of a graph: row i shows which sources target i sees.

    If there are as many targets as sources, edges on the diagonal are darker; in a graph with one
    sequence of tokens, these are the tokens that see themselves.

    If there are more tokens than the axes have points (1/72 inch), a cell stands for a rectangle of
    pairs of tokens, and its colour for the share of these pairs that are edges. One edge is enough
    to colour a cell, so that no line of edges disappears; a colour bar shows the scale and the
    number of pairs per cell. The cells are chosen for the size of the axes and the visible part: if
    you zoom in (``ax.set_xlim``), cells stand for fewer tokens.

    Args:
        graph: the graph to draw, of any size. For a large graph with a
            :attr:`~graphattn.TokenGraph.structure`, the cells are counted without a list of all
            edges.
        colorbar: whether to draw a colour bar next to the axes if cells stand for several pairs.
        ax: where to draw; new axes if None.

    Raises:
        ValueError: if `graph` is not a :class:`~graphattn.TokenGraph`, or has no targets or
            sources.

    Example:
        >>> import graphattn as ga
        >>> ax = ga.plot.adjacency(ga.window_path_graph(12, window=2))
        >>> ax.get_xlabel(), ax.get_ylabel()
        ('source j', 'target i')
    """
    from matplotlib.colors import LinearSegmentedColormap, ListedColormap, LogNorm

    from graphattn.plot.drawing.pixels import CellImage, cell_sizes, largest

    _check_graph(graph)
    ax = axes_or_new(ax, 3, 3, square=True)
    N, M = graph.num_targets, graph.num_sources
    _limits(ax, (N, M))

    def shares(rows: Cut, columns: Cut) -> NDArray[Any]:
        counts = edge_counts(graph, rows, columns)
        pairs = torch.outer(rows.bounds().diff(), columns.bounds().diff())
        return np.ma.masked_equal((counts / pairs).numpy(), 0)

    def presence() -> NDArray[Any]:
        source, target = graph.edge_index.cpu()
        matrix = torch.zeros((N, M), dtype=torch.uint8)
        matrix[target, source] = 1
        if N == M:
            matrix.diagonal().mul_(2)
        return matrix.numpy()

    if cell_sizes(ax, (N, M)) == (1, 1):
        colours = ListedColormap(["white", COLOURS[0], INK])
        image = CellImage(ax, (N, M), largest(presence()), cmap=colours)
        image.set_clim(0, 2)
        ax.add_image(image)
    else:
        # The shares of cells differ by orders of magnitude, so the scale is logarithmic.
        shades = LinearSegmentedColormap.from_list("density", DENSITIES).with_extremes(bad="white")
        image = CellImage(ax, (N, M), shares, cmap=shades, norm=LogNorm(1e-6, 1))
        ax.add_image(image)
        bar = colour_bar(image, "") if colorbar else None

        def update_scale(rows: int, columns: int) -> None:
            least = least_share(rows, columns)
            image.set_clim(least, 1)
            if bar is not None:
                bar.set_label(f"share of edges\n(cells of {rows:,} × {columns:,} pairs)")
                set_shares(bar, least)

        update_scale(*image.sizes)
        image.on_new_cells = update_scale
    _label(ax)
    return ax


def attention_weights(
    weights: Tensor,
    graph: TokenGraph,
    *,
    tokens: tuple[int, int] | None = None,
    labels: Sequence[str] | None = None,
    vmax: float | None = None,
    colorbar: bool = True,
    ax: Axes | None = None,
) -> Axes:
    """Draw one weight per edge as a heat map: row i shows how target i divides its attention.

    Cells without an edge are grey, edges of weight 0 are white. Colours follow the square root of
    the weight, so that small weights can be seen next to a weight of 1. If there are more tokens
    than the axes have points (1/72 inch), a cell stands for several of them, as the colour bar
    says, and shows the largest weight.

    Args:
        weights: [E], in the order of ``graph.edge_index``, of one head of one sequence, as
            :func:`graphattn.attention_weights` or a layer called with
            ``return_attention_weights=True`` returns them.
        graph: the graph whose edges have these weights.
        tokens: (first, last + 1) of the part to draw, the same for targets and sources; all tokens
            if None.
        labels: one text per token that is drawn, written at both sides of the matrix; labels of
            more than one character are rotated by 90 degrees below it. New axes are made large
            enough for up to about a hundred labels; if there is no room for all, only every second
            one (or fewer) is written.
        vmax: the weight that gets the darkest colour; give the same value to compare figures. The
            largest weight that is drawn if None.
        colorbar: whether to draw a colour bar next to the axes; with False you can make one for
            several axes from ``ax.images[0]``.
        ax: where to draw; new axes if None.

    Raises:
        ValueError: if `weights` is not one finite number >= 0 per edge, `tokens` is not a range of
            at most 2,048 tokens, or `labels` is not one text per token that is drawn.

    Example:
        >>> import torch, graphattn as ga
        >>> graph = ga.causal_window_graph(20, window=6)
        >>> q = torch.randn(20, 2, 8)  # [tokens, heads, features]
        >>> weights = ga.attention_weights(q, q, graph, sigma=2.0)  # [E, heads]
        >>> ax = ga.plot.attention_weights(weights[:, 0], graph, tokens=(10, 20))
        >>> ax.images[0].get_array().shape
        (10, 10)
    """
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    from graphattn.plot.drawing.pixels import CellImage, largest

    _check_graph(graph)
    weights = checked_weights(weights, graph)
    if vmax is not None:
        vmax = as_float("vmax", vmax, positive=True)
    shown = max(graph.num_targets, graph.num_sources)
    if tokens is None:
        first, end = 0, shown
    elif isinstance(tokens, tuple | list) and len(tokens) == 2:
        first, end = (as_int("tokens", token, 0) for token in tokens)
    else:
        raise ValueError(f"tokens must be (first, last + 1), got {tokens!r}")
    if not first < end <= shown and tokens is not None:
        raise ValueError(
            f"tokens must be (first, last + 1) with 0 <= first < last + 1 <= {shown}, got {tokens}"
        )
    if end - first > MOST_TOKENS:
        raise ValueError(
            f"tokens must be at most {MOST_TOKENS:,} tokens, got {end - first:,}: choose a part "
            "with tokens=(first, last + 1)"
        )
    if labels is not None and len(labels) != end - first:
        raise ValueError(
            f"labels must be {end - first} texts, one per token that is drawn, got {len(labels)}"
        )
    source, target = graph.edge_index.cpu()
    inside = (source >= first) & (source < end) & (target >= first) & (target < end)
    rows, columns = (max(min(end, n) - first, 0) for n in (graph.num_targets, graph.num_sources))
    if not rows or not columns:
        raise ValueError(
            f"tokens must contain targets and sources, got {tokens} of {graph.num_targets} targets "
            f"and {graph.num_sources} sources"
        )
    cells = torch.full((rows, columns), torch.nan)
    cells[target[inside] - first, source[inside] - first] = weights.float()[inside]
    side = 4.0
    if labels is not None:
        longest = max((len(text) for text in labels), default=0)
        side = min(14.0, max(4.0, 0.13 * max(rows, columns) + 0.08 * longest + 1.2))
    ax = axes_or_new(ax, side + 0.6 * colorbar, side, square=True)
    shades = LinearSegmentedColormap.from_list("weight", SHADES).with_extremes(bad=EMPTY)
    _limits(ax, (rows, columns), first)
    image = CellImage(ax, (rows, columns), largest(cells.numpy()), first, cmap=shades)
    drawn = weights[inside]
    top = float(drawn.max()) if vmax is None and len(drawn) else vmax
    image.set_norm(PowerNorm(0.5, vmin=0, vmax=top or 1.0))
    ax.add_image(image)
    if colorbar:
        bar = colour_bar(image, "attention weight")

        def update_label(rows: int, columns: int) -> None:
            of = f"\n(largest of {rows} × {columns})" if rows * columns > 1 else ""
            bar.set_label(f"attention weight{of}")

        update_label(*image.sizes)
        image.on_new_cells = update_label
    _label(ax)
    if labels is not None:
        _name_tokens(ax, [str(text) for text in labels], (rows, columns), first)
    return ax


def checked_weights(weights: Any, graph: Any) -> Tensor:
    """Check that `weights` [E] has one finite number >= 0 per edge; return it on the CPU."""
    if not isinstance(graph, TokenGraph):
        raise ValueError(f"graph must be a TokenGraph, got {type(graph).__name__}")
    if not isinstance(weights, Tensor) or weights.shape != (graph.num_edges,):
        got = list(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
        raise ValueError(
            f"weights must be a tensor of shape [{graph.num_edges}], one number per edge (choose "
            f"one head of one sequence, or take the mean over heads), got {got}"
        )
    weights = weights.detach().cpu()
    if weights.is_complex() or not (weights.isfinite() & (weights >= 0)).all():
        raise ValueError("weights must be finite numbers >= 0")
    return weights


def least_share(rows: int, columns: int) -> float:
    """Return the share that one edge is in the largest cell, given the rows and columns of most."""
    return 1 / max(2, (rows + 1) * (columns + 1))  # Some cells have one row and column more.


def set_shares(bar: Colorbar, least: float) -> None:
    """Set the ticks of a logarithmic colour bar of shares, from `least` to 1."""
    ticks = [10.0**k for k in range(math.ceil(math.log10(least)), 1)]
    if len(ticks) < 3:
        ticks = [least, *ticks]
    bar.set_ticks(ticks, labels=[f"{100 * share:.3g} %" for share in ticks])
    bar.minorticks_off()


def _check_graph(graph: object) -> None:
    if not isinstance(graph, TokenGraph):
        raise ValueError(f"graph must be a TokenGraph, got {type(graph).__name__}")
    if graph.num_targets == 0 or graph.num_sources == 0:
        raise ValueError(f"graph must have targets and sources to draw, got {graph}")


def _limits(ax: Axes, shape: tuple[int, int], first: int = 0) -> None:
    """Set the limits of the axes, square cells, and the frame below the cells, not over them."""
    rows, columns = shape
    ax.set_xlim(first - 0.5, first + columns - 0.5)
    ax.set_ylim(first + rows - 0.5, first - 0.5)
    ax.set_aspect("equal" if max(shape) <= EXTREME * min(shape) else "auto")
    ax.spines[:].set_zorder(-1)


def _label(ax: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    for axis, limits in ((ax.xaxis, ax.get_xlim()), (ax.yaxis, ax.get_ylim())):
        long = max(limits) >= 10_000
        axis.set_major_locator(MaxNLocator(4 if long else "auto", integer=True))
        if long:
            axis.set_major_formatter(FuncFormatter(lambda token, _: f"{token:,.0f}"))
    styled(ax, "source j", "target i", frame=True)


def _name_tokens(ax: Axes, labels: list[str], shape: tuple[int, int], first: int) -> None:
    """Write a label for each token, or for every second or third one if cells are too small."""
    upright = max(map(len, labels)) == 1
    origin, one = ax.transData.transform([(0, 0), (1, 1)])
    down, across = abs(one - origin)[::-1] * 72 / ax.figure.dpi  # points per cell
    for axis, count, points in ((ax.yaxis, shape[0], down), (ax.xaxis, shape[1], across)):
        size = min(8.0, max(4.5, 0.87 * points))
        step = max(1, math.ceil(0.95 * size / points))
        # A token may be a "$", which matplotlib would otherwise read as the start of a formula.
        axis.set_ticks(
            range(first, first + count, step),
            labels[:count:step],
            fontsize=size,
            parse_math=False,
            rotation=90 if axis is ax.xaxis and not upright else 0,
        )
    ax.tick_params(length=0)

"""A graph, or one number per edge of it, as a matrix: targets down, sources across."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from graphattn.graphs import TokenGraph
from graphattn.graphs.arguments import as_float, as_int
from graphattn.plot.style import COLOURS, INK, axes_or_new, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_CELLS = 1024  # per side; larger graphs are drawn as a density


def adjacency(graph: TokenGraph, *, ax: Axes | None = None) -> Axes:
    """Who talks to whom: row i is what target i sees.

    Where targets and sources are equally many, cells on the diagonal are darker: in one track those
    are tokens that see themselves.

    A graph with more than 1,024 tokens on a side is drawn as a density: cells stand for blocks of
    tokens, and the darkest for the most edges.

    Args:
        graph: the graph to draw.
        ax: where to draw; new axes if None.

    Returns:
        The matplotlib axes.

    Example:
        >>> import graphattn as ga
        >>> ax = ga.plot.adjacency(ga.window_path_graph(12, window=2))
        >>> ax.get_xlabel(), ax.get_ylabel()
        ('source j', 'target i')
    """
    from matplotlib.colors import LinearSegmentedColormap, ListedColormap

    _check_graph(graph)
    ax = axes_or_new(ax, 3, 3)
    source, target = graph.edge_index.cpu()
    N, M = graph.num_targets, graph.num_sources
    if max(N, M) <= MOST_CELLS:
        cells = torch.zeros((N, M))
        cells[target, source] = 1
        if N == M:
            cells.diagonal().mul_(2)
        colours = ListedColormap(["white", COLOURS[0], INK])
        ax.imshow(
            cells.numpy(), cmap=colours, vmin=0, vmax=2, interpolation="nearest", aspect="equal"
        )
    else:
        rows, columns = min(N, MOST_CELLS // 4), min(M, MOST_CELLS // 4)
        cell = target * rows // N * columns + source * columns // M
        cells = torch.bincount(cell, minlength=rows * columns).view(rows, columns)
        ax.imshow(
            cells.numpy(),
            cmap=LinearSegmentedColormap.from_list("density", ["white", COLOURS[0]]),
            interpolation="nearest",
            extent=(-0.5, M - 0.5, N - 0.5, -0.5),
            aspect="equal",
        )
    _label(ax)
    return ax


def attention_weights(
    weights: Tensor,
    graph: TokenGraph,
    *,
    tokens: tuple[int, int] | None = None,
    labels: Sequence[str] | None = None,
    vmax: float | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Weights per edge as a heat map: row i is how target i divides its attention.

    Cells without an edge are grey, edges of weight 0 white; shades follow the square root of the
    weight, so that small ones are seen beside a 1.

    Args:
        weights: [E], in the order of ``graph.edge_index``: one head of one sequence of
            :func:`graphattn.attention_weights` or of a layer's ``return_attention_weights=True``.
        graph: the graph they belong to.
        tokens: (first, last + 1) of the part to draw, the same for targets and sources; all if
            None.
        labels: one text per token drawn, for both sides.
        vmax: the weight that gets the darkest colour, to compare figures; the largest drawn if
            None.
        ax: where to draw; new axes if None.

    Returns:
        The matplotlib axes; ``ax.images[0]`` is what a colour bar needs.

    Raises:
        ValueError: if `weights` is not one finite number >= 0 per edge, `tokens` is no range of
            tokens or more than 2,048 of them, or `labels` are not one per token drawn.

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

    _check_graph(graph)
    if not isinstance(weights, Tensor) or weights.shape != (graph.num_edges,):
        got = list(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
        raise ValueError(
            f"weights must be a tensor of shape [{graph.num_edges}] (one per edge: pick a head "
            f"and a sequence), got {got}"
        )
    if weights.is_complex() or not (weights.isfinite() & (weights >= 0)).all():
        raise ValueError("weights must be finite numbers >= 0")
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
        raise ValueError(f"tokens must be (first, last + 1) within 0 .. {shown}, got {tokens}")
    if end - first > 2 * MOST_CELLS:
        raise ValueError(
            f"tokens must be at most {2 * MOST_CELLS:,} to be told apart, got {end - first:,}: "
            "choose a part by tokens=(first, last + 1)"
        )
    if labels is not None and len(labels) != end - first:
        raise ValueError(f"labels must be {end - first}, one per token drawn, got {len(labels)}")
    source, target = graph.edge_index.cpu()
    inside = (source >= first) & (source < end) & (target >= first) & (target < end)
    rows, columns = (max(min(end, n) - first, 0) for n in (graph.num_targets, graph.num_sources))
    cells = torch.full((rows, columns), torch.nan)
    cells[target[inside] - first, source[inside] - first] = weights.detach().cpu().float()[inside]
    ax = axes_or_new(ax, 4, 4)
    shades = LinearSegmentedColormap.from_list(
        "weight", ["white", "#8fbfdd", COLOURS[0], "#00253d"]
    ).with_extremes(bad="#e4e4e4")
    ax.imshow(
        cells.numpy(),
        cmap=shades,
        norm=PowerNorm(0.5, vmin=0, vmax=vmax),
        interpolation="nearest",
        extent=(first - 0.5, first + columns - 0.5, first + rows - 0.5, first - 0.5),
    )
    _label(ax)
    if labels is not None:
        ticks = range(first, end)
        # A token may be a blank or a "$": neither is TeX to matplotlib.
        ax.set_xticks(ticks[:columns], labels[:columns], fontsize=6, parse_math=False)
        ax.set_yticks(ticks[:rows], labels[:rows], fontsize=6, parse_math=False)
        ax.tick_params(length=0)
    return ax


def _check_graph(graph: object) -> None:
    if not isinstance(graph, TokenGraph):
        raise ValueError(f"graph must be a TokenGraph, got {type(graph).__name__}")
    if graph.num_targets == 0 or graph.num_sources == 0:
        raise ValueError(f"graph must have targets and sources to draw, got {graph}")


def _label(ax: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.set(xlabel="source j", ylabel="target i")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    style_axes(ax, frame=True)

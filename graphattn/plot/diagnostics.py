"""Figures of diagnostics: bandwidths, sinks and ranks per layer, attention on an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from graphattn.graphs import TokenGraph, from_edge_index
from graphattn.graphs.arguments import as_float, as_int
from graphattn.graphs.structures.grid_blocks import GridBlocks
from graphattn.graphs.structures.grid_windows import GridWindows
from graphattn.graphs.structures.structure import Grid
from graphattn.plot.drawing.style import COLOURS, INK, SHADES, axes_or_new, colour_bar, style_axes
from graphattn.plot.matrices import attention_weights

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BANDWIDTH = "bandwidth σ (units of the features)"


def bandwidth_map(sigma: Tensor, *, ax: Axes | None = None) -> Axes:
    """Learned bandwidths as a heat map: layers across, heads down (GKA paper, Section 7.3).

    Args:
        sigma: [layers, heads], the values of :func:`graphattn.diagnostics.bandwidths`; NaN, where a
            layer has fewer heads, is grey.
        ax: where to draw; new axes if None. A colour bar is put beside them.

    Returns:
        The matplotlib axes.

    Raises:
        ValueError: if `sigma` is no matrix of numbers > 0.

    Example:
        >>> import torch, graphattn as ga
        >>> ax = ga.plot.bandwidth_map(torch.rand(12, 3) + 5)
        >>> ax.get_xlabel(), ax.get_ylabel()
        ('layer', 'head')
    """
    sigma = _per_head("sigma", sigma)
    ax = axes_or_new(ax, 0.8 + 0.35 * len(sigma), 1.4 + 0.25 * sigma.shape[1])
    _image(ax, sigma.T, BANDWIDTH, vmin=None)
    ax.set(xlabel="layer", ylabel="head", aspect="auto")
    _whole_ticks(ax)
    style_axes(ax, frame=True)
    return ax


def bandwidth_lines(sigma: Tensor, *, ax: Axes | None = None) -> Axes:
    """Learned bandwidths over depth, one line per head (GKA paper, Section 7.3).

    Args:
        sigma: [layers, heads], the values of :func:`graphattn.diagnostics.bandwidths`.
        ax: where to draw; new axes if None.

    Returns:
        The matplotlib axes.

    Raises:
        ValueError: if `sigma` is no matrix of numbers > 0.

    Example:
        >>> import torch, graphattn as ga
        >>> ax = ga.plot.bandwidth_lines(torch.rand(12, 3) + 5)
        >>> len(ax.lines)
        3
    """
    return _lines_per_head(_per_head("sigma", sigma), BANDWIDTH, ax)


def sink_shares(values: Tensor, *, ax: Axes | None = None) -> Axes:
    """Attention on one token over depth, one line per head and a thick one for their mean.

    Args:
        values: [layers, heads] in 0 .. 1, of :func:`graphattn.diagnostics.sinks_per_layer`.
        ax: where to draw; new axes if None.

    Returns:
        The matplotlib axes.

    Raises:
        ValueError: if `values` is no matrix of numbers in 0 .. 1.

    Example:
        >>> import torch, graphattn as ga
        >>> ax = ga.plot.sink_shares(torch.rand(12, 3))
        >>> ax.get_ylabel()
        'share of the attention on the token'
    """
    values = _per_head("values", values, least=0.0)
    if (values > 1 + 1e-4).any():
        raise ValueError(f"values must be shares in 0 .. 1, got {values.nan_to_num().max():.3g}")
    ax = _lines_per_head(values, "share of the attention on the token", ax)
    mean = values.nanmean(dim=1)
    ax.plot(range(len(mean)), mean, color=INK, linewidth=2.4, label="mean")
    ax.set_ylim(-0.02, 1.02)
    _legend(ax, len(ax.lines))
    return ax


def effective_ranks(
    curves: Mapping[str, Tensor | Sequence[float]], *, ax: Axes | None = None
) -> Axes:
    """Effective rank over depth, one line per model or setting, named in the legend.

    Args:
        curves: name -> [layers], the values of
            :func:`graphattn.diagnostics.effective_rank_per_layer`.
        ax: where to draw; new axes if None.

    Returns:
        The matplotlib axes.

    Raises:
        ValueError: if there is no curve, or one has no layers.

    Example:
        >>> import torch, graphattn as ga
        >>> ax = ga.plot.effective_ranks({"trained": [9.0, 5.0], "weights disabled": [7.0, 3.0]})
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['trained', 'weights disabled']
    """
    if not curves:
        raise ValueError("curves must hold at least one curve, got none")
    ax = axes_or_new(ax, 5, 3.2)
    for i, (name, values) in enumerate(curves.items()):
        ranks = torch.as_tensor(values).detach().cpu()
        if ranks.dim() != 1 or len(ranks) == 0:
            raise ValueError(f"curves must be [layers] each, got {list(ranks.shape)} for {name!r}")
        colour = COLOURS[i % len(COLOURS)]
        ax.plot(range(len(ranks)), ranks, "o-", color=colour, markersize=3, linewidth=1.6)
    ax.set(xlabel="layer", ylabel="effective rank (dimensions)")
    ax.set_ylim(bottom=0)
    _whole_ticks(ax, y=False)
    legend = ax.legend(ax.lines[-len(curves) :], list(curves), frameon=False, fontsize=8)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a "$" in a name is no mathematics
    style_axes(ax)
    return ax


def class_token_attention(
    weights: Tensor,
    graph: TokenGraph,
    *,
    grid: tuple[int, int] | None = None,
    vmax: float | None = None,
    ax: Axes | None = None,
) -> Axes:
    """How the class token, token 0, divides its attention over an image (GKA paper, Eq. 14).

    Args:
        weights: [E], in the order of ``graph.edge_index``: one head, or the mean over heads.
        graph: a :func:`~graphattn.grid_window_graph` with a class token; or any graph of
            1 + height * width tokens, with `grid`.
        grid: (height, width) of the image in patches, where the graph does not know them.
        vmax: the weight that gets the darkest colour; the largest drawn if None.
        ax: where to draw; new axes if None. A colour bar is put beside them.

    Returns:
        The matplotlib axes; patches the class token has no edge to are grey.

    Raises:
        ValueError: if the graph is no image with a class token or `weights` do not fit it.

    Example:
        >>> import torch, graphattn as ga
        >>> graph = ga.grid_window_graph(4, 6, radius=1, class_token=True)
        >>> x = torch.randn(25, 2, 8)
        >>> weights = ga.attention_weights(x, x, graph, sigma=2.0)
        >>> ax = ga.plot.class_token_attention(weights[:, 0], graph)
        >>> ax.images[0].get_array().shape
        (4, 6)
    """
    height, width, lead = _grid(graph, grid)
    if lead != 1:
        raise ValueError("graph must have a class token before the image, got one without")
    return _row_on_image(weights, graph, 0, (height, width, lead), vmax, ax)


def patch_attention(
    weights: Tensor,
    graph: TokenGraph,
    patch: tuple[int, int],
    *,
    grid: tuple[int, int] | None = None,
    vmax: float | None = None,
    ax: Axes | None = None,
) -> Axes:
    """How one patch of an image, framed, divides its attention over it (GKA paper, Eq. 15).

    Args:
        weights: [E], in the order of ``graph.edge_index``: one head, or ``weights.mean(-1)`` over
            heads as in the paper.
        graph: a :func:`~graphattn.grid_window_graph`; or any graph with a token per patch, with or
            without a class token before them, with `grid`.
        patch: (row, column) of the patch. (The paper shows four: at a quarter, half and three
            quarters of the diagonal, and a quarter down, three quarters across.)
        grid: (height, width) of the image in patches, where the graph does not know them.
        vmax: the weight that gets the darkest colour; the largest drawn if None.
        ax: where to draw; new axes if None. A colour bar is put beside them.

    Returns:
        The matplotlib axes; patches without an edge are grey.

    Raises:
        ValueError: if the graph is no image, `patch` lies outside or `weights` do not fit.

    Example:
        >>> import torch, graphattn as ga
        >>> graph = ga.grid_window_graph(5, 5, radius=1)
        >>> x = torch.randn(25, 2, 8)
        >>> weights = ga.attention_weights(x, x, graph, sigma=2.0)
        >>> ax = ga.plot.patch_attention(weights.mean(-1), graph, (2, 2))
    """
    from matplotlib.patches import Rectangle

    height, width, lead = _grid(graph, grid)
    if not isinstance(patch, tuple | list) or len(patch) != 2:
        raise ValueError(f"patch must be (row, column), got {patch!r}")
    row, column = (as_int("patch", at, 0) for at in patch)
    if row >= height or column >= width:
        raise ValueError(f"patch must lie in the {height} x {width} image, got {tuple(patch)}")
    query = lead + row * width + column
    ax = _row_on_image(weights, graph, query, (height, width, lead), vmax, ax)
    frame = Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, color=COLOURS[1], linewidth=2)
    ax.add_patch(frame)
    return ax


def off_diagonal_attention(
    weights: Tensor,
    graph: TokenGraph,
    *,
    most_tokens: int = 50,
    colorbar: bool = True,
    ax: Axes | None = None,
) -> Axes:
    """Attention weights without what tokens give to themselves (GKA paper, Section 7.7).

    Where a token's own weight dominates, the others are all pale beside it; here they have the
    shades for themselves. The diagonal is grey, like all that is no edge.

    Args:
        weights: [E], in the order of ``graph.edge_index``: one head of one sequence.
        graph: the graph they belong to, square.
        most_tokens: more tokens than these are thinned out evenly, as in the paper.
        colorbar: whether to put a colour bar beside the axes.
        ax: where to draw; new axes if None.

    Returns:
        The matplotlib axes.

    Raises:
        ValueError: if `weights` do not fit the graph, or there is nothing off the diagonal.

    Example:
        >>> import torch, graphattn as ga
        >>> graph = ga.complete_graph(200)
        >>> x = torch.randn(200, 1, 8)
        >>> weights = ga.attention_weights(x, x, graph, sigma=1.0)
        >>> ax = ga.plot.off_diagonal_attention(weights[:, 0], graph)
        >>> ax.images[0].get_array().shape
        (50, 50)
    """
    weights = _one_per_edge(weights, graph)
    if graph.num_targets != graph.num_sources:
        raise ValueError(
            "graph must have the same tokens as sources and targets, "
            f"got {graph.num_targets} targets and {graph.num_sources} sources"
        )
    N = graph.num_tokens
    shown = min(N, as_int("most_tokens", most_tokens, 2))
    tokens = torch.linspace(0, N - 1, shown, dtype=torch.float64).round().long()
    place = torch.full((N,), -1)
    place[tokens] = torch.arange(shown)
    edges = place[graph.edge_index.cpu()]
    drawn = (edges >= 0).all(dim=0) & (edges[0] != edges[1])
    if not drawn.any():
        raise ValueError("graph must have edges between the tokens drawn, got none")
    part = from_edge_index(edges[:, drawn], shown)
    ax = attention_weights(weights[drawn], part, colorbar=colorbar, ax=ax)
    if shown < N:
        ticks = range(0, shown, max(1, shown // 6))
        ax.set_xticks(ticks, [str(int(tokens[t])) for t in ticks])
        ax.set_yticks(ticks, [str(int(tokens[t])) for t in ticks])
    return ax


def _per_head(name: str, values: Any, least: float | None = None) -> Tensor:
    """[layers, heads] of numbers > 0 (or >= `least`); NaN stands for no head."""
    if not isinstance(values, Tensor) or values.dim() != 2 or values.numel() == 0:
        got = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"{name} must be a tensor [layers, heads], got {got}")
    values = values.detach().cpu().float()
    low = values < least if least is not None else values <= 0
    if (low | values.isinf()).any() or values.isnan().all():
        allowed = "> 0" if least is None else f">= {least:g}"
        raise ValueError(f"{name} must hold finite numbers {allowed}")
    return values


def _lines_per_head(values: Tensor, label: str, ax: Axes | None) -> Axes:
    ax = axes_or_new(ax, 5, 3.2)
    for head, column in enumerate(values.T):
        colour = COLOURS[head % len(COLOURS)]
        style = ("-", "--", ":", "-.")[head // len(COLOURS) % 4]
        ax.plot(
            range(len(column)), column, color=colour, linestyle=style, linewidth=1.2,
            marker="o", markersize=2.5, label=f"head {head}",
        )  # fmt: skip
    ax.set(xlabel="layer", ylabel=label)
    _whole_ticks(ax, y=False)
    _legend(ax, values.shape[1])
    style_axes(ax)
    return ax


def _legend(ax: Axes, entries: int) -> None:
    if entries <= 13:  # more hide the lines
        ax.legend(frameon=False, fontsize=7, ncols=1 + (entries - 1) // 7)


def _image(ax: Axes, cells: Tensor, label: str, *, vmin: float | None, vmax: Any = None) -> None:
    """A heat map with a colour bar; NaN is grey."""
    from matplotlib.colors import LinearSegmentedColormap

    shades = LinearSegmentedColormap.from_list("shades", SHADES).with_extremes(bad="#e4e4e4")
    image = ax.imshow(cells.numpy(), cmap=shades, vmin=vmin, vmax=vmax, interpolation="nearest")
    colour_bar(image, label)


def _whole_ticks(ax: Axes, *, y: bool = True) -> None:
    from matplotlib.ticker import MaxNLocator

    for axis in (ax.xaxis, ax.yaxis) if y else (ax.xaxis,):
        axis.set_major_locator(MaxNLocator(integer=True))


def _one_per_edge(weights: Any, graph: Any) -> Tensor:
    """`weights` [E], one finite number >= 0 per edge."""
    if not isinstance(graph, TokenGraph):
        raise ValueError(f"graph must be a TokenGraph, got {type(graph).__name__}")
    if not isinstance(weights, Tensor) or weights.shape != (graph.num_edges,):
        got = list(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
        raise ValueError(
            f"weights must be a tensor of shape [{graph.num_edges}] (one per edge: pick a head, or "
            f"take the mean over heads), got {got}"
        )
    weights = weights.detach().cpu().float()
    if not (weights.isfinite() & (weights >= 0)).all():
        raise ValueError("weights must be finite numbers >= 0")
    return weights


def _grid(graph: Any, grid: tuple[int, int] | None) -> tuple[int, int, int]:
    """Height and width of the image, and the number of tokens before it (0 or 1)."""
    if not isinstance(graph, TokenGraph):
        raise ValueError(f"graph must be a TokenGraph, got {type(graph).__name__}")
    if grid is None:
        match graph.structure:
            case Grid(height, width, class_token=token):
                return height, width, int(token)
            case GridWindows(shape=(height, width), class_token=token):
                return height, width, int(token)
            case GridBlocks(height, width):
                return height, width, 0
        raise ValueError(
            "grid must be given as (height, width): only a graph over a grid knows its image, "
            f"got {graph}"
        )
    if not isinstance(grid, tuple | list) or len(grid) != 2:
        raise ValueError(f"grid must be (height, width), got {grid!r}")
    height, width = (as_int("grid", size, 1) for size in grid)
    lead = graph.num_sources - height * width
    if lead not in (0, 1) or graph.num_targets != graph.num_sources:
        raise ValueError(
            f"grid must have a patch per token, with or without a class token before them, got "
            f"{height} x {width} patches for {graph}"
        )
    return height, width, lead


def _row_on_image(
    weights: Any,
    graph: TokenGraph,
    query: int,
    image: tuple[int, int, int],
    vmax: float | None,
    ax: Axes | None,
) -> Axes:
    """The weights of one query over the patches."""
    weights = _one_per_edge(weights, graph)
    if vmax is not None:
        vmax = as_float("vmax", vmax, positive=True)
    height, width, lead = image
    source, target = graph.edge_index.cpu()
    row = torch.full((graph.num_sources,), torch.nan)
    row[source[target == query]] = weights[target == query]
    ax = axes_or_new(ax, 3.6, 3, square=True)
    _image(ax, row[lead:].view(height, width), "attention weight", vmin=0, vmax=vmax)
    ax.set(xlabel="column (patches)", ylabel="row (patches)")
    _whole_ticks(ax)
    style_axes(ax, frame=True)
    return ax

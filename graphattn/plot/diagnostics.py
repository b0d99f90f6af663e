"""Figures of diagnostics: bandwidths, sinks and ranks per layer, and attention on an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from graphattn.diagnostics import HiddenSpectra
from graphattn.graphs import TokenGraph, from_edge_index
from graphattn.graphs.arguments import as_choice, as_float, as_int
from graphattn.graphs.structures.grid_blocks import GridBlocks
from graphattn.graphs.structures.grid_windows import Grid, GridWindows
from graphattn.plot.drawing.style import (
    COLOURS,
    INK,
    SHADES,
    axes_or_new,
    colour_bar,
    integer_ticks,
    line_look,
    plain_legend,
    styled,
)
from graphattn.plot.matrices import EMPTY, attention_weights, checked_weights

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BANDWIDTH = "bandwidth σ (units of the features)"


def bandwidth_map(sigma: Tensor, *, ax: Axes | None = None) -> Axes:
    """Draw learned bandwidths as a heat map with a column per layer and a row per head.

    This is the figure of Section 7.3 of the GKA paper.

    Args:
        sigma: [layers, heads], the values of :func:`graphattn.diagnostics.bandwidths`; NaN is drawn
            grey (it stands for a head that a layer does not have).
        ax: where to draw; new axes if None. A colour bar is drawn next to them.

    Raises:
        ValueError: if `sigma` is not a matrix of numbers > 0.

    Example:
        >>> import torch, graphattn as ga
        >>> ax = ga.plot.bandwidth_map(torch.rand(12, 3) + 5)
        >>> ax.get_xlabel(), ax.get_ylabel()
        ('layer', 'head')
    """
    sigma = _per_head("sigma", sigma)
    ax = axes_or_new(ax, min(4.6, 1.5 + 0.3 * len(sigma)), max(2.8, 1.2 + 0.25 * sigma.shape[1]))
    _image(ax, sigma.T, BANDWIDTH, vmin=None)
    ax.set_aspect("auto")
    integer_ticks(ax.xaxis, ax.yaxis)
    return styled(ax, "layer", "head", frame=True)


def bandwidth_lines(sigma: Tensor, *, ax: Axes | None = None) -> Axes:
    """Draw learned bandwidths over the layers, one line per head (GKA paper, Section 7.3).

    Args:
        sigma: [layers, heads], the values of :func:`graphattn.diagnostics.bandwidths`.
        ax: where to draw; new axes if None.

    Raises:
        ValueError: if `sigma` is not a matrix of numbers > 0.

    Example:
        >>> import torch, graphattn as ga
        >>> ax = ga.plot.bandwidth_lines(torch.rand(12, 3) + 5)
        >>> len(ax.lines)
        3
    """
    return _lines_per_head(_per_head("sigma", sigma), BANDWIDTH, ax)


def sink_shares(values: Tensor, *, ax: Axes | None = None) -> Axes:
    """Draw the attention on one token over the layers: a line per head, a thick one for their mean.

    Args:
        values: [layers, heads] from 0 to 1, as :func:`graphattn.diagnostics.sinks_per_layer`
            returns them.
        ax: where to draw; new axes if None.

    Raises:
        ValueError: if `values` is not a matrix of numbers from 0 to 1.

    Example:
        >>> import torch, graphattn as ga
        >>> ax = ga.plot.sink_shares(torch.rand(12, 3))
        >>> ax.get_ylabel()
        'share of the attention on the token'
    """
    values = _per_head("values", values, least=0.0)
    if (values > 1 + 1e-4).any():
        raise ValueError(f"values must be shares from 0 to 1, got {values.nan_to_num().max():.3g}")
    ax = _lines_per_head(values, "share of the attention on the token", ax)
    mean = values.nanmean(dim=1)
    ax.plot(range(len(mean)), mean, color=INK, linewidth=2.4, label="mean")
    ax.set_ylim(-0.02, 1.02)
    _legend(ax, len(ax.lines))
    return ax


def effective_ranks(
    curves: Mapping[str, Tensor | Sequence[float]], *, ax: Axes | None = None
) -> Axes:
    """Draw the effective rank over the layers, one line per model or setting.

    Args:
        curves: for each name (shown in the legend) the values [layers] of
            :func:`graphattn.diagnostics.effective_rank_per_layer`.
        ax: where to draw; new axes if None.

    Raises:
        ValueError: if there is no curve, or one has no layers.

    Example:
        >>> import torch, graphattn as ga
        >>> ranks = {"trained": [9.0, 7.5, 6.0, 5.0], "weights disabled": [9.0, 5.0, 3.5, 3.0]}
        >>> ax = ga.plot.effective_ranks(ranks)
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['trained', 'weights disabled']
    """
    if not curves:
        raise ValueError("curves must have at least one curve, got none")
    ax = axes_or_new(ax, 4.6, 3.2)
    for i, (name, values) in enumerate(curves.items()):
        ranks = torch.as_tensor(values).detach().cpu()
        if ranks.dim() != 1 or len(ranks) == 0:
            raise ValueError(
                f"each of curves must have shape [layers], got {list(ranks.shape)} for {name!r}"
            )
        ax.plot(range(len(ranks)), ranks, marker="o", markersize=3, linewidth=1.6, **line_look(i))
    ax.set_ylim(bottom=0)
    integer_ticks(ax.xaxis)
    plain_legend(ax, ax.lines[-len(curves) :], list(curves))
    return styled(ax, "layer", "effective rank (dimensions)")


def class_token_attention(
    weights: Tensor,
    graph: TokenGraph,
    *,
    grid: tuple[int, int] | None = None,
    vmax: float | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw how the class token (token 0) divides its attention over an image (GKA paper, Eq. 14).

    Args:
        weights: [E], in the order of ``graph.edge_index``, of one head or the mean over heads.
        graph: a :func:`~graphattn.grid_window_graph` with a class token, or any graph of
            1 + height * width tokens if `grid` is given.
        grid: (height, width) of the image in patches; needed if the graph is not one over a grid.
        vmax: the weight that gets the darkest colour; the largest weight that is drawn if None.
        ax: where to draw; new axes if None. A colour bar is drawn next to them.

    Returns:
        The matplotlib axes; patches that the class token does not see are grey.

    Raises:
        ValueError: if the graph is not one over an image with a class token, or `weights` do not
            fit it.

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
        raise ValueError(
            "graph must have a class token before the patches of the image, got a graph without one"
        )
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
    """Draw how one patch of an image divides its attention over the image (GKA paper, Eq. 15).

    A frame marks the patch.

    Args:
        weights: [E], in the order of ``graph.edge_index``, of one head or, as in the paper, the
            mean over heads (``weights.mean(-1)``).
        graph: a :func:`~graphattn.grid_window_graph`, or, if `grid` is given, any graph with a
            token per patch and possibly a class token before the patches.
        patch: (row, column) of the patch. (The paper shows four patches: at a quarter, a half and
            three quarters of the diagonal, and at a quarter of the height and three quarters of the
            width.)
        grid: (height, width) of the image in patches; needed if the graph is not one over a grid.
        vmax: the weight that gets the darkest colour; the largest weight that is drawn if None.
        ax: where to draw; new axes if None. A colour bar is drawn next to them.

    Returns:
        The matplotlib axes; patches without an edge are grey.

    Raises:
        ValueError: if the graph is not one over an image, `patch` lies outside the image, or
            `weights` do not fit the graph.

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
        raise ValueError(
            f"patch must lie in the image of {height} x {width} patches, got {tuple(patch)}"
        )
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
    """Draw attention weights without those that tokens give to themselves (GKA paper, Section 7.7).

    If the weights that tokens give to themselves are much larger than the others, the others can
    hardly be told apart in :func:`attention_weights`. Here the colours are scaled to the others.
    The diagonal is grey, like every cell without an edge.

    Args:
        weights: [E], in the order of ``graph.edge_index``, of one head of one sequence.
        graph: the graph whose edges have these weights, with as many targets as sources.
        most_tokens: if the graph has more tokens than this number, only so many, at equal
            distances, are drawn, as in the paper.
        colorbar: whether to draw a colour bar next to the axes.
        ax: where to draw; new axes if None.

    Raises:
        ValueError: if `weights` do not fit the graph, or no edge off the diagonal is drawn.

    Example:
        >>> import torch, graphattn as ga
        >>> graph = ga.complete_graph(200)
        >>> x = torch.randn(200, 1, 8)
        >>> weights = ga.attention_weights(x, x, graph, sigma=1.0)
        >>> ax = ga.plot.off_diagonal_attention(weights[:, 0], graph)
        >>> ax.images[0].get_array().shape
        (50, 50)
    """
    weights = checked_weights(weights, graph)
    if graph.num_targets != graph.num_sources:
        raise ValueError(
            "graph must have the same tokens as sources and targets, "
            f"got {graph.num_targets} targets and {graph.num_sources} sources"
        )
    N = graph.num_tokens
    shown = min(N, as_int("most_tokens", most_tokens, 2))
    tokens = torch.linspace(0, N - 1, shown, dtype=torch.float64).round().long()
    position = torch.full((N,), -1)
    position[tokens] = torch.arange(shown)
    edges = position[graph.edge_index.cpu()]
    drawn = (edges >= 0).all(dim=0) & (edges[0] != edges[1])
    if not drawn.any():
        raise ValueError(
            "graph must have edges between different tokens that are drawn, got none (a larger "
            "most_tokens draws more tokens)"
        )
    part = from_edge_index(edges[:, drawn], shown)
    ax = attention_weights(weights[drawn], part, colorbar=colorbar, ax=ax)
    if shown < N:
        ticks = range(0, shown, max(1, shown // 6))
        ax.set_xticks(ticks, [str(int(tokens[t])) for t in ticks])
        ax.set_yticks(ticks, [str(int(tokens[t])) for t in ticks])
    return ax


def _per_head(name: str, values: Any, least: float | None = None) -> Tensor:
    """Check values [layers, heads]: numbers > 0 (or >= `least`), or NaN for a missing head."""
    if not isinstance(values, Tensor) or values.dim() != 2 or values.numel() == 0:
        got = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"{name} must be a tensor [layers, heads], got {got}")
    values = values.detach().cpu().float()
    low = values < least if least is not None else values <= 0
    if (low | values.isinf()).any() or values.isnan().all():
        allowed = "> 0" if least is None else f">= {least:g}"
        raise ValueError(
            f"{name} must be finite numbers {allowed} (NaN only where a layer has fewer heads)"
        )
    return values


def _lines_per_head(values: Tensor, label: str, ax: Axes | None) -> Axes:
    ax = axes_or_new(ax, 4.6, 3.2)
    for head, column in enumerate(values.T):
        ax.plot(
            range(len(column)), column, linewidth=1.2, marker="o", markersize=2.5,
            label=f"head {head}", **line_look(head),
        )  # fmt: skip
    integer_ticks(ax.xaxis)
    _legend(ax, values.shape[1])
    return styled(ax, "layer", label)


def _legend(ax: Axes, entries: int) -> None:
    if entries <= 13:  # A legend with more entries would cover the lines.
        frame = {"framealpha": 0.8, "edgecolor": "none"}  # lines may lie behind it
        ax.legend(fontsize=8, ncols=1 + (entries - 1) // 7, **frame)


def _image(ax: Axes, cells: Tensor, label: str, *, vmin: float | None, vmax: Any = None) -> None:
    """Draw a heat map with a colour bar; NaN is grey."""
    from matplotlib.colors import LinearSegmentedColormap

    shades = LinearSegmentedColormap.from_list("shades", SHADES).with_extremes(bad=EMPTY)
    image = ax.imshow(cells.numpy(), cmap=shades, vmin=vmin, vmax=vmax, interpolation="nearest")
    colour_bar(image, label)


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
            "grid must be given as (height, width) for a graph that is not one over a grid, "
            f"got grid = None and {graph}"
        )
    if not isinstance(grid, tuple | list) or len(grid) != 2:
        raise ValueError(f"grid must be (height, width), got {grid!r}")
    height, width = (as_int("grid", size, 1) for size in grid)
    lead = graph.num_sources - height * width
    if lead not in (0, 1) or graph.num_targets != graph.num_sources:
        raise ValueError(
            f"grid must have one patch per token (a class token before the patches is not "
            f"counted), got {height} x {width} patches for {graph}"
        )
    return height, width, lead


def _row_on_image(
    weights: Any, graph: TokenGraph, query: int, image: tuple[int, int, int], vmax: Any, ax: Any
) -> Axes:
    """Draw the weights of one query over the patches."""
    weights = checked_weights(weights, graph)
    if vmax is not None:
        vmax = as_float("vmax", vmax, positive=True)
    height, width, lead = image
    source, target = graph.edge_index.cpu()
    row = torch.full((graph.num_sources,), torch.nan)
    row[source[target == query]] = weights[target == query].float()
    ax = axes_or_new(ax, 3.6, 3, square=True)
    _image(ax, row[lead:].view(height, width), "attention weight", vmin=0, vmax=vmax)
    integer_ticks(ax.xaxis, ax.yaxis)
    return styled(ax, "column (patches)", "row (patches)", frame=True)


def attention_ablation(
    spectra: Mapping[str, HiddenSpectra],
    *,
    measure: Literal["participation_ratio", "leading_share"] = "participation_ratio",
    ax: Axes | None = None,
) -> Axes:
    """Draw how the hidden states change when the attention of one block is disabled.

    The heat map has one row per disabled block and one column per state. A cell shows the
    difference from the model with all its attention. On the left of the diagonal the difference is
    always 0, because a block cannot change the states before it.

    Args:
        spectra: the result of :func:`graphattn.diagnostics.spectra_without_attention`.
        measure: "participation_ratio" (the effective number of dimensions) or "leading_share".
        ax: where to draw; new axes if None. A colour bar is drawn next to them.

    Raises:
        ValueError: if `spectra` lacks "none" or a block, or the measure is unknown.

    Example:
        >>> import torch, graphattn as ga
        >>> model = ga.models.SequenceEncoder(11, 16, depth=3, heads=4)
        >>> tokens = torch.randint(11, (2, 20))
        >>> spectra = ga.diagnostics.spectra_without_attention(model, tokens)
        >>> ga.plot.attention_ablation(spectra).images[0].get_array().shape
        (3, 4)
    """
    as_choice("measure", measure, ("participation_ratio", "leading_share"))
    blocks = [name for name in spectra if name != "none"]
    if "none" not in spectra or not blocks:
        raise ValueError(
            f'spectra must have the key "none" and at least one block, got the keys {list(spectra)}'
        )
    whole = getattr(spectra["none"], measure)
    change = torch.stack([getattr(spectra[name], measure) - whole for name in blocks])
    ax = axes_or_new(ax, min(4.6, 1.8 + 0.4 * change.shape[1]), max(2.6, 1.2 + 0.3 * len(blocks)))
    limit = float(change.abs().nan_to_num().max()) or 1.0
    image = ax.imshow(
        change.numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto",
        interpolation="nearest",
    )  # fmt: skip
    label = "dimensions" if measure == "participation_ratio" else "leading share"
    colour_bar(image, f"change of {label}")
    ax.set_yticks(range(len(blocks)), [str(i + 1) for i in range(len(blocks))])
    integer_ticks(ax.xaxis)
    return styled(ax, "state after block (0: input)", "attention disabled in block", frame=True)

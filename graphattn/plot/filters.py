"""Figure of what repeated consensus steps leave of every frequency of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from graphattn.graphs import TokenGraph
from graphattn.graphs.arguments import as_float, as_int
from graphattn.plot.drawing.style import COLOURS, axes_or_new, style_axes
from graphattn.spectral import laplacian, max_eigenvalue

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_EIGENVALUES = 1024  # Up to this number of tokens, a dense spectrum is computed and drawn.


def filter_response(
    graph: TokenGraph,
    step_size: float | None = None,
    *,
    steps: Sequence[int] = (1, 4, 16, 64),
    edge_weight: Tensor | None = None,
    ax: Axes | None = None,
) -> Axes:
    r"""Draw the factor by which n consensus steps multiply a mode, over its eigenvalue lambda.

    One step is :math:`H = I - 2 \eta L_{sym}` (consensus paper, Eq. 7 and 9), so n steps multiply a
    mode by :math:`(1 - 2 \eta \lambda)^n`. Dots mark the eigenvalues of the graph (if it has at
    most 1,024 tokens). The constant mode, lambda = 0, is not changed. With a step size up to
    :func:`graphattn.spectral.max_step_size` no factor is negative.

    Args:
        graph: a graph with as many targets as sources.
        step_size: eta; if None, :func:`graphattn.spectral.max_step_size`, the largest step size
            that changes the sign of no mode.
        steps: numbers of steps n, one curve for each.
        edge_weight: [E], one positive number per edge; all 1 if None.
        ax: where to draw; new axes if None.

    Returns:
        The matplotlib axes.

    Raises:
        ValueError: if the step size is <= 0, a number of steps is < 1, or
            :func:`graphattn.spectral.laplacian` does not accept the weights.

    Example:
        >>> import graphattn as ga
        >>> ax = ga.plot.filter_response(ga.window_path_graph(64, window=2), steps=[1, 8])
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['1 step', '8 steps']
    """
    if not isinstance(steps, Sequence) or len(steps) == 0:
        raise ValueError(f"steps must be a non-empty sequence of integers >= 1, got {steps!r}")
    counts = [as_int("steps", n, 1) for n in steps]
    if edge_weight is not None:
        edge_weight = edge_weight.detach()
    top = max_eigenvalue(graph, edge_weight)
    if step_size is None:
        eta = 1 / (2 * top) if top > 0 else 1.0  # Without edges every step size is safe.
    else:
        eta = as_float("step_size", step_size, positive=True)
    ax = axes_or_new(ax, 5, 3.2)
    grid = torch.linspace(0, top, 400, dtype=torch.float64)
    eigenvalues = None
    if graph.num_tokens <= MOST_EIGENVALUES:
        dense = laplacian(graph, edge_weight, layout="dense").cpu().double()
        eigenvalues = torch.linalg.eigvalsh(dense).clamp_min(0)
    for i, n in enumerate(counts):
        colour = COLOURS[i % len(COLOURS)]
        label = "1 step" if n == 1 else f"{n:,} steps"
        ax.plot(grid, (1 - 2 * eta * grid) ** n, color=colour, linewidth=1.6, label=label)
        if eigenvalues is not None:
            factors = (1 - 2 * eta * eigenvalues) ** n
            ax.plot(eigenvalues, factors, ".", color=colour, markersize=6, alpha=0.7)
    ax.axhline(0, color="#999999", linewidth=0.6)
    ax.set_xlabel("eigenvalue λ (smooth → rough)")
    ax.set_ylabel("share that is left")
    ax.legend(frameon=False, fontsize=8, title=f"η = {eta:.3g}", title_fontsize=8)
    style_axes(ax)
    return ax

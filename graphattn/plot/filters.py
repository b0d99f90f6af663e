"""Figures of the frequencies of a graph under repeated consensus steps."""

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

MOST_EIGENVALUES = 1024  # a dense spectrum is drawn up to so many tokens


def filter_response(
    graph: TokenGraph,
    step_size: float | None = None,
    *,
    steps: Sequence[int] = (1, 4, 16, 64),
    edge_weight: Tensor | None = None,
    ax: Axes | None = None,
) -> Axes:
    r"""Plot the rest of a mode of eigenvalue lambda after n consensus steps.

    One step is :math:`H = I - 2 \eta L_{sym}` (consensus paper, Eq. 7 and 9), so a mode keeps
    the share :math:`(1 - 2 \eta \lambda)^n`. Dots are the eigenvalues the graph has (up to 1,024
    tokens). The constant mode, lambda = 0, stays; with a safe step nothing falls below 0.

    Args:
        graph: square.
        step_size: eta; the largest that changes no sign, :func:`graphattn.spectral.max_step_size`,
            if None.
        steps: numbers of steps n, one curve each.
        edge_weight: [E], one positive number per edge; all 1 if None.
        ax: where to draw; new axes if None.

    Returns:
        The matplotlib axes.

    Raises:
        ValueError: for a step size <= 0, steps < 1, or weights that
            :func:`graphattn.spectral.laplacian` refuses.

    Example:
        >>> import graphattn as ga
        >>> ax = ga.plot.filter_response(ga.window_path_graph(64, window=2), steps=[1, 8])
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['1 step', '8 steps']
    """
    if not isinstance(steps, Sequence) or len(steps) == 0:
        raise ValueError(f"steps must be a sequence of numbers of steps, got {steps!r}")
    counts = [as_int("steps", n, 1) for n in steps]
    if edge_weight is not None:
        edge_weight = edge_weight.detach()
    top = max_eigenvalue(graph, edge_weight)
    if step_size is None:
        eta = 1 / (2 * top) if top > 0 else 1.0  # without edges every step is safe
    else:
        eta = as_float("step_size", step_size, positive=True)
    ax = axes_or_new(ax, 5, 3.2)
    at = torch.linspace(0, top, 400, dtype=torch.float64)
    own = None
    if graph.num_tokens <= MOST_EIGENVALUES:
        dense = laplacian(graph, edge_weight, layout="dense").cpu().double()
        own = torch.linalg.eigvalsh(dense).clamp_min(0)
    for i, n in enumerate(counts):
        colour = COLOURS[i % len(COLOURS)]
        label = "1 step" if n == 1 else f"{n:,} steps"
        ax.plot(at, (1 - 2 * eta * at) ** n, color=colour, linewidth=1.6, label=label)
        if own is not None:
            ax.plot(own, (1 - 2 * eta * own) ** n, ".", color=colour, markersize=6, alpha=0.7)
    ax.axhline(0, color="#999999", linewidth=0.6)
    ax.set_xlabel("eigenvalue λ (smooth → rough)")
    ax.set_ylabel("share that is left")
    ax.legend(frameon=False, fontsize=8, title=f"η = {eta:.3g}", title_fontsize=8)
    style_axes(ax)
    return ax

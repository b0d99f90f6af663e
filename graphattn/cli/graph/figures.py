"""Figures of a graph: its adjacency matrix, its spectrum, and the effect of consensus steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import graphattn as ga
from graphattn.cli import report
from graphattn.plot.drawing.style import page_figure
from graphattn.plot.filters import MOST_EIGENVALUES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Panel = Callable[[ga.TokenGraph, float | None, "Axes"], None]


def overview(graph: ga.TokenGraph, title: str, step_size: float | None) -> Figure:
    """Draw all panels side by side."""
    panels: list[Panel] = [adjacency_panel, spectrum_panel, filter_panel]
    if graph.num_tokens > MOST_EIGENVALUES:
        panels.remove(spectrum_panel)
    figure = page_figure(3.5, 3.8 * len(panels))
    figure.get_layout_engine().set(wspace=0.06)  # type: ignore[union-attr, call-arg]
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for panel, ax in zip(panels, axes, strict=True):
        panel(graph, step_size, ax)
    figure.suptitle(title, fontsize=9)
    return figure


def adjacency_panel(graph: ga.TokenGraph, step_size: float | None, ax: Axes) -> None:
    """Draw the adjacency matrix."""
    ga.plot.adjacency(graph, ax=ax)


def spectrum_panel(graph: ga.TokenGraph, step_size: float | None, ax: Axes) -> None:
    """Draw all eigenvalues in order, and the factors of their modes per step."""
    ga.plot.laplacian_spectrum(graph, step_size, ax=ax)


def filter_panel(graph: ga.TokenGraph, step_size: float | None, ax: Axes) -> None:
    """Draw the effect of several steps on every frequency."""
    ga.plot.filter_response(graph, step_size, ax=ax)
    low, high = ax.get_ylim()
    ax.set_ylim(max(low, -1.2), min(high, 1.2))  # a step that is too large would exceed the axis


def separate(graph: ga.TokenGraph, step_size: float | None) -> list[report.Figure]:
    """Draw every panel as a figure of its own, for a report."""
    made = [report.Figure(*_ADJACENCY, _single(adjacency_panel, graph, step_size, 3.8))]
    if graph.num_tokens <= MOST_EIGENVALUES:
        made.append(report.Figure(*_SPECTRUM, _single(spectrum_panel, graph, step_size, 2.8)))
    made.append(report.Figure(*_FILTER, _single(filter_panel, graph, step_size, 2.8)))
    return made


_ADJACENCY = (
    "Which tokens see which",
    "Row i is what token i sees (blue); dark on the diagonal: it sees itself. With a colour bar, a "
    "cell stands for a square of pairs of tokens, and its shade for the share of them that are "
    "edges: one edge is enough to colour it.",
)
_SPECTRUM = (
    "The spectrum",
    "Eigenvalues of the Laplacian of the symmetrised graph, smallest first. The scale on the "
    "right is the same axis as a filter: the factor of a mode in one consensus step, 1 - 2 η λ.",
)
_FILTER = (
    "Effect of repeated steps",
    "The factor (1 - 2 η λ)^n of a mode after n consensus steps with R = I (consensus paper, Eq. "
    "7 and 9).",
)


def _single(panel: Panel, graph: ga.TokenGraph, step_size: float | None, height: float) -> Figure:
    figure = page_figure(height)
    panel(graph, step_size, figure.add_subplot())
    return figure

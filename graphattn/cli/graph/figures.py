"""Figures of a graph: its adjacency matrix, its spectrum, and the effect of consensus steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import graphattn as ga
from graphattn.cli import report
from graphattn.plot.drawing.style import page_figure
from graphattn.plot.spectra import MOST_EIGENVALUES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Panel(NamedTuple):
    """A figure of a graph: its texts, its height in a report, and how it is drawn."""

    title: str
    caption: str
    height: float
    draw: Callable[[ga.TokenGraph, float | None, Axes], object]


def _draw_filter(graph: ga.TokenGraph, step_size: float | None, ax: Axes) -> None:
    ga.plot.filter_response(graph, step_size, ax=ax)
    low, high = ax.get_ylim()
    ax.set_ylim(max(low, -1.2), min(high, 1.2))  # a step that is too large would exceed the axis


ADJACENCY = Panel(
    "Which tokens see which",
    "Row i is what token i sees (blue); dark on the diagonal: it sees itself. With a colour bar, a "
    "cell stands for a square of pairs of tokens, and its shade for the share of them that are "
    "edges: one edge is enough to colour it.",
    3.8,
    lambda graph, _, ax: ga.plot.adjacency(graph, ax=ax),
)
SPECTRUM = Panel(
    "The spectrum",
    "Eigenvalues of the Laplacian of the symmetrised graph, smallest first. The scale on the "
    "right is the same axis as a filter: the factor of a mode in one consensus step, 1 - 2 η λ.",
    2.8,
    lambda graph, step_size, ax: ga.plot.laplacian_spectrum(graph, step_size, ax=ax),
)
FILTER = Panel(
    "Effect of repeated steps",
    "The factor (1 - 2 η λ)^n of a mode after n consensus steps with R = I (consensus paper, Eq. "
    "7 and 9).",
    2.8,
    _draw_filter,
)


def _panels(graph: ga.TokenGraph) -> list[Panel]:
    has_spectrum = graph.num_tokens <= MOST_EIGENVALUES
    return [ADJACENCY, SPECTRUM, FILTER] if has_spectrum else [ADJACENCY, FILTER]


def overview(graph: ga.TokenGraph, title: str, step_size: float | None) -> Figure:
    """Draw all panels side by side."""
    panels = _panels(graph)
    figure = page_figure(3.5, 3.8 * len(panels))
    figure.get_layout_engine().set(wspace=0.06)  # type: ignore[union-attr, call-arg]
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for panel, ax in zip(panels, axes, strict=True):
        panel.draw(graph, step_size, ax)
    figure.suptitle(title, fontsize=9)
    return figure


def separate(graph: ga.TokenGraph, step_size: float | None) -> list[report.Figure]:
    """Draw every panel as a figure of its own, for a report."""
    figures = []
    for panel in _panels(graph):
        figure = page_figure(panel.height)
        panel.draw(graph, step_size, figure.add_subplot())
        figures.append(report.Figure(panel.title, panel.caption, figure))
    return figures

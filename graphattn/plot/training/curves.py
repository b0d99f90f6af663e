"""Figure of training losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from graphattn.plot.drawing.style import COLOURS, axes_or_new, plain_legend, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def loss_curves(
    curves: Mapping[str, Sequence[tuple[float, float | Tensor]]],
    *,
    reference: Mapping[str, float] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw losses over training steps, one line per model, with the names in the legend.

    Args:
        curves: for each name of a model its (step, loss) points; a loss is a number or a tensor
            with one number.
        reference: for each name a loss to compare with, such as that of guessing by frequency;
            drawn as a dashed line.
        ax: where to draw; new axes if None.

    Returns:
        The matplotlib axes.

    Raises:
        ValueError: if there is no curve, or a curve has no points.

    Example:
        >>> import graphattn as ga
        >>> ax = ga.plot.loss_curves({"attention": [(0, 4.1), (10, 3.2)], "mix": [(0, 4.0)]})
        >>> [line.get_label() for line in ax.lines]
        ['attention', 'mix']
    """
    if not curves:
        raise ValueError("curves must have at least one curve, got none")
    for name, points in curves.items():
        if len(points) == 0:
            raise ValueError(f"each of curves must have points, got none for {name!r}")
    ax = axes_or_new(ax, 5.5, 3.4)
    for i, (name, points) in enumerate(curves.items()):
        ax.plot(
            [step for step, _ in points],
            [loss.item() if isinstance(loss, Tensor) else loss for _, loss in points],
            marker="o" if len(points) < 30 else None,
            markersize=3,
            linewidth=1.6,
            color=COLOURS[i % len(COLOURS)],
            label=name,
        )
    for name, loss in (reference or {}).items():
        ax.axhline(loss, color="#777777", linewidth=1, linestyle=(0, (4, 3)), label=name)
    ax.set_xlabel("training step")
    ax.set_ylabel("loss (nats per token)")
    names = [*curves, *(reference or {})]
    plain_legend(ax, ax.lines[-len(names) :], names)
    style_axes(ax)
    return ax

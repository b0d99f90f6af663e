"""Figure of the losses of a sweep over learning rates."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from graphattn.plot.drawing.style import COLOURS, INK, axes_or_new, line_look, plain_legend, styled
from graphattn.train.sweeps.results import losses_by_rate, summarize_sweep, variant_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Mixers have different markers as well as colours, so that they can be told apart in grey.
MARKERS = ("o", "s", "^", "D", "v", "P")


def sweep_curves(rows: Sequence[Mapping[str, Any]], *, ax: Axes | None = None) -> Axes:
    """Draw the loss over the learning rate, one curve per mixer (and per options of a grid).

    Every finished trial is a point, the curve is the mean over seeds, and a ring marks its lowest
    value. A learning rate at which a trial diverged has no mean, so the curve has a gap there.
    Diverged trials are crosses above the curves.

    Args:
        rows: the result of :func:`graphattn.train.read_sweep`; trials without a result yet are left
            out.
        ax: where to draw; new axes if None.

    Raises:
        ValueError: if no trial has a result.

    Source:
        Consensus, Figures 2 to 4.

    Example:
        >>> import graphattn as ga
        >>> losses = {"dot": (3.6, 2.6, 2.3, 3.9), "mix": (3.6, 2.7, 2.2, 2.6)}
        >>> rows = [
        ...     {"mixer": mixer, "lr": lr, "seed": 0, "status": "finished", "loss": loss}
        ...     for mixer, column in losses.items()
        ...     for lr, loss in zip((1e-4, 1e-3, 1e-2, 1e-1), column)
        ... ]
        >>> ax = ga.plot.sweep_curves(rows)
        >>> [text.get_text() for text in ax.get_legend().get_texts()], ax.get_xscale()
        (['dot', 'mix'], 'log')
    """
    done = [dict(row) for row in rows if row["status"] in ("finished", "diverged")]
    if not done:
        raise ValueError("rows must have at least one trial with a result, got none")
    ax = axes_or_new(ax, 4.6, 3.4)
    ax.set_xscale("log")
    summaries = summarize_sweep(done)
    for i, summary in enumerate(summaries):
        trials = [row for row in done if variant_of(row) == summary.mixer]
        look, marker = line_look(i), MARKERS[i % len(MARKERS)]
        colour = look["color"]
        points = [(row["lr"], row["loss"]) for row in trials if row["status"] == "finished"]
        by_rate = losses_by_rate(trials)
        means = [statistics.fmean(x) if x else math.nan for x in by_rate.values()]
        ax.plot(
            list(by_rate), means, linewidth=1.6, marker=marker, markersize=3.5,
            label=summary.mixer, **look,
        )  # fmt: skip
        if len(points) > len(by_rate):
            rates, losses = zip(*points, strict=True)
            ax.scatter(rates, losses, s=9, alpha=0.45, linewidths=0, color=colour, marker=marker)
        if summary.best_lr is not None and summary.loss is not None:
            ax.plot(
                summary.best_lr, summary.loss, "o", markersize=9, fillstyle="none",
                color=colour, markeredgewidth=1,
            )  # fmt: skip
    _draw_diverged(ax, done, [summary.mixer for summary in summaries])
    lines = [line for line in ax.lines if not str(line.get_label()).startswith("_child")]
    names = [summary.mixer for summary in summaries]
    plain_legend(ax, lines[: len(names)], names)
    return styled(ax, "learning rate", "validation loss (nats)")


def _draw_diverged(ax: Axes, rows: list[dict[str, Any]], names: list[str]) -> None:
    """Draw a cross above the curves for every diverged trial, with one line of them per mixer."""
    diverged = [row for row in rows if row["status"] == "diverged"]
    if not diverged:
        return
    low, high = ax.get_ylim()
    shown = [name for name in names if any(variant_of(row) == name for row in diverged)]
    step = 0.055 * (high - low)
    ax.axhline(high, color="#999999", linewidth=0.6)
    for line, name in enumerate(shown):
        rates = [row["lr"] for row in diverged if variant_of(row) == name]
        i = names.index(name)
        ax.plot(
            rates, [high + (line + 0.75) * step] * len(rates), "x", markersize=5,
            markeredgewidth=1.4, color=COLOURS[i % len(COLOURS)],
        )  # fmt: skip
    ax.set_ylim(low, high + (len(shown) + 0.5) * step)
    ax.annotate(
        "diverged", (0, high), (3, 2), xycoords=("axes fraction", "data"),
        textcoords="offset points", fontsize=8, color=INK,
    )  # fmt: skip

"""Figures of plans of communication: who sends how much to whom, and what more ranks cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor

from graphattn.distributed import CommunicationPlan
from graphattn.plot.drawing.style import (
    COLOURS,
    INK,
    SHADES,
    axes_or_new,
    colour_bar,
    line_look,
    styled,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_RANKS = 64  # of a matrix
ALL_GATHER: dict[str, Any] = {"linestyle": "--", "color": INK, "linewidth": 0.8, "zorder": 3}


def communication_plan(
    plan: CommunicationPlan | Sequence[CommunicationPlan], *, ax: Axes | None = None
) -> Axes:
    """Draw the rows that ranks send each other in one forward pass of a layer.

    A plan for at most 64 ranks is drawn as a matrix: row r shows how many rows rank r receives from
    every other rank. A plan for more ranks is drawn as a line: how many rows every rank receives.
    Several plans are drawn against their numbers of ranks: how many rows the busiest rank receives,
    with one line for plans whose tokens see equally many tokens on average. Dashed lines show an
    all-gather, in which every rank receives all rows that it does not own.

    Args:
        plan: what :func:`graphattn.distributed.plan` returns, or a sequence of such plans.
        ax: where to draw; new axes if None.

    Raises:
        ValueError: if `plan` is neither a plan nor a sequence of plans, or is an empty sequence.

    Example:
        >>> import graphattn as ga
        >>> graph = ga.causal_window_graph(4096, window=256)
        >>> ax = ga.plot.communication_plan(ga.distributed.plan(graph, ranks=8))
        >>> ax.get_xlabel(), ax.get_ylabel()
        ('rank that sends', 'rank that receives')
    """
    plans = [plan] if isinstance(plan, CommunicationPlan) else plan
    if not isinstance(plans, Sequence) or not plans:
        raise ValueError(f"plan must be a plan or a sequence of plans, got {plan!r}")
    for one in plans:
        if not isinstance(one, CommunicationPlan):
            raise ValueError(f"plan must have plans only, got {type(one).__name__}")
    if len(plans) > 1:
        return _lines(plans, ax)
    return (_matrix if plans[0].ranks <= MOST_RANKS else _profile)(plans[0], ax)


def _matrix(plan: CommunicationPlan, ax: Axes | None) -> Axes:
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.ticker import MaxNLocator

    R = plan.ranks
    rows = numpy.zeros((R, R))
    for receiver in range(R):
        for sender, runs in plan.pairs(receiver):
            rows[receiver, sender] = sum(stop - start for start, stop in runs)
    ax = axes_or_new(ax, 4.2, 3.6, square=True)
    shades = LinearSegmentedColormap.from_list("rows", SHADES)
    image = ax.imshow(rows, cmap=shades, vmin=0, vmax=max(rows.max(), 1))
    bar = colour_bar(image, "rows")
    bar.ax.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    if R <= 8:
        size = 8 if rows.max() < 100_000 else 6
        for receiver, sender in zip(*rows.nonzero(), strict=True):
            count = rows[receiver, sender]
            colour = "white" if count > rows.max() / 2 else INK
            text = f"{count:,.0f}"
            ax.text(sender, receiver, text, ha="center", va="center", color=colour, fontsize=size)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator("auto", integer=True))
    ax.set_title("rows that ranks send each other", color=INK, fontsize=9)
    return styled(ax, "rank that sends", "rank that receives", frame=True)


def _profile(plan: CommunicationPlan, ax: Axes | None) -> Axes:
    ax = axes_or_new(ax, 4.6, 3.4)
    ax.plot(_gathered(plan).tolist(), label="all-gather", **ALL_GATHER)
    ax.plot(plan.received_rows.tolist(), color=COLOURS[0], linewidth=1.4, label="this plan")
    return _finish(ax, "rank", "rows that it receives", int(_gathered(plan).max()))


def _lines(plans: Sequence[CommunicationPlan], ax: Axes | None) -> Axes:
    ax = axes_or_new(ax, 4.6, 3.8)
    lines: dict[str, dict[int, int]] = {}
    gathered: dict[str, dict[int, int]] = {}
    for plan in sorted(plans, key=lambda one: one.ranks):
        seen = plan.graph.num_edges / plan.graph.num_targets
        name = f"a token sees {seen:,.0f} tokens" + (", both move" * (plan.moves == "both"))
        lines.setdefault(name, {})[plan.ranks] = int(plan.received_rows.max())
        name = f"all-gather of {plan.graph.num_sources:,} rows"
        gathered.setdefault(name, {})[plan.ranks] = int(_gathered(plan).max())
    for number, (name, rows) in enumerate(lines.items()):
        look = line_look(number)
        ax.plot(*zip(*rows.items(), strict=True), marker="o", markersize=4, label=name, **look)
    for name, rows in gathered.items():
        ax.plot(*zip(*rows.items(), strict=True), label=name, **ALL_GATHER)
    ax.set_xscale("log", base=2)
    ticks = sorted({plan.ranks for plan in plans})[:: 1 + len({p.ranks for p in plans}) // 9]
    ax.set_xticks(ticks, [f"{ranks:,}" for ranks in ticks])
    most = max(max(rows.values()) for rows in gathered.values())
    return _finish(ax, "number of ranks", "rows that the busiest rank receives", most)


def _gathered(plan: CommunicationPlan) -> Tensor:
    """Return how many rows every rank receives in an all-gather: bytes of rows of one byte."""
    return plan.all_gather_bytes(torch.int8, 1)


def _finish(ax: Axes, xlabel: str, ylabel: str, most: int) -> Axes:
    ax.set_yscale("symlog", linthresh=1)  # like a logarithm, and there may be 0 rows
    ax.set_ylim(0, 3 * max(most, 1))
    ax.minorticks_off()
    ax.grid(color="#eeeeee", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), frameon=False, fontsize=8)
    return styled(ax, xlabel, ylabel)

"""Figures of the results of `graphattn bench`: ratios to graphattn, and growth with N tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy

from graphattn.graphs.arguments import as_choice
from graphattn.plot.drawing.style import COLOURS, INK, axes_or_new, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Iterable[Mapping[str, Any]]
COLOUR = {"forward": COLOURS[0], "forward + backward": COLOURS[1]}
MARKER = {"forward": "o", "forward + backward": "D"}


def benchmark_ratios(rows: Rows, *, ax: Axes | None = None) -> Axes:
    """Draw the time of each contender divided by the time of graphattn, for each case.

    A point on the right of the line at 1 is slower than graphattn, a point on the left is faster.
    The ratios are written at the right edge.

    Args:
        rows: the "rows" of a file that `graphattn bench --json` has written; rows without a ratio
            are left out.
        ax: where to draw; new axes if None, whose height fits the number of rows.

    Raises:
        ValueError: if no row has a ratio to graphattn.

    Example:
        >>> import graphattn as ga
        >>> rows = [
        ...     {"case": case, "contender": contender, "passes": passes, "ratio": ratio}
        ...     for case, contender, passes, ratio in (
        ...         ("window", "index_add", "forward", 9.0),
        ...         ("window", "index_add", "forward + backward", 6.0),
        ...         ("window", "compiled", "forward", 0.7),
        ...         ("knn", "index_add", "forward", 12.0),
        ...     )
        ... ]
        >>> ax = ga.plot.benchmark_ratios(rows)
        >>> [tick.get_text() for tick in ax.get_yticklabels()]
        ['window', 'index_add', 'compiled', 'knn', 'index_add']
    """
    ratios: dict[str, dict[str, dict[str, float]]] = {}  # case -> contender -> passes -> ratio
    for row in rows:
        if row["ratio"] is not None and row["contender"] != "graphattn":
            case = ratios.setdefault(row["case"], {})
            case.setdefault(row["contender"], {})[row["passes"]] = row["ratio"]
    if not ratios:
        raise ValueError("rows must have at least one ratio to graphattn, got none")

    labels = [line for case, contenders in ratios.items() for line in (case, *contenders)]
    ax = axes_or_new(ax, 4.8, 0.9 + 0.21 * len(labels))
    is_case: list[bool] = []
    for contenders in ratios.values():
        is_case.append(True)
        for of_passes in contenders.values():
            y = len(is_case)
            is_case.append(False)
            ax.axhline(y, color="#eeeeee", linewidth=0.8, zorder=0)
            for passes, ratio in of_passes.items():
                ax.plot(ratio, y, MARKER[passes], color=COLOUR[passes], markersize=4.5, alpha=0.9)
                ax.annotate(
                    f"{ratio:,.1f}x" if ratio >= 1 else f"{ratio:.2g}x",
                    xy=(1, y),
                    xycoords=ax.get_yaxis_transform(),
                    xytext=(36 * (1 + list(COLOUR).index(passes)), 0),
                    textcoords="offset points",
                    va="center",
                    ha="right",
                    fontsize=8,
                    color=COLOUR[passes],
                    annotation_clip=False,
                )
    ax.axvline(1, color=INK, linewidth=1)
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter("{x:,g}")
    low, high = ax.get_xlim()
    ax.set_xlim(min(low, 0.8), max(high, 1.25))
    ax.set_ylim(len(labels) - 0.4, -0.6)
    ax.set_yticks(range(len(labels)), labels, parse_math=False)
    for tick, bold in zip(ax.get_yticklabels(), is_case, strict=True):
        tick.set_fontweight("bold" if bold else "normal")
    ax.set_xlabel("time of the contender / time of graphattn\n(right of 1: graphattn is faster)")
    drawn = {p for case in ratios.values() for of_passes in case.values() for p in of_passes}
    shown = [passes for passes in COLOUR if passes in drawn]
    ax.legend(
        [ax.plot([], [], MARKER[p], color=COLOUR[p], markersize=4.5)[0] for p in shown],
        shown,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=len(shown),
        frameon=False,
        fontsize=8,
    )
    styled(ax)
    ax.tick_params(axis="y", length=0)
    return ax


def benchmark_scaling(rows: Rows, *, quantity: str = "time", ax: Axes | None = None) -> Axes:
    """Draw time or peak memory against the number of tokens, on two logarithmic axes.

    A straight line of slope p means growth as N^p; the legend gives the p of a least-squares fit
    over all lengths. A linear cost has p = 1; attention over all pairs of tokens has p = 2.

    Args:
        rows: the "rows" of a file that `graphattn bench scaling --json` has written; a case with
            fewer than two lengths is left out.
        quantity: "time" (median, in ms) or "memory" (peak without the inputs, in MB).
        ax: where to draw; new axes if None.

    Raises:
        ValueError: if `quantity` is unknown, or no case has two lengths.

    Example:
        >>> import graphattn as ga
        >>> rows = [
        ...     {"case": "window", "passes": "forward", "size": {"tokens": n}, "median": 1e-6 * n}
        ...     for n in (1024, 2048, 4096)
        ... ]
        >>> ax = ga.plot.benchmark_scaling(rows)
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['window, forward: $N^{1.00}$']
    """
    from matplotlib.ticker import LogLocator

    as_choice("quantity", quantity, ("time", "memory"))
    lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in rows:
        number = row["median"] * 1e3 if quantity == "time" else (row["peak"] or 0) / 1e6
        if number > 0:
            points = lines.setdefault((row["case"], row["passes"]), [])
            points.append((row["size"]["tokens"], number))
    lines = {key: sorted(set(p)) for key, p in lines.items() if len({n for n, _ in p}) > 1}
    if not lines:
        raise ValueError("rows must have at least one case with two lengths or more, got none")
    ax = axes_or_new(ax, 4.6, 3.6)
    cases = list(dict.fromkeys(case for case, _ in lines))
    for (case, passes), points in lines.items():
        tokens, numbers = numpy.log(points).T
        exponent = numpy.polyfit(tokens, numbers, 1)[0]
        ax.plot(
            *zip(*points, strict=True),
            marker=MARKER[passes],
            markersize=3.5,
            linewidth=1.4,
            linestyle="-" if passes == "forward" else (0, (4, 2)),
            color=COLOURS[cases.index(case) % len(COLOURS)],
            label=f"{case}, {passes}: $N^{{{exponent:.2f}}}$",
        )
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    lengths = sorted({n for points in lines.values() for n, _ in points})
    ax.set_xticks(lengths, [f"{n // 1024}k" if n % 1024 == 0 else f"{n:,}" for n in lengths])
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter("{x:,g}")
    ax.minorticks_off()
    ax.grid(color="#eeeeee", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), frameon=False, fontsize=8)
    label = "time (ms)" if quantity == "time" else "peak memory beyond the inputs (MB)"
    return styled(ax, "tokens N", label)

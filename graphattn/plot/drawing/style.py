"""Colours and axes that all figures share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import Collection
    from matplotlib.colorbar import Colorbar
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

# Okabe and Ito's colours, which colour-blind readers can tell apart.
INK = "#333333"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
DASHES = ("-", "--", ":", "-.")
SHADES = ("white", "#8fbfdd", COLOURS[0], "#00253d")  # the colours of a heat map

PAGE_WIDTH = 4.0  # inches: 384 CSS pixels, of which a phone 390 pixels wide shows at least 358


def line_look(number: int) -> dict[str, Any]:
    """Return colour and dashes of the curve with a number; the first 24 all look different."""
    dashes = DASHES[number // len(COLOURS) % len(DASHES)]
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": dashes}


def page_figure(height: float, width: float = PAGE_WIDTH) -> Figure:
    """Return an empty figure for a web page, of this size in inches, without pyplot.

    A figure of at most `PAGE_WIDTH` is hardly scaled down on a phone, so that labels of 8 points
    have 9 pixels or more. Several panels are several figures, which the page wraps into rows.
    """
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    return Figure(figsize=(width, height), layout="compressed", dpi=192)  # twice a screen's pixels


def axes_or_new(ax: Axes | None, width: float, height: float, *, square: bool = False) -> Axes:
    """Return `ax`, or if it is None the axes of a new pyplot figure of this size in inches.

    With `square`, the figure gets the layout for axes with a fixed aspect ratio; the other layout
    would draw such axes too small.
    """
    if ax is None:
        import matplotlib.pyplot as plt

        _, ax = plt.subplots(
            figsize=(width, height), layout="compressed" if square else "constrained"
        )
    return ax


def styled(
    ax: Axes, xlabel: str | None = None, ylabel: str | None = None, *, frame: bool = False
) -> Axes:
    """Give the axes labels, small ticks and a thin grey frame (left and bottom without `frame`).

    Tick labels show complete numbers: 3.12, not 0.12 with the offset "+3" in a corner.
    """
    from matplotlib.ticker import ScalarFormatter

    if xlabel is not None:
        ax.set_xlabel(xlabel)
    if ylabel is not None:
        ax.set_ylabel(ylabel)

    for side, spine in ax.spines.items():
        spine.set(color="#999999", linewidth=0.6, visible=frame or side in ("left", "bottom"))
    ax.tick_params(colors=INK, labelsize=8, width=0.6, length=3)
    for axis in (ax.xaxis, ax.yaxis):
        axis.label.set(color=INK, fontsize=9)
        if isinstance(formatter := axis.get_major_formatter(), ScalarFormatter):
            formatter.set_useOffset(False)
    return ax


def integer_ticks(*axes: Any) -> None:
    """Put the ticks of axes (``ax.xaxis``, ``ax.yaxis``) at integers."""
    from matplotlib.ticker import MaxNLocator

    for axis in axes:
        axis.set_major_locator(MaxNLocator(integer=True))


def plain_legend(ax: Axes, *entries: Any, **options: Any) -> None:
    """Draw a legend of names given by users, in which a "$" does not begin a formula."""
    legend = ax.legend(*entries, **{"frameon": False, "fontsize": 8, **options})
    for text in legend.get_texts():
        text.set_parse_math(False)


def colour_bar(image: AxesImage | Collection, label: str) -> Colorbar:
    """Draw a colour bar next to the axes of the image, as high as the image."""
    ax: Any = image.axes
    # Without a layout engine, nothing would make room for a colour bar outside the axes.
    if ax.figure.get_layout_engine() is None:
        bar = ax.figure.colorbar(image, ax=ax)
    else:
        bar = ax.figure.colorbar(image, cax=ax.inset_axes((1.04, 0, 0.045, 1)))
    bar.set_label(label, color=INK, fontsize=9)
    bar.ax.tick_params(colors=INK, labelsize=8, width=0.6, length=3)
    bar.outline.set(color="#999999", linewidth=0.6)
    return bar

"""The figure of pretrained_models.py: the loss of quality for each window, k and share of edges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from graphattn.plot.drawing.style import COLOURS, INK, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Sequence[dict[str, Any]]
DOT, RBF = COLOURS[:2]
COLOUR = {"eager": INK, "dot": DOT, "rbf": RBF, "krause": RBF}
DASHES = (0, (4, 3))


def draw(record: dict[str, Any]) -> Figure:
    """Draw the perplexity of antibodies above, and the cosine of sentences below.

    Args:
        record: content of the JSON file that the example wrote. The figure shows only the swaps
            that were measured.
    """
    from matplotlib.figure import Figure

    # Not wider than a phone can show, so that labels can be read there.
    figure = Figure(figsize=(4.8, 10.2), layout="constrained")
    grid = figure.add_gridspec(4, 2, height_ratios=(1, 1, 0.9, 0.75))
    axes = grid[:2, :].subgridspec(2, 2).subplots()
    antibodies, sentences = record["antibodies"]["rows"], record["sentences"]["rows"]
    before = [row for row in antibodies if not row["fine_tuned"]]
    facts = record["antibodies"]["facts"]
    for row_of_axes, rows, quantity in (
        (axes[0], before, "perplexity"),
        (axes[1], sentences, "cosine"),
    ):
        by_window, by_k = row_of_axes
        by_k.sharey(by_window)  # shared before drawing, so that the limits include both
        all_pairs = [row for row in rows if row["edges"] == 1 and row["mixer"] in ("eager", "rbf")]
        for ax, parameter in ((by_window, "window"), (by_k, "top_k")):
            curves(ax, rows, parameter, quantity)
            for row in all_pairs:
                colour = COLOUR[row["mixer"]]
                ax.axhline(row[quantity], color=colour, linewidth=1, linestyle=DASHES)
    for ax in axes[0]:
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter("{x:g}")
        ax.set_yticks([2, 3, 4, 6, 8])
        ax.minorticks_off()
    axes[0, 0].set_ylabel("pseudo-perplexity (log scale)")
    axes[1, 0].set_ylabel("cosine to the original embedding")
    text = record["sentences"]["facts"]
    titles = (
        f"Antibodies: windows\n{facts['masked_residues']} residues of "
        f"{facts['measured_on']} antibodies",
        "Antibodies:\nthe k largest weights",
        f"Sentences: windows\n{text['sentences']} of {text['tokens']:.0f} tokens on average",
        "Sentences:\nthe k largest weights",
    )
    for ax, title in zip(axes.flat, titles, strict=True):
        ax.set_title(title, fontsize=9, color=INK)
    fine_tuning(figure.add_subplot(grid[2, :]), antibodies, facts)
    legend(figure.add_subplot(grid[3, :]))
    return figure


def curves(ax: Axes, rows: Rows, parameter: str, quantity: str) -> None:
    """Draw one line per mixer.

    The axis at the top shows the share of all edges that dot-product attention uses.
    """
    other = "top_k" if parameter == "window" else "window"
    chosen = {
        "dot": [r for r in rows if r["mixer"] == "dot" and r[parameter] and not r[other]],
        "rbf": [r for r in rows if r["mixer"] == ("rbf" if parameter == "window" else "krause")],
    }
    for mixer, found in chosen.items():
        found = sorted((r for r in found if r[parameter]), key=lambda r: r[parameter])
        ax.errorbar(
            [r[parameter] for r in found],
            [r[quantity] for r in found],
            yerr=[paired_error(r, quantity) for r in found],
            color=COLOUR[mixer],
            marker="o" if mixer == "dot" else "D",
            markersize=4,
            linewidth=1.5,
            elinewidth=1,
            capsize=2,
        )
    places = sorted({r[parameter]: r["edges"] for r in chosen["dot"]}.items())
    ax.set_xscale("log", base=2)
    ax.set_xticks([n for n, _ in places], [str(n) for n, _ in places])
    ax.set_xlabel("window, tokens on each side" if parameter == "window" else "k, keys per query")
    styled(ax)
    above = ax.secondary_xaxis("top")
    above.set_xticks([n for n, _ in places], [f"{edges:.0%}" for _, edges in places])
    above.minorticks_off()
    ax.minorticks_off()
    above.set_xlabel("share of edges kept", fontsize=8, color="#777777")
    above.tick_params(colors="#777777", labelsize=8, width=0.6, length=3)
    above.spines["top"].set(color="#999999", linewidth=0.6)


def paired_error(row: dict[str, Any], quantity: str) -> float:
    """Compute the standard error of the difference to the unchanged model ("eager").

    Some residues are difficult for both models, and this common part cancels in the difference.
    """
    if quantity == "cosine":
        return row["error"]
    return row["perplexity"] * row["ratio_error"] / row["ratio"]


def fine_tuning(ax: Axes, rows: Rows, facts: dict[str, Any]) -> None:
    """Draw each fine-tuned swap on one line: hollow before fine-tuning, filled after it."""
    after = [row for row in rows if row["fine_tuned"]]
    for y, row in enumerate(after):
        key = ("mixer", "window", "top_k")
        first = next(r for r in rows if not r["fine_tuned"] and all(r[k] == row[k] for k in key))
        colour = COLOUR[row["mixer"]]
        ax.plot(
            [first["perplexity"], row["perplexity"]],
            [y, y],
            color="#bbbbbb",
            linewidth=1.2,
            zorder=0,
        )
        for point, fill in ((first, "white"), (row, colour)):
            ax.errorbar(
                point["perplexity"], y, xerr=paired_error(point, "perplexity"), color=colour,
                marker="o", markersize=5, markerfacecolor=fill, elinewidth=1, capsize=2,
            )  # fmt: skip
            ax.annotate(
                f"{point['perplexity']:.2f}",
                (point["perplexity"], y),
                (0, 8 if fill == "white" else -15),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                color=colour,
            )
    shown = [row["perplexity"] for row in rows if row["fine_tuned"] or row["mixer"] != "dot"]
    ax.set_xscale("log")
    ax.set_xticks([2, 3, 4, 6, 8], ["2", "3", "4", "6", "8"])
    ax.set_xlim(0.85 * min(shown), 1.2 * max(shown))
    ax.minorticks_off()
    ax.set_yticks(range(len(after)), [label(row) for row in after])
    ax.set_ylim(len(after) - 0.5, -0.5)
    ax.set_xlabel("pseudo-perplexity (log scale)")
    title = f"Antibodies: {facts['steps']} steps of fine-tuning\non {facts['tuned_on']} others"
    ax.set_title(title, fontsize=9, color=INK)
    styled(ax)
    ax.tick_params(axis="y", length=0)


def label(row: dict[str, Any]) -> str:
    """Format the mixer and its share of edges in two lines."""
    name = {"eager": "dot product", "dot": "dot product", "rbf": "RBF", "krause": "Krause"}[
        row["mixer"]
    ]
    limits = [
        f"{word} {row[key]}" for key, word in (("window", "window"), ("top_k", "top")) if row[key]
    ]
    return "\n".join([", ".join([name, *limits]), f"{row['edges']:.0%} of edges"])


def legend(ax: Axes) -> None:
    """Draw a legend in the place of an axis that has no data."""
    ax.axis("off")
    lines = [
        ax.plot([], [], "o-", color=DOT, markersize=4, linewidth=1.5)[0],
        ax.plot([], [], "D-", color=RBF, markersize=4, linewidth=1.5)[0],
        ax.plot([], [], color=INK, linewidth=1, linestyle=DASHES)[0],
        ax.plot([], [], color=RBF, linewidth=1, linestyle=DASHES)[0],
        ax.plot([], [], "o", color=INK, markerfacecolor="white", markersize=5)[0],
        ax.plot([], [], "o", color=INK, markersize=5)[0],
    ]
    names = [
        "dot product, weights as they came",
        "RBF, weights as they came\n(right: Krause, within a window of 32)",
        "the model as it came, all pairs",
        "RBF, all pairs",
        "before fine-tuning",
        "after",
    ]
    ax.legend(lines, names, loc="upper left", frameon=False, fontsize=8, labelcolor=INK)
    note = (
        "Bars: standard error over antibodies of the\ndifference to the model as it came; of the\n"
        "cosine, over sentences."
    )
    ax.text(0.03, 0.2, note, transform=ax.transAxes, fontsize=8, color=INK, va="top")

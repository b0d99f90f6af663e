"""Figures of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphattn import dynamics
from graphattn.cli.clusters.sample import Tokens
from graphattn.cli.clusters.tables import TOLERANCE, Clustering
from graphattn.plot.clusters import (
    cluster_counts,
    cluster_image,
    cluster_scatter,
    covariance_spectra,
)
from graphattn.plot.drawing.style import COLOURS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURED = "The six largest clusters have colours, from the largest: blue, orange, green, pink, " \
    "yellow, light blue; all others are grey."  # fmt: skip


def draw(
    tokens: Tokens, found: list[Clustering], trajectory: dynamics.Trajectory, pattern: str
) -> dict[str, tuple[str, str, Figure]]:
    """Return a dict from the name of a file to (title, caption, figure)."""
    spectra, counts = _figure(5.6, 3.4), _figure(5.6, 3.4)
    covariance_spectra(trajectory, ax=spectra.add_subplot())
    cluster_counts({pattern: trajectory}, tolerance=TOLERANCE, ax=counts.add_subplot())
    clusters, caption = (
        _cloud(tokens, found, trajectory)
        if tokens.image is None
        else (_segments(tokens, found), "The input, and its pixels painted by cluster.")
    )
    return {
        "clusters": ("Clusters", f"{caption} {COLOURED}", clusters),
        "spectra": (
            "Variance per eigenvector",
            "Share of the variance of X along every eigenvector of its covariance.",
            spectra,
        ),
        "counts": (
            "Number of clusters",
            f"Clusters of tokens whose updates differ by less than {TOLERANCE} of the spread.",
            counts,
        ),
    }


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    return Figure(figsize=(width, height), layout="constrained", dpi=144)


def _segments(tokens: Tokens, found: list[Clustering]) -> Figure:
    """Draw the image, its mask if there is one, and three clusterings."""
    assert tokens.image is not None
    height, width, channels = tokens.image.shape
    shown = [found[0], found[len(found) // 2], found[-1]]  # merged, KMeans after it, KMeans before
    panels = len(shown) + 1 + (tokens.mask is not None)
    columns = 3
    rows = -(-panels // columns)
    figure = _figure(8.4, min(12, rows * (2.7 * height / width + 0.4)))
    axes = [figure.add_subplot(rows, columns, place + 1) for place in range(panels)]
    image = tokens.image[..., 0] if channels == 1 else tokens.image
    axes[0].imshow(image, cmap="gray", interpolation="nearest")
    axes[0].set_title("input", fontsize=8)
    if tokens.mask is not None:
        classes = tokens.mask.unique(return_inverse=True)[1]  # 0, 1 and a boundary, evenly grey
        axes[1].imshow(classes.view(height, width).numpy(), cmap="gray", interpolation="nearest")
        boundary = " (white: boundary)" if tokens.has_boundary else ""
        axes[1].set_title(f"mask{boundary}", fontsize=8)
    for ax, (name, _, labels) in zip(axes[-len(shown) :], shown, strict=True):
        cluster_image(labels, height, width, ax=ax)
        ax.set_title(name, fontsize=8)
    for ax in axes:
        ax.set_axis_off()
    return figure


def _cloud(
    tokens: Tokens, found: list[Clustering], trajectory: dynamics.Trajectory
) -> tuple[Figure, str]:
    """Draw the input and the last update in the plane of two features, coloured by cluster."""
    _, update, labels = found[0]
    figure = _figure(8.4, 4)
    # The leaders of the coloured clusters; the others are drawn as one cluster.
    few = labels.clamp(max=len(COLOURS))
    leaders = dynamics.leader_tokens(trajectory, few).tokens[: len(COLOURS)]
    for place, (title, points) in enumerate((("input", tokens.x), ("last update", update)), 1):
        ax = figure.add_subplot(1, 2, place)
        cluster_scatter(points, labels, leaders=leaders, ax=ax)
        ax.set_title(title, fontsize=8)
        for axis, name in zip((ax.xaxis, ax.yaxis), tokens.features, strict=False):
            axis.set_label_text(f"{name[:30]} (standardised)", parse_math=False)
    caption = (
        "Tokens in the plane of the first two features, coloured by the clusters that attention "
        "merged; stars are their leaders, the tokens their members attend to most."
    )
    return figure, caption

"""Figures of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphattn import dynamics
from graphattn.cli.clusters.sample import Tokens
from graphattn.cli.clusters.tables import TOLERANCE, Clustering
from graphattn.cli.report import Figure
from graphattn.plot.clusters import (
    cluster_counts,
    cluster_image,
    cluster_scatter,
    covariance_spectra,
)
from graphattn.plot.drawing.style import COLOURS, page_figure

if TYPE_CHECKING:
    from matplotlib import figure
    from matplotlib.axes import Axes

IMAGE = 1.75  # inches; two images stand side by side on a phone

COLOURED = "The six largest clusters have colours, from the largest: blue, orange, green, pink, " \
    "yellow, light blue; all others are grey."  # fmt: skip


def draw(
    tokens: Tokens, clusterings: list[Clustering], trajectory: dynamics.Trajectory, pattern: str
) -> list[Figure]:
    spectra, counts = page_figure(2.8), page_figure(2.8)
    covariance_spectra(trajectory, ax=spectra.add_subplot())
    cluster_counts({pattern: trajectory}, tolerance=TOLERANCE, ax=counts.add_subplot())
    clusters, caption = (
        _cloud(tokens, clusterings, trajectory)
        if tokens.image is None
        else (_segments(tokens, clusterings), "The input, and its pixels painted by cluster.")
    )
    return [
        Figure("Clusters", f"{caption} {COLOURED}", clusters),
        Figure(
            "Variance per eigenvector",
            "Share of the variance of X along every eigenvector of its covariance.",
            spectra,
        ),
        Figure(
            "Number of clusters",
            f"Clusters of tokens whose updates differ by less than {TOLERANCE} of the spread.",
            counts,
        ),
    ]


def _segments(tokens: Tokens, clusterings: list[Clustering]) -> dict[str, figure.Figure]:
    """Draw the image, its mask if there is one, and three clusterings."""
    assert tokens.image is not None
    height, width, channels = tokens.image.shape
    shown = [
        clusterings[0],
        clusterings[len(clusterings) // 2],
        clusterings[-1],
    ]  # merged, KMeans after it, KMeans before
    panels = {}

    def new_axes(name: str) -> Axes:
        panels[name] = page_figure(min(6, IMAGE * height / width), IMAGE)
        ax = panels[name].add_subplot()
        ax.set_axis_off()
        return ax

    image = tokens.image[..., 0] if channels == 1 else tokens.image
    new_axes("input").imshow(image, cmap="gray", interpolation="nearest")
    if tokens.mask is not None:
        classes = tokens.mask.unique(return_inverse=True)[1]  # 0, 1 and a boundary, evenly grey
        ax = new_axes("mask (white: boundary)" if tokens.has_boundary else "mask")
        ax.imshow(classes.view(height, width).numpy(), cmap="gray", interpolation="nearest")
    for name, _, labels in shown:
        cluster_image(labels, height, width, ax=new_axes(name))
    return panels


def _cloud(
    tokens: Tokens, clusterings: list[Clustering], trajectory: dynamics.Trajectory
) -> tuple[dict[str, figure.Figure], str]:
    """Draw the input and the last update in the plane of two features, coloured by cluster."""
    _, update, labels = clusterings[0]
    # The leaders of the coloured clusters; the others are drawn as one cluster.
    few = labels.clamp(max=len(COLOURS))
    leaders = dynamics.leader_tokens(trajectory, few).tokens[: len(COLOURS)]
    panels = {}
    for name, points in (("input", tokens.x), ("last update", update)):
        panels[name] = page_figure(3.6)
        ax = panels[name].add_subplot()
        cluster_scatter(points, labels, leaders=leaders, ax=ax)
        for axis, feature in zip((ax.xaxis, ax.yaxis), tokens.features, strict=False):
            axis.set_label_text(f"{feature[:30]} (standardised)", parse_math=False)
    caption = (
        "Tokens in the plane of the first two features, coloured by the clusters that attention "
        "merged; stars are their leaders, the tokens their members attend to most."
    )
    return panels, caption

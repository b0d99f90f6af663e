"""Tables of a run: scores of the clusters, and the variance step by step."""

from __future__ import annotations

import math
from typing import NamedTuple

from rich.table import Table
from torch import Tensor

from graphattn import dynamics
from graphattn.cli.clusters.images import BOUNDARY
from graphattn.cli.clusters.sample import Tokens
from graphattn.plain_tables import counted, number_columns, plain_table, short

TOLERANCE = 0.1
STEPS_SHOWN = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


class Clustering(NamedTuple):
    """A clustering: its name, its points, and the cluster of each point."""

    name: str
    points: Tensor
    labels: Tensor


def clusterings(tokens: Tokens, trajectory: dynamics.Trajectory) -> list[Clustering]:
    """Return merged tokens, KMeans on that update, and KMeans on the input (the baseline)."""
    update = trajectory.updates[-1]
    name = f"attention: merged (within {TOLERANCE} of the spread)"
    clusters = [Clustering(name, update, dynamics.cluster(update, tolerance=TOLERANCE))]
    for where, points in (("attention", update), ("baseline, no attention", tokens.x)):
        labels = dynamics.cluster(points, method="kmeans")
        clusters.append(Clustering(f"{where}: KMeans, k by silhouette", points, labels))
        if tokens.classes is not None:
            labels = dynamics.cluster(points, method="kmeans", num_clusters=tokens.classes)
            name = f"{where}: KMeans, k = {tokens.classes} classes"
            clusters.append(Clustering(name, points, labels))
    return clusters


def score_table(tokens: Tokens, clusters: list[Clustering], steps: int) -> Table:
    table = plain_table(f"Clusters after {counted(steps, 'step')}")
    table.add_column("method", min_width=24)
    number_columns(table, "clusters", "largest", "silhouette")
    if tokens.mask is not None:
        number_columns(table, "Dice", *["Dice, no\nboundary"] * tokens.has_boundary)
    if tokens.truth is not None:
        number_columns(table, "accuracy", "clusters\nper class")
    for name, points, labels in clusters:
        row = [
            name,
            f"{int(labels.max()) + 1:,}",
            f"{dynamics.fragmentation(labels).mean_largest_share:.1%}",
            _number(dynamics.silhouette(points, labels)),
        ]
        if tokens.mask is not None:
            row.append(f"{dynamics.dice(labels, tokens.mask):.3f}")
            if tokens.has_boundary:
                row.append(f"{dynamics.dice(labels, tokens.mask, ignore=BOUNDARY):.3f}")
        if tokens.truth is not None:
            row.append(f"{dynamics.label_accuracy(labels, tokens.truth):.3f}")
            row.append(f"{dynamics.fragmentation(labels, tokens.truth).mean_clusters:.2f}")
        table.add_row(*row)
    caption = [
        "Attention: clusters of the last standardised update. Largest: share of the tokens in the "
        "largest cluster. Silhouette: computed from the clustered points, which differ between "
        "rows."
    ]
    if tokens.has_boundary:
        caption.append("Dice counts the boundary of the trimap (255) as foreground.")
    if tokens.mask is not None or tokens.truth is not None:
        score = "Dice" if tokens.mask is not None else "Accuracy"
        caption.append(
            f"{score} is for the best assignment of clusters to classes. This upper bound grows "
            "with the number of clusters, so compare rows with equal k."
        )
    table.caption = " ".join(caption)
    return table


def step_table(trajectory: dynamics.Trajectory) -> Table:
    steps = trajectory.num_steps
    counts = dynamics.cluster_counts(trajectory, tolerance=TOLERANCE).tolist()
    table = plain_table("Step by step")
    number_columns(
        table, "step", "merged clusters", "leading eigenvalue", "dimensions", "largest |x|"
    )
    for t in sorted({t for t in STEPS_SHOWN if t <= steps} | {steps}):
        table.add_row(
            f"{t:,}",
            f"{counts[t - 1]:,}" if t else "",
            _number(float(trajectory.leading_share[t])),
            _number(float(trajectory.participation_ratio[t]), 2),
            short(float(trajectory.max_abs[t])),
        )
    table.caption = (
        "Leading eigenvalue: its share of the variance of X (eigenvalues of the population "
        "covariance). Dimensions: participation ratio, (sum of eigenvalues)^2 / sum of squares."
    )
    return table


def _number(value: float, digits: int = 3) -> str:
    return "none" if math.isnan(value) else f"{value:.{digits}f}"

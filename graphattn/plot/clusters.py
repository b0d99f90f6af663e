"""Figures of tokens under attention without weights: clusters, their number, and spectra."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from graphattn.diagnostics import HiddenSpectra
from graphattn.dynamics import Trajectory
from graphattn.dynamics import cluster_counts as merged_counts
from graphattn.dynamics.arguments import as_labels, as_tokens
from graphattn.graphs.arguments import as_float, as_int
from graphattn.plot.drawing.style import (
    COLOURS,
    axes_or_new,
    integer_ticks,
    line_look,
    plain_legend,
    styled,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMALL = "#bbbbbb"  # the colour of all clusters except the six largest
MOST_LINES = 32  # A model has hundreds of eigenvalues; only the largest are drawn.


def cluster_scatter(
    points: Tensor,
    labels: Tensor,
    *,
    features: tuple[int, int] = (0, 1),
    leaders: Tensor | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw points in the plane of two features, coloured by cluster.

    The six largest clusters have a colour each, all others are grey.

    Args:
        points: [N, C], such as ``trajectory.updates[-1]``; if C = 1, the second coordinate is 0.
        labels: number of the cluster of every point, integers [N], as
            :func:`graphattn.dynamics.cluster` returns them; cluster 0 is the largest.
        features: the numbers of the two features on the horizontal and the vertical axis.
        leaders: tokens to mark with a star, as in Figure 8 of Attention Clusters, integers [K].
        ax: where to draw; new axes if None.

    Raises:
        ValueError: if the shapes do not fit together, or a feature or token does not exist.

    Example:
        >>> import torch, graphattn as ga
        >>> labels = torch.tensor([0] * 40 + [1] * 30 + [2] * 20)
        >>> centres = torch.tensor([[0.0, 0.0], [3.0, 1.0], [1.0, 3.0]])
        >>> points = centres[labels] + 0.5 * torch.randn(90, 2)
        >>> ax = ga.plot.cluster_scatter(points, labels)
        >>> len(ax.collections)  # one per colour
        3
    """
    points = as_tokens("points", points).cpu()
    labels = as_labels("labels", labels, len(points))
    num_features = points.shape[1]
    across, up = (as_int("features", feature, 0) for feature in features)
    if num_features > 1 and max(across, up) >= num_features:
        raise ValueError(
            f"features must be two numbers from 0 to {num_features - 1}, got {features}"
        )
    if num_features == 1:
        points, across, up = torch.cat([points, torch.zeros_like(points)], dim=1), 0, 1
    ax = axes_or_new(ax, 4.2, 4)
    size = 14 if len(points) <= 2000 else 5
    shown = labels.clamp(max=len(COLOURS))
    for cluster in range(int(shown.max()), -1, -1):  # The largest cluster is drawn last, on top.
        members = points[shown == cluster]
        dots: dict[str, Any] = {"s": size, "color": _colour(cluster), "alpha": 0.6, "linewidths": 0}
        ax.scatter(members[:, across], members[:, up], **dots)
    if leaders is not None:
        chosen = torch.as_tensor(leaders).reshape(-1).tolist()
        for token in chosen:
            if as_int("leaders", token, 0) >= len(points):
                raise ValueError(f"leaders must be tokens from 0 to {len(points) - 1}, got {token}")
        # The colour of the point remains visible inside its star.
        star: dict[str, Any] = {"s": 160, "marker": "*", "facecolors": "none", "zorder": 3}
        x, y = points[chosen][:, [across, up]].T
        ax.scatter(x, y, edgecolors="#d62728", linewidths=1.4, **star)
    return styled(ax, f"feature {across}", f"feature {up}" if num_features > 1 else "")


def cluster_image(labels: Tensor, height: int, width: int, *, ax: Axes | None = None) -> Axes:
    """Draw an image whose pixels have the colour of their cluster.

    The six largest clusters have a colour each, all others are grey.

    Args:
        labels: number of the cluster of every pixel, row by row, integers [height * width];
            cluster 0 is the largest.
        height: height of the image in pixels.
        width: width of the image in pixels.
        ax: where to draw; new axes if None.

    Raises:
        ValueError: if there is not one label per pixel.

    Example:
        >>> import torch, graphattn as ga
        >>> row, column = torch.arange(24)[:, None] - 11.5, torch.arange(32) - 15.5
        >>> radius = (row**2 + column**2).sqrt()
        >>> labels = torch.bucketize(radius, torch.tensor([6.0, 10.0]))  # a disc, a ring, the rest
        >>> ax = ga.plot.cluster_image(labels.flatten(), 24, 32)
        >>> ax.images[0].get_array().shape  # rows, columns, colour
        (24, 32, 3)
    """
    height, width = as_int("height", height, 1), as_int("width", width, 1)
    labels = as_labels("labels", labels, height * width)
    from matplotlib.colors import to_rgb

    colours = torch.tensor([to_rgb(_colour(c)) for c in range(int(labels.max()) + 1)])
    ax = axes_or_new(ax, 4, 4 * height / width)
    ax.imshow(colours[labels].view(height, width, 3).numpy(), interpolation="nearest")
    ax.set_axis_off()
    return ax


def covariance_spectra(trajectory: Trajectory | HiddenSpectra, *, ax: Axes | None = None) -> Axes:
    """Draw the share of the variance along every eigenvector of the covariance, by step or layer.

    These are Figures 9 and 12-15 of Attention Clusters. The paper draws the eigenvalues; this
    function divides them by their sum, because X grows with every step. The six largest have a
    colour each.

    Args:
        trajectory: the result of :func:`graphattn.dynamics.simulate`, or that of
            :func:`graphattn.diagnostics.hidden_spectra` for the hidden states of a model, of which
            only the 32 largest eigenvalues are drawn.
        ax: where to draw; new axes if None.

    Raises:
        ValueError: if `trajectory` is neither.

    Example:
        >>> import torch, graphattn as ga
        >>> x = torch.randn(50, 3, dtype=torch.float64)
        >>> trajectory = ga.dynamics.simulate(x, ga.complete_graph(50), steps=5)
        >>> len(ga.plot.covariance_spectra(trajectory).lines)
        3
    """
    is_model = isinstance(trajectory, HiddenSpectra)
    if not isinstance(trajectory, HiddenSpectra):
        trajectory = _checked("trajectory", trajectory)
    spectra = trajectory.spectra
    share = spectra / spectra.sum(dim=1, keepdim=True)
    if is_model:
        share = share[:, :MOST_LINES]
    ax = axes_or_new(ax, 4.6, 3.2)
    for k in range(share.shape[1] - 1, -1, -1):
        name = f"λ{k + 1}" if k < len(COLOURS) else None
        ax.plot(range(len(share)), share[:, k], color=_colour(k), linewidth=1.6, label=name)
    ax.set_ylim(-0.02, 1.02)
    integer_ticks(ax.xaxis)
    handles, names = ax.get_legend_handles_labels()
    ax.legend(handles[::-1], names[::-1], frameon=False, fontsize=8)
    return styled(ax, "layer" if is_model else "step", "share of the variance")


def cluster_counts(
    trajectories: Mapping[str, Trajectory], *, tolerance: float = 0.1, ax: Axes | None = None
) -> Axes:
    """Draw the number of merged clusters after every step, one line per trajectory, on a log scale.

    Args:
        trajectories: a trajectory with at least one step for each name.
        tolerance: the distance up to which clusters are merged, see
            :func:`graphattn.dynamics.cluster`.
        ax: where to draw; new axes if None.

    Raises:
        ValueError: if there is no trajectory, or one without steps.

    Example:
        >>> import torch, graphattn as ga
        >>> x = torch.randn(50, 3, dtype=torch.float64)
        >>> run = ga.dynamics.simulate(x, ga.complete_graph(50), steps=5)
        >>> [line.get_label() for line in ga.plot.cluster_counts({"global": run}).lines]
        ['global']
    """
    from matplotlib.ticker import FuncFormatter, NullLocator

    from graphattn.plot.drawing.ticks import IntegerTicks

    if not trajectories:
        raise ValueError("trajectories must have at least one trajectory, got none")
    tolerance = as_float("tolerance", tolerance, positive=True)
    ax = axes_or_new(ax, 4.6, 3.2)
    for i, (name, trajectory) in enumerate(trajectories.items()):
        if _checked(f"trajectories[{name!r}]", trajectory).num_steps == 0:
            raise ValueError(f"each of trajectories must have steps, got none for {name!r}")
        counts = merged_counts(trajectory, tolerance=tolerance)
        steps = range(1, len(counts) + 1)
        look = line_look(i)
        ax.plot(steps, counts, marker="o", markersize=3, linewidth=1.6, label=name, **look)
    ax.set_yscale("log")
    integer_ticks(ax.xaxis)
    ax.yaxis.set_major_locator(IntegerTicks())
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:,.0f}"))
    plain_legend(ax, ax.lines[-len(trajectories) :], list(trajectories))
    return styled(ax, "step", "merged clusters")


def _checked(name: str, trajectory: Trajectory) -> Trajectory:
    if not isinstance(trajectory, Trajectory):
        raise ValueError(f"{name} must be a Trajectory, got {type(trajectory).__name__}")
    return trajectory


def _colour(rank: int) -> str:
    return COLOURS[rank] if rank < len(COLOURS) else SMALL

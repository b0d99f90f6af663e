"""Trajectories of tokens on the page: points in a plane, and clusters, per step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphattn.dynamics import ParticleFlow, Trajectory, cluster, cluster_counts
from graphattn.explorer.packing import packed

MOST_POINTS = 250_000  # tokens times steps: a megabyte


def flow_data(flow: ParticleFlow | Trajectory) -> tuple[dict[str, Any], list[str]]:
    """Collect points, final clusters and numbers of clusters; of too many steps, some."""
    if isinstance(flow, Trajectory):
        points, first = flow.updates, 1
        what = "the standardised update of every token (Attention Clusters)"
    else:
        points, first = flow.states if _is_flat_torus(flow) else flow.points, 0
        what = "the place of every token"
    T, N = points.shape[:2]
    if not T:
        raise ValueError("flow must have at least one step, got none: simulate with steps >= 1")
    kept = sorted({round(i) for i in np.linspace(0, T - 1, max(2, min(T, MOST_POINTS // N)))})
    notes = [] if len(kept) == T else [f"The page has {len(kept)} of {T} steps, evenly spaced."]
    if isinstance(flow, Trajectory):
        counts = cluster_counts(flow)[kept].tolist()
        labels = cluster(flow.updates[-1])
    else:
        counts = [flow.num_clusters(step) for step in kept]
        start = flow.points[0]
        spread = float((start - start.mean(dim=0)).square().sum(dim=1).mean().sqrt())
        labels = cluster(flow.points[-1], tolerance=0.01, spread=spread)
    plane, axes = _plane(points.detach().cpu().double()[kept])
    low, high = plane.amin(dim=(0, 1)), plane.amax(dim=(0, 1))
    side = float((high - low).max()) or 1.0  # one scale for both axes
    corner = (low + high) / 2 - side / 2
    data = {
        "steps": [first + step for step in kept],
        "points": packed(((plane - corner) / side * 65_535).round().clamp(0, 65_535), "<u2"),
        "clusters": labels.tolist(),
        "counts": counts,
        "what": f"Points are {what}{axes}.",
    }
    return data, notes


def _is_flat_torus(flow: ParticleFlow) -> bool:
    return flow.manifold == "torus" and flow.states.shape[2] == 2


def _plane(points: Tensor) -> tuple[Tensor, str]:
    """Return points [T, N, 2]: first principal components of all steps if they have more."""
    C = points.shape[2]
    if C == 1:
        return torch.cat([points, torch.zeros_like(points)], dim=2), ", on a line"
    if C == 2:
        return points, ""
    flat = points.flatten(0, 1)
    centred = flat - flat.mean(dim=0)
    values, vectors = torch.linalg.eigh(centred.T @ centred)
    share = float(values[-2:].sum() / values.sum().clamp_min(1e-300))
    plane = points @ vectors[:, -2:].flip(1)
    return plane, f", in the plane of the first two principal components ({share:.0%} of variance)"

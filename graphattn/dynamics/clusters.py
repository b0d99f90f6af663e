"""Clusters of tokens, by distance or by KMeans."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graphattn.dynamics.arguments import as_tokens, need_scikit_learn
from graphattn.dynamics.simulate import Trajectory
from graphattn.graphs.arguments import as_choice, as_float, as_int

SILHOUETTE_SAMPLE = 2000  # the most points for the silhouette, which needs all their distances


def cluster(
    points: Tensor,
    *,
    method: Literal["merge", "kmeans"] = "merge",
    tolerance: float = 0.1,
    max_clusters: int = 10,
    num_clusters: int | None = None,
    spread: float | None = None,
) -> Tensor:
    """Find clusters of points, by merging near points or by KMeans.

    With ``"merge"``, points within ``tolerance * spread`` of each other are in the same cluster,
    and also points that a chain of such points connects (single linkage). The number of clusters
    follows from the tolerance, and nothing is random. Pairs of points are not stored.

    With ``"kmeans"``, scikit-learn's KMeans (10 starts, seed 0) is run with k = 2 .. max_clusters,
    and the k with the largest silhouette is chosen (computed for at most 2,000 points). It finds
    clusters in any data, even in noise.

    For a trajectory, cluster ``trajectory.updates[t]``. Tokens that attend alike have the same
    standardised update, while their states X still differ by where they began.

    Args:
        points: points, [N, C].
        method: "merge" or "kmeans".
        tolerance: for "merge", > 0: the largest distance of points that are merged, in units of
            `spread`.
        max_clusters: for "kmeans", >= 2: the largest k that is tried.
        num_clusters: for "kmeans", >= 1: the only k that is tried.
        spread: the unit of `tolerance`; if None, the root-mean-square distance of the points from
            their mean. Give it if all points may have collapsed to one, as in
            :meth:`ParticleFlow.num_clusters`.

    Returns:
        Labels [N] (int64, on the CPU), numbered from 0 in the order of decreasing size; of clusters
        with equal size, the one with the first token comes first.

    Raises:
        ValueError: if `points` is empty or not finite, or an option is out of its range.
        ImportError: if scikit-learn is missing with "kmeans".

    Example:
        >>> import torch, graphattn as ga
        >>> points = torch.tensor([[5.0], [0.0], [0.1], [0.2], [5.1]])
        >>> ga.dynamics.cluster(points)
        tensor([1, 0, 0, 0, 1])
    """
    points = as_tokens("points", points).cpu().double()
    as_choice("method", method, ("merge", "kmeans"))
    tolerance = as_float("tolerance", tolerance, positive=True)
    max_clusters = as_int("max_clusters", max_clusters, 2)
    if num_clusters is not None:
        num_clusters = as_int("num_clusters", num_clusters, 1)
    unit = spread_of(points) if spread is None else as_float("spread", spread, positive=False)
    centred = (points - points.mean(dim=0)).numpy()
    if method == "merge":
        # Points that differ only by rounding are always merged, even if the spread is tiny.
        rounding = 8 * torch.finfo(torch.float64).eps * float(points.abs().max())
        return largest_first(_merged(centred, max(tolerance * unit, rounding)))
    return largest_first(_kmeans(centred, max_clusters, num_clusters))


def cluster_counts(trajectory: Trajectory, *, tolerance: float = 0.1) -> Tensor:
    """Count the clusters of every update of a trajectory, [T], by merging (:func:`cluster`).

    Raises:
        ValueError: if `tolerance` is not > 0.

    Example:
        >>> import torch, graphattn as ga
        >>> x = torch.tensor([[-1.5], [-1.0], [-0.5], [0.9], [1.0], [1.1]], dtype=torch.float64)
        >>> ga.dynamics.cluster_counts(ga.dynamics.simulate(x, ga.complete_graph(6), steps=4))
        tensor([...])
    """
    counts = [int(cluster(z, tolerance=tolerance).max()) + 1 for z in trajectory.updates]
    return torch.tensor(counts, dtype=torch.int64)


def spread_of(points: Tensor) -> float:
    """Compute the root-mean-square distance of points [N, C] from their mean."""
    return float((points - points.mean(dim=0)).square().sum(dim=1).mean().sqrt())


def largest_first(labels: NDArray[np.int64]) -> Tensor:
    """Renumber labels 0, 1, ... by decreasing size, then by first token."""
    _, first, name, size = np.unique(
        labels, return_index=True, return_inverse=True, return_counts=True
    )
    place = np.empty_like(first)
    place[np.lexsort((first, -size))] = np.arange(len(first))
    return torch.from_numpy(place[name].astype(np.int64))


def _merged(points: NDArray[np.float64], distance: float) -> NDArray[np.int64]:
    """Find the connected components of the graph of points within `distance`; [N].

    Points within distance / 2 of a seed are within `distance` of each other, and form a group. Only
    groups whose seeds are within 2 * distance are compared. With distance 0, equal points merge.
    """
    from scipy.spatial import cKDTree

    # Balanced trees would be slow if many points are equal.
    tree = cKDTree(points, balanced_tree=False)
    group = np.full(len(points), -1)
    seeds: list[int] = []
    for i in range(len(points)):
        if group[i] < 0:
            near = np.asarray(tree.query_ball_point(points[i], distance / 2))
            group[near[group[near] < 0]] = len(seeds)
            group[i] = len(seeds)  # Because of rounding, the seed may not be near itself.
            seeds.append(i)
    order = np.argsort(group, kind="stable")
    members = np.split(order, np.cumsum(np.bincount(group))[:-1])
    trees: dict[int, cKDTree] = {}

    def touch(a: int, b: int) -> bool:
        few, many = sorted((a, b), key=lambda g: len(members[g]))
        if many not in trees:
            trees[many] = cKDTree(points[members[many]], balanced_tree=False)
        return bool(trees[many].query(points[members[few]])[0].min() <= distance)

    component = np.arange(len(seeds))
    seed_tree = cKDTree(points[seeds], balanced_tree=False)
    for a in range(len(seeds)):
        near = np.asarray(seed_tree.query_ball_point(points[seeds[a]], 2 * distance * (1 + 1e-9)))
        near = near[near > a]
        while len(near := near[component[near] != component[a]]):
            if touch(a, int(near[0])):
                component[component == component[near[0]]] = component[a]
            near = near[1:]
    return component[group]


def _kmeans(
    points: NDArray[np.float64], max_clusters: int, num_clusters: int | None
) -> NDArray[np.int64]:
    """Run KMeans with the k of largest silhouette or a given k; one cluster for equal points."""
    need_scikit_learn()
    from sklearn.cluster import KMeans
    from sklearn.metrics import silhouette_score

    distinct = len(np.unique(points, axis=0))
    if distinct == 1:
        return np.zeros(len(points), dtype=np.int64)
    if num_clusters is not None:
        return KMeans(min(num_clusters, distinct), n_init=10, random_state=0).fit_predict(points)
    best, chosen = -np.inf, np.zeros(len(points), dtype=np.int64)
    sample = np.random.default_rng(0).permutation(len(points))[:SILHOUETTE_SAMPLE]
    for k in range(2, min(max_clusters, distinct) + 1):
        labels = KMeans(k, n_init=10, random_state=0).fit_predict(points)
        num_distinct = len(np.unique(labels[sample]))
        if 2 <= num_distinct < len(sample):
            score = silhouette_score(points[sample], labels[sample])
        else:
            score = -1.0  # There is no silhouette for one cluster, or for one point per cluster.
        if score > best:
            best, chosen = score, labels
    return chosen

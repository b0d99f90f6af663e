"""Scores of clusters, by their shape, or compared with labels and masks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphattn.dynamics.arguments import as_labels, as_tokens, contingency, need_scikit_learn
from graphattn.graphs.arguments import as_int


def silhouette(points: Tensor, labels: Tensor) -> float:
    """Compute the mean silhouette coefficient, which is 1 for compact clusters far apart.

    It is about 0 if there are no clusters. A token alone in its cluster counts as 0, because Eq. 5
    is not defined for it. scikit-learn computes it in chunks.

    Source: Attention Clusters, Eq. 4-6 (Rousseeuw, 1987).

    Args:
        points: points, [N, C].
        labels: the cluster of every token, integers [N].

    Returns:
        A number in [-1, 1]; NaN if there is one cluster, or every token is a cluster.

    Raises:
        ValueError: if shapes do not fit.
        ImportError: if scikit-learn is missing.

    Example:
        >>> import torch, graphattn as ga
        >>> points = torch.tensor([[0.0], [1.0], [10.0], [11.0]])
        >>> round(ga.dynamics.silhouette(points, torch.tensor([0, 0, 1, 1])), 3)
        0.9
    """
    points = as_tokens("points", points)
    labels = as_labels("labels", labels, len(points))
    if not 2 <= int(labels.max()) + 1 < len(points):
        return float("nan")
    need_scikit_learn()
    from sklearn.metrics import silhouette_score

    return float(silhouette_score(points.cpu().double().numpy(), labels.numpy()))


class Fragmentation(NamedTuple):
    """The fragmentation of every label, in ascending order of labels.

    Attributes:
        clusters: the number of clusters that have a token of the label, int64 [L].
        largest_share: the largest share of the label's tokens in one cluster, float64 [L].
    """

    clusters: Tensor
    largest_share: Tensor

    @property
    def mean_clusters(self) -> float:
        """Clusters per label, the mean over labels; 1 means no fragmentation."""
        return float(self.clusters.double().mean())

    @property
    def mean_largest_share(self) -> float:
        """Share of a label's tokens in its largest cluster, the mean over labels."""
        return float(self.largest_share.mean())


def fragmentation(labels: Tensor, truth: Tensor | None = None) -> Fragmentation:
    """Measure fragmentation: the clusters per label, and the share of the largest cluster.

    Attention Clusters (Sections 3.1-3.3) compares fragmentation by eye, and these two numbers
    measure it. They do not say whether labels share a cluster; :func:`label_accuracy` does.

    Args:
        labels: the cluster of every token, integers [N].
        truth: the label of every token, integers [N]; with None, all have the same label.

    Raises:
        ValueError: if shapes do not fit.

    Example:
        >>> import torch, graphattn as ga
        >>> clusters = torch.tensor([0, 0, 0, 1, 2, 2])
        >>> truth = torch.tensor([0, 0, 0, 0, 1, 1])
        >>> result = ga.dynamics.fragmentation(clusters, truth)
        >>> result.clusters, result.largest_share
        (tensor([2, 1]), tensor([0.7500, 1.0000], dtype=torch.float64))
    """
    labels = as_labels("labels", labels)
    classes = torch.zeros_like(labels) if truth is None else as_labels("truth", truth, len(labels))
    counts = contingency(classes, labels)
    share = counts.amax(dim=1).double() / counts.sum(dim=1)
    return Fragmentation((counts > 0).sum(dim=1), share)


def label_accuracy(
    labels: Tensor, truth: Tensor, *, mapping: Mapping[int, int] | None = None
) -> float:
    """Compute the accuracy of a map from clusters to labels, the best one if none is given.

    The best map gives every cluster the label that most of its tokens have. In Attention Clusters,
    Section 2.1 ("semantic alignment"), the map is chosen by domain knowledge: give it as `mapping`.
    The best map is an upper bound, which increases with the number of clusters (with one token
    each, it is 1). So compare it for equal numbers of clusters, and with KMeans of the raw data.

    Args:
        labels: the cluster of every token, integers [N].
        truth: the label of every token, integers [N].
        mapping: the label of every cluster that occurs in `labels`; None for the best.

    Raises:
        ValueError: if shapes do not fit, or `mapping` has no label for a cluster.

    Example:
        >>> import torch, graphattn as ga
        >>> clusters, truth = torch.tensor([5, 5, 5, 2]), torch.tensor([0, 0, 1, 1])
        >>> ga.dynamics.label_accuracy(clusters, truth)
        0.75
        >>> ga.dynamics.label_accuracy(clusters, truth, mapping={5: 1, 2: 1})
        0.5
    """
    if mapping is not None:
        return _accuracy_of(mapping, labels, truth)
    labels = as_labels("labels", labels)
    counts = contingency(labels, as_labels("truth", truth, len(labels)))
    return int(counts.amax(dim=1).sum()) / len(labels)


def _accuracy_of(mapping: Any, labels: Tensor, truth: Tensor) -> float:
    if not isinstance(mapping, Mapping):
        raise ValueError(
            f"mapping must be a dict from clusters to labels or None, got {type(mapping).__name__}"
        )
    as_labels("truth", truth, len(as_labels("labels", labels)))
    found = torch.as_tensor(labels).tolist()
    missing = sorted(set(found) - set(mapping))
    if missing:
        raise ValueError(
            f"mapping must have a label for every cluster, got none for {missing[0]}: clusters are "
            f"{sorted(set(found))}"
        )
    right = (
        int(mapping[c]) == t for c, t in zip(found, torch.as_tensor(truth).tolist(), strict=True)
    )
    return sum(right) / len(found)


def dice(
    labels: Tensor,
    mask: Tensor,
    *,
    ignore: int | None = None,
    foreground: Collection[int] | None = None,
) -> float:
    """Compute the Dice coefficient of a mask and a union of clusters, the best if none is given.

    The coefficient of mask M and union A is ``2 |A and M| / (|A| + |M|)``. Every cluster is
    assigned to foreground or background such that the result is largest. (If the clusters are
    sorted by their share of foreground, the best choice is a beginning of the list.) Like
    :func:`label_accuracy`, it is an upper bound that increases with the number of clusters.

    Source: Attention Clusters, Section 3.1, where there are two clusters.

    Args:
        labels: the cluster of every token, integers [N].
        mask: integers or bool, [N] or an image [H, W] of N pixels; foreground is where it is not 0.
        ignore: tokens with this value of the mask are left out, such as the boundary of a trimap;
            with None, they count as foreground like all other values except 0.
        foreground: the clusters whose union is compared with the mask; None for the best.

    Raises:
        ValueError: if shapes do not fit, there is no foreground in the mask, or `foreground` names
            a cluster that does not exist.

    Example:
        >>> import torch, graphattn as ga
        >>> clusters = torch.tensor([0, 0, 1, 1, 1, 2])
        >>> trimap = torch.tensor([0, 0, 255, 1, 1, 1])
        >>> ga.dynamics.dice(clusters, trimap)  # the boundary, 255, is foreground
        1.0
        >>> ga.dynamics.dice(torch.tensor([0, 0, 0, 1, 1, 1]), trimap)
        0.857...
        >>> ga.dynamics.dice(torch.tensor([0, 0, 0, 1, 1, 1]), trimap, ignore=255)
        1.0
    """
    if not isinstance(mask, Tensor) or mask.is_floating_point() or mask.is_complex():
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"mask must be a tensor of integers or bools, got {got}")
    mask = mask.detach().cpu().reshape(-1)
    union = None
    if foreground is not None:
        union = _union_of(foreground, labels)
    labels = as_labels("labels", labels, len(mask))
    if ignore is not None:
        counted = mask != as_int("ignore", ignore, 0)
        mask, labels = mask[counted], labels[counted]
        union = None if union is None else union[counted]
    inside = mask != 0
    if not inside.any():
        raise ValueError(
            "mask must have foreground (values other than 0"
            f"{'' if ignore is None else f' and ignore={ignore}'}), got none"
        )
    if union is not None:
        return 2 * int((union & inside).sum()) / int(union.sum() + inside.sum())
    size = torch.bincount(labels).double()
    hits = torch.bincount(labels, weights=inside.double(), minlength=len(size))
    # 2 hits / (size + |M|) >= d means 2 hits - d size >= d |M|. So adding a cluster increases the
    # result if its share of foreground is at least d / 2.
    order = (hits / size.clamp(min=1)).argsort(descending=True)
    sizes, covered = size[order].cumsum(0), hits[order].cumsum(0)
    return float((2 * covered / (sizes + inside.sum())).max())


def _union_of(clusters: Any, labels: Tensor) -> Tensor:
    """Return which tokens are in one of the clusters, bool [N]."""
    as_labels("labels", labels)
    labels = torch.as_tensor(labels).cpu().long()
    if isinstance(clusters, Tensor):
        clusters = clusters.tolist()
    if not isinstance(clusters, Collection):
        raise ValueError(f"foreground must be a list of clusters or None, got {clusters!r}")
    clusters = [int(c) for c in clusters]
    known = labels.unique().tolist()
    unknown = sorted(set(clusters) - set(known))
    if unknown:
        raise ValueError(f"foreground must name clusters, {known}, got {unknown[0]}")
    return torch.isin(labels, torch.tensor(sorted(clusters), dtype=labels.dtype))


def participation_ratio(eigenvalues: Tensor) -> Tensor:
    """Compute the effective number of dimensions, (sum of eigenvalues)^2 / sum of squares.

    It is between 1 (all variance is in one direction) and C (all directions have the same).

    Args:
        eigenvalues: eigenvalues of a covariance, >= 0, [*, C].

    Returns:
        A tensor [*]; NaN if all eigenvalues are 0.

    Raises:
        ValueError: if `eigenvalues` is no floating-point tensor, or has a negative entry.

    Example:
        >>> import torch, graphattn as ga
        >>> ga.dynamics.participation_ratio(torch.tensor([[1.0, 1.0], [5.0, 0.0]]))
        tensor([2., 1.])
    """
    if not isinstance(eigenvalues, Tensor) or not eigenvalues.is_floating_point():
        got = eigenvalues.dtype if isinstance(eigenvalues, Tensor) else type(eigenvalues).__name__
        raise ValueError(f"eigenvalues must be a floating-point tensor [*, C], got {got}")
    if (eigenvalues < 0).any():
        raise ValueError(f"eigenvalues must be >= 0, got {float(eigenvalues.min())}")
    # The eigenvalues are scaled first, so that squares neither overflow nor underflow.
    share = eigenvalues / eigenvalues.sum(dim=-1, keepdim=True)
    return 1 / share.square().sum(dim=-1)

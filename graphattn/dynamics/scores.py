"""How good clusters are: by their shape, and by labels and masks the method never saw."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from graphattn.dynamics.arguments import as_labels, as_tokens, contingency, need_scikit_learn
from graphattn.graphs.arguments import as_int


def silhouette(points: Tensor, labels: Tensor) -> float:
    """Mean silhouette coefficient: 1 for compact clusters far apart, about 0 for none.

    Source: Attention Clusters, Eq. 4-6 (Rousseeuw, 1987); a token alone in its cluster, for which
    Eq. 5 has no value, counts 0. Computed by scikit-learn, in chunks.

    Args:
        points: [N, C].
        labels: cluster of every token, integers [N].

    Returns:
        A number in [-1, 1]; NaN where it has no meaning: one cluster, or every token its own.

    Raises:
        ValueError: if shapes disagree.
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
    """Number of clusters that the tokens of every label fall into, labels in ascending order."""

    clusters: Tensor  # number of clusters that hold some token of the label, int64 [L]
    largest_share: Tensor  # share of its tokens in the cluster that holds most, float64 [L]

    @property
    def mean_clusters(self) -> float:
        """Clusters per label, the mean over labels; 1 is no fragmentation."""
        return float(self.clusters.double().mean())

    @property
    def mean_largest_share(self) -> float:
        """Share of a label's tokens in its largest cluster, the mean over labels."""
        return float(self.largest_share.mean())


def fragmentation(labels: Tensor, truth: Tensor | None = None) -> Fragmentation:
    """Clusters per label and largest-cluster share: what Attention Clusters calls fragmentation.

    The paper (Sections 3.1-3.3) compares fragmentation by eye; these are its two numbers here. They
    say nothing of labels that share a cluster: see :func:`label_accuracy` for that.

    Args:
        labels: cluster of every token, integers [N].
        truth: label of every token, integers [N]; one label for all if None.

    Raises:
        ValueError: if shapes disagree.

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


def label_accuracy(labels: Tensor, truth: Tensor) -> float:
    """Accuracy of the best map from clusters to labels: every cluster says what most of it is.

    Source: Attention Clusters, Section 2.1, "semantic alignment". There the map is chosen by domain
    knowledge; here it is the best one, which is an upper bound, and grows with the number of
    clusters (one token each: 1). Read it beside that number, and beside KMeans on the raw data.

    Args:
        labels: cluster of every token, integers [N].
        truth: label of every token, integers [N].

    Raises:
        ValueError: if shapes disagree.

    Example:
        >>> import torch, graphattn as ga
        >>> ga.dynamics.label_accuracy(torch.tensor([5, 5, 5, 2]), torch.tensor([0, 0, 1, 1]))
        0.75
    """
    labels = as_labels("labels", labels)
    counts = contingency(labels, as_labels("truth", truth, len(labels)))
    return int(counts.amax(dim=1).sum()) / len(labels)


def dice(labels: Tensor, mask: Tensor, *, ignore: int | None = None) -> float:
    """Dice coefficient ``2 |A and M| / (|A| + |M|)`` of a mask M and the best union A of clusters.

    Source: Attention Clusters, Section 3.1 (two clusters, one painted white). Here every cluster is
    assigned to foreground or background so that the result is largest: sorted by the share of
    foreground in them, the best choice is a beginning of the list. Like :func:`label_accuracy`, an
    upper bound that grows with the number of clusters.

    Args:
        labels: cluster of every token, integers [N].
        mask: foreground where not 0, integers or bool, [N] or an image [H, W] of N pixels.
        ignore: tokens where the mask has this value are left out (the boundary of a trimap);
            if None they count as foreground like everything that is not 0.

    Raises:
        ValueError: if shapes disagree, or there is no foreground.

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
    labels = as_labels("labels", labels, len(mask))
    if ignore is not None:
        counted = mask != as_int("ignore", ignore, 0)
        mask, labels = mask[counted], labels[counted]
    foreground = mask != 0
    if not foreground.any():
        raise ValueError(
            "mask must have foreground (values other than 0"
            f"{'' if ignore is None else f' and ignore={ignore}'}), got none"
        )
    size = torch.bincount(labels).double()
    hits = torch.bincount(labels, weights=foreground.double(), minlength=len(size))
    # 2 hits / (size + |M|) >= d where 2 hits - d size >= d |M|: a cluster helps if its share of
    # foreground is at least d / 2.
    order = (hits / size.clamp(min=1)).argsort(descending=True)
    sizes, found = size[order].cumsum(0), hits[order].cumsum(0)
    return float((2 * found / (sizes + foreground.sum())).max())


def participation_ratio(eigenvalues: Tensor) -> Tensor:
    """Effective number of dimensions: (sum of eigenvalues)^2 / sum of squares.

    Between 1 (all variance in one direction) and C (the same in all).

    Args:
        eigenvalues: of a covariance, >= 0, [*, C].

    Returns:
        [*]; NaN where all eigenvalues are 0.

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
    # Scaled first, so that squares neither overflow nor vanish.
    share = eigenvalues / eigenvalues.sum(dim=-1, keepdim=True)
    return 1 / share.square().sum(dim=-1)

"""Scores against scikit-learn and against all assignments tried one by one."""

import itertools
import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphattn.dynamics import (
    cluster,
    dice,
    fragmentation,
    label_accuracy,
    participation_ratio,
    silhouette,
)

labelled = st.integers(2, 40).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(0, 4), min_size=n, max_size=n),
        st.lists(st.integers(0, 2), min_size=n, max_size=n),
    )
)


def silhouette_by_hand(points, labels):
    """Eq. 4-6, token by token; 0 for a token alone (Rousseeuw)."""
    values = []
    for i, cluster_of_i in enumerate(labels):
        mates = [k for k, label in enumerate(labels) if label == cluster_of_i and k != i]
        if not mates:
            values.append(0.0)
            continue
        a = sum(math.dist(points[i], points[k]) for k in mates) / len(mates)
        others = []
        for other in set(labels) - {cluster_of_i}:
            members = [k for k, label in enumerate(labels) if label == other]
            others.append(sum(math.dist(points[i], points[k]) for k in members) / len(members))
        values.append((min(others) - a) / max(a, min(others)))
    return sum(values) / len(values)


@settings(max_examples=30, deadline=None)
@given(labels=st.lists(st.integers(-3, 3), min_size=3, max_size=25), seed=st.integers(0, 2**32))
def test_silhouette_is_the_paper_s_equation(labels, seed):
    pytest.importorskip("sklearn")
    points = torch.randn(len(labels), 2, generator=torch.Generator().manual_seed(seed)).double()
    ours = silhouette(points, torch.tensor(labels))
    if 2 <= len(set(labels)) < len(labels):
        assert ours == pytest.approx(silhouette_by_hand(points.tolist(), labels), abs=1e-10)
    else:
        assert math.isnan(ours)


@settings(max_examples=60, deadline=None)
@given(labelled)
def test_accuracy_is_that_of_the_best_of_all_maps(case):
    labels, truth = case
    names, classes = sorted(set(labels)), sorted(set(truth))
    best = max(
        sum(image[names.index(c)] == y for c, y in zip(labels, truth, strict=True))
        for image in itertools.product(classes, repeat=len(names))
    )
    ours = label_accuracy(torch.tensor(labels), torch.tensor(truth))
    assert ours == pytest.approx(best / len(labels), abs=1e-15)


@settings(max_examples=60, deadline=None)
@given(labelled, st.booleans())
def test_dice_is_that_of_the_best_of_all_assignments(case, ignored):
    labels, classes = case
    mask = [(0, 1, 255)[c] for c in classes]
    counted = [i for i, m in enumerate(mask) if not (ignored and m == 255)]
    foreground = {i for i in counted if mask[i]}
    names = sorted({labels[i] for i in counted})
    if not foreground:
        with pytest.raises(ValueError, match="mask must have foreground"):
            dice(torch.tensor(labels), torch.tensor(mask), ignore=255 if ignored else None)
        return
    best = 0.0
    for size in range(1, len(names) + 1):
        for chosen in itertools.combinations(names, size):
            painted = {i for i in counted if labels[i] in chosen}
            both = len(painted & foreground)
            best = max(best, 2 * both / (len(painted) + len(foreground)))
    ours = dice(torch.tensor(labels), torch.tensor(mask), ignore=255 if ignored else None)
    assert ours == pytest.approx(best, abs=1e-14)


def test_dice_takes_masks_of_images_and_of_bools():
    labels = torch.tensor([0, 0, 1, 1, 1, 1])
    mask = torch.tensor([[True, True, False], [False, False, True]])
    assert dice(labels, mask) == pytest.approx(4 / 5)


@settings(max_examples=40, deadline=None)
@given(labelled)
def test_fragmentation_counts_the_pieces_of_every_label(case):
    labels, truth = case
    result = fragmentation(torch.tensor(labels), torch.tensor(truth))
    for k, kind in enumerate(sorted(set(truth))):
        of_label = [c for c, y in zip(labels, truth, strict=True) if y == kind]
        assert result.clusters[k] == len(set(of_label))
        assert result.largest_share[k].item() == pytest.approx(
            max(of_label.count(c) for c in set(of_label)) / len(of_label)
        )
    assert result.mean_clusters == pytest.approx(np.mean(result.clusters.numpy()))
    assert result.mean_largest_share == pytest.approx(np.mean(result.largest_share.numpy()))


def test_without_truth_fragmentation_is_that_of_all_tokens():
    result = fragmentation(torch.tensor([3, 3, 3, 8]))
    assert (result.clusters.tolist(), result.largest_share.tolist()) == ([2], [0.75])


def test_names_of_clusters_and_labels_do_not_matter():
    labels, truth = torch.tensor([0, 0, 1, 2, 2, 2]), torch.tensor([1, 1, 1, 0, 0, 1])
    other = torch.tensor([900, -5, 7])[labels]
    assert label_accuracy(other, 10 - truth) == label_accuracy(labels, truth) == 5 / 6
    assert dice(other, truth) == dice(labels, truth)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=8).filter(lambda v: max(v) > 1e-3),
    st.sampled_from([1.0, 1e-150, 1e150]),
)
def test_participation_ratio_lies_between_1_and_the_number_of_features(eigenvalues, unit):
    values = np.array(eigenvalues)
    ours = participation_ratio(torch.from_numpy(values * unit)).item()
    assert ours == pytest.approx(values.sum() ** 2 / (values**2).sum(), rel=1e-9)
    assert 1 - 1e-12 <= ours <= len(values) + 1e-9


def test_participation_ratio_of_equal_eigenvalues_is_their_number():
    assert participation_ratio(torch.full((2, 5), 0.3)).tolist() == pytest.approx([5.0, 5.0])
    assert participation_ratio(torch.zeros(3)).isnan()


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    points = torch.randn(4, 2)
    for call in (
        lambda: silhouette(points, torch.tensor([0, 0, 1, 1])),
        lambda: cluster(points, method="kmeans"),
    ):
        with pytest.raises(ImportError, match=r"pip install 'graphattn\[clusters\]'"):
            call()
    assert cluster(points).shape == (4,)  # merging needs none


POINTS, LABELS = torch.randn(4, 2), torch.tensor([0, 0, 1, 1])


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda: silhouette(POINTS, LABELS[:3]),
            "labels must have 4 entries, one per token, got 3",
        ),
        (lambda: silhouette(POINTS, LABELS.double()), r"labels must be a tensor \[N\] of integers"),
        (lambda: silhouette(POINTS[:, 0], LABELS), "points must be a floating-point tensor"),
        (
            lambda: label_accuracy(LABELS, LABELS[:2]),
            "truth must have 4 entries, one per token, got 2",
        ),
        (lambda: label_accuracy(LABELS[:0], LABELS[:0]), "labels must have at least one entry"),
        (lambda: fragmentation(["a", "b"]), "labels must be a tensor with one integer per token"),
        (lambda: fragmentation(LABELS, LABELS.view(2, 2)), r"truth must be a tensor \[N\]"),
        (lambda: dice(LABELS, torch.zeros(4)), "mask must be a tensor of integers or bools"),
        (lambda: dice(LABELS, torch.zeros(4).long()), "mask must have foreground"),
        (
            lambda: dice(LABELS, torch.ones(5).long()),
            "labels must have 5 entries, one per token, got 4",
        ),
        (lambda: dice(LABELS, LABELS, ignore=1), "mask must have foreground .*ignore=1"),
        (lambda: participation_ratio([1.0]), "eigenvalues must be a floating-point tensor"),
        (lambda: participation_ratio(torch.tensor([-1.0])), "eigenvalues must be >= 0, got -1"),
    ],
)
def test_bad_input_is_named(call, says):
    with pytest.raises(ValueError, match=says):
        call()


def test_a_given_map_of_clusters_is_used_as_it_is():
    clusters, truth = torch.tensor([7, 7, 2, 2, 2]), torch.tensor([1, 0, 0, 0, 1])
    assert label_accuracy(clusters, truth, mapping={7: 1, 2: 0}) == 3 / 5
    assert label_accuracy(clusters, truth, mapping={7: 0, 2: 1, 9: 5}) == 2 / 5
    assert label_accuracy([7, 2], [1, 4], mapping={7: 1, 2: 4}) == 1
    with pytest.raises(ValueError, match="mapping must have a label for every cluster, got none"):
        label_accuracy(clusters, truth, mapping={7: 1})
    with pytest.raises(ValueError, match="mapping must be a dict from clusters to labels or None"):
        label_accuracy(clusters, truth, mapping=[1, 0])
    with pytest.raises(ValueError, match="truth"):
        label_accuracy(clusters, truth[:3], mapping={7: 1, 2: 0})


def test_given_clusters_are_compared_with_the_mask():
    clusters, mask = torch.tensor([0, 0, 3, 3, 4]), torch.tensor([0, 1, 1, 2, 255])
    assert dice(clusters, mask, foreground=[3]) == 2 * 2 / (2 + 4)
    assert dice(clusters, mask, foreground=[3, 4]) == 2 * 3 / (3 + 4)
    assert dice(clusters, mask, foreground={3, 4}, ignore=255) == 2 * 2 / (2 + 3)
    assert dice(clusters, mask, foreground=[]) == 0
    assert dice(clusters, mask, foreground=torch.tensor([3])) == 2 / 3
    assert dice(clusters > 0, mask, foreground=[1]) == 2 * 3 / (3 + 4)
    with pytest.raises(ValueError, match="foreground must be a list of clusters or None, got 3"):
        dice(clusters, mask, foreground=3)
    with pytest.raises(ValueError, match=r"foreground must name clusters, \[0, 3, 4\], got 1"):
        dice(clusters, mask, foreground=[1])

"""Merged clusters against networkx, KMeans against its own definition."""

import itertools
import time

import networkx as nx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import graphattn as ga
from graphattn.dynamics import cluster, cluster_counts, simulate


def components(points, distance):
    """networkx's components of the graph of all pairs within `distance`, as sets of tokens."""
    graph = nx.Graph()
    graph.add_nodes_from(range(len(points)))
    gaps = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    graph.add_edges_from((gaps <= distance).nonzero().tolist())
    return {frozenset(c) for c in nx.connected_components(graph)}


def as_sets(labels):
    return {frozenset((labels == c).nonzero().flatten().tolist()) for c in labels.unique().tolist()}


def spread(points):
    return float((points - points.mean(0)).square().sum(1).mean().sqrt())


@settings(max_examples=80, deadline=None)
@given(
    num_tokens=st.integers(1, 60),
    num_features=st.integers(1, 6),
    num_blobs=st.integers(1, 6),
    width=st.sampled_from([0.0, 1e-9, 0.02, 0.1, 1.0]),
    tolerance=st.sampled_from([0.01, 0.05, 0.1, 0.3, 0.8]),
    seed=st.integers(0, 2**32),
)
def test_merged_clusters_are_networkx_s_components(
    num_tokens, num_features, num_blobs, width, tolerance, seed
):
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(num_blobs, num_features, generator=generator, dtype=torch.float64)
    home = torch.randint(num_blobs, (num_tokens,), generator=generator)
    noise = torch.randn(num_tokens, num_features, generator=generator, dtype=torch.float64)
    points = centres[home] + width * noise
    ours = as_sets(cluster(points, tolerance=tolerance))
    # Pairs at exactly the tolerance may fall on either side of rounding.
    distance = max(tolerance * spread(points), 1e-14)
    assert ours in (
        components(points, distance * (1 - 1e-9)),
        components(points, distance * (1 + 1e-9)),
    )


def test_chains_are_followed_through_groups():
    """Points on a line a little closer than the tolerance: one cluster, however long."""
    line = torch.arange(400, dtype=torch.float64)[:, None]
    labels = cluster(line, tolerance=1.01, spread=1.0)
    assert labels.max() == 0
    assert cluster(line, tolerance=0.99, spread=1.0).unique().numel() == 400
    gap = torch.cat([line[:200], line[200:] + 0.5])
    assert cluster(gap, tolerance=1.01, spread=1.0).bincount().tolist() == [200, 200]


def test_labels_go_by_size_then_by_first_token():
    points = torch.tensor([[9.0], [5.0], [5.0], [0.0], [7.0], [0.0], [0.0], [7.0]])
    assert cluster(points, tolerance=1e-3).tolist() == [3, 1, 1, 0, 2, 0, 0, 2]


def test_merging_ignores_offsets_and_units():
    points = torch.randn(100, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = cluster(points, tolerance=0.2)
    assert 1 < int(expected.max()) + 1 < 100
    assert torch.equal(cluster(1e5 + points, tolerance=0.2), expected)
    assert torch.equal(cluster(1e-7 * points, tolerance=0.2), expected)


@pytest.mark.parametrize("offset", [0.0, 1.0, -1e8])
def test_equal_points_are_one_cluster_also_up_to_rounding(offset):
    points = torch.full((50, 3), offset, dtype=torch.float64)
    assert cluster(points).max() == 0
    noisy = points + abs(offset) * 1e-16 * torch.randn(50, 3, dtype=torch.float64)
    assert cluster(noisy).max() == 0
    assert cluster(points, method="kmeans").max() == 0


@pytest.mark.parametrize(
    ("kind", "n"),
    [
        ("line", 20_000),
        ("two points", 20_000),
        ("spread out", 20_000),
        ("blob", 6_000),
        ("high-dimensional", 4_000),
    ],
)
def test_many_points_take_seconds(kind, n):
    """All pairs of 20,000 would be 3 GB; trees in 32 dimensions are slow, but work."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    side = torch.arange(n) % 2
    points, expected = {
        "blob": (noise, None),
        "line": (torch.linspace(0, 1, n, dtype=torch.float64)[:, None], 1),
        "two points": (side[:, None] + 1e-6 * noise, 2),
        "spread out": (torch.rand(n, 2, generator=generator, dtype=torch.float64), None),
        "high-dimensional": (torch.randn(n, 32, generator=generator, dtype=torch.float64), n),
    }[kind]
    start = time.process_time()
    labels = cluster(points)
    assert time.process_time() - start < 10
    if expected is not None:
        assert int(labels.max()) + 1 == expected


def test_kmeans_finds_separate_blobs_and_how_many():
    pytest.importorskip("sklearn")
    generator = torch.Generator().manual_seed(0)
    home = torch.arange(120) % 4
    centres = torch.tensor([[0.0, 0], [10, 0], [0, 10], [10, 10]])
    points = centres[home] + torch.randn(120, 2, generator=generator)
    labels = cluster(points, method="kmeans")
    assert as_sets(labels) == as_sets(home)


def test_kmeans_with_a_given_k_is_the_best_of_all_partitions():
    """Nine points in two clusters: every partition is tried."""
    pytest.importorskip("sklearn")
    points = torch.randn(9, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def inertia(labels):
        groups = [points[labels == c] for c in labels.unique()]
        return sum(float((g - g.mean(0)).square().sum()) for g in groups)

    best = min(inertia(torch.tensor([0, *rest])) for rest in itertools.product([0, 1], repeat=8))
    ours = cluster(points, method="kmeans", num_clusters=2)
    assert inertia(ours) == pytest.approx(best, rel=1e-9)
    assert cluster(points, method="kmeans", num_clusters=1).max() == 0
    assert cluster(points, method="kmeans", num_clusters=100).unique().numel() == 9


def test_few_points_still_have_kmeans_clusters():
    pytest.importorskip("sklearn")
    assert cluster(torch.tensor([[1.0]]), method="kmeans").tolist() == [0]
    assert cluster(torch.tensor([[1.0], [2.0]]), method="kmeans").tolist() == [0, 1]


def test_clusters_are_counted_after_every_step():
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    trajectory = simulate(x, ga.complete_graph(40), steps=6)
    counts = cluster_counts(trajectory, tolerance=0.2)
    for t, update in enumerate(trajectory.updates):
        assert counts[t] == len(components(update, 0.2 * spread(update)))
    assert counts[-1] < counts[0]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"method": "dbscan"}, "method must be one of 'merge', 'kmeans'"),
        ({"tolerance": 0.0}, "tolerance must be a finite number > 0"),
        ({"max_clusters": 1}, "max_clusters must be >= 2"),
        ({"num_clusters": 0}, "num_clusters must be >= 1"),
        ({"spread": -1.0}, "spread must be a finite number >= 0"),
    ],
)
def test_bad_options_are_named(options, says):
    with pytest.raises(ValueError, match=says):
        cluster(torch.randn(5, 2), **options)


def test_bad_points_are_named():
    with pytest.raises(ValueError, match=r"points must be finite, got points\[1\]"):
        cluster(torch.tensor([[0.0], [float("nan")]]))

"""A pattern beside global attention, every number computed again from its parts."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import graphattn as ga
from graphattn.dynamics import (
    cluster,
    fragmentation,
    label_accuracy,
    preview,
    silhouette,
    simulate,
    standardize,
)
from graphattn.dynamics.preview import adjusted_rand_index

sklearn_metrics = pytest.importorskip("sklearn.metrics", reason="silhouettes need scikit-learn")


def two_clouds(num_tokens=80):
    generator = torch.Generator().manual_seed(0)
    truth = torch.randint(2, (num_tokens,), generator=generator)
    x = torch.randn(num_tokens, 3, generator=generator, dtype=torch.float64)
    x[:, 0] += 5 * truth
    return x, truth


def test_global_attention_is_its_own_equal():
    x, truth = two_clouds()
    result = preview(x, ga.complete_graph(80), steps=6, labels=truth)
    assert result.agreement == 1.0
    assert result.pattern == result.baseline


def test_every_number_is_that_of_its_parts():
    x, truth = two_clouds()
    graph = ga.block_window_graph(80, 16)
    result = preview(100 * x + 7, graph, steps=8, labels=truth)  # it is standardised first
    by_edges = {}
    for scores, g in ((result.pattern, graph), (result.baseline, ga.complete_graph(80))):
        run = simulate(standardize(x), g, steps=8)
        labels = cluster(run.updates[-1])
        by_edges[scores.num_edges] = labels
        assert scores.num_edges == g.num_edges
        assert scores.num_clusters == len(labels.unique())
        assert scores.silhouette == pytest.approx(silhouette(run.updates[-1], labels), nan_ok=True)
        assert scores.accuracy == label_accuracy(labels, truth)
        assert scores.clusters_per_label == fragmentation(labels, truth).mean_clusters
        assert scores.largest_share == fragmentation(labels, truth).mean_largest_share
        assert scores.leading_share == pytest.approx(float(run.leading_share[-1]))
    expected = sklearn_metrics.adjusted_rand_score(*(v.numpy() for v in by_edges.values()))
    assert result.agreement == pytest.approx(expected)


def test_without_labels_fragmentation_is_that_of_the_global_clusters():
    x, _ = two_clouds()
    result = preview(x, ga.block_window_graph(80, 16), steps=8)
    assert result.baseline.clusters_per_label == 1.0
    assert result.baseline.largest_share == 1.0
    assert result.pattern.accuracy is None
    assert "global cluster" in str(result)
    assert "accuracy" not in str(result)


def test_it_prints_as_a_table_of_two_columns():
    x, truth = two_clouds()
    text = str(preview(x, ga.window_path_graph(80, 4, self_loops=True), steps=4, labels=truth))
    lines = text.splitlines()
    assert len({len(line) for line in lines[:-1]}) == 1
    assert lines[0].split() == ["after", "4", "steps", "pattern", "global"]
    assert lines[1].split() == ["edges", "700", "6,400"]
    assert any(line.startswith("accuracy") for line in lines)
    assert lines[-1].startswith("agreement (adjusted Rand index)")


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 30).flatmap(
        lambda n: st.tuples(*[st.lists(st.integers(0, 3), min_size=n, max_size=n)] * 2)
    )
)
def test_agreement_is_scikit_learn_s_adjusted_rand_index(case):
    a, b = (torch.tensor(labels).unique(return_inverse=True)[1] for labels in case)
    expected = sklearn_metrics.adjusted_rand_score(a.numpy(), b.numpy())
    assert adjusted_rand_index(a, b) == pytest.approx(expected, abs=1e-12)


def test_bad_input_is_named():
    x, truth = two_clouds()
    graph = ga.complete_graph(80)
    with pytest.raises(ValueError, match="steps must be >= 1, got 0"):
        preview(x, graph, steps=0)
    with pytest.raises(ValueError, match="labels must have 80 entries, one per token, got 79"):
        preview(x, graph, labels=truth[1:])
    with pytest.raises(ValueError, match="graph has 5 targets"):
        preview(x, ga.complete_graph(5))
    with pytest.raises(ValueError, match="tolerance must be a finite number > 0"):
        preview(x, graph, tolerance=math.nan)

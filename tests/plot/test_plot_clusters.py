"""Figures of clusters show the numbers they are given."""

import numpy
import pytest
import torch
from matplotlib.colors import to_hex, to_rgb

import graphattn as ga
from graphattn.dynamics import cluster_counts, simulate
from graphattn.plot import clusters as plot
from graphattn.plot.drawing.style import COLOURS


def trajectory(steps=6, num_features=3):
    x = torch.randn(40, num_features, generator=torch.Generator().manual_seed(0)).double()
    return simulate(x, ga.complete_graph(40), steps=steps)


def test_points_of_a_cluster_share_a_colour_and_stand_where_they_are(ax):
    points = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(12) % 3
    assert plot.cluster_scatter(points, labels, features=(2, 0), ax=ax) is ax
    drawn = {to_hex(c.get_facecolor()[0][:3]): c.get_offsets() for c in ax.collections}
    for c in range(3):
        expected = points[labels == c][:, [2, 0]].numpy()
        numpy.testing.assert_allclose(drawn[COLOURS[c]], expected, rtol=1e-6)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("feature 2", "feature 0")


def test_clusters_after_the_sixth_share_grey(ax):
    plot.cluster_scatter(torch.randn(50, 2), torch.arange(50), ax=ax)
    assert len(ax.collections) == 7
    assert len(ax.collections[0].get_offsets()) == 44  # drawn first, beneath


def test_one_feature_is_drawn_along_a_line(ax):
    plot.cluster_scatter(torch.tensor([[3.0], [4.0]]), torch.tensor([0, 0]), ax=ax)
    assert ax.collections[0].get_offsets().tolist() == [[3, 0], [4, 0]]


def test_leaders_are_stars(ax):
    points = torch.randn(5, 2)
    leaders = torch.tensor([4, 2])
    plot.cluster_scatter(points, torch.zeros(5, dtype=torch.int64), leaders=leaders, ax=ax)
    stars = ax.collections[-1].get_offsets()
    numpy.testing.assert_allclose(stars, points[[4, 2]].numpy(), rtol=1e-6)


def test_pixels_have_the_colour_of_their_cluster(ax):
    labels = torch.tensor([0, 1, 2, 6, 9, 0])
    plot.cluster_image(labels, 2, 3, ax=ax)
    cells = numpy.asarray(ax.images[0].get_array())
    assert cells.shape == (2, 3, 3)
    numpy.testing.assert_allclose(cells[0, 1], to_rgb(COLOURS[1]), rtol=1e-6)
    numpy.testing.assert_allclose(cells[0, 0], cells[1, 2])


def test_spectra_are_shares_that_sum_to_one(ax):
    run = trajectory()
    plot.covariance_spectra(run, ax=ax)
    heights = numpy.array([line.get_ydata() for line in ax.lines])[::-1]
    numpy.testing.assert_allclose(heights.sum(axis=0), 1)
    numpy.testing.assert_allclose(heights[0], run.leading_share)
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["λ1", "λ2", "λ3"]


def test_many_features_have_six_names_and_draw(ax):
    plot.covariance_spectra(trajectory(num_features=9), ax=ax)
    assert len(ax.lines) == 9
    assert len(ax.get_legend().get_texts()) == 6
    ax.figure.draw_without_rendering()


def test_counts_are_those_of_the_updates(ax):
    run = trajectory()
    plot.cluster_counts({"$_a": run, "b": trajectory(3)}, tolerance=0.3, ax=ax)
    assert ax.lines[0].get_ydata().tolist() == cluster_counts(run, tolerance=0.3).tolist()
    assert list(ax.lines[0].get_xdata()) == [1, 2, 3, 4, 5, 6]
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["$_a", "b"]
    ax.figure.draw_without_rendering()  # "$" is no mathematics


scatter = plot.cluster_scatter
POINTS, LABELS = torch.randn(4, 2), torch.tensor([0, 0, 1, 1])


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: scatter(POINTS, LABELS[:3]), "labels must have 4 entries, one per token, got 3"),
        (lambda: scatter(POINTS, LABELS, features=(0, 2)), "features must be two numbers from 0"),
        (lambda: scatter(POINTS, LABELS, features=(-1, 0)), "features must be >= 0"),
        (lambda: scatter(POINTS, LABELS, leaders=[4]), "leaders must be tokens from 0 to 3, got 4"),
        (lambda: plot.cluster_image(LABELS, 2, 3), "labels must have 6 entries, one per .*, got 4"),
        (lambda: plot.covariance_spectra(POINTS), "trajectory must be a Trajectory, got Tensor"),
        (lambda: plot.cluster_counts({}), "at least one trajectory"),
        (lambda: plot.cluster_counts({"a": POINTS}), r"trajectories\['a'\] must be a Trajectory"),
        (lambda: plot.cluster_counts({"a": trajectory(0)}), "got none for 'a'"),
    ],
)
def test_bad_input_is_named(call, says):
    with pytest.raises(ValueError, match=says):
        call()


@pytest.mark.parametrize(
    ("low", "high"), [(28, 33), (1, 1), (255, 255), (20, 150), (3, 5000), (1, 4096), (90, 131)]
)
def test_ticks_of_cluster_counts_are_a_few_whole_numbers_written_out(low, high, ax, monkeypatch):
    x = torch.randn(40, 2, dtype=torch.float64)
    run = ga.dynamics.simulate(x, ga.complete_graph(40), steps=8)
    counts = torch.linspace(high, low, 8).round().long()
    monkeypatch.setattr("graphattn.plot.clusters.merged_counts", lambda *a, **k: counts)
    ga.plot.cluster_counts({"run": run}, ax=ax)
    ax.figure.draw_without_rendering()
    bottom, top = ax.get_ylim()
    ticks = {
        tick.label1.get_text(): tick.get_loc()
        for minor in (False, True)
        for tick in (ax.yaxis.get_minor_ticks() if minor else ax.yaxis.get_major_ticks())
        if bottom <= tick.get_loc() <= top
    }
    assert 1 <= len(ticks) <= 10
    assert len(ticks) >= 2 or low == high
    for text, place in ticks.items():
        assert text == f"{round(place):,}"
        assert place == round(place)

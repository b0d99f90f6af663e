"""Radius graphs: everything at distance <= radius, the boundary included."""

import math

import pytest
import scipy.spatial
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import graphattn as ga


def close_by_loop(points, radius, *, max_neighbors=None, self_loops=False):
    """The rules in Python's float64, as a mask."""
    points = points.tolist()
    mask = torch.zeros((len(points), len(points)), dtype=torch.bool)
    for i, a in enumerate(points):
        row = []
        for j, b in enumerate(points):
            if not all(math.isfinite(c) for c in (*a, *b)) or (i == j and not self_loops):
                continue
            distance = sum((p - q) ** 2 for p, q in zip(a, b, strict=True))
            if i == j or distance <= radius * radius:
                row.append((i != j, distance, j))
        mask[i, [j for _, _, j in sorted(row)[:max_neighbors]]] = True
    return mask


def random_points(num_points, num_coordinates, *, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_points, num_coordinates, generator=generator, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("radius", [0.0, 0.3, 1.0, 2.0, 100.0])
@pytest.mark.parametrize("self_loops", [False, True])
def test_tokens_within_the_radius_see_each_other(dtype, radius, self_loops, check_graph):
    points = random_points(20, 3, dtype=dtype)
    graph = ga.radius_graph(points, radius, self_loops=self_loops)
    check_graph(graph, close_by_loop(points, radius, self_loops=self_loops).tolist())
    assert graph == graph.transpose()


def test_the_boundary_belongs_to_the_ball():
    triangle = torch.tensor([[0.0, 0.0], [3.0, 0.0], [0.0, 4.0]])  # sides 3, 4 and 5
    assert ga.radius_graph(triangle, 5).num_edges == 6
    assert ga.radius_graph(triangle, 4.999).num_edges == 4
    assert ga.radius_graph(triangle, 4).num_edges == 4
    assert ga.radius_graph(triangle, 3).num_edges == 2
    assert ga.radius_graph(triangle, 2.999).num_edges == 0


@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_integer_points_with_boundaries_and_ties_and_any_options(data):
    num_points, width = data.draw(st.integers(0, 9)), data.draw(st.integers(1, 3))
    row = st.lists(st.integers(0, 4), min_size=width, max_size=width)
    rows = data.draw(st.lists(row, min_size=num_points, max_size=num_points))
    points = torch.tensor(rows, dtype=torch.float32).reshape(num_points, width)
    radius = data.draw(st.integers(0, 5))
    options = {
        "max_neighbors": data.draw(st.none() | st.integers(1, 10)),
        "self_loops": data.draw(st.booleans()),
    }
    graph = ga.radius_graph(points, radius, **options)
    assert torch.equal(graph.to_mask(), close_by_loop(points, radius, **options))
    assert graph == ga.from_mask(graph.to_mask())


@pytest.mark.parametrize("max_neighbors", [1, 2, 5, 19, 20, 50])
@pytest.mark.parametrize("self_loops", [False, True])
def test_max_neighbors_keeps_the_nearest(max_neighbors, self_loops, check_graph):
    points = random_points(20, 2)
    options = {"max_neighbors": max_neighbors, "self_loops": self_loops}
    graph = ga.radius_graph(points, 1.0, **options)
    check_graph(graph, close_by_loop(points, 1.0, **options).tolist())


def test_the_cut_to_the_nearest_can_be_one_sided():
    points = torch.tensor([[0.0], [1.0], [1.5]])
    graph = ga.radius_graph(points, 1.2, max_neighbors=1)
    assert graph.edge_index.tolist() == [[1, 2, 1], [0, 1, 2]]  # 0 sees 1, but 1 sees only 2


def test_among_equal_distances_the_smaller_index_stays():
    points = torch.tensor([[0.0], [1.0], [-1.0], [1.0]])
    mask = ga.radius_graph(points, 1.0, max_neighbors=2).to_mask()
    assert mask[0].nonzero().flatten().tolist() == [1, 2]


def test_oneself_counts_as_the_first_neighbour():
    points = torch.zeros(4, 2)
    assert (
        ga.radius_graph(points, 1.0, max_neighbors=1, self_loops=True)
        .to_mask()
        .equal(torch.eye(4).bool())
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("options", [{}, {"self_loops": True}, {"max_neighbors": 2}], ids=str)
def test_tokens_that_are_not_finite_have_no_edges(bad, options):
    points = random_points(8, 3)
    points[3, 1] = points[6, 0] = bad
    graph = ga.radius_graph(points, 3.0, **options)
    assert torch.equal(graph.to_mask(), close_by_loop(points, 3.0, **options))
    assert not torch.isin(graph.edge_index, torch.tensor([3, 6])).any()


def test_nearer_by_one_in_the_square_is_nearer():
    # As for knn: float32 holds both squares, 4240682 and 4240681, but not their roots apart.
    points = torch.tensor([[0.0, 0.0], [659.0, 1951.0], [616.0, 1965.0]])
    mask = ga.radius_graph(points, 3000, max_neighbors=1).to_mask()
    assert mask[0].tolist() == [False, False, True]


def test_a_common_offset_of_a_million_changes_nothing_in_float32():
    steps = torch.randint(-64, 64, (60, 3), generator=torch.Generator().manual_seed(0))
    near = steps.float() / 16
    for options in ({}, {"max_neighbors": 3}):
        graph = ga.radius_graph(near + 1e6, 2.5, **options)
        assert torch.equal(graph.to_mask(), close_by_loop(near, 2.5, **options))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_points_are_measured_in_full(dtype):
    # In half precision 3000^2 overflows (float16) or loses its last digits (bfloat16).
    points = torch.tensor([[0.0, 0.0], [3072.0, 4096.0], [3072.0, 0.0]], dtype=dtype)
    assert ga.radius_graph(points, 5120).num_edges == 6
    assert ga.radius_graph(points, 5119).num_edges == 4


def test_a_radius_graph_holds_no_gradient():
    points = random_points(5, 2).requires_grad_()
    assert not ga.radius_graph(points, 1.0).edge_index.requires_grad


def test_no_points_have_no_edges(check_graph):
    check_graph(ga.radius_graph(torch.zeros(0, 3), 1.0), [])
    check_graph(ga.radius_graph(torch.zeros(0, 3), 1.0, max_neighbors=2), [])
    check_graph(ga.radius_graph(torch.zeros(1, 3), 1.0, self_loops=True), [[True]])


def test_thousands_of_points_agree_with_a_kd_tree():
    # More distances than are held at a time, so that tiles join somewhere.
    points = random_points(4200, 3)
    tree = scipy.spatial.cKDTree(points.numpy())
    pairs = torch.from_numpy(tree.query_pairs(0.2, output_type="ndarray"))
    expected = ga.from_edge_index(torch.cat([pairs, pairs.flip(1)]).T, 4200)
    graph = ga.radius_graph(points, 0.2)
    assert graph == expected
    assert graph.num_edges > 10_000
    nearest = ga.radius_graph(points, 0.2, max_neighbors=2)
    distance, index = tree.query(points.numpy(), k=3)
    close = torch.from_numpy(distance[:, 1:] <= 0.2)
    target, slot = close.nonzero().T
    source = torch.from_numpy(index[:, 1:])[target, slot]
    assert nearest == ga.from_edge_index(torch.stack([source, target]), 4200)

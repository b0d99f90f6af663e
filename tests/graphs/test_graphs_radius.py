"""Radius graphs: everything at distance <= radius, the boundary included."""

import math

import pytest
import scipy.spatial
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import graphattn as ga
from graphattn.graphs.builders import neighbors


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
            if i == j or math.sqrt(distance) <= radius:
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


ROUTES = ["compiled", "a tree", "all pairs"]


def take(route, monkeypatch):
    """Make searches within a radius take one of their routes."""
    if route != "compiled":
        monkeypatch.setattr(neighbors, "has_nearest", lambda *points: False)
    if route == "all pairs":
        monkeypatch.setattr(neighbors, "is_for_trees", lambda *points: False)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str
)
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_lattices_find_the_neighbours_at_the_radius(dimensions, dtype, route, monkeypatch):
    take(route, monkeypatch)
    side = {1: 257, 2: 17, 3: 7}[dimensions]  # more points than a tree needs
    axes = torch.meshgrid(*dimensions * [torch.arange(side)], indexing="ij")
    points = torch.stack(axes, dim=-1).flatten(0, -2)
    squared = (points[:, None] - points).square().sum(-1)  # integers
    for n in (1, 2, 3, 5, 8):
        inside = (squared <= n) & (squared > 0)
        graph = ga.radius_graph(points.to(dtype), n**0.5)
        assert torch.equal(graph.edge_index, inside.nonzero().T.flip(0))
        most = int(inside.sum(1).max())
        assert graph == ga.radius_graph(points.to(dtype), n**0.5, max_neighbors=most)
        others = ga.radius_graph(points[::3].to(dtype), n**0.5, source=points.to(dtype))
        assert torch.equal(others.edge_index, (squared <= n)[::3].nonzero().T.flip(0))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounded_distances_are_compared_with_the_rounded_radius(dtype, route, monkeypatch):
    take(route, monkeypatch)
    points = random_points(300, 3, dtype=dtype)
    x, y, z = ((c[:, None] - c).square() for c in points.double().T)
    distance = (x + y + z).sqrt().to(dtype)
    for radius in (
        distance[0].sort().values[[1, 2, 20, 200]].tolist()
    ):  # of which each is the distance of two points
        for near in (radius, math.nextafter(radius, 0), math.nextafter(radius, 9)):
            inside = (distance <= torch.tensor(near, dtype=dtype)).fill_diagonal_(False)
            edge_index = ga.radius_graph(points, near).edge_index
            assert torch.equal(edge_index, inside.nonzero().T.flip(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_radii_at_the_ends_of_a_dtype(dtype):
    points = torch.tensor([[0.0], [1.0]], dtype=dtype)
    for radius in (0.0, 5e-324, 1e-200, 1e-40):
        assert ga.radius_graph(points, radius).num_edges == 0
    for radius in (1.0, torch.finfo(dtype).max, 1e300, 1.7976931348623157e308):
        assert ga.radius_graph(points, radius).num_edges == 2


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


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("options", [{}, {"self_loops": True}, {"max_neighbors": 2}], ids=str)
def test_tokens_that_are_not_finite_have_no_edges(bad, options):
    points = random_points(8, 3)
    points[3, 1] = points[6, 0] = bad
    graph = ga.radius_graph(points, 3.0, **options)
    assert torch.equal(graph.to_mask(), close_by_loop(points, 3.0, **options))
    assert not torch.isin(graph.edge_index, torch.tensor([3, 6])).any()


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


# Sources that are other tokens.


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("max_neighbors", [None, 1, 4, 1000])
@pytest.mark.parametrize("num_coordinates", [1, 3, 9])
def test_targets_see_the_sources_within_the_radius(
    num_coordinates, max_neighbors, route, monkeypatch
):
    take(route, monkeypatch)
    points = random_points(40, num_coordinates)
    source = random_points(300, num_coordinates, seed=1)
    points[7, 0], source[5, 0], source[9] = math.nan, math.inf, source[8]
    squared = (points[:, None] - source).square().sum(-1)
    for radius in (0.4, 2.0, 100.0):
        squared_in = squared.masked_fill(~(squared.sqrt() <= radius), math.inf)
        order = squared_in.argsort(dim=1, stable=True)[:, :max_neighbors]
        mask = torch.zeros_like(squared, dtype=torch.bool).scatter_(1, order, True)
        mask &= squared_in < math.inf
        graph = ga.radius_graph(points, radius, source=source, max_neighbors=max_neighbors)
        assert graph.num_sources == 300
        assert torch.equal(graph.edge_index, mask.nonzero().T.flip(0))


def test_items_of_two_sets_are_searched_each_by_itself():
    # Item 1 has no targets, item 2 no sources, and there is no item 3.
    targets, sources = torch.tensor([0, 0, 2, 4]), torch.tensor([0, 1, 1, 4, 4, 4])
    points, source = random_points(4, 2), random_points(6, 2, seed=1)
    for options in ({}, {"max_neighbors": 2}):
        graph = ga.radius_graph(points, 1.5, source=source, batch=(targets, sources), **options)
        assert graph.sizes == ((2, 1), (0, 2), (1, 0), (0, 0), (1, 3))
        items = [
            ga.radius_graph(points[targets == i], 1.5, source=source[sources == i], **options)
            for i in range(5)
        ]
        assert graph == ga.batch(items)
    pairs = random_points(6, 2).view(2, 3, 2), random_points(8, 2, seed=1).view(2, 4, 2)
    items = [ga.radius_graph(x, 1.5, source=y) for x, y in zip(*pairs, strict=True)]
    assert ga.radius_graph(pairs[0], 1.5, source=pairs[1]) == ga.batch(items)


# The interface of pytorch_cluster: row 0 of its result holds queries `y`, row 1 points `x`.


def cluster_batch(x, y, batch_x, batch_y):
    """The items of pytorch_cluster, which may be missing for one of both sets."""
    batch_x = torch.zeros(len(x), dtype=torch.long) if batch_x is None else batch_x
    batch_y = torch.zeros(len(y), dtype=torch.long) if batch_y is None else batch_y
    return batch_y, batch_x


def cluster_knn(x, y, k, batch_x=None, batch_y=None):
    batch = cluster_batch(x, y, batch_x, batch_y)
    return ga.knn_graph(y, k, source=x, batch=batch).edge_index.flip(0)


def cluster_radius(x, y, r, batch_x=None, batch_y=None, max_num_neighbors=32):
    batch = cluster_batch(x, y, batch_x, batch_y)
    graph = ga.radius_graph(y, r, source=x, batch=batch, max_neighbors=max_num_neighbors)
    return graph.edge_index.flip(0)


def pairs_of(edges):
    return set(map(tuple, edges.T.tolist()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_pytorch_cluster_s_searches_of_two_sets(dtype):
    corners = [[-1, -1], [-1, 1], [1, 1], [1, -1]]
    x = torch.tensor(2 * corners, dtype=dtype)
    y = torch.tensor([[1, 0], [-1, 0]], dtype=dtype)
    batch_x, batch_y = torch.tensor([0] * 4 + [1] * 4), torch.tensor([0, 1])

    assert pairs_of(cluster_knn(x[:4], y, 2)) == {(0, 2), (0, 3), (1, 0), (1, 1)}
    both = {(0, 2), (0, 3), (1, 4), (1, 5)}
    assert pairs_of(cluster_knn(x, y, 2, batch_x, batch_y)) == both
    # Fewer points than k: all of an item. Without items, one of both vectors says all.
    assert pairs_of(cluster_knn(x[:1], y, 2)) == {(0, 0), (1, 0)}
    assert pairs_of(cluster_knn(x, y, 2, batch_x)) == {(0, 2), (0, 3), (1, 0), (1, 1)}
    # Numbers of items with gaps, also such as only one of the sets holds.
    gaps = torch.tensor([0] * 4 + [2] * 4)
    assert pairs_of(cluster_knn(x, y, 2, gaps, batch_y)) == {(0, 2), (0, 3)}
    assert pairs_of(cluster_knn(x, y, 2, gaps, torch.tensor([0, 2]))) == both

    assert pairs_of(cluster_radius(x[:4], y, 2)) == {(i, j) for i in (0, 1) for j in range(4)} - {
        (0, 0), (0, 1), (1, 2), (1, 3)
    }  # fmt: skip
    assert pairs_of(cluster_radius(x, y, 2, batch_x, batch_y)) == both
    assert pairs_of(cluster_radius(x, y, 2, gaps, torch.tensor([0, 2]))) == both
    assert pairs_of(cluster_radius(x, y, 2, gaps, batch_y)) == {(0, 2), (0, 3)}
    far = {(0, j) for j in range(4)} | {(1, j) for j in range(4, 8)}
    assert pairs_of(cluster_radius(x, y, 5**0.5, batch_x, batch_y)) == far  # at the radius
    assert cluster_radius(x, y, 2, batch_x, batch_y, max_num_neighbors=1).shape == (2, 2)

"""Neighbours found by a tree, without compiled code: those of all pairs, whatever the points."""

import multiprocessing

import pytest
import torch
from hard_points import (
    POINTS,
    N,
    check_equal_points,
    cloud,
    draw_clusters,
    lattice,
    nearest_by_numpy,
    on_a_sphere,
    wide,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import graphattn as ga
from graphattn.graphs.builders import neighbors
from graphattn.graphs.search import kd_tree, nearest_neighbors
from graphattn.graphs.search.distances import nearest_by_pairs, squared_reach
from graphattn.graphs.search.kd_tree import FEWEST, PointTree, is_for_trees, nearest_by_tree
from graphattn.graphs.search.nearest_neighbors import nearest_index
from graphattn.kernels.cpu import library


@pytest.fixture(autouse=True)
def no_compiled_code(monkeypatch):
    """Hide the compiled code, which would be used in the place of trees."""
    monkeypatch.setattr(library, "library", lambda: None)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("name", POINTS)
def test_neighbours_are_those_of_float64(name, width):
    x = POINTS[name](width)
    assert is_for_trees(x, x, 10)
    for k, self_loops in ((1, False), (1, True), (6, False), (10, True)):
        expected = nearest_by_numpy(x, k, self_loops=self_loops)
        assert torch.equal(nearest_index(x, k, self_loops=self_loops), expected)


@pytest.mark.long
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_clusters_scales_and_offsets_exchange_nobody(data):
    x = draw_clusters(data, st.integers(1, 6), [1e-30, 1.0, 1e12, 1e30])
    k, self_loops = data.draw(st.integers(1, FEWEST // 16)), data.draw(st.booleans())
    expected = nearest_by_pairs(x, x, k, True, self_loops)
    assert torch.equal(nearest_index(x, k, self_loops=self_loops), expected)


def spied(monkeypatch):
    """(rows, candidates of each, rows not proven) of every question to a tree."""
    asked = []
    original = kd_tree._TreeSearch.answer

    def answer(self, rows, many, index):
        unsure = original(self, rows, many, index)
        asked.append((len(rows), many, len(unsure)))
        return unsure

    monkeypatch.setattr(kd_tree._TreeSearch, "answer", answer)
    return asked


def test_of_random_points_two_candidates_more_than_neighbours_are_proof(monkeypatch):
    asked = spied(monkeypatch)
    nearest_index(cloud(3, count=3000), 8)
    assert sum(rows for rows, _, _ in asked) == 3000
    assert {(many, unsure) for _, many, unsure in asked} == {(10, 0)}


def test_ties_beyond_the_candidates_are_seen_and_looked_for(monkeypatch):
    """The certificate: inside a lattice six sources are equally far, and any of them may come."""
    x = lattice(3)
    asked = spied(monkeypatch)
    assert torch.equal(nearest_index(x, 2), nearest_by_numpy(x, 2))
    assert any(unsure for _, many, unsure in asked if many == 4)
    monkeypatch.setattr(kd_tree, "_widened", lambda distance, _: distance * 0.5)
    trusted, left = nearest_by_tree(x, x, 2, True, False)
    assert not len(left)
    assert not torch.equal(trusted, nearest_by_numpy(x, 2)), "without it the tree's choice stands"


def test_a_row_with_hundreds_of_equal_distances_looks_at_all_pairs(monkeypatch):
    source = torch.cat([on_a_sphere(), cloud(3) + 100])
    x = torch.cat([torch.zeros(1, 3), cloud(3) + 100, torch.zeros(1, 3)])
    _, left = nearest_by_tree(x, source, 3, False, False)
    assert left.tolist() == [0, len(x) - 1]
    index = nearest_index(x, 3, source)
    assert torch.equal(index, nearest_by_numpy(x, 3, source))
    assert index[0].tolist() == index[-1].tolist() == [0, 1, 2]


def test_where_most_rows_have_hundreds_of_equal_distances_a_tree_gives_up():
    x = torch.zeros(1500, 3)
    assert nearest_by_tree(x, on_a_sphere(), 3, False, False) is None
    assert torch.equal(nearest_index(x, 3, on_a_sphere()), torch.arange(3).expand(1500, 3))


def test_of_equal_points_a_tree_holds_the_first_few():
    x = cloud(3, count=2)[torch.arange(1000) % 2]
    tree = PointTree(x.double().numpy(), copies=5)
    assert tree.source.tolist() == [*range(10), -1]
    assert PointTree(x.double().numpy(), copies=500).is_whole


def test_thousands_of_equal_points_among_others_see_those_of_smallest_index():
    check_equal_points(3, 30_000)


# Radius graphs.


@pytest.mark.parametrize("name", POINTS)
def test_radius_graphs_are_those_of_all_pairs_bit_for_bit(name):
    x = wide(POINTS[name](3))
    known = x[x.isfinite().all(1)].double()
    gap = min(float((known[0] - known[1 % len(known)]).square().sum().sqrt()), 1e150)
    just_less = float(torch.nextafter(x.new_tensor(gap), x.new_tensor(0.0)))
    for radius in (gap / 4, just_less, gap):
        reach = squared_reach(radius, x.dtype)
        for most, self_loops in ((None, False), (None, True), (1, True), (6, False)):
            ball = neighbors._Ball(x, x, reach, most, True, self_loops)
            pieces = ball._edges_by_differences()
            graph = ga.radius_graph(x, radius, max_neighbors=most, self_loops=self_loops)
            assert torch.equal(graph.edge_index, torch.cat(pieces, dim=1))


def test_points_whose_distances_float32_cannot_square_are_measured_all_the_same():
    for count in (20, N):  # all pairs; a tree
        x = cloud(3, count=count) * 1e25
        assert ga.radius_graph(x, 0.5e25) == ga.radius_graph(x.double(), 0.5e25)
        assert ga.radius_graph(x, 0.5e25).num_edges > 0


def test_a_radius_that_float64_cannot_square_holds_everyone():
    x = cloud(3, dtype=torch.float64)
    assert ga.radius_graph(x, 1e200).num_edges == N * (N - 1)
    assert ga.radius_graph(x, 1e200, max_neighbors=3) == ga.knn_graph(x, 3)


def test_only_sparse_radius_graphs_are_looked_for_in_a_tree():
    x = cloud(3)
    assert kd_tree.pairs_by_tree(x, 0.1) is not None
    assert kd_tree.pairs_by_tree(x, 10.0) is None


# Where it runs.


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_threads_change_nothing(two_threads):
    x = cloud(3, count=3000)
    found = nearest_index(x, 5)
    torch.set_num_threads(1)
    assert torch.equal(found, nearest_index(x, 5))


def neighbours_of_a_cloud(seed):
    return nearest_index(cloud(3, seed, count=1000), 5).tolist()


def test_a_forked_worker_finds_the_same():
    here = neighbours_of_a_cloud(3)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.map(neighbours_of_a_cloud, [3]) == [here]


@pytest.mark.long
def test_a_compiled_function_finds_the_same():
    x = cloud(3)
    compiled = torch.compile(lambda p: ga.knn(p + 1, 4)[1].sum(dim=1), backend="eager")
    assert torch.equal(compiled(x), ga.knn(x + 1, 4)[1].sum(dim=1))


def test_points_that_torch_follows_are_not_given_to_a_tree(monkeypatch):
    x = cloud(3, dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    ga.knn(leaf, 2)[1].sum().backward()
    monkeypatch.setattr(nearest_neighbors, "nearest_by_tree", None)
    assert torch.allclose(torch.func.grad(lambda p: ga.knn(p, 2)[1].sum())(x), leaf.grad)


def test_other_points_are_left_to_products():
    x = cloud(3)
    assert is_for_trees(x, x)
    assert not is_for_trees(x[: FEWEST - 1], x[: FEWEST - 1])
    assert not is_for_trees(cloud(16), cloud(16))
    assert not is_for_trees(x, x, N // 10)
    assert not is_for_trees(x.to("meta"), x.to("meta"))

"""Neighbours found by compiled code: those of float64, whatever the points do to rounding."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hard_points import (
    POINTS,
    N,
    check_equal_points,
    cloud,
    draw_clusters,
    generator,
    nearest_by_numpy,
    on_a_sphere,
    squared_by_numpy,
    wide,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map

import graphattn as ga
from graphattn.graphs.search.nearest_neighbors import nearest_index
from graphattn.kernels.cpu import library, neighbors

if (reason := library.why_not()) is not None:
    pytest.skip(reason, allow_module_level=True)

POINTS = POINTS | {
    "cube": lambda width: torch.randint(0, 2, (N, width), generator=generator(1)).double(),
    "two far clusters": lambda width: cloud(width) * 1e-4 + (torch.arange(N)[:, None] % 2) * 1e3,
    "float32 overflows": lambda width: cloud(width) * 1e30,
    "a wide range": lambda width: cloud(width) * torch.logspace(-20, 18, width),
}


@pytest.fixture(autouse=True)
def no_other_way(monkeypatch):
    """Whoever leaves compiled code fails."""
    for name in ("nearest_by_tree", "nearest_by_pairs"):
        monkeypatch.setattr(f"graphattn.graphs.search.nearest_neighbors.{name}", None)


@pytest.fixture(params=["blocks", "products"])
def search(request, monkeypatch):
    """Force the search by blocks or the one by products, whatever the number of coordinates."""
    widest = 1000 if request.param == "blocks" else 0
    monkeypatch.setattr(neighbors, "WIDEST", ((0, widest),))


@pytest.mark.parametrize("width", [1, 3, 17])
@pytest.mark.parametrize("name", POINTS)
def test_neighbours_are_those_of_float64(name, width, search):
    x = POINTS[name](width)
    for k, self_loops in ((1, False), (1, True), (6, False), (40, True), (len(x) - 1, False)):
        expected = nearest_by_numpy(x, k, self_loops=self_loops)
        assert torch.equal(nearest_index(x, k, self_loops=self_loops), expected)
    targets = torch.cat([x[::3], cloud(width, 9).to(x)])
    assert torch.equal(nearest_index(targets, 7, x), nearest_by_numpy(targets, 7, x))


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [2, 9])
def test_any_number_of_points_and_neighbours(dtype, width, search):
    """Less than a vector, a block or a tile of them, one more, and boxes of boxes of boxes."""
    for count in (2, 3, 5, 15, 16, 17, 31, 33, 100, 255, 257, 600):
        x = cloud(width, count, count=count, dtype=dtype)
        for k in sorted({min(k, count - 1) for k in (1, 2, 20, count // 2, count)}):
            assert torch.equal(nearest_index(x, k), nearest_by_numpy(x, k))
        assert torch.equal(nearest_index(x, 1, x[:1]), torch.zeros(count, 1, dtype=torch.int64))
    x = cloud(width, count=5000, dtype=dtype)
    some = torch.arange(0, 5000, 50)
    expected = nearest_by_numpy(x[some], 18, x)[:, 1:]  # without oneself
    assert torch.equal(nearest_index(x, 17)[some], expected)
    # A view of every other row and column.
    view = cloud(2 * width, count=600, dtype=dtype)[::2, ::2]
    assert torch.equal(nearest_index(view, 5), nearest_by_numpy(view, 5))


@pytest.mark.long
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_clusters_scales_and_offsets_exchange_nobody(data):
    widths, scales = st.sampled_from([1, 2, 4, 6, 8, 12, 40]), [1e-38, 1e-30, 1.0, 1e12, 1e30]
    x = draw_clusters(data, widths, scales)
    k, self_loops = data.draw(st.integers(1, 60)), data.draw(st.booleans())
    expected = nearest_by_numpy(x, k, self_loops=self_loops)
    assert torch.equal(nearest_index(x, k, self_loops=self_loops), expected)


@pytest.mark.parametrize("width", [3, 11])
def test_hundreds_of_equal_distances_stand_in_order_of_index(width):
    ball = torch.nn.functional.pad(on_a_sphere(), (0, width - 3))
    source = torch.cat([ball, cloud(width) + 100])
    x = torch.cat([torch.zeros(1, width), cloud(width) + 100, torch.zeros(1, width)])
    index = nearest_index(x, 3, source)
    assert torch.equal(index, nearest_by_numpy(x, 3, source))
    assert index[0].tolist() == index[-1].tolist() == [0, 1, 2]


@pytest.mark.parametrize("width", [2, 10])
def test_thousands_of_equal_points_see_those_of_smallest_index(width):
    check_equal_points(width, 12_000)


def test_an_outlier_does_not_make_others_look_at_more(monkeypatch):
    """Bounds of products are those of each pair; of the longest vector they would keep everyone."""
    x = cloud(32, count=3000)
    far = torch.cat([x, torch.full((1, 32), 1e12)])
    assert torch.equal(nearest_index(far, 5)[:-1], nearest_index(x, 5))
    assert torch.equal(nearest_index(far, 5)[-1:], nearest_by_numpy(far[-1:], 6, far)[:, 1:])


@pytest.mark.parametrize("width", [3, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_distances_are_those_of_float64(width, dtype):
    x = cloud(width, dtype=dtype)
    index, squared = ga.knn(x, 5)
    a = x.double().numpy()
    expected = np.take_along_axis(squared_by_numpy(a, a), index.numpy(), axis=1)
    assert torch.equal(squared, torch.from_numpy(expected).to(dtype))


# Radius graphs.


def within_by_numpy(x, reach, self_loops):
    """Distances are rounded to the dtype of the points before they are compared."""
    a = x.double().numpy()
    known = np.isfinite(a).all(1)
    with np.errstate(all="ignore"):
        squared = np.nan_to_num(squared_by_numpy(a, a), nan=np.inf, posinf=np.inf)
        mask = np.sqrt(squared).astype(x.numpy().dtype) <= reach
    np.fill_diagonal(mask, known & self_loops)
    target, source = np.nonzero(mask & known & known[:, None])
    return torch.from_numpy(np.stack([source, target]))


@pytest.mark.parametrize("width", [1, 3, 9])
@pytest.mark.parametrize("name", sorted(POINTS.keys() - {"overflowing squares"}))
def test_radius_graphs_are_those_of_float64(name, width):
    x = wide(POINTS[name](width))
    known = x[x.isfinite().all(1)].double()
    gap = min(float((known[0] - known[1 % len(known)]).square().sum().sqrt()), 1e150)
    just_less = float(torch.nextafter(x.new_tensor(gap), x.new_tensor(0.0)))
    for radius in (
        0.0,
        gap / 4,
        just_less,
        gap,
        3 * gap,
    ):
        reach = float(x.new_tensor(radius))
        for self_loops in (False, True):
            graph = ga.radius_graph(x, radius, self_loops=self_loops)
            assert torch.equal(graph.edge_index, within_by_numpy(x, reach, self_loops))


@pytest.mark.parametrize("width", [2, 9])
def test_the_nearest_within_a_radius_are_no_farther(width):
    x = cloud(width)
    reach = float(x.new_tensor(0.25 * width))
    graph = ga.radius_graph(x, reach, max_neighbors=6)
    mask = torch.zeros(N, N, dtype=torch.bool)
    source, target = within_by_numpy(x, reach, False)
    mask[target, source] = True
    index = nearest_by_numpy(x, 6)
    expected = [
        (j, i) for i, row in enumerate(index.tolist()) for j in sorted(row) if bool(mask[i, j])
    ]
    assert graph.edge_index.T.tolist() == [list(edge) for edge in expected]
    assert 0 < graph.num_edges < 6 * N


def test_more_edges_than_memory_is_laid_by_for():
    x = cloud(2, count=500)
    assert neighbors.EDGES * 500 < 500 * 499
    everyone = torch.ones(500, 500, dtype=torch.bool)
    assert ga.radius_graph(x, 1e9, self_loops=True) == ga.from_mask(everyone)
    assert ga.radius_graph(x, 1e9) == ga.from_mask(everyone.fill_diagonal_(False))


# Where it runs.


@pytest.mark.parametrize("width", [3, 64])
def test_threads_change_nothing(width):
    x, before, found = cloud(width, count=3000), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append((nearest_index(x, 9), ga.radius_graph(x, 0.2 * math.sqrt(width))))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0][0], index) for index, _ in found)
    assert all(found[0][1] == graph for _, graph in found)


def test_fake_tensors_have_no_numbers_to_read():
    assert neighbors.has_neighbors(cloud(3))
    with FakeTensorMode():
        assert not neighbors.has_neighbors(torch.zeros(5, 3))
    fake = FakeTensorMode().from_tensor(cloud(3))
    assert not neighbors.has_neighbors(fake)


class Wrapped(torch.Tensor):
    """A tensor whose numbers lie in another one, as those of quantised or distributed ones do."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        def opened(x):
            return x.inner if isinstance(x, cls) else x

        return function(*tree_map(opened, args), **tree_map(opened, kwargs or {}))


def test_wrapped_tensors_have_no_numbers_to_read():
    assert not neighbors.has_neighbors(Wrapped(cloud(3)))


@pytest.mark.parametrize("width", [3, 9])
def test_numbers_that_wait_for_their_sign_are_read_with_it(width):
    x, source = cloud(width), cloud(width, 1)
    turned = torch._neg_view(-source)
    assert turned.is_neg()
    for found, expected in zip(
        ga.knn(x, 4, source=turned), ga.knn(x, 4, source=source), strict=True
    ):
        assert torch.equal(found, expected)


PEAK = """
import resource, sys
import torch
import graphattn as ga

N, C, k = map(int, sys.argv[1:])
ga.knn_graph(torch.randn(2000, C), 4)
x = torch.randn(N, C)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
ga.knn_graph(x, k)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.long
@pytest.mark.parametrize(("count", "width"), [(65_536, 3), (16_384, 64)])
def test_neighbours_take_the_memory_of_points_and_neighbours(count, width):
    """Distances of all pairs would be 17 GB and 1 GB."""
    pytest.importorskip("resource")
    command = [sys.executable, "-c", PEAK, str(count), str(width), "16"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(run.stdout) < 8 * (4 * count * (16 + width)) + 2**25

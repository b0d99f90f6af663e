"""Neighbours found by compiled code, or by a tree without it: those of float64, for any points."""

import math
import multiprocessing
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map

import graphattn as ga
from graphattn.graphs.search import kd_tree, nearest_neighbors
from graphattn.graphs.search.distances import IN_ORDER
from graphattn.graphs.search.kd_tree import FEWEST, is_for_trees, nearest_by_tree
from graphattn.graphs.search.nearest_neighbors import nearest_index
from graphattn.kernels.cpu import library, neighbors

N = 400


def generator(seed):
    return torch.Generator().manual_seed(seed)


def cloud(width, seed=0, *, count=N, dtype=torch.float32):
    return torch.randn(count, width, generator=generator(seed), dtype=dtype)


def with_holes(x):
    x = x.clone()
    x[5, 0], x[17, -1], x[18] = math.nan, math.inf, -math.inf
    return x


def lattice(width):
    """Make a lattice of at most 6 axes, shuffled, so that places and indices are unrelated."""
    axes = min(width, 6)
    side = math.ceil(500 ** (1 / axes))
    points = torch.cartesian_prod(*[torch.arange(float(side))] * axes).reshape(-1, axes)
    points = points[torch.randperm(len(points), generator=generator(1))]
    return torch.nn.functional.pad(points, (0, width - axes))


POINTS = {
    "random": cloud,
    "float64": lambda width: cloud(width, dtype=torch.float64),
    "half": lambda width: cloud(width).half(),
    "bfloat16": lambda width: cloud(width).bfloat16(),
    "lattice": lattice,
    "thirds": lambda width: lattice(width) / 3,
    "on a line": lambda width: torch.linspace(-1, 1, N)[:, None].repeat(1, width),
    "on an axis": lambda width: cloud(width) * torch.eye(width)[0],
    "all equal": lambda width: torch.ones(N, width),
    "four places": lambda width: cloud(width, count=4)[torch.arange(N) % 4],
    "pairs": lambda width: cloud(width, count=N // 2).repeat(2, 1),
    "outlier": lambda width: torch.cat([cloud(width), torch.full((1, width), 1e30)]),
    "offset": lambda width: cloud(width) + 1e6,
    "holes": lambda width: with_holes(cloud(width)),
    "copies with holes": lambda width: with_holes(torch.ones(N, width)),
    "few finite": lambda width: torch.where(torch.arange(N)[:, None] < 3, cloud(width), math.nan),
    "denormal": lambda width: cloud(width) * 1e-43,
    "vanishing squares": lambda width: cloud(width, dtype=torch.float64) * 1e-162,
    "vanished squares": lambda width: cloud(width, dtype=torch.float64) * 1e-200,
    "overflowing squares": lambda width: cloud(width, dtype=torch.float64) * 1e160,
    "large": lambda width: cloud(width) * 1e37,
    "halving": lambda width: 0.5 ** torch.arange(N, dtype=torch.float64)[:, None].repeat(1, width),
    "signed zeros": lambda width: cloud(width).round() * 0.0,
    "cube": lambda width: torch.randint(0, 2, (N, width), generator=generator(1)).double(),
    "two far clusters": lambda width: cloud(width) * 1e-4 + (torch.arange(N)[:, None] % 2) * 1e3,
    "float32 overflows": lambda width: cloud(width) * 1e30,
    "a wide range": lambda width: cloud(width) * torch.logspace(-20, 18, width),
}


def squared_by_numpy(a, b):
    """Squared distances in float64, rounded as documented: eight sums joined by halves, a rest."""
    gap = np.square(a[:, None] - b[None])
    whole = gap.shape[2] // 8 * 8
    sums = np.zeros((*gap.shape[:2], 8))
    for c in range(0, whole, 8):
        sums += gap[:, :, c : c + 8]
    for half in (4, 2, 1):
        sums = sums[:, :, :half] + sums[:, :, half : 2 * half]
    rest = np.zeros(gap.shape[:2])
    for c in range(whole, gap.shape[2]):
        rest += gap[:, :, c]
    return sums[:, :, 0] + rest


def nearest_by_numpy(x, k, source=None, self_loops=False):
    """All differences in float64, sorted by distance, then index."""
    a = x.double().numpy()
    b = a if source is None else source.double().numpy()
    with np.errstate(all="ignore"):
        squared = np.nan_to_num(squared_by_numpy(a, b), nan=np.inf, posinf=np.inf)
    if source is None:
        to_itself = np.where(np.isfinite(a).all(1) & self_loops, -1.0, np.inf)
        np.fill_diagonal(squared, to_itself)
    order = np.argsort(squared, axis=1, kind="stable")[:, :k]
    is_neighbor = np.take_along_axis(squared, order, axis=1) < np.inf
    return torch.from_numpy(np.where(is_neighbor, order, -1))


def on_a_sphere():
    """Hundreds of whole numbers x^2 + y^2 + z^2 = 1001, all exactly as far from the origin."""
    whole = torch.cartesian_prod(*[torch.arange(-31.0, 32.0)] * 3)
    sphere = whole[whole.square().sum(1) == 1001]
    assert len(sphere) > 300
    return sphere[torch.randperm(len(sphere), generator=generator(2))]


def use(engine, patch):
    """Force one way to search, whatever the number of coordinates."""
    if engine == "tree":  # Where a tree is no faster, all pairs are compared.
        patch.setattr(library, "library", lambda: None)
        return
    if (reason := library.why_not()) is not None:
        pytest.skip(reason)
    for name in ("nearest_by_tree", "nearest_by_pairs"):  # Leaving compiled code fails.
        patch.setattr(nearest_neighbors, name, None)
    if engine != "compiled":
        patch.setattr(neighbors, "WIDEST", ((0, 1000 if engine == "blocks" else 0),))


@pytest.fixture(params=["blocks", "products", "tree"])
def search(request, monkeypatch):
    use(request.param, monkeypatch)
    return request.param


@pytest.fixture(params=["compiled", "tree"])
def engine(request, monkeypatch):
    use(request.param, monkeypatch)
    return request.param


@pytest.fixture
def compiled(monkeypatch):
    use("compiled", monkeypatch)


@pytest.fixture
def tree(monkeypatch):
    use("tree", monkeypatch)


@pytest.mark.parametrize("width", [1, 3, 17])
@pytest.mark.parametrize("name", POINTS)
def test_neighbours_are_those_of_float64(name, width, search):
    if search == "tree" and width > IN_ORDER:
        pytest.skip("torch adds up many coordinates in another order")
    x = POINTS[name](width)
    for k, self_loops in ((1, False), (1, True), (6, False), (10, True), (len(x) - 1, False)):
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
    expected = nearest_by_numpy(x[some], 18, x)[:, 1:]  # without the token itself
    assert torch.equal(nearest_index(x, 17)[some], expected)
    # A view of every other row and column.
    view = cloud(2 * width, count=600, dtype=dtype)[::2, ::2]
    assert torch.equal(nearest_index(view, 5), nearest_by_numpy(view, 5))


@pytest.mark.long
@pytest.mark.parametrize("engine", ["compiled", "tree"])
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_clusters_scales_and_offsets_exchange_no_neighbours(engine, data):
    """Points in tight clusters, far from the origin or at any scale."""
    widths = [1, 2, 4, 6, 8, 12, 40] if engine == "compiled" else [1, 2, IN_ORDER]
    width, seed = data.draw(st.sampled_from(widths)), data.draw(st.integers(0, 10**6))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    centers = cloud(width, seed, count=data.draw(st.sampled_from([1, 3, 50])), dtype=dtype)
    spread = data.draw(st.sampled_from([0.0, 1e-7, 1e-4, 1.0]))
    offset = data.draw(st.sampled_from([0.0, 100.0, 1e6]))
    scale = data.draw(st.sampled_from([1e-38, 1e-30, 1.0, 1e12, 1e30]))
    center = torch.randint(len(centers), (N,), generator=generator(seed))
    x = (centers[center] + spread * cloud(width, seed + 1, dtype=dtype) + offset) * scale
    k, self_loops = data.draw(st.integers(1, 60)), data.draw(st.booleans())
    expected = nearest_by_numpy(x, k, self_loops=self_loops)
    with pytest.MonkeyPatch.context() as patch:
        use(engine, patch)
        assert torch.equal(nearest_index(x, k, self_loops=self_loops), expected)


@pytest.mark.parametrize("width", [3, 11])
def test_hundreds_of_equal_distances_stand_in_order_of_index(width, engine):
    ball = torch.nn.functional.pad(on_a_sphere(), (0, width - 3))
    source = torch.cat([ball, cloud(width) + 100])
    x = torch.cat([torch.zeros(1, width), cloud(width) + 100, torch.zeros(1, width)])
    index = nearest_index(x, 3, source)
    assert torch.equal(index, nearest_by_numpy(x, 3, source))
    assert index[0].tolist() == index[-1].tolist() == [0, 1, 2]


@pytest.mark.parametrize("width", [3, 10])
def test_thousands_of_equal_points_see_those_of_smallest_index(width, engine):
    x = cloud(width, count=12_000 if engine == "compiled" or width <= IN_ORDER else 1_000)
    x[7::3] = x[7]
    first = (x == x[7]).all(1).nonzero()[:, 0]
    index = nearest_index(x, 4)[first]
    assert torch.equal(index[5:], first[:4].expand(len(first) - 5, 4))
    assert index[0].tolist() == first[1:5].tolist()
    loops = nearest_index(x, 4, self_loops=True)[first]
    assert torch.equal(loops[:, 0], first)
    assert torch.equal(loops[5:, 1:], first[:3].expand(len(first) - 5, 3))


def test_an_outlier_does_not_make_others_look_at_more(compiled):
    """Bounds of products are those of each pair; of the longest vector they would keep all."""
    x = cloud(32, count=3000)
    far = torch.cat([x, torch.full((1, 32), 1e12)])
    assert torch.equal(nearest_index(far, 5)[:-1], nearest_index(x, 5))
    assert torch.equal(nearest_index(far, 5)[-1:], nearest_by_numpy(far[-1:], 6, far)[:, 1:])


@pytest.mark.parametrize("width", [3, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_distances_are_those_of_float64(width, dtype, compiled):
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
    return torch.from_numpy(mask & known & known[:, None])


@pytest.mark.parametrize("width", [1, 3, 9])
@pytest.mark.parametrize("name", sorted(POINTS.keys() - {"overflowing squares"}))
def test_radius_graphs_are_those_of_float64(name, width, engine):
    if engine == "tree" and width > IN_ORDER:
        pytest.skip("torch adds up many coordinates in another order")
    x = POINTS[name](width)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    known = x[x.isfinite().all(1)].double()
    gap = min(float((known[0] - known[1 % len(known)]).square().sum().sqrt()), 1e150)
    just_less = float(torch.nextafter(x.new_tensor(gap), x.new_tensor(0.0)))
    for self_loops in (False, True):
        nearest = nearest_by_numpy(x, 6, self_loops=self_loops)
        are_nearest = torch.zeros(len(x), len(x), dtype=torch.bool)
        are_nearest[torch.arange(len(x))[:, None], nearest] = nearest >= 0
        for radius in (0.0, gap / 4, just_less, gap, 3 * gap):
            mask = within_by_numpy(x, float(x.new_tensor(radius)), self_loops)
            graph = ga.radius_graph(x, radius, self_loops=self_loops)
            assert torch.equal(graph.edge_index, mask.nonzero().T.flip(0))
            graph = ga.radius_graph(x, radius, max_neighbors=6, self_loops=self_loops)
            assert torch.equal(graph.edge_index, (mask & are_nearest).nonzero().T.flip(0))


def test_the_nearest_within_a_radius_are_no_farther(engine):
    x = cloud(9)
    reach = float(x.new_tensor(2.25))
    graph = ga.radius_graph(x, reach, max_neighbors=6)
    assert 0 < graph.num_edges < 6 * N
    source, target = graph.edge_index
    assert within_by_numpy(x, reach, False)[target, source].all()


def test_more_edges_than_memory_is_laid_by_for(compiled):
    x = cloud(2, count=500)
    assert neighbors.EDGES * 500 < 500 * 499
    everyone = torch.ones(500, 500, dtype=torch.bool)
    assert ga.radius_graph(x, 1e9, self_loops=True) == ga.from_mask(everyone)
    assert ga.radius_graph(x, 1e9) == ga.from_mask(everyone.fill_diagonal_(False))


def test_points_whose_distances_float32_cannot_square_are_measured_all_the_same(tree):
    for count in (20, N):  # all pairs; a tree
        x = cloud(3, count=count) * 1e25
        assert ga.radius_graph(x, 0.5e25) == ga.radius_graph(x.double(), 0.5e25)
        assert ga.radius_graph(x, 0.5e25).num_edges > 0


def test_a_radius_that_float64_cannot_square_holds_everyone(tree):
    x = cloud(3, dtype=torch.float64)
    assert ga.radius_graph(x, 1e200).num_edges == N * (N - 1)
    assert ga.radius_graph(x, 1e200, max_neighbors=3) == ga.knn_graph(x, 3)


# Trees.


def test_of_random_points_a_tree_proves_every_neighbour_and_of_a_lattice_not_at_once(monkeypatch):
    for name, proven in (("random", True), ("lattice", False)):
        monkeypatch.undo()
        x = POINTS[name](3)
        index, unsure = nearest_by_tree(x, x, 2, True, False)
        assert not len(unsure)
        assert torch.equal(index, nearest_by_numpy(x, 2))
        # Without the proof, the choice among the first candidates stands.
        monkeypatch.setattr(kd_tree, "_widened", lambda distance, _: distance * 0.5)
        assert torch.equal(nearest_by_tree(x, x, 2, True, False)[0], index) == proven


def test_a_row_with_hundreds_of_equal_distances_looks_at_all_pairs():
    source = torch.cat([on_a_sphere(), cloud(3) + 100])
    x = torch.cat([torch.zeros(1, 3), cloud(3) + 100, torch.zeros(1, 3)])
    assert nearest_by_tree(x, source, 3, False, False)[1].tolist() == [0, len(x) - 1]
    assert nearest_by_tree(torch.zeros(1500, 3), on_a_sphere(), 3, False, False) is None


def test_trees_are_for_many_points_of_few_coordinates_and_for_few_pairs():
    x = cloud(3)
    assert is_for_trees(x, x)
    assert not is_for_trees(x[: FEWEST - 1], x[: FEWEST - 1])
    assert not is_for_trees(cloud(16), cloud(16))
    assert not is_for_trees(x, x, N // 10)
    assert not is_for_trees(x.to("meta"), x.to("meta"))
    assert kd_tree.pairs_by_tree(x, 0.1) is not None
    assert kd_tree.pairs_by_tree(x, 10.0) is None


def test_points_that_torch_follows_are_not_given_to_a_tree(tree, monkeypatch):
    x = cloud(3, dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    ga.knn(leaf, 2)[1].sum().backward()
    monkeypatch.setattr(nearest_neighbors, "nearest_by_tree", None)
    assert torch.allclose(torch.func.grad(lambda p: ga.knn(p, 2)[1].sum())(x), leaf.grad)


# Where it runs.


@pytest.mark.parametrize("width", [3, 64])
def test_threads_change_nothing(width, engine):
    x, before, results = cloud(width, count=3000), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append((nearest_index(x, 9), ga.radius_graph(x, 0.2 * math.sqrt(width))))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0][0], index) for index, _ in results)
    assert all(results[0][1] == graph for _, graph in results)


def neighbours_of_a_cloud(seed):
    return nearest_index(cloud(3, seed, count=1000), 5).tolist()


def test_a_forked_worker_finds_the_same(tree):
    here = neighbours_of_a_cloud(3)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.map(neighbours_of_a_cloud, [3]) == [here]


@pytest.mark.long
def test_a_compiled_function_finds_the_same(tree):
    x = cloud(3)
    compiled = torch.compile(lambda p: ga.knn(p + 1, 4)[1].sum(dim=1), backend="eager")
    assert torch.equal(compiled(x), ga.knn(x + 1, 4)[1].sum(dim=1))


def test_fake_tensors_have_no_numbers_to_read(compiled):
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


def test_wrapped_tensors_have_no_numbers_to_read(compiled):
    assert not neighbors.has_neighbors(Wrapped(cloud(3)))


@pytest.mark.parametrize("width", [3, 9])
def test_numbers_that_wait_for_their_sign_are_read_with_it(width, compiled):
    x, source = cloud(width), cloud(width, 1)
    turned = torch._neg_view(-source)
    assert turned.is_neg()
    results = ga.knn(x, 4, source=turned), ga.knn(x, 4, source=source)
    assert all(map(torch.equal, *results))


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
def test_neighbours_take_the_memory_of_points_and_neighbours(count, width, compiled):
    """Distances of all pairs would be 17 GB and 1 GB."""
    pytest.importorskip("resource")
    command = [sys.executable, "-c", PEAK, str(count), str(width), "16"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(run.stdout) < 8 * (4 * count * (16 + width)) + 2**25

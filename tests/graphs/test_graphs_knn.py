"""Nearest neighbours: a plain loop in float64 says who is nearest."""

import math

import numpy as np
import pytest
import scipy.spatial
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import graphattn as ga
from graphattn.graphs.search import distances
from graphattn.kernels.cpu import library


@pytest.fixture(scope="module", autouse=True, params=["compiled", "torch"])
def engine(request):
    """Everything once by compiled code and once without."""
    if request.param == "compiled":
        if (reason := library.why_not()) is not None:
            pytest.skip(reason)
        yield request.param
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "library", lambda: None)
        yield request.param


def nearest_by_loop(x, k, *, source=None, edges=None, self_loops=False):
    """The rules, one target and one candidate at a time, in Python's float64.

    `edges` is a set of allowed (source, target) pairs, or None for all.
    """
    x = x.tolist()
    to_self = source is None
    candidates = x if source is None else source.tolist()
    index, squared = [], []
    for i, point in enumerate(x):
        row = []
        for j, other in enumerate(candidates):
            if edges is not None and (j, i) not in edges:
                continue
            if to_self and i == j and not self_loops:
                continue
            if not all(math.isfinite(c) for c in (*point, *other)):
                continue
            distance = sum((a - b) ** 2 for a, b in zip(point, other, strict=True))
            row.append((not (to_self and i == j), distance, j))
        row = sorted(row)[:k]
        missing = k - len(row)
        index.append([j for _, _, j in row] + [-1] * missing)
        squared.append([d for _, d, _ in row] + [math.inf] * missing)
    return index, squared


def check_knn(x, k, **options):
    within = options.pop("within", None)
    edges = None if within is None else {tuple(edge) for edge in within.edge_index.T.tolist()}
    expected, squared = nearest_by_loop(x, k, edges=edges, **options)
    index, distance = ga.knn(x, k, within=within, **options)
    assert index.dtype == torch.int64
    assert distance.dtype == x.dtype
    assert index.shape == distance.shape == (len(x), k)
    assert index.tolist() == expected
    torch.testing.assert_close(distance, torch.tensor(squared, dtype=x.dtype).reshape(len(x), k))

    graph = ga.knn_graph(x, k, within=within, **options)
    num_sources = len(x) if options.get("source") is None else len(options["source"])
    mask = torch.zeros((len(x), num_sources), dtype=torch.bool)
    for i, row in enumerate(expected):
        mask[i, [j for j in row if j >= 0]] = True
    assert (graph.num_targets, graph.num_sources) == mask.shape
    assert torch.equal(graph.edge_index, ga.from_mask(mask).edge_index)
    assert graph.num_edges == sum(j >= 0 for row in expected for j in row)


def random_points(num_points, num_coordinates, *, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_points, num_coordinates, generator=generator, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("num_coordinates", [1, 3, 30])
@pytest.mark.parametrize("k", [1, 4, 24])
@pytest.mark.parametrize("self_loops", [False, True])
def test_random_points_find_their_nearest(dtype, num_coordinates, k, self_loops):
    check_knn(random_points(25, num_coordinates, dtype=dtype), k, self_loops=self_loops)


def test_k_may_be_every_possible_source():
    x = random_points(6, 2)
    check_knn(x, 5)
    check_knn(x, 6, self_loops=True)
    check_knn(x[:1], 1, self_loops=True)
    check_knn(x, 4, source=random_points(4, 2, seed=1))


def test_equal_distances_stand_in_order_of_index():
    grid = torch.cartesian_prod(*[torch.arange(4.0)] * 3)
    for k in (1, 5, 6, 7, 30, 63):
        check_knn(grid, k)
        check_knn(grid, k, self_loops=True)
        check_knn(grid, k, source=grid.flip(0).contiguous())


@pytest.mark.long
@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_integer_points_with_many_ties_and_any_options(data):
    num_points, width = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 3))
    coordinates = st.lists(st.integers(0, 2), min_size=width, max_size=width)

    def points(count):
        rows = data.draw(st.lists(coordinates, min_size=count, max_size=count))
        return torch.tensor(rows, dtype=torch.float32).reshape(count, width)

    x = points(num_points)
    source = points(data.draw(st.integers(1, 8))) if data.draw(st.booleans()) else None
    self_loops = source is None and data.draw(st.booleans())
    possible = num_points - (not self_loops) if source is None else len(source)
    if possible == 0:
        return
    k = data.draw(st.integers(1, possible))
    within = None
    if data.draw(st.booleans()):
        bits = st.lists(st.booleans(), min_size=num_points, max_size=num_points)
        columns = num_points if source is None else len(source)
        within = ga.from_mask(torch.tensor([data.draw(bits) for _ in range(columns)]).T)
    check_knn(x, k, source=source, within=within, self_loops=self_loops)


def test_oneself_comes_first_even_among_duplicates_of_smaller_index():
    x = torch.ones(5, 3)
    index, squared = ga.knn(x, 3, self_loops=True)
    assert index.tolist() == [[0, 1, 2], [1, 0, 2], [2, 0, 1], [3, 0, 1], [4, 0, 1]]
    assert not squared.any()
    assert ga.knn(x, 1, self_loops=True)[0].flatten().tolist() == [0, 1, 2, 3, 4]
    assert ga.knn(x, 1)[0].flatten().tolist() == [1, 0, 0, 0, 0]


def test_another_source_is_another_token_even_where_it_has_the_same_values():
    x = random_points(6, 2)
    index, squared = ga.knn(x, 1, source=x.clone())
    assert index.flatten().tolist() == list(range(6))
    assert not squared.any()


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("within", [None, ga.bipartite_complete_graph(1, 2)], ids=["all", "within"])
def test_nearer_by_one_in_the_square_is_nearer(k, within):
    # 616^2 + 1965^2 = 4240681 and 659^2 + 1951^2 = 4240682: whole numbers that float32 holds
    # exactly, with square roots that it cannot tell apart.
    source = torch.tensor([[659.0, 1951.0], [616.0, 1965.0]])
    check_knn(torch.tensor([[0.0, 0.0]]), k, source=source, within=within)


@pytest.mark.parametrize("spacing", [1.0, 0.1])
def test_searching_all_tokens_or_within_the_complete_graph_is_the_same(spacing):
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(0, 12, (200, 3), generator=generator) * spacing
    everyone = ga.complete_graph(200)
    for self_loops in (False, True):
        index, squared = ga.knn(x, 20, self_loops=self_loops)
        other, other_squared = ga.knn(x, 20, within=everyone, self_loops=self_loops)
        assert torch.equal(index, other)
        assert torch.equal(squared, other_squared)


WITHIN = {
    "window": lambda n: ga.window_path_graph(n, 3),
    "causal": ga.causal_graph,
    "causal window": lambda n: ga.causal_window_graph(n, 3),
    "batch": lambda n: ga.batch([ga.causal_graph(n - 5), ga.complete_graph(5)]),
    "plain": lambda n: ga.from_edge_index(torch.tensor([[0, 3, 4], [n - 1, 0, 0]]), n),
    "nothing": lambda n: ga.from_mask(torch.zeros((n, n), dtype=torch.bool)),
}


@pytest.mark.parametrize("name", WITHIN)
@pytest.mark.parametrize("k", [1, 3, 10])
def test_within_a_graph_only_its_edges_are_candidates(name, k):
    within = WITHIN[name](14)
    for x in (random_points(14, 3), torch.zeros(14, 2)):
        check_knn(x, k, within=within)
        check_knn(x, k, within=within, self_loops=True)


def test_within_may_be_an_edge_index():
    x = random_points(6, 2)
    graph = ga.window_path_graph(6, 2)
    shuffled = graph.edge_index[:, torch.randperm(graph.num_edges)]
    for given_as in (shuffled, graph.to_pyg()):
        index, squared = ga.knn(x, 2, within=given_as)
        assert torch.equal(index, ga.knn(x, 2, within=graph)[0])
        assert torch.equal(squared, ga.knn(x, 2, within=graph)[1])
        assert ga.knn_graph(x, 2, within=given_as) == ga.knn_graph(x, 2, within=graph)


def test_a_row_with_fewer_candidates_keeps_them_all():
    x = random_points(8, 3)
    index, squared = ga.knn(x, 5, within=ga.causal_window_graph(8, 3))
    assert (index >= 0).sum(1).tolist() == [0, 1, 2, 2, 2, 2, 2, 2]
    assert torch.equal(index >= 0, squared.isfinite())
    assert bool((index[squared.isinf()] == -1).all())


def test_knn_within_a_bipartite_graph():
    x, source = random_points(4, 2), random_points(7, 2, seed=1)
    mask = torch.rand(4, 7, generator=torch.Generator().manual_seed(2)) < 0.4
    check_knn(x, 3, source=source, within=ga.from_mask(mask))


def test_knn_within_a_causal_graph_is_causal_and_never_looks_ahead():
    graph = ga.knn_graph(random_points(30, 4), 3, within=ga.causal_graph(30))
    assert graph.is_causal
    assert bool((graph.edge_index[0] < graph.edge_index[1]).all())
    assert not ga.knn_graph(random_points(30, 4), 3).is_causal
    assert not ga.knn_graph(random_points(30, 4), 3, within=ga.window_path_graph(30, 5)).is_causal


def test_knn_within_a_batch_keeps_its_positions():
    packed = ga.batch([ga.complete_graph(4), ga.complete_graph(6)])
    graph = ga.knn_graph(random_points(10, 2), 2, within=packed)
    assert torch.equal(graph.positions, packed.positions)
    assert graph.sizes == packed.sizes


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("self_loops", [False, True])
def test_tokens_that_are_not_finite_are_never_candidates_and_have_no_neighbours(bad, self_loops):
    x = random_points(9, 3)
    x[2, 1] = x[7, 0] = bad
    x[7, 2] = math.nan
    for within in (None, ga.complete_graph(9), ga.causal_graph(9)):
        check_knn(x, 8, within=within, self_loops=self_loops)
        check_knn(x, 2, within=within, self_loops=self_loops)
        index, _ = ga.knn(x, 8, within=within, self_loops=self_loops)
        assert not torch.isin(index, torch.tensor([2, 7])).any()
        assert bool((index[[2, 7]] == -1).all())


def test_sources_that_are_not_finite_are_never_candidates():
    x, source = random_points(5, 2), random_points(6, 2, seed=1)
    source[0] = math.nan
    source[4, 1] = math.inf
    check_knn(x, 6, source=source)
    check_knn(x, 3, source=source, within=ga.bipartite_complete_graph(5, 6))


def test_where_nothing_is_finite_nobody_has_neighbours():
    index, squared = ga.knn(torch.full((4, 2), math.nan), 3)
    assert bool((index == -1).all())
    assert bool(squared.isposinf().all())
    assert ga.knn_graph(torch.full((4, 2), math.nan), 3).num_edges == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_searched_without_further_rounding(dtype):
    x = random_points(40, 8, dtype=torch.float32).to(dtype)
    exact = torch.cdist(x.double(), x.double()).square().fill_diagonal_(math.inf)
    index, squared = ga.knn(x, 5)
    assert squared.dtype == dtype
    expected = exact.sort(dim=1).values[:, :5]
    # What was chosen is as near as the nearest, to float32's rounding and not to the half's.
    torch.testing.assert_close(exact.gather(1, index), expected, rtol=1e-6, atol=0)
    resolution = torch.finfo(dtype).eps
    torch.testing.assert_close(squared.double(), expected, rtol=resolution, atol=0)


def test_a_common_offset_of_a_million_changes_nothing_in_float32():
    steps = torch.randint(-64, 64, (60, 3), generator=torch.Generator().manual_seed(0))
    near = steps.float() / 16  # float32 holds 1e6 + a sixteenth exactly
    far = near + 1e6
    assert torch.equal(far.double(), near.double() + 1e6)
    for options in ({}, {"within": ga.complete_graph(60)}, {"self_loops": True}):
        index, squared = ga.knn(far, 6, **options)
        exact_index, exact = ga.knn(near.double(), 6, **options)
        assert torch.equal(index, exact_index)
        assert torch.equal(squared.double(), exact)
    check_knn(far, 6)


def test_finite_tokens_far_apart_are_neighbours_even_where_float32_overflows():
    x = torch.tensor([[0.0], [1e25], [3e25]])  # squares do not fit into float32, distances do
    for within in (None, ga.complete_graph(3)):
        assert ga.knn(x, 2, within=within)[0].tolist() == [[1, 2], [0, 2], [1, 0]]


def test_gradient_reaches_targets_and_sources_apart():
    x = random_points(5, 2).requires_grad_()
    source = random_points(7, 2, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: ga.knn(a, 3, source=b)[1], (x, source))
    assert torch.autograd.gradgradcheck(lambda a, b: ga.knn(a, 3, source=b)[1], (x, source))


@pytest.mark.parametrize("self_loops", [False, True])
def test_gradient_is_finite_with_missing_neighbours_and_zero_at_tokens_without(self_loops):
    x = random_points(9, 3)
    x[4, 0], x[6, 2] = math.nan, math.inf
    x.requires_grad_()
    for within in (None, ga.causal_graph(9)):
        x.grad = None
        _, squared = ga.knn(x, 7, within=within, self_loops=self_loops)
        squared[squared.isfinite()].sum().backward()
        assert bool(x.grad.isfinite().all())
        assert not x.grad[[4, 6]].any()
        x.grad = None
        _, squared = ga.knn(x, 7, within=within, self_loops=self_loops)
        torch.exp(-squared).sum().backward()  # exp(-inf) = 0: what a kernel does with it
        assert bool(x.grad.isfinite().all())


def test_a_graph_of_neighbours_does_not_hold_on_to_gradients():
    x = random_points(6, 2).requires_grad_()
    graph = ga.knn_graph(x, 2, source=None)
    assert not graph.edge_index.requires_grad
    assert graph == ga.knn_graph(x.detach(), 2)


def test_no_tokens_have_no_neighbours():
    index, squared = ga.knn(torch.zeros(0, 2), 3, source=torch.zeros(5, 2))
    assert index.shape == squared.shape == (0, 3)
    graph = ga.knn_graph(torch.zeros(0, 2), 3, source=torch.zeros(5, 2))
    assert (graph.num_targets, graph.num_sources, graph.num_edges) == (0, 5, 0)


# Searches by matrix products, from 64 sources on: their rounding must exchange nobody.


def nearest_by_numpy(x, k, source=None, self_loops=False):
    """All differences in float64, sorted by distance, then index."""
    a = x.double().numpy()
    b = a if source is None else source.double().numpy()
    squared = np.square(a[:, None] - b[None]).sum(-1)
    if source is None:
        np.fill_diagonal(squared, -1.0 if self_loops else np.inf)
    return torch.from_numpy(np.argsort(squared, axis=1, kind="stable")[:, :k])


@pytest.mark.long
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_products_exchange_no_neighbours(data):
    """Clusters, offsets and scales that a product of float32 cannot tell apart."""
    N = data.draw(st.sampled_from([64, 65, 96, 97, 130]))
    C = data.draw(st.sampled_from([1, 2, 17]))
    k = data.draw(st.sampled_from([1, 2, 3, 5, 40]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    centers = torch.randn(data.draw(st.sampled_from([1, 3, 20])), C, generator=generator)
    spread = data.draw(st.sampled_from([0.0, 1e-7, 1e-4, 1e-2, 1.0]))
    offset = data.draw(st.sampled_from([0.0, 100.0, 1e5]))
    scale = data.draw(st.sampled_from([1e-25, 1e-15, 1.0, 1e12, 1e25]))

    def points(count):
        nearby = centers[torch.randint(len(centers), (count,), generator=generator)]
        return (nearby + spread * torch.randn(count, C, generator=generator) + offset) * scale

    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    x = points(N).to(dtype)
    source = data.draw(st.sampled_from([None, points(70).to(dtype)]))
    self_loops = source is None and data.draw(st.booleans())
    index, _ = ga.knn(x, k, source=source, self_loops=self_loops)
    expected = nearest_by_numpy(x, k, source, self_loops)
    # Where a sum of squares rounds otherwise in numpy, both may be right: compare distances.
    sources = (x if source is None else source).double()
    gap = [
        (x.double()[:, None] - sources[neighbours]).square().sum(-1)
        for neighbours in (index, expected)
    ]
    differ = index != expected
    torch.testing.assert_close(gap[0][differ], gap[1][differ], rtol=1e-14, atol=0)


def test_in_tight_clusters_products_keep_what_rounding_may_exchange():
    for seed in range(60):  # without a bound for rounding every sixth goes wrong
        centers, near = random_points(3, 17, seed=seed), random_points(130, 17, seed=seed + 1000)
        center = torch.randint(3, (130,), generator=torch.Generator().manual_seed(seed))
        x = (centers[center] + 1e-2 * near).float()
        assert torch.equal(ga.knn(x, 1)[0], nearest_by_numpy(x, 1))


def test_a_last_block_that_holds_only_oneself_holds_no_neighbour():
    x = random_points(65, 2, dtype=torch.float32)  # 32 + 32 + 1 sources
    for k in (3, 4):
        assert torch.equal(ga.knn(x, k)[0], nearest_by_numpy(x, k))


def test_products_find_ties_in_order_of_index():
    """A lattice: many equal distances, every one exact."""
    x = torch.cartesian_prod(*[torch.arange(9.0)] * 3) + 1000
    for k in (1, 6, 26, 100):
        assert torch.equal(ga.knn(x, k)[0], nearest_by_numpy(x, k))


def spied(monkeypatch):
    """How many candidates torch's products returned for each tile; None where they gave up."""
    monkeypatch.setattr(library, "library", lambda: None)
    candidates = []
    nearest = distances.DistanceProducts.nearest

    def pairs_of(self, *arguments):
        pairs = nearest(self, *arguments)
        candidates.append(None if pairs is None else len(pairs[0]))
        return pairs

    monkeypatch.setattr(distances.DistanceProducts, "nearest", pairs_of)
    return candidates


def test_random_points_are_found_by_products_with_few_candidates(monkeypatch):
    candidates = spied(monkeypatch)
    ga.knn(random_points(2000, 16, dtype=torch.float32), 8)
    assert None not in candidates
    assert 8 * 2000 <= sum(candidates) < 3 * 8 * 2000


def test_where_most_points_are_equal_differences_take_over(monkeypatch):
    candidates = spied(monkeypatch)
    x = random_points(2, 8, dtype=torch.float32)[torch.arange(400) % 2]
    assert torch.equal(ga.knn(x, 2)[0], nearest_by_numpy(x, 2))
    assert set(candidates) == {None}


def test_products_are_not_asked_where_they_are_inexact_or_overflow(monkeypatch):
    candidates = spied(monkeypatch)
    x = random_points(100, 3, dtype=torch.float32)
    huge, holed = x * 1e19, x.clone()
    holed[5] = math.nan
    for case in (huge, holed):
        index, _ = ga.knn(case, 2)
        seen = case.isfinite().all(1)
        expected = nearest_by_numpy(case[seen], 2)
        assert torch.equal(index[seen], seen.nonzero()[:, 0][expected])
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")  # bfloat16 products where there are such
        assert torch.equal(ga.knn(x, 2)[0], nearest_by_numpy(x, 2))
    finally:
        torch.set_float32_matmul_precision(before)
    assert candidates == []


def test_thousands_of_points_agree_with_a_kd_tree():
    # More distances than are held at a time, so that tiles join somewhere.
    x = random_points(4200, 3)
    distance, index = scipy.spatial.cKDTree(x.numpy()).query(x.numpy(), k=4)
    neighbours, squared = ga.knn(x, 4, self_loops=True)
    assert np.array_equal(neighbours.numpy(), index)
    torch.testing.assert_close(squared, torch.from_numpy(distance).square())
    without, _ = ga.knn(x, 3)
    assert np.array_equal(without.numpy(), index[:, 1:])


def test_many_edges_of_many_coordinates_agree_with_shifted_copies():
    # More numbers than are held at a time, for the search within a graph.
    num_tokens, width, window = 9_000, 96, 10
    x = random_points(num_tokens, width)
    index, squared = ga.knn(x, 3, within=ga.window_path_graph(num_tokens, window))
    moves = [o for o in range(-window, window + 1) if o]
    table = torch.full((num_tokens, len(moves)), math.inf, dtype=torch.float64)
    for slot, o in enumerate(moves):
        first, last = max(0, -o), min(num_tokens, num_tokens - o)
        table[first:last, slot] = (x[first:last] - x[first + o : last + o]).square().sum(1)
    expected, slots = table.sort(dim=1)
    torch.testing.assert_close(squared, expected[:, :3])
    nearest = torch.arange(num_tokens)[:, None] + torch.tensor(moves)[slots[:, :3]]
    assert torch.equal(index, nearest)

"""PyG's batch vectors: items do not see each other, and each is what it would be alone."""

import re

import pytest
import torch

import graphattn as ga

SIZES = [6, 0, 1, 9, 2]
WHICH = torch.arange(5).repeat_interleave(torch.tensor(SIZES))


def points(n, features=3, dtype=torch.float32):
    """Draw points on a small grid, so that some distances are equal."""
    return torch.randint(4, (n, features), generator=torch.manual_seed(n)).to(dtype)


def by_hand(x, which, sees):
    """The mask of pairs of one item, in plain Python; `sees(i, candidates)` are its sources."""
    mask = torch.zeros(len(x), len(x), dtype=torch.bool)
    for i in range(len(x)):
        same = [j for j in range(len(x)) if which[j] == which[i]]
        for j in sees(i, same):
            mask[i, j] = True
    return mask


def squared(x, i, j):
    return float((x[i].double() - x[j].double()).square().sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("self_loops", [False, True])
@pytest.mark.parametrize("k", [1, 3, 7, 30])
def test_neighbours_are_the_nearest_of_the_item(k, self_loops, dtype):
    x = points(len(WHICH), dtype=dtype)

    def sees(i, same):
        others = sorted((j for j in same if j != i), key=lambda j: (squared(x, i, j), j))
        return ([i, *others] if self_loops else others)[:k]

    graph = ga.knn_graph(x, k, batch=WHICH, self_loops=self_loops)
    assert torch.equal(graph.to_mask(), by_hand(x, WHICH, sees))
    assert graph.sizes == tuple((n, n) for n in SIZES)
    assert torch.equal(graph.batch, WHICH)
    assert not graph.is_causal


@pytest.mark.parametrize("max_neighbors", [None, 1, 4])
@pytest.mark.parametrize("self_loops", [False, True])
def test_what_is_within_reach_is_of_the_item(self_loops, max_neighbors):
    x = points(len(WHICH))

    def sees(i, same):
        near = [j for j in same if j != i and squared(x, i, j) <= 4.0]
        near.sort(key=lambda j: (squared(x, i, j), j))
        return ([i, *near] if self_loops else near)[:max_neighbors]

    graph = ga.radius_graph(x, 2.0, batch=WHICH, self_loops=self_loops, max_neighbors=max_neighbors)
    assert torch.equal(graph.to_mask(), by_hand(x, WHICH, sees))
    assert graph.sizes == tuple((n, n) for n in SIZES)


def test_items_of_one_length_need_no_vector():
    x, context = torch.randn(4, 10, 3), torch.randn(4, 6, 3)
    assert ga.knn_graph(x, 3) == ga.batch([ga.knn_graph(points_of_item, 3) for points_of_item in x])
    assert ga.radius_graph(x, 1.0) == ga.batch(
        [ga.radius_graph(points_of_item, 1.0) for points_of_item in x]
    )
    assert ga.knn_graph(x, 3, source=context) == ga.batch(
        [
            ga.knn_graph(points_of_item, 3, source=sources)
            for points_of_item, sources in zip(x, context, strict=True)
        ]
    )
    assert ga.knn_graph(x[:0], 3).num_targets == 0
    assert ga.radius_graph(x[:, :0], 1.0).sizes == ((0, 0),) * 4


def test_targets_and_sources_have_a_vector_each():
    x, source = torch.randn(7, 2), torch.randn(8, 2)
    of_x, of_source = torch.tensor([0, 0, 1, 1, 1, 3, 3]), torch.tensor([0] * 3 + [1] * 2 + [2] * 3)
    graph = ga.knn_graph(x, 2, source=source, batch=(of_x, of_source))
    assert graph.sizes == ((2, 3), (3, 2), (0, 3), (2, 0))
    expected = ga.batch(
        [
            ga.knn_graph(x[:2], 2, source=source[:3]),
            ga.knn_graph(x[2:5], 2, source=source[3:5]),
        ]
    )
    assert torch.equal(graph.edge_index, expected.edge_index)


def test_an_edge_list_has_the_borders_of_its_vector():
    edges = torch.tensor([[1, 0, 4, 2], [0, 1, 2, 3]])
    which = torch.tensor([0, 0, 2, 2, 2])
    graph = ga.from_edge_index(edges, 5, batch=which)
    assert graph.sizes == ((2, 2), (0, 0), (3, 3))
    assert graph.positions.tolist() == [0, 1, 0, 1, 2]
    assert torch.equal(graph.batch, which)
    graph, permutation = ga.from_edge_index(edges, 5, batch=which, return_permutation=True)
    assert torch.equal(graph.edge_index, edges[:, permutation])
    tracks = ga.from_edge_index(
        torch.tensor([[0, 3], [0, 1]]),
        2,
        4,
        batch=(torch.tensor([0, 1]), torch.tensor([0, 0, 1, 1])),
    )
    assert tracks.sizes == ((1, 2), (1, 2))
    assert tracks.source_positions.tolist() == [0, 1, 0, 1]


def test_the_vector_of_a_graph_is_that_of_its_targets():
    assert ga.causal_graph(3).batch.tolist() == [0, 0, 0]
    graph = ga.batch([ga.bipartite_complete_graph(2, 5), ga.bipartite_complete_graph(1, 4)])
    assert graph.batch.tolist() == [0, 0, 1]
    assert graph.transpose().batch.tolist() == [0] * 5 + [1] * 4


X = torch.randn(4, 2)
BACK = torch.tensor([0, 1, 0, 1])
GOOD = torch.tensor([0, 0, 1, 1])
EDGES = torch.tensor([[0, 2], [1, 1]])


def knn(**options):
    return ga.knn_graph(X, 1, **options)


BAD_CALLS = [
    (
        lambda: knn(batch=BACK),
        [
            "batch must be in ascending order",
            "batch[1] = 1",
            "batch[2] = 0",
            "argsort(stable=True)",
        ],
    ),
    (lambda: ga.radius_graph(X, 1, batch=BACK), ["batch must be in ascending order"]),
    (lambda: ga.from_edge_index(EDGES, 4, batch=BACK), ["batch must be in ascending order"]),
    (
        lambda: ga.from_edge_index(EDGES, 4, batch=GOOD),
        ["edge_index must have no edge between two items of the batch, but source 2 and target 1"],
    ),
    (lambda: knn(batch=GOOD[:3]), ["batch must have one entry for each of 4 tokens", "got 3"]),
    (lambda: knn(batch=GOOD.float()), ["batch must be an integer tensor of shape [4]", "float32"]),
    (lambda: ga.radius_graph(X, 1, batch=GOOD[None]), ["batch must be", "[1, 4]"]),
    (lambda: ga.radius_graph(X, 1, batch=[0, 0, 1, 1]), ["batch must be", "list"]),
    (lambda: knn(batch=GOOD - 1), ["batch must be >= 0", "-1"]),
    (lambda: ga.knn_graph(X[None], 1, batch=GOOD), ["batch must be None", "[1, 4, 2]"]),
    (
        lambda: knn(batch=GOOD, within=ga.causal_graph(4)),
        ["within must be None", "graphattn.batch"],
    ),
    (lambda: knn(source=X, batch=GOOD), ["batch must be a pair", "Tensor"]),
    (
        lambda: ga.from_edge_index(EDGES, 2, 4, batch=GOOD),
        ["batch must be a pair (targets [2], sources [4])"],
    ),
    (lambda: knn(source=X, batch=(GOOD, GOOD, GOOD)), ["batch must be one tensor or a pair", "3"]),
    (lambda: knn(source=X, batch=(GOOD, BACK)), ["batch[1] must be in ascending order"]),
    (
        lambda: ga.knn_graph(X[None], 1, source=X[None].expand(2, -1, -1)),
        ["source must have shape [1, M, C]", "[2, 4, 2]"],
    ),
    (
        lambda: knn(source=X, batch=(GOOD, GOOD), self_loops=True),
        ["self_loops must be False if source is given"],
    ),
    (lambda: ga.knn_graph(X, 0, batch=GOOD), ["k must be >= 1", "got 0"]),
    (lambda: knn(batch=GOOD, backend="fast"), ["backend must be one of", "'fast'"]),
]


@pytest.mark.parametrize(("call", "fragments"), BAD_CALLS)
def test_a_bad_vector_is_refused_by_name(call, fragments):
    with pytest.raises(ValueError, match=re.escape(fragments[0])) as raised:
        call()
    for fragment in fragments:
        assert fragment in str(raised.value)


def test_nan_has_no_neighbours_and_is_none():
    x = torch.randn(8, 2)
    x[2] = torch.nan
    which = torch.tensor([0] * 4 + [1] * 4)
    for graph in (ga.knn_graph(x, 3, batch=which), ga.radius_graph(x, 100.0, batch=which)):
        assert 2 not in graph.edge_index
        assert graph.in_degree().tolist() == [2, 2, 0, 2, 3, 3, 3, 3]


def test_a_number_that_is_far_off_is_named_and_takes_no_memory():
    batch = torch.tensor([0, 0, 1, 1, 1, 10**12])
    with pytest.raises(
        ValueError, match=r"batch must number the items from 0.* got the item 1000000000000"
    ):
        ga.knn_graph(torch.randn(6, 2), 2, batch=batch)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_unsigned_integers_are_indices_too(dtype):
    """numpy makes such arrays, and torch has nearly no operations for them."""
    edges, batch = torch.tensor([[0, 1, 2, 4], [1, 0, 1, 3]]), torch.tensor([0, 0, 0, 1, 1])
    expected = ga.from_edge_index(edges, 5, batch=batch)
    graph = ga.from_edge_index(edges.to(dtype), 5, batch=batch.to(dtype))
    assert torch.equal(graph.edge_index, expected.edge_index)
    assert torch.equal(graph.batch, expected.batch)
    x = torch.randn(5, 3)
    near = [ga.knn_graph(x, 1, batch=given).edge_index for given in (batch, batch.to(dtype))]
    assert torch.equal(*near)
    order = torch.tensor([2, 1, 0, 4, 3])
    permuted = [expected.permute(given).edge_index for given in (order, order.to(dtype))]
    assert torch.equal(*permuted)


def test_an_unsigned_index_that_no_signed_one_can_hold_is_refused():
    edges = torch.tensor([[2**64 - 1], [0]], dtype=torch.uint64)
    with pytest.raises(ValueError, match=r"edge_index\[0, 0\] = -1 is not a source"):
        ga.from_edge_index(edges, 3)
    with pytest.raises(
        ValueError, match=r"must hold integers, such as torch\.int64, got torch\.bool"
    ):
        ga.from_edge_index(torch.ones(2, 1, dtype=torch.bool), 3)

"""Orders of tokens in which neighbours lie near each other, and layers that do not notice."""

import itertools
import math
import re

import pytest
import torch

import graphattn as ga
from graphattn.graphs.orders import hilbert_index


def points(count: int, axes: int = 3, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, axes, generator=generator, dtype=torch.float64)


def shuffled_grid(side: int) -> tuple[ga.TokenGraph, torch.Tensor]:
    """An image whose pixels come in random order, without its structure, and where they are."""
    p = torch.randperm(side * side, generator=torch.Generator().manual_seed(3))
    mask = ga.grid_window_graph(side, side, 1).to_mask()[p][:, p]
    return ga.from_mask(mask), cells(side, 2)[p].double()


def cells(side: int, axes: int) -> torch.Tensor:
    """All cells of a full grid, [side ** axes, axes]."""
    return torch.tensor(list(itertools.product(range(side), repeat=axes)))


def bandwidth(graph: ga.TokenGraph) -> int:
    """How far apart the ends of an edge are at most."""
    return int(graph.edge_index.diff(dim=0).abs().max())


SIZES = [17, 3, 20]


def packed() -> tuple[ga.TokenGraph, torch.Tensor]:
    where = points(40)
    batch = torch.arange(3).repeat_interleave(torch.tensor(SIZES))
    return ga.knn_graph(where, k=5, batch=batch), where


GRAPHS = {
    "nearest neighbours": lambda: (ga.knn_graph(points(40), k=5), points(40)),
    "radius": lambda: (ga.radius_graph(points(40), 0.4), points(40)),
    "shuffled grid": lambda: shuffled_grid(6),
    "packed": packed,
}


# Layers.


LAYERS = {
    "gaussian": lambda: ga.nn.GaussianKernelAttention(16, heads=2, rope=True),
    "dot product": lambda: ga.nn.DotProductAttention(16, heads=2, rope=True),
    "krause": lambda: ga.nn.KrauseAttention(16, heads=2, top_k=3, rope=True),
    "consensus": lambda: ga.nn.SelfConsensus(16, heads=2, edge_hidden=4),
    "consensus of targets": lambda: ga.nn.SelfConsensus(
        16, heads=2, edge_hidden=4, update="target", rope=True
    ),
}


def make_layer(mechanism: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return LAYERS[mechanism]().double()


def run(layer, x, graph, order=None, **given):
    """Outputs for tokens in their own order, and gradients of these and of all parameters."""
    x = x.clone().requires_grad_()
    if order is None:
        y = layer(x, graph, **given)
    else:
        y = layer(x[:, order], graph, **given)[:, order.argsort()]
    weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    learned = [x, *layer.parameters()]
    return [y, *torch.autograd.grad((y * weight).sum(), learned, allow_unused=True)]


def assert_same(results, expected):
    for a, b in zip(results, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("by", ["edges", "points"])
@pytest.mark.parametrize("mechanism", LAYERS)
@pytest.mark.parametrize("name", GRAPHS)
def test_a_layer_gives_every_token_what_it_gave_it_before(name, mechanism, by):
    graph, where = GRAPHS[name]()
    near, order = graph.reorder(where if by == "points" else None)
    layer, x = make_layer(mechanism), points(graph.num_tokens * 2, 16, seed=1).view(2, -1, 16)
    assert_same(run(layer, x, near, order), run(layer, x, graph))


@pytest.mark.parametrize("name", GRAPHS)
def test_positions_given_to_a_rotary_layer_are_permuted_like_tokens(name):
    graph, _ = GRAPHS[name]()
    near, order = graph.reorder()
    assert torch.equal(near.positions, graph.positions[order])
    layer, x = make_layer("gaussian"), points(graph.num_tokens, 16, seed=1)[None]
    positions = 3 * torch.arange(graph.num_tokens)
    expected = run(layer, x, graph, positions=positions)
    assert_same(run(layer, x, near, order, positions=positions[order]), expected)
    with_positions = run(layer, x, near, order, positions=graph.positions[order])
    assert_same(with_positions, run(layer, x, graph))


def test_a_table_of_offsets_and_values_of_edges_travel_with_their_edges():
    graph, where = packed()
    near, order = graph.reorder(where)
    _, edges = graph.permute(order, return_edge_permutation=True)
    layer, x = make_layer("dot product"), points(40, 16, seed=1)[None]
    bias = points(graph.num_edges, 2, seed=2)
    expected = run(layer, x, graph, edge_bias=bias)
    assert_same(run(layer, x, near, order, edge_bias=bias[edges]), expected)
    of_offsets = ga.nn.OffsetBias(2, max_offset=6).double()
    torch.nn.init.normal_(next(of_offsets.parameters()))
    torch.testing.assert_close(of_offsets(near), of_offsets(graph)[edges])


# Orders.


@pytest.mark.parametrize("by", ["edges", "points"])
@pytest.mark.parametrize("name", GRAPHS)
def test_the_graph_is_the_old_one_permuted_by_the_order(name, by):
    graph, where = GRAPHS[name]()
    near, order = graph.reorder(where if by == "points" else None)
    assert order.dtype == torch.int64
    assert near == graph.permute(order)
    assert near.permute(order.argsort()) == graph
    again = graph.reorder(where if by == "points" else None)[1]
    assert torch.equal(again, order)


@pytest.mark.parametrize("by", ["edges", "points"])
def test_tokens_stay_in_their_part_and_its_order_depends_on_nothing_else(by):
    graph, where = packed()
    near, order = graph.reorder(where if by == "points" else None)
    assert near.sizes == graph.sizes
    first = 0
    for size in SIZES:
        part = where[first : first + size]
        alone = ga.knn_graph(part, k=min(5, size - 1)).reorder(part if by == "points" else None)[1]
        assert torch.equal(order[first : first + size] - first, alone)
        first += size


@pytest.mark.parametrize("name", ["nearest neighbours", "radius", "shuffled grid"])
def test_cuthill_mckee_brings_the_ends_of_edges_together(name):
    graph, _ = GRAPHS[name]()
    assert bandwidth(graph.reorder()[0]) < 0.7 * bandwidth(graph)


def test_cuthill_mckee_finds_the_path_in_a_shuffled_path():
    p = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    graph = ga.from_mask(ga.window_path_graph(50, 1).to_mask()[p][:, p])
    near, order = graph.reorder()
    assert bandwidth(near) == 1
    assert p[order].tolist() in (list(range(50)), list(range(49, -1, -1)))


def test_edges_of_one_direction_count_in_both():
    """A shuffled path gets bandwidth 1 although all of its edges point the same way."""
    p = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    graph = ga.from_edge_index(torch.stack([p[:-1], p[1:]]), 30)
    assert bandwidth(graph.reorder()[0]) == 1


@pytest.mark.parametrize(("side", "axes"), [(16, 2), (8, 3), (4, 4), (32, 1)])
def test_consecutive_cells_of_the_curve_are_neighbours_on_a_full_grid(side, axes):
    shuffle = torch.randperm(side**axes, generator=torch.Generator().manual_seed(0))
    where = cells(side, axes)[shuffle].double()
    graph = ga.from_mask(torch.eye(len(where), dtype=torch.bool))
    order = graph.reorder(where)[1]
    assert (where[order].diff(dim=0).abs().sum(dim=1) == 1).all()
    assert (where[order[0]] == 0).all()


@pytest.mark.parametrize(("bits", "axes"), [(1, 2), (3, 2), (2, 3), (1, 5), (6, 1)])
def test_the_curve_meets_every_cell_once_and_finer_curves_meet_cells_in_order(bits, axes):
    index = hilbert_index(cells(2**bits, axes), bits)
    assert index.sort().values.tolist() == list(range(2 ** (bits * axes)))
    if bits > 1:  # all cells of a larger one before the next
        parents = index >> axes
        for parent in range(4):
            inside = cells(2**bits, axes)[parents == parent]
            assert len((inside >> 1).unique(dim=0)) == 1


def test_points_in_one_place_keep_their_order_and_those_nowhere_come_last():
    where = torch.tensor([[1.0], [math.nan], [0.0], [1.0], [math.inf], [0.0], [0.5]])
    graph = ga.complete_graph(7)
    assert graph.reorder(where)[1].tolist() == [2, 5, 6, 0, 3, 1, 4]
    assert graph.reorder(torch.ones(7, 2))[1].tolist() == list(range(7))
    assert graph.reorder(torch.full((7, 2), math.nan))[1].tolist() == list(range(7))


def test_points_nowhere_come_last_in_their_own_part():
    where = torch.tensor([[2.0], [math.nan], [1.0], [math.nan], [5.0], [4.0]])
    graph = ga.batch([ga.complete_graph(3), ga.complete_graph(3)])
    assert graph.reorder(where)[1].tolist() == [2, 0, 1, 5, 4, 3]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_points_of_every_dtype_and_scale_give_the_same_order(dtype):
    where = cells(8, 2).to(dtype)
    graph = ga.complete_graph(64)
    expected = graph.reorder(cells(8, 2).double())[1]
    assert torch.equal(graph.reorder(where)[1], expected)
    largest = torch.finfo(dtype).max
    assert torch.equal(graph.reorder((where - 4) * (largest / 8))[1], expected)


def test_only_the_first_eight_coordinates_place_a_point():
    where, graph = points(50, 12), ga.complete_graph(50)
    assert torch.equal(graph.reorder(where)[1], graph.reorder(where[:, :8])[1])


def test_a_structured_graph_is_in_good_order_already():
    graph = ga.causal_window_graph(10, 3)
    same, order = graph.reorder()
    assert same is graph
    assert order.tolist() == list(range(10))
    moved, order = ga.grid_window_graph(4, 4, 1).reorder(cells(4, 2).double())
    assert moved.structure is None
    assert order[:4].tolist() == [0, 4, 5, 1]


@pytest.mark.parametrize("size", [0, 1])
def test_hardly_any_tokens_have_an_order(size):
    graph = ga.from_mask(torch.zeros(size, size, dtype=torch.bool))
    assert graph.reorder()[1].tolist() == list(range(size))
    assert graph.reorder(torch.zeros(size, 2))[1].tolist() == list(range(size))


# Bad input.


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (torch.rand(4, 3), "points must have shape [5, C], one point for every token, with C >= 1"),
        (torch.rand(5, 0), "points must have shape [5, C], one point for every token, with C >= 1"),
        (torch.rand(5), "points must be a floating-point tensor of shape [N, C]"),
        (torch.ones(5, 2, dtype=torch.int64), "got torch.int64 of shape [5, 2]"),
        ([[0.0]] * 5, "points must be a tensor of shape [N, C], got list"),
    ],
)
def test_points_that_are_none_are_refused_by_name(where, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ga.complete_graph(5).reorder(where)


def test_two_sets_of_tokens_have_no_order_in_common():
    graph = ga.knn_graph(points(4), 2, source=points(6))
    with pytest.raises(ValueError, match="4 targets and 6 sources that are different tokens"):
        graph.reorder()

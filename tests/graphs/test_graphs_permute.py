"""Tokens in another order: the same edges between the same tokens, whatever is computed on them."""

import copy
import itertools
import pickle
import re

import pytest
import torch
from kinds_of_graphs import GRAPHS, some_mask

import graphattn as ga


def points(count: int, axes: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(count, axes, generator=generator, dtype=torch.float64)


def shuffle(*sizes: int, seed: int = 0) -> torch.Tensor:
    """A permutation that leaves every token in its part."""
    generator = torch.Generator().manual_seed(seed)
    firsts = itertools.accumulate(sizes, initial=0)
    parts = [
        torch.randperm(n, generator=generator) + first
        for n, first in zip(sizes, firsts, strict=False)
    ]
    return torch.cat(parts)


def clouds() -> ga.TokenGraph:
    batch = torch.arange(3).repeat_interleave(torch.tensor([9, 2, 12]))
    return ga.knn_graph(points(23), k=4, batch=batch)


SQUARE = [name for name, make in GRAPHS.items() if make().has_same_tokens]


def shuffled(graph: ga.TokenGraph) -> torch.Tensor:
    return shuffle(*[size for size, _ in graph.sizes])


@pytest.mark.parametrize("name", SQUARE)
def test_rows_and_columns_of_the_mask_are_permuted(name):
    graph = GRAPHS[name]()
    p = shuffled(graph)
    moved = GRAPHS[name]().permute(p)
    assert torch.equal(moved.to_mask(), graph.to_mask()[p][:, p])
    assert moved.edge_index.T.tolist() == sorted(
        moved.edge_index.T.tolist(), key=lambda edge: (edge[1], edge[0])
    )
    assert (moved.sizes, moved.starts) == (graph.sizes, graph.starts)
    assert moved.num_edges == graph.num_edges


@pytest.mark.parametrize("name", SQUARE)
def test_positions_travel_with_their_tokens(name):
    graph = GRAPHS[name]()
    p = shuffled(graph)
    moved = graph.permute(p)
    assert moved.positions.tolist() == [int(graph.positions[i]) for i in p]
    assert moved.source_positions is moved.positions


@pytest.mark.parametrize("name", SQUARE)
def test_a_table_stays_a_table_and_all_else_becomes_a_list(name):
    graph = GRAPHS[name]()
    moved = graph.permute(shuffled(graph))
    assert moved.structure is None
    assert (moved.neighbors is None) == (graph.neighbors is None)
    if moved.neighbors is not None:
        assert torch.equal(moved.neighbors, moved.neighbors.sort(dim=1).values)


@pytest.mark.parametrize("name", SQUARE)
def test_the_inverse_permutation_leads_back(name):
    graph = GRAPHS[name]()
    p = shuffled(graph)
    assert graph.permute(p).permute(p.argsort()) == graph
    assert graph.permute(torch.arange(len(p))) == graph


def test_graphs_that_differ_in_positions_alone_differ():
    graph = ga.complete_graph(5)
    assert torch.equal(graph.permute(shuffle(5)).edge_index, graph.edge_index)
    assert graph.permute(shuffle(5)) != graph
    assert graph != graph.permute(shuffle(5))


@pytest.mark.parametrize("name", SQUARE)
def test_values_of_edges_follow_the_permutation_of_edges(name):
    graph = GRAPHS[name]()
    p = shuffled(graph)
    moved, edges = graph.permute(p, return_edge_permutation=True)
    assert moved == graph.permute(p)
    assert torch.equal(p[moved.edge_index], graph.edge_index[:, edges])
    dense = torch.zeros(graph.num_tokens, graph.num_tokens, dtype=torch.int64)
    dense[tuple(graph.edge_index.flip(0))] = values = torch.arange(graph.num_edges) + 1
    assert torch.equal(dense[p][:, p][tuple(moved.edge_index.flip(0))], values[edges])


@pytest.mark.parametrize(
    "make",
    [
        lambda: ga.from_mask(some_mask(6, 9)),
        lambda: ga.bipartite_complete_graph(3, 5),
        lambda: ga.knn_graph(points(6), 3, source=points(9)),
        lambda: ga.causal_window_graph(5, 3, past=4),
        lambda: ga.bipartite_window_graph(7, 1),
    ],
)
def test_two_sets_of_tokens_take_a_permutation_each(make):
    graph = make()
    p, q = shuffle(graph.num_targets), shuffle(graph.num_sources, seed=3)
    moved, edges = graph.permute((p, q), return_edge_permutation=True)
    assert torch.equal(moved.to_mask(), graph.to_mask()[p][:, q])
    assert torch.equal(moved.positions, graph.positions[p])
    assert torch.equal(moved.source_positions, graph.source_positions[q])
    source, target = moved.edge_index
    assert torch.equal(torch.stack([q[source], p[target]]), graph.edge_index[:, edges])
    assert moved.permute((p.argsort(), q.argsort())) == graph


def test_permuted_positions_pass_through_everything_that_makes_graphs_of_graphs():
    graph, p = clouds(), shuffle(9, 2, 12)
    moved = graph.permute(p)
    twins = (pickle.loads(pickle.dumps(moved)), copy.deepcopy(moved), moved.to("cpu"))
    for twin in (*twins, moved.transpose().transpose()):
        assert twin == moved
        assert torch.equal(twin.positions, graph.positions[p])
    twins = (pickle.loads(pickle.dumps(moved.transpose())), ga.union(moved, moved))
    for twin in twins:
        assert torch.equal(twin.positions, graph.positions[p])
    part, seen = moved.targets(3, 17)
    assert torch.equal(part.positions, moved.positions[3:17])
    assert torch.equal(part.source_positions, moved.positions[seen.start : seen.stop])
    both = ga.batch([moved, ga.causal_graph(3)])
    assert both.positions.tolist() == [*moved.positions.tolist(), 0, 1, 2]
    near = ga.knn_graph(points(23), 2, within=moved)
    assert torch.equal(near.positions, moved.positions)


def test_positions_of_a_two_track_graph_are_exchanged_with_its_sides():
    graph = ga.from_mask(some_mask(6, 9)).permute((shuffle(6), shuffle(9)))
    flipped = graph.transpose()
    assert torch.equal(flipped.positions, graph.source_positions)
    assert torch.equal(flipped.source_positions, graph.positions)
    again = pickle.loads(pickle.dumps(graph))
    assert torch.equal(again.source_positions, shuffle(9))


def test_padded_rows_keep_permuted_positions_and_count_on_behind_them():
    graph = ga.knn_graph(points(4), 2).permute(torch.tensor([2, 0, 3, 1]))
    items = [{"x": torch.zeros(4), "graph": graph}, {"x": torch.zeros(6), "graph": _ring(6)}]
    packed = ga.collate(items, padding=True)
    assert packed.graph.positions.view(2, 6).tolist() == [[2, 0, 3, 1, 4, 5], [0, 1, 2, 3, 4, 5]]


def _ring(num_tokens: int) -> ga.TokenGraph:
    return ga.window_cycle_graph(num_tokens, 1)


def test_unions_of_tokens_in_different_orders_are_refused():
    graph = ga.knn_graph(points(8), 2)
    with pytest.raises(ValueError, match="positions differ"):
        ga.union(graph, graph.permute(shuffle(8)))


def test_a_saved_graph_with_positions_that_fit_nothing_is_refused():
    moved = ga.knn_graph(points(8), 2).permute(shuffle(8))
    state = moved.__getstate__()
    state["_own_positions"] = torch.arange(3)
    with pytest.raises(ValueError, match=re.escape("positions of targets must be an int64")):
        object.__new__(ga.TokenGraph).__setstate__(state)


def test_a_graph_saved_by_a_version_that_knew_no_permutations_is_read():
    state = ga.knn_graph(points(8), 2).__getstate__()
    del state["_own_positions"], state["_own_source_positions"]
    read = object.__new__(ga.TokenGraph)
    read.__setstate__(state)
    assert read == ga.knn_graph(points(8), 2)
    assert read.positions.tolist() == list(range(8))


# Causality.


@pytest.mark.parametrize(
    "graph",
    [
        ga.causal_window_graph(9, 3),
        ga.batch([ga.causal_graph(5), ga.window_path_graph(4, 1)]),
        ga.knn_graph(points(9), 3, within=ga.causal_graph(9)),
    ],
)
def test_a_permuted_causal_graph_claims_no_order_and_still_refuses_to_leak_the_future(graph):
    moved = graph.permute(shuffled(graph))
    assert not moved.is_causal
    assert moved.has_causal_part
    layer = ga.nn.SelfConsensus(8, heads=2, edge_hidden=4, update="energy")
    with pytest.raises(ValueError, match="leaks the future"):
        layer(torch.randn(9, 8), moved)


def test_a_permuted_causal_graph_never_sees_the_future():
    """Positions tell the time: no edge comes from the future, and NaN there changes no past."""
    graph, p = ga.causal_window_graph(12, 4), shuffle(12)
    moved = graph.permute(p)
    source, target = moved.edge_index
    assert (moved.positions[source] <= moved.positions[target]).all()
    layer = ga.nn.KrauseAttention(8, heads=2, top_k=2, rope=True)
    x = torch.randn(12, 8)
    before = moved.positions < 7
    expected = layer(x[p], moved)[before]
    x[7:] = torch.nan
    assert torch.equal(layer(x[p], moved)[before], expected)


# Bad input.


@pytest.mark.parametrize(
    ("permutation", "message"),
    [
        ([1, 0, 2], "permutation must hold every token 0 .. 2 once, as a tensor, got list"),
        (torch.tensor([1.0, 0.0, 2.0]), "as integers, got torch.float32"),
        (torch.tensor([True, False, True]), "as integers, got torch.bool"),
        (torch.arange(4), "permutation must hold every token 0 .. 2 once, got the shape [4]"),
        (torch.arange(3)[None], "got the shape [1, 3]"),
        (torch.tensor([1, 3, 0]), "0 .. 2 once, got permutation[1] = 3"),
        (torch.tensor([1, 0, -1]), "0 .. 2 once, got permutation[2] = -1"),
        (torch.tensor([1, 2, 1]), "0 .. 2 once, got 1 at both"),
        ((torch.arange(3),), "permutation must be a tensor or a pair (targets, sources)"),
        ((torch.arange(3), torch.tensor([0, 0, 1])), "got 0 at both permutation[1]"),
    ],
)
def test_what_is_no_permutation_is_refused_by_name_and_value(permutation, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ga.complete_graph(3).permute(permutation)


def test_one_permutation_for_two_sets_of_tokens_is_refused():
    with pytest.raises(
        ValueError, match=re.escape("permutation must be a pair (targets, sources)")
    ):
        ga.from_mask(some_mask(3, 4)).permute(torch.arange(3))


def test_a_token_cannot_leave_its_part_of_a_batch():
    packed = ga.batch([ga.complete_graph(2), ga.complete_graph(3)])
    message = "permutation must leave every token in its own part of the batch, got permutation[1]"
    with pytest.raises(ValueError, match=re.escape(message)):
        packed.permute(torch.tensor([0, 2, 1, 3, 4]))

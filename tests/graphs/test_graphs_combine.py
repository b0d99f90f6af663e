"""Unions of edges and batches of sequences: set algebra, and nothing listed on the way."""

import itertools

import pytest
import torch
from torch_geometric.data import Batch, Data

import graphattn as ga
from graphattn.graphs.structures.composites import Parts

N = 7

BUILDERS = {
    "path": lambda: ga.window_path_graph(N, 1),
    "path of another window": lambda: ga.window_path_graph(N, 2),
    "cycle": lambda: ga.window_cycle_graph(N, 2),
    "causal": lambda: ga.causal_graph(N),
    "causal window": lambda: ga.causal_window_graph(N, 3),
    "complete": lambda: ga.complete_graph(N),
    "blocks": lambda: ga.block_window_graph(N, 3, shift=1),
    "dilated": lambda: ga.dilated_window_graph(N, 2, 2),
    "longformer": lambda: ga.longformer_graph(N, 1, [2, 5]),
    "bigbird": lambda: ga.bigbird_graph(N, 1, 2, [3], seed=0),
    "bigbird of another seed": lambda: ga.bigbird_graph(N, 1, 2, [3], seed=4),
    "grid": lambda: ga.grid_window_graph(2, 3, 1, metric="manhattan", class_token=True),
    "transposed bigbird": lambda: ga.bigbird_graph(N, 1, 2, [3], seed=0).transpose(),
    "plain": lambda: ga.from_edge_index(torch.tensor([[6, 0, 3, 3], [0, 6, 3, 1]]), N),
    "no edges": lambda: ga.from_mask(torch.zeros((N, N), dtype=torch.bool)),
}
STRUCTURED = [name for name in BUILDERS if BUILDERS[name]().structure is not None]


@pytest.mark.parametrize("name", BUILDERS)
def test_union_holds_an_edge_once_that_either_graph_holds(name, check_graph):
    for other in BUILDERS:
        a, b = BUILDERS[name](), BUILDERS[other]()
        expected = (a.to_mask() | b.to_mask()).tolist()
        check_graph(ga.union(BUILDERS[name](), BUILDERS[other]()), expected)


def test_union_is_a_set_operation():
    graphs = [build() for build in BUILDERS.values()]
    for a, b in itertools.product(graphs, repeat=2):
        assert ga.union(a, b) == ga.union(b, a)
    for a, b, c in itertools.combinations(graphs[:12:2], 3):
        assert ga.union(ga.union(a, b), c) == ga.union(a, ga.union(b, c))
    for a in graphs:
        assert ga.union(a, a) == a


def test_union_is_structured_exactly_where_both_graphs_are():
    for a, b in itertools.product(BUILDERS, repeat=2):
        together = ga.union(BUILDERS[a](), BUILDERS[b]())
        assert (together.structure is not None) == (a in STRUCTURED and b in STRUCTURED)


@pytest.mark.parametrize("join", [ga.union, lambda a, b: ga.batch([a, b])])
def test_unions_and_batches_are_causal_exactly_where_both_graphs_are(join):
    causal = ga.causal_window_graph(N, 2)
    table = ga.knn_graph(torch.arange(float(N))[:, None], 2, within=ga.causal_graph(N))
    assert join(causal, ga.causal_graph(N)).is_causal
    assert join(causal, table).is_causal
    assert join(table, table).is_causal
    assert not join(causal, ga.window_path_graph(N, 1)).is_causal
    assert not join(causal, ga.from_edge_index(torch.tensor([[0], [1]]), N)).is_causal


def test_union_of_edge_lists_remembers_that_both_hold_a_causal_sequence():
    plain = ga.from_mask(torch.eye(3).bool())
    mixed = ga.batch([ga.causal_graph(4), plain])
    assert ga.union(mixed, mixed).structure is None
    assert ga.union(mixed, mixed).has_causal_part
    assert not ga.union(mixed, mixed).is_causal
    assert not ga.union(mixed, ga.batch([ga.complete_graph(4), plain])).has_causal_part


def test_union_of_bipartite_graphs(check_graph):
    few = ga.from_edge_index(torch.tensor([[4, 0], [0, 2]]), num_targets=3, num_sources=5)
    all_of_them = ga.bipartite_complete_graph(3, 5)
    check_graph(ga.union(few, few), few.to_mask().tolist())
    check_graph(ga.union(few, all_of_them), [[True] * 5] * 3)
    nobody = ga.bipartite_complete_graph(0, 5)
    check_graph(ga.union(nobody, nobody), [], num_sources=5)


def test_union_of_batches_keeps_their_positions(check_graph):
    def near():
        return ga.batch([ga.window_path_graph(3, 1), ga.window_path_graph(4, 1)])

    def selves():
        return ga.batch([ga.block_window_graph(3, 1), ga.from_mask(torch.eye(4).bool())])

    def far():
        return ga.batch([ga.causal_graph(3), ga.dilated_window_graph(4, 1, 2)])

    positions = [0, 1, 2, 0, 1, 2, 3]
    for a, b in itertools.product([near, selves, far], repeat=2):
        expected = (a().to_mask() | b().to_mask()).tolist()
        check_graph(ga.union(a(), b()), expected, positions=positions)


UNIONS = [
    lambda n: ga.union(ga.window_path_graph(n, 3), ga.dilated_window_graph(n, 4, 5)),
    lambda n: ga.union(ga.window_path_graph(n, 2), ga.causal_window_graph(n, 6)),
    lambda n: ga.union(ga.window_path_graph(n, 2), ga.block_window_graph(n, 5)),
    lambda n: ga.longformer_graph(n, 2, [0, 3]),
    lambda n: ga.longformer_graph(n, 2, [0, 3], dilation=3),
    lambda n: ga.bigbird_graph(n, 2, 2, [0, 3], seed=0),
    lambda n: ga.union(ga.longformer_graph(n, 2, [0, 3]), ga.window_path_graph(n, 4)),
    lambda n: ga.batch([ga.longformer_graph(n, 2, [0]), ga.bigbird_graph(n, 1, 2, [0], seed=1)]),
]


@pytest.mark.parametrize("build", UNIONS)
def test_counting_the_edges_of_a_union_lists_none(build, nobody_lists_edges, monkeypatch):
    num_edges = build(20).num_edges
    assert repr(num_edges) in repr(build(20))
    monkeypatch.undo()
    assert num_edges == int(build(20).to_mask().sum())


def test_batch_puts_graphs_side_by_side_with_no_edge_between(check_graph):
    for names in [*itertools.combinations(BUILDERS, 2), *itertools.combinations(BUILDERS, 1)]:
        graphs = [BUILDERS[name]() for name in names]
        expected = torch.block_diag(*[graph.to_mask().int() for graph in graphs]).bool().tolist()
        packed = ga.batch([BUILDERS[name]() for name in names])
        assert (packed.structure is not None) == all(name in STRUCTURED for name in names)
        check_graph(packed, expected, positions=[*range(N)] * len(names))


def test_batch_of_different_lengths_restarts_positions(check_graph):
    packed = ga.batch([ga.causal_graph(n) for n in (3, 1, 0, 4)])
    assert packed.sizes == ((3, 3), (1, 1), (0, 0), (4, 4))
    assert packed.is_causal
    check_graph(
        packed,
        torch.block_diag(*[torch.ones(n, n).tril() for n in (3, 1, 0, 4)]).bool().tolist(),
        positions=[0, 1, 2, 0, 0, 1, 2, 3],
    )


def test_batch_of_bipartite_graphs_of_different_sizes(check_graph):
    few = ga.from_edge_index(torch.tensor([[3, 0], [0, 1]]), num_targets=2, num_sources=4)
    for graphs in (
        [ga.bipartite_complete_graph(2, 3), ga.causal_graph(2), ga.bipartite_complete_graph(1, 4)],
        [ga.bipartite_complete_graph(2, 3), few],
        [ga.bipartite_complete_graph(0, 2), ga.bipartite_complete_graph(3, 0), few],
    ):
        masks = [graph.to_mask().int() for graph in graphs]
        num_targets, num_sources = (sum(mask.shape[axis] for mask in masks) for axis in (0, 1))
        expected = torch.zeros(num_targets, num_sources, dtype=torch.bool)
        t = s = 0
        for mask in masks:
            expected[t : t + mask.shape[0], s : s + mask.shape[1]] = mask.bool()
            t, s = t + mask.shape[0], s + mask.shape[1]
        check_graph(
            ga.batch(graphs),
            expected.tolist(),
            positions=[p for mask in masks for p in range(mask.shape[0])],
            source_positions=[p for mask in masks for p in range(mask.shape[1])],
        )


def test_batch_of_batches_is_the_flat_batch():
    graphs = [ga.causal_graph(2), ga.longformer_graph(5, 1, [0]), ga.window_cycle_graph(5, 1)]
    plain = ga.from_mask(torch.eye(3).bool())
    flat = ga.batch(graphs)
    assert ga.batch([ga.batch(graphs[:2]), graphs[2]]) == flat
    assert ga.batch([ga.batch(graphs[:1]), ga.batch(graphs[1:])]).structure == flat.structure
    assert ga.batch([ga.batch([graphs[0], plain]), graphs[1]]) == ga.batch(
        [graphs[0], plain, graphs[1]]
    )
    both = ga.union(ga.batch(graphs[:2]), ga.batch(graphs[:2]).transpose())
    assert ga.batch([both, graphs[2]]).sizes == flat.sizes


def test_batch_of_one_is_the_graph_itself():
    for build in BUILDERS.values():
        assert ga.batch([build()]) == build()


def test_batch_takes_any_iterable():
    assert ga.batch(ga.causal_graph(n) for n in (2, 3)) == ga.batch(
        (ga.causal_graph(2), ga.causal_graph(3))
    )


def test_batch_has_the_edges_of_a_torch_geometric_batch():
    graphs = [build() for build in BUILDERS.values()]
    data = Batch.from_data_list([Data(edge_index=g.edge_index, num_nodes=N) for g in graphs])
    packed = ga.batch(graphs)
    assert torch.equal(packed.edge_index, data.edge_index)
    assert packed.num_targets == data.num_nodes


def test_a_batch_differs_from_one_sequence_with_the_same_edges():
    packed = ga.batch([ga.causal_graph(2), ga.causal_graph(2)])
    one_sequence = ga.block_window_graph(4, 2)
    same_edges = ga.from_mask(packed.to_mask())
    assert torch.equal(packed.edge_index, same_edges.edge_index)
    assert packed != same_edges
    assert packed != one_sequence


def test_batches_of_one_window_share_one_table_of_offsets():
    packed = ga.batch([ga.window_path_graph(n, 2) for n in (5, 3, 8)])
    assert packed.structure.num_offsets == ga.window_path_graph(9, 2).structure.num_offsets == 5
    dilated = ga.batch([ga.dilated_window_graph(n, 2, 4) for n in (10, 3, 1)])
    assert dilated.structure.num_offsets == 5
    images = ga.batch([ga.grid_window_graph(2, 3, 1), ga.grid_window_graph(4, 2, 1)])
    assert images.structure.num_offsets == 9
    cells = [(y, x) for y in range(2) for x in range(3)]
    cells += [(y, x) for y in range(4) for x in range(2)]
    source, target = images.edge_index
    rows = images.structure.offset_index(target, source).tolist()
    moves = {
        (cells[j][0] - cells[i][0], cells[j][1] - cells[i][1], row)
        for j, i, row in zip(source.tolist(), target.tolist(), rows, strict=True)
    }
    assert len(moves) == len(set(rows)) == 9


MIXED = [
    (ga.causal_window_graph(5, 3), ga.window_path_graph(5, 1, self_loops=True)),
    (ga.window_path_graph(9, 2), ga.dilated_window_graph(9, 2, 3)),
    (ga.block_window_graph(6, 2), ga.causal_window_graph(6, 3)),
    (ga.grid_window_graph(5, 5, 1), ga.window_path_graph(25, 4, self_loops=True)),
    (ga.complete_graph(3), ga.causal_graph(5)),
]


@pytest.mark.parametrize("graphs", MIXED)
def test_a_shared_table_of_offsets_never_gives_two_displacements_one_row(graphs):
    packed = ga.batch(graphs)
    assert isinstance(packed.structure, Parts)
    if packed.structure.num_offsets is None:
        return  # no table for such a mixture: the safe answer
    source, target = packed.edge_index
    rows = packed.structure.offset_index(target, source).tolist()
    moves = (packed.source_positions[source] - packed.positions[target]).tolist()
    assert len(set(zip(rows, moves, strict=True))) == len(set(rows)) == len(set(moves))

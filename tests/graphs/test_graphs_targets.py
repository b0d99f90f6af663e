"""Rows of a graph are a graph: the same edges, the same positions, and still no edge listed."""

import itertools
import pickle
import re
import time

import pytest
import torch
from kinds_of_graphs import GRAPHS, STRUCTURED, some_mask

import graphattn as ga
from graphattn.graphs.structures.composites import Parts, Section
from graphattn.graphs.structures.structure import GraphStructure
from graphattn.graphs.targets import sources_seen


def cuts(num_targets: int) -> list[tuple[int, int]]:
    """All runs of few targets; of more targets a few of them, the same in every run."""
    runs = list(itertools.combinations_with_replacement(range(num_targets + 1), 2))
    if len(runs) > 30:
        runs = [(0, 1), (0, 2), (num_targets - 2, num_targets), (0, num_targets), *runs[1::5]]
    return runs


@pytest.mark.parametrize("name", GRAPHS)
def test_rows_are_the_rows_of_the_mask_and_no_source_more_than_needed(name):
    graph = GRAPHS[name]()
    mask = graph.to_mask()
    for start, stop in cuts(graph.num_targets):
        part, seen = GRAPHS[name]().targets(start, stop)
        rows = mask[start:stop]
        assert isinstance(seen, range)
        assert (part.num_targets, part.num_sources) == (stop - start, len(seen))
        assert part.num_edges == int(rows.sum()), (start, stop)
        assert torch.equal(part.to_mask(), rows[:, seen.start : seen.stop]), (start, stop)
        columns = rows.any(0).nonzero().flatten().tolist()
        expected = range(columns[0], columns[-1] + 1) if columns else range(0)
        assert seen == expected, (start, stop)


@pytest.mark.parametrize("name", GRAPHS)
def test_positions_are_those_of_the_whole(name):
    graph = GRAPHS[name]()
    for start, stop in cuts(graph.num_targets):
        part, seen = graph.targets(start, stop)
        assert part.positions.tolist() == graph.positions[start:stop].tolist()
        of_sources = graph.source_positions[seen.start : seen.stop]
        assert part.source_positions.tolist() == of_sources.tolist()
        assert part.is_causal or not graph.is_causal


@pytest.mark.parametrize("name", STRUCTURED)
def test_rows_keep_every_promise_of_a_graph(name, check_graph):
    """Counts, degrees, sorted edges, contains, transpose, tables of offsets, copies, pickles."""
    graph = STRUCTURED[name]()
    N, mask = graph.num_targets, graph.to_mask()
    # On a grid (and a batch of one) the displacement has several coordinates, which grids test.
    for start, stop in {(0, N), (0, N // 2), (N // 3, N - N // 4), (N // 2, N)}:
        part, seen = STRUCTURED[name]().targets(start, stop)
        table = part.structure.offset_table
        if table is not None and table[0] != "sequence":
            continue
        check_graph(
            part,
            mask[start:stop, seen.start : seen.stop].tolist(),
            num_sources=len(seen),
            positions=graph.positions[start:stop].tolist(),
            source_positions=graph.source_positions[seen.start : seen.stop].tolist(),
        )


@pytest.mark.parametrize("name", STRUCTURED)
def test_rows_read_the_table_of_offsets_that_the_whole_reads(name):
    graph = STRUCTURED[name]()
    if graph.structure.offset_table is None:
        return
    source, target = graph.edge_index
    whole = torch.full((graph.num_targets, graph.num_sources), -1)
    whole[target, source] = graph.structure.offset_index(target, source)
    for start, stop in cuts(graph.num_targets):
        part, seen = graph.targets(start, stop)
        if part.structure.offset_table is None:  # a batch of which parts with other tables are left
            continue
        assert part.structure.offset_table == graph.structure.offset_table
        source, target = part.edge_index
        rows = whole[start:stop, seen.start : seen.stop][target, source]
        assert torch.equal(part.structure.offset_index(target, source), rows)


@pytest.mark.parametrize("name", STRUCTURED)
def test_rows_of_rows_are_rows_of_the_whole(name):
    graph = STRUCTURED[name]()
    N = graph.num_targets
    for start, stop in cuts(N):
        part, seen = graph.targets(start, stop)
        for a, b in {
            (0, stop - start),
            (0, (stop - start) // 2),
            ((stop - start) // 3, stop - start),
        }:
            inner, seen_again = part.targets(a, b)
            direct, of_whole = graph.targets(start + a, start + b)
            assert inner == direct
            if len(of_whole):
                assert seen[seen_again.start : seen_again.stop] == of_whole


def depth(structure: GraphStructure) -> int:
    return 1 + depth(structure.whole) if isinstance(structure, Section) else 0


@pytest.mark.parametrize("name", STRUCTURED)
def test_a_section_holds_no_section_and_all_rows_are_the_graph_itself(name):
    graph = STRUCTURED[name]()
    N = graph.num_targets
    part = graph.targets(N // 4, N)[0]
    part = part.targets(0, part.num_targets - part.num_targets // 4)[0]
    assert depth(part.structure) <= 1
    whole, seen = graph.targets(0, N)
    if len(seen) == graph.num_sources:
        assert whole is graph


def test_a_part_of_a_batch_that_is_left_alone_is_no_batch():
    packed = ga.batch([ga.causal_graph(4), ga.window_path_graph(6, 2), ga.causal_graph(3)])
    alone, seen = packed.targets(4, 10)
    assert alone == ga.window_path_graph(6, 2)
    assert seen == range(4, 10)
    two, seen = packed.targets(6, 11)
    assert isinstance(two.structure, Parts)
    assert two.sizes == ((4, 6), (1, 1))
    assert two.positions.tolist() == [2, 3, 4, 5, 0]
    assert two.source_positions.tolist() == [0, 1, 2, 3, 4, 5, 0]


@pytest.mark.parametrize(
    "graph",
    [
        ga.causal_window_graph(10_000_000, 512),
        ga.causal_graph(10_000_000),
        ga.block_window_graph(10_000_000, 64, shift=3),
        ga.complete_graph(10_000_000),
        ga.longformer_graph(10_000_000, 8, [0]),
        ga.window_cycle_graph(10_000_000, 8),
    ],
    ids=str,
)
def test_rows_of_ten_million_tokens_cost_no_more_than_their_own(graph):
    began = time.perf_counter()
    part, seen = graph.targets(4_000_000, 4_000_010)
    assert part.num_targets == 10
    assert part.structure is not None
    assert part._edge_index is None
    assert sources_seen(part.structure, 0, 10) == (0, len(seen))
    if not isinstance(part.structure, Parts) and len(seen) < 10_000:
        assert part.num_edges == int(part.in_degree().sum()) == part.edge_index.shape[1]
    assert time.perf_counter() - began < 2


@pytest.mark.parametrize(
    ("start", "stop", "said"),
    [
        (0, 10, "stop must be <= num_targets = 9, got 10"),
        (-1, 3, "start must be >= 0, got -1"),
        (4, 3, "start must be <= stop = 3, got 4"),
        (1.5, 3, "start must be an integer >= 0, got 1.5"),
        (0, None, "stop must be an integer >= 0, got None"),
    ],
)
def test_rows_out_of_range_are_refused_by_name(start, stop, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        ga.causal_graph(9).targets(start, stop)


# Graphs with a past.


@pytest.mark.parametrize(("n", "past"), [*itertools.product([0, 1, 2, 5], [0, 1, 3, 8])])
def test_causal_graphs_with_a_past_are_the_last_rows_of_the_whole(n, past, check_graph):
    for window in (None, 1, 2, 4, 20):
        graph = (
            ga.causal_graph(n, past=past)
            if window is None
            else (ga.causal_window_graph(n, window, past=past))
        )
        reach = n + past if window is None else window
        sees = [[i - reach < j <= i for j in range(past + n)] for i in range(past, past + n)]
        check_graph(
            graph,
            sees,
            num_sources=past + n,
            positions=range(past, past + n),
            source_positions=range(past + n),
        )
        assert graph.is_causal
        assert graph.structure is not None


def test_without_a_past_the_builders_give_what_they_gave():
    assert ga.causal_graph(5, past=0) == ga.causal_graph(5)
    assert ga.causal_window_graph(5, 2, past=0).structure == ga.causal_window_graph(5, 2).structure


@pytest.mark.parametrize("past", [-1, 1.5, True, "3"])
def test_a_past_that_is_no_count_is_refused_by_name(past):
    with pytest.raises(ValueError, match="past must be"):
        ga.causal_graph(3, past=past)
    with pytest.raises(ValueError, match="past must be"):
        ga.causal_window_graph(3, 2, past=past)


def test_graphs_at_other_positions_are_not_equal():
    mask = torch.ones(2, 3, dtype=torch.bool)
    assert ga.from_mask(mask) == ga.bipartite_complete_graph(2, 3)
    assert ga.causal_window_graph(1, 3, past=2) != ga.bipartite_complete_graph(1, 3)
    a, b = (ga.window_path_graph(30, 2).targets(i, i + 5)[0] for i in (10, 11))
    assert torch.equal(a.to_mask(), b.to_mask())
    assert a != b


def test_positions_survive_batches_transposes_pickles_and_operators():
    from graphattn.graphs.token_graph import decode

    past = ga.causal_window_graph(3, 4, past=5)
    packed = ga.batch([past, ga.causal_graph(2), ga.from_mask(some_mask(2, 3))])
    twins = (
        pickle.loads(pickle.dumps(packed)),
        packed.transpose().transpose(),
        decode(packed.code, packed.listed, packed.device),
        packed.to("cpu"),
    )
    for graph in twins:
        assert graph == packed
        assert graph.positions.tolist() == [5, 6, 7, 0, 1, 0, 1]
        assert graph.source_positions.tolist() == [*range(8), 0, 1, 0, 1, 2]
    meta = past.to("meta")
    assert meta.positions.device.type == "meta"
    assert meta.starts == ((5, 0),)


def test_graphs_that_stand_elsewhere_are_not_united():
    shifted = ga.window_path_graph(30, 2, self_loops=True).targets(10, 15)[0]
    near = ga.window_path_graph(30, 2, self_loops=True).targets(11, 16)[0]
    assert ga.union(shifted, shifted).to_mask().equal(shifted.to_mask())
    with pytest.raises(
        ValueError, match=r"positions begin at different numbers: \(\(10, 8\),\) and \(\(11, 9\),\)"
    ):
        ga.union(shifted, near)


def test_a_union_of_two_graphs_with_a_past_has_the_edges_of_both():
    a, b = ga.causal_window_graph(5, 2, past=4), ga.causal_graph(5, past=4)
    both = ga.union(a, b)
    assert both.num_edges == b.num_edges
    assert torch.equal(both.to_mask(), a.to_mask() | b.to_mask())


def test_neighbours_within_rows_are_sought_where_they_stand():
    x = torch.rand(9, 3, dtype=torch.float64)
    graph = ga.window_path_graph(9, 3)
    part, seen = graph.targets(3, 7)
    whole = ga.knn_graph(x, 2, within=ga.from_mask(graph.to_mask()))
    near = ga.knn_graph(x[3:7], 2, source=x[seen.start : seen.stop], within=part)
    assert torch.equal(near.neighbors + seen.start, whole.neighbors[3:7])
    assert near.positions.tolist() == [3, 4, 5, 6]


def test_a_graph_with_a_past_is_named_and_drawn():
    graph = ga.causal_window_graph(4, 2, past=3)
    named = "TokenGraph(num_targets=4, num_sources=7, num_edges=8, structure=Section(Band))"
    assert repr(graph) == named
    assert "<svg" in graph._repr_html_()


CROSSED = ga.batch([ga.bipartite_complete_graph(1, 2), ga.bipartite_complete_graph(2, 1)])
SHIFTED = ga.from_mask(torch.eye(6, dtype=torch.bool).roll(1, 1)).targets(0, 3)[0]


@pytest.mark.parametrize("graph", [CROSSED, SHIFTED], ids=["crossed", "shifted"])
def test_as_many_sources_as_targets_need_not_be_the_same_tokens(graph):
    assert graph.num_targets == graph.num_sources == 3
    assert not graph.has_same_tokens
    with pytest.raises(ValueError, match="context must be the tokens that are seen"):
        ga.nn.DotProductAttention(8, heads=2)(torch.randn(3, 8), graph)
    with pytest.raises(ValueError, match=r"context must be|update='energy'"):
        ga.nn.SelfConsensus(8, heads=2)(torch.randn(3, 8), graph)
    for function in (ga.spectral.fiedler_value, ga.spectral.certify, ga.spectral.laplacian):
        with pytest.raises(ValueError, match="graph must have the same tokens"):
            function(graph)
    with pytest.raises(ValueError, match="graph must have the same tokens"):
        ga.dynamics.simulate(torch.randn(3, 2), graph, steps=1)

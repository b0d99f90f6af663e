"""Graphs held as a table of neighbours: the same promises, and nothing is read before it must be.

Tensors on "meta" hold nothing, so whatever reads one raises: what works there waits for no GPU.
"""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import graphattn as ga
from graphattn.graphs.token_graph import decode

PROFILE = settings(deadline=None, max_examples=60)


def as_table(mask, slots: int) -> torch.Tensor:
    """List the sources of every target in ascending order, with -1 in the slots before them."""
    rows = [[j for j, sees in enumerate(row) if sees] for row in mask]
    padded = [[-1] * (slots - len(row)) + row for row in rows]
    return torch.tensor(padded, dtype=torch.int64).reshape(len(rows), slots)


def table_graph(table: torch.Tensor, num_sources: int | None = None, **facts) -> ga.TokenGraph:
    num_sources = len(table) if num_sources is None else num_sources
    return ga.TokenGraph(neighbors=table, num_targets=len(table), num_sources=num_sources, **facts)


@st.composite
def masks(draw):
    num_targets, num_sources = draw(st.integers(0, 6)), draw(st.integers(0, 6))
    row = st.lists(st.booleans(), min_size=num_sources, max_size=num_sources)
    return draw(st.lists(row, min_size=num_targets, max_size=num_targets)), num_sources


@PROFILE
@given(case=masks(), spare=st.integers(0, 2))
def test_a_table_keeps_every_promise_of_a_graph(case, spare, check_graph):
    mask, num_sources = case
    table = as_table(mask, max((sum(row) for row in mask), default=0) + spare)
    check_graph(table_graph(table, num_sources), mask, num_sources=num_sources)


@PROFILE
@given(case=masks(), other=masks())
def test_unions_and_batches_take_tables(case, other):
    graphs, dense = [], []
    for mask, num_sources in (case, other):
        matrix = torch.tensor(mask, dtype=torch.bool).reshape(len(mask), num_sources)
        graphs.append(table_graph(as_table(mask, num_sources), num_sources))
        dense.append(matrix)
    blocks = torch.zeros(sum(len(m) for m in dense), sum(m.shape[1] for m in dense))
    blocks[: len(dense[0]), : dense[0].shape[1]] = dense[0]
    blocks[len(dense[0]) :, dense[0].shape[1] :] = dense[1]
    assert torch.equal(ga.batch(graphs).to_mask(), blocks.bool())
    everyone = ga.bipartite_complete_graph(*dense[0].shape)
    assert ga.union(graphs[0], everyone) == everyone
    assert ga.union(graphs[0], graphs[0]) == graphs[0]


def test_the_table_of_a_neighbour_graph_holds_the_nearest_in_ascending_order():
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    distance = torch.cdist(x, x).fill_diagonal_(torch.inf)
    graph = ga.knn_graph(x, 5)
    assert graph.neighbors.dtype == torch.int64
    assert torch.equal(graph.neighbors, distance.topk(5, largest=False).indices.sort(1).values)
    # Among what came before there are 0, 1, 2, ... candidates: -1 fills the row from its front.
    causal = ga.knn_graph(x, 5, within=ga.causal_graph(40)).neighbors
    for i in range(40):
        nearest = distance[i, :i].topk(min(i, 5), largest=False).indices.tolist()
        assert causal[i].tolist() == [-1] * (5 - len(nearest)) + sorted(nearest)


def test_other_graphs_have_no_table():
    listed = ga.from_edge_index(torch.tensor([[0, 1], [1, 2]]), 3)
    windows = ga.window_path_graph(3, 1)
    assert listed.neighbors is None
    assert windows.neighbors is None
    assert listed.listed is listed.compact_edges
    assert windows.listed is None


def test_counting_the_edges_of_a_table_does_not_list_them():
    graph = table_graph(torch.tensor([[-1, -1], [-1, 0], [0, 1]]))
    assert graph.num_edges == 3
    assert graph.in_degree().tolist() == [0, 1, 2]
    assert graph.rowptr.tolist() == [0, 0, 1, 3]
    assert repr(graph) == "TokenGraph(num_tokens=3, num_edges=3)"
    hash(graph), pickle.dumps(graph), graph.positions, graph.listed
    assert graph._edge_index is None
    assert graph.edge_index is graph.edge_index, "once listed, the edges are kept"
    assert graph.listed is graph.compact_neighbors


def test_pickles_hold_the_table_and_not_the_list():
    graph = ga.knn_graph(torch.randn(2_000, 3), 8)
    before = len(pickle.dumps(graph))
    assert graph.transpose().edge_index.shape == graph.edge_index.shape == (2, 16_000)
    assert len(graph.rowptr) == 2_001
    data = pickle.dumps(graph)
    assert len(data) == before < 2_000 * 8 * 8 + 5_000
    for twin in (pickle.loads(data), copy.copy(graph), copy.deepcopy(graph)):
        assert twin._edge_index is None
        assert torch.equal(twin.neighbors, graph.neighbors)
        assert twin == graph


def test_a_table_of_backward_edges_points_backward():
    assert table_graph(torch.tensor([[-1, -1], [-1, 0], [0, 2]])).points_backward
    assert not table_graph(torch.tensor([[-1, 1], [-1, 0], [0, 2]])).points_backward
    assert not table_graph(torch.tensor([[-1, -1], [-1, 1], [-1, 2]])).points_backward, "loops"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (torch.zeros(3, 2, dtype=torch.int16), r"int64 tensor \[3, k\].*got torch.int16"),
        (torch.zeros(3, dtype=torch.int64), r"int64 tensor \[3, k\].*got .* shape \[3\]"),
        (torch.zeros(4, 2, dtype=torch.int64), r"int64 tensor \[3, k\].*got .* shape \[4, 2\]"),
    ],
)
def test_a_table_of_another_shape_or_dtype_is_refused(table, message):
    with pytest.raises(ValueError, match="neighbors must be an " + message):
        ga.TokenGraph(neighbors=table, num_targets=3, num_sources=3)


# What a graph is for an operator: its code, and a list or a table.


FACTS = [
    {},
    {"is_causal": True},
    {"has_causal_part": True},
    {"sizes": ((2, 2), (0, 0), (1, 1))},
]


@pytest.mark.parametrize("facts", FACTS, ids=str)
@pytest.mark.parametrize("kind", ["neighbors", "edge_index"])
def test_code_and_listed_are_the_whole_graph(kind, facts):
    listed = torch.tensor([[0, 1, 2], [0, 1, 1]] if kind == "edge_index" else [[0], [1], [-1]])
    graph = ga.TokenGraph(**{kind: listed}, num_targets=3, num_sources=3, **facts)
    again = decode(graph.code, graph.listed, graph.device)
    assert again == graph
    assert (again.neighbors is None) == (kind == "edge_index")
    assert (again.is_causal, again.has_causal_part) == (graph.is_causal, graph.has_causal_part)
    assert again.sizes == graph.sizes


def test_a_table_of_two_rows_is_not_taken_for_a_list_of_edges():
    numbers = torch.tensor([[0, 1], [0, 1]])  # edges 0 -> 0 and 1 -> 1, or everyone sees everyone
    listed = ga.from_edge_index(numbers, 2)
    table = table_graph(numbers)
    assert torch.equal(listed.listed, table.listed)
    masks = [decode(graph.code, numbers, graph.device).to_mask() for graph in (listed, table)]
    assert torch.equal(masks[0], torch.eye(2).bool())
    assert torch.equal(masks[1], torch.ones(2, 2).bool())


def test_a_table_is_not_read_until_its_edges_are_wanted():
    table = torch.empty((6, 2), dtype=torch.int64, device="meta")
    graph = table_graph(table, 9, sizes=((2, 4), (4, 5)), has_causal_part=True)
    assert graph.device.type == "meta"
    assert graph.code.device.type == "cpu"
    assert graph.listed is graph.neighbors is table
    assert graph.in_degree().shape == (6,)
    assert graph.rowptr.shape == (7,)
    assert graph.positions.shape == (6,)
    assert graph.source_positions.shape == (9,)
    again = decode(graph.code, graph.listed, graph.device)
    assert again.neighbors is table
    assert again.sizes == graph.sizes
    with pytest.raises((RuntimeError, NotImplementedError)):
        _ = graph.edge_index
    with pytest.raises((RuntimeError, NotImplementedError)):
        _ = graph.num_edges


@pytest.mark.long
def test_a_layer_reads_a_table_and_a_list_alike_also_when_compiled():
    def attend(x, graph):
        return ga.rbf_attention(x, x, x, graph, sigma=1.0, backend="structured")

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    generator = torch.Generator().manual_seed(0)
    for num_tokens, k in ((12, 3), (20, 4)):
        x = torch.randn(num_tokens, 2, 4, generator=generator, dtype=torch.float64)
        x.requires_grad_()
        graph = ga.knn_graph(x.detach().flatten(1), k, within=ga.causal_graph(num_tokens))
        listed = ga.from_mask(graph.to_mask())
        assert listed.neighbors is None
        expected = ga.rbf_attention(x, x, x, listed, sigma=1.0, backend="reference")
        (gradient,) = torch.autograd.grad(expected.square().sum(), x)
        for run in (attend, compiled):
            for each in (graph, copy.copy(graph), listed):
                y = run(x, each)
                torch.testing.assert_close(y, expected)
                (of_x,) = torch.autograd.grad(y.square().sum(), x)
                torch.testing.assert_close(of_x, gradient)


@pytest.mark.long
def test_compiled_consensus_reads_a_table():
    generator = torch.Generator().manual_seed(0)
    layer = ga.nn.SelfConsensus(8, heads=2, rank=2, edge_hidden=4).double()
    x = torch.randn(12, 8, generator=generator, dtype=torch.float64)
    graph = ga.knn_graph(x, 3)
    expected = layer(x, ga.from_mask(graph.to_mask()))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, graph), expected)


@pytest.mark.long
@pytest.mark.parametrize("derived", ["inside", "outside"])
@pytest.mark.parametrize("kind", ["window", "grid", "list", "table"])
def test_a_graph_that_was_used_in_inference_mode_can_be_trained_with(kind, derived):
    """Tensors that a graph consists of, or derives and keeps, must not be inference tensors."""
    points = torch.randn(12, 3)
    make = {
        "window": lambda: ga.window_path_graph(12, 2),
        "grid": lambda: ga.grid_window_graph(3, 4, 1),
        "list": lambda: ga.from_edge_index(torch.tensor([[0, 1], [1, 2]]), 12),
        "table": lambda: ga.knn_graph(points, 3),
    }[kind]
    outside = None if derived == "inside" else make()
    with torch.inference_mode():
        graph = outside or make()
        assert graph.rowptr[-1] == graph.num_edges
        assert len(graph.positions) == 12
        graph.transpose()
        x = torch.randn(12, 2, 4)
        ga.rbf_attention(x, x, x, graph, 1.0, backend="reference")
    x = torch.randn(12, 2, 4, requires_grad=True)
    for backend in ("reference", "structured"):
        ga.rbf_attention(x, x, x, graph, 1.0, backend=backend).sum().backward()
    compiled = torch.compile(lambda x: ga.rbf_attention(x, x, x, graph, 1.0), backend="aot_eager")
    compiled(x).sum().backward()
    assert x.grad.isfinite().all()

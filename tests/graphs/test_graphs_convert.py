"""Conversions to and from types of other libraries lose, turn around and invent nothing."""

import networkx
import numpy as np
import pytest
import scipy.sparse
import torch
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.nn import SimpleConv

import graphattn as ga

SQUARE = {
    "path": lambda: ga.window_path_graph(6, 2),
    "causal": lambda: ga.causal_graph(5),
    "bigbird": lambda: ga.bigbird_graph(12, 1, 2, [3], seed=0),
    "batch": lambda: ga.batch([ga.causal_graph(2), ga.window_cycle_graph(5, 1)]),
    "plain": lambda: ga.from_edge_index(torch.tensor([[4, 0, 0], [0, 4, 0]]), 6),
    "no edges": lambda: ga.from_mask(torch.zeros((3, 3), dtype=torch.bool)),
    "no tokens": lambda: ga.causal_graph(0),
}
RECTANGULAR = {
    "complete": lambda: ga.bipartite_complete_graph(2, 5),
    "plain": lambda: ga.from_edge_index(torch.tensor([[4, 0, 3], [0, 2, 2]]), 3, 5),
    "no targets": lambda: ga.bipartite_complete_graph(0, 2),
    "no sources": lambda: ga.bipartite_complete_graph(3, 0),
}
ALL = {**{f"square {k}": v for k, v in SQUARE.items()}, **RECTANGULAR}


# Masks.


@pytest.mark.parametrize("name", ALL)
def test_a_mask_holds_a_graph(name):
    graph = ALL[name]()
    mask = graph.to_mask()
    assert mask.dtype == torch.bool
    assert mask.shape == (graph.num_targets, graph.num_sources)
    back = ga.from_mask(mask)
    assert torch.equal(back.edge_index, graph.edge_index)
    assert (back.num_targets, back.num_sources) == (graph.num_targets, graph.num_sources)


def test_true_in_a_mask_means_that_the_row_sees_the_column():
    mask = torch.tensor([[False, True, False], [False, False, True]])
    assert ga.from_mask(mask).edge_index.tolist() == [[1, 2], [0, 1]]


# Edge lists.


def test_edges_come_out_sorted_by_target_then_source_with_the_permutation_that_did_it():
    edge_index = torch.tensor([[3, 1, 0, 2, 0], [1, 2, 1, 0, 3]])
    graph, permutation = ga.from_edge_index(edge_index, 4, return_permutation=True)
    assert graph.edge_index.tolist() == [[2, 0, 3, 1, 0], [0, 1, 1, 2, 3]]
    assert permutation.tolist() == [3, 2, 0, 1, 4]
    weight = torch.tensor([31.0, 12.0, 1.0, 20.0, 3.0])  # 10 source + target
    assert weight[permutation].tolist() == [20.0, 1.0, 31.0, 12.0, 3.0]


@pytest.mark.parametrize(
    "dtype",
    [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32],
)
def test_any_integer_dtype_makes_the_same_graph(dtype):
    edge_index = torch.tensor([[2, 0, 1], [0, 1, 2]])
    graph = ga.from_edge_index(edge_index.to(dtype), 3)
    assert graph == ga.from_edge_index(edge_index, 3)
    assert graph.edge_index.dtype == torch.int64


@pytest.mark.parametrize("sort_order", [None, "row", "col"])
def test_a_torch_geometric_edge_index_is_an_edge_list(sort_order):
    plain = torch.tensor([[0, 1, 2], [2, 0, 1]])
    if sort_order is not None:
        plain = plain[:, plain[0 if sort_order == "row" else 1].argsort()]
    given = EdgeIndex(plain, sparse_size=(3, 3), sort_order=sort_order)
    graph = ga.from_edge_index(given, 3)
    assert graph == ga.from_edge_index(plain, 3)
    assert type(graph.edge_index) is torch.Tensor
    assert ga.from_pyg(given) == graph


# PyG.


@pytest.mark.parametrize("name", ALL)
def test_to_pyg_is_a_valid_edge_index_sorted_by_column(name):
    graph = ALL[name]()
    edge_index = graph.to_pyg()
    assert isinstance(edge_index, EdgeIndex)
    edge_index.validate()
    assert edge_index.sort_order == "col"
    assert edge_index.is_sorted_by_col
    assert edge_index.sparse_size() == (graph.num_sources, graph.num_targets)
    assert torch.equal(edge_index.as_tensor(), graph.edge_index)
    back = ga.from_pyg(edge_index)
    assert torch.equal(back.edge_index, graph.edge_index)
    assert (back.num_targets, back.num_sources) == (graph.num_targets, graph.num_sources)


@pytest.mark.parametrize("name", [name for name in SQUARE if name != "no tokens"])
def test_a_torch_geometric_layer_sums_over_what_a_target_sees(name):
    graph = SQUARE[name]()
    x = torch.randn(graph.num_sources, 3, dtype=torch.float64)
    out = SimpleConv(aggr="sum")(x, graph.to_pyg())
    torch.testing.assert_close(out, graph.to_mask().double() @ x)


def test_a_bipartite_torch_geometric_layer_reads_sources_and_writes_targets():
    graph = ga.from_edge_index(torch.tensor([[4, 0, 3], [0, 2, 2]]), 3, 5)
    x = torch.randn(5, 2, dtype=torch.float64)
    out = SimpleConv(aggr="sum")((x, torch.zeros(3, 2, dtype=torch.float64)), graph.to_pyg())
    torch.testing.assert_close(out, graph.to_mask().double() @ x)


def test_from_pyg_reads_the_number_of_nodes_wherever_a_data_keeps_it():
    edge_index = torch.tensor([[1, 0], [0, 1]])
    expected = ga.from_edge_index(edge_index, 5)
    assert ga.from_pyg(Data(edge_index=edge_index, num_nodes=5)) == expected
    assert ga.from_pyg(Data(edge_index=edge_index, x=torch.zeros(5, 2))) == expected
    assert ga.from_pyg(Data(edge_index=edge_index, pos=torch.zeros(5, 3))) == expected


# networkx.


@pytest.mark.parametrize("name", SQUARE)
def test_networkx_holds_a_square_graph(name):
    graph = SQUARE[name]()
    other = graph.to_networkx()
    assert isinstance(other, networkx.DiGraph)
    assert list(other.nodes) == list(range(graph.num_targets))
    assert set(other.edges) == set(zip(*graph.edge_index.tolist(), strict=True))
    assert torch.equal(ga.from_networkx(other).edge_index, graph.edge_index)
    sources = {i: set(other.predecessors(i)) for i in other}
    rowptr, source = graph.csr()
    for i in range(graph.num_targets):
        assert sources[i] == set(source[rowptr[i] : rowptr[i + 1]].tolist())


@pytest.mark.parametrize("name", RECTANGULAR)
def test_networkx_holds_a_rectangular_graph_as_two_kinds_of_nodes(name):
    graph = RECTANGULAR[name]()
    other = graph.to_networkx()
    assert other.number_of_nodes() == graph.num_targets + graph.num_sources
    assert set(other.edges) == {
        (("source", j), ("target", i)) for j, i in graph.edge_index.T.tolist()
    }
    kinds = networkx.get_node_attributes(other, "bipartite")
    assert all(kinds[node] == (node[0] == "source") for node in other)


def test_an_undirected_edge_of_networkx_gives_both_directions_and_a_self_loop_one():
    other = networkx.Graph([(0, 1), (1, 1), (1, 2)])
    assert ga.from_networkx(other).edge_index.tolist() == [[1, 0, 1, 2, 1], [0, 1, 1, 1, 2]]


def test_tokens_are_networkx_nodes_in_iteration_order():
    other = networkx.DiGraph()
    other.add_nodes_from(["z", "a", ("any", "thing"), 7])
    other.add_edges_from([("z", ("any", "thing")), (7, "a")])
    assert list(other) == ["z", "a", ("any", "thing"), 7]
    assert ga.from_networkx(other).edge_index.tolist() == [[3, 0], [1, 2]]


def test_a_multigraph_without_repeats_is_a_graph_and_one_with_repeats_raises():
    assert ga.from_networkx(networkx.MultiDiGraph([(0, 1), (1, 0)])).num_edges == 2
    assert ga.from_networkx(networkx.MultiGraph([(0, 1), (1, 2)])).num_edges == 4
    for other in (
        networkx.MultiDiGraph([(0, 1), (1, 2), (1, 2)]),
        networkx.MultiGraph([(0, 1), (1, 2), (2, 1)]),
        networkx.MultiGraph([(0, 1), (1, 1), (1, 1)]),
    ):
        with pytest.raises(ValueError, match=r"the edge \(\d, \d\) more than once"):
            ga.from_networkx(other)


# scipy.

FORMATS = ["coo", "csr", "csc", "lil", "dok", "bsr", "dia"]


@pytest.mark.parametrize("name", ALL)
def test_scipy_holds_a_graph_as_source_by_target(name):
    graph = ALL[name]()
    matrix = graph.to_scipy()
    assert scipy.sparse.issparse(matrix)
    assert matrix.shape == (graph.num_sources, graph.num_targets)
    assert np.array_equal(matrix.toarray(), graph.to_mask().T.double().numpy())
    back = ga.from_scipy(matrix)
    assert torch.equal(back.edge_index, graph.edge_index)
    assert (back.num_targets, back.num_sources) == (graph.num_targets, graph.num_sources)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("suffix", ["array", "matrix"])
def test_every_sparse_format_is_read_alike(kind, suffix):
    dense = np.zeros((3, 5))
    dense[[0, 2, 2], [4, 0, 1]] = 1.0
    graph = ga.from_scipy(getattr(scipy.sparse, f"{kind}_{suffix}")(dense))
    assert (graph.num_sources, graph.num_targets) == (3, 5)
    assert graph.edge_index.tolist() == [[2, 2, 0], [0, 1, 4]]


@pytest.mark.parametrize("dtype", [bool, np.int8, np.float32, np.complex128])
def test_values_of_any_dtype_are_edges_where_they_are_not_zero(dtype):
    matrix = scipy.sparse.coo_array((np.array([1, 0, 1]).astype(dtype), ([0, 1, 2], [1, 2, 0])))
    assert matrix.nnz == 3
    assert ga.from_scipy(matrix).edge_index.tolist() == [[2, 0], [0, 1]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_weights_of_every_floating_dtype_reach_scipy(dtype):
    graph = ga.causal_graph(2)
    weight = torch.tensor([1.0, 0.5, 0.25], dtype=dtype)
    assert graph.to_scipy(weight).toarray().tolist() == [[1.0, 0.5], [0.0, 0.25]]


@pytest.mark.parametrize("kind", ["coo", "csr", "csc"])
def test_an_entry_stored_twice_raises_and_names_the_edge(kind):
    if kind == "coo":
        matrix = scipy.sparse.coo_array((np.ones(3), ([1, 0, 1], [2, 0, 2])), shape=(3, 4))
    else:
        indices, indptr = (
            ([0, 2, 2], [0, 1, 3, 3]) if kind == "csr" else ([0, 1, 1], [0, 1, 1, 3, 3])
        )
        build = getattr(scipy.sparse, f"{kind}_array")
        matrix = build((np.ones(3), indices, indptr), shape=(3, 4))
    with pytest.raises(ValueError, match=r"source 1, target 2\) more than once"):
        ga.from_scipy(matrix)


def test_a_pyg_batch_keeps_its_sequences_apart():
    one = Data(edge_index=torch.tensor([[0, 1], [1, 2]]), num_nodes=3)
    two = Data(edge_index=torch.tensor([[1], [0]]), num_nodes=2)
    graph = ga.from_pyg(Batch.from_data_list([one, two]))
    assert graph.edge_index.tolist() == [[0, 1, 4], [1, 2, 3]]
    assert graph.positions.tolist() == [0, 1, 2, 0, 1]
    assert graph.sizes == ((3, 3), (2, 2))


# HeteroData: one edge type between two kinds of nodes.

READS = ("dna", "read_by", "protein")


@pytest.mark.parametrize("name", ALL)
def test_hetero_data_holds_a_graph_and_gives_it_back(name):
    graph = ALL[name]()
    data = graph.to_pyg(READS)
    data.validate()
    assert data["protein"].num_nodes == graph.num_targets
    assert data["dna"].num_nodes == graph.num_sources
    assert torch.equal(data[READS].edge_index, graph.edge_index)
    for back in (ga.from_pyg(data), ga.from_pyg(data, READS)):
        assert back == graph
        assert torch.equal(back.positions, graph.positions)


def test_the_edge_type_picks_among_several_and_leaves_isolated_tokens_where_they_are():
    data = HeteroData()
    data["dna"].x = torch.zeros(7, 2)
    data["protein"].num_nodes = 4
    data[READS].edge_index = torch.tensor([[5, 0], [1, 0]])
    data["protein", "binds", "protein"].edge_index = torch.tensor([[0, 1], [1, 0]])
    graph = ga.from_pyg(data, READS)
    assert (graph.num_sources, graph.num_targets) == (7, 4)
    assert graph.edge_index.tolist() == [[0, 5], [0, 1]]
    square = ga.from_pyg(data, ("protein", "binds", "protein"))
    assert square.num_tokens == 4
    with pytest.raises(
        ValueError, match=r"edge_type must be one of the edge types .*read_by.*binds.* got None"
    ):
        ga.from_pyg(data)
    with pytest.raises(ValueError, match=r"edge_type must be one of .* got \('dna', 'eats', 'dna'"):
        ga.from_pyg(data, ("dna", "eats", "dna"))


def test_a_hetero_batch_keeps_its_sequences_apart():
    items = []
    for dna, protein in ((3, 2), (4, 1)):
        data = HeteroData()
        data["dna"].num_nodes, data["protein"].num_nodes = dna, protein
        data[READS].edge_index = torch.tensor([[dna - 1], [protein - 1]])
        items.append(data)
    graph = ga.from_pyg(Batch.from_data_list(items))
    assert graph.sizes == ((2, 3), (1, 4))
    assert graph.positions.tolist() == [0, 1, 0]
    assert graph.source_positions.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert graph.edge_index.tolist() == [[2, 6], [1, 2]]


def test_a_batch_goes_to_hetero_data_with_the_borders_that_pyg_draws():
    packed = ga.batch([ga.bipartite_complete_graph(2, 3), ga.bipartite_complete_graph(1, 4)])
    data = packed.to_pyg(READS)
    assert data["dna"].ptr.tolist() == [0, 3, 7]
    assert data["protein"].batch.tolist() == [0, 0, 1]


def test_a_square_graph_may_be_of_one_node_type_and_a_rectangular_one_may_not():
    binds = ("protein", "binds", "protein")
    graph = ga.window_cycle_graph(7, 2)
    assert ga.from_pyg(graph.to_pyg(binds), binds) == graph
    with pytest.raises(ValueError, match="edge_type must name two node types"):
        ga.bipartite_complete_graph(2, 3).to_pyg(binds)


@pytest.mark.parametrize("bad", ["dna", ("dna", "protein"), ["dna", "reads", "protein"], (1, 2, 3)])
def test_an_edge_type_is_three_strings(bad):
    with pytest.raises(ValueError, match="edge_type must be a tuple"):
        ga.causal_graph(3).to_pyg(bad)


def test_what_hetero_data_does_not_tell_is_asked_for():
    data = HeteroData()
    data["dna"].num_nodes = 3
    data[READS].edge_index = torch.tensor([[0], [0]])
    with pytest.raises(ValueError, match=r"data\['protein'\] must have num_nodes"):
        ga.from_pyg(data)
    with pytest.raises(ValueError, match="edge_type must be None unless data is a HeteroData"):
        ga.from_pyg(Data(edge_index=torch.tensor([[0], [0]]), num_nodes=1), READS)


def test_parts_of_one_node_type_have_as_many_targets_as_sources_each():
    graph = ga.batch([ga.bipartite_complete_graph(2, 3), ga.bipartite_complete_graph(3, 2)])
    with pytest.raises(ValueError, match=r"must name two node types.*\(2, 3\), \(3, 2\)"):
        graph.to_pyg(("a", "r", "a"))
    assert ga.from_pyg(graph.to_pyg(("a", "r", "b"))) == graph


def a_batch():
    edge_index = torch.tensor([[0, 1], [1, 2]])
    return Batch.from_data_list([Data(edge_index=edge_index, x=torch.rand(3, 1))] * 2)


def test_a_subgraph_of_a_batch_keeps_the_borders_that_are_left():
    """PyG's subgraph leaves `ptr` as it was; `batch` is right."""
    graph = ga.from_pyg(a_batch().subgraph(torch.tensor([0, 1, 5])))
    assert graph.sizes == ((2, 2), (1, 1))
    assert graph.positions.tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ptr": torch.tensor([0, 7, 6]), "batch": None}, "ptr of data must ascend"),
        ({"ptr": torch.tensor([0, 3, 5]), "batch": None}, "ptr of data must ascend .* 6"),
        ({"ptr": torch.tensor([1, 3, 6]), "batch": None}, "ptr of data must ascend from 0"),
        ({"ptr": [0, 3, 6], "batch": None}, "ptr of data must be an integer tensor"),
        (
            {"ptr": torch.tensor([0, 2, 6]), "batch": None},
            (r"no edge between two items .* " r"source 1 and target 2"),
        ),
        ({"batch": torch.tensor([1, 1, 1, 0, 0, 0])}, "batch of data must .* ascending"),
    ],
)
def test_borders_that_cannot_be_are_refused(change, says):
    data = a_batch()
    for name, value in change.items():
        setattr(data, name, value)
    with pytest.raises(ValueError, match=says):
        ga.from_pyg(data)


def test_both_node_types_are_batched_alike():
    data = ga.batch([ga.bipartite_complete_graph(2, 3)] * 2).to_pyg(READS)
    del data["dna"].ptr
    with pytest.raises(ValueError, match=r"equally many graphs .* 2 and none"):
        ga.from_pyg(data)


def test_an_edge_type_without_edges_is_named():
    data = HeteroData()
    data["dna"].num_nodes = data["protein"].num_nodes = 2
    data[READS].edge_attr = torch.zeros(3)
    with pytest.raises(ValueError, match=r"data\[\('dna', 'read_by', 'protein'\)\] must have"):
        ga.from_pyg(data)

"""Weights and features of edges come along, in the order of the graph; nothing drops silently."""

import warnings

import networkx
import numpy as np
import pytest
import scipy.sparse
import torch
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data, HeteroData

import graphattn as ga

READS = ("dna", "read_by", "protein")


@pytest.fixture(autouse=True)
def every_warning_is_an_error():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


def weighted(directed: bool, seed: int = 0) -> networkx.Graph:
    """A random graph of nodes in odd order, self-loops among its edges, every weight different."""
    graph = networkx.DiGraph() if directed else networkx.Graph()
    graph.add_nodes_from([7, "x", 0, (1, 2), "a", 3, 9, 4])
    edges = networkx.gnp_random_graph(8, 0.4, seed=seed, directed=directed).edges()
    nodes = list(graph)
    for e, (a, b) in enumerate([*reversed(list(edges)), (0, 0)]):
        graph.add_edge(nodes[a], nodes[b], weight=e + 0.25, capacity=100 - e)
    return graph


# networkx.


@pytest.mark.parametrize("directed", [True, False])
@pytest.mark.parametrize("name", ["weight", "capacity"])
def test_weights_of_networkx_stand_where_its_own_matrix_has_them(directed, name):
    other = weighted(directed)
    graph, weights = ga.from_networkx(other, edge_weight=name)
    source, target = graph.edge_index
    matrix = networkx.to_numpy_array(other, weight=name, dtype=float)  # [from, to]
    assert weights.shape == (graph.num_edges,)
    assert weights.tolist() == matrix[source, target].tolist()
    assert np.count_nonzero(matrix) == graph.num_edges


def test_weights_of_networkx_are_floats_unless_all_are_integers():
    whole = networkx.Graph([(0, 1, {"weight": 2}), (1, 2, {"weight": 3})])
    assert ga.from_networkx(whole, edge_weight="weight")[1].dtype == torch.int64
    whole[1][2]["weight"] = np.float32(0.5)
    weights = ga.from_networkx(whole, edge_weight="weight")[1]
    assert weights.dtype == torch.get_default_dtype()
    assert weights.tolist() == [2.0, 2.0, 0.5, 0.5]
    empty, none = ga.from_networkx(networkx.empty_graph(3), edge_weight="weight")
    assert (empty.num_edges, tuple(none.shape)) == (0, (0,))


def test_weights_that_nobody_asks_for_are_announced():
    with pytest.warns(UserWarning, match=r"does not use the weights .* edge_weight='weight'"):
        graph = ga.from_networkx(weighted(True))
    assert isinstance(graph, ga.TokenGraph)
    ones = networkx.from_numpy_array(np.ones((3, 3)))  # weights of 1 on every edge say nothing
    assert ga.from_networkx(ones).num_edges == 9
    ga.from_networkx(networkx.path_graph(3))


def test_an_edge_without_a_weight_is_named():
    other = networkx.Graph([("a", "b", {"weight": 1.5}), ("b", "c", {"length": 2})])
    with pytest.raises(ValueError, match=r"edge_weight = 'weight'.*'b', 'c'.* None.*'length'"):
        ga.from_networkx(other, edge_weight="weight")
    other["b"]["c"]["weight"] = "heavy"
    with pytest.raises(
        ValueError, match=(r"must be an attribute that is a " r"number for every edge.*'heavy'")
    ):
        ga.from_networkx(other, edge_weight="weight")
    with pytest.raises(ValueError, match=r"edge_weight must be the name .* got True"):
        ga.from_networkx(other, edge_weight=True)


@pytest.mark.parametrize("kind", [networkx.MultiDiGraph, networkx.MultiGraph])
def test_a_multigraph_is_told_both_remedies_and_they_work(kind):
    other = kind()
    other.add_weighted_edges_from([("a", "b", 1.0), ("b", "c", 2.0), ("b", "c", 4.0)])
    simple = "DiGraph" if other.is_directed() else "Graph"
    remedies = rf"'b', 'c'\) more than once.*networkx\.{simple}\(graph\).*to_scipy_sparse_array"
    for options in ({}, {"edge_weight": "weight"}):
        with pytest.raises(ValueError, match=remedies):
            ga.from_networkx(other, **options)
    one_of_each = getattr(networkx, simple)(other)
    added_up = ga.from_scipy(networkx.to_scipy_sparse_array(other), return_edge_weight=True)
    graph, weights = ga.from_networkx(one_of_each, edge_weight="weight")
    assert added_up[0] == graph
    assert sorted(set(weights.tolist())) == [1.0, 4.0]
    assert sorted(set(added_up[1].tolist())) == [1.0, 6.0]


@pytest.mark.parametrize("sizes", [(6, 6), (3, 5)])
def test_weights_reach_networkx_and_come_back(sizes):
    graph = ga.from_mask(torch.rand(sizes, generator=torch.manual_seed(1)) < 0.4)
    weights = torch.randn(graph.num_edges)
    other = graph.to_networkx(weights)
    for (j, i), weight in zip(graph.edge_index.T.tolist(), weights.tolist(), strict=True):
        ends = (j, i) if sizes[0] == sizes[1] else (("source", j), ("target", i))
        assert other.edges[ends]["weight"] == weight
    if sizes[0] == sizes[1]:
        again, same = ga.from_networkx(other, edge_weight="weight")
        assert again == graph
        assert torch.equal(same, weights)


# scipy.


@pytest.mark.parametrize("kind", ["coo", "csr", "csc", "lil", "dok", "bsr", "dia"])
@pytest.mark.parametrize("dtype", [bool, np.int16, np.uint8, np.float32, np.complex128])
def test_values_of_a_sparse_matrix_come_in_the_order_of_the_graph(kind, dtype):
    dense = (
        np.random.default_rng(0)
        .integers(-3, 4, (5, 7))
        .clip(min=0 if dtype is np.uint8 else -3)
        .astype(dtype)
    )
    matrix = getattr(scipy.sparse, f"{kind}_array")(scipy.sparse.coo_array(dense))
    graph, weights = ga.from_scipy(matrix, return_edge_weight=True)
    source, target = graph.edge_index
    assert weights.tolist() == dense[source, target].tolist()
    assert np.array_equal(graph.to_scipy(weights).toarray(), dense)


def test_values_that_nobody_asks_for_are_announced_unless_they_are_ones():
    with pytest.warns(UserWarning, match="return_edge_weight=True"):
        ga.from_scipy(scipy.sparse.eye_array(3) * 2)
    ga.from_scipy(scipy.sparse.eye_array(3))
    ga.from_scipy(scipy.sparse.csr_array(np.eye(3, dtype=bool)))


# PyG.


def molecule(seed: int = 0) -> Data:
    """Edges in random order; every value tells its edge: 10 source + target."""
    generator = torch.manual_seed(seed)
    source, target = (torch.rand(6, 6, generator=generator) < 0.5).nonzero().T
    order = torch.randperm(len(source), generator=generator)
    edge_index = torch.stack([source, target])[:, order]
    weight = (10 * edge_index[0] + edge_index[1]).double()
    attr = torch.stack([weight, -weight], dim=1)
    return Data(edge_index=edge_index, edge_attr=attr, edge_weight=weight, num_nodes=6)


def test_edge_attr_and_weight_of_pyg_tell_the_edges_they_stand_beside():
    graph, attr, weight = ga.from_pyg(molecule(), return_edge_attr=True, return_edge_weight=True)
    source, target = graph.edge_index
    assert torch.equal(weight, (10 * source + target).double())
    assert torch.equal(attr, torch.stack([weight, -weight], dim=1))


def test_what_pyg_holds_and_nobody_asks_for_is_named():
    data = molecule()
    with pytest.warns(UserWarning, match=r"does not use data\.edge_attr and data\.edge_weight"):
        ga.from_pyg(data)
    with pytest.warns(
        UserWarning, match=(r"does not use data\.edge_weight: " r"with return_edge_weight")
    ):
        ga.from_pyg(data, return_edge_attr=True)
    ga.from_pyg(Data(edge_index=data.edge_index, num_nodes=6))
    hetero = hetero_of(data)
    with pytest.warns(UserWarning, match=r"'read_by', 'protein'\)\]\.edge_attr"):
        ga.from_pyg(hetero)


def test_the_permutation_is_the_one_of_from_edge_index():
    data = molecule()
    graph, permutation = ga.from_pyg(data, return_permutation=True)
    expected = ga.from_edge_index(data.edge_index, 6, return_permutation=True)
    assert graph == expected[0]
    assert torch.equal(permutation, expected[1])
    edges = EdgeIndex(data.edge_index, sparse_size=(6, 6))
    assert torch.equal(ga.from_pyg(edges, return_permutation=True)[1], permutation)
    _, attr, last = ga.from_pyg(data, return_edge_attr=True, return_permutation=True)
    assert torch.equal(attr, data.edge_attr[last])


def hetero_of(data: Data) -> HeteroData:
    hetero = HeteroData()
    hetero["dna"].num_nodes = hetero["protein"].num_nodes = 6
    hetero[READS].edge_index, hetero[READS].edge_attr = data.edge_index, data.edge_attr
    return hetero


def test_hetero_data_brings_the_values_of_its_edge_type():
    data = molecule()
    hetero = hetero_of(data)
    hetero["dna", "near", "dna"].edge_index = torch.zeros((2, 0), dtype=torch.int64)
    graph, attr = ga.from_pyg(hetero, READS, return_edge_attr=True)
    assert torch.equal(attr, ga.from_pyg(data, return_edge_attr=True, return_permutation=True)[1])
    assert graph.num_edges == len(attr)
    with pytest.raises(
        ValueError, match=r"return_edge_weight must be False unless data\[\('dna', 'read_by'"
    ):
        ga.from_pyg(hetero, READS, return_edge_weight=True)


def test_the_values_of_a_batch_keep_to_their_parts():
    batch = Batch.from_data_list([molecule(0), molecule(1)])
    graph, weight = ga.from_pyg(batch, return_edge_weight=True, return_permutation=True)[:2]
    source, target = graph.edge_index % 6
    assert graph.sizes == ((6, 6), (6, 6))
    assert torch.equal(weight, (10 * source + target).double())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"edge_attr": None},
            ("return_edge_attr must be False unless data.edge_attr is a tensor.*NoneType"),
        ),
        ({"edge_attr": torch.zeros(3, 2)}, r"one entry for each of 2 edges, got \[3, 2\]"),
        ({"edge_attr": [1, 2]}, "got list"),
    ],
)
def test_values_that_are_not_there_for_every_edge_are_refused(change, says):
    data = Data(edge_index=torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
    data.edge_attr = change["edge_attr"]
    with pytest.raises(ValueError, match=says):
        ga.from_pyg(data, return_edge_attr=True)
    with pytest.raises(
        ValueError, match=r"return_edge_attr must be False unless data\.edge_attr is a tensor"
    ):
        ga.from_pyg(EdgeIndex([[0], [0]], sparse_size=(1, 1)), return_edge_attr=True)


@pytest.mark.parametrize("edge_type", [None, READS])
def test_values_reach_pyg_and_come_back_with_the_borders_of_a_batch(edge_type):
    graph = ga.batch([ga.causal_graph(3), ga.window_cycle_graph(5, 1)])
    attr, weight = torch.randn(graph.num_edges, 2), torch.rand(graph.num_edges)
    data = graph.to_pyg(edge_type, edge_attr=attr, edge_weight=weight)
    data.validate()
    assert isinstance(data, Data if edge_type is None else HeteroData)
    again, *same = ga.from_pyg(data, return_edge_attr=True, return_edge_weight=True)
    assert again == graph
    assert again.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert torch.equal(same[0], attr)
    assert torch.equal(same[1], weight)


def test_values_that_do_not_fit_the_edges_are_refused():
    graph = ga.causal_graph(3)
    for call in (graph.to_networkx, graph.to_scipy, lambda w: graph.to_pyg(edge_weight=w)):
        for wrong in (torch.zeros(5), torch.zeros(6, 1), [1.0] * 6):
            with pytest.raises(ValueError, match=r"edge_weight must be a tensor of shape \[6\]"):
                call(wrong)
    with pytest.raises(ValueError, match=r"edge_attr must be a tensor of shape \[6, \.\.\.\]"):
        graph.to_pyg(edge_attr=torch.zeros(5, 2))
    with pytest.raises(ValueError, match="edge_type must be given, such as"):
        ga.bipartite_complete_graph(2, 3).to_pyg(edge_weight=torch.zeros(6))

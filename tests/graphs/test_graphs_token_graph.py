"""TokenGraph: what holds for any set of edges, wherever it came from."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import graphattn as ga

settings.register_profile("graphs", deadline=None, max_examples=60)
PROFILE = settings.get_profile("graphs")


@st.composite
def edge_sets(draw):
    """(num_targets, num_sources, edges (source, target) in some order)."""
    num_targets, num_sources = draw(st.integers(0, 6)), draw(st.integers(0, 6))
    if num_targets == 0 or num_sources == 0:
        return num_targets, num_sources, []
    edge = st.tuples(st.integers(0, num_sources - 1), st.integers(0, num_targets - 1))
    return num_targets, num_sources, draw(st.lists(edge, unique=True, max_size=36))


def as_tensor(edges) -> torch.Tensor:
    return torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).T


@PROFILE
@given(case=edge_sets())
def test_any_set_of_edges_keeps_every_promise(case, check_graph):
    num_targets, num_sources, edges = case
    mask = [[(j, i) in set(edges) for j in range(num_sources)] for i in range(num_targets)]
    graph = ga.from_edge_index(as_tensor(edges), num_targets, num_sources)
    assert graph.structure is None
    assert not graph.is_causal
    check_graph(graph, mask, num_sources=num_sources)


@PROFILE
@given(case=edge_sets(), data=st.data())
def test_the_order_of_the_callers_edges_changes_nothing(case, data):
    num_targets, num_sources, edges = case
    shuffled = data.draw(st.permutations(edges))
    a = ga.from_edge_index(as_tensor(edges), num_targets, num_sources)
    b, permutation = ga.from_edge_index(
        as_tensor(shuffled), num_targets, num_sources, return_permutation=True
    )
    assert a == b
    assert hash(a) == hash(b)
    assert torch.equal(a.edge_index, b.edge_index)
    assert torch.equal(as_tensor(shuffled)[:, permutation], b.edge_index)


@PROFILE
@given(case=edge_sets(), data=st.data())
def test_one_edge_more_or_less_is_another_graph(case, data):
    num_targets, num_sources, edges = case
    graph = ga.from_edge_index(as_tensor(edges), num_targets, num_sources)
    for drop in range(len(edges)):
        fewer = edges[:drop] + edges[drop + 1 :]
        assert graph != ga.from_edge_index(as_tensor(fewer), num_targets, num_sources)
    assert graph != ga.from_edge_index(as_tensor(edges), num_targets + 1, num_sources)
    assert graph != ga.from_edge_index(as_tensor(edges), num_targets, num_sources + 1)


def test_a_graph_is_no_other_thing():
    graph = ga.causal_graph(3)
    assert graph != "graph"
    assert graph != 3
    assert graph != graph.edge_index.tolist()
    assert graph is not None


def test_the_pair_of_a_paper_is_the_flipped_column():
    # (i, j) = (2, 0): token 2 updates and looks at token 0.
    graph = ga.from_edge_index(torch.tensor([[0], [2]]), 3)
    assert graph.to_mask()[2, 0]
    assert graph.in_degree().tolist() == [0, 0, 1]


def test_a_foreign_edge_list_is_never_causal_but_may_point_backward():
    def listed(*edges, n=4):
        return ga.from_edge_index(as_tensor(list(edges)), n)

    backward = ga.from_mask(torch.ones(4, 4).tril().bool())
    assert backward == ga.causal_graph(4)
    assert not backward.is_causal
    assert backward.points_backward
    assert listed((0, 1), (2, 2)).points_backward
    assert not listed((0, 1), (2, 1)).points_backward
    assert not listed((1, 1), (2, 2)).points_backward, "self loops point nowhere"
    assert not listed().points_backward
    assert not ga.window_path_graph(4, 1).points_backward


CAUSAL = {
    "causal": lambda: ga.causal_graph(5),
    "causal window": lambda: ga.causal_window_graph(5, 2),
    "batch": lambda: ga.batch([ga.causal_graph(2), ga.causal_window_graph(5, 2)]),
    "union": lambda: ga.union(ga.causal_window_graph(5, 2), ga.causal_window_graph(5, 4)),
    "knn within causal": lambda: ga.knn_graph(
        torch.arange(5.0)[:, None], 2, within=ga.causal_graph(5)
    ),
}


@pytest.mark.parametrize("name", CAUSAL)
def test_causality_survives_copying_and_transposing_twice(name):
    graph = CAUSAL[name]()
    assert graph.is_causal
    assert not graph.transpose().is_causal
    assert graph.transpose().transpose().is_causal
    assert pickle.loads(pickle.dumps(graph)).is_causal
    assert copy.copy(graph).is_causal
    assert copy.deepcopy(graph).is_causal


@pytest.mark.parametrize(
    "graph",
    [
        ga.window_path_graph(4, 1),
        ga.window_cycle_graph(5, 1),
        ga.complete_graph(4),
        ga.block_window_graph(4, 2),
        ga.longformer_graph(4, 1, [0]),
        ga.grid_window_graph(2, 2, 1),
        ga.bipartite_complete_graph(2, 3),
    ],
    ids=repr,
)
def test_graphs_that_look_ahead_are_not_causal(graph):
    assert not graph.is_causal


@pytest.mark.parametrize(
    "graph", [ga.bigbird_graph(15, 1, 2, [0], seed=3), ga.causal_window_graph(15, 4)], ids=repr
)
def test_values_follow_their_edges_through_the_transpose(graph):
    weight = torch.rand(graph.num_edges)
    dense = torch.zeros(15, 15)
    dense[graph.edge_index[1], graph.edge_index[0]] = weight
    flipped = graph.transpose()
    other = torch.zeros(15, 15)
    other[flipped.edge_index[1], flipped.edge_index[0]] = weight[graph.transpose_permutation()]
    assert torch.equal(other, dense.T)


def test_graphs_move_as_tensors_do(monkeypatch):
    graph, wanted = ga.from_mask(torch.ones(3, 3, dtype=torch.bool)), []
    assert graph.cpu() is graph
    meta = ga.causal_graph(3).to("meta").cpu()
    assert meta.device == torch.device("cpu")

    def to(self, device, non_blocking=False):
        wanted.append((device, non_blocking))
        return self

    batch = ga.collate([{"x": torch.ones(2, 1), "graph": ga.causal_graph(2)}])
    for moved in (graph, batch):
        monkeypatch.setattr(type(moved), "to", to)
        for call in (
            moved.cuda,
            lambda graph=moved: graph.cuda(1),
            lambda graph=moved: graph.cuda("cuda:1", True),
        ):
            call()
        moved.cpu()
    assert wanted == [("cuda", False), (1, False), ("cuda:1", True), ("cpu", False)] * 2


def test_repr_says_sizes_edges_and_structure():
    assert (
        repr(ga.window_path_graph(4, 1)) == "TokenGraph(num_tokens=4, num_edges=6, structure=Band)"
    )
    plain = ga.from_edge_index(torch.tensor([[2], [0]]), 1, 3)
    assert repr(plain) == "TokenGraph(num_targets=1, num_sources=3, num_edges=1)"


def test_num_tokens_is_for_square_graphs():
    assert ga.window_path_graph(7, 2).num_tokens == 7
    with pytest.raises(ValueError, match="3 targets and 5 sources"):
        _ = ga.bipartite_complete_graph(3, 5).num_tokens

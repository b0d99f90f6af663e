"""A backend runs a case by name exactly if `ga.backends` says that it can."""

import re

import pytest
import torch

import graphattn as ga
from graphattn.ops.backends import BACKEND_NAMES
from graphattn.ops.support import OPERATIONS

N, H, D = 7, 2, 4
GRAPHS = {
    "band": lambda: ga.window_path_graph(N, 2),
    "causal": lambda: ga.causal_graph(N),
    "edges": lambda: ga.from_edge_index(torch.tensor([[0, 3], [1, 2]]), N),
    "batch": lambda: ga.batch([ga.complete_graph(3), ga.window_cycle_graph(4, 1)]),
    "no edges": lambda: ga.from_edge_index(torch.zeros(2, 0, dtype=torch.long), N),
}


def call(op: str, graph: ga.TokenGraph, query: torch.Tensor, backend: str) -> torch.Tensor:
    if op == "rbf_attention":
        return ga.rbf_attention(query, query, query, graph, 1.0, backend=backend)
    if op == "dot_product_attention":
        return ga.dot_product_attention(query, query, query, graph, backend=backend)
    if op == "linear_attention":
        features = ga.elu_features(query)
        return ga.linear_attention(features, features, query, graph, backend=backend)
    hidden = torch.randn(N, H, 3)
    network = ga.EdgeNetworkParameters(
        torch.randn(H, 3),
        torch.randn(H),
        torch.randn(H, 3),
        torch.randn(H),
        torch.randn(H, 1, D, 3),
        torch.randn(H, 1, D),
    )
    return ga.consensus_update(
        query, query, hidden, hidden, network, graph, 0.1, update="target", backend=backend
    )


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("op", OPERATIONS)
def test_a_backend_that_is_said_to_run_runs_and_another_raises_with_the_reason_given(op, name):
    graph, query = GRAPHS[name](), torch.randn(N, H, D)
    support = ga.backends(op, graph, query)
    assert tuple(support) == BACKEND_NAMES
    assert support["reference"] is None
    for backend, why_not in support.items():
        if why_not is None:
            assert call(op, graph, query, backend).shape == query.shape
        else:
            with pytest.raises(ValueError, match=re.escape(why_not)):
                call(op, graph, query, backend)
    assert call(op, graph, query, "auto").shape == query.shape


def test_a_raw_edge_index_and_leading_dimensions_are_taken_like_the_operations_take_them():
    edge_index = torch.tensor([[0, 3], [1, 2]])
    assert ga.backends("rbf_attention", edge_index, torch.randn(2, 3, N, H, D))["reference"] is None
    wide = ga.bipartite_complete_graph(N, 12)
    for graph in (wide, wide.edge_index, wide.to_pyg()):
        assert ga.backends("rbf_attention", graph, torch.randn(N, H, D))["reference"] is None
    bipartite = ga.bipartite_complete_graph(N, 3)
    assert ga.backends("rbf_attention", bipartite, torch.randn(N, H, D))["reference"] is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("attention", ga.causal_graph(3), torch.zeros(3, 1, 1)), "op must be one of 'rbf_att"),
        (
            ("rbf_attention", ga.causal_graph(3), torch.zeros(3, 1)),
            r"query must be .*\[\*, N, H, D",
        ),
        (("rbf_attention", ga.causal_graph(3), None), "query must be .* got NoneType"),
        (("rbf_attention", ga.causal_graph(3), torch.zeros(3, 1, 1).long()), "query must be a fl"),
        (("rbf_attention", ga.causal_graph(3), torch.zeros(4, 1, 1)), "graph has 3 targets"),
        (("rbf_attention", torch.tensor([[9], [9]]), torch.zeros(4, 1, 1)), "not a target"),
        (("rbf_attention", "causal", torch.zeros(4, 1, 1)), "graph must be a TokenGraph"),
    ],
)
def test_bad_arguments_are_named(arguments, says):
    with pytest.raises(ValueError, match=says):
        ga.backends(*arguments)

"""Equal edges in any form, order, numbering or batch give equal numbers."""

from collections.abc import Callable

import pytest
import torch
from cases_ops import (
    consensus_inputs,
    isolated_mask,
    qkv,
    random,
    random_mask,
    shuffled,
)
from torch_geometric import EdgeIndex

import graphattn as ga

EXACT = {"rtol": 1e-10, "atol": 1e-10}


def operations(graph: ga.TokenGraph, batch: tuple[int, ...] = ()) -> dict[str, Callable]:
    """Every operation as a function of the graph alone, on inputs made for `graph`."""
    q, k, v = qkv(graph, batch=batch)
    inputs = consensus_inputs(graph, batch=batch)
    return {
        "rbf": lambda g: ga.rbf_attention(q, k, v, g, 1.0, eps=0.1),
        "rbf top-k": lambda g: ga.rbf_attention(q, k, v, g, 1.0, top_k=2),
        "dot": lambda g: ga.dot_product_attention(q, k, v, g),
        "target": lambda g: ga.consensus_update(*inputs, g, 0.1, update="target"),
        "target auto": lambda g: ga.consensus_update(*inputs, g, "auto", update="target"),
        "energy": lambda g: ga.consensus_update(*inputs, g, 0.1),
        "energy auto": lambda g: ga.consensus_update(*inputs, g, "auto"),
    }


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("kind", ["rbf", "rbf top-k", "dot", "target", "target auto", "energy"])
def test_a_raw_edge_index_stands_for_its_graph_in_any_order(
    kind: str, batch: tuple[int, ...]
) -> None:
    mask = isolated_mask()
    graph = ga.from_mask(mask)
    run = operations(graph, batch)[kind]
    expected = run(graph)
    for edge_index in (
        graph.edge_index,
        shuffled(mask, seed=1),
        shuffled(mask, seed=2).int(),
        EdgeIndex(shuffled(mask, seed=3)),
        EdgeIndex(shuffled(mask, seed=4), sparse_size=(8, 8)),
        graph.to_pyg(),
    ):
        assert torch.equal(run(edge_index), expected)


@pytest.mark.parametrize("kind", ["rbf", "rbf top-k", "dot", "target", "target auto"])
def test_a_raw_edge_index_may_be_rectangular(kind: str) -> None:
    mask = random_mask(5, 8, 0.4, seed=2)
    graph = ga.from_mask(mask)
    run = operations(graph)[kind]
    assert torch.equal(run(shuffled(mask)), run(graph))


def test_per_edge_results_follow_the_sorted_order_whatever_the_callers() -> None:
    mask = isolated_mask()
    edge_index = shuffled(mask)
    graph, permutation = ga.from_edge_index(edge_index, 8, return_permutation=True)
    q, k, v = qkv(graph)
    of_caller = random(edge_index.shape[1], 2, seed=1)  # bias of edge_index[:, e]
    out = ga.rbf_attention(q, k, v, graph, 1.0, edge_bias=of_caller[permutation])
    logits = -(q[:, None] - k[None]).square().sum(-1) / 2
    for e, (j, i) in enumerate(edge_index.T.tolist()):
        logits[i, j] += of_caller[e]
    weight = logits.masked_fill(~mask[..., None], -torch.inf).softmax(dim=1).nan_to_num()
    torch.testing.assert_close(out, torch.einsum("ijh,jhd->ihd", weight, v), **EXACT)


EMPTY = {
    "no tokens": lambda: ga.window_path_graph(0, 2),
    "no tokens, complete": lambda: ga.complete_graph(0),
    "no tokens, edge list": lambda: ga.from_edge_index(torch.zeros(2, 0, dtype=torch.long), 0),
    "no edges": lambda: ga.from_edge_index(torch.zeros(2, 0, dtype=torch.long), 4),
    "one token, no edges": lambda: ga.window_path_graph(1, 2),
    "no sources": lambda: ga.bipartite_complete_graph(3, 0),
    "no targets": lambda: ga.bipartite_complete_graph(0, 3),
    "batch of nothing": lambda: ga.batch([ga.window_path_graph(0, 1), ga.complete_graph(0)]),
}


@pytest.mark.parametrize("batch", [(), (2,), (0,)])
@pytest.mark.parametrize("name", EMPTY)
def test_no_edges_and_no_tokens_work(name: str, batch: tuple[int, ...]) -> None:
    graph = EMPTY[name]()
    N = graph.num_targets
    q, k, v = (x.requires_grad_() for x in qkv(graph, batch=batch, value_features=4))
    for out, lse in (
        ga.rbf_attention(q, k, v, graph, 1.0, top_k=2, eps=0.1, return_lse=True),
        ga.dot_product_attention(q, k, v, graph, return_lse=True),
        ga.dot_product_attention(q, k, v, graph, edge_bias=random(0, 2, seed=1), return_lse=True),
    ):
        assert torch.equal(out, torch.zeros(*batch, N, 2, 4, dtype=torch.float64))
        assert torch.equal(lse, torch.full((*batch, N, 2), -torch.inf, dtype=torch.float64))
        for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
            assert (gradient == 0).all()
    assert ga.attention_weights(q, k, graph, top_k=1).shape == (*batch, 0, 2)
    inputs = consensus_inputs(graph, batch=batch)
    assert ga.consensus_edge_matrices(*inputs[2:], graph).shape == (*batch, 0, 2, 3, 3)
    for update in ("energy", "target") if graph.num_sources == N else ("target",):
        for step in (0.1, "auto"):
            new = ga.consensus_update(*inputs, graph, step, update=update)
            assert torch.equal(new, inputs.state)


def test_an_empty_batch_works_on_a_graph_with_edges() -> None:
    graph = ga.window_path_graph(4, 1)
    q, k, v = qkv(graph, batch=(0,))
    inputs = consensus_inputs(graph, batch=(0,))
    assert ga.rbf_attention(q, k, v, graph, 1.0, top_k=1).shape == (0, 4, 2, 3)
    assert ga.dot_product_attention(q, k, v, graph).shape == (0, 4, 2, 3)
    for update in ("energy", "target"):
        new = ga.consensus_update(*inputs, graph, "auto", update=update)
        assert new.shape == (0, 4, 2, 3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_a_graph_of_nearest_neighbours_of_the_features_themselves(dtype: torch.dtype) -> None:
    """Top-k over the complete graph without self loops is the k-nearest-neighbour graph."""
    x = random(9, 3, seed=3, dtype=dtype)
    graph = ga.knn_graph(x, 3)
    tokens = x[:, None]
    out = ga.rbf_attention(tokens, tokens, tokens, graph, 1.0)
    everyone = ga.complete_graph(9, self_loops=False)
    expected = ga.rbf_attention(tokens, tokens, tokens, everyone, 1.0, top_k=3)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_graph_of_a_radius_around_the_features_themselves(dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, 1.0, 3.0], dtype=dtype).view(3, 1)
    graph = ga.radius_graph(x, 1.5, self_loops=True)
    tokens = x[:, None]
    out = ga.dot_product_attention(tokens, tokens, tokens, graph, scale=0.0)
    assert out.flatten().tolist() == [0.5, 0.5, 3.0]


# Invariances of RBF attention: only distances count.

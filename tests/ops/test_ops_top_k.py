"""top_k keeps exactly k sources per target and head; of equal ones, the smaller index."""

import oracle_ops as oracle
import pytest
import torch
from cases_ops import GRAPHS, qkv, random, sides
from torch import Tensor

import graphattn as ga

EXACT = {"rtol": 1e-10, "atol": 1e-10}


def integers(*shape: int, seed: int, high: int = 2) -> Tensor:
    """Small integers of both signs, zeros of both signs among them: ties everywhere."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-high, high + 1, shape, generator=generator).double()
    negative = torch.rand(shape, generator=generator) < 0.5
    return torch.where((x == 0) & negative, -0.0, x)


def kept_edges(weights: Tensor) -> Tensor:
    return weights > 0


@pytest.mark.parametrize("top_k", [1, 2, 5])
@pytest.mark.parametrize("strength", [{"sigma": 2.0}, {"scale": 0.5}], ids=["rbf", "dot"])
@pytest.mark.parametrize("name", GRAPHS)
def test_of_equally_near_sources_the_smaller_index_is_kept(
    name: str, strength: dict, top_k: int
) -> None:
    graph = GRAPHS[name]()
    N, M = sides(graph)
    q, k = integers(2, N, 4, 2, seed=1), integers(2, M, 2, 2, seed=2)
    v = random(2, M, 2, 3, seed=3)
    mask = graph.to_mask()
    expected = oracle.attention(q, k, v, mask, top_k=top_k, **strength)
    weights = ga.attention_weights(q, k, graph, top_k=top_k, **strength)
    own = oracle.per_edge(expected.weights, mask)
    assert torch.equal(kept_edges(weights), kept_edges(own))
    torch.testing.assert_close(weights, own, **EXACT)
    if "sigma" in strength:
        out = ga.rbf_attention(q, k, v, graph, strength["sigma"], top_k=top_k)
    else:
        out = ga.dot_product_attention(q, k, v, graph, scale=strength["scale"], top_k=top_k)
    torch.testing.assert_close(out, expected.out, **EXACT)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_negative_zero_ties_with_zero(dtype: torch.dtype) -> None:
    """Keys, or biases, are -0.0 for the even sources, 0.0 for the odd: index 0 and 1 must win."""
    q = torch.tensor([1.0, 0.0], dtype=dtype).view(1, 1, 2)
    k = torch.tensor([-0.0, 0.0] * 20, dtype=dtype).view(40, 1, 1) * torch.ones(2, dtype=dtype)
    graph = ga.bipartite_complete_graph(1, 40)
    bias = torch.tensor([-0.0, 0.0] * 20, dtype=dtype).view(40, 1)
    for arguments in ({}, {"edge_bias": bias}, {"sigma": 1.0}):
        weights = ga.attention_weights(q, k, graph, top_k=2, **arguments)
        assert weights.flatten().nonzero().flatten().tolist() == [0, 1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_logits_of_both_zeros_tie(dtype: torch.dtype) -> None:
    """A sum never gives -0.0, but -||q - k||^2 / (2 sigma^2) does, and beside it a bias of -0.0."""
    zeros = torch.zeros(40, 1, 2, dtype=dtype)
    graph = ga.bipartite_complete_graph(1, 40)
    bias = torch.tensor([-0.0, 0.0] * 20, dtype=dtype).view(40, 1)
    weights = ga.attention_weights(zeros[:1], zeros, graph, sigma=1.0, top_k=2, edge_bias=bias)
    assert weights.flatten().nonzero().flatten().tolist() == [0, 1]


def test_equal_distances_on_both_sides_keep_the_left_one() -> None:
    x = torch.arange(9.0).view(9, 1, 1)
    graph = ga.window_path_graph(9, 2)
    weights = ga.attention_weights(x, x, graph, sigma=1.0, top_k=1).flatten()
    source, target = graph.edge_index[:, weights > 0]
    assert target.tolist() == list(range(9))
    assert source.tolist() == [1, 0, 1, 2, 3, 4, 5, 6, 7]


def test_a_thousand_equal_sources_keep_the_first_k() -> None:
    """Sorting may be stable for short rows and not for long ones."""
    q, k = torch.zeros(2, 3, 1), torch.zeros(1000, 3, 1)
    weights = ga.attention_weights(q, k, ga.bipartite_complete_graph(2, 1000), top_k=17)
    kept = kept_edges(weights).view(2, 1000, 3)
    assert kept[:, :17].all()
    assert not kept[:, 17:].any()


@pytest.mark.parametrize("name", GRAPHS)
def test_a_k_of_at_least_all_sources_keeps_all(name: str) -> None:
    """Krause attention with k >= window is the RBF window."""
    graph = GRAPHS[name]()
    q, k, v = qkv(graph)
    every = int(graph.in_degree().max())
    plain = ga.rbf_attention(q, k, v, graph, 1.5, return_lse=True)
    for top_k in (every, every + 1, 10**6):
        cut = ga.rbf_attention(q, k, v, graph, 1.5, top_k=top_k, return_lse=True)
        for a, b in zip(cut, plain, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_invalid_sources_take_no_place_among_the_k() -> None:
    x = torch.tensor([0.0, 0.1, 0.2, 5.0, 6.0]).view(5, 1, 1)
    valid = torch.tensor([True, False, False, True, True])
    graph = ga.complete_graph(5)
    weights = ga.attention_weights(x, x, graph, sigma=2.0, top_k=2, valid=valid).view(5, 5)
    assert kept_edges(weights)[0].tolist() == [True, False, False, True, False]
    assert kept_edges(weights).sum(1).tolist() == [2, 0, 0, 2, 2]


def test_edge_bias_counts_in_the_choice() -> None:
    x = torch.zeros(1, 1, 1)
    k = torch.tensor([0.0, 1.0, 2.0]).view(3, 1, 1)
    bias = torch.tensor([[0.0], [0.0], [9.0]])
    graph = ga.bipartite_complete_graph(1, 3)
    weights = ga.attention_weights(x, k, graph, sigma=1.0, top_k=1, edge_bias=bias)
    assert weights.flatten().tolist() == [0.0, 0.0, 1.0]


def test_every_head_and_batch_chooses_its_own_sources() -> None:
    q = torch.zeros(2, 1, 2, 1)
    k = torch.tensor([[[3.0, 1.0], [2.0, 2.0], [1.0, 3.0]], [[1.0, 9.0], [1.0, 0.0], [0.0, 9.0]]])
    weights = ga.attention_weights(
        q, k[..., None], ga.bipartite_complete_graph(1, 3), sigma=1.0, top_k=1
    )
    assert weights.argmax(1).tolist() == [[2, 0], [2, 1]]


def test_the_gradient_flows_through_the_kept_edges_only() -> None:
    graph = ga.complete_graph(6)
    q, k, v = (x.requires_grad_() for x in qkv(graph, heads=1))
    weights = ga.attention_weights(q, k, graph, sigma=1.0, top_k=2).view(6, 6)
    out = ga.rbf_attention(q, k, v, graph, 1.0, top_k=2)
    for i in range(6):
        for gradient in torch.autograd.grad(out[i].square().sum(), (k, v), retain_graph=True):
            moved = (gradient != 0).any(-1).flatten()
            assert torch.equal(moved, kept_edges(weights[i]))


def test_lse_sums_the_kept_sources_only() -> None:
    x = torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64).view(3, 1, 1)
    graph = ga.complete_graph(3)
    _, lse = ga.rbf_attention(x, x, x, graph, 1.0, top_k=1, eps=1.0, return_lse=True)
    torch.testing.assert_close(lse.flatten(), torch.zeros(3, dtype=torch.float64), **EXACT)

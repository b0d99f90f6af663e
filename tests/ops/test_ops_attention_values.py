"""Attention gives the numbers of its equations, over every kind of graph."""

import oracle_ops as oracle
import pytest
import torch
from cases_ops import FEW, GRAPHS, qkv, random, valid_tokens

import graphattn as ga

EXACT = {"rtol": 1e-10, "atol": 1e-10}

# What is varied: shapes of the inputs and arguments of the operation.
OPTIONS = {
    "plain": ({}, {}),
    "one batch dimension": ({"batch": (2,)}, {}),
    "two batch dimensions": ({"batch": (2, 2), "heads": 1}, {}),
    "grouped-query heads": ({"heads": 6, "kv_heads": 2}, {}),
    "one key head": ({"heads": 3, "kv_heads": 1}, {"top_k": 2}),
    "other value width": ({"value_features": 5}, {}),
    "one feature": ({"features": 1}, {}),
    "top 1": ({}, {"top_k": 1}),
    "top 2": ({"batch": (2,)}, {"top_k": 2}),
    "top of more than there are": ({}, {"top_k": 100}),
}

ALWAYS = ["plain", "top 2"]
SOME = [*FEW, "causal window", "random rectangle"]


def strength(op: str, heads: int) -> dict:
    """A different sigma or scale for every head; heads that would all look alike prove little."""
    per_head = torch.linspace(0.6, 1.9, heads, dtype=torch.float64)
    return {"sigma": per_head} if op == "rbf" else {"scale": -per_head if heads > 2 else per_head}


def run(op: str, q, k, v, graph, **arguments):
    if op == "rbf":
        sigma = arguments.pop("sigma")
        return ga.rbf_attention(q, k, v, graph, sigma, return_lse=True, **arguments)
    return ga.dot_product_attention(q, k, v, graph, return_lse=True, **arguments)


def check(op: str, q, k, v, graph, **arguments) -> None:
    """Output, log-sums and weights against the oracle."""
    bias = arguments.get("edge_bias")
    mask = graph.to_mask()
    theirs = {name: x for name, x in arguments.items() if name != "edge_bias"}
    dense = None if bias is None else oracle.dense_bias(bias, mask)
    expected = oracle.attention(q, k, v, mask, bias=dense, **theirs)
    out, lse = run(op, q, k, v, graph, **arguments)
    torch.testing.assert_close((out, lse), expected[:2], **EXACT)
    weights = ga.attention_weights(q, k, graph, **arguments)
    torch.testing.assert_close(weights, oracle.per_edge(expected.weights, mask), **EXACT)


CASES = [
    (name, option) for name in GRAPHS for option in OPTIONS if option in ALWAYS or name in SOME
]


@pytest.mark.parametrize("op", ["rbf", "dot"])
@pytest.mark.parametrize(("name", "option"), CASES)
def test_attention_is_its_equation(name: str, option: str, op: str) -> None:
    shapes, arguments = OPTIONS[option]
    graph = GRAPHS[name]()
    q, k, v = qkv(graph, **shapes)
    check(op, q, k, v, graph, **strength(op, q.shape[-2]), **arguments)


@pytest.mark.parametrize("eps", [0.0, 1e-6, 1.0])
@pytest.mark.parametrize("top_k", [None, 2])
@pytest.mark.parametrize("name", ["path", "grid with class token", "isolated targets"])
def test_eps_adds_to_the_normaliser(name: str, top_k: int | None, eps: float) -> None:
    graph = GRAPHS[name]()
    q, k, v = qkv(graph, batch=(2,))
    check("rbf", q, k, v, graph, sigma=1.3, top_k=top_k, eps=eps)


@pytest.mark.parametrize("eps", [0.0, 1e-6, 1.0])
def test_a_token_1000_away_still_gets_finite_weights(eps: float) -> None:
    graph = ga.window_path_graph(9, 2)
    q, k, v = (x.requires_grad_() for x in qkv(graph))
    far = (torch.arange(9, dtype=torch.float64) % 3 - 1)[:, None, None] * 1e3
    sigma = torch.ones(2, dtype=torch.float64, requires_grad=True)
    check("rbf", q + far, k - far, v, graph, sigma=sigma, eps=eps)
    out, _ = run("rbf", q + far, k - far, v, graph, sigma=sigma, eps=eps)
    for gradient in torch.autograd.grad(out.square().sum(), (q, k, v, sigma)):
        assert gradient.isfinite().all()
    weights = ga.attention_weights(q + far, k - far, graph, sigma=1.0)
    total = torch.zeros(9, 2, dtype=torch.float64).index_add(0, graph.edge_index[1], weights)
    torch.testing.assert_close(total, torch.ones_like(total), **EXACT)


def test_eps_in_float32_far_from_everything_keeps_gradients_finite() -> None:
    """exp(-lse) overflows from lse = -89 on; the sigmoid form must not."""
    x = torch.tensor([0.0, 14.0, 50.0, 2000.0]).view(4, 1, 1).requires_grad_()
    graph = ga.complete_graph(4, self_loops=False)
    out = ga.rbf_attention(x, x, x, graph, 1.0, eps=1e-6)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    expected = oracle.attention(x, x, x, graph.to_mask(), sigma=1.0, eps=1e-6).out
    torch.testing.assert_close(out, expected.float(), rtol=1e-4, atol=1e-30)
    assert gradient.isfinite().all()


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-10), (torch.float32, 1e-3)])
def test_eps_beside_a_sum_that_overflows_is_nothing(dtype: torch.dtype, error: float) -> None:
    """A bias of 1000 on every edge cancels; eps / exp(1000) is 0, and exp(1000) is infinite."""
    graph = ga.complete_graph(4)
    inputs = [x.to(dtype).requires_grad_() for x in qkv(graph, heads=1)]
    bias = torch.full((graph.num_edges, 1), 1e3, dtype=dtype)
    expected = oracle.attention(*inputs, graph.to_mask(), sigma=1.0)
    out = ga.rbf_attention(*inputs, graph, 1.0, eps=1.0, edge_bias=bias)
    torch.testing.assert_close(out, expected.out.to(dtype), rtol=error, atol=error)
    for gradient in torch.autograd.grad(out.square().sum(), inputs):
        assert gradient.isfinite().all()
    weights = ga.attention_weights(*inputs[:2], graph, sigma=1.0, eps=1.0, edge_bias=bias)
    own = oracle.per_edge(expected.weights, graph.to_mask()).to(dtype)
    torch.testing.assert_close(weights, own, rtol=error, atol=error)


@pytest.mark.parametrize("op", ["rbf", "dot"])
@pytest.mark.parametrize("top_k", [None, 2])
@pytest.mark.parametrize(
    "kind", ["shared", "per batch", "only targets", "only sources", "pair", "nothing valid"]
)
@pytest.mark.parametrize("name", ["path with self loops", "causal", "isolated targets"])
def test_an_edge_that_touches_an_invalid_token_is_no_edge(
    name: str, kind: str, top_k: int | None, op: str
) -> None:
    graph = GRAPHS[name]()
    N = graph.num_targets
    valid = {
        "shared": valid_tokens(N),
        "per batch": valid_tokens(2, N),
        "only targets": (valid_tokens(2, N), None),
        "only sources": (None, valid_tokens(N)),
        "pair": (valid_tokens(N, seed=1), valid_tokens(2, N, seed=2)),
        "nothing valid": torch.zeros(2, N, dtype=torch.bool),
    }[kind]
    q, k, v = qkv(graph, batch=(2,))
    bias = random(graph.num_edges, 2, seed=9)
    check(op, q, k, v, graph, valid=valid, top_k=top_k, edge_bias=bias, **strength(op, 2))


@pytest.mark.parametrize("name", ["bipartite complete", "random rectangle"])
def test_a_bipartite_graph_takes_a_pair_of_valid_masks(name: str) -> None:
    graph = GRAPHS[name]()
    valid = valid_tokens(graph.num_targets), valid_tokens(2, graph.num_sources, seed=1)
    q, k, v = qkv(graph, batch=(2,))
    check("rbf", q, k, v, graph, sigma=0.8, valid=valid, eps=0.1)
    check("dot", q, k, v, graph, valid=valid)


@pytest.mark.parametrize(
    "sigma", [0.7, torch.tensor(0.7), torch.tensor([0.7]), torch.tensor([1, 2])]
)
def test_sigma_is_a_number_or_broadcasts_to_the_heads(sigma: float | torch.Tensor) -> None:
    graph = ga.window_path_graph(5, 2)
    check("rbf", *qkv(graph), graph, sigma=sigma)


def test_scale_is_one_over_the_root_of_the_features_by_default() -> None:
    graph = ga.window_path_graph(5, 2)
    q, k, v = qkv(graph, features=5)
    check("dot", q, k, v, graph)
    same = ga.dot_product_attention(q, k, v, graph, scale=5**-0.5)
    torch.testing.assert_close(ga.dot_product_attention(q, k, v, graph), same, **EXACT)

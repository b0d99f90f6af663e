"""Softcap: logits of dot products that stay below a bound, as in Gemma 2."""

import pytest
import torch
from cases_ops import BACKENDS, FEW, GRAPHS, qkv, random, valid_tokens
from oracle_ops import attention, dense_bias, per_edge
from torch.nn.attention.flex_attention import flex_attention

import graphattn as ga

TIGHT = {"rtol": 1e-11, "atol": 1e-12}
CAP = 0.6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", GRAPHS)
def test_logits_are_capped_on_every_graph(name, backend):
    graph = GRAPHS[name]()
    q, k, v = qkv(graph, batch=(2,), heads=4, kv_heads=2, value_features=5)
    scale = torch.tensor([1.0, 0.5, 3.0, -1.0], dtype=torch.float64)
    for top_k in (None, 2):
        given = {"top_k": top_k, "softcap": CAP, "scale": scale}
        found, lse = ga.dot_product_attention(
            q, k, v, graph, backend=backend, return_lse=True, **given
        )
        expected = attention(q, k, v, graph.to_mask(), **given)
        torch.testing.assert_close((found, lse), expected[:2], **TIGHT)
        weights = ga.attention_weights(q, k, graph, **given)
        torch.testing.assert_close(weights, per_edge(expected.weights, graph.to_mask()), **TIGHT)


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_is_flex_attentions_score_mod(backend):
    graph = ga.complete_graph(16)
    q, k, v = (x.transpose(-2, -3) for x in qkv(graph, batch=(2,), features=4))

    def score_mod(score, b, h, i, j):
        return CAP * torch.tanh(score / CAP)

    expected = flex_attention(q, k, v, score_mod=score_mod)
    found = ga.dot_product_attention(
        *(x.transpose(-2, -3) for x in (q, k, v)), graph, softcap=CAP, backend=backend
    )
    torch.testing.assert_close(found.transpose(-2, -3), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FEW)
def test_biases_come_after_the_cap_and_padding_is_no_edge(name, backend):
    graph = GRAPHS[name]()
    q, k, v = qkv(graph, batch=(2,))
    valid = valid_tokens(2, graph.num_targets)
    for x in (q, k, v):
        x[~valid] = torch.nan
    bias = 3 * random(graph.num_edges, 2, seed=9)
    for top_k in (None, 2):
        found = ga.dot_product_attention(
            q, k, v, graph, edge_bias=bias, valid=valid, softcap=CAP, top_k=top_k, backend=backend
        )
        expected = attention(
            q,
            k,
            v,
            graph.to_mask(),
            bias=dense_bias(bias, graph.to_mask()),
            valid=(valid, valid),
            softcap=CAP,
            top_k=top_k,
        ).out
        torch.testing.assert_close(found[valid], expected[valid], **TIGHT)


@pytest.mark.parametrize("top_k", [None, 2])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FEW)
def test_gradients_of_all_inputs(name, backend, top_k):
    graph = GRAPHS[name]()
    q, k, v = (x.requires_grad_() for x in qkv(graph, kv_heads=1))
    scale = torch.tensor([0.9, 1.7], dtype=torch.float64, requires_grad=True)
    bias = random(graph.num_edges, 2, seed=9).requires_grad_()

    def run(q, k, v, scale, bias):
        out, lse = ga.dot_product_attention(
            q, k, v, graph, scale=scale, edge_bias=bias, softcap=CAP, top_k=top_k,
            return_lse=True, backend=backend,
        )  # fmt: skip
        return out, lse.masked_fill(lse == -torch.inf, 0)

    assert torch.autograd.gradcheck(run, (q, k, v, scale, bias))


@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1e6, 1e30])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["complete", "causal", "grid", "path"])
def test_logits_of_any_size_give_numbers(name, backend, size, dtype, top_k):
    """Capped logits of any size give the weights of +-softcap, and finite gradients.

    Sizes are 1e6 and 1e30, of either sign. No gradient is left for query and key.
    """
    graph = GRAPHS[name]()
    q, k, v = (x.to(dtype).requires_grad_() for x in qkv(graph, features=1))
    q.data, k.data = q.data.sign(), k.data.sign() * size
    out = ga.dot_product_attention(
        q, k, v, graph, scale=1.0, softcap=2.0, top_k=top_k, backend=backend
    )
    signs = attention(q, 2 * k.detach().sign(), v, graph.to_mask(), scale=1.0, top_k=top_k).out
    torch.testing.assert_close(out.double(), signs, rtol=2e-2, atol=1e-2)
    d_query, d_key, d_value = torch.autograd.grad(out.sum(), (q, k, v))
    assert (d_query == 0).all()
    assert (d_key == 0).all()
    assert d_value.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", GRAPHS)
def test_what_ties_at_the_cap_goes_to_the_smaller_source_on_every_backend(name, dtype):
    graph = GRAPHS[name]()
    q, k, v = qkv(graph, dtype=dtype)
    q, k = q.abs() + 1, 1e3 * k.abs() + 1e3  # all logits are at the cap
    found = [
        ga.dot_product_attention(q, k, v, graph, softcap=0.7, top_k=2, backend=backend)
        for backend in BACKENDS
    ]
    mask = graph.to_mask()
    first = mask & (mask.cumsum(1) <= 2)
    expected = first.to(dtype) @ v.flatten(1) / first.sum(1, keepdim=True).clamp(min=1)
    for out in found:
        torch.testing.assert_close(out.flatten(1), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("softcap", [0, -1.0, float("inf"), float("nan"), "50", True])
def test_caps_that_are_refused(softcap):
    graph = ga.complete_graph(3)
    q, k, v = qkv(graph)
    with pytest.raises(ValueError, match="softcap must be a finite number > 0"):
        ga.dot_product_attention(q, k, v, graph, softcap=softcap)


def test_distances_have_none():
    graph = ga.complete_graph(3)
    q, k, _ = qkv(graph)
    with pytest.raises(ValueError, match="softcap is of dot products"):
        ga.attention_weights(q, k, graph, sigma=1.0, softcap=5.0)


def test_triton_refuses_it_by_name_and_says_so_before():
    graph, (q, k, v) = ga.complete_graph(3), qkv(ga.complete_graph(3))
    reason = "its kernels have no softcap"
    with pytest.raises(ValueError, match=f"'triton' cannot run this case: {reason}"):
        ga.dot_product_attention(q, k, v, graph, softcap=5.0, backend="triton")
    support = ga.backends("dot_product_attention", graph, q, softcap=5.0)
    assert support["triton"] == reason
    with pytest.raises(ValueError, match="softcap is no option of rbf_attention"):
        ga.backends("rbf_attention", graph, q, softcap=5.0)


def test_a_cap_beyond_the_numbers_of_float32_is_refused():
    q = torch.randn(2, 10, 4, 8)
    with pytest.raises(ValueError, match="softcap must be a number of float32, got 1e"):
        ga.dot_product_attention(q, q, q, ga.causal_graph(10), softcap=1e300)

"""Random and Nystrom features of the Gaussian kernel, against the exact kernel."""

import re

import pytest
import torch

import graphattn as ga


def tensors(num_tokens=60, heads=2, D=3, scale=0.5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(3, 2, num_tokens, heads, D, generator=generator).double()


def kernel(q, k, sigma):
    """exp(-|q_i - k_j|^2 / 2 sigma^2) per head, [*, H, N, M]."""
    q, k = q.transpose(-3, -2), k.transpose(-3, -2)
    sigma = torch.as_tensor(sigma, dtype=q.dtype).reshape(-1, 1, 1)
    return torch.exp(-torch.cdist(q, k).square() / (2 * sigma**2))


@pytest.mark.parametrize("sigma", [0.8, torch.tensor([0.7, 1.3])])
def test_products_of_random_features_are_the_kernel_up_to_a_scale_of_every_query(sigma):
    q, k, _ = tensors(scale=0.2)
    of_query, of_key = ga.random_features(q, k, sigma, 20_000)
    products = torch.einsum("bnhm,bkhm->bhnk", of_query, of_key)
    exact = kernel(q, k, sigma)
    ours, theirs = (w / w.sum(-1, keepdim=True) for w in (products, exact))
    assert float((ours - theirs).abs().max() / theirs.max()) < 0.1
    assert (of_query >= 0).all()
    assert (of_key >= 0).all()


def test_the_error_falls_as_the_root_of_the_number_of_features():
    q, k, v = tensors(D=8, scale=0.2)
    graph = ga.causal_graph(60)
    exact = ga.rbf_attention(q, k, v, graph, 1.0)

    def error(m):
        errors = []
        for seed in range(8):
            features = ga.random_features(q, k, 1.0, m, seed=seed)
            errors.append((ga.linear_attention(*features, v, graph) - exact).square().mean())
        return float(torch.stack(errors).mean().sqrt())

    assert 1.5 < error(64) / error(256) < 2.8
    assert 1.5 < error(256) / error(1024) < 2.8


def test_orthogonal_directions_have_the_lengths_of_normal_ones():
    from graphattn.ops.linear_attention.rbf_features import _orthogonal

    w = _orthogonal(3, 5, 12, torch.Generator().manual_seed(0))
    assert w.shape == (3, 5, 12)
    gram = w[..., :5].mT @ w[..., :5]
    torch.testing.assert_close(gram, torch.diag_embed(gram.diagonal(dim1=-2, dim2=-1)))
    many = _orthogonal(1, 4, 8000, torch.Generator().manual_seed(0))[0]
    assert float((many @ many.T / 8000 - torch.eye(4)).abs().max()) < 0.05


def test_heads_of_keys_may_be_shared_and_seeds_repeat():
    q, k, _ = tensors(heads=4, scale=0.2)
    few = k[..., :2, :].contiguous()
    of_query, of_key = ga.random_features(q, few, 1.0, 4000)
    whole = few.repeat_interleave(2, dim=-2)
    ours = torch.einsum("bnhm,bkhm->bhnk", of_query, of_key.repeat_interleave(2, dim=-2))
    exact = kernel(q, whole, 1.0)
    ours, exact = (w / w.sum(-1, keepdim=True) for w in (ours, exact))
    assert float((ours - exact).abs().max() / exact.max()) < 0.2
    again = ga.random_features(q, few, 1.0, 4000)
    assert torch.equal(again[0], of_query)
    assert not torch.equal(ga.random_features(q, few, 1.0, 4000, seed=1)[0], of_query)


def test_no_later_token_changes_what_a_causal_model_computes_from_random_features():
    q, k, v = tensors()
    graph = ga.causal_graph(60)
    y = ga.linear_attention(*ga.random_features(q, k, 1.0, 50), v, graph)
    k[:, 40:] += 0.3
    other = ga.linear_attention(*ga.random_features(q, k, 1.0, 50), v, graph)
    torch.testing.assert_close(y[:, :40], other[:, :40])  # equal up to rounding


def test_nystrom_is_exact_where_landmarks_are_all_keys():
    q, k, v = tensors(num_tokens=12, D=3, scale=1.0)
    features = ga.nystrom_features(q, k, 0.5, k)
    for graph in (ga.complete_graph(12), ga.window_path_graph(12, 3, self_loops=True)):
        exact = ga.rbf_attention(q, k, v, graph, 0.5)
        ours = ga.linear_attention(*features, v, graph)
        torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-6)


def test_nystrom_comes_nearer_with_more_landmarks_than_random_features():
    q, k, v = tensors(num_tokens=200, D=3)
    graph = ga.complete_graph(200)
    exact = ga.rbf_attention(q, k, v, graph, 0.7)
    errors = []
    for step in (40, 10, 4):
        features = ga.nystrom_features(q, k, 0.7, k[:, ::step])
        errors.append(float((ga.linear_attention(*features, v, graph) - exact).norm()))
    assert errors[0] > 2 * errors[1] > 4 * errors[2]
    features = ga.random_features(q, k, 0.7, 50)
    assert float((ga.linear_attention(*features, v, graph) - exact).norm()) > errors[2]


def test_gradients_reach_queries_keys_and_bandwidths():
    q, k, v = (x[:1, :6].clone().requires_grad_() for x in tensors(num_tokens=6))
    sigma = torch.tensor([0.8, 1.2], dtype=torch.float64, requires_grad=True)
    graph = ga.complete_graph(6)

    def by_landmarks(q, k, sigma):
        return ga.linear_attention(*ga.nystrom_features(q, k, sigma, k[:, ::2]), v.detach(), graph)

    def at_random(q, k, sigma):
        return ga.linear_attention(*ga.random_features(q, k, sigma, 7), v.detach(), graph)

    for function in (by_landmarks, at_random):
        torch.autograd.gradcheck(function, (q, k, sigma), atol=1e-4)


X = torch.zeros(5, 2, 3)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ga.random_features(X, X, 1.0, 0), "num_features must be"),
        (lambda: ga.random_features(X, X, 0.0, 5), "sigma must be > 0, got 0.0"),
        (lambda: ga.random_features(X, X, torch.ones(3), 5), "broadcastable to [2], got [3]"),
        (lambda: ga.random_features(X, X[..., :2], 1.0, 5), "key must have the features of query"),
        (lambda: ga.random_features(X.long(), X, 1.0, 5), "query must be floating-point"),
        (lambda: ga.nystrom_features(X, X, 1.0, X[:0]), "landmarks must be [m, H, D]"),
        (lambda: ga.nystrom_features(X, X[:, :1], 1.0, X), "key must have the 2 heads of query"),
        (lambda: ga.nystrom_features(X, X, 1.0, [X]), "got list"),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        call()

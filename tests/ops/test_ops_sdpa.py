"""Attention over a graph is PyTorch's own attention with the graph as its mask."""

import pytest
import torch
from cases_ops import qkv, random, random_mask
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import graphattn as ga

EXACT = {"rtol": 1e-10, "atol": 1e-10}

# A graph, and what SDPA is told instead of it: a boolean mask written down independently.
N = 11
gap = torch.arange(N)[None, :] - torch.arange(N)[:, None]  # source - target
MASKS = {
    "complete": (ga.complete_graph(N), torch.ones(N, N, dtype=torch.bool)),
    "causal": (ga.causal_graph(N), gap <= 0),
    "band": (ga.window_path_graph(N, 3, self_loops=True), gap.abs() <= 3),
    "band without self": (ga.window_path_graph(N, 2), (gap.abs() <= 2) & (gap != 0)),
    "causal band": (ga.causal_window_graph(N, 4), (gap <= 0) & (gap > -4)),
    "cross": (ga.bipartite_complete_graph(N, 6), torch.ones(N, 6, dtype=torch.bool)),
    "random": (
        ga.from_mask(random_mask(N, N, 0.4, seed=1) | (gap == 0)),
        random_mask(N, N, 0.4, seed=1) | (gap == 0),
    ),
}


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    q, k, v = (x.transpose(-2, -3) for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return out.transpose(-2, -3)


def same_value_and_gradients(ours: Tensor, theirs: Tensor, inputs: tuple[Tensor, ...]) -> None:
    torch.testing.assert_close(ours, theirs, **EXACT)
    direction = random(*ours.shape, seed=77)
    for a, b in zip(
        torch.autograd.grad(ours, inputs, direction),
        torch.autograd.grad(theirs, inputs, direction),
        strict=True,
    ):
        torch.testing.assert_close(a, b, **EXACT)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("name", MASKS)
def test_dot_product_attention_is_sdpa_with_the_graph_as_mask(name: str, kv_heads: int) -> None:
    graph, mask = MASKS[name]
    q, k, v = (x.requires_grad_() for x in qkv(graph, batch=(2,), heads=4, kv_heads=kv_heads))
    ours = ga.dot_product_attention(q, k, v, graph)
    same_value_and_gradients(ours, sdpa(q, k, v, mask), (q, k, v))


@pytest.mark.parametrize("name", MASKS)
def test_rbf_attention_is_sdpa_with_one_more_feature(name: str) -> None:
    """||q||^2 cancels in the softmax: logits (q . k - ||k||^2 / 2) / sigma^2 do the same."""
    graph, mask = MASKS[name]
    q, k, v = (x.requires_grad_() for x in qkv(graph, batch=(2,)))
    sigma = 1.3
    longer_q = torch.cat([q, torch.ones_like(q[..., :1])], dim=-1)
    longer_k = torch.cat([k, -k.square().sum(-1, keepdim=True) / 2], dim=-1)
    theirs = sdpa(longer_q, longer_k, v, mask, scale=sigma**-2)
    same_value_and_gradients(ga.rbf_attention(q, k, v, graph, sigma), theirs, (q, k, v))


def test_attention_weights_are_the_masked_softmax() -> None:
    graph, mask = MASKS["band"]
    q, k, _ = qkv(graph, batch=(2,))
    logits = -(q[:, :, None] - k[:, None]).square().sum(-1) / (2 * 0.8**2)
    expected = logits.masked_fill(~mask[..., None], -torch.inf).softmax(dim=2)
    weights = ga.attention_weights(q, k, graph, sigma=0.8)
    torch.testing.assert_close(weights, expected[:, mask], **EXACT)

"""Tensors with heads before tokens, as torch has them: the error says how they fit."""

from __future__ import annotations

import pytest
import torch
from cases_ops import consensus_inputs
from torch import Tensor

import graphattn as ga

B, N, H, D = 2, 8, 4, 3
GRAPH = ga.causal_window_graph(N, 3)
FITS = r"tensors are \[\*, tokens, heads, features\]; they fit after transpose\(1, 2\)$"


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def consensus(q: Tensor, graph: object) -> Tensor:
    *_, a, b, network = consensus_inputs(GRAPH)
    a, b = (x[..., :1, :1, :].expand(*q.shape[:-2], 1, -1).to(q.dtype) for x in (a, b))
    network = ga.EdgeNetworkParameters(*(x[:1].to(q.dtype) for x in network))
    network = network._replace(
        alpha=network.alpha.expand(q.shape[-2], -1),
        alpha_bias=network.alpha_bias.expand(q.shape[-2]),
        beta=network.beta.expand(q.shape[-2], -1),
        beta_bias=network.beta_bias.expand(q.shape[-2]),
        shear=network.shear[:, :, :D].expand(q.shape[-2], -1, -1, -1),
        shear_bias=network.shear_bias[:, :, :D].expand(q.shape[-2], -1, -1),
    )
    return ga.consensus_update(q, q, a, b, network, graph, 0.1, update="target")


OPERATIONS = {
    "dot": lambda q, graph: ga.dot_product_attention(q, q, q, graph),
    "rbf": lambda q, graph: ga.rbf_attention(q, q, q, graph, 1.0),
    "score": lambda q, graph: ga.score_attention(q, q, q, graph, ga.DotProduct()),
    "weights": lambda q, graph: ga.attention_weights(q, q, graph),
    "linear": lambda q, graph: ga.linear_attention(q.exp(), q.exp(), q, graph),
    "linear weights": lambda q, graph: ga.linear_attention_weights(q.exp(), q.exp(), graph),
    "candidates": lambda q, graph: ga.top_k_candidates(q, q, graph, 2),
    "consensus": consensus,
}


@pytest.mark.parametrize("graph", [GRAPH, GRAPH.edge_index], ids=["graph", "edge_index"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_heads_before_tokens_are_told_to_be_transposed(name: str, graph: object) -> None:
    q = tokens(B, H, N, D)
    with pytest.raises(ValueError, match=FITS):
        OPERATIONS[name](q, graph)
    OPERATIONS[name](q.transpose(1, 2), graph)  # the remedy


@pytest.mark.parametrize("name", OPERATIONS)
def test_sizes_that_fit_in_no_layout_name_the_axes_and_no_remedy(name: str) -> None:
    with pytest.raises(ValueError, match=r"tensors are \[\*, tokens, heads, features\]$"):
        OPERATIONS[name](tokens(B, N + 1, H, D), GRAPH)


def test_an_edge_list_with_another_mistake_is_not_told_a_layout() -> None:
    twice = torch.tensor([[0, 0], [1, 1]])
    with pytest.raises(ValueError, match="more than once") as caught:
        ga.dot_product_attention(*[tokens(B, N, H, D)] * 3, twice)
    assert "tensors are" not in str(caught.value)


def test_axes_are_counted_from_the_front_whatever_the_batch() -> None:
    for shape, swap in (((H, N, D), (0, 1)), ((2, 3, H, N, D), (2, 3))):
        q = tokens(*shape)
        with pytest.raises(ValueError, match=rf"they fit after transpose\({swap[0]}, {swap[1]}\)"):
            ga.dot_product_attention(q, q, q, GRAPH)
        ga.dot_product_attention(*[q.transpose(*swap)] * 3, GRAPH)


def test_tokens_whose_features_are_not_split_are_told_to_be() -> None:
    q = tokens(B, N, H * D)
    with pytest.raises(ValueError, match=r"dim\] after unflatten\(-1, \(heads, -1\)\)"):
        ga.dot_product_attention(q, q, q, GRAPH)
    ga.dot_product_attention(*[q.unflatten(-1, (H, -1))] * 3, GRAPH)


def test_one_tensor_in_another_layout_is_named() -> None:
    q, other = tokens(B, N, H, D), tokens(B, H, N, D)
    for call in (
        lambda v: ga.dot_product_attention(q, q, v, GRAPH),
        lambda v: ga.linear_attention(q.exp(), q.exp(), v, GRAPH),
    ):
        with pytest.raises(ValueError, match=r"features\]; value fits after transpose\(1, 2\)"):
            call(other)
        call(other.transpose(1, 2))
    with pytest.raises(ValueError, match=r"value_cache fits after transpose\(1, 2\)"):
        ga.decode_attention(q, q, other, N)


def test_caches_with_heads_before_tokens_are_told_to_be_transposed() -> None:
    q, cache = tokens(B, H, 1, D), tokens(B, H, N, D)
    with pytest.raises(ValueError, match=r"key_cache heads must divide .*they fit after transpose"):
        ga.decode_attention(q, cache, cache, N)
    ga.decode_attention(*(x.transpose(1, 2) for x in (q, cache, cache)), N)


def test_a_layer_says_that_the_batch_is_its_first_axis() -> None:
    layer, x = ga.nn.KrauseAttention(12, heads=4, top_k=2), tokens(N, B, 12)
    with pytest.raises(ValueError, match=r"x is .*tokens, dim.* fits after transpose\(0, 1\)"):
        layer(x, GRAPH)
    layer(x.transpose(0, 1), GRAPH)


TOLD = [
    "attention_weights",
    "consensus_update",
    "decode_attention",
    "dot_product_attention",
    "linear_attention",
    "linear_attention_weights",
    "rbf_attention",
    "score_attention",
    "top_k_candidates",
]


def test_every_operation_that_takes_a_query_documents_the_trap_first() -> None:
    for name in TOLD:
        first = getattr(ga, name).__doc__.split("\n\n")[1]
        assert "[*, tokens, heads, features]" in first, name
        assert "x.transpose(1, 2)" in first, name

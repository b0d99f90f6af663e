"""DotProductAttention over the right graph is torch.nn.MultiheadAttention."""

import pytest
import torch
from nn_by_hand import DIM, HEADS, into_heads, irregular_graph
from torch import nn
from torch.nn import functional

import graphattn as ga

N, M = 9, 6
TIGHT = {"rtol": 1e-10, "atol": 1e-12}


def torch_twin(bias: bool = True, context_dim: int | None = None):
    """PyTorch's layer with random weights (biases too), and ours with copies of them."""
    theirs = nn.MultiheadAttention(
        DIM, HEADS, bias=bias, batch_first=True, kdim=context_dim, vdim=context_dim
    ).double()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) / DIM**0.5)
    ours = ga.nn.DotProductAttention(DIM, HEADS, bias=bias, context_dim=context_dim).double()
    if context_dim in (None, DIM):
        weights = theirs.in_proj_weight.chunk(3)
    else:
        weights = (theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight)
    state = {
        f"{name}_proj.weight": weight
        for name, weight in zip(("query", "key", "value"), weights, strict=True)
    }
    state["output_proj.weight"] = theirs.out_proj.weight
    if bias:
        for name, part in zip(("query", "key", "value"), theirs.in_proj_bias.chunk(3), strict=True):
            state[f"{name}_proj.bias"] = part
        state["output_proj.bias"] = theirs.out_proj.bias
    ours.load_state_dict(state)
    return theirs, ours


def assert_same_layer(theirs, ours, graph, x, context=None):
    """Outputs, weights of every edge, and the gradient of x agree."""
    x = x.requires_grad_()
    other = x if context is None else context
    expected, weights = theirs(
        x, other, other, attn_mask=~graph.to_mask(), average_attn_weights=False
    )
    arguments = (x, graph) if context is None else (x, graph, context)
    out, edge_weights = ours(*arguments, return_attention_weights=True)
    torch.testing.assert_close(out, expected, **TIGHT)
    source, target = graph.edge_index
    torch.testing.assert_close(edge_weights, weights[:, :, target, source].mT, **TIGHT)
    (gradient,) = torch.autograd.grad(out.square().sum(), x)
    (expected_gradient,) = torch.autograd.grad(expected.square().sum(), x)
    torch.testing.assert_close(gradient, expected_gradient, **TIGHT)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(
    "graph",
    [
        ga.complete_graph(N),
        ga.causal_graph(N),
        ga.causal_window_graph(N, 4),
        ga.window_path_graph(N, 2, self_loops=True),
        ga.longformer_graph(N, 1, [0]),
    ],
    ids=["complete", "causal", "causal window", "sliding window", "longformer"],
)
def test_self_attention_is_pytorchs(graph, bias, backend):
    theirs, ours = torch_twin(bias)
    with ga.use_backend(backend):
        assert_same_layer(theirs, ours, graph, torch.randn(3, N, DIM, dtype=torch.float64))


@pytest.mark.parametrize("context_dim", [None, 10])
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("graph", ["complete", "window"])
def test_cross_attention_is_pytorchs(graph, context_dim, backend):
    theirs, ours = torch_twin(context_dim=context_dim)
    x = torch.randn(3, N, DIM, dtype=torch.float64)
    if graph == "complete":
        context = torch.randn(3, M, context_dim or DIM, dtype=torch.float64)
        edges = ga.bipartite_complete_graph(N, M)
    else:
        context = torch.randn(3, N, context_dim or DIM, dtype=torch.float64)
        edges = ga.bipartite_window_graph(N, 2)
    with ga.use_backend(backend):
        assert_same_layer(theirs, ours, edges, x, context)


def test_padding_is_pytorchs_key_padding_mask():
    theirs, ours = torch_twin()
    x = torch.randn(3, N, DIM, dtype=torch.float64)
    valid = torch.arange(N) < torch.tensor([9, 5, 1])[:, None]
    expected, _ = theirs(x, x, x, key_padding_mask=~valid)
    out = ours(x, ga.complete_graph(N), valid=valid)
    torch.testing.assert_close(out[valid], expected[valid], **TIGHT)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_queries_are_those_of_scaled_dot_product_attention(kv_heads):
    """Query head h reads key head h // (heads / kv_heads), as torch's enable_gqa."""
    layer = ga.nn.DotProductAttention(DIM, HEADS, kv_heads=kv_heads).double()
    x = torch.randn(3, N, DIM, dtype=torch.float64)
    q = into_heads(layer.query_proj(x)).transpose(1, 2)
    k, v = (into_heads(p(x), kv_heads).transpose(1, 2) for p in (layer.key_proj, layer.value_proj))
    mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    expected = layer.output_proj(mixed.transpose(1, 2).flatten(-2))
    torch.testing.assert_close(layer(x, ga.causal_graph(N)), expected, **TIGHT)


def test_the_value_less_transformer_averages_the_input_itself():
    layer = ga.nn.DotProductAttention(DIM, HEADS, value_projection=False).double()
    x = torch.randn(3, N, DIM, dtype=torch.float64)
    q, k = (into_heads(p(x)).transpose(1, 2) for p in (layer.query_proj, layer.key_proj))
    mixed = functional.scaled_dot_product_attention(q, k, into_heads(x).transpose(1, 2))
    expected = layer.output_proj(mixed.transpose(1, 2).flatten(-2))
    torch.testing.assert_close(layer(x, ga.complete_graph(N)), expected, **TIGHT)


def test_a_token_without_edges_gets_the_bias_of_the_output_projection():
    """A token without edges gets the output bias; PyTorch's softmax over nothing gives NaN."""
    _, ours = torch_twin()
    out = ours(torch.randn(3, N, DIM, dtype=torch.float64), irregular_graph())
    torch.testing.assert_close(out[:, 4], ours.output_proj.bias.expand(3, -1))

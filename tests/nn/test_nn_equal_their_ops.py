"""Every layer is its operation, between linear maps whose names are in the state_dict."""

import pytest
import torch
from nn_by_hand import (
    BASE_100,
    CASES,
    DIM,
    HEAD_DIM,
    HEADS,
    Case,
    forward_by_hand,
    graph_of,
    into_heads,
    irregular_graph,
    linear,
    rotate,
    run,
    tokens_of,
)
from torch.nn import functional

import graphattn as ga

TIGHT = {"rtol": 1e-11, "atol": 1e-12}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_layer_is_its_operation_through_its_own_parameters(case):
    layer, graph = case.make(), graph_of(case)
    for batch in ((), (2,), (2, 3)):
        tokens = tokens_of(case, graph, batch)
        expected = forward_by_hand(case, layer.state_dict(), tokens, graph)
        torch.testing.assert_close(run(layer, tokens, graph), expected, **TIGHT)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_invalid_tokens_are_no_neighbours(case):
    layer, graph = case.make(), graph_of(case)
    tokens = tokens_of(case, graph, (2,))
    targets = torch.rand(2, graph.num_targets) < 0.7
    sources = targets if case.context_width is None else torch.rand(graph.num_sources) < 0.7
    cleared = tuple(
        t.masked_fill(~mask[..., None], 0)
        for t, mask in zip(tokens, (targets, sources), strict=False)
    )
    expected = forward_by_hand(case, layer.state_dict(), cleared, graph, valid=(targets, sources))
    given = targets if case.context_width is None else (targets, sources)
    out = run(layer, tokens, graph, valid=given)
    torch.testing.assert_close(out[targets], expected[targets], **TIGHT)


@pytest.mark.parametrize("case", [c for c in CASES if c.rope_base], ids=str)
def test_positions_of_the_caller_replace_those_of_the_graph(case):
    layer, graph = case.make(), graph_of(case)
    tokens = tokens_of(case, graph, (2,))
    targets = torch.randint(0, 50, (2, graph.num_targets))
    if case.context_width is None:
        given, pair = targets, (targets, targets)
    else:
        given = pair = (targets, torch.randint(0, 50, (graph.num_sources,)))
    expected = forward_by_hand(case, layer.state_dict(), tokens, graph, positions=pair)
    out = run(layer, tokens, graph, positions=given)
    torch.testing.assert_close(out, expected, **TIGHT)
    assert not torch.allclose(out, run(layer, tokens, graph), atol=1e-6)


EDGE_NET = {
    "edge_net.target.weight",
    "edge_net.target.bias",
    "edge_net.source.weight",
    "edge_net.alpha",
    "edge_net.alpha_bias",
    "edge_net.beta",
    "edge_net.beta_bias",
    "edge_net.shear",
    "edge_net.shear_bias",
}


def projections(*names: str, bias: bool = True) -> set[str]:
    return {f"{name}.{part}" for name in names for part in ("weight", "bias")[: 1 + bias]}


ATTENTION = ("query_proj", "key_proj", "value_proj", "output_proj")


@pytest.mark.parametrize(
    ("case", "keys"),
    [
        (Case("DotProductAttention"), projections(*ATTENTION)),
        (Case("DotProductAttention", {"bias": False}), projections(*ATTENTION, bias=False)),
        (
            Case("DotProductAttention", {"value_projection": False}),
            projections("query_proj", "key_proj", "output_proj"),
        ),
        (Case("KrauseAttention"), projections(*ATTENTION) | {"log_sigma"}),
        (
            Case("KrauseAttention", {"bias": False}),
            projections(*ATTENTION, bias=False) | {"log_sigma"},
        ),
        (Case("GaussianKernelAttention"), projections("output_proj") | {"log_sigma"}),
        (
            Case("GaussianKernelAttention", {"bias": False}),
            projections("output_proj", bias=False) | {"log_sigma"},
        ),
        (Case("SelfConsensus"), projections("source_proj", "output_proj") | EDGE_NET),
        (
            Case("SelfConsensus", {"bias": False}),
            projections("source_proj", "output_proj", bias=False) | EDGE_NET,
        ),
        (
            Case("CrossConsensus"),
            projections("source_proj", "context_proj", "output_proj") | EDGE_NET,
        ),
    ],
    ids=lambda value: "" if isinstance(value, set) else str(value),
)
def test_the_names_in_the_state_dict_are_the_promised_ones(case, keys):
    assert set(case.make().state_dict()) == keys


@pytest.mark.parametrize(
    ("options", "groups", "target_in", "source_in", "first"),
    [
        ({}, HEADS, DIM // HEADS, 8 // HEADS, 6),
        ({"trunk": "separate"}, HEADS, DIM // HEADS, 8 // HEADS, 18),
        ({"edge_input": "full"}, 1, DIM, 8, 6),
        ({"edge_input": "full", "trunk": "separate"}, 1, DIM, 8, 18),
    ],
    ids=str,
)
def test_the_edge_network_has_the_promised_shapes(options, groups, target_in, source_in, first):
    layer = ga.nn.CrossConsensus(DIM, HEADS, edge_hidden=6, rank=3, context_dim=8, **options)
    shapes = {name: tuple(tensor.shape) for name, tensor in layer.edge_net.state_dict().items()}
    assert shapes == {
        "target.weight": (groups, first, target_in),
        "target.bias": (groups, first),
        "source.weight": (groups, first, source_in),
        "alpha": (HEADS, 6),
        "alpha_bias": (HEADS,),
        "beta": (HEADS, 6),
        "beta_bias": (HEADS,),
        "shear": (HEADS, 3, HEAD_DIM, 6),
        "shear_bias": (HEADS, 3, HEAD_DIM),
    }


# Oracles that use no operation of the library at all: dense tensors and loops over edges.


@pytest.mark.parametrize("eps", [0.0, 0.3])
def test_gaussian_kernel_attention_is_equation_3_to_5_on_dense_matrices(eps):
    layer = Case("GaussianKernelAttention", {"init_sigma": 1.5, "eps": eps}).make()
    graph = irregular_graph()
    x = torch.randn(graph.num_targets, DIM, dtype=torch.float64)
    mixed = torch.zeros_like(x)
    for h in range(HEADS):
        here = slice(h * HEAD_DIM, (h + 1) * HEAD_DIM)
        sigma = layer.log_sigma[h].exp()
        kernel = torch.exp(-(torch.cdist(x[:, here], x[:, here]) ** 2) / (2 * sigma**2))
        kernel = kernel * graph.to_mask()
        total = kernel.sum(1, keepdim=True) + eps
        mixed[:, here] = torch.where(total > 0, kernel / total, 0) @ x[:, here]
    expected = mixed @ layer.output_proj.weight.T + layer.output_proj.bias
    torch.testing.assert_close(layer(x, graph), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("top_k", [None, 1, 3, 100])
@pytest.mark.parametrize("rope", [False, BASE_100], ids=["plain", "rope"])
def test_krause_attention_averages_the_top_k_nearest_of_its_window(top_k, rope):
    layer = Case("KrauseAttention", {"top_k": top_k, "rope": rope}).make()
    graph = ga.causal_window_graph(9, 5)
    x = torch.randn(9, DIM, dtype=torch.float64)
    state, base = layer.state_dict(), 100.0 if rope else None
    q, k, v = (into_heads(linear(state, f"{n}_proj", x)) for n in ("query", "key", "value"))
    q, k = (rotate(t, torch.arange(9), base) for t in (q, k))
    mixed = torch.zeros_like(v)
    for i in range(9):
        window = torch.arange(max(0, i - 4), i + 1)
        for h in range(HEADS):
            square = (q[i, h] - k[window, h]).square().sum(-1)
            kept = square.argsort()[: top_k or 100]
            weight = torch.softmax(-square[kept] / (2 * layer.log_sigma[h].exp() ** 2), 0)
            mixed[i, h] = weight @ v[window[kept], h]
    expected = linear(state, "output_proj", mixed.flatten(-2))
    torch.testing.assert_close(layer(x, graph), expected, rtol=1e-10, atol=1e-11)


def edge_matrices_by_hand(layer, x, context, i, j):
    """Algorithm 2 for one edge: [y_i; y_j] through the network, R of every head [H, D, D]."""
    net, xi = layer.edge_net, layer.edge_net.alpha.shape[-1]
    matrices = []
    for h in range(HEADS):
        if layer.edge_input == "head":
            here, other = x[i].chunk(HEADS)[h], context[j].chunk(HEADS)[h]
            group = h
        else:
            here, other, group = x[i], context[j], 0
        weight = torch.cat([net.target.weight[group], net.source.weight[group]], dim=-1)
        hidden = functional.gelu(weight @ torch.cat([here, other]) + net.target.bias[group])
        of_alpha, of_beta, of_shear = hidden.split(xi) if len(hidden) > xi else (hidden,) * 3
        alpha = functional.softplus(net.alpha[h] @ of_alpha + net.alpha_bias[h])
        beta = functional.softplus(net.beta[h] @ of_beta + net.beta_bias[h])
        raw = net.shear[h] @ of_shear + net.shear_bias[h]
        rows = raw / raw.norm(dim=-1, keepdim=True) / len(raw) ** 0.5
        matrices.append(alpha * torch.eye(HEAD_DIM, dtype=x.dtype) + beta * rows.T @ rows)
    return torch.stack(matrices)


@pytest.mark.parametrize("trunk", ["shared", "separate"])
@pytest.mark.parametrize("edge_input", ["head", "full"])
@pytest.mark.parametrize("rank", [1, 3])
def test_energy_consensus_is_a_gradient_step_on_the_energy(edge_input, trunk, rank):
    options = {"edge_input": edge_input, "trunk": trunk, "edge_hidden": 5, "rank": rank}
    layer, graph = Case("SelfConsensus", options).make(), irregular_graph()
    x = torch.randn(graph.num_targets, DIM, dtype=torch.float64)
    u = into_heads(layer.source_proj(x)).detach().requires_grad_()
    energy = 0
    for j, i in graph.edge_index.T.tolist():
        R = edge_matrices_by_hand(layer, x, x, i, j).detach()
        gap = u[i] - u[j]
        energy = energy + 0.5 * torch.einsum("hc,hcd,hd->", gap, R, gap)
    (gradient,) = torch.autograd.grad(energy, u)
    expected = layer.output_proj((u - 0.1 * gradient).flatten(-2))
    torch.testing.assert_close(layer(x, graph), expected, **TIGHT)


@pytest.mark.parametrize("trunk", ["shared", "separate"])
@pytest.mark.parametrize("edge_input", ["head", "full"])
@pytest.mark.parametrize("rope", [False, True], ids=["plain", "rope"])
def test_cross_consensus_moves_targets_towards_the_context(edge_input, trunk, rope):
    options = {"edge_input": edge_input, "trunk": trunk, "edge_hidden": 5, "rope": rope}
    case = Case("CrossConsensus", {**options, "context_dim": 8}, 8)
    layer, graph = case.make(), irregular_graph(9, 6)
    x, context = tokens_of(case, graph, ())
    base = 10000.0 if rope else None
    u, v = into_heads(layer.source_proj(x)), into_heads(layer.context_proj(context))
    turned_u, turned_v = rotate(u, graph.positions, base), rotate(v, torch.arange(6), base)
    moved = u.clone()
    for j, i in graph.edge_index.T.tolist():
        R = edge_matrices_by_hand(layer, x, context, i, j)
        moved[i] = moved[i] - 0.1 * torch.einsum("hcd,hd->hc", R, turned_u[i] - turned_v[j])
    expected = layer.output_proj(moved.flatten(-2))
    torch.testing.assert_close(layer(x, graph, context), expected, **TIGHT)


def test_rope_step_starts_from_the_unrotated_state_as_equation_42_says():
    layer = Case("SelfConsensus", {"rope": True, "update": "target", "edge_hidden": 5}).make()
    graph = irregular_graph()
    x = torch.randn(graph.num_targets, DIM, dtype=torch.float64)
    u = into_heads(layer.source_proj(x))
    turned = rotate(u, torch.arange(9), 10000.0)
    moved = u.clone()
    for j, i in graph.edge_index.T.tolist():
        R = edge_matrices_by_hand(layer, x, x, i, j)
        moved[i] = moved[i] - 0.1 * torch.einsum("hcd,hd->hc", R, turned[i] - turned[j])
    torch.testing.assert_close(layer(x, graph), layer.output_proj(moved.flatten(-2)), **TIGHT)

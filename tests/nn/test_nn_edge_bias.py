"""Attention layers add edge_bias to their logits, whichever way they run."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from nn_by_hand import DIM, HEADS, ONE_OF_EACH, Case, graph_of, irregular_graph, run, tokens_of
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import graphattn as ga

TIGHT = {"rtol": 1e-10, "atol": 1e-11}
ATTENTION = [case for case in ONE_OF_EACH if not case.is_consensus]
SQUARE = [case for case in ATTENTION if case.context_width is None]
FULL = [  # of their weights without a bias all can be read
    Case("DotProductAttention", {"rope": True, "kv_heads": 2}),
    Case("KrauseAttention"),
    Case("GaussianKernelAttention", {"normalize": True}),
]


def draw(*shape: int, seed: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("case", FULL, ids=str)
def test_weights_are_multiplied_by_the_exponential_and_normalised_again(
    case: Case, per_sample: bool, backend: str
) -> None:
    """softmax(l + b) = softmax(l) exp(b) / sum: from the layer's own weights without a bias."""
    layer, graph = case.make(backend=backend), irregular_graph()
    (x,) = tokens_of(case, graph)
    bias = draw(*([2] * per_sample), graph.num_edges, HEADS)
    _, before = layer(x, graph, return_attention_weights=True)
    out, weights = layer(x, graph, edge_bias=bias, return_attention_weights=True)
    expected = before * bias.exp()
    source, target = graph.edge_index
    for i in range(9):
        row = target == i
        expected[:, row] = expected[:, row] / expected[:, row].sum(1, keepdim=True)
    torch.testing.assert_close(weights, expected, **TIGHT)
    if case.kind == "GaussianKernelAttention":
        _, _, value = layer.project(x, x, None)
    else:
        value = layer.value_proj(x).unflatten(-1, (layer.kv_heads, -1))
    value = value.repeat_interleave(HEADS // value.shape[-2], dim=-2)
    mixed = torch.zeros(2, 9, HEADS, DIM // HEADS, dtype=torch.float64)
    mixed.index_add_(1, target, expected[..., None] * value[:, source])
    torch.testing.assert_close(out, layer.output_proj(mixed.flatten(-2)), **TIGHT)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("shape", ["edges", "samples", "offsets"])
@pytest.mark.parametrize("case", ATTENTION, ids=str)
def test_message_and_operation_agree_in_value_and_every_gradient(
    case: Case, shape: str, padded: bool
) -> None:
    graph = graph_of(case)
    if shape == "offsets":
        if case.context_width is not None:
            pytest.skip("two tracks have no table of offsets")
        graph = ga.window_path_graph(9, 2, self_loops=True)
        bias = draw(5, HEADS)
    else:
        bias = draw(*([2] if shape == "samples" else []), graph.num_edges, HEADS)
    keywords: dict[str, Any] = {}
    if padded:
        masks = torch.rand(2, graph.num_targets) < 0.7, torch.rand(2, graph.num_sources) < 0.7
        keywords["valid"] = masks[0] if case.context_width is None else masks
    results = []
    for backend in ("structured", "reference"):
        layer = case.make(backend=backend)
        tokens = tuple(t.clone().requires_grad_() for t in tokens_of(case, graph))
        leaf = bias.clone().requires_grad_()
        out = run(layer, tokens, graph, edge_bias=leaf, **keywords)
        leaves = [leaf, *tokens, *layer.parameters()]
        results.append([out, *torch.autograd.grad(out, leaves, draw(*out.shape, seed=3))])
    assert results[0][1].abs().sum() > 0
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, **TIGHT)


@pytest.mark.parametrize("case", SQUARE, ids=str)
def test_a_table_of_offsets_is_its_numbers_per_edge(case: Case) -> None:
    layer, graph = case.make(), ga.causal_window_graph(9, 4)
    (x,) = tokens_of(case, graph)
    table = draw(4, HEADS)
    source, target = graph.edge_index
    one = layer(x, graph, edge_bias=table, return_attention_weights=True)
    other = layer(x, graph, edge_bias=table[source - target + 3], return_attention_weights=True)
    torch.testing.assert_close(one, other, **TIGHT)


@pytest.mark.parametrize("case", SQUARE, ids=str)
def test_in_a_packed_batch_every_sequence_has_its_own(case: Case) -> None:
    layer = case.make()
    graphs = [irregular_graph(9, 9), ga.complete_graph(5), ga.window_path_graph(7, 2)]
    packed = ga.batch(graphs)
    x, bias = draw(21, DIM), draw(packed.num_edges, HEADS)
    parts = zip(x.split([9, 5, 7]), graphs, bias.split([g.num_edges for g in graphs]), strict=True)
    expected = torch.cat([layer(piece, graph, edge_bias=b) for piece, graph, b in parts])
    torch.testing.assert_close(layer(x, packed, edge_bias=bias), expected, **TIGHT)


def test_edges_need_an_order_that_both_sides_know() -> None:
    layer, graph = ATTENTION[0].make(), irregular_graph()
    x, bias = draw(9, DIM), draw(graph.num_edges, HEADS)
    expected = layer(x, graph, edge_bias=bias)
    torch.testing.assert_close(layer(x, graph.edge_index, edge_bias=bias), expected, **TIGHT)
    with pytest.raises(ValueError, match="edge_index must be sorted"):
        layer(x, graph.edge_index.flip(1), edge_bias=bias)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_what_does_not_fit_is_refused_by_name(backend: str) -> None:
    layer, graph = ATTENTION[0].make(backend=backend), irregular_graph()
    x, E = draw(2, 9, DIM), graph.num_edges
    for shape in [(E, 2), (E + 1, HEADS), (3, E, HEADS), (2, 2, E, HEADS)]:
        with pytest.raises(ValueError, match=rf"edge_bias must have shape \[{E}, 4\].*got \["):
            layer(x, graph, edge_bias=draw(*shape))
    with pytest.raises(ValueError, match=r"edge_bias must have shape .*got str"):
        layer(x, graph, edge_bias="alibi")


@pytest.mark.parametrize("case", [c for c in ONE_OF_EACH if c.is_consensus], ids=str)
def test_layers_without_logits_say_that_they_have_none(case: Case) -> None:
    graph = graph_of(case)
    with pytest.raises(TypeError, match=r"edge_bias.*attention layers take it"):
        run(case.make(), tokens_of(case, graph), graph, edge_bias=draw(graph.num_edges, HEADS))


# Methods that somebody has replaced.


class Deaf(ga.nn.KrauseAttention):
    """A message as it was written before there were biases."""

    def message(self, query_i, key_j, value_j, valid_i, valid_j, index, rowptr):
        return super().message(query_i, key_j, value_j, valid_i, valid_j, index, rowptr)


class Hearing(ga.nn.KrauseAttention):
    def message(self, query_i, key_j, value_j, valid_i, valid_j, index, rowptr, edge_bias):
        return 2 * super().message(
            query_i, key_j, value_j, valid_i, valid_j, index, rowptr, edge_bias
        )


class ByProducts(ga.nn.KrauseAttention):
    """The affinity of another layer."""

    def log_affinity(self, query_i: Tensor, key_j: Tensor) -> Tensor:
        return (query_i * key_j).sum(-1) / self.head_dim**0.5


def twins(mine: type, theirs: type) -> tuple[Any, Any]:
    torch.manual_seed(0)
    a, b = mine(DIM, HEADS).double(), theirs(DIM, HEADS).double()
    b.load_state_dict(dict(a.state_dict()), strict=False)
    return a, b


def test_a_message_that_does_not_take_it_is_not_passed_over_in_silence() -> None:
    layer, plain = twins(Deaf, ga.nn.KrauseAttention)
    graph, x = irregular_graph(), draw(9, DIM)
    torch.testing.assert_close(layer(x, graph), plain(x, graph), **TIGHT)
    with pytest.raises(ValueError, match=r"edge_bias cannot be used with the message\(\) of Deaf"):
        layer(x, graph, edge_bias=draw(graph.num_edges, HEADS))


def test_nor_is_one_that_was_put_into_an_instance_or_a_class_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def silent(self, query_i, key_j, value_j, valid_i, valid_j, index, rowptr):
        return torch.zeros_like(value_j)

    layer, graph, x = ATTENTION[0].make(), irregular_graph(), draw(9, DIM)
    bias, nothing = draw(graph.num_edges, HEADS), layer.output_proj(torch.zeros_like(x))
    with monkeypatch.context() as patch:
        patch.setattr(type(layer), "message", silent)
        torch.testing.assert_close(layer(x, graph), nothing, **TIGHT)
        with pytest.raises(ValueError, match=r"edge_bias cannot be used with the message\(\)"):
            layer(x, graph, edge_bias=bias)
    layer.message = types.MethodType(silent, layer)
    torch.testing.assert_close(layer(x, graph), nothing, **TIGHT)
    with pytest.raises(ValueError, match=r"edge_bias cannot be used with the message\(\)"):
        layer(x, graph, edge_bias=bias)
    layer.message = lambda value_j, edge_bias, **_: value_j * edge_bias[..., None]
    value = layer.value_proj(x).unflatten(-1, (HEADS, -1))
    source, target = graph.edge_index
    mixed = torch.zeros_like(value).index_add_(0, target, bias[..., None] * value[source])
    torch.testing.assert_close(
        layer(x, graph, edge_bias=bias), layer.output_proj(mixed.flatten(-2)), **TIGHT
    )


def test_a_message_that_takes_it_gets_it_edge_by_edge() -> None:
    layer, plain = twins(Hearing, ga.nn.KrauseAttention)
    graph, x = ga.window_path_graph(9, 2), draw(2, 9, DIM)
    for bias in (
        None,
        draw(graph.num_edges, HEADS),
        draw(2, graph.num_edges, HEADS),
        draw(5, HEADS),
    ):
        expected = 2 * plain(x, graph, edge_bias=bias) - plain.output_proj.bias
        torch.testing.assert_close(layer(x, graph, edge_bias=bias), expected, **TIGHT)


def test_a_new_affinity_is_biased_like_any_other_and_so_are_its_weights() -> None:
    layer, other = twins(ByProducts, ga.nn.DotProductAttention)
    graph, x = irregular_graph(), draw(2, 9, DIM)
    bias = draw(2, graph.num_edges, HEADS)
    mine = layer(x, graph, edge_bias=bias, return_attention_weights=True)
    theirs = other(x, graph, edge_bias=bias, return_attention_weights=True)
    torch.testing.assert_close(mine, theirs, **TIGHT)


def test_hooks_of_pyg_leave_it_in_place() -> None:
    layer, graph = ATTENTION[0].make(), irregular_graph()
    x, bias = draw(9, DIM), draw(graph.num_edges, HEADS)
    expected, seen = layer(x, graph, edge_bias=bias), []
    layer.register_message_forward_pre_hook(lambda _, given: seen.append(given[0]["edge_bias"]))
    torch.testing.assert_close(layer(x, graph, edge_bias=bias), expected, **TIGHT)
    torch.testing.assert_close(seen, [bias])


def test_an_operation_of_one_s_own_without_the_keyword_still_runs_without_one() -> None:
    layer = ATTENTION[0].make()
    graph, x = irregular_graph(), draw(9, DIM)
    expected, fused = layer(x, graph), layer.fused
    layer.fused = types.MethodType(
        lambda self, q, k, v, graph, valid: fused(q, k, v, graph, valid), layer
    )
    torch.testing.assert_close(layer(x, graph), expected, **TIGHT)
    with pytest.raises(TypeError, match="edge_bias"):
        layer(x, graph, edge_bias=draw(graph.num_edges, HEADS))


# What is built around layers.


@pytest.mark.parametrize("case", ATTENTION, ids=str)
def test_a_block_hands_it_to_its_layer(case: Case) -> None:
    layer, graph = case.make(), graph_of(case)
    block = ga.nn.PreNormBlock(layer).double()
    tokens, bias = tokens_of(case, graph), draw(2, graph.num_edges, HEADS)
    x = tokens[0]
    mixed = x + run(layer, (block.mixer_norm(x), *tokens[1:]), graph, edge_bias=bias)
    expected = mixed + block.mlp(block.mlp_norm(mixed))
    torch.testing.assert_close(run(block, tokens, graph, edge_bias=bias), expected, **TIGHT)


class Foreign(torch.nn.Module):
    dim = DIM

    def forward(self, x: Tensor, graph: Any, *, valid: Any = None, positions: Any = None) -> Tensor:
        return x


def test_a_module_that_does_not_know_it_is_asked_as_before() -> None:
    block = ga.nn.PreNormBlock(Foreign())
    x, graph = torch.randn(9, DIM), irregular_graph()
    assert block(x, graph).shape == x.shape
    with pytest.raises(TypeError, match="edge_bias"):
        block(x, graph, edge_bias=torch.zeros(graph.num_edges, HEADS))


def test_a_model_hands_it_to_all_its_attention_layers() -> None:
    torch.manual_seed(0)
    model = ga.models.SequenceEncoder(11, DIM, 4, HEADS, mixer="mix", edge_hidden=6).double()
    tokens, bias = torch.randint(11, (2, 9)), draw(2, 81, HEADS)
    x = model.embedding(tokens)
    for block, graph in zip(model.blocks, model.graphs(9), strict=True):
        x = block(x, graph, **({} if graph.num_edges < 81 else {"edge_bias": bias}))
    expected = model.head(model.norm(x))
    torch.testing.assert_close(model(tokens, edge_bias=bias), expected, **TIGHT)
    per_block = [bias, bias, None, None]
    torch.testing.assert_close(model(tokens, edge_bias=per_block), expected, **TIGHT)
    only_one = model(tokens, edge_bias=[bias, None, None, None])
    assert not torch.allclose(only_one, expected)
    with pytest.raises(ValueError, match=r"edge_bias must be one tensor, or one per block \(4\)"):
        model(tokens, edge_bias=[bias])


def test_a_model_without_attention_refuses_it() -> None:
    model = ga.models.SequenceEncoder(11, DIM, 2, HEADS, mixer="consensus", edge_hidden=6)
    with pytest.raises(ValueError, match="edge_bias must be None"):
        model(torch.randint(11, (9,)), edge_bias=torch.zeros(81, HEADS))


def test_recorded_weights_have_it_in_them() -> None:
    layer, graph = ATTENTION[0].make(), irregular_graph()
    x, bias = draw(9, DIM), draw(graph.num_edges, HEADS)
    with ga.diagnostics.record_attention(layer) as records:
        layer(x, graph, edge_bias=bias)
    _, expected = layer(x, graph, edge_bias=bias, return_attention_weights=True)
    torch.testing.assert_close(records[0].weights, expected, **TIGHT)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("backend", ["structured", "reference"])
@pytest.mark.parametrize("case", SQUARE, ids=str)
def test_checkpointing_changes_no_bit(case: Case, backend: str, reentrant: bool) -> None:
    layer, graph = case.make(backend=backend), irregular_graph()
    results = []
    for again in (False, True):
        x = tokens_of(case, graph)[0].requires_grad_()
        bias = draw(2, graph.num_edges, HEADS).requires_grad_()

        def call(x: Tensor, bias: Tensor) -> Tensor:
            return layer(x, graph, edge_bias=bias)

        out = checkpoint(call, x, bias, use_reentrant=reentrant) if again else call(x, bias)
        out.square().sum().backward()
        results.append((out, x.grad, bias.grad))
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("case", SQUARE, ids=str)
def test_autocast_computes_with_a_bias_of_half_precision(case: Case) -> None:
    layer, graph = case.make(dtype=torch.float32), irregular_graph()
    x = tokens_of(case, graph, dtype=torch.float32)[0]
    bias = draw(graph.num_edges, HEADS).bfloat16()
    for backend in ("structured", "reference"):
        with torch.autocast("cpu", torch.bfloat16), ga.use_backend(backend):
            out = layer(x, graph, edge_bias=bias)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(
            out.float(), layer(x, graph, edge_bias=bias), rtol=0.05, atol=0.05
        )


@pytest.mark.long
@pytest.mark.parametrize("case", FULL, ids=str)
def test_two_compilations_serve_all_lengths(case: Case) -> None:
    """A table made inside, and numbers of edges that come from outside."""
    torch._dynamo.reset()
    layer, bias = case.make(dtype=torch.float32), ga.nn.OffsetBias.t5(HEADS)

    def call(x: Tensor, graph: ga.TokenGraph, more: Tensor) -> Tensor:
        return layer(x, graph, edge_bias=bias(graph)) + layer(x, graph, edge_bias=more)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for n in (12, 17, 25, 40):
        graph = ga.causal_window_graph(n, n // 4)
        x = torch.randn(2, n, DIM, requires_grad=True)
        more = torch.randn(2, graph.num_edges, HEADS, requires_grad=True)
        mine, theirs = compiled(x, graph, more), call(x, graph, more)
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
        leaves, upstream = [x, more, bias.table], torch.randn_like(theirs)
        torch.testing.assert_close(
            torch.autograd.grad(mine, leaves, upstream),
            torch.autograd.grad(theirs, leaves, upstream),
            rtol=1e-4,
            atol=1e-5,
        )
    assert counter.frame_count <= 2
    torch._dynamo.reset()


def test_on_the_meta_device_shapes_come_out() -> None:
    with torch.device("meta"):
        layer, bias = ga.nn.DotProductAttention(DIM, HEADS), ga.nn.OffsetBias(HEADS, 2)
    graph = ga.window_path_graph(9, 2).to("meta")
    x = torch.zeros(2, 9, DIM, device="meta", requires_grad=True)
    out = layer(x, graph, edge_bias=bias(graph))
    out.sum().backward()
    assert (out.shape, bias.table.grad.shape) == ((2, 9, DIM), (5, HEADS))

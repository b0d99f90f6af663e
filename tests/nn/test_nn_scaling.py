"""Queries scaled in place, as a layer that is trained (Attention Clusters, Section 3.3)."""

import copy
import math
import pickle

import pytest
import torch

import graphattn as ga
from graphattn.nn.blocks.compiled_step import BlockRun, UnknownModuleError

IN_PLACE = {"scaling": "sq_inplace"}


def without_projections(dim: int, heads: int, **options) -> ga.nn.DotProductAttention:
    layer = ga.nn.DotProductAttention(dim, heads, bias=False, **options).double()
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(torch.eye(dim))
    return layer


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_without_projections_it_is_the_attention_that_the_paper_iterates(backend):
    torch.manual_seed(0)
    x = ga.dynamics.standardize(torch.randn(12, 3, dtype=torch.float64))
    graph = ga.window_path_graph(12, 3, self_loops=True)
    layer = without_projections(3, 1, backend=backend, **IN_PLACE)
    step = ga.dynamics.simulate(x, graph, steps=1, scaling="sq_inplace")
    update = ga.dynamics.standardize(layer(x, graph))
    torch.testing.assert_close(update, step.updates[0])
    torch.testing.assert_close(x / math.sqrt(3) + update, step.states[1])


def test_heads_are_divided_by_the_root_of_their_own_width():
    torch.manual_seed(0)
    x = torch.randn(7, 8, dtype=torch.float64)
    out = without_projections(8, 2, **IN_PLACE)(x, ga.complete_graph(7))
    for head in (0, 1):
        scaled = x[:, 4 * head : 4 * head + 4] / 2
        expected = (scaled @ scaled.T).softmax(-1) @ scaled
        torch.testing.assert_close(out[:, 4 * head : 4 * head + 4], expected)


def test_other_weights_of_the_scaled_dot_product_are_the_same_function():
    torch.manual_seed(0)
    in_place = ga.nn.DotProductAttention(12, 3, rope=True, **IN_PLACE).double()
    plain = ga.nn.DotProductAttention(12, 3, rope=True).double()
    plain.load_state_dict(dict(in_place.state_dict()))
    with torch.no_grad():
        for projection in (plain.query_proj, plain.key_proj, plain.value_proj):
            projection.weight /= 2
        plain.query_proj.weight *= 2  # sqrt(D), by which "sdp" divides the logits
        plain.query_proj.bias *= 2
    x, graph = torch.randn(2, 9, 12, dtype=torch.float64), ga.causal_graph(9)
    torch.testing.assert_close(in_place(x, graph), plain(x, graph))


def test_scaling_the_queries_alone_is_the_scaled_dot_product():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 20, 2, 8, dtype=torch.float64)
    graph = ga.complete_graph(20)
    scaled = ga.dot_product_attention(q / math.sqrt(8), k, v, graph, scale=1.0)
    torch.testing.assert_close(scaled, ga.dot_product_attention(q, k, v, graph), rtol=1e-13, atol=0)
    with pytest.raises(ValueError, match="to scale the queries alone"):
        ga.nn.DotProductAttention(8, 2, scaling="sq")


def test_the_input_is_not_changed_and_padding_is_never_read():
    torch.manual_seed(0)
    layer = ga.nn.DotProductAttention(8, 2, **IN_PLACE)
    x = torch.randn(2, 6, 8)
    before, valid = x.clone(), torch.arange(6) < torch.tensor([[6], [4]])
    out = layer(x, ga.complete_graph(6), valid=valid)
    assert torch.equal(x, before)
    spoilt = layer(x.masked_fill(~valid[..., None], torch.nan), ga.complete_graph(6), valid=valid)
    assert torch.equal(out[valid], spoilt[valid])
    torch.testing.assert_close(out[1, :4], layer(x[1, :4], ga.complete_graph(4)))


def test_the_step_of_a_whole_block_in_compiled_code_refuses_it():
    # It would project the tokens as they are; the layer's own step divides them first.
    x = torch.randn(1, 8)
    for scaling, refuses in (("sdp", False), ("sq_inplace", True)):
        block = ga.nn.PreNormBlock(ga.nn.DotProductAttention(8, 2, scaling=scaling)).eval()
        assert (block.mixer.flat_projections() is None) == refuses
        cache = block.init_cache(1, 4)
        if refuses:
            with pytest.raises(UnknownModuleError):
                BlockRun(block, x, cache)


@pytest.mark.parametrize("mixer", ["dot-window", "vlt", ["dot", "dot-window"]])
def test_a_language_model_generates_what_its_forward_pass_predicts(mixer):
    torch.manual_seed(0)
    options = {"mixer": mixer, "window": 4, "mixer_options": IN_PLACE}
    model = ga.models.CausalLM(30, 16, depth=2, heads=2, **options).eval()
    prompt = torch.randint(30, (2, 5))
    made = model.generate(prompt, 12, temperature=0)
    text = prompt
    for _ in range(12):
        text = torch.cat([text, model(text)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(made, text)


def test_a_model_is_saved_copied_and_exported_with_its_scaling(tmp_path):
    torch.manual_seed(0)
    model = ga.models.SequenceEncoder(9, 16, 2, 2, mixer="dot", mixer_options=IN_PLACE).eval()
    tokens = torch.randint(9, (2, 7))
    expected = model(tokens)
    model.save_pretrained(tmp_path)
    copies = [
        ga.models.SequenceEncoder.from_pretrained(tmp_path),
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
    ]
    for one in copies:
        assert {block.mixer.scaling for block in one.blocks} == {"sq_inplace"}
        torch.testing.assert_close(one.eval()(tokens), expected)
    exported = torch.export.export(model, (tokens,)).module()
    torch.testing.assert_close(exported(tokens), expected)
    plain = ga.models.SequenceEncoder(9, 16, 2, 2, mixer="dot")
    with pytest.raises(RuntimeError, match=r"scaling='sq_inplace'.*scaling='sdp'"):
        plain.load_state_dict(model.state_dict())


class Stack(torch.nn.Module):
    """Blocks without an embedding."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = torch.nn.ModuleList(blocks)

    def forward(self, x, graph):
        for block in self.blocks:
            x = block(x, graph)
        return x


def test_spectra_without_weights_divide_only_once():
    torch.manual_seed(0)
    layers = [ga.nn.DotProductAttention(8, 2, **IN_PLACE) for _ in range(2)]
    stack = Stack([ga.nn.PreNormBlock(layer) for layer in layers]).double()
    x, graph = torch.randn(10, 8, dtype=torch.float64), ga.complete_graph(10)
    bare = {"weights": "disabled", "normalization": "disabled", "scaling": "sq_inplace"}
    found = ga.diagnostics.hidden_spectra(stack, x, graph, **bare).spectra[-1]
    for _ in layers:
        heads = [x[:, h : h + 4] / 2 for h in (0, 4)]
        x = x + torch.cat([(h @ h.T).softmax(-1) @ h for h in heads], dim=1)
    expected = ga.dynamics.simulate(x, graph, steps=0).spectra[0]
    torch.testing.assert_close(found, expected)

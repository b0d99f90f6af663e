"""Spectra of hidden states against models written out by hand."""

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hidden_states import eigenvalues, states_of
from torch import nn

import graphattn as ga
from graphattn import diagnostics

B, N, C, H = 2, 12, 16, 4
spectra_of = diagnostics.hidden_spectra


def encoder(depth=3, norm_first=True):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        C, H, 24, dropout=0.2, batch_first=True, norm_first=norm_first, dtype=torch.float64
    )
    model = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    return model


def block(layer, x, attention=True):
    """A pre-norm layer of torch, with or without its attention."""
    if attention:
        normal = layer.norm1(x)
        q, k, v = F.linear(
            normal, layer.self_attn.in_proj_weight, layer.self_attn.in_proj_bias
        ).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (H, -1)).transpose(1, 2) for t in (q, k, v))
        out = (q @ k.mT / math.sqrt(C // H)).softmax(-1) @ v
        x = x + layer.self_attn.out_proj(out.transpose(1, 2).flatten(2))
    return x + layer.linear2(layer.linear1(layer.norm2(x)).relu())


@pytest.mark.parametrize("off", [(), (0,), (1,), (0, 2)])
def test_spectra_are_those_of_the_states_with_and_without_attention(off):
    model, x = encoder().train(), states_of(B, N, C)
    expected = [eigenvalues(x)]
    state = x
    with torch.no_grad():
        for n, layer in enumerate(model.layers):
            state = block(layer.eval(), state, attention=n not in off)
            expected.append(eigenvalues(state))
    model.train()
    measured = spectra_of(model, x, attention_off=[f"layers.{n}" for n in off])
    assert measured.names == ("input", "layers.0", "layers.1", "layers.2")
    torch.testing.assert_close(measured.spectra, torch.stack(expected))
    assert all(module.training for module in model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_every_block_has_its_turn():
    model, x = encoder(), states_of(B, N, C)
    by_block = diagnostics.spectra_without_attention(model, x)
    assert list(by_block) == ["none", "layers.0", "layers.1", "layers.2"]
    for n, name in enumerate(list(by_block)[1:]):
        spectra, whole = by_block[name].spectra, by_block["none"].spectra
        assert torch.equal(spectra[: n + 1], whole[: n + 1])  # what comes before does not change
        assert not torch.allclose(spectra[n + 1], whole[n + 1], rtol=1e-3)
        assert torch.equal(spectra, spectra_of(model, x, attention_off=name).spectra)


class OwnBlock(nn.Module):
    """Attention through SDPA with an output projection that has a bias."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(C, C) for _ in range(4))
        self.up = nn.Linear(C, C)
        self.num_heads = H

    def attention(self, x):
        q, k, v = (
            p(x).unflatten(-1, (H, -1)).transpose(1, 2) for p in (self.query, self.key, self.value)
        )
        out = F.scaled_dot_product_attention(q, k, v)
        return self.out(out.transpose(1, 2).flatten(2))

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.up(x).tanh()


class AttentionBlock(OwnBlock):
    pass


class Stack(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(AttentionBlock() for _ in range(depth)).double()

    def forward(self, x, valid=None):
        for one in self.blocks:
            x = one(x)
        return x


PROJECTIONS = ("query", "key", "value", "out")


def test_the_bias_of_the_output_projection_goes_with_the_attention():
    model, x = Stack(), states_of(B, N, C)
    measured = spectra_of(model, x, attention_off="blocks.0")
    with torch.no_grad():
        first = x + model.blocks[0].up(x).tanh()
        second = model.blocks[1](first)
    expected = torch.stack([eigenvalues(x), eigenvalues(first), eigenvalues(second)])
    torch.testing.assert_close(measured.spectra, expected)


def test_our_blocks_are_disabled_too():
    torch.manual_seed(0)
    model = ga.models.SequenceEncoder(11, C, depth=2, heads=H).double()
    tokens = torch.randint(11, (B, N))
    measured = spectra_of(model, tokens, attention_off=["blocks.0", "blocks.1"])
    with torch.no_grad():
        x = model.embedding(tokens)
        expected = [eigenvalues(x)]
        for one in model.blocks:
            x = x + one.mlp(one.mlp_norm(x))
            expected.append(eigenvalues(x))
    torch.testing.assert_close(measured.spectra, torch.stack(expected))


def test_padding_is_left_out():
    model, x = Stack(), states_of(B, N, C)
    valid = torch.ones(B, N, dtype=torch.bool)
    valid[0, -5:] = False
    measured = spectra_of(model, x, valid=valid)
    with torch.no_grad():
        state = model.blocks[0](x)
    expected = (eigenvalues(state[:1, :-5]) + eigenvalues(state[1:])) / 2
    torch.testing.assert_close(measured.spectra[1], expected)
    ranks = diagnostics.effective_rank_per_layer(model, x, valid=valid).values
    parts = [diagnostics.effective_rank(state[0, :-5]), diagnostics.effective_rank(state[1])]
    torch.testing.assert_close(ranks[0], torch.stack(parts).mean())
    with pytest.raises(ValueError, match="layers must have states that fit the mask of the call"):
        spectra_of(model, x, valid=valid[:, :-1])


# Scaling in place (Attention Clusters; the code it measured divides the queries in place).


def in_place(x, heads):
    """One step of the reference, as its code runs it: one tensor is q, k, v and the residual."""
    x = x.clone()
    hidden = x  # what the block adds to
    query = hidden  # "projections" that return their input
    query /= math.sqrt(C // heads)
    q = query.unflatten(-1, (heads, -1)).transpose(1, 2)
    k, v = (hidden.unflatten(-1, (heads, -1)).transpose(1, 2) for _ in range(2))
    out = (q @ k.mT).softmax(-1) @ v
    return hidden + out.transpose(1, 2).flatten(2)


def by_products(x, heads):
    q = x.unflatten(-1, (heads, -1)).transpose(1, 2)
    out = (q @ q.mT / math.sqrt(C // heads)).softmax(-1) @ q
    return x + out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("scaling", ["sdp", "sq_inplace"])
@pytest.mark.parametrize("kind", ["SDPA", "torch", "ours"])
def test_scaling_in_place_reaches_keys_values_and_the_residual(kind, scaling):
    x = states_of(B, N, C)
    options = {"weights": "disabled", "normalization": "disabled", "scaling": scaling}
    if kind == "SDPA":
        model, options["projections"] = Stack(), PROJECTIONS
        call = (x,)
    elif kind == "torch":
        model = encoder(2)
        call = (x,)
    else:
        model = ga.models.SequenceEncoder(11, C, depth=2, heads=H, rope=False).double()
        call = (torch.randint(11, (B, N)),)
        x = model.embedding(call[0]).detach()
    before = x.clone()
    measured = spectra_of(model, *call, **options)
    assert torch.equal(x, before)  # the caller's tensor is never written
    step = in_place if scaling == "sq_inplace" else by_products
    states = [x, step(x, H), step(step(x, H), H)]
    expected = torch.stack([eigenvalues(state) for state in states])
    torch.testing.assert_close(measured.spectra, expected)


def test_on_and_off_differ_and_the_switch_leaves_nothing_behind():
    model, x = Stack(), states_of(1, 40, C)
    options = {"weights": "disabled", "projections": PROJECTIONS}
    before = spectra_of(model, x).spectra
    product = spectra_of(model, x, **options)
    scaled = spectra_of(model, x, scaling="sq_inplace", **options)
    assert (scaled.spectra[1:, 0] < product.spectra[1:, 0] / 2).all()
    assert torch.equal(spectra_of(model, x).spectra, before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_one_head_in_place_is_the_rule_of_simulate():
    """One head, scaled in place, has the update that `simulate` has before it standardises."""
    from graphattn.dynamics.simulate import as_rule

    x = states_of(N, C)
    rule = as_rule(x, "dot", "sq_inplace", None, None)
    graph = ga.complete_graph(N)
    expected = rule.residual(x) + rule.attend(x, rule.residual(x), graph)
    torch.testing.assert_close(in_place(x[None], 1)[0], expected)


def test_shares_and_dimensions_follow_from_the_spectra():
    measured = spectra_of(Stack(), states_of(B, N, C))
    share = measured.spectra[:, 0] / measured.spectra.sum(1)
    torch.testing.assert_close(measured.leading_share, share)
    ratio = measured.spectra.sum(1).square() / measured.spectra.square().sum(1)
    torch.testing.assert_close(measured.participation_ratio, ratio)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda m, x: spectra_of(m, x, scaling="sq_inplace"), "needs weights='disabled'"),
        (lambda m, x: spectra_of(m, x, scaling="sq"), "scaling must be one of"),
        (lambda m, x: spectra_of(m, x, attention_off="blocks.7"), "attention_off must name"),
        (lambda m, x: spectra_of(nn.Linear(C, C).double(), x), "layers must be given"),
        (
            lambda m, x: diagnostics.spectra_without_attention(m, x, attention_off="blocks.0"),
            "attention_off is an argument of hidden_spectra only",
        ),
        (
            lambda m, x: spectra_of(m, x, layers=["blocks.0.up"], attention_off="blocks.0.up"),
            "none was observed in 'blocks.0.up'",
        ),
        (lambda m, x: spectra_of(m, x * torch.nan), "states must be finite"),
        (lambda m, x: spectra_of(torch.compile(m, backend="eager"), x), "must not be compiled"),
    ],
)
def test_bad_input_is_named(call, says):
    with pytest.raises(ValueError, match=says):
        call(Stack(), states_of(B, N, C))


def test_figures_show_spectra_of_models():
    pytest.importorskip("matplotlib")
    model, x = encoder(), states_of(B, N, C)
    by_block = diagnostics.spectra_without_attention(model, x)
    lines = ga.plot.covariance_spectra(by_block["none"]).lines
    assert len(lines) == C
    change = ga.plot.attention_ablation(by_block).images[0].get_array()
    expected = by_block["layers.1"].participation_ratio - by_block["none"].participation_ratio
    torch.testing.assert_close(torch.as_tensor(change[1].data), expected)
    with pytest.raises(ValueError, match="at least one block"):
        ga.plot.attention_ablation({"none": by_block["none"]})

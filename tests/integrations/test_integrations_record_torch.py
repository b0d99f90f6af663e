"""Recorded attention of converted modules of torch and timm, against plain loops."""

import pytest
import torch
from recorded_oracle import weights_by_loop
from torch import nn

import graphattn as ga
from graphattn.integrations import torch as gtorch

N, C, H = 7, 16, 4
D = C // H
PADDING = torch.zeros(2, N, dtype=torch.bool)
PADDING[1, 5:] = True
MIXERS = {"dot": {}, "rbf": {}, "krause": {"top_k": 3}}


def encoder(mixer="dot", dropout=0.0, **options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(C, H, 32, dropout, batch_first=True, dtype=torch.float64)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return gtorch.convert(model, mixer, **options)


def states():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, N, C, dtype=torch.float64, generator=generator)


def heads_of(projected):
    """Queries and keys [B, H, N, D] of what a projection in one gives, [B, N, 3 C]."""
    q, k, _ = projected.detach().chunk(3, -1)
    return [t.unflatten(-1, (H, D)).transpose(1, 2) for t in (q, k)]


def sigma_of(module):
    if module.options.mixer == "dot":
        return None
    learned = module.log_sigma
    return [D**0.25] * H if learned is None else learned.detach().exp()


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("mixer", MIXERS)
def test_a_converted_encoder_has_the_weights_of_plain_loops(mixer, window):
    model, x = encoder(mixer, window=window, **MIXERS[mixer]), states()
    with torch.no_grad(), ga.diagnostics.record(model) as recording:
        watched = model(x, src_key_padding_mask=PADDING)
    with torch.no_grad():
        assert torch.equal(watched, model(x, src_key_padding_mask=PADDING))
    assert recording.names == ("layers.0.self_attn", "layers.1.self_attn")
    assert recording.missed == {}
    layer = model.layers[0].self_attn

    def may_look(b, h, i, j):
        near = window is None or abs(i - j) <= window
        return near and not PADDING[b, i] and not PADDING[b, j]

    q, k = heads_of(x @ layer.in_proj_weight.T + layer.in_proj_bias)
    top_k = MIXERS[mixer].get("top_k")
    expected = weights_by_loop(q, k, may_look, sigma=sigma_of(layer), top_k=top_k)
    torch.testing.assert_close(recording[0].matrix, expected, rtol=1e-9, atol=1e-12)
    real = ~PADDING
    entropy = -torch.special.xlogy(expected, expected).sum(-1).sum(-1) / real.sum(-1)[:, None]
    torch.testing.assert_close(recording[0].entropy, entropy)
    for b in range(2):
        rows = [i for i in range(1, N) if real[b, i]]
        torch.testing.assert_close(recording[0].sinks[b], expected[b, :, rows, 0].mean(-1))


def test_a_mask_for_every_head_and_sample_is_one_call():
    torch.manual_seed(2)
    old = nn.MultiheadAttention(C, H, batch_first=True, dtype=torch.float64)
    module, x = gtorch.convert(old, "rbf"), states()
    hidden = torch.rand(2, H, N, N) < 0.4
    hidden[..., torch.arange(N), torch.arange(N)] = False
    with ga.diagnostics.record(module) as recording:
        _, returned = module(x, x, x, attn_mask=hidden.flatten(0, 1), average_attn_weights=False)
    q, k = heads_of(x @ module.in_proj_weight.T + module.in_proj_bias)
    expected = weights_by_loop(
        q, k, lambda b, h, i, j: not hidden[b, h, i, j], sigma=sigma_of(module)
    )
    assert len(recording) == 1
    torch.testing.assert_close(recording[0].matrix, expected)
    torch.testing.assert_close(returned.detach(), expected)


@pytest.mark.parametrize("mixer", MIXERS)
def test_timm_attention_has_the_weights_of_plain_loops(mixer):
    kind = gtorch.timm_attention(mixer, grid=(2, 3), radius=1, **MIXERS[mixer])
    torch.manual_seed(3)
    model, x = nn.Sequential(kind(C, H, qkv_bias=True)).double(), states()
    with ga.diagnostics.record(model) as recording:
        model(x)

    def may_look(b, h, i, j):
        if 0 in (i, j):
            return True
        (a, b), (c, d) = divmod(i - 1, 3), divmod(j - 1, 3)
        return abs(a - c) <= 1 and abs(b - d) <= 1

    q, k = heads_of(x @ model[0].qkv.weight.T + model[0].qkv.bias)
    expected = weights_by_loop(q, k, may_look, sigma=sigma_of(model[0]), **MIXERS[mixer])
    assert recording.names == ("0",)
    assert recording.missed == {}
    torch.testing.assert_close(recording[0].matrix, expected)


def test_consensus_is_named_as_what_has_no_weights():
    model = encoder("consensus", layers=1)
    with (
        pytest.warns(UserWarning, match="consensus has no attention weights"),
        ga.diagnostics.record(model) as recording,
    ):
        model(states())
    assert recording.names == ("layers.0.self_attn",)
    assert recording.missed == {"layers.1.self_attn": "consensus has no attention weights"}


@pytest.mark.parametrize("mixer", [*MIXERS, "gka", "vlt"])
def test_attention_switched_off_is_an_output_projection_of_zeros(mixer):
    x = states()
    actual = ga.diagnostics.spectra_without_attention(encoder(mixer), x)
    for name in ("layers.0", "layers.1"):
        other = encoder(mixer)
        attention = other.get_submodule(name).self_attn
        projection = attention.out_proj if mixer in MIXERS else attention.layer.output_proj
        with torch.no_grad():
            for parameter in projection.parameters():
                parameter.zero_()
        expected = ga.diagnostics.hidden_spectra(other, x)
        torch.testing.assert_close(actual[name].spectra, expected.spectra)
        assert not torch.allclose(actual["none"].spectra[-1], expected.spectra[-1])


def test_a_name_as_index_points_to_select():
    model = encoder()
    with torch.no_grad(), ga.diagnostics.record(model) as recording:
        model(states())
    with pytest.raises(TypeError, match=r"select\('layers.0.self_attn'\) to choose calls by"):
        recording["layers.0.self_attn"]
    assert recording.select("layers.0.self_attn")[0] is recording[0]

"""Tokens that may not be seen change no bit: the future, padding, what is out of a window."""

from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, families, inputs, relative_difference, tiny, twins

from graphattn.integrations import transformers as gat

MIXERS: dict[str, dict[str, Any]] = {
    "dot": {"mixer": "dot"},
    "dot-window": {"mixer": "dot", "window": 4},
    "dot-top-k": {"mixer": "dot", "top_k": 3},
    "rbf": {"mixer": "rbf"},
    "rbf-window": {"mixer": "rbf", "window": 4, "sigma": 0.7},
    "krause": {"mixer": "krause", "window": 6, "top_k": 3},
}
CAUSAL = ("llama", "mistral", "gpt2", "gemma3")
BOTH_WAYS = ("bert", "esm", "modernbert", "distilbert")


def configured(name, mixer, **options):
    gat.register()
    model = tiny(name, implementation="graphattn", **options)
    gat.configure(model, **MIXERS[mixer])
    return model


def embedded(name, *, length=16, dtype=torch.float32):
    generator = torch.Generator().manual_seed(4)
    return torch.randn(2, length, 32, generator=generator, dtype=torch.float64).to(dtype)


def outputs(model, x, mask=None):
    with torch.no_grad():
        return model(inputs_embeds=x, attention_mask=mask).logits


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("name", CAUSAL)
def test_the_future_does_not_change_a_bit(name, mixer):
    model, x = configured(name, mixer, dtype=torch.float32), embedded(name)
    first = outputs(model, x)
    for change in (torch.nan, torch.inf, 3.0):
        other = x.clone()
        other[:, 10:] = change
        result = outputs(model, other)
        assert torch.equal(result[:, :10], first[:, :10])
        assert not torch.equal(result[:, 10:], first[:, 10:])


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("name", CAUSAL + BOTH_WAYS)
def test_padding_does_not_change_a_bit(name, mixer, padding):
    model, x = configured(name, mixer, dtype=torch.float32), embedded(name)
    mask = inputs("llama", padding=padding)["attention_mask"]
    real = mask.bool()
    assert not real.all()
    first = outputs(model, x, mask)
    assert torch.isfinite(first[real]).all()
    for change in (torch.nan, torch.inf, 3.0):
        result = outputs(model, torch.where(real[..., None], x, change), mask)
        assert torch.equal(result[real], first[real])


@pytest.mark.parametrize("name", ["bert", "distilbert", "vit"])
@pytest.mark.parametrize("mixer", ["dot-window", "rbf-window", "krause"])
def test_a_window_of_an_encoder_counts_each_side(name, mixer):
    """One layer: a changed token changes those within the window and no bit of the others."""
    model = configured(name, mixer, dtype=torch.float32)
    window = MIXERS[mixer]["window"]
    layer = next(m for _, m in gat_modules(model))
    heads = torch.randn(3, 1, 4, 16, 8, generator=torch.Generator().manual_seed(2))
    first = attend(layer, *heads)
    heads[1:, :, :, 8] = torch.nan
    changed = (attend(layer, *heads) != first).flatten(2).any(-1)[0]
    near = (torch.arange(16) - 8).abs() <= window
    assert not changed[~near].any()
    assert changed[8]
    if MIXERS[mixer].get("top_k") is None:
        assert changed[near].all()


@pytest.mark.parametrize("mixer", ["dot-window", "rbf-window", "krause"])
def test_a_window_of_a_decoder_counts_keys(mixer):
    model = configured("llama", mixer, dtype=torch.float32)
    window = MIXERS[mixer]["window"]
    layer = next(m for _, m in gat_modules(model))
    query = torch.randn(1, 4, 16, 8, generator=torch.Generator().manual_seed(2))
    key, value = torch.randn(2, 1, 2, 16, 8, generator=torch.Generator().manual_seed(3))
    first = attend(layer, query, key, value)
    key[:, :, 5] = torch.nan
    value[:, :, 5] = torch.nan
    changed = (attend(layer, query, key, value) != first).flatten(2).any(-1)[0]
    within = (torch.arange(16) >= 5) & (torch.arange(16) < 5 + window)
    assert not changed[~within].any()
    assert changed[5]


def gat_modules(model):
    from graphattn.integrations.transformers.conversion.modules import attention_modules

    return attention_modules(model)


def attend(layer, query, key, value, mask=None):
    from transformers import AttentionInterface

    function = AttentionInterface()["graphattn"]
    with torch.no_grad():
        return function(layer, query, key, value, mask, scaling=8**-0.5)[0]


def weights_of(outputs):
    """Every layer's weights: of decoder and encoder, and what the decoder reads of the encoder."""
    names = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")
    return [layer for name in names for layer in getattr(outputs, name, None) or ()]


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("name", families())
def test_weights_asked_for_equal_those_of_eager_attention(name, padding):
    if padding is not None and FAMILIES[name].kind == "vision":
        pytest.skip("images are never padded")
    eager, ours = twins(name, dtype=torch.float32)
    given = inputs(name, padding=padding, dtype=torch.float32)
    with torch.no_grad():
        expected = weights_of(eager(**given, output_attentions=True))
        actual = weights_of(ours(**given, output_attentions=True))
        plain = ours(**given).logits
        assert torch.equal(ours(**given, output_attentions=True).logits, plain)
    assert len(actual) == len(expected) >= 2
    mask = given.get("attention_mask")
    for a, b in zip(actual, expected, strict=True):
        assert a.shape == b.shape
        if mask is not None and a.shape[2] == mask.shape[1]:  # rows of padding: we give zeros
            real = mask.bool()
            a, b = a.transpose(1, 2)[real], b.transpose(1, 2)[real]
        assert relative_difference(a, b) < 1e-5

"""A token that may not be seen changes no bit of a converted model, in output or gradient."""

import pytest
import torch
from convertible import ENCODERS, NAMES, V, converted, inputs_of
from tiny_models import logits

from graphattn.integrations.transformers.conversion.modules import attention_modules

OPTIONS = {
    "gka": {},
    "vlt": {"top_k": 5},
    "krause": {"window": 4, "top_k": 3},
    "consensus": {"edge_hidden": 6},
}
TEXT = [name for name in NAMES if name not in ("ViT", "DeiT")]


@pytest.mark.parametrize("mixer", OPTIONS)
@pytest.mark.parametrize("name", TEXT)
def test_a_future_or_padded_token_changes_no_bit(name, mixer):
    for implementation in ("sdpa", "graphattn"):
        model = converted(name, mixer, implementation, **OPTIONS[mixer])
        causal = attention_modules(model)[0][1].is_causal
        for padding in ("left", "right"):
            inputs = inputs_of(name, padding=padding)
            real = inputs["attention_mask"].bool()
            before = logits(model, **inputs)
            padded = {**inputs, "input_ids": inputs["input_ids"].clone()}
            padded["input_ids"][~real] = 7
            if name == "Roberta":  # which counts positions by what is not padding
                padded["position_ids"] = torch.arange(2, 15).expand(2, -1)
                before = logits(model, **inputs, position_ids=padded["position_ids"])
            assert torch.equal(logits(model, **padded)[real], before[real])
            if causal:
                later = {**inputs, "input_ids": inputs["input_ids"].clone()}
                later["input_ids"][:, 6:] = 9
                assert torch.equal(logits(model, **later)[:, :6], logits(model, **inputs)[:, :6])
        assert causal == (name not in ENCODERS)


@pytest.mark.parametrize("mixer", OPTIONS)
@pytest.mark.parametrize("name", ["Llama", "Bert"])
def test_what_is_not_seen_may_be_nan(name, mixer):
    """NaN in padding reaches no output or gradient of a real token; the layer itself is called."""
    model = converted(name, mixer, **OPTIONS[mixer])
    layer = attention_modules(model)[0][1]
    x = torch.randn(2, 9, 32)
    real = torch.ones(2, 9, dtype=torch.bool)
    real[1, :3] = False
    mask = real[:, None, None, :].expand(-1, 1, 9, -1)
    more = {}
    if name == "Llama":
        mask = mask & torch.ones(9, 9).tril().bool()
        more["position_embeddings"] = model.model.rotary_emb(x, torch.arange(9)[None])
    results = []
    for filling in (0.0, float("nan")):
        inputs = x.masked_fill(~real[..., None], filling).requires_grad_()
        layer.zero_grad()
        out = layer(inputs, attention_mask=mask, **more)[0]
        (out[real] * torch.linspace(-1, 1, 32)).sum().backward()
        grads = [p.grad for n, p in layer.named_parameters() if n == "bandwidth.log_sigma"]
        results.append((out[real], inputs.grad[real], *grads))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
        assert b.isfinite().all()


@pytest.mark.parametrize("mixer", OPTIONS)
@pytest.mark.parametrize("name", ["Llama", "Bert", "ModernBert"])
def test_a_sample_does_not_know_of_the_others_in_its_batch(name, mixer):
    """Masks differ between the samples, and each sequence has a safe step of its own.

    Padded on the right: "gka" averages turned features and "consensus" compares turned states by
    matrices that are not turned, so both know absolute positions.
    """
    # In float64: products of other shapes round in other ways, and top_k must not see that.
    model = converted(name, mixer, **OPTIONS[mixer]).double()
    inputs = inputs_of(name, padding="right")
    together = logits(model, **inputs)[1, :9]
    alone = logits(model, **{key: tensor[1:, :9] for key, tensor in inputs.items()})[0]
    torch.testing.assert_close(together, alone, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("mixer", OPTIONS)
def test_packed_sequences_are_those_sequences(mixer):
    """Positions that begin again tell where one ends (transformers wants no cache for it)."""
    model = converted("Llama", mixer, **OPTIONS[mixer])
    tokens = torch.randint(4, V, (1, 12))
    positions = torch.tensor([[*range(5), *range(7)]])
    packed = {"input_ids": tokens, "position_ids": positions, "use_cache": False}
    parts = [{"input_ids": t, "use_cache": False} for t in tokens.split([5, 7], dim=1)]
    apart = torch.cat([logits(model, **part) for part in parts], dim=1)
    torch.testing.assert_close(logits(model, **packed), apart, rtol=1e-4, atol=1e-5)


def test_packed_sequences_each_have_a_safe_step_of_their_own():
    """A gradient step with step_size="auto" takes a maximum of the sequence, not of others."""
    model = converted("Bert", "consensus", update="energy", **OPTIONS["consensus"])
    layer = attention_modules(model)[0][1]
    x = torch.randn(1, 12, 32)
    sequence = torch.tensor([0] * 5 + [1] * 7)
    mask = (sequence[:, None] == sequence)[None, None]
    whole = layer(x, mask)[0]
    for part in (slice(0, 5), slice(5, 12)):
        torch.testing.assert_close(whole[:, part], layer(x[:, part])[0], rtol=1e-4, atol=1e-5)
    far = x.clone()
    far[:, 7] *= 30
    assert torch.equal(layer(far, mask)[0][:, :5], whole[:, :5])

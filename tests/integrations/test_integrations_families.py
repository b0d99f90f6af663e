"""Attention by "graphattn" with mixer="dot" and no window is the model's own, in every family."""

import pytest
import torch
from tiny_models import (
    FAMILIES,
    exact_softmax,
    families,
    gradients,
    inputs,
    logits,
    real,
    relative_difference,
    twins,
)

PADDING = (None, "left", "right")
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
OLD = "esmc" not in families()
# OPT counts its own positions, and GPT-OSS (older versions: Llama 4) makes its mask without them,
# whatever the implementation.
WITHOUT_POSITIONS = ("opt", "gpt_oss", *(("llama4",) if OLD else ()))
PACKED = [name for name in families("decoder") if name not in WITHOUT_POSITIONS]


def rows(name, outputs, given):
    return outputs if FAMILIES[name].kind == "vision" else real(outputs, given)


def paddings(name):
    """Images are never padded."""
    return (None,) if FAMILIES[name].kind == "vision" else PADDING


CASES = [pytest.param(n, p, id=f"{n}-{p}") for n in families() for p in paddings(n)]


@pytest.mark.parametrize(("name", "padding"), CASES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_logits_equal_those_of_eager_attention(name, padding, dtype):
    eager, ours = twins(name, dtype=dtype)
    given = inputs(name, padding=padding, dtype=dtype)
    with exact_softmax():
        expected = rows(name, logits(eager, **given), given)
    actual = rows(name, logits(ours, **given), given)
    assert relative_difference(actual, expected) < TOLERANCE[dtype]


@pytest.mark.long
@pytest.mark.parametrize(("name", "padding"), CASES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_gradients_of_the_loss_equal_those_of_eager_attention(name, padding, dtype):
    eager, ours = twins(name, dtype=dtype)
    given = inputs(name, padding=padding, dtype=dtype)
    with exact_softmax():
        expected = gradients(eager, given)
    actual = gradients(ours, given)
    assert actual.keys() == expected.keys()
    for parameter in expected:
        difference = relative_difference(actual[parameter], expected[parameter])
        assert difference < TOLERANCE[dtype], parameter


@pytest.mark.parametrize("name", PACKED)
def test_texts_packed_by_position_do_not_see_each_other(name):
    eager, ours = twins(name)
    tokens = inputs(name, batch=1, length=24)["input_ids"]
    lengths = (9, 4, 11)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    result = logits(ours, input_ids=tokens, position_ids=positions, use_cache=False)
    with exact_softmax():
        packed = logits(eager, input_ids=tokens, position_ids=positions, use_cache=False)
        alone = [
            logits(eager, input_ids=text, use_cache=False) for text in tokens.split(lengths, 1)
        ]
    assert relative_difference(result, packed) < 1e-10
    assert relative_difference(result, torch.cat(alone, 1)) < 1e-6  # rotary tables are float32


@pytest.mark.parametrize("dtype", [torch.bool, torch.float64], ids=str)
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_masks_of_four_dimensions_are_followed_to_the_letter(name, heads, dtype):
    eager, ours = twins(name)
    tokens = inputs(name)["input_ids"]
    seen = torch.rand(2, heads, 16, 16, generator=torch.Generator().manual_seed(3)) < 0.4
    seen |= torch.eye(16, dtype=torch.bool)
    added = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    with exact_softmax():
        expected = logits(eager, input_ids=tokens, attention_mask=added)
    mask = seen if dtype == torch.bool else added
    actual = logits(ours, input_ids=tokens, attention_mask=mask)
    assert relative_difference(actual, expected) < 1e-10


@pytest.mark.skipif(OLD, reason="ESM C came later")
def test_chains_of_a_protein_complex_do_not_see_each_other():
    eager, ours = twins("esmc")
    tokens = inputs("esmc")["input_ids"]
    chains = torch.tensor([[0] * 5 + [1] * 11, [0] * 8 + [1] * 4 + [-1] * 4])
    given = {"input_ids": tokens, "sequence_id": chains}
    result = logits(ours, **given)
    assert relative_difference(result, logits(eager, **given)) < 1e-10
    other = torch.where(chains == 1, 4 + (tokens + 3) % 46, tokens)
    changed = logits(ours, input_ids=other, sequence_id=chains)
    assert torch.equal(result[chains == 0], changed[chains == 0])
    assert not torch.equal(result[chains == 1], changed[chains == 1])


@pytest.mark.parametrize("name", [n for n in ("bart", "t5") if n in families()])
@pytest.mark.parametrize("padding", ["left", "right"])
def test_a_decoder_may_be_padded_beside_its_encoder(name, padding):
    eager, ours = twins(name)
    given = inputs(name, padding=padding)
    mask = torch.ones_like(given["decoder_input_ids"])
    mask[0, slice(None, 4) if padding == "left" else slice(-4, None)] = 0
    given["decoder_attention_mask"] = mask
    kept = mask.bool()
    actual, expected = logits(ours, **given)[kept], logits(eager, **given)[kept]
    assert relative_difference(actual, expected) < 1e-10


def test_a_bidirectional_gemma_sees_both_sides():
    """Embedding models are decoders without a causal mask, told so by their config."""
    eager, ours = twins("gemma3", use_bidirectional_attention=True)
    given = inputs("gemma3", padding="right")
    with exact_softmax():
        expected = real(logits(eager, **given), given)
    actual = real(logits(ours, **given), given)
    assert relative_difference(actual, expected) < 1e-10
    last = {**given, "input_ids": given["input_ids"].clone()}
    last["input_ids"][0, -1] = 7
    assert not torch.equal(logits(ours, **last)[0, 10], logits(ours, **given)[0, 10])


@pytest.mark.parametrize("name", ["bert", "roberta", "esm"])
def test_encoders_used_as_decoders_are_causal(name):
    eager, ours = twins(name, is_decoder=True)
    given = inputs(name, padding="right")
    with exact_softmax():
        expected = real(logits(eager, **given), given)
    assert relative_difference(real(logits(ours, **given), given), expected) < 1e-10


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_mask_of_ones_is_no_mask(name):
    _, ours = twins(name)
    tokens = inputs(name)["input_ids"]
    ones = torch.ones_like(tokens)
    assert torch.equal(
        logits(ours, input_ids=tokens, attention_mask=ones), logits(ours, input_ids=tokens)
    )

"""Converted layers generate: with any cache they say what they say without one."""

import pytest
import torch
import transformers
from convertible import DECODERS, NAMES, PAD, converted, inputs_of, model_of
from tiny_models import CACHE
from transformers import DynamicCache, StaticCache

from graphattn.integrations import transformers as gat

OPTIONS = {
    "gka": {},
    "vlt": {"top_k": 5},
    "krause": {"window": 5, "top_k": 3},
    "consensus": {"edge_hidden": 6},
}
MASKS = [  # the implementation decides which kind of mask a layer is given
    *((name, "sdpa") for name in DECODERS if name in NAMES),
    *((name, kind) for name in ("Llama", "Gemma3", "GPT2") for kind in ("eager", "graphattn")),
]


def in_pieces(model, inputs, pieces, cache):
    tokens, mask = inputs["input_ids"], inputs["attention_mask"]
    result, start = [], 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    takes_positions = "OPT" not in type(model).__name__
    for length in pieces:
        stop = start + length
        given = {"position_ids": positions[:, start:stop]} if takes_positions else {}
        with torch.no_grad():
            out = model(
                input_ids=tokens[:, start:stop],
                attention_mask=mask[:, :stop],
                **{CACHE: cache},
                use_cache=True,
                **given,
            )
        result.append(out.logits)
        start = stop
    return torch.cat(result, dim=1)[mask.bool()]


@pytest.mark.parametrize("mixer", OPTIONS)
@pytest.mark.parametrize(("name", "implementation"), MASKS)
def test_pieces_of_a_prompt_and_single_tokens_are_the_whole(name, mixer, implementation):
    """A prompt in two pieces, then token by token, padded on the left; growing and fixed caches."""
    model = converted(name, mixer, implementation, **OPTIONS[mixer]).double()
    inputs = inputs_of(name, length=15)
    whole = in_pieces(model, inputs, [15], None)
    growing = DynamicCache(config=model.config)
    fixed = StaticCache(config=model.config, max_cache_len=24)
    for cache in (growing, fixed):
        result = in_pieces(model, inputs, [7, 4, 1, 1, 1, 1], cache)
        torch.testing.assert_close(result, whole, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("mixer", OPTIONS)
def test_generation_with_a_cache_is_generation_without(mixer):
    model = converted("Llama", mixer, **OPTIONS[mixer]).double()
    inputs = inputs_of("Llama")
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": PAD}
    for search in ({}, {"num_beams": 3}):
        mine = model.generate(**inputs, **options, **search)
        assert torch.equal(mine, model.generate(**inputs, **options, **search, use_cache=False))
    assert mine[:, 13:].unique().numel() > 1


def test_a_gradient_step_refuses_a_cache():
    model = model_of("Bert")
    gat.convert(model, mixer="consensus", edge_hidden=4)
    layer = model.bert.encoder.layer[0].attention.self
    with pytest.raises(
        ValueError, match=r"cache \(past_key_values\) must be None with update='energy'"
    ):
        layer(torch.randn(1, 3, 32), None, DynamicCache())


def test_the_cache_of_an_encoder_decoder_serves_too():
    """BERT as a decoder keeps one cache for itself and one for cross-attention."""
    model = model_of("Bert", is_decoder=True, add_cross_attention=True)
    chosen = [0, 2]  # self-attention of both layers; 1 and 3 are cross-attention
    with pytest.raises(ValueError, match="cross-attention"):
        gat.convert(model, mixer="krause", top_k=3)
    assert gat.convert(model, mixer="krause", top_k=3, layers=chosen) == chosen
    decoder, encoded = model.bert, torch.randn(1, 6, 32)
    tokens = torch.randint(4, 50, (1, 9))
    with torch.no_grad():
        whole = decoder(tokens, encoder_hidden_states=encoded).last_hidden_state
        cache = transformers.EncoderDecoderCache(DynamicCache(), DynamicCache())
        pieces = [
            decoder(
                tokens[:, i : i + 3],
                encoder_hidden_states=encoded,
                **{CACHE: cache},
                use_cache=True,
            ).last_hidden_state
            for i in (0, 3, 6)
        ]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-4, atol=1e-5)

"""Generated tokens are those of eager attention, whatever the cache, and however they are found."""

from typing import Any

import pytest
import torch
from tiny_models import (
    CACHE,
    PAD,
    exact_softmax,
    families,
    inputs,
    logits,
    relative_difference,
    twins,
)
from transformers import DynamicCache
from transformers.cache_utils import Cache, QuantizedLayer

from graphattn.integrations import transformers as gat

DECODERS = families("decoder")
WRITERS = [*DECODERS, *families("encoder-decoder")]
SOME = [name for name in ("llama", "mistral", "gemma2", "gpt2") if name in DECODERS]
VARIED = {"no_repeat_ngram_size": 2}  # or small models write one word again and again
CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "none": {"use_cache": False},
}
MIXERS: dict[str, dict[str, Any]] = {
    "dot-window": {"mixer": "dot", "window": 5},
    "dot-top-k": {"mixer": "dot", "top_k": 3},
    "rbf": {"mixer": "rbf", "sigma": 1.5},
    "krause": {"mixer": "krause", "window": 7, "top_k": 3},
    "some-layers": {"mixer": "krause", "window": 4, "top_k": 2, "layers": [1]},
}


def generate(model, given, *, tokens=64, **options):
    given = {k: v for k, v in given.items() if not k.startswith("decoder")}
    with exact_softmax():
        return model.generate(
            **given, do_sample=False, max_new_tokens=tokens, pad_token_id=PAD, **options
        )


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", WRITERS)
def test_generated_tokens_equal_those_of_eager_attention(name, cache):
    """The second of two texts is 5 tokens shorter, and padded on the left."""
    eager, ours = twins(name)
    given = inputs(name, length=11, padding="left")
    options = {"tokens": 24, **VARIED, **CACHES[cache]}
    expected = generate(eager, given, **options)
    assert len(expected[0].unique()) > 4
    assert torch.equal(generate(ours, given, **options), expected)


@pytest.mark.long
@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_every_mixer_generates_the_same_with_a_cache_and_without(name, mixer, cache):
    if name == "gemma2" and MIXERS[mixer]["mixer"] != "dot":
        pytest.skip("softcap is for dot products")
    ours = twins(name)[1]
    gat.configure(ours, **MIXERS[mixer])
    given = inputs(name, length=11, padding="left")
    more = {"tokens": 24, "output_logits": True, "return_dict_in_generate": True}
    without = generate(ours, given, use_cache=False, **more)
    text = generate(ours, given, **CACHES[cache], **more)
    assert torch.equal(text.sequences, without.sequences)
    for a, b in zip(text.logits, without.logits, strict=True):
        assert relative_difference(a, b) < 1e-6  # norms and rotary tables are float32


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("options", [{}, {"mixer": "krause", "window": 6, "top_k": 3}], ids=str)
def test_a_prompt_in_pieces_equals_the_whole_prompt(name, options):
    if options and name == "gemma2":
        pytest.skip("softcap is for dot products")
    eager, ours = twins(name)
    given = inputs(name, length=19)["input_ids"]
    if options:
        gat.configure(ours, **options)
        expected = logits(ours, input_ids=given, use_cache=False)
    else:
        with exact_softmax():
            expected = logits(eager, input_ids=given)
    cache, actual = DynamicCache(config=ours.config), []
    for piece in given.split((7, 1, 8, 3), 1):
        actual.append(logits(ours, input_ids=piece, **{CACHE: cache}))
    assert relative_difference(torch.cat(actual, 1), expected) < 1e-6


@pytest.mark.long
@pytest.mark.parametrize("name", [*SOME, *[n for n in ("bart", "t5") if n in WRITERS]])
def test_beam_search_finds_the_same_texts(name):
    eager, ours = twins(name)
    given = inputs(name, length=9, padding="left")
    more = {"tokens": 12, "num_beams": 3, "num_return_sequences": 2}
    assert torch.equal(generate(ours, given, **more), generate(eager, given, **more))


@pytest.mark.long
@pytest.mark.parametrize("name", SOME)
def test_assisted_generation_finds_the_same_text(name):
    eager, ours = twins(name)
    given = inputs(name, batch=1, length=9)
    expected = generate(eager, given, tokens=32)
    assistant = twins("llama", seed=5)[1]
    with exact_softmax():
        assert torch.equal(generate(ours, given, tokens=32, assistant_model=assistant), expected)
        assisted = generate(ours, given, tokens=32, assistant_model=ours)  # everything is accepted
        looked_up = generate(ours, given, tokens=32, prompt_lookup_num_tokens=3)
    assert torch.equal(assisted, expected)
    assert torch.equal(looked_up, expected)


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_a_window_of_configure_goes_on_beyond_a_sliding_cache(name):
    """The model's own window forgets old keys: a narrower one of ours still counts from the end."""
    eager, ours = twins(name)
    gat.configure(ours, mixer="dot", window=4)
    given = inputs(name, length=15)["input_ids"]
    cache = DynamicCache(config=ours.config)
    results = [logits(ours, input_ids=given[:, :9], **{CACHE: cache})]
    for t in range(9, 15):
        results.append(logits(ours, input_ids=given[:, t : t + 1], **{CACHE: cache}))
    i = torch.arange(15)
    seen = (i <= i[:, None]) & (i > i[:, None] - 4)
    added = torch.zeros(15, 15).double().masked_fill(~seen, -torch.inf).expand(2, 1, 15, 15)
    with exact_softmax():
        mask = added if name == "mistral" else dict.fromkeys(eager.config.layer_types, added)
        expected = logits(eager, input_ids=given, attention_mask=mask)
    assert relative_difference(torch.cat(results, 1), expected) < 1e-6


class Rounded(QuantizedLayer):
    """A quantised cache without a package: sixteenths, and three tokens that wait."""

    def __init__(self):
        super().__init__(residual_length=3)

    def _quantize(self, tensor, axis):
        return (16 * tensor).round().to(torch.int32)

    def _dequantize(self, tensor):
        return tensor.double() / 16


@pytest.mark.parametrize("padding", [None, "left"])
def test_a_quantised_cache_is_read_as_eager_attention_reads_it(padding):
    eager, ours = twins("llama")
    given = inputs("llama", length=8, padding=padding)
    results = [
        generate(model, given, tokens=20, **{CACHE: Cache(layers=[Rounded(), Rounded()])})
        for model in (eager, ours)
    ]
    assert torch.equal(*results)
    assert not torch.equal(results[0], generate(eager, given, tokens=20)) or padding is None

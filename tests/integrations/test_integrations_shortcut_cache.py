"""The Krause shortcut beside caches: it remembers what the model remembers, and no more."""

import copy
import functools

import pytest
import torch

pytest.importorskip("transformers")

from shortcut_oracle import FAMILIES, left_padded, tiny_model, with_shortcut
from tiny_models import CACHE
from transformers import DynamicCache, StaticCache

from graphattn.integrations import transformers as gat

IMPLEMENTATIONS = ["sdpa", "eager", "graphattn"]


def tokens_of(batch=2, length=12, seed=0):
    return torch.randint(3, 50, (batch, length), generator=torch.Generator().manual_seed(seed))


def in_pieces(model, tokens, sizes, cache=None, mask=None):
    """Logits of all tokens, handed over a few at a time."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    out, done = [], 0
    with torch.no_grad():
        for size in sizes:
            done += size
            given = {} if mask is None else {"attention_mask": mask[:, :done]}
            out.append(model(tokens[:, done - size : done], **{CACHE: cache}, **given).logits)
    return torch.cat(out, 1), cache


def generated(model, tokens, **given):
    options = {"do_sample": False, "max_new_tokens": 64, "pad_token_id": 0, "eos_token_id": None}
    return model.generate(tokens, **options | given)


@pytest.mark.every_case
@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_beside_a_cache_give_what_the_whole_gives(family):
    """The past is remembered: one by one, in chunks, padded on the left, beyond every window."""
    model, tokens = with_shortcut(family), tokens_of(2, 30)
    mask = left_padded([30, 21], 30)
    for padding in (None, mask):
        with torch.no_grad():
            whole = model(tokens, attention_mask=padding, use_cache=False).logits
        real = mask.bool() if padding is not None else torch.ones_like(mask).bool()
        for sizes in ([1] * 30, [12, 7, 1, 10]):
            result, _ = in_pieces(model, tokens, sizes, mask=padding)
            torch.testing.assert_close(result[real], whole[real], rtol=1e-5, atol=1e-5)
    # It would show if the shortcut forgot: its say in these models is large.
    alone, _ = in_pieces(model, tokens[:, 20:], [10])
    assert (alone - whole[:, 20:]).abs().max() > 0.01


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_pieces_in_every_implementation_and_cache(implementation, cache):
    gat.register()
    model, tokens = with_shortcut(), tokens_of(2, 20)
    model.set_attn_implementation(implementation)
    mask = left_padded([20, 13], 20)
    with torch.no_grad():
        whole = model(tokens, attention_mask=mask, use_cache=False).logits
    held = StaticCache(model.config, max_cache_len=26) if cache == "static" else None
    result, _ = in_pieces(model, tokens, [2, 1, 1, 7, 1, 1, 7], held, mask)
    torch.testing.assert_close(result[mask.bool()], whole[mask.bool()], rtol=1e-5, atol=1e-5)


@functools.cache
def without_a_cache(family, batch=2, **given):
    """64 tokens of a model that computes all of the text for every one, and their prompt's mask."""
    model, tokens, mask = with_shortcut(family), tokens_of(batch), left_padded([12, 8], 12)[:batch]
    return (
        model,
        tokens,
        mask,
        generated(model, tokens, attention_mask=mask, use_cache=False, **given),
    )


def slowly(*case):
    return pytest.param(*case, marks=pytest.mark.long)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "given"),
    [
        ("Llama", {}),
        ("Llama", {"cache_implementation": "static"}),
        slowly("Llama", {"prefill_chunk_size": 5}),
        slowly("Mistral", {}),
        slowly("Mistral", {"cache_implementation": "static"}),
        slowly("Mistral", {"prefill_chunk_size": 5}),
        slowly("Qwen2", {}),
        slowly("Qwen3", {}),
    ],
)
def test_generation_with_a_cache_is_that_without(family, given):
    model, tokens, mask, plain = without_a_cache(family)
    assert torch.equal(generated(model, tokens, attention_mask=mask, **given), plain)
    assert plain[:, 12:].unique().numel() > 5  # not one token again and again


def test_a_cache_goes_back_branches_and_follows_beams():
    model, tokens = with_shortcut(), tokens_of(3, 24)
    with torch.no_grad():
        whole = model(tokens, use_cache=False).logits
    _, cache = in_pieces(model, tokens, [20])
    cache.crop(-13)
    actual, _ = in_pieces(model, tokens[:, 7:], [17], copy.deepcopy(cache))
    torch.testing.assert_close(actual, whole[:, 7:], rtol=1e-5, atol=1e-5)
    order = torch.tensor([2, 0, 0])
    cache.reorder_cache(order)
    turned = torch.cat([tokens[order, :7], tokens[:, 7:]], 1)
    with torch.no_grad():
        expected = model(turned, use_cache=False).logits[:, 7:]
    actual, _ = in_pieces(model, tokens[:, 7:], [1] * 17, cache)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_everything_remembered_is_in_the_cache():
    """Two generations in turns do not meet, and a cache that is reset remembers nothing."""
    model, tokens = with_shortcut(), tokens_of(2, 16)
    first, second = tokens[:1], tokens[1:]
    expected = [in_pieces(model, text, [8, 8])[0] for text in (first, second)]
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    parts = [[], []]
    for start in (0, 8):
        for i, text in enumerate((first, second)):
            part, _ = in_pieces(model, text[:, start : start + 8], [8], caches[i])
            parts[i].append(part)
    for actual, right in zip(parts, expected, strict=True):
        assert torch.equal(torch.cat(actual, 1), right)
    caches[0].reset()
    if caches[0].get_seq_length():  # older versions of transformers leave zeros behind
        return
    again, _ = in_pieces(model, second, [8, 8], caches[0])
    assert torch.equal(again, expected[1])


def test_only_layers_with_a_shortcut_take_more_room():
    model, tokens = with_shortcut(layers=[1]), tokens_of()
    _, cache = in_pieces(model, tokens, [12])
    assert [layer.keys.shape[1] for layer in cache.layers] == [2, 4]


def test_a_cache_of_another_model_is_refused():
    model, tokens = with_shortcut(), tokens_of()
    _, cache = in_pieces(tiny_model(), tokens, [12])
    with pytest.raises(
        ValueError, match=r"cache \(past_key_values\) must have 4 heads in layer 0 .*got 2"
    ):
        in_pieces(model, tokens, [1], cache)


@pytest.mark.parametrize("name", ["read_index", "block_table"])
def test_continuous_batching_is_refused(name):
    model = with_shortcut("Llama")
    with pytest.raises(ValueError, match=rf"{name} must be None .* continuous batching"):
        model(tokens_of(1, 8), **{name: [torch.zeros(8, dtype=torch.int64)]})


@pytest.mark.long
@pytest.mark.parametrize("given", [{}, {"cache_implementation": "static"}])
def test_beams_with_a_cache_are_those_without(given):
    model, tokens, mask, plain = without_a_cache("Llama", num_beams=3)
    assert torch.equal(generated(model, tokens, attention_mask=mask, num_beams=3, **given), plain)

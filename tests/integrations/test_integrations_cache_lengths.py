"""No key vanishes: a call with more keys than its mask is an error, or reads all of them."""

import pytest
import torch
from convertible import model_of
from tiny_models import CACHE, exact_softmax, families, inputs, logits, relative_difference, tiny
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import Cache
from transformers.masking_utils import causal_mask_function

from graphattn.integrations import transformers as gat
from graphattn.integrations.transformers.attention import graph_attention
from graphattn.integrations.transformers.masks.mask_function import fitted, graph_mask

ENCODERS = [name for name in ("bert", "roberta") if name in families("encoder")]
DECODERS = [name for name in families("decoder") if name in ("llama", "mistral", "gpt2", "gpt_oss")]
REFUSED = "attention_mask must have"


def pair(name):
    """Two models with the same weights: transformers' own attention, and ours."""
    gat.register()
    theirs = "eager" if name == "gpt_oss" else "sdpa"
    models = tiny(name, implementation=theirs), tiny(name, implementation="graphattn")
    models[1].load_state_dict(models[0].state_dict())
    return models


def held(model, lengths, cache=None, batch=2):
    """A cache whose layers hold random keys and values of these lengths."""
    cache = DynamicCache() if cache is None else cache
    config, generator = model.config, torch.Generator().manual_seed(0)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for layer, length in enumerate(lengths):
        if length:
            shape = (2, batch, heads, length, dim)
            cache.update(*torch.randn(shape, generator=generator, dtype=torch.float64), layer)
    return cache


@pytest.mark.parametrize("queries", [3, 1])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_reads_cached_keys_and_all_new_ones(name, masked, queries):
    """PEFT's prefix tuning passes a cache to an encoder."""
    theirs, ours = pair(name)
    given = {"input_ids": inputs(name, length=queries)["input_ids"]}
    if masked:
        given["attention_mask"] = torch.ones(2, 2 + queries, dtype=torch.long)
    for wrap in (lambda cache: cache, lambda cache: EncoderDecoderCache(cache, DynamicCache())):
        expected = logits(theirs, **given, **{CACHE: wrap(held(theirs, [2, 2]))})
        actual = logits(ours, **given, **{CACHE: wrap(held(theirs, [2, 2]))})
        assert relative_difference(actual, expected) < 1e-9
    given["attention_mask"] = torch.tensor([[1] * queries, [0] + [1] * (queries - 1)])
    if queries > 1:
        with pytest.raises(ValueError, match=f"{REFUSED} {2 + queries} keys"):
            logits(ours, **given, **{CACHE: held(theirs, [2, 2])})


def test_a_window_of_an_encoder_counts_from_the_last_cached_keys():
    _, ours = pair("bert")
    gat.configure(ours, window=2)
    tokens = inputs("bert", length=5)["input_ids"]
    i = torch.arange(5)
    seen = (i[:, None] + 3 - torch.arange(8)).abs() <= 2
    actual = logits(ours, input_ids=tokens, **{CACHE: held(ours, [3, 3])})
    gat.configure(ours)
    expected = logits(
        ours,
        input_ids=tokens,
        attention_mask=seen.expand(2, 1, 5, 8),
        **{CACHE: held(ours, [3, 3])},
    )
    assert relative_difference(actual, expected) < 1e-9


@pytest.mark.parametrize("first", [2, 0])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", DECODERS)
def test_layers_that_hold_different_numbers_of_tokens_are_refused(name, padded, first):
    _, ours = pair(name)
    tokens = inputs(name, length=3)["input_ids"]
    given = {"input_ids": tokens}
    if padded:
        given["attention_mask"] = torch.ones(2, first + 3, dtype=torch.long)
        given["attention_mask"][1, 0] = 0
    lengths = [first, 5, first][: ours.config.num_hidden_layers]
    with pytest.raises(ValueError, match=f"{REFUSED} 8 keys.*got {first + 3}"):
        logits(ours, **given, **{CACHE: held(ours, lengths)})
    equal = [first] * ours.config.num_hidden_layers
    assert logits(ours, **given, **{CACHE: held(ours, equal)}).isfinite().all()


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "graphattn"])
@pytest.mark.parametrize("first", [2, 0])
def test_converted_layers_refuse_them_too(first, implementation):
    """The masks of "sdpa" are None where the first layer holds no tokens."""
    gat.register()
    model = model_of("Llama", num_hidden_layers=2).double()
    model.set_attn_implementation(implementation)
    gat.convert(model, mixer="vlt")
    cache, tokens = DynamicCache(), torch.randint(4, 50, (2, 3))
    if first:
        model(tokens[:, :first], **{CACHE: cache})
    more = DynamicCache()
    model(torch.randint(4, 50, (2, 5)), **{CACHE: more})
    cache.update(more.layers[1].keys, more.layers[1].values, 1)
    with pytest.raises(ValueError, match=f"{REFUSED}|must hold equally many tokens"):
        model(tokens, **{CACHE: cache})


@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("pieces", [[5, 4], [9], [4, 1, 4]], ids=str)
@pytest.mark.parametrize("name", DECODERS)
def test_empty_places_of_a_static_cache_are_left_out(name, pieces, padding):
    theirs, ours = pair(name)
    given = inputs(name, length=9, padding=padding)
    cache, start, actual = StaticCache(config=ours.config, max_cache_len=14), 0, []
    for length in pieces:
        stop = start + length
        part = {"input_ids": given["input_ids"][:, start:stop]}
        if padding is not None:
            part["attention_mask"] = given["attention_mask"][:, :stop]
        actual.append(logits(ours, **part, **{CACHE: cache}))
        start = stop
    with exact_softmax():
        expected = logits(theirs, **given)
    real = torch.ones(2, 9, dtype=torch.bool)
    if padding is not None:
        real = given["attention_mask"].bool()
    if padding is None or "position_ids" not in given:
        assert relative_difference(torch.cat(actual, 1)[real], expected[real]) < 1e-6


def test_a_dense_mask_of_a_static_cache_says_which_places_are_filled():
    """Queries see tokens of their own kind: that is no band."""
    kind = torch.tensor([0, 0, 1, 1, 0, 1, 0, 0, 0, 0])

    def same_kind(batch, head, query, key):
        return (kind[query] == kind[key]) & (key < 7)

    mask = graph_mask(1, 4, 10, 3, mask_function=same_kind)
    expected = (kind[3:7, None] == kind[None, :7])[None, None]
    assert torch.equal(fitted(mask, 4, 10), expected)
    assert torch.equal(fitted(mask.clone(), 4, 10), expected)  # on another device, for example
    with pytest.raises(ValueError, match=f"{REFUSED} 9 keys"):
        fitted(mask, 4, 9)


@pytest.mark.parametrize("shape", [(1, 1, 3, 4), (2, 4, 3, 1), (2, 1, 1, 4), (1, 1, 3, 6)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float64])
def test_a_dense_mask_of_another_number_of_keys_is_refused(shape, dtype):
    module = torch.nn.Module()
    query, key = torch.randn(2, 4, 3, 8), torch.randn(2, 4, 5, 8)
    with pytest.raises(ValueError, match=f"{REFUSED} 5 keys, .* got {shape[-1]}"):
        graph_attention(module, query, key, key, torch.ones(shape, dtype=dtype))


@pytest.mark.parametrize("keys", [4, 6])
def test_a_position_bias_of_another_number_of_keys_is_refused(keys):
    """T5 computes it once, for the keys of its first layer."""
    query, key = torch.randn(2, 4, 1, 8), torch.randn(2, 4, 5, 8)
    bias = torch.zeros(1, 4, 1, keys)
    with pytest.raises(ValueError, match="position_bias must have 5 keys"):
        graph_attention(torch.nn.Module(), query, key, key, None, position_bias=bias)


def test_a_causal_mask_fits_only_its_own_keys():
    mask = graph_mask(1, 4, 6, 2, mask_function=causal_mask_function)
    assert fitted(mask, 4, 6) is mask
    for keys in (4, 5, 7, 9):
        with pytest.raises(ValueError, match=f"{REFUSED} {keys} keys"):
            fitted(mask, 4, keys)
    with_room = graph_mask(1, 4, 8, 2, mask_function=causal_mask_function)
    assert fitted(with_room, 4, 8) is with_room
    for keys in (4, 6):  # no place is left, or the newest tokens have none
        with pytest.raises(ValueError, match=f"{REFUSED} {keys} keys"):
            fitted(with_room, 4, keys)


def test_a_quantised_cache_in_front_of_an_encoder_is_read():
    from test_integrations_generation import Rounded

    theirs, ours = pair("bert")
    tokens = inputs("bert", length=6)["input_ids"]
    results = [
        logits(
            model, input_ids=tokens, **{CACHE: held(theirs, [2, 2], Cache([Rounded(), Rounded()]))}
        )
        for model in (theirs, ours)
    ]
    assert relative_difference(*results) < 1e-9

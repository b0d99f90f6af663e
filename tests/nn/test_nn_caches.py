"""Caches go back, branch and follow beams; what was taken back has never been."""

import copy
import pickle
import random

import pytest
import torch
from nn_by_hand import DIM, Case
from nn_steps import STEPPING, causal, poisoned, random_pieces, stream

import graphattn as ga

EVERY_LAYER = pytest.mark.parametrize("case", STEPPING, ids=str)
BACKENDS = pytest.mark.parametrize("backend", ["auto", "reference"])
COPIES = {
    "clone": lambda cache: cache.clone(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
}


def texts(*shape, dtype=torch.float64):
    return torch.randn(*shape, DIM, dtype=dtype)


@EVERY_LAYER
@BACKENDS
@pytest.mark.parametrize("window", [1, 4, 9, None])
def test_what_was_taken_back_has_never_been(case, backend, window):
    """Tokens taken back leave no trace, to the last bit, even where they were padding or NaN."""
    layer, rng = case.make(), random.Random(f"{case} {window}")
    for rollback in (1, 3, 20):
        cache = poisoned(layer.init_cache(2, window, rollback=rollback))
        with ga.use_backend(backend):
            for _ in range(4):
                known = rng.randint(1, 12)
                stream(layer, texts(2, known), cache, random_pieces(known, rng))
                twin, guess = cache.clone(), rng.randint(1, rollback)
                wrong = texts(2, guess)
                wrong[torch.rand(2, guess) < 0.3] = torch.nan
                padding = torch.rand(2, guess) < 0.5 if rng.random() < 0.5 else None
                stream(layer, wrong, cache, random_pieces(guess, rng), padding)
                cache.truncate(twin.position)
                assert (cache.position, cache.buffers.keys()) == (
                    twin.position,
                    twin.buffers.keys(),
                )
                next_ones, pieces = texts(2, 14), random_pieces(14, rng)
                after = stream(layer, next_ones, cache.clone(), pieces)
                assert after.isfinite().all()
                assert torch.equal(after, stream(layer, next_ones, twin, pieces))


@EVERY_LAYER
@pytest.mark.parametrize(("window", "rollback"), [(1, 0), (1, 2), (5, 0), (5, 3), (2, 30)])
def test_every_length_that_is_kept_can_be_gone_back_to_and_no_other(case, window, rollback):
    layer, x = case.make(), texts(2, 60)
    everything = layer(x, causal(60, window))
    for seen in (1, 3, window + rollback, window + rollback + 1, 50):
        cache = layer.init_cache(2, window, rollback=rollback)
        stream(layer, x[:, :seen], cache)
        least = 0 if seen <= window + rollback else seen - rollback
        assert cache.min_length == least
        for length in range(seen + 1):
            shorter = cache.clone()
            if 0 < length < least:
                with pytest.raises(
                    ValueError, match=rf"length must be {least} to {seen} .* {length}"
                ):
                    shorter.truncate(length)
                assert shorter.position == seen
                continue
            shorter.truncate(length)
            assert shorter.position == length
            y = stream(layer, x[:, length : length + 8], shorter)
            expected = everything[:, length : length + 8]
            torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-12)


def test_going_back_does_not_bring_back_what_was_forgotten():
    layer = Case("KrauseAttention", {"rope": True}).make()
    cache = layer.init_cache(2, window=5, rollback=3)
    layer.step(texts(2, 20), cache)
    cache.truncate(17)
    for length in (16, 15, 1):
        with pytest.raises(ValueError, match=r"length must be 17 to 17 .*rollback = 3.*rollback=d"):
            cache.truncate(length)
    layer.step(texts(2, 2), cache)
    assert (cache.position, cache.min_length) == (19, 17)
    layer.step(texts(2, 2), cache)
    assert (cache.position, cache.min_length) == (21, 18)


@EVERY_LAYER
def test_without_a_window_all_can_be_taken_back(case):
    layer, x = case.make(), texts(2, 150)
    cache = layer.init_cache(2, window=None)
    layer.step(x, cache)
    for length in (149, 100, 63, 2):
        cache.truncate(length)
        expected = layer(x[:, : length + 1], causal(length + 1, None))[:, -1]
        torch.testing.assert_close(
            layer.step(x[:, length], cache), expected, rtol=1e-11, atol=1e-12
        )


@EVERY_LAYER
@pytest.mark.parametrize("window", [4, None])
def test_length_0_is_a_new_cache(case, window):
    layer, x = case.make(), texts(2, 90)
    cache, new = (layer.init_cache(2, window) for _ in range(2))
    valid = torch.rand(2, 70) < 0.5
    layer.step(texts(2, 70), cache, valid=valid)
    cache.truncate(0)
    assert (cache.position, cache.min_length, cache.end) == (0, 0, 0)
    assert cache.buffers.keys() == new.buffers.keys()  # of padding it knows nothing either
    pieces = [3, *[1] * 20, 67]
    assert torch.equal(stream(layer, x, cache, pieces), stream(layer, x, new, pieces))


@EVERY_LAYER
def test_padding_from_before_stays_known(case):
    layer, window = case.make(), 6
    x = texts(3, 30)
    valid = torch.arange(30) >= torch.tensor([0, 4, 9])[:, None]
    expected = layer(x, causal(30, window), valid=valid)
    cache = layer.init_cache(3, window, rollback=5)
    stream(layer, x[:, :11], cache, valid=valid[:, :11])
    for t in range(11, 25):
        layer.step(texts(3, 5), cache, valid=torch.rand(3, 5) < 0.5)
        cache.truncate(t)
        y = layer.step(x[:, t], cache)
        torch.testing.assert_close(y, expected[:, t], rtol=1e-11, atol=1e-12)


@EVERY_LAYER
def test_positions_that_were_given_are_taken_back_too(case):
    layer, x = case.make(), texts(2, 30)
    positions = torch.randint(0, 1000, (2, 30)).sort(dim=-1).values
    expected = layer(x, causal(30, 6), positions=positions)
    cache = layer.init_cache(2, 6, rollback=4)
    for t in range(30):
        layer.step(texts(2, 4), cache, positions=torch.randint(0, 1000, (2, 4)))
        cache.truncate(t)
        y = layer.step(x[:, t], cache, positions=positions[:, t])
        torch.testing.assert_close(y, expected[:, t], rtol=1e-11, atol=1e-12)


@EVERY_LAYER
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_what_was_taken_back_has_never_been_in_lower_precision_either(case, dtype):
    layer = case.make(dtype=dtype)
    cache = layer.init_cache(2, 5, rollback=4)
    for t in range(20):
        twin = cache.clone()
        layer.step(texts(2, 4, dtype=dtype), cache)
        cache.truncate(t)
        x = texts(2, dtype=dtype)
        assert torch.equal(layer.step(x, cache), layer.step(x, twin))


@EVERY_LAYER
@pytest.mark.parametrize("rollback", [0, 7])
def test_memory_is_that_of_what_is_kept_however_long_the_text(case, rollback):
    layer, window = case.make(), 100
    cache = layer.init_cache(2, window, rollback=rollback)
    per_token = 2 * sum(heads * width for heads, width in cache.fields.values()) * 8
    places = window + rollback + (window + rollback) // 4
    assert cache.num_bytes == places * per_token
    storages = {buffer.data_ptr() for buffer in cache.buffers.values()}
    for _ in range(10):
        for n in (1, 1, 3, 45, 50):
            layer.step(texts(2, n), cache)
        cache.truncate(cache.position - rollback)
        assert cache.num_bytes == places * per_token
    assert {buffer.data_ptr() for buffer in cache.buffers.values()} == storages


# Branches.


@EVERY_LAYER
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("window", [4, None])
def test_a_copy_goes_its_own_way(case, how, window):
    layer, x, other = case.make(), texts(2, 40), texts(2, 40)
    cache = layer.init_cache(2, window, rollback=2)
    layer.step(x[:, :30], cache, valid=torch.rand(2, 30) < 0.8)
    copied = COPIES[how](cache)
    assert repr(copied) == repr(cache)
    pointers = [{b.data_ptr() for b in c.buffers.values()} for c in (cache, copied)]
    assert not pointers[0] & pointers[1]
    undisturbed = stream(layer, x[:, 30:], COPIES[how](cache))
    stream(layer, other, copied)
    copied.reorder(torch.tensor([1, 1, 0]))
    copied.truncate(0)
    assert cache.batch == (2,)
    assert torch.equal(stream(layer, x[:, 30:], cache), undisturbed)


@EVERY_LAYER
@pytest.mark.parametrize("how", COPIES)
def test_copies_made_in_inference_mode_work_outside_and_back(case, how):
    layer, x = case.make(), texts(2, 24)
    expected = layer(x, causal(24, 5))
    with torch.inference_mode():
        cache = layer.init_cache(2, 5, rollback=3)
        first = stream(layer, x[:, :8], cache)
        cache = COPIES[how](cache)
    second = stream(layer, x[:, 8:14], cache)
    cache = COPIES[how](cache)
    layer.step(texts(2, 3), cache)
    with torch.inference_mode():
        cache.truncate(14)
        third = stream(layer, x[:, 14:18], cache)
        cache = COPIES[how](cache)
    fourth = stream(layer, x[:, 18:], cache, valid=torch.ones(2, 6, dtype=torch.bool))
    y = torch.cat([first, second, third, fourth], dim=1)
    torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-12)


# Beams.


@EVERY_LAYER
@pytest.mark.parametrize("window", [5, None])
def test_reordered_texts_go_on_as_if_each_had_been_seen_from_the_start(case, window):
    layer, x = case.make(), texts(4, 3, 30)
    valid = torch.arange(30) >= torch.randint(0, 6, (4, 3, 1))
    cache = layer.init_cache((4, 3), window, rollback=2)
    stream(layer, x[:, :, :11], cache, [7, 1, 1, 1, 1], valid[:, :, :11])
    seen = 11
    for index in ([3, 1, 0, 2], [0, 0, 2], [2, 1, 0, 2, 2], [4]):
        which = torch.tensor(index)
        cache.reorder(which)
        x, valid = x[which], valid[which]
        assert cache.batch == (len(index), 3)
        layer.step(texts(len(index), 3, 2), cache)
        cache.truncate(seen)
        expected = layer(x, causal(30, window), valid=valid)[:, :, seen : seen + 3]
        y = stream(layer, x[:, :, seen : seen + 3], cache, valid=valid[:, :, seen : seen + 3])
        torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-12)
        seen += 3
    cache.reorder(torch.tensor([], dtype=torch.int64))
    assert cache.batch == (0, 3)
    assert layer.step(texts(0, 3), cache).shape == (0, 3, DIM)
    cache.reorder(torch.tensor([], dtype=torch.int64))  # nobody of nobody
    assert (cache.batch, cache.num_bytes) == ((0, 3), 0)


# What is refused.


@pytest.mark.parametrize(
    ("length", "message"),
    [
        (-1, "length must be >= 0, got -1"),
        (13, "length must be at most 12, the number of tokens seen so far, got 13"),
        (2.0, "length must be an integer >= 0, got 2.0"),
        (True, "length must be an integer >= 0, got True"),
        (None, "length must be an integer >= 0, got None"),
        (8, r"length must be 9 to 12 \(or 0 for an empty cache\), got 8: with window = 5"),
    ],
)
def test_lengths_that_cannot_be_are_refused_and_the_cache_stays(length, message):
    layer = Case("KrauseAttention").make()
    cache, x = layer.init_cache(2, 5, rollback=3), texts(2, 20)
    layer.step(x[:, :12], cache)
    for one in (cache, ga.nn.ModelCache([cache])):
        with pytest.raises(ValueError, match=message):
            one.truncate(length)
    expected = layer(x, causal(20, 5))[:, 12:]
    torch.testing.assert_close(stream(layer, x[:, 12:], cache), expected, rtol=1e-11, atol=1e-12)


def test_a_rollback_out_of_range_is_refused():
    layer = Case("KrauseAttention").make()
    for rollback in (-1, 1.5, None):
        with pytest.raises(ValueError, match=r"rollback must be .*>= 0"):
            layer.init_cache(2, 5, rollback=rollback)


def test_the_cache_says_how_far_it_goes_back():
    cache = ga.nn.KrauseAttention(DIM, 4).init_cache((), window=16, rollback=4)
    assert repr(cache) == (
        "LayerCache(KrauseAttention, batch=[], window=16, rollback=4, position=0, 4608 bytes)"
    )


# The caches of several layers.


def test_layers_go_back_apart_and_reordered_together():
    layers = [case.make() for case in STEPPING]
    windows, x = [3, None, 9, 4, 5, 6, 7, 8, 10], texts(3, 40)
    cache = ga.nn.ModelCache(
        layer.init_cache(3, window, rollback=2)
        for layer, window in zip(layers, windows, strict=True)
    )

    def step(tokens, one):
        return [layer.step(tokens, part) for layer, part in zip(layers, one, strict=True)]

    step(x[:, :30], cache)
    assert len(cache) == len(list(cache)) == len(layers)
    assert cache[1].window is None
    assert (cache.position, cache.batch, cache.min_length) == (30, (3,), 28)
    assert cache.num_bytes == sum(part.num_bytes for part in cache)
    twin = cache.clone()
    assert isinstance(twin, ga.nn.ModelCache)
    with pytest.raises(ValueError, match="length must be 28 to 30"):
        cache.truncate(27)
    assert [part.position for part in cache] == [30] * len(layers)  # the one without a window, too
    cache.truncate(28)
    index = torch.tensor([2, 0, 0, 1])
    cache.reorder(index)
    assert (cache.position, cache.batch) == (28, (4,))
    for layer, window, y in zip(layers, windows, step(x[index, 28], cache), strict=True):
        expected = layer(x[index], causal(40, window))[:, 28]
        torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-12)
    assert (twin.position, twin.batch) == (30, (3,))
    for layer, window, y in zip(layers, windows, step(x[:, 30], twin), strict=True):
        expected = layer(x, causal(40, window))[:, 30]
        torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-12)


def test_layers_that_stand_at_different_positions_are_noticed():
    layers = [STEPPING[0].make(), STEPPING[2].make()]
    cache = ga.nn.ModelCache(layer.init_cache(2, 5) for layer in layers)
    layers[0].step(texts(2), cache[0])
    for use in (lambda: cache.position, lambda: cache.truncate(0), lambda: repr(cache)):
        with pytest.raises(ValueError, match=r"differ in position, got \[1, 0\].*clone\(\)"):
            use()
    layers[1].step(texts(2), cache[1])
    cache[1].reorder(torch.tensor([0]))
    with pytest.raises(ValueError, match=r"differ in batch, got \[\(2,\), \(1,\)\]"):
        cache.reorder(torch.tensor([0, 1]))
    assert [part.batch for part in cache] == [(2,), (1,)]


def test_a_list_of_caches_that_is_none_is_refused():
    part = STEPPING[0].make().init_cache(2, 5)
    with pytest.raises(ValueError, match="layers must contain at least one cache"):
        ga.nn.ModelCache([])
    with pytest.raises(ValueError, match="layers must not contain the same cache twice"):
        ga.nn.ModelCache([part, part])
    with pytest.raises(TypeError, match=r"dict has no 'position'.*as LayerCache has it"):
        ga.nn.ModelCache([{"position": 0}]).position  # noqa: B018

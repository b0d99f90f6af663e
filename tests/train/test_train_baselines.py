"""Losses of guessing by frequencies and by pairs against plain loops, over any pieces of a text."""

import gc
import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import graphattn as ga
from graphattn.train.evaluation import baselines


def texts(seed: int, vocab_size: int, lengths=(40, 1, 25, 2)) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    share = torch.rand(vocab_size, generator=random) ** 3 + 1e-3
    return [torch.multinomial(share, n, True, generator=random) for n in lengths]


def plain_frequency(train, held_out, vocab_size, smoothing):
    counts = Counter(token for text in train for token in text.tolist())
    n = sum(counts.values()) + smoothing * vocab_size
    asked = [token for text in held_out for token in text.tolist()]
    return -sum(math.log((counts[token] + smoothing) / n) for token in asked) / len(asked)


def plain_bigram(train, held_out, vocab_size, smoothing):
    tokens = Counter(token for text in train for token in text.tolist())
    pairs = Counter(pair for text in train for pair in itertools.pairwise(text.tolist()))
    n = sum(tokens.values())
    total, count = 0.0, 0
    for text in held_out:
        for a, b in itertools.pairwise(text.tolist()):
            followed = sum(times for (x, _), times in pairs.items() if x == a)
            kinds = len({y for x, y in pairs if x == a})
            alone = (tokens[b] + 1) / (n + vocab_size)
            if smoothing is not None:
                p = (pairs[a, b] + smoothing) / (followed + smoothing * vocab_size)
            elif followed:
                p = (pairs[a, b] + kinds * alone) / (followed + kinds)
            else:
                p = alone
            total, count = total - math.log(p), count + 1
    return total / count


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 99), st.sampled_from([None, 1.0, 0.1]), st.booleans(), st.integers(3, 50))
def test_both_are_those_of_plain_loops_however_the_text_is_cut_and_counted(
    seed, smoothing, dense, chunk
):
    train, held_out = texts(seed, 9), texts(seed + 1000, 9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(baselines, "CHUNK", chunk)
        patch.setattr(baselines, "DENSE", 1 << 24 if dense else 0)
        bigram = ga.train.bigram_loss(train, held_out, 9, smoothing=smoothing)
        alone = ga.train.frequency_loss(train, held_out, 9, smoothing=smoothing or 1.0)
    assert bigram == pytest.approx(plain_bigram(train, held_out, 9, smoothing), rel=1e-9)
    assert alone == pytest.approx(plain_frequency(train, held_out, 9, smoothing or 1.0), rel=1e-9)


def test_the_probabilities_of_what_follows_add_up_to_1():
    train = texts(0, 6)
    for before in range(6):
        share = 0.0
        for after in range(6):
            pair = torch.tensor([before, after])
            share += math.exp(-ga.train.bigram_loss(train, pair, 6))
        assert share == pytest.approx(1)


def test_a_token_that_never_occurred_costs_infinitely_much_without_smoothing():
    tokens = torch.tensor([0, 0, 1])
    assert ga.train.frequency_loss(tokens, torch.tensor([2]), 3, smoothing=0) == math.inf
    assert ga.train.frequency_loss(tokens, torch.tensor([2]), 3) == pytest.approx(math.log(6))
    assert ga.train.frequency_loss(tokens, tokens, 3, smoothing=0) == pytest.approx(
        (2 * math.log(3 / 2) + math.log(3)) / 3
    )


def test_pairs_of_a_markov_chain_cost_its_entropy():
    flip = 0.1
    random = torch.Generator().manual_seed(0)
    steps = (torch.rand(200_000, generator=random) < flip).long()
    tokens = steps.cumsum(0) % 2
    bigram = ga.train.bigram_loss(tokens[:100_000], tokens[100_000:], 2)
    entropy = -(flip * math.log(flip) + (1 - flip) * math.log(1 - flip))
    assert bigram == pytest.approx(entropy, rel=0.02)
    alone = ga.train.frequency_loss(tokens[:100_000], tokens[100_000:], 2)
    assert alone == pytest.approx(math.log(2), rel=1e-3)


def test_what_is_kept_does_not_grow_with_the_text():
    """Numbers in all tensors that are alive when the last of many windows is asked for."""
    alive = {}

    def windows(count: int):
        random = torch.Generator().manual_seed(0)
        for place in range(count):
            if place == count - 1:
                tensors = [o for o in gc.get_objects() if type(o) is torch.Tensor]
                alive[count] = sum(tensor.numel() for tensor in tensors)
            yield {"tokens": torch.randint(20, (200,), generator=random)}

    held_out = torch.tensor([1, 2, 3])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(baselines, "CHUNK", 1000)
        for vocab_size in (20, 30_000):  # a table of all pairs, and those that occur
            ga.train.bigram_loss(windows(49), held_out, vocab_size)
            ga.train.bigram_loss(windows(499), held_out, vocab_size)
            assert abs(alive[499] - alive[49]) < 1000  # of 90,000 tokens more


@pytest.mark.parametrize(
    ("train", "held_out", "says"),
    [
        ([torch.tensor([0, 9])], [torch.tensor([0, 1])], "train must contain tokens 0 .. 4, got 9"),
        ([torch.tensor([0, 1])], [torch.tensor([0, -1])], "held_out must contain tokens .* got -1"),
        ([], [torch.tensor([0, 1])], "train must contain"),
        ([torch.tensor([0, 1])], [], "held_out must contain"),
        ([torch.zeros(2)], [torch.tensor([0, 1])], r"integer tensors \[N\], got torch.float32"),
        ([{"image": 1}], [torch.tensor([0, 1])], r"integer tensors \[N\], got none"),
    ],
)
def test_bad_texts_are_named(train, held_out, says):
    for loss in (ga.train.frequency_loss, ga.train.bigram_loss):
        with pytest.raises(ValueError, match=says):
            loss(train, held_out, 5)


def test_bad_smoothing_is_named():
    tokens = torch.tensor([0, 1])
    with pytest.raises(ValueError, match="smoothing must be a finite number > 0"):
        ga.train.bigram_loss(tokens, tokens, 2, smoothing=0)
    with pytest.raises(ValueError, match="smoothing must be a finite number >= 0"):
        ga.train.frequency_loss(tokens, tokens, 2, smoothing=-1)
    with pytest.raises(ValueError, match="at least two tokens"):
        ga.train.bigram_loss(tokens, [torch.tensor([0])], 2)

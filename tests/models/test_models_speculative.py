"""Speculative decoding: a small model guesses, and the text stays that of the large one."""

import copy
import itertools

import pytest
import torch

import graphattn as ga
from graphattn.models.language.generation import verify
from graphattn.models.language.sampling import Sampling

V, D, H = 7, 16, 4
MIXERS = pytest.mark.parametrize(
    "mixer", ["dot", "vlt", "gka", "krause", "consensus", "krause-consensus"]
)


def model_of(mixer="dot", depth=2, seed=1, vocab_size=V, **options):
    torch.manual_seed(seed)
    options = {"window": 6, **options}
    model = ga.models.CausalLM(vocab_size, D, depth, H, mixer=mixer, **options).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        model.embedding.weight.normal_()
        model.head.weight.normal_()
    return model.eval()


def draft_of(model, noise=0.04):
    """Copy the model and add noise to its weights: the draft is often right, and often wrong."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in draft.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(noise * drawn)
    return draft


def tokens_of(*shape, vocab_size=V):
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(1))


def reads_of(model, run):
    """Return what `run` gives, and the number of tokens in each call of the model."""
    reads = []
    hook = model.embedding.register_forward_hook(lambda _, x, y: reads.append(x[0].shape[-1]))
    result = run()
    hook.remove()
    return result, reads


# Greedy.


@MIXERS
@pytest.mark.parametrize("draft_tokens", [1, 4])
@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
def test_greedy_texts_are_those_without_a_draft(mixer, draft_tokens, batch):
    model = model_of(mixer)
    draft, prompt = draft_of(model), tokens_of(*batch, 5)
    expected, single = reads_of(model, lambda: model.generate(prompt, 30))
    actual, reads = reads_of(
        model, lambda: model.generate(prompt, 30, draft=draft, draft_tokens=draft_tokens)
    )
    assert torch.equal(actual, expected)
    assert len(single) == 30
    assert len(reads) < 30  # some guesses were right
    assert max(reads[1:]) <= 1 + draft_tokens


@pytest.mark.long
@pytest.mark.parametrize("window", [None, 4, (3, 9)], ids=str)
def test_windows_and_padding_and_stops_are_as_without_a_draft(window):
    pattern = {"window_pattern": "SL"} if isinstance(window, tuple) else {}
    model = model_of("gka", window=window, **pattern)
    draft = model_of("dot", depth=1, window=5, seed=2)  # of another kind, and mostly wrong
    tokens = tokens_of(3, 9)
    valid = torch.arange(9) >= torch.tensor([[0], [8], [3]])
    tokens[~valid] = -100
    for guesser, stop in ((draft, None), (draft_of(model), None), (draft_of(model), [[2, 5], 4])):
        expected = model.generate(tokens, 20, valid=valid, stop=stop)
        actual = model.generate(tokens, 20, valid=valid, stop=stop, draft=guesser)
        assert torch.equal(actual, expected)


@pytest.mark.long
def test_a_perfect_draft_saves_reads_and_a_hopeless_one_changes_nothing():
    model, prompt = model_of("krause"), tokens_of(2, 5)
    expected = model.generate(prompt, 25)
    draft = copy.deepcopy(model)
    actual, reads = reads_of(model, lambda: model.generate(prompt, 25, draft=draft, draft_tokens=4))
    assert torch.equal(actual, expected)
    assert reads == [5 + 4, 5, 5, 5, 5]  # each of them gives five tokens
    hopeless = copy.deepcopy(model)
    with torch.no_grad():
        hopeless.head.weight.neg_()
    assert torch.equal(model.generate(prompt, 25, draft=hopeless), expected)


def test_no_more_is_guessed_than_is_left():
    """The last token is the model's own: nobody guesses it, nor reads a guess of it."""
    model, prompt = model_of("dot"), tokens_of(2, 5)
    draft = copy.deepcopy(model)
    for count, expected in ((1, [5]), (3, [5 + 2]), (8, [5 + 4, 1 + 2])):
        actual, reads = reads_of(model, lambda n=count: model.generate(prompt, n, draft=draft))
        assert reads == expected
        assert torch.equal(actual, model.generate(prompt, count))
        _, guesses = reads_of(draft, lambda n=count: model.generate(prompt, n, draft=draft))
        assert len(guesses) == sum(expected) - 5 - (len(expected) - 1)


def test_a_model_may_be_its_own_draft_and_texts_may_be_short():
    model, prompt = model_of("mix"), tokens_of(1)
    for count in range(8):
        expected = model.generate(prompt, count)
        assert torch.equal(model.generate(prompt, count, draft=model, draft_tokens=3), expected)


def test_progress_sees_every_token_and_may_end_within_guesses():
    model, prompt, seen = model_of(), tokens_of(2, 5), []
    whole = model.generate(prompt, 12)
    model.generate(
        prompt, 12, draft=model, progress=lambda step, text: seen.append((step, text.clone()))
    )
    assert [step for step, _ in seen] == list(range(1, 13))
    assert all(torch.equal(text, whole[:, : 5 + step]) for step, text in seen)
    short = model.generate(prompt, 12, draft=model, progress=lambda step, _: step == 3)
    assert torch.equal(short, whole[:, :8])


# Drawing.


def chi_square(counts, expected):
    """Sum of squares of deviations over expectations, and five deviations above its mean."""
    bound = len(expected) - 1 + 5 * (2 * (len(expected) - 1)) ** 0.5
    return float(((counts - expected).square() / expected).sum()), bound


@pytest.mark.long
def test_a_drawn_token_is_one_of_the_model_whatever_the_draft():
    """200,000 rows at once: guesses of q, and in their place or beside them tokens of p."""
    rows, generator = 200_000, torch.Generator().manual_seed(0)
    sampling = Sampling(0.8, top_k=5, top_p=0.97)
    logits = 1.5 * torch.randn(2, V, generator=generator, dtype=torch.float64)
    p, q = sampling.probabilities(logits[0]), Sampling(1.3).probabilities(logits[1])
    guess = torch.multinomial(q, rows, replacement=True, generator=generator)
    result, kept = verify(logits[0].expand(rows, V), q.expand(rows, V), guess, sampling, generator)
    assert torch.equal(result[kept], guess[kept])
    possible = p > 0
    counts = result.bincount(minlength=V).double()
    assert counts[~possible].sum() == 0
    statistic, bound = chi_square(counts[possible], rows * p[possible])
    assert statistic < bound
    # Kept is the share that the two distributions have in common, and no more.
    common = float(torch.minimum(p, q).sum())
    assert abs(float(kept.double().mean()) - common) < 5 * (common * (1 - common) / rows) ** 0.5
    by_draft, _ = chi_square(guess.bincount(minlength=V).double()[possible], rows * p[possible])
    assert by_draft > 10 * bound  # the test can tell the two apart


@pytest.mark.long
def test_drawn_texts_keep_the_distribution_of_the_model():
    """All 27 texts of three tokens of a vocabulary of three, against their exact probabilities."""
    model = model_of("gka", depth=1, vocab_size=3)
    draft = model_of("dot", depth=1, vocab_size=3, seed=4)
    given = {"temperature": 6.0, "top_p": 0.99}
    sampling, calls, texts = Sampling(**given), 400, 3
    prompt = torch.tensor([0, 2])

    def exact(of):
        results = []
        for text in itertools.product(range(3), repeat=3):
            whole = torch.cat([prompt, torch.tensor(text)])
            p = sampling.probabilities(of(whole).detach())[1:-1]
            results.append(p.gather(-1, whole[2:, None]).prod())
        return torch.stack(results)

    generator, counts = torch.Generator().manual_seed(0), torch.zeros(27, dtype=torch.float64)
    for _ in range(calls):
        text = model.generate(
            prompt.expand(texts, 2), 3, draft=draft, draft_tokens=2, generator=generator, **given
        )
        places = text[:, 2:] @ torch.tensor([9, 3, 1])
        counts += places.bincount(minlength=27)
    expected = calls * texts * exact(model)
    likely = expected > 3
    assert int(likely.sum()) > 15
    rest = torch.stack([counts[~likely].sum(), expected[~likely].sum()])
    statistic, bound = chi_square(
        torch.cat([counts[likely], rest[:1]]), torch.cat([expected[likely], rest[1:] + 1e-9])
    )
    assert statistic < bound
    of_draft = calls * texts * exact(draft)
    by_draft, _ = chi_square(of_draft[likely], expected[likely])
    assert by_draft > 2 * bound  # texts of the draft would be told apart


def test_the_same_distribution_is_always_kept():
    """A model that is its own draft keeps every guess, drawn or not."""
    model, prompt = model_of("dot"), tokens_of(2, 5)
    draft, generator = copy.deepcopy(model), torch.Generator().manual_seed(0)
    _, reads = reads_of(
        model,
        lambda: model.generate(
            prompt,
            20,
            temperature=1.5,
            draft=draft,
            draft_tokens=4,
            generator=generator,
        ),
    )
    assert reads == [5 + 4, 5, 5, 5]

"""CausalLM.generate: texts by streaming caches are those of whole forward passes."""

import copy

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

import graphattn as ga
from graphattn.models.language.sampling import Sampling
from graphattn.models.mixers import HALVES, KINDS, options_taken

V, D, H, DEPTH = 11, 16, 4, 2
EVERY_MIXER = pytest.mark.parametrize("mixer", [*KINDS, *HALVES])


def model_of(mixer="dot", seed=1, **options):
    """A model in float64 whose logits differ clearly from token to token."""
    torch.manual_seed(seed)
    windowed = any(KINDS[name].reach == "window" for name in HALVES.get(mixer, (mixer,)))
    given = options_taken(mixer, DEPTH, {"top_k": 5, "edge_hidden": 6, "normalize": True})
    options = {"window": 9 if windowed else None, "mixer_options": given, **options}
    model = ga.models.CausalLM(V, D, DEPTH, H, mixer=mixer, **options).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        model.embedding.weight.normal_()
        model.head.weight.normal_()
    return model.eval()


def tokens_of(*shape, seed=1):
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(seed))


def padded(prompts):
    """Prompts as one tensor, padded on the left with what is no token, and what is real."""
    N = max(map(len, prompts))
    valid = torch.arange(N) >= N - torch.tensor([len(prompt) for prompt in prompts])[:, None]
    tokens = torch.full((len(prompts), N), -100)
    tokens[valid] = torch.cat(prompts)
    return tokens, valid


def assert_greedy(model, text, start):
    """Behind `start`, every token is the likeliest after those before it."""
    everything = model(text)
    assert torch.equal(everything[..., start - 1 : -1, :].argmax(-1), text[..., start:])
    for length in {start, start + 1, (start + text.shape[-1]) // 2, text.shape[-1] - 1}:
        again = model(text[..., :length])[..., -1, :]  # the text so far, from the beginning
        assert torch.equal(again.argmax(-1), text[..., length])


@pytest.mark.long
@EVERY_MIXER
def test_512_tokens_with_caches_are_those_without_in_batches_of_unequal_prompts(mixer):
    """Drawn texts, so that they do not repeat themselves: the logits of every draw are compared."""
    model, seen = model_of(mixer), []
    prompts = [tokens_of(n, seed=n) for n in (20, 1, 7)]
    tokens, valid = padded(prompts)
    hook = model.head.register_forward_hook(lambda _, x, y: seen.append(y[:, -1]))
    draws = torch.Generator().manual_seed(0)
    text = model.generate(tokens, 512 - 20, temperature=5.0, generator=draws, valid=valid)
    hook.remove()
    assert text.shape == (3, 512)
    assert torch.equal(text[:, :20], tokens)  # padding stays as it was
    assert len(set(text[:, 20:].flatten().tolist())) == V
    by_steps = torch.stack(seen, 1)
    for prompt, row, logits in zip(prompts, text, by_steps, strict=True):
        written = row[20 - len(prompt) :]
        torch.testing.assert_close(
            logits, model(written)[len(prompt) - 1 : -1], rtol=1e-9, atol=1e-9
        )


@EVERY_MIXER
def test_every_prompt_of_a_batch_goes_on_as_it_does_alone(mixer):
    model, prompts = model_of(mixer), [tokens_of(n, seed=n) for n in (9, 1, 7)]
    tokens, valid = padded(prompts)
    text = model.generate(tokens, 20, valid=valid)
    for prompt, row in zip(prompts, text, strict=True):
        written = row[9 - len(prompt) :]
        assert torch.equal(model.generate(prompt, 20), written)
        assert_greedy(model, written, len(prompt))


@pytest.mark.parametrize("mixer", ["dot", "gka", "krause-consensus"])
def test_windows_of_every_block_are_those_of_forward(mixer):
    model = model_of(mixer, window=(3, 12), window_pattern="SL")
    text = model.generate(tokens_of(3, 5), 60)
    assert_greedy(model, text, 5)
    other = model_of(mixer, window=50)
    other.load_state_dict(dict(model.state_dict()))
    assert not torch.equal(other.generate(tokens_of(3, 5), 60), text)  # windows matter


@pytest.mark.parametrize("batch", [(), (1,), (2, 3), (0,)], ids=str)
def test_any_leading_dimensions(batch):
    model, prompt = model_of("gka"), tokens_of(*batch, 4)
    text = model.generate(prompt, 9)
    assert text.shape == (*batch, 13)
    rows = prompt.reshape(-1, 4)
    if len(rows):
        expected = torch.cat([model.generate(row, 9)[None] for row in rows])
        assert torch.equal(text.reshape(-1, 13), expected)


def test_no_new_tokens_give_the_prompts_back():
    model, prompt = model_of(), tokens_of(2, 4)
    text = model.generate(prompt, 0)
    assert torch.equal(text, prompt)
    text[0, 0] += 1
    assert not torch.equal(text, prompt)  # a tensor of its own


def test_int32_and_prompts_that_are_not_contiguous_in_every_mode():
    model, prompt = model_of("mix", dropout=0.3), tokens_of(5, 3).T
    expected = model.generate(prompt.contiguous(), 12)
    actual = model.train().generate(prompt.int(), 12)  # dropout takes no part
    assert actual.dtype == torch.int32
    assert torch.equal(actual.long(), expected)
    with torch.inference_mode():
        assert torch.equal(model.generate(prompt, 12), expected)
    assert torch.equal(copy.deepcopy(model).generate(prompt, 12), expected)
    assert not expected.requires_grad


def test_the_newest_token_is_read_once():
    model, lengths = model_of("gka"), []
    hook = model.embedding.register_forward_hook(lambda _, x, y: lengths.append(x[0].shape[-1]))
    model.generate(tokens_of(2, 6), 5)
    hook.remove()
    assert lengths == [6, 1, 1, 1, 1]


def test_a_softcap_keeps_order_and_changes_draws():
    model = model_of(logit_softcap=1.0)
    plain = model_of()
    prompt = tokens_of(2, 6)
    assert torch.equal(model.generate(prompt, 20), plain.generate(prompt, 20))
    text = tokens_of(2, 9)
    torch.testing.assert_close(model(text), torch.tanh(plain(text)))
    cache = model.init_cache(2)
    torch.testing.assert_close(model.step(text, cache), model(text), rtol=1e-10, atol=1e-10)


# Drawing.


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [None, 1, 4, 1000])
@pytest.mark.parametrize("top_p", [None, 1e-9, 0.5, 0.9, 1.0])
def test_probabilities_are_those_of_transformers(temperature, top_k, top_p):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(50, 40, generator=generator, dtype=torch.float64)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k is not None:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p is not None and top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    expected = warpers(torch.zeros(50, 1, dtype=torch.int64), logits.clone()).softmax(-1)
    actual = Sampling.checked(temperature, top_k, top_p).probabilities(logits)
    assert torch.equal(actual == 0, expected == 0)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.parametrize("top_p", [None, 0.99])
def test_the_ends_of_temperature_are_the_likeliest_and_equal_shares(dtype, top_k, top_p):
    logits = torch.tensor([[3.0, -60.0, 5.0, 4.5], [-8.0, 7.0, 7.0, 6.0]], dtype=dtype)
    cold = torch.tensor([[0, 0, 1, 0], [0, 0.5, 0.5, 0]]).double()
    taking_part = torch.ones(2, 4) if top_k is None else torch.tensor([[1, 0, 1, 1], [0, 1, 1, 1]])
    warm = taking_part.double() / taking_part.sum(-1, keepdim=True)
    for temperature in (5e-324, 1e-320, 1e-45, 1e-40, 1e-30):
        shares = Sampling.checked(temperature, top_k, top_p).probabilities(logits)
        torch.testing.assert_close(shares.double(), cold, rtol=0, atol=0)
    for temperature in (1e20, 1e39, 1e300):
        shares = Sampling.checked(temperature, top_k, top_p).probabilities(logits)
        torch.testing.assert_close(shares.double(), warm, rtol=1e-6, atol=0)
    text = model_of().generate(tokens_of(2, 5), 9, temperature=1e-40, top_k=top_k, top_p=top_p)
    assert torch.equal(text, model_of().generate(tokens_of(2, 5), 9))


@pytest.mark.long
def test_draws_follow_the_probabilities():
    """Every token's count in 10,000 draws after one prompt is within five standard deviations."""
    model, count = model_of("gka"), 10_000
    prompt = tokens_of(1, 5).expand(count, -1)
    given = {"temperature": 1.7, "top_k": 8, "top_p": 0.95}
    text = model.generate(prompt, 1, generator=torch.Generator().manual_seed(0), **given)
    counts = text[:, -1].bincount(minlength=V).double()
    p = Sampling(**given).probabilities(model(prompt[:1])[0, -1]).detach()
    assert 3 <= int((p > 0).sum()) < V
    assert torch.all((counts - count * p).abs() <= 5 * (count * p * (1 - p)).sqrt())


@pytest.mark.long
def test_a_generator_draws_the_same_again_and_another_draws_otherwise():
    model, prompt = model_of("dot"), tokens_of(2, 5)

    def text(seed):
        generator = torch.Generator().manual_seed(seed)
        return model.generate(prompt, 30, temperature=2.0, generator=generator)

    assert torch.equal(text(0), text(0))
    assert not torch.equal(text(0), text(1))
    torch.manual_seed(3)
    first = model.generate(prompt, 30, temperature=2.0)
    torch.manual_seed(3)
    assert torch.equal(first, model.generate(prompt, 30, temperature=2.0))
    assert torch.equal(
        model.generate(prompt, 30, temperature=2.0, top_k=1), model.generate(prompt, 30)
    )


# Ends.


def test_texts_end_behind_a_stop_and_are_filled_with_it():
    model, prompt = model_of("dot"), tokens_of(6, 5)
    free = model.generate(prompt, 40)
    counts = [int((row[5:] == stop).any()) for stop in range(V) for row in free]
    stop = max(range(V), key=lambda token: sum(counts[6 * token : 6 * token + 6]))
    text = model.generate(prompt, 40, stop=stop)
    ends = []
    for row, longer in zip(text, free, strict=True):
        places = (longer[5:] == stop).nonzero().flatten()  # a prompt does not count
        end = 5 + int(places[0]) + 1 if len(places) else 45
        ends.append(end)
        shown = text.shape[1]
        assert torch.equal(row[: min(end, shown)], longer[: min(end, shown)])
        assert (row[end:] == stop).all()
    assert len(set(ends)) > 1
    assert text.shape[1] == max(ends)  # when all have ended, so has the generation


@pytest.mark.long
def test_sequences_stop_too_and_so_does_the_first_of_several():
    model, prompt = model_of("dot"), tokens_of(1, 5)
    free = model.generate(prompt, 40)[0]
    pair = free[15:17].tolist()
    first = next(t for t in range(5, 44) if free[t : t + 2].tolist() == pair)
    assert torch.equal(model.generate(prompt, 40, stop=[pair])[0], free[: first + 2])
    seen = set(free[5:].tolist())
    unseen = next((token for token in range(V) if token not in seen), None)
    several = [pair] if unseen is None else [unseen, pair]
    assert torch.equal(model.generate(prompt, 40, stop=several)[0], free[: first + 2])
    # Half of a sequence in the prompt is no part of it.
    across = [[int(prompt[0, -1]), int(free[5])]]
    where = model.generate(prompt, 40, stop=across)[0]
    assert len(where) > 6
    # A tensor of tokens is several of them.
    assert torch.equal(model.generate(prompt, 40, stop=free[7:8])[0, -1], free[7])
    # So is any other sequence: an array of numpy's, a range, and the bytes of a text.
    expected = model.generate(prompt, 40, stop=[2, 3])
    for stop in (np.array([2, 3]), range(2, 4), b"\x02\x03"):
        assert torch.equal(model.generate(prompt, 40, stop=stop), expected)


def test_progress_sees_every_token_and_may_end_the_generation():
    model, prompt, seen = model_of("gka"), tokens_of(2, 5), []
    whole = model.generate(prompt, 12, progress=lambda step, text: seen.append((step, text)))
    assert [step for step, _ in seen] == list(range(1, 13))
    assert all(torch.equal(text, whole[:, : 5 + step]) for step, text in seen)
    short = model.generate(prompt, 12, progress=lambda step, text: step == 7)
    assert torch.equal(short, whole[:, :12])


# What is refused.


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"tokens": tokens_of(2, 0)}, "tokens must contain at least one token per text"),
        ({"tokens": torch.zeros(2, 3)}, "tokens must be an int32 or int64 tensor"),
        ({"tokens": torch.tensor([[V]])}, f"tokens must be 0 .. {V - 1}"),
        ({"max_new_tokens": -1}, "max_new_tokens must be >= 0, got -1"),
        ({"max_new_tokens": 2.5}, "max_new_tokens must be an integer"),
        ({"temperature": -0.1}, "temperature must be a finite number >= 0"),
        ({"temperature": float("nan")}, "temperature must be a finite number >= 0"),
        ({"top_k": 3}, "top_k must be None at temperature 0"),
        ({"top_p": 0.5}, "top_p must be None at temperature 0"),
        ({"temperature": 1.0, "top_k": 0}, "top_k must be >= 1, got 0"),
        ({"temperature": 1.0, "top_p": 0}, "top_p must be a finite number > 0"),
        ({"temperature": 1.0, "top_p": 1.1}, r"top_p must be in \(0, 1\], got 1.1"),
        ({"stop": V}, f"stop must contain tokens 0 .. {V - 1}"),
        ({"stop": [[]]}, "stop must contain tokens .* at least one token, got"),
        ({"stop": "end"}, "stop must be an integer"),
        ({"generator": 7}, "generator must be a torch.Generator or None, got int"),
        ({"progress": 7}, "progress must be callable or None, got 7"),
        (
            {"valid": torch.tensor([True, True, False])},
            "valid must be False only at the start of a text",
        ),
        (
            {"valid": torch.tensor([True, False, True])},
            "valid must be False only at the start of a text",
        ),
        (
            {"valid": torch.tensor([False, False, False])},
            "valid must be False only at the start of a text",
        ),
        ({"valid": torch.ones(4, dtype=torch.bool)}, r"valid .* must have shape \[2, 3\]"),
        ({"draft_tokens": 0}, "draft_tokens must be >= 1, got 0"),
        ({"draft": "small"}, "draft must be a CausalLM or None, got str"),
        ({"draft": ga.models.CausalLM(V + 1, 8, 1, 2)}, "draft must have the vocabulary .* 12"),
    ],
)
def test_what_does_not_fit_is_refused(given, says):
    arguments = {"tokens": tokens_of(2, 3), "max_new_tokens": 4, **given}
    with pytest.raises(ValueError, match=says):
        model_of().generate(**arguments)


def test_a_layer_without_steps_is_named():
    class Shift(torch.nn.Module):
        dim = D

        def forward(self, x, graph, *, valid=None, positions=None):
            return x.roll(1, -2)

    model = ga.models.CausalLM(V, D, 2, H, mixer=["dot", Shift()])
    with pytest.raises(ValueError, match="block 1: mixer Shift cannot generate token by token"):
        model.generate(tokens_of(2, 3), 2)

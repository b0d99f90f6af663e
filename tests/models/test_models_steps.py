"""A model goes token by token: generation, beams and guesses give what whole texts give."""

import copy
import pickle
import types

import pytest
import torch

import graphattn as ga

V, D, H, DEPTH = 11, 16, 4, 4
CLOSE = {"rtol": 1e-10, "atol": 1e-10}
MIXERS = {
    "dot": lambda **_: "dot",
    "no positions": lambda **_: "dot",
    "every mechanism": lambda **more: [
        ga.nn.KrauseAttention(D, H, top_k=3, kv_heads=2, rope=True, **more),
        ga.nn.SelfConsensus(D, H, edge_hidden=6, update="target", rope="isometric", **more),
        ga.nn.GaussianKernelAttention(D, H, rope=True, normalize=True, **more),
        ga.nn.DotProductAttention(D, H, top_k=4, **more),
    ],
}
EVERY_MODEL = pytest.mark.parametrize("name", MIXERS)
WINDOWS = pytest.mark.parametrize("window", [None, 6, [3, None, 9, 1]], ids=str)


def model_of(name, dtype=torch.float64, seed=1, **options):
    """A model whose logits differ clearly from token to token."""
    torch.manual_seed(seed)
    model = ga.models.SequenceEncoder(
        V, D, DEPTH, H, mixer=MIXERS[name](), rope=name != "no positions", **options
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
        model.embedding.weight.normal_()
    return model.to(dtype).eval()


def tokens_of(*shape, seed=1):
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(seed))


def causal(length, window):
    if isinstance(window, list):
        return [causal(length, keys) for keys in window]
    return ga.causal_graph(length) if window is None else ga.causal_window_graph(length, window)


def stream(model, tokens, cache, pieces=None, **given):
    """Logits of tokens [*, T] in pieces of these lengths, 1 for a single token."""
    result, t = [], 0
    for n in pieces or [1] * tokens.shape[-1]:
        here = t if n == 1 else slice(t, t + n)
        y = model.step(tokens[..., here], cache, **{k: v[..., here] for k, v in given.items()})
        result.append(y.unsqueeze(-2) if n == 1 else y)
        t += n
    return torch.cat(result, -2)


@EVERY_MODEL
@WINDOWS
def test_steps_are_one_forward_on_causal_graphs(name, window):
    model = model_of(name)
    for batch in ((), (2,), (2, 3)):
        tokens = tokens_of(*batch, 25)
        expected = model(tokens, causal(25, window))
        for pieces in (None, [7, 1, 1, 12, 1, 3]):
            y = stream(model, tokens, model.init_cache(batch, window), pieces)
            assert y.shape == (*batch, 25, V)
            torch.testing.assert_close(y, expected, **CLOSE)


@EVERY_MODEL
@WINDOWS
def test_prompts_of_different_lengths_are_padded_on_the_left(name, window):
    """Every text gives what it gives alone, whatever its padding holds; positions are its own."""
    model, lengths = model_of(name), [12, 5, 9]
    prompts = [tokens_of(n, seed=n) for n in lengths]
    more = tokens_of(3, 8, seed=2)
    padded = torch.full((3, 12), -100)
    valid = torch.arange(12) >= 12 - torch.tensor(lengths)[:, None]
    padded[valid] = torch.cat(prompts)
    positions = torch.arange(20) - 12 + torch.tensor(lengths)[:, None]
    cache = model.init_cache(3, window)
    first = stream(model, padded, cache, [10, 1, 1], valid=valid, positions=positions[:, :12])
    rest = stream(model, more, cache, positions=positions[:, 12:])
    for i, prompt in enumerate(prompts):
        whole = torch.cat([prompt, more[i]])
        alone = model(whole, causal(len(whole), window))
        torch.testing.assert_close(first[i][valid[i]], alone[: len(prompt)], **CLOSE)
        torch.testing.assert_close(rest[i], alone[len(prompt) :], **CLOSE)


def test_positions_may_be_given():
    model, tokens = model_of("every mechanism"), tokens_of(2, 20)
    positions = torch.randint(0, 1000, (2, 20)).sort(dim=-1).values
    expected = model(tokens, causal(20, 6), positions=positions)
    for pieces in (None, [7, 1, 5, 1, 6]):
        y = stream(model, tokens, model.init_cache(2, 6), pieces, positions=positions)
        torch.testing.assert_close(y, expected, **CLOSE)


def test_features_before_the_head_are_there_too():
    model, tokens = model_of("every mechanism"), tokens_of(2, 20)
    cache = model.init_cache(2, 5)
    prompt, last = model.encode_step(tokens[:, :19], cache), model.encode_step(tokens[:, 19], cache)
    expected = model.encode(tokens, causal(20, 5))
    torch.testing.assert_close(prompt, expected[:, :19], **CLOSE)
    torch.testing.assert_close(last, expected[:, 19], **CLOSE)
    assert not last.requires_grad


@pytest.mark.long
@EVERY_MODEL
def test_memory_stays_that_of_the_window(name):
    model, window = model_of(name), 20
    cache = model.init_cache(2, window, rollback=4)
    held = cache.num_bytes
    storages = [{b.data_ptr() for b in layer_cache.buffers.values()} for layer_cache in cache]
    for t in range(10 * window):
        model.step(tokens_of(2, seed=t), cache)
        assert cache.num_bytes == held
    model.step(tokens_of(2, 10 * window), cache)
    assert (cache.position, cache.num_bytes) == (20 * window, held)
    assert [
        {b.data_ptr() for b in layer_cache.buffers.values()} for layer_cache in cache
    ] == storages


# Generation.


def beams(prompt, width, count, next_logits, follow):
    """The `width` likeliest texts; `follow(index)` is told which of them go on."""
    text, score = prompt.expand(width, -1), torch.full((width, 1), -torch.inf).double()
    score[0] = 0  # at first all beams are one
    for _ in range(count):
        score = score + next_logits(text).log_softmax(-1)
        score, best = score.flatten().topk(width)
        score = score[:, None]
        follow(best // V)
        text = torch.cat([text[best // V], best[:, None] % V], -1)
    return text, score


@EVERY_MODEL
@WINDOWS
def test_beam_search_is_that_of_whole_texts(name, window):
    model, prompt = model_of(name), tokens_of(1, 9)
    moves = []
    by_texts = beams(
        prompt,
        5,
        15,
        lambda text: model(text, causal(text.shape[-1], window))[:, -1],
        lambda index: moves.append(index.tolist()),
    )
    assert any(len(set(index)) < 5 for index in moves[1:])  # some beam was left, another doubled
    cache = model.init_cache(1, window)
    model.step(prompt[:, :-1], cache)
    cache.reorder(torch.zeros(5, dtype=torch.int64))
    by_steps = beams(prompt, 5, 15, lambda text: model.step(text[:, -1], cache), cache.reorder)
    assert torch.equal(by_steps[0], by_texts[0])
    torch.testing.assert_close(by_steps[1], by_texts[1], **CLOSE)


@pytest.mark.long
@EVERY_MODEL
@WINDOWS
def test_what_was_taken_back_has_never_been(name, window):
    model = model_of(name)
    cache = model.init_cache(2, window, rollback=5)
    model.step(tokens_of(2, 3), cache)
    for t in range(3, 40):
        twin = cache.clone()
        model.step(tokens_of(2, 1 + t % 5, seed=t), cache)
        cache.truncate(t)
        tokens = tokens_of(2, seed=100 + t)
        assert torch.equal(model.step(tokens, cache), model.step(tokens, twin))


@EVERY_MODEL
def test_copies_and_modes(name):
    model, tokens = model_of(name), tokens_of(2, 24)
    expected = model(tokens, causal(24, 5))
    results = []
    with torch.inference_mode():
        cache = model.init_cache(2, 5, rollback=3)
        results.append(stream(model, tokens[:, :8], cache))
        cache = pickle.loads(pickle.dumps(cache))
    results.append(stream(model, tokens[:, 8:14], cache))
    branch, cache = cache, copy.deepcopy(cache)
    model.step(tokens_of(2, 3), branch)
    results.append(stream(copy.deepcopy(model), tokens[:, 14:], cache))
    torch.testing.assert_close(torch.cat(results, 1), expected, **CLOSE)
    branch.truncate(14)
    with torch.inference_mode():
        y = stream(model, tokens[:, 14:], branch)
    torch.testing.assert_close(y, expected[:, 14:], **CLOSE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_as_good_as_that_of_forward(dtype):
    model, exact, tokens = model_of("dot", dtype), model_of("dot"), tokens_of(2, 30)
    exact.load_state_dict(model.state_dict())
    truth = exact(tokens, causal(30, 7))
    y = stream(model, tokens, model.init_cache(2, 7))
    forward = model(tokens, causal(30, 7))
    assert y.dtype == dtype
    assert (y - truth).norm() <= 1.5 * (forward - truth).norm()
    small = model_of("dot").init_cache(2, 7, dtype=dtype)
    assert all(tensor.dtype == dtype for tensor in small)


# What is refused.


@pytest.mark.parametrize("mixer", ["consensus", "mix"])
def test_a_block_that_cannot_go_token_by_token_is_named(mixer):
    model = ga.models.SequenceEncoder(V, D, DEPTH, H, mixer=mixer, edge_hidden=4)
    place = 0 if mixer == "consensus" else 2
    says = f"block {place}: SelfConsensus can generate token by token only with update='target'"
    with pytest.raises(ValueError, match=says):
        model.init_cache(2, 5)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            {"window": [3, 3]},
            r"window must be one number for all blocks, or a list with one per block \(4\), got 2",
        ),
        ({"window": [3, 3, 0, 3]}, "block 2: window must be >= 1, got 0"),
        ({"batch": -1}, "batch must be >= 0, got -1"),
        ({"rollback": -1}, "rollback must be >= 0, got -1"),
        ({"dtype": torch.int64}, "dtype must be floating-point"),
    ],
)
def test_a_cache_out_of_range_is_refused(arguments, says):
    with pytest.raises(ValueError, match=says):
        model_of("dot").init_cache(**{"batch": 2, **arguments})


@pytest.mark.parametrize(
    ("tokens", "given", "says"),
    [
        (tokens_of(3), {}, r"tokens must have shape \[2\] .*\[2, n\] .*got \[3\]"),
        (tokens_of(2, 3, 4), {}, r"tokens must have shape .*got \[2, 3, 4\]"),
        (torch.tensor(1), {}, r"tokens must have shape .*got \[\]"),
        ([1, 2], {}, "tokens must be an int32 or int64 tensor"),
        (torch.zeros(2), {}, "tokens must be an int32 or int64 tensor"),
        (torch.tensor([0, V]), {}, f"tokens must be 0 .. {V - 1} .*got {V}"),
        (tokens_of(2), {"valid": torch.ones(2)}, r"valid must be a bool tensor of shape \[2\]"),
        (tokens_of(2, 3), {"valid": torch.ones(2).bool()}, r"valid must .*of shape \[2, 3\]"),
        (tokens_of(2, 3), {"positions": torch.arange(4)}, "positions must have shape"),
        (tokens_of(2), {"positions": 7}, "positions must be a tensor, got 7"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_layer_goes_on(tokens, given, says):
    for name in ("no positions", "every mechanism"):
        model = model_of(name)
        cache = model.init_cache(2, 5)
        with pytest.raises(ValueError, match=says):
            model.step(tokens, cache, **given)
        assert [layer_cache.position for layer_cache in cache] == [0] * DEPTH


def test_the_cache_of_another_model_is_refused():
    model, block = model_of("dot"), model_of("dot").blocks[0]
    other = ga.nn.ModelCache(block.init_cache(2, 5) for _ in range(3))
    for cache in (other, block.init_cache(2, 5), None):
        with pytest.raises(ValueError, match="cache must be a ModelCache with 4 layers"):
            model.step(tokens_of(2), cache)


def test_a_step_that_was_broken_off_is_noticed():
    model = model_of("dot")
    cache = model.init_cache(2, 5)

    def break_off(*_):
        raise KeyboardInterrupt

    hook = model.blocks[2].mlp.register_forward_hook(break_off)
    with pytest.raises(KeyboardInterrupt):
        model.step(tokens_of(2), cache)
    hook.remove()
    with pytest.raises(
        ValueError, match=r"differ in position, got \[1, 1, 1, 0\], because a step was interrupted"
    ):
        model.step(tokens_of(2), cache)


class Louder(ga.models.SequenceEncoder):
    def encode(self, tokens, graph=None, *, valid=None, positions=None):
        return 2 * super().encode(tokens, graph, valid=valid, positions=positions)


class LouderInSteps(Louder):
    def encode_step(self, tokens, cache, *, valid=None, positions=None):
        return 2 * super().encode_step(tokens, cache, valid=valid, positions=positions)


def test_steps_refuse_where_forward_was_replaced_and_step_was_not():
    with pytest.raises(ValueError, match=r"step does not run the encode\(\) of Louder"):
        Louder(V, D, 2, H).init_cache(2, 5)
    model, tokens = LouderInSteps(V, D, 2, H).double(), tokens_of(2, 9)
    y = stream(model, tokens, model.init_cache(2, 5))
    torch.testing.assert_close(y, model(tokens, causal(9, 5)), **CLOSE)
    plain = model_of("dot")
    plain.forward = types.MethodType(lambda self, tokens, graph: tokens, plain)
    with pytest.raises(ValueError, match=r"step does not run the forward\(\) of SequenceEncoder"):
        plain.init_cache(2, 5)

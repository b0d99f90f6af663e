"""Learned positions of a causal model, and none: forward, packed texts, caches and errors."""

import re

import pytest
import torch

import graphattn as ga

V, D = 11, 16


def model_of(positions="learned", **options):
    torch.manual_seed(0)
    if positions == "learned":
        options = {"num_positions": 20, **options}
    model = ga.models.CausalLM(V, D, depth=2, heads=2, positions=positions, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.double().eval()


def tokens_of(*shape):
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(1))


def test_a_position_adds_its_vector_to_the_embedding_and_nothing_is_rotated():
    model, tokens = model_of(), tokens_of(3, 9)
    x = model.embedding.weight[tokens] + model.position_embedding.weight[:9]
    for block, graph in zip(model.blocks, model.graphs(9), strict=True):
        assert block.mixer.rotary is None
        x = block(x, graph)
    torch.testing.assert_close(model(tokens), model.head(model.norm(x)))


def test_without_positions_only_order_in_time_is_known():
    model, tokens = model_of(None), tokens_of(1, 8)
    assert all(block.mixer.rotary is None for block in model.blocks)
    other = tokens[:, [1, 0, 2, 3, 4, 5, 6, 7]]
    # The last token sees the same set of tokens, in a model of one block.
    shallow = ga.models.CausalLM(V, D, depth=1, heads=2, positions=None)
    torch.testing.assert_close(shallow(tokens)[:, -1], shallow(other)[:, -1])
    assert ga.models.CausalLM(V, D, depth=1, heads=2, rope=False).config != shallow.config


def test_packed_texts_begin_at_position_0():
    model, first, second = model_of(), tokens_of(7), tokens_of(12).flip(0)
    packed = model(torch.cat([first, second]), model.graphs([7, 12]))
    torch.testing.assert_close(packed, torch.cat([model(first), model(second)]))


@pytest.mark.parametrize("mixer", ["dot", "krause", "linear", "mix"])
def test_generation_reads_the_positions_of_forward(mixer):
    model, prompt = model_of(mixer=mixer, window=6 if mixer != "linear" else None), tokens_of(2, 5)
    text = model.generate(prompt, 12)
    for end in range(5, 17):
        assert torch.equal(model(text[:, :end])[:, -1].argmax(-1), text[:, end])
    cache = model.init_cache(2)
    steps = torch.stack([model.step(text[:, i], cache) for i in range(17)], dim=1)
    torch.testing.assert_close(steps, model(text))


def test_prompts_padded_on_the_left_go_on_as_alone():
    model, tokens = model_of(), tokens_of(2, 6)
    valid = torch.tensor([[False, False, True, True, True, True], [True] * 6])
    text = model.generate(tokens, 8, valid=valid)
    assert torch.equal(text[0, 2:], model.generate(tokens[:1, 2:], 8)[0])
    assert torch.equal(text[1], model.generate(tokens[1:], 8)[0])
    positions = torch.arange(6) - (~valid).sum(-1, keepdim=True)
    padded = model(tokens, valid=valid, positions=positions)
    torch.testing.assert_close(padded[0, 2:], model(tokens[:1, 2:])[0])
    torch.testing.assert_close(model(tokens, valid=valid)[valid], padded[valid])
    one = model(tokens[0], valid=valid[0])
    torch.testing.assert_close(one[2:], padded[0, 2:])
    with pytest.raises(ValueError, match="positions must be given with valid"):
        model.step(tokens, model.init_cache(2), valid=valid)


def test_a_saved_model_has_its_positions_and_they_do_not_decay(tmp_path):
    model, tokens = model_of(), tokens_of(2, 9)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(ga.models.CausalLM.from_pretrained(tmp_path)(tokens), model(tokens))
    _, free = ga.train.parameter_groups(model)
    weights = [id(parameter) for parameter in free["params"]]
    assert id(model.position_embedding.weight) in weights
    before = model.position_embedding.weight.detach().clone()
    model.reset_parameters()
    assert float(model.position_embedding.weight.std()) == pytest.approx(0.02, rel=0.2)
    assert not torch.equal(before, model.position_embedding.weight)


@pytest.mark.long
def test_it_compiles_for_three_lengths():
    model = model_of().float()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for length in (5, 9, 13):
        tokens = tokens_of(2, length)
        torch.testing.assert_close(compiled(tokens), model(tokens), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"positions": "absolute"}, "positions must be 'rotary', 'learned' or None"),
        ({"positions": "learned"}, "num_positions must be a number with positions='learned'"),
        ({"positions": "learned", "num_positions": 0}, "num_positions must be"),
        ({"num_positions": 8}, "num_positions must be None with positions='rotary'"),
    ],
)
def test_bad_arguments_are_named(options, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        ga.models.CausalLM(V, D, 1, 2, **options)


def test_texts_that_are_too_long_are_refused():
    model = model_of()
    too_long = r"tokens must be at most 20 \(num_positions\), .* got 21"
    with pytest.raises(ValueError, match=too_long):
        model(tokens_of(21))
    with pytest.raises(ValueError, match=too_long):
        torch.compile(model, backend="eager")(tokens_of(21))
    with pytest.raises(ValueError, match=too_long):
        model(tokens_of(3), positions=torch.tensor([0, 1, 20]))
    assert model.generate(tokens_of(15), 6).shape == (21,)  # the last token is not read
    seen = []
    for prompt, options in ((15, {}), (15, {"draft": model_of()})):
        long = model_of(num_positions=50) if options else model
        with pytest.raises(ValueError, match=too_long):
            long.generate(tokens_of(prompt), 7, progress=lambda *_: seen.append(1), **options)
    assert not seen


def test_positions_that_do_not_fit_are_refused():
    model, tokens = model_of(), tokens_of(2, 6)
    with pytest.raises(ValueError, match="positions must be >= 0, got -1"):
        model(tokens, positions=torch.arange(6) - 1)
    for bad in (torch.arange(6.0).double(), torch.ones(6).bool(), [0, 1, 2, 3, 4, 5]):
        with pytest.raises(ValueError, match="positions must be a tensor of integers"):
            model(tokens, positions=bad)
    for shape in ((1,), (5,), (3, 6), (2, 1)):
        with pytest.raises(ValueError, match=r"positions must have shape \[6\] or \[2, 6\]"):
            model(tokens, positions=torch.zeros(shape).long())


def test_models_that_were_pickled_before_have_no_learned_positions():
    model, tokens = model_of("rotary"), tokens_of(2, 6)
    expected = model(tokens)
    del model.__dict__["num_positions"]
    model.__dict__.pop("position_embedding", None)
    torch.testing.assert_close(model(tokens), expected)

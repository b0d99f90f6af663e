"""Language models with a dot product and Krause attention in every block ("dot+krause")."""

import pytest
import torch

import graphattn as ga

V, D, H = 11, 16, 2


def model_of(depth=2, **options):
    torch.manual_seed(0)
    given = {"krause_window": 4, "top_k": 2}
    model = ga.models.CausalLM(V, D, depth, H, mixer="dot+krause", mixer_options=given, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.double().eval()


def tokens_of(*shape):
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("window", [None, 3, 6])
def test_generation_writes_what_forward_says(window):
    model, prompt = model_of(window=window), tokens_of(2, 5)
    text = model.generate(prompt, 14)
    for end in range(5, 19):
        assert torch.equal(model(text[:, :end])[:, -1].argmax(-1), text[:, end])
    draft = model_of(depth=1)
    assert torch.equal(model.generate(prompt, 14, draft=draft, draft_tokens=3), text)
    valid = torch.ones(2, 5, dtype=torch.bool)
    valid[0, :2] = False
    padded = model.generate(prompt, 6, valid=valid)
    assert torch.equal(padded[0, 2:], model.generate(prompt[:1, 2:], 6)[0])


def test_beams_and_copies_of_its_cache_go_on_separately():
    model, tokens = model_of(), tokens_of(2, 9)
    cache = model.init_cache(2)
    model.step(tokens[:, :7], cache)
    twin = cache.clone()
    twin.reorder(torch.tensor([1, 1, 0]))
    expected = model(torch.cat([tokens[[1, 1, 0], :7], tokens[[0, 1, 0], 7:8]], dim=1))[:, -1]
    torch.testing.assert_close(model.step(tokens[[0, 1, 0], 7], twin), expected)
    torch.testing.assert_close(model.step(tokens[:, 7], cache), model(tokens[:, :8])[:, -1])


def test_checkpointed_gradients_are_equal():
    gradients = []
    for enable in (False, True):
        model = model_of().train()
        if enable:
            model.gradient_checkpointing_enable()
        model(tokens_of(2, 8)).square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*gradients)
    assert all(gradient is not None for gradient in gradients[0])


def test_packed_texts_are_the_texts_alone():
    model, first, second = model_of(window=6), tokens_of(7), tokens_of(9).flip(0)
    packed = model(torch.cat([first, second]), model.graphs([7, 9]))
    torch.testing.assert_close(packed, torch.cat([model(first), model(second)]))


def test_both_branches_are_recorded_and_counted():
    model, tokens = model_of(), tokens_of(1, 9)
    with ga.diagnostics.record(model) as records:
        model(tokens)
    names = [record.name for record in records]
    assert names == [f"blocks.{i}.mixer.{part}" for i in (0, 1) for part in ("dot", "krause")]
    counted = ga.diagnostics.training_operations(model, 9)
    linear = 2 * (8 * D * D + 8 * D * D) + D * V
    assert counted.by_formula == 6 * linear + 12 * D * 2 * (9 + 4)


def test_what_it_cannot_do_is_said():
    model = model_of()
    with pytest.raises(ValueError, match="edge_bias must be None in a model without attention"):
        model(tokens_of(9), edge_bias=torch.zeros(17, H))
    with pytest.raises(ValueError, match=r"value_embeddings=True needs .* got 'dot\+krause'"):
        model_of(value_embeddings=True)

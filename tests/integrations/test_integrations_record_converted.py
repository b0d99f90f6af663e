"""Recorded attention of converted Hugging Face models and of shortcuts, against plain loops."""

import pytest
import torch
from recorded_oracle import weights_by_loop

import graphattn as ga

transformers = pytest.importorskip("transformers", reason="needs transformers")
import convertible  # noqa: E402
from convertible import inputs_of  # noqa: E402
from shortcut_oracle import left_padded, turned, with_shortcut  # noqa: E402

from graphattn.integrations import transformers as gat  # noqa: E402

gat.register()

H, D = 4, 8
OPTIONS = {"gka": {}, "vlt": {"top_k": 4}, "krause": {"top_k": 3, "window": 5}}


def converted(name, mixer, implementation="eager", **options):
    options = {**OPTIONS.get(mixer, {}), **options}
    return convertible.converted(name, mixer, implementation, **options).double()


def recorded(model, inputs, **options):
    with torch.no_grad(), ga.diagnostics.record(model, **options) as recording:
        model(**inputs)
    return recording


def what_reaches(module, model, inputs):
    """The hidden states and rotations that an attention module is called with."""
    given = []
    handle = module.register_forward_pre_hook(
        lambda _, args, kw: given.append((args[0] if args else kw["hidden_states"], kw)),
        with_kwargs=True,
    )
    with torch.no_grad():
        model(**inputs)
    handle.remove()
    hidden, keywords = given[0]
    return hidden, keywords.get("position_embeddings")


def heads(x):
    """[B, N, H D] as [B, N, H, D]."""
    return x.detach().unflatten(-1, (-1, D))


@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa", "graphattn"])
@pytest.mark.parametrize("mixer", OPTIONS)
def test_a_converted_decoder_has_the_weights_of_plain_loops(mixer, implementation, padding):
    inputs = inputs_of("Llama", 9, padding)
    model = converted("Llama", mixer, implementation)
    recording = recorded(model, inputs)
    assert recording.names == ("model.layers.0.self_attn", "model.layers.1.self_attn")
    assert recording.missed == {}
    module = model.model.layers[0].self_attn
    hidden, rotations = what_reaches(module, model, inputs)
    if mixer == "gka":
        q = k = heads(hidden)
    else:
        q, k = heads(module.q_proj(hidden)), heads(module.k_proj(hidden))
    q, k = (turned(t, rotations).transpose(1, 2) for t in (q, k))
    real = inputs["attention_mask"].bool()
    window = OPTIONS[mixer].get("window", 99)
    expected = weights_by_loop(
        q,
        k,
        lambda b, h, i, j: real[b, i] and real[b, j] and 0 <= i - j < window,
        sigma=None if mixer == "vlt" else module.bandwidth.log_sigma.detach().exp(),
        scale=module.scale,
        top_k=OPTIONS[mixer].get("top_k"),
    )
    torch.testing.assert_close(recording[0].matrix, expected, rtol=1e-5, atol=1e-6)
    entropy = -torch.special.xlogy(expected, expected).sum(-1).sum(-1) / real.sum(-1)[:, None]
    torch.testing.assert_close(recording[0].entropy, entropy, rtol=1e-5, atol=1e-6)
    assert recording.rollout().shape == (2, 9, 9)


def test_consensus_is_named_and_cannot_be_switched_off():
    model, inputs = converted("Llama", "consensus", layers=[1]), inputs_of("Llama", 9)
    with pytest.warns(UserWarning, match="consensus has no attention weights"):
        recording = recorded(model, inputs)
    assert recording.names == ("model.layers.0.self_attn",)
    assert recording.missed == {"model.layers.1.self_attn": "consensus has no attention weights"}
    with pytest.raises(ValueError, match=r"none was observed in 'model\.layers\.1'"):
        ga.diagnostics.spectra_without_attention(model, **inputs)


def with_shortcuts(implementation="sdpa", family="Llama", **options):
    model = with_shortcut(family, dtype=torch.float64, window=5, **options)
    model.set_attn_implementation(implementation)
    return model


def text(length=9, padded=3):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 50, (2, length), generator=generator)
    return {"input_ids": tokens, "attention_mask": left_padded([length, length - padded], length)}


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("implementation", ["eager", "sdpa", "graphattn"])
def test_a_shortcut_is_recorded_beside_its_layer_with_the_weights_of_plain_loops(
    implementation, cached
):
    model, inputs = with_shortcuts(implementation), text()
    recording = recorded(model, inputs | {"use_cache": cached})
    assert recording.names == tuple(
        f"model.layers.{n}.self_attn{part}" for n in range(2) for part in ("", ".krause")
    )
    attention = model.model.layers[0].self_attn
    krause = attention.krause
    hidden, rotations = what_reaches(attention, model, inputs)
    q, k = (
        turned(heads(proj(hidden)), rotations).transpose(1, 2)
        for proj in (krause.q_proj, krause.k_proj)
    )
    real = inputs["attention_mask"].bool()
    expected = weights_by_loop(
        q,
        k,
        lambda b, h, i, j: real[b, i] and real[b, j] and 0 <= i - j < 5,
        sigma=krause.bandwidth.log_sigma.detach().exp(),
        top_k=3,
    )
    actual = recording.select("krause")[0]
    torch.testing.assert_close(actual.matrix, expected, rtol=1e-5, atol=1e-6)
    first = real.long().argmax(1)
    for b in range(2):
        rows = [i for i in range(9) if real[b, i] and i != first[b]]
        share = expected[b, :, rows, first[b]].mean(-1)
        torch.testing.assert_close(actual.sinks[b], share, rtol=1e-5, atol=1e-6)


def test_a_rollout_does_not_take_a_shortcut_for_a_layer_of_its_own():
    recording = recorded(with_shortcuts(), text())
    with pytest.raises(ValueError, match=r"'model\.layers\.0\.self_attn\.krause' is parallel to"):
        recording.rollout()
    of_model = [call for call in recording if not call.name.endswith(".krause")]
    expected = torch.eye(9, dtype=torch.float64)  # of the first text, which has no padding
    for call in of_model:
        expected = (call.matrix[0].mean(0) + torch.eye(9)) / 2 @ expected
    actual = ga.diagnostics.Recording(of_model).rollout()
    torch.testing.assert_close(actual[0].double(), expected, rtol=1e-6, atol=1e-7)
    assert recording.select(".krause").rollout().shape == (2, 9, 9)


def made(kind, dropout=0.0):
    model = with_shortcuts("sdpa") if kind == "shortcut" else converted("Llama", kind)
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = dropout
        if hasattr(module, "dropout_of_weights"):
            module.dropout_of_weights = dropout
    return model


@pytest.mark.parametrize("kind", [*OPTIONS, "shortcut"])
def test_recording_changes_no_bit_and_dropout_is_no_part_of_the_weights(kind):
    inputs = text()
    model = made(kind, dropout=0.4).train()

    def run():
        torch.manual_seed(3)
        logits = model(**inputs).logits
        model.zero_grad()
        logits.square().mean().backward()
        return [logits.detach(), torch.rand(3), *(p.grad for p in model.parameters())]

    def equal(a, b):
        return a is b or torch.equal(a, b)

    alone = run()
    with ga.diagnostics.record(model) as recording:
        watched = run()
    assert all(map(equal, alone, watched))
    assert model.model.layers[0].self_attn.training
    if kind == "shortcut":
        recording = recording.select("krause")
    total = recording[0].matrix.sum(-1)
    real = inputs["attention_mask"][:, None].to(total).expand_as(total)
    torch.testing.assert_close(total, real, rtol=1e-5, atol=1e-5)
    assert (recording[0].matrix <= 1 + 1e-6).all()


@pytest.mark.parametrize("kind", [*OPTIONS, "shortcut"])
def test_a_step_of_generation_has_the_rows_of_the_whole_text(kind):
    model, inputs = made(kind), text()
    with torch.no_grad(), ga.diagnostics.record(model) as recording:
        tokens = model.generate(
            **inputs, max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=1
        )
    name = "model.layers.1.self_attn" + (".krause" if kind == "shortcut" else "")
    steps = [call for call in recording if call.name == name]
    assert [call.shape for call in steps] == [(2, H, 9, 9), (2, H, 1, 10), (2, H, 1, 11)]
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 2, dtype=torch.int64)], dim=1)
    places = (mask.cumsum(1) - 1).clamp_min(0)  # as generate() counts them
    again = {"input_ids": tokens[:, :11], "attention_mask": mask, "position_ids": places}
    whole = recorded(model, again)
    [call] = [call for call in whole if call.name == name]
    torch.testing.assert_close(steps[2].matrix, call.matrix[:, :, -1:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layers", [None, ["model.layers.0.self_attn", "model.layers.1.self_attn"]])
@pytest.mark.parametrize("kind", [*OPTIONS, "shortcut"])
def test_attention_switched_off_brings_nothing_shortcut_included(kind, layers):
    inputs = text(12)
    actual = ga.diagnostics.spectra_without_attention(made(kind), layers=layers, **inputs)
    for n, name in enumerate(list(actual)[1:]):
        other = made(kind)
        other.model.layers[n].self_attn.register_forward_hook(
            lambda _, __, output: (torch.zeros_like(output[0]), *output[1:])
        )
        expected = ga.diagnostics.hidden_spectra(other, layers=layers, **inputs)
        torch.testing.assert_close(actual[name].spectra, expected.spectra, rtol=1e-6, atol=1e-9)
        assert not torch.allclose(actual["none"].spectra[-1], expected.spectra[-1])


def test_padded_queries_of_a_converted_multihead_attention_do_not_count_whatever_its_name():
    """The module's queries and keys are parts of one product, and thus of the same tokens."""
    from torch import nn

    from graphattn.integrations import torch as gtorch

    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.mixing = nn.MultiheadAttention(32, H, batch_first=True)

        def forward(self, x, padding):
            return self.mixing(x, x, x, key_padding_mask=padding, need_weights=False)[0]

    torch.manual_seed(0)
    model = gtorch.convert(Mixing(), window=3).double().eval()
    x, padding = torch.randn(1, 9, 32, dtype=torch.float64), torch.arange(9)[None] >= 6
    with torch.no_grad(), ga.diagnostics.record(model) as padded:
        model(x, padding)
    with torch.no_grad(), ga.diagnostics.record(model) as alone:
        model(x[:, :6], padding[:, :6])
    torch.testing.assert_close(padded[0].entropy, alone[0].entropy, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(padded.rollout()[:, :6, :6], alone.rollout(), rtol=1e-9, atol=1e-12)

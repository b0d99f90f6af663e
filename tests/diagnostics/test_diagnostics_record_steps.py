"""Recording steps of generation, against whole forward passes over the texts that they wrote."""

import pytest
import torch

import graphattn as ga
from graphattn import diagnostics

MIXERS = ["dot", "dot-window", "vlt", "linear", "gka", "krause", "mix"]


def model_of(mixer, window=6, **options):
    torch.manual_seed(0)
    if mixer == "krause":
        options["mixer_options"] = {"top_k": 3}
    model = ga.models.CausalLM(19, 16, 2, 2, mixer=mixer, window=window, **options)
    return model.double().eval()


def rows_of_steps(recording, name, length):
    """The rows [B, H, N, N] that the steps of a layer are of a text."""
    rows, position = None, 0
    for call in recording.select(name):
        B, H, Q, K = call.shape
        rows = torch.zeros(B, H, length, length).double() if rows is None else rows
        end = position + Q
        rows[:, :, position:end, end - K : end] = call.matrix
        position = end
    assert position == length
    return rows


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("mixer", MIXERS)
def test_steps_have_the_weights_of_a_forward_pass(mixer, window):
    if window is None and mixer in ("dot-window", "linear"):
        pytest.skip("one needs a window, the other keeps no tokens without one")
    model = model_of(mixer, window)
    prompts = torch.randint(19, (3, 4), generator=torch.Generator().manual_seed(1))
    expected = model.generate(prompts, 9)
    with diagnostics.record(model) as recording:
        texts = model.generate(prompts, 9)
    assert torch.equal(texts, expected)
    assert recording.missed == {}
    with diagnostics.record(model) as whole:
        model(texts[:, :-1])
    assert set(recording.names) == set(whole.names)
    for call in whole:
        rows = rows_of_steps(recording, call.name, 12)
        torch.testing.assert_close(rows, call.matrix, rtol=1e-9, atol=1e-12)


@pytest.mark.long
def test_prompts_in_pieces_and_padding_on_the_left():
    model = model_of("dot", None)
    valid = torch.arange(10) >= torch.tensor([[0], [4]])
    tokens = torch.randint(19, (2, 10), generator=torch.Generator().manual_seed(1))
    with diagnostics.record(model) as recording:
        cache = model.init_cache(2)
        for piece in (slice(0, 5), slice(5, 7), slice(7, 10)):
            model.step(tokens[:, piece], cache, valid=valid[:, piece])
    assert [call.shape[2:] for call in recording.select("blocks.0")] == [(5, 5), (2, 7), (3, 10)]
    with diagnostics.record(model) as whole:
        model(tokens, valid=valid)
    for call in whole:
        rows = rows_of_steps(recording, call.name, 10)
        torch.testing.assert_close(rows, call.matrix, rtol=1e-9, atol=1e-12)


def test_the_sink_of_steps_is_a_token_of_the_text_and_not_of_the_window():
    model = model_of("dot", 4)
    tokens = torch.randint(19, (1, 9), generator=torch.Generator().manual_seed(1))
    with diagnostics.record(model, token=1) as recording:
        cache = model.init_cache(1)
        for t in range(9):
            model.step(tokens[:, t], cache)
    with diagnostics.record(model) as whole:
        model(tokens)
    calls = recording.select("blocks.0").calls
    assert [call.shape[3] for call in calls] == [1, 2, 3, *[4] * 6]  # keys of every step
    sinks = torch.stack([call.sinks[0] for call in calls])
    assert sinks[:2].isnan().all()  # too short, and the token itself
    torch.testing.assert_close(sinks[2:], whole[0].matrix[0, :, 2:, 1].T, rtol=1e-9, atol=1e-12)
    assert (sinks[2:5] > 0).all()
    assert (sinks[5:] == 0).all()  # out of the window


@pytest.mark.parametrize("window", [None, 4])
def test_padding_on_the_left_is_no_sink(window):
    model = model_of("dot", window)
    valid = torch.arange(10) >= torch.tensor([[0], [3], [6]])
    tokens = torch.randint(19, (3, 10), generator=torch.Generator().manual_seed(1))
    with diagnostics.record(model) as padded:
        model(tokens, valid=valid)
    with diagnostics.record(model) as steps:
        cache = model.init_cache(3)
        for t in range(10):
            model.step(tokens[:, t], cache, valid=valid[:, t])
    for b, start in enumerate((0, 3, 6)):
        with diagnostics.record(model) as alone:
            model(tokens[b : b + 1, start:])
        for layer in ("blocks.0", "blocks.1"):
            expected = alone.select(layer)[0]
            sinks = padded.select(layer)[0].sinks[b]
            torch.testing.assert_close(sinks, expected.sinks[0], rtol=1e-9, atol=1e-12)
            rows = torch.stack([call.sinks[b] for call in steps.select(layer)])
            assert rows[: start + 1].isnan().all()
            expected_rows = expected.matrix[0, :, 1:, 0].T
            torch.testing.assert_close(rows[start + 1 :], expected_rows, rtol=1e-9, atol=1e-12)


def test_steps_that_keep_sums_are_named():
    model = model_of("linear", None)
    prompts = torch.randint(19, (2, 5))
    said = "blocks.0.mixer: its cache has sums over earlier tokens"
    with pytest.warns(UserWarning, match=said), diagnostics.record(model) as recording:
        model.generate(prompts, 3)
    assert len(recording) == 2  # the prompt, in both layers
    assert list(recording.missed) == ["blocks.0.mixer", "blocks.1.mixer"]
    assert "nan: negative weights (linear attention with rope=True)" in str(recording)


def test_steps_of_a_single_text_are_recorded_where_a_compiled_step_would_run():
    layer, x = ga.nn.DotProductAttention(16, heads=2), torch.randn(6, 16)
    with diagnostics.record(layer) as recording:
        cache = layer.init_cache((), None)
        rows = [layer.step(x[t], cache) for t in range(6)]
    torch.testing.assert_close(torch.stack(rows), layer(x, ga.causal_graph(6)))
    assert [call.shape[3] for call in recording] == [1, 2, 3, 4, 5, 6]


def test_a_step_of_another_kind_is_named():
    class Twice(ga.nn.DotProductAttention):
        def step(self, x, cache, **keywords):
            halves = [super(Twice, self).step(part, cache, **keywords) for part in x.split(2, -2)]
            return torch.cat(halves, dim=-2)

    layer = Twice(16, heads=2)
    cache = layer.init_cache(1, None)
    with pytest.raises(ValueError, match=r"its step\(\) is its own"), diagnostics.record(layer):
        layer.step(torch.randn(1, 4, 16), cache)


def test_only_the_recorded_model_steps_into_a_recording_and_nothing_stays_replaced():
    step, mix = ga.nn.DotProductAttention.step, ga.nn.LinearAttention._mix_step
    model, draft = model_of("dot"), model_of("dot", 3)
    both = torch.nn.ModuleList([model, draft])
    with diagnostics.record(both) as everything, diagnostics.record(model, keep="mean") as means:
        model.generate(torch.randint(19, (1, 4)), 8, draft=draft, draft_tokens=3)
        assert ga.nn.DotProductAttention.step is not step
    models = [name.split(".", 1) for name in everything.names]
    assert {of for of, _ in models} == {"0", "1"}
    assert means.names == tuple(name for of, name in models if of == "0")
    for call, twin in zip(means, everything.select("0.blocks"), strict=True):
        assert torch.equal(call.mean_over_heads(), twin.mean_over_heads())
    assert (ga.nn.DotProductAttention.step, ga.nn.LinearAttention._mix_step) == (step, mix)


def test_a_model_of_consensus_alone_is_told_why():
    model = ga.models.SequenceEncoder(19, 16, 2, 2, mixer="consensus", edge_hidden=8)
    said = "its 2 layers are consensus, which has no attention weights"
    with pytest.raises(ValueError, match=said), diagnostics.record(model):
        model(torch.randint(19, (2, 5)))


def test_every_query_of_another_sequence_counts_where_sources_are_padded():
    layer = ga.nn.DotProductAttention(16, heads=2, context_dim=16).double()
    x, context = torch.randn(2, 4, 16).double(), torch.randn(2, 6, 16).double()
    valid = torch.arange(6) >= torch.tensor([[0], [2]])
    graph = ga.bipartite_complete_graph(4, 6)
    with diagnostics.record(layer) as recording:
        layer(x, graph, context, valid=(None, valid))
    expected = torch.stack([recording[0].matrix[b, :, :, 2 * b].mean(-1) for b in range(2)])
    torch.testing.assert_close(recording[0].sinks, expected, rtol=1e-9, atol=1e-12)
    assert (expected > 0).all()

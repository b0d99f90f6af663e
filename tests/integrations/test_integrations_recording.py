"""Recorded attention of Hugging Face models, against the weights that eager attention returns."""

import pytest
import torch

import graphattn as ga

transformers = pytest.importorskip("transformers", reason="needs transformers")
import tiny_models  # noqa: E402

from graphattn.integrations import transformers as gat  # noqa: E402

gat.register()

N = 9
TEXT = ["llama", "mistral", "gpt2", "bert", "gemma2", "gpt_oss"]
SDPA = ["llama", "mistral", "gpt2", "bert", "vit"]


def tiny(name, implementation="eager"):
    return tiny_models.tiny(name, dtype=torch.float32, implementation=implementation)


def inputs_of(name, padding=None):
    return tiny_models.inputs(name, length=N, padding=padding, dtype=torch.float32)


def eager_weights(name, inputs):
    """Return the weights of the eager model itself, with 0 in the rows of padding."""
    with torch.no_grad():
        weights = tiny(name)(**inputs, output_attentions=True).attentions
    mask = inputs.get("attention_mask")
    if mask is None:
        return list(weights)
    return [w * mask[:, None, :, None] for w in weights]


def recorded(model, inputs, **options):
    with torch.no_grad(), ga.diagnostics.record(model, **options) as recording:
        model(**inputs)
    return recording


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("name", [*TEXT, "vit"])
def test_weights_under_eager_are_those_the_model_returns(name, padding):
    inputs = inputs_of(name, padding)
    recording = recorded(tiny(name), inputs)
    expected = eager_weights(name, inputs)
    assert recording.missed == {}
    for call, weights in zip(recording, expected, strict=True):
        torch.testing.assert_close(call.matrix, weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("implementation", ["sdpa", "graphattn"])
@pytest.mark.parametrize("name", SDPA)
def test_weights_under_every_implementation_are_those_of_eager(name, implementation, padding):
    inputs = inputs_of(name, padding)
    model = tiny(name, implementation)
    recording = recorded(model, inputs)
    assert len(recording) == 2
    for call, weights in zip(recording, eager_weights(name, inputs), strict=True):
        torch.testing.assert_close(call.matrix, weights, rtol=1e-4, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", ["bert", "gemma2"])
def test_weights_under_flex_attention_are_those_of_eager(name):
    inputs = inputs_of(name, "left")
    recording = recorded(tiny(name, "flex_attention"), inputs)
    for call, weights in zip(recording, eager_weights(name, inputs), strict=True):
        torch.testing.assert_close(call.matrix, weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_caps_and_sinks_are_seen_under_graphattn_too(name):
    inputs = inputs_of(name, "left")
    for call, weights in zip(
        recorded(tiny(name, "graphattn"), inputs), eager_weights(name, inputs), strict=True
    ):
        torch.testing.assert_close(call.matrix, weights, rtol=1e-4, atol=1e-5)


def test_rows_beside_a_sink_logit_sum_to_less_than_one():
    recording = recorded(tiny("gpt_oss"), inputs_of("gpt_oss"))
    total = recording[0].matrix.sum(-1)
    assert (total < 1).all()
    assert (total > 0).all()


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "graphattn"])
@pytest.mark.parametrize("name", SDPA)
def test_recording_changes_no_bit_of_results_and_gradients(name, implementation):
    model, inputs = tiny(name, implementation).train(), inputs_of(name, "left")

    def run():
        torch.manual_seed(3)  # dropout
        logits = model(**inputs).logits
        model.zero_grad()
        logits.square().mean().backward()
        return [logits.detach(), torch.rand(3), *(p.grad for p in model.parameters())]

    alone = run()
    with ga.diagnostics.record(model):
        watched = run()
    assert all(map(torch.equal, alone, watched))
    assert all(map(torch.equal, alone, run()))


def test_dropout_is_no_part_of_the_weights():
    model, inputs = tiny("bert"), inputs_of("bert")
    expected = recorded(model, inputs)[0].matrix
    first = model.bert.encoder.layer[0].attention.self
    first.train()  # what comes before stays without dropout
    assert torch.equal(recorded(model, inputs)[0].matrix, expected)
    assert first.training


def dense_rollout(weights, mask):
    """A plain loop over sequences and layers."""
    results = []
    for b in range(len(mask)):
        flow = torch.eye(N, dtype=torch.float64)
        for layer in weights:
            mean = layer[b].double().mean(0)
            step = 0.5 * mean + 0.5 * torch.eye(N)
            step = step / step.sum(-1, keepdim=True)
            for row in range(N):
                if not mask[b, row]:
                    step[row] = torch.eye(N)[row]
            flow = step @ flow
        results.append(flow)
    return torch.stack(results)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_rollout_and_sinks_of_a_padded_batch_are_those_of_plain_loops(name, implementation):
    inputs = inputs_of(name, "left")
    recording = recorded(tiny(name, implementation), inputs)
    weights, mask = eager_weights(name, inputs), inputs["attention_mask"]
    torch.testing.assert_close(
        recording.rollout().double(), dense_rollout(weights, mask), rtol=1e-4, atol=1e-5
    )
    first = mask.argmax(dim=1)  # the first real token, after the padding
    for call, layer in zip(recording, weights, strict=True):
        for b in range(2):
            t = int(first[b])
            rows = [i for i in range(N) if mask[b, i] and i != t]
            torch.testing.assert_close(call.sinks[b], layer[b, :, rows, t].mean(-1))
            real = [i for i in range(N) if mask[b, i]]
            entropy = -torch.special.xlogy(layer[b], layer[b]).sum(-1)[:, real].mean(-1)
            torch.testing.assert_close(call.entropy[b], entropy, rtol=1e-4, atol=1e-5)


def test_statistics_without_weights_are_the_same():
    model, inputs = tiny("llama", "sdpa"), inputs_of("llama", "left")
    whole = recorded(model, inputs)
    for keep in ("mean", "statistics"):
        lean = recorded(model, inputs, keep=keep)
        for name in ("sinks", "entropy", "head_diversity", "effective_rank"):
            assert torch.equal(getattr(lean, name)().values, getattr(whole, name)().values)
        with pytest.raises(ValueError, match="keep must be 'weights'"):
            _ = lean[0].matrix
    torch.testing.assert_close(recorded(model, inputs, keep="mean").rollout(), whole.rollout())
    with pytest.raises(ValueError, match="keep must be 'mean'"):
        lean.rollout()


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "graphattn"])
def test_every_step_of_generation_is_a_call(implementation):
    model = tiny("llama", implementation)
    inputs = inputs_of("llama", "left")
    with ga.diagnostics.record(model) as recording:
        tokens = model.generate(**inputs, max_new_tokens=3, do_sample=False)
    assert [call.shape for call in recording][::2] == [(2, 4, N, N), (2, 4, 1, 10), (2, 4, 1, 11)]
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 3, dtype=torch.int64)], dim=1)
    whole = recorded(model, {"input_ids": tokens[:, :-1], "attention_mask": mask[:, :-1]})
    torch.testing.assert_close(
        recording[4].matrix, whole[0].matrix[:, :, -1:], rtol=1e-4, atol=1e-5
    )
    with pytest.raises(ValueError, match="one call of every layer"):
        recording.rollout()


def test_gradient_checkpointing_does_not_record_twice():
    model, inputs = tiny("llama", "sdpa").train(), inputs_of("llama")
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        with ga.diagnostics.record(model) as recording:
            model(**inputs).logits.sum().backward()
        assert len(recording) == 2


def test_attention_that_goes_its_own_way_is_named():
    config = transformers.LongformerConfig(
        **tiny_models.COMMON, attention_window=4, pad_token_id=1, sep_token_id=2
    )
    model = transformers.LongformerModel(config).eval()
    with (
        pytest.raises(
            ValueError, match=r"nothing was recorded.*encoder\.layer\.0\.attention\.self"
        ),
        torch.no_grad(),
        ga.diagnostics.record(model),
    ):
        model(**inputs_of("bert"))


def test_a_registered_function_without_sdpa_is_named_and_one_with_it_is_seen():
    def alone(module, query, key, value, mask, **kwargs):
        return ((query @ key.mT).softmax(-1) @ value).transpose(1, 2), None

    def through(module, query, key, value, mask, **kwargs):
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return sdpa(query, key, value, scale=0.0).transpose(1, 2), None

    interface = transformers.AttentionInterface
    inputs = {"input_ids": torch.randint(3, 50, (2, N))}
    try:
        interface.register("alone", alone)
        interface.register("through", through)
        with pytest.raises(ValueError, match=r"attention\.self: alone does not return its weights"):
            recorded(tiny("bert", "alone"), inputs)
        for call in recorded(tiny("bert", "through"), inputs):
            torch.testing.assert_close(call.matrix, torch.full((2, 4, N, N), 1 / N))
    finally:
        for name in ("alone", "through"):
            interface._global_mapping.pop(name)


def test_what_configure_chose_is_what_is_recorded():
    model, inputs = tiny("llama", "graphattn"), inputs_of("llama", "left")
    gat.configure(model, mixer="krause", window=4, top_k=2)
    recording = recorded(model, inputs)
    mask = inputs["attention_mask"].bool()
    for call in recording:
        kept = (call.matrix > 0).sum(-1)  # [B, H, N]
        real = mask[:, None].expand_as(kept)
        assert (kept[real] <= 2).all()
        assert (kept[~real] == 0).all()
        torch.testing.assert_close(call.matrix.sum(-1)[real], torch.ones(int(real.sum())))
        far = torch.ones(N, N).tril(-4).bool()  # four keys, the query's own included
        assert (call.matrix[..., far] == 0).all()
        assert not call.sinks.isnan().any()


def test_an_encoder_and_a_decoder_are_told_apart():
    model, inputs = tiny("bart"), inputs_of("bart")
    recording = recorded(model, inputs)
    assert [call.shape[2:] for call in recording] == [(9, 9)] * 2 + [(6, 6), (6, 9)] * 2
    with pytest.raises(ValueError, match="select"):
        recording.rollout()
    assert recording.select("encoder.layers").rollout().shape == (2, 9, 9)


def test_layers_converted_to_ours_are_recorded_beside_the_others():
    model, inputs = tiny("bert", "sdpa"), inputs_of("bert")

    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = ga.nn.GaussianKernelAttention(32, 4)

        def forward(self, hidden_states, *args, **kwargs):
            return self.layer(hidden_states, ga.complete_graph(hidden_states.shape[1])), None

    model.bert.encoder.layer[1].attention.self = Own()
    recording = recorded(model, inputs)
    assert recording.names == (
        "bert.encoder.layer.0.attention.self",
        "bert.encoder.layer.1.attention.self.layer",
    )
    assert recording.rollout().shape == (2, N, N)
    assert recording.missed == {}

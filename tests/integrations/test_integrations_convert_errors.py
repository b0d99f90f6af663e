"""Refusals of `convert` name what it cannot do, before anything has changed."""

import pytest
import torch
import transformers
from accelerate import dispatch_model
from convertible import inputs_of, model_of
from torch import nn

from graphattn.integrations import transformers as gat
from graphattn.integrations.transformers.conversion.modules import attention_modules


def refused(model, match, **arguments):
    before = [(name, id(module)) for name, module in model.named_modules()]
    weights = {name: id(p) for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=match):
        gat.convert(model, **arguments)
    assert [(name, id(module)) for name, module in model.named_modules()] == before
    assert {name: id(p) for name, p in model.named_parameters()} == weights
    assert getattr(model.config, "graphattn", None) is None


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"mixer": "rbf"}, "mixer must be one of .*'gka'.* got 'rbf'"),
        ({"mixer": "gka", "layers": [0, 7]}, "layers must be numbers in -2 .. 1 .*got 7"),
        ({"mixer": "gka", "layers": []}, "layers must contain at least one"),
        ({"mixer": "gkaa"}, "got 'gkaa': did you mean 'gka'"),
        ({"mixer": "gka", "init_sgma": 1.0}, "did you mean 'init_sigma'"),
        ({"mixer": "gka", "layrs": [0]}, "did you mean 'layers'"),
        ({"mixer": "gka", "top_k": 3}, r"one of the options of mixer='gka', .* got top_k=3"),
        ({"mixer": "consensus", "top_k": 3}, "one of the options of mixer='consensus'"),
        ({"mixer": "vlt", "init_sigma": 1.0}, "one of the options of mixer='vlt'"),
        ({"mixer": "gka", "window": 0}, "window must be .* got 0"),
        ({"mixer": "gka", "init_sigma": -1.0}, "init_sigma must be .* got -1.0"),
        ({"mixer": "gka", "eps": -1.0}, "eps must be"),
        ({"mixer": "gka", "rope": "isometric"}, "rope must be True, False or None"),
        ({"mixer": "krause", "top_k": 0}, "top_k must be .* got 0"),
        ({"mixer": "krause", "top_k": 2.5}, "top_k must be"),
        (
            {"mixer": "consensus", "update": "energy"},
            "update must be 'target' .*got 'energy', which leaks the future",
        ),
        ({"mixer": "consensus", "step_size": "learned"}, "step_size must be"),
        ({"mixer": "consensus", "step_size": 0.0}, "step_size must be"),
        ({"mixer": "consensus", "rope": True}, "step_size='auto' needs rope=False or"),
        ({"mixer": "consensus", "rank": 0}, "rank must be"),
    ],
)
def test_arguments_out_of_range(arguments, match):
    refused(model_of("Llama"), match, **arguments)


def test_rotation_needs_a_model_that_rotates():
    refused(model_of("Bert"), "rope=True needs a model with rotary", mixer="gka", rope=True)


def test_grouped_heads():
    model = model_of("Llama", num_key_value_heads=2)
    refused(
        model,
        "as many key heads as query heads.* has 4 query heads and 2 key heads .*'krause'",
        mixer="vlt",
    )


@pytest.mark.parametrize("mixer", ["gka", "vlt", "consensus"])
def test_heads_that_do_not_fill_the_hidden_size(mixer):
    model = model_of("Qwen3", head_dim=16)
    refused(model, "4 heads of 16 features and a hidden size of 32", mixer=mixer)
    assert gat.convert(model, mixer="krause") == [0, 1]
    assert model(**inputs_of("Qwen3")).logits.isfinite().all()


def test_a_family_that_is_not_known_and_one_of_somebody_else():
    config = transformers.Phi3Config(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        pad_token_id=0,
    )
    refused(
        transformers.Phi3ForCausalLM(config),
        r"convert\(\) knows .*LlamaAttention.*got Phi3Attention in .*model.layers.0.self_attn",
        mixer="gka",
    )
    model = model_of("Llama")

    class Mine(type(model.model.layers[0].self_attn)):
        def forward(self, hidden_states, **kwargs):
            return super().forward(hidden_states * 2, **kwargs)

    model.model.layers[1].self_attn.__class__ = Mine
    assert len(attention_modules(model)) == 1  # it names the interface no more
    with pytest.raises(ValueError, match="must have a module that uses"):
        gat.convert(nn.Linear(2, 2), mixer="gka")


def test_a_subclass_with_the_forward_of_its_family_is_of_the_family():
    model = model_of("Llama")

    class Mine(type(model.model.layers[0].self_attn)):
        pass

    model.model.layers[0].self_attn.__class__ = Mine
    assert gat.convert(model, mixer="gka") == [0, 1]


def test_what_is_converted_or_configured_already():
    model = model_of("Bert")
    gat.convert(model, mixer="gka", layers=[0])
    with pytest.raises(
        ValueError,
        match=r"layers must be attention modules of the model itself.*already converted to 'gka'",
    ):
        gat.convert(model, mixer="vlt")
    assert gat.convert(model, mixer="vlt", layers=[1]) == [1]  # numbers stay what they were
    model = model_of("Bert")
    gat.configure(model, mixer="rbf", window=3, layers=[1])
    with pytest.raises(ValueError, match=r"layer 1 .* options from configure"):
        gat.convert(model, mixer="gka")
    assert gat.convert(model, mixer="gka", layers=[0]) == [0]


def test_what_a_call_brings_and_a_converted_layer_cannot_honour():
    model = model_of("Llama")
    gat.convert(model, mixer="krause", top_k=3)
    inputs = inputs_of("Llama")
    with pytest.raises(
        ValueError, match=r"output_attentions must be False in a layer converted to .*got True"
    ):
        model(**inputs, output_attentions=True)
    layer, x = attention_modules(model)[0][1], torch.randn(1, 5, 32)
    rotation = model.model.rotary_emb(x, torch.arange(5)[None])
    bias = torch.linspace(-1, 0, 25).view(1, 1, 5, 5)
    for given, match in (
        ({"attention_mask": bias}, "a converted layer does not support a bias of the logits"),
        ({"attention_mask": torch.ones(1, 4, 5, 5).bool()}, "the same for all heads"),
        ({"attention_mask": torch.ones(1, 5)}, "must have the shape"),
        ({"position_bias": bias}, "position_bias must be None .*does not support it"),
        ({"encoder_hidden_states": x}, "encoder_hidden_states must be None .*does not support it"),
        ({"position_embeddings": None}, "position_embeddings must be given"),
    ):
        with pytest.raises(ValueError, match=match):
            layer(x, **{"position_embeddings": rotation, **given})
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match=r"attn_implementation must be .*flash_attention_2"):
        layer(x, position_embeddings=rotation)


def test_adapters_come_after_conversion():
    peft = pytest.importorskip("peft")
    model = model_of("Llama")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["v_proj"]))
    with pytest.raises(ValueError, match=r"'consensus' copies the weights of v_proj, .* before"):
        gat.convert(adapted.base_model.model, mixer="consensus")


def test_a_forward_that_accelerate_put_there_is_refused():
    dispatched = dispatch_model(model_of("Llama"), device_map={"": "cpu"}, force_hooks=True)
    refused(dispatched, "has its own forward.*convert the model before", mixer="krause")


@pytest.mark.parametrize("with_kwargs", [False, True])
def test_hooks_stay_where_they_were(with_kwargs):
    model, calls = model_of("Llama"), []
    attention = model.model.layers[0].self_attn
    attention.register_forward_hook(
        lambda *given: calls.append(len(given)), with_kwargs=with_kwargs
    )
    gat.convert(model, mixer="krause")
    model(**inputs_of("Llama"))
    assert calls == [4 if with_kwargs else 3]

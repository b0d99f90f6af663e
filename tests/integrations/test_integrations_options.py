"""Options that configure() takes, where they are kept, and those that it refuses."""

import copy
import json

import numpy as np
import pytest
import torch
from tiny_models import tiny
from torch import nn

transformers = pytest.importorskip("transformers")

from graphattn.integrations import transformers as gat  # noqa: E402
from graphattn.integrations.transformers.conversion.modules import attention_modules  # noqa: E402
from graphattn.integrations.transformers.options import (  # noqa: E402
    AS_IT_IS,
    Options,
    has_places,
    is_configured,
)

SIZES = {"hidden_size": 16, "num_attention_heads": 2, "vocab_size": 19, "intermediate_size": 8}
TOKENS = torch.arange(12)[None] % 19


def llama(layers=4):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_hidden_layers=layers)
    return transformers.LlamaForCausalLM(config).eval()


def options(model):
    return [module.graphattn_options for _, module in attention_modules(model)]


def gemma():
    """A model of text and images, whose attention reads the configs of its parts."""
    torch.manual_seed(0)
    text = {
        **SIZES,
        "num_hidden_layers": 2,
        "head_dim": 8,
        "num_key_value_heads": 1,
        "sliding_window": 4,
    }
    vision = {
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "intermediate_size": 8,
        "image_size": 8,
        "patch_size": 4,
    }
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_id=18
    )
    return transformers.Gemma3ForConditionalGeneration(config).eval()


# Which layers.


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (None, [0, 1, 2, 3]),
        (range(1, 3), [1, 2]),
        ([2, 0, 2, -2], [0, 2]),
        (-1, [3]),
        (2, [2]),
        (np.int64(2), [2]),
        (np.arange(2), [0, 1]),
        (torch.tensor([3, 1]), [1, 3]),
        ({1, -4}, [0, 1]),
        ((n for n in (1, 2)), [1, 2]),
    ],
)
def test_layers_are_numbers_of_any_kind(layers, expected):
    model = llama()
    assert gat.configure(model, mixer="rbf", layers=layers) == expected
    assert [o.mixer == "rbf" for o in options(model)] == [n in expected for n in range(4)]
    assert json.loads(json.dumps(model.config.graphattn))["steps"][0]["layers"] == expected


@pytest.mark.parametrize(
    "layers", [[], 4, [-5], [True], [1.0], "1", [None], torch.tensor([True]), range(4, 12), "all"]
)
def test_layers_that_are_none_of_the_model_are_refused(layers):
    model = llama()
    with pytest.raises(ValueError, match="layers must"):
        gat.configure(model, layers=layers)
    assert_untouched(model)


def assert_untouched(model):
    assert getattr(model.config, "graphattn", None) is None
    assert model.config._attn_implementation != "graphattn"
    assert not any(hasattr(module, "graphattn_options") for module in model.modules())
    assert "save_pretrained" not in vars(model)


# Which options.


def test_an_option_with_a_wrong_name_is_told_the_nearest_one():
    model = llama()
    for call, words in (
        (lambda: gat.configure(model, windw=4), "did you mean 'window'"),
        (lambda: gat.configure(model, sliding_window=4), "did you mean 'window'"),
    ):
        with pytest.raises(TypeError, match=words):
            call()
    assert_untouched(model)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mixer": "gka"}, r"mixer must be one of 'dot', 'rbf', 'krause', got 'gka'.*convert"),
        ({"mixer": "krase"}, "got 'krase': did you mean 'krause'"),
        ({"mixer": None}, "mixer must be one of"),
        ({"mixer": ["dot"]}, "mixer must be one of"),
        ({"mixer": "krause"}, "needs window=, top_k= or graph="),
        ({"window": 0}, "window must be >= 1, got 0"),
        ({"window": True}, "window must be an integer"),
        ({"window": 2.0}, "window must be an integer"),
        ({"top_k": -1}, "top_k must be >= 1"),
        ({"top_k": "8"}, "top_k must be an integer"),
        ({"sigma": 1.0}, "sigma must be None with mixer='dot'"),
        ({"mixer": "rbf", "sigma": 0}, "sigma must be a finite number > 0"),
        ({"mixer": "rbf", "sigma": float("nan")}, "sigma must be a finite number > 0"),
        ({"graph": object()}, "graph must be a function"),
    ],
)
def test_options_that_mean_nothing_are_refused(given, message):
    model = llama()
    with pytest.raises(ValueError, match=message):
        gat.configure(model, **given)
    assert_untouched(model)


def test_numbers_of_numpy_and_torch_are_kept_as_numbers():
    model = llama()
    gat.configure(
        model,
        mixer="krause",
        window=np.int32(8),
        top_k=torch.tensor(4),
        sigma=np.float32(2),
        layers=np.array([1]),
    )
    step = json.loads(model.config.to_json_string())["graphattn"]["steps"][0]
    assert step == {
        "call": "configure",
        "mixer": "krause",
        "window": 8,
        "top_k": 4,
        "sigma": 2.0,
        "graph": None,
        "layers": [1],
        "modules": 4,
    }


def test_a_later_call_takes_the_place_of_an_earlier_one():
    model = llama()
    gat.configure(model, mixer="rbf")
    gat.configure(model, window=3, layers=[1])
    assert options(model) == [Options("rbf"), Options(window=3), Options("rbf"), Options("rbf")]
    assert len(model.config.graphattn["steps"]) == 2
    gat.configure(model)
    assert options(model) == [AS_IT_IS] * 4
    assert [step["mixer"] for step in model.config.graphattn["steps"]] == ["dot"]
    assert torch.allclose(model(TOKENS).logits, llama()(TOKENS).logits, atol=1e-6)


def test_the_config_of_another_model_is_not_written():
    config = transformers.LlamaConfig(**SIZES, num_hidden_layers=2)
    model = transformers.LlamaForCausalLM(copy.deepcopy(config))
    gat.configure(model, mixer="rbf")
    assert getattr(config, "graphattn", None) is None
    copied = copy.deepcopy(model)
    gat.configure(copied, window=2)
    assert options(model) == [Options("rbf")] * 2
    assert len(model.config.graphattn["steps"]) == 1
    assert model.config.graphattn["steps"][0]["mixer"] == "rbf"


# All or nothing.


def test_an_implementation_that_is_refused_changes_nothing(monkeypatch):
    model = llama()

    def refuse(name):
        model.config._attn_implementation = name
        raise RuntimeError("not with me")

    monkeypatch.setattr(model, "set_attn_implementation", refuse)
    with pytest.raises(RuntimeError, match="not with me"):
        gat.configure(model, mixer="rbf")
    assert_untouched(model)


def test_an_implementation_that_is_not_taken_is_named(monkeypatch):
    model = llama()
    monkeypatch.setattr(model, "set_attn_implementation", lambda name: None)
    with pytest.raises(ValueError, match=r"model.layers.0.self_attn \(LlamaAttention\) still has"):
        gat.configure(model, mixer="rbf")
    assert_untouched(model)


def test_models_without_the_interface_are_refused():
    class Plain(transformers.PreTrainedModel):
        config_class = transformers.BertConfig

        def __init__(self, config):
            super().__init__(config)
            self.linear = nn.Linear(2, 2)

        def forward(self, x):
            return self.linear(x)

    model = Plain(transformers.BertConfig())
    with pytest.raises(
        ValueError, match="must have a module that uses transformers' attention interface, got"
    ):
        gat.configure(model)
    assert getattr(model.config, "graphattn", None) is None


def test_attention_that_stays_as_it_is_is_named():
    class OwnAttention(nn.Module):
        def forward(self, x):
            return torch.softmax(x, dim=-1)

    model = llama()
    model.model.layers[1].self_attn = OwnAttention()
    with pytest.warns(UserWarning, match=r"are not changed: model\.layers\.1\.self_attn"):
        gat.configure(model, mixer="rbf")


# Encoders with decoders.


def test_windows_leave_cross_attention_out():
    model = tiny("bart", encoder_layers=1, decoder_layers=1).model
    names = [name for name, _ in attention_modules(model)]
    cross = next(n for n, name in enumerate(names) if name.endswith("encoder_attn"))
    numbers = gat.configure(model, window=2)
    assert numbers == [n for n in range(3) if n != cross]
    assert options(model)[cross] == AS_IT_IS
    assert gat.configure(model, mixer="rbf") == [0, 1, 2]
    before = copy.deepcopy(model.config.graphattn)
    with pytest.raises(ValueError, match=r"layers must not include \d \(.*encoder_attn\)"):
        gat.configure(model, window=2, layers=[cross])
    assert model.config.graphattn == before
    assert options(model) == [Options("rbf")] * 3
    padding = torch.ones(1, 12, dtype=torch.long)
    padding[0, -3:] = 0
    assert model(TOKENS, attention_mask=padding)[0].isfinite().all()


# Models of parts.


def test_parts_know_that_their_model_is_configured(tmp_path):
    model = gemma()
    gat.configure(model, window=3)
    text = model.config.text_config
    assert is_configured(text)
    assert has_places(text)
    expected = model(TOKENS).logits
    model.save_pretrained(tmp_path)
    again = gat.from_pretrained(tmp_path)
    assert torch.equal(again(TOKENS).logits, expected)
    lost = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path, attn_implementation="graphattn"
    )
    with pytest.raises(ValueError, match="was made without them"):
        lost(TOKENS)


def test_a_part_saved_alone_says_what_it_is(tmp_path):
    model = gemma()
    gat.configure(model, window=3)
    model.model.language_model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="it is a part of a model that was changed"):
        gat.from_pretrained(tmp_path)


def test_wrappers_of_wrappers():
    peft = pytest.importorskip("peft")
    model = llama()
    lora = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2))
    wrapped = torch.compile(nn.DataParallel(lora), backend="eager")
    assert gat.configure(wrapped, mixer="rbf", layers=[-1]) == [3]
    assert model.config.graphattn["steps"][0]["layers"] == [3]
    assert options(model)[3] == Options("rbf")
    assert "save_pretrained" not in vars(lora)

"""The list of attention modules that `layers=` counts in."""

import copy

import pytest
from torch import nn

transformers = pytest.importorskip("transformers")

from graphattn.integrations.transformers.conversion.modules import attention_modules  # noqa: E402

SIZES = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 9}


def names(model):
    return [name for name, _ in attention_modules(model)]


def test_every_layer_once_and_in_order():
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, intermediate_size=8))
    assert names(llama) == [f"model.layers.{i}.self_attn" for i in range(3)]
    bert = transformers.BertModel(transformers.BertConfig(**SIZES, intermediate_size=8))
    assert names(bert) == [f"encoder.layer.{i}.attention.self" for i in range(3)]
    gpt2 = transformers.GPT2Model(
        transformers.GPT2Config(vocab_size=9, n_embd=8, n_layer=3, n_head=2)
    )
    assert names(gpt2) == [f"h.{i}.attn" for i in range(3)]


def test_cross_attention_counts():
    config = transformers.BertConfig(
        **SIZES, intermediate_size=8, is_decoder=True, add_cross_attention=True
    )
    assert names(transformers.BertModel(config))[:2] == [
        "encoder.layer.0.attention.self",
        "encoder.layer.0.crossattention.self",
    ]


def test_decorated_and_inherited_forwards_are_seen():
    llama = transformers.LlamaModel(transformers.LlamaConfig(**SIZES, intermediate_size=8))
    base = type(llama.layers[0].self_attn)

    class Inherits(base):
        pass

    other = copy.deepcopy(llama)
    for layer in other.layers:
        layer.self_attn.__class__ = Inherits
    assert names(other) == names(llama)


def test_what_stands_in_the_place_of_attention_counts_and_plain_modules_do_not():
    class Stand(nn.Module):
        replaces_attention = True

    assert names(nn.Sequential(nn.Linear(2, 2), Stand())) == ["1"]

"""Messages name what to do instead; what transformers takes on loading is taken here, too."""

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, BertModel

import graphattn as ga
from graphattn.integrations import torch as gtorch
from graphattn.integrations import transformers as gat


def bert():
    return BertModel(small())


def small():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 30}
    return BertConfig(**sizes, num_hidden_layers=2, num_attention_heads=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"layers": "all"},
            r"layers must be a number, a list or range of numbers, or None for all layers",
        ),
        ({"layers": 2}, r"layers must be numbers in -2 .. 1 .*got 2"),
        ({"layers": -3}, r"layers must be numbers in -2 .. 1 .*got -3"),
        ({"graph": ga.causal_graph(4)}, "write graph=lambda num_targets, num_sources: graph"),
        ({"graph": ga.causal_graph}, r"graph must be a function of two arguments"),
    ],
)
def test_configure_says_what_is_allowed(options, message):
    if "graph" in options and options["graph"] is ga.causal_graph:
        options = {"graph": lambda n: ga.causal_graph(n)}
    with pytest.raises(ValueError, match=message):
        gat.configure(bert(), **options)


def test_each_plug_in_names_the_other():
    with pytest.raises(ValueError, match=r"use graphattn\.integrations\.transformers\.configure"):
        gtorch.convert(bert())
    with pytest.raises(ValueError, match=r"graphattn\.integrations\.torch\.convert"):
        gat.configure(nn.TransformerEncoderLayer(16, 2))


def test_plain_pytorch_refuses_what_configure_refuses():
    layer = nn.TransformerEncoderLayer(16, 2)
    with pytest.raises(ValueError, match="layers must be a number, a list or range of numbers"):
        gtorch.convert(layer, layers="all")
    with pytest.raises(ValueError, match="function of two arguments"):
        gtorch.convert(layer, graph=lambda n: ga.causal_graph(n))


def test_a_wrong_number_of_patches_names_grid_and_prefix_tokens():
    layer = gtorch.timm_attention(grid=(2, 2), radius=1)(16, num_heads=2)
    with pytest.raises(ValueError, match=r"graph must have 9 targets.*grid=.*prefix_tokens="):
        layer(torch.zeros(1, 9, 16))


def test_attributes_of_the_config_are_taken_on_loading(tmp_path):
    model = BertForSequenceClassification(small())
    gat.configure(model, window=2)
    model.save_pretrained(tmp_path)
    options = {"num_labels": 5, "ignore_mismatched_sizes": True, "hidden_dropout_prob": 0.3}
    again = gat.from_pretrained(tmp_path, **options, dtype=torch.float64)
    assert again.classifier.weight.shape == (5, 16)
    assert again.classifier.weight.dtype == torch.float64
    assert again.config.hidden_dropout_prob == 0.3


def test_another_implementation_than_was_configured_is_refused(tmp_path):
    model = bert()
    gat.configure(model, window=2)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="attn_implementation must be 'graphattn'"):
        gat.from_pretrained(tmp_path, attn_implementation="sdpa")
    gat.from_pretrained(tmp_path, attn_implementation="graphattn")


def test_a_folder_of_adapters_is_called_one(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="only adapters of PEFT"):
        gat.from_pretrained(tmp_path)


def test_what_was_done_is_listed_by_module():
    model = bert()
    assert gat.configured(model) == {}
    gat.configure(model, window=3)
    gat.configure(model, layers=[0])
    gat.convert(model, "gka", layers=[0])
    first, last = (f"encoder.layer.{n}.attention.self" for n in (0, 1))
    assert gat.configured(model) == {
        first: [{"call": "convert", "mixer": "gka"}],
        last: [{"call": "configure", "mixer": "dot", "window": 3}],
    }

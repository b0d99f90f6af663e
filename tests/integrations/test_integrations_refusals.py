"""Nothing is ignored in silence: what cannot be computed is refused by name."""

import pytest
import torch
from tiny_models import arguments_of_attention, inputs, logits, tiny
from transformers import AttentionInterface

import graphattn as ga
from graphattn.integrations import transformers as gat
from graphattn.integrations.transformers.attention import HARMLESS
from graphattn.integrations.transformers.conversion.modules import attention_modules
from graphattn.integrations.transformers.options import Options

SUPPORTED = {
    "attention_mask",
    "dropout",
    "is_causal",
    "position_bias",
    "s_aux",
    "scaling",
    "softcap",
}
TENSORS = {"query", "key", "value"}
# What families of other versions hand to attention, and it would change the result.
REFUSED = (
    "block_indices",
    "cache",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "head_mask",
    "indices",
    "logits_soft_cap",
    "max_length_k",
    "max_length_q",
    "seq_idx",
    "sinks",
)


def a_layer(name="llama"):
    gat.register()
    return attention_modules(tiny(name, implementation="graphattn"))[0][1]


def attend(layer, **more):
    query = torch.randn(1, 4, 6, 8)
    key = torch.randn(1, 2, 6, 8)
    return AttentionInterface()["graphattn"](layer, query, key, key, None, scaling=8**-0.5, **more)


@pytest.mark.every_case
@pytest.mark.parametrize("name", [*REFUSED, "an_argument_of_tomorrow"])
def test_an_unknown_argument_is_refused_by_name(name):
    layer = a_layer()
    for value in (torch.ones(4), 3, 0.5, "text", False):
        with pytest.raises(ValueError, match=rf"{name} of LlamaAttention"):
            attend(layer, **{name: value})
    assert torch.isfinite(attend(layer, **{name: None})[0]).all()


@pytest.mark.long
def test_every_argument_of_the_installed_version_is_supported_harmless_or_refused():
    """A new version may bring an argument; whoever updates decides here what it means."""
    arguments = arguments_of_attention()
    assert {"scaling", "dropout", "s_aux", "softcap", "sliding_window"} <= arguments.keys()
    assert arguments.keys() <= SUPPORTED | TENSORS | HARMLESS | set(REFUSED), arguments


@pytest.mark.every_case
@pytest.mark.parametrize("name", sorted(HARMLESS))
def test_a_harmless_argument_changes_nothing(name):
    """`is_causal` is not among them: it is read, by its own name."""
    if name in ("is_causal", "output_attentions"):
        pytest.skip("read, by its own name")
    layer = a_layer()
    torch.manual_seed(0)
    expected = attend(layer)[0]
    torch.manual_seed(0)
    assert torch.equal(attend(layer, **{name: 3})[0], expected)


@pytest.mark.parametrize("mixer", ["rbf", "krause"])
def test_a_softcap_is_for_dot_products(mixer):
    model = tiny("gemma2")
    with pytest.raises(ValueError, match=r"mixer must be 'dot'.*softcap = 5.0"):
        gat.configure(model, mixer=mixer, window=4)
    layer = a_layer("gemma2")
    layer.graphattn_options = Options(mixer=mixer, window=4)  # and where a call brings one
    with pytest.raises(ValueError, match=r"softcap=5.0"):
        attend(layer, softcap=5.0)


def test_a_model_whose_attention_cannot_be_changed_is_refused_and_not_left_as_it_was(monkeypatch):
    """transformers only warns: the model would go on with its old attention."""
    model = tiny("llama")
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", classmethod(lambda cls: False))
    with pytest.raises(ValueError, match=r"made with attn_implementation='graphattn'.*got 'eager'"):
        gat.configure(model, window=4)
    assert getattr(model.config, "graphattn", None) is None
    made = tiny("llama", implementation="graphattn")
    assert gat.configure(made, window=4) == [0, 1]


@pytest.mark.parametrize("sizes", [(7, 7), (16, 7), (4, 16)])
def test_a_graph_of_the_wrong_size_is_refused(sizes):
    model = tiny("llama")
    gat.configure(model, graph=lambda num_targets, num_sources: ga.bipartite_complete_graph(*sizes))
    with pytest.raises(ValueError, match=r"graph\(16, 16\) must have 16 targets.*num_sources"):
        logits(model, **inputs("llama"))


def test_a_graph_function_must_return_a_graph():
    model = tiny("llama")
    gat.configure(model, graph=lambda num_targets, num_sources: torch.ones(16, 16))
    with pytest.raises(ValueError, match="must return a TokenGraph"):
        logits(model, **inputs("llama"))

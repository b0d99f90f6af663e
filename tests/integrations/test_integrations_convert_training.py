"""Converted models are counted, saved, copied, trained, adapted and compiled like others."""

import copy
import pickle

import convertible
import pytest
import torch
import transformers
from convertible import inputs_of, logits, model_of

from graphattn.integrations import transformers as gat
from graphattn.integrations.transformers.conversion.modules import attention_modules

OPTIONS = {
    "gka": {"normalize": True},
    "vlt": {},
    "krause": {"top_k": 4},
    "consensus": {"edge_hidden": 6, "rank": 2},
}
DIM, HEADS, D = 32, 4, 8


def converted(name, mixer, **options):
    return convertible.converted(name, mixer, "graphattn", **{**OPTIONS[mixer], **options})


def loss_of(model, inputs):
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    return model(**inputs, labels=labels).loss


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("name", "bias", "grouped"), [("Llama", 0, 4), ("Llama", 0, 2), ("Bert", 1, 4), ("GPT2", 1, 4)]
)
def test_parameters_are_as_many_as_formulas_say(name, bias, grouped):
    """GKA: a quarter of attention's, plus a sigma per head; consensus by Table 9's network."""
    one = DIM * DIM + bias * DIM  # a projection
    small = DIM * grouped * D + bias * grouped * D
    xi, rank = 6, 2
    network = 2 * HEADS * D * xi + HEADS * xi  # the first layer, on both ends of an edge
    network += 2 * (HEADS * xi + HEADS) + HEADS * rank * D * (xi + 1)
    gained = {
        "gka": HEADS - one - 2 * small,
        "vlt": -small,
        "krause": HEADS,
        "consensus": network + one - (one + 2 * small),
    }
    for mixer, expected in gained.items():
        if grouped < HEADS and mixer == "vlt":
            continue
        changes = {"num_key_value_heads": grouped} if name == "Llama" else {}
        model = model_of(name, **changes)
        before = model.num_parameters()
        gat.convert(model, mixer=mixer, **OPTIONS[mixer])
        assert model.num_parameters() - before == 2 * expected


def test_gka_has_the_count_of_its_paper():
    """12 layers of DeiT-Tiny: 0.44 M parameters and 36 sigmas in attention."""
    config = transformers.DeiTConfig(
        hidden_size=192, num_attention_heads=3, intermediate_size=768, num_hidden_layers=12
    )
    with torch.device("meta"):
        model = transformers.DeiTModel(config)
    gat.convert(model, mixer="gka")
    layers = [module for _, module in attention_modules(model)]
    of_layers = sum(p.numel() for layer in layers for p in layer.parameters())
    outside = 0 if hasattr(layers[0], "o_proj") else 12 * (192 * 192 + 192)  # older transformers
    assert of_layers + outside == 12 * (192 * 192 + 192 + 3)
    assert {p.device.type for p in model.parameters()} == {"meta"}


@pytest.mark.parametrize("mixer", OPTIONS)
@pytest.mark.parametrize("name", ["Llama", "GPT2", "Bert", "GPTNeoX"])
def test_saved_copied_and_pickled_models_say_the_same(name, mixer, tmp_path):
    model = converted(name, mixer, layers=[1])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    inputs = inputs_of(name)
    before = logits(model, inputs)
    model.save_pretrained(tmp_path)
    loaded = gat.from_pretrained(tmp_path)
    loaded.set_attn_implementation("graphattn")
    for twin in (loaded, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(twin, inputs), before)
        assert twin.state_dict().keys() == model.state_dict().keys()
    step = {"call": "convert", "mixer": mixer, "layers": [1], **OPTIONS[mixer]}
    assert loaded.config.graphattn["steps"] == [step]


@pytest.mark.parametrize("mixer", OPTIONS)
@pytest.mark.parametrize("name", ["Llama", "Bert"])
def test_gradient_checkpointing_of_both_kinds_changes_no_gradient(name, mixer):
    model, inputs = converted(name, mixer).train(), inputs_of(name)
    gradients = []
    for reentrant in (None, True, False):
        model.zero_grad()
        if reentrant is not None:
            options = {"use_reentrant": reentrant}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
            model.enable_input_require_grads()
        loss_of(model, inputs).backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for other in gradients[1:]:
        for mine, theirs in zip(gradients[0], other, strict=True):
            torch.testing.assert_close(mine, theirs)
    for parameter in attention_modules(model)[0][1].parameters():
        assert parameter.grad.norm() > 0


@pytest.mark.parametrize("mixer", OPTIONS)
def test_dropout_of_weights_is_the_models_and_ends_with_training(mixer):
    model = model_of("Llama", attention_dropout=0.5)
    gat.convert(model, mixer=mixer, **OPTIONS[mixer])
    inputs = inputs_of("Llama", padding=None)
    assert torch.equal(logits(model, inputs), logits(model, inputs))
    model.train()
    same = torch.equal(logits(model, inputs), logits(model, inputs))
    assert same == (mixer == "consensus")  # which has no weights to drop


@pytest.mark.parametrize("mixer", ["gka", "vlt", "consensus"])
@pytest.mark.parametrize("name", ["Llama", "Bert"])
def test_half_precision_and_autocast(name, mixer):
    model, inputs = converted(name, mixer), inputs_of(name)
    exact = logits(model, inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        automatic = logits(model, inputs)
        loss_of(model, inputs).backward()
    half = logits(model.to(torch.bfloat16), inputs)
    assert half.dtype == torch.bfloat16
    for result in (automatic, half):
        assert (result.float() - exact).norm() <= 0.05 * exact.norm()


@pytest.mark.long
@pytest.mark.parametrize(  # top-k compiles for minutes
    ("name", "mixer"),
    [("Llama", "gka"), ("Bert", "gka"), ("Llama", "vlt"), ("Llama", "consensus")],
)
def test_a_plain_mask_compiles_without_a_break_at_three_lengths(name, mixer):
    torch._dynamo.reset()
    model = converted(name, mixer)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for length in (9, 13, 21):
        inputs = {"input_ids": inputs_of(name, length)["input_ids"]}
        torch.testing.assert_close(logits(compiled, inputs), logits(model, inputs))
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("mixer", "modules"),
    [("gka", ["bandwidth"]), ("krause", ["bandwidth"]), ("consensus", ["edge_net", "source_proj"])],
)
def test_new_parameters_are_trained_and_saved_with_an_adapter(mixer, modules, tmp_path):
    """PEFT trains and saves what modules_to_save names; other parameters it freezes in silence."""
    peft = pytest.importorskip("peft")
    base = converted("Llama", mixer)
    twin = copy.deepcopy(base)
    config = peft.LoraConfig(target_modules=["o_proj"], modules_to_save=modules)
    model = peft.get_peft_model(base, config)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert {m for m in modules for name in trained if f"{m}.modules_to_save" in name} == set(
        modules
    )
    inputs = inputs_of("Llama")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model, inputs).backward()
        optimizer.step()
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(twin, tmp_path)
    torch.testing.assert_close(logits(again, inputs), logits(model, inputs))
    with model.disable_adapter():
        plain = logits(model, inputs)
    assert not torch.allclose(plain, logits(model, inputs))

"""Models with graph attention are trained, copied, compiled and saved like any other."""

import copy
import pickle
from typing import Any

import pytest
import torch
from tiny_models import (
    families,
    gradients,
    inputs,
    logits,
    real,
    relative_difference,
    tiny,
    twins,
)

from graphattn.integrations import transformers as gat

KRAUSE: dict[str, Any] = {"mixer": "krause", "window": 6, "top_k": 3}
MIXERS: dict[str, dict[str, Any]] = {
    "dot": {"mixer": "dot"},
    "dot-window": {"mixer": "dot", "window": 5},
    "rbf": {"mixer": "rbf"},
    "krause": KRAUSE,
}
SOME = [name for name in ("llama", "gemma2", "bert", "modernbert") if name in families()]


def configured(name, options=None, **more):
    gat.register()
    model = tiny(name, implementation="graphattn", **more)
    gat.configure(model, **(options or {}))
    return model


def fits(name, options):
    return name != "gemma2" or options["mixer"] == "dot"  # softcap is for dot products


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("name", [n for n in (*SOME, "gpt_oss", "esm") if n in families()])
def test_checkpointed_layers_have_the_same_gradients(name, mixer, padding, reentrant):
    if not fits(name, MIXERS[mixer]):
        pytest.skip("softcap is for dot products")
    model = without_dropout(configured(name, MIXERS[mixer])).train()
    given = inputs(name, padding=padding)
    more = {"use_cache": False} if model.config.model_type in ("llama", "gemma2") else {}
    expected = gradients(model, given, **more)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    actual = gradients(model, given, **more)
    assert actual.keys() == expected.keys()
    for parameter in expected:
        assert relative_difference(actual[parameter], expected[parameter]) < 1e-12, parameter


def without_dropout(model):
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout", "dropout_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def test_dropout_drops_weights_in_training_only():
    model = configured("llama", attention_dropout=0.5)
    given = inputs("llama")
    sure = logits(model, **given)
    assert torch.equal(logits(model, **given), sure)
    model.train()
    torch.manual_seed(0)
    first, second = logits(model, **given), logits(model, **given)
    torch.manual_seed(0)
    assert torch.equal(logits(model, **given), first)
    assert not torch.equal(first, second)
    assert not torch.equal(first, sure)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "mixer"),
    [("llama", "dot"), ("llama", "krause"), ("bert", "rbf"), ("mistral", "dot-window")],
)
def test_plain_masks_compile_whole_at_three_lengths(name, mixer):
    torch._dynamo.reset()
    model = configured(name, MIXERS[mixer], dtype=torch.float32)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for length in (16, 24, 9):
        for padding in (None, "right"):
            given = inputs(name, length=length, padding=padding)
            result = real(logits(compiled, **given), given)
            assert relative_difference(result, real(logits(model, **given), given)) < 1e-5


@pytest.mark.long
def test_a_compiled_model_trains():
    torch._dynamo.reset()
    model = configured("llama", KRAUSE)
    given = inputs("llama", padding="right")
    expected = gradients(model, given, use_cache=False)
    model.forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    actual = gradients(model, given, use_cache=False)
    for parameter in expected:
        assert relative_difference(actual[parameter], expected[parameter]) < 1e-10, parameter


@pytest.mark.parametrize("name", ["llama", "bert", "gpt_oss", "vit"])
def test_autocast_is_no_less_accurate_than_eager_attention_in_autocast(name):
    eager, ours = twins(name, dtype=torch.float32)
    given = inputs(name, dtype=torch.float32)
    exact = logits(eager, **given)
    with torch.autocast("cpu", torch.bfloat16):
        narrow, result = logits(eager, **given), logits(ours, **given)
    band = torch.finfo(torch.bfloat16).eps * float(exact.abs().max())
    allowed = 2 * (float((narrow.float() - exact).abs().mean()) + band)
    assert float((result.float() - exact).abs().mean()) <= allowed  # experts may change: no maximum


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mixer", MIXERS)
def test_half_precision_stays_half_precision(mixer, dtype):
    exact = configured("llama", MIXERS[mixer], dtype=torch.float32)
    model = configured("llama", MIXERS[mixer], dtype=torch.float32).to(dtype)
    given = inputs("llama", padding="right")
    actual = real(logits(model, **given), given)
    assert actual.dtype == dtype
    expected = real(logits(exact, **given), given)
    rounding = (actual.float() - expected).abs().mean() / expected.abs().mean()
    assert rounding < 40 * torch.finfo(dtype).eps  # top-k may choose another key on the way


@pytest.mark.parametrize("mixer", MIXERS)
def test_copies_and_pickles_compute_the_same(mixer):
    model = configured("llama", {**MIXERS[mixer], "layers": [1]})
    given = inputs("llama", padding="left")
    expected = logits(model, **given)
    clone = copy.deepcopy(model)
    assert torch.equal(logits(clone, **given), expected)
    assert torch.equal(logits(pickle.loads(pickle.dumps(model)), **given), expected)
    gat.configure(clone, mixer="dot")  # and a copy goes its own way
    assert torch.equal(logits(model, **given), expected)
    assert torch.equal(logits(clone, **given), logits(configured("llama"), **given))


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_the_trainer_learns_the_same_as_with_eager_attention(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    texts = inputs(name, batch=16, length=12, dtype=torch.float32)["input_ids"]
    items = [{"input_ids": text, "labels": text} for text in texts]

    def losses(model, folder):
        arguments = transformers.TrainingArguments(
            str(tmp_path / folder),
            max_steps=6,
            per_device_train_batch_size=8,
            logging_steps=1,
            learning_rate=3e-3,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            seed=0,
        )
        trainer = transformers.Trainer(without_dropout(model), arguments, train_dataset=items)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    eager, ours = twins(name, dtype=torch.float32)
    expected = losses(eager, "eager")
    assert losses(ours, "ours") == pytest.approx(expected, rel=1e-3)
    krause = configured(name, KRAUSE, dtype=torch.float32)
    learned = losses(krause, "krause")
    assert learned[-1] < learned[0]

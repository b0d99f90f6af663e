"""Training the Krause shortcut: what moves, with which tools, and how it is kept."""

import copy
import importlib.util
import json
import pickle

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft
import transformers
from shortcut_oracle import FAMILIES, disturb, left_padded, tiny_model, with_shortcut

from graphattn.integrations import transformers as gat

KEPT = "krause.bandwidth", "krause.gate"


def tokens_of(batch=2, length=20, seed=0):
    return torch.randint(3, 50, (batch, length), generator=torch.Generator().manual_seed(seed))


def logits_of(model, tokens, **given):
    with torch.no_grad():
        return model(tokens, **{"use_cache": False} | given).logits


def gradients(model, tokens, **given):
    model.zero_grad()
    model(tokens, labels=tokens, use_cache=False, **given).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def trainable(model):
    return {name for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_leave_the_model_as_it_is_and_train_both_branches(family):
    plain, model = tiny_model(family), tiny_model(family)
    gat.add_krause_shortcut(plain, window=8, top_k=3, lora_rank=None)
    gat.add_krause_shortcut(model, window=8, top_k=3, lora_rank=4, lora_alpha=8)
    tokens = tokens_of()
    assert torch.equal(logits_of(model, tokens), logits_of(plain, tokens))  # B starts at 0
    expected = set()
    for layer in range(2):
        at = f"model.layers.{layer}.self_attn."
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            for part in ("lora_A", "lora_B"):
                expected |= {f"{at}{b}{name}.{part}.default.weight" for b in ("", "krause.")}
        expected |= {
            f"{at}krause.bandwidth.modules_to_save.default.log_sigma",
            f"{at}krause.gate.modules_to_save.default.weight",
            f"{at}krause.gate.modules_to_save.default.bias",
        }
    assert trainable(model) == expected
    adapter = model.model.layers[0].self_attn.krause.q_proj
    assert adapter.scaling["default"] == 8 / 4
    assert adapter.lora_A["default"].weight.shape == (4, 32)
    disturb(model)
    for name, gradient in gradients(model, tokens).items():
        assert gradient.abs().max() > 0, name


def test_adapters_only_in_chosen_layers():
    model = tiny_model()
    gat.add_krause_shortcut(model, lora_rank=2, layers=[1])
    assert all(".layers.1." in name for name in trainable(model))


def test_without_adapters_the_model_stays_as_trainable_as_it_was():
    model = tiny_model().requires_grad_(False)
    gat.add_krause_shortcut(model, lora_rank=None)
    assert trainable(model) == {name for name, _ in model.named_parameters() if "krause" in name}
    model = tiny_model()
    gat.add_krause_shortcut(model, lora_rank=None)
    assert len(trainable(model)) == len(list(model.parameters()))


def test_without_peft_it_says_so_and_changes_nothing(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "peft" else find(name, *a)
    )
    model = tiny_model()
    with pytest.raises(ImportError, match=r"lora_rank = 16 needs the peft library"):
        gat.add_krause_shortcut(model)
    assert not any("krause" in name for name, _ in model.named_parameters())
    gat.add_krause_shortcut(model, lora_rank=None)


def test_models_with_adapters_are_refused():
    model = tiny_model()
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"model must be a model of transformers"):
        gat.add_krause_shortcut(wrapped)
    with pytest.raises(
        ValueError, match=r"plain nn.Linear projections.*got Linear in model\.layers\.0"
    ):
        gat.add_krause_shortcut(model, lora_rank=None)
    model = tiny_model()
    gat.add_krause_shortcut(model, layers=[0])
    with pytest.raises(
        ValueError, match=r"lora_rank must be None if the model already has adapters"
    ):
        gat.add_krause_shortcut(model, layers=[1])


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_changes_no_gradient(reentrant):
    model, tokens, mask = tiny_model(), tokens_of(), left_padded([20, 11], 20)
    gat.add_krause_shortcut(model, window=8, top_k=3)
    disturb(model)
    model.train()
    expected = gradients(model, tokens, attention_mask=mask)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    actual = gradients(model, tokens, attention_mask=mask)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in actual)


def test_half_precision_and_autocast_stay_near():
    tokens = tokens_of()
    model = tiny_model(scale=2.0)
    gat.add_krause_shortcut(model, window=8, top_k=None, init_sigma=2.0)
    exact = logits_of(model, tokens)
    with torch.autocast("cpu", torch.bfloat16):
        logits = logits_of(model, tokens)
        gradients(model, tokens)
    assert (logits - exact).abs().max() < 0.05 * exact.abs().max()
    half = tiny_model(scale=2.0, dtype=torch.bfloat16)
    gat.add_krause_shortcut(half, window=8, top_k=None, init_sigma=2.0)
    logits = logits_of(half, tokens)
    assert logits.dtype == torch.bfloat16
    assert (logits - exact).abs().max() < 0.05 * exact.abs().max()
    # What is trained is kept in float32, or small steps would be rounded away.
    kinds = {name: p.dtype for name, p in half.named_parameters()}
    assert {kinds[name] for name in trainable(half)} == {torch.float32}
    assert {kinds[name] for name in kinds if "base_layer" in name} == {torch.bfloat16}
    generated = half.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert generated.shape == (2, 24)


def test_attention_dropout_drops_in_training_alone():
    model = with_shortcut(model=tiny_model(attention_dropout=0.5))
    krause, tokens = model.model.layers[0].self_attn.krause, tokens_of()
    assert torch.equal(logits_of(model, tokens), logits_of(model, tokens))
    model.train()
    assert not torch.equal(logits_of(model, tokens), logits_of(model, tokens))
    q, k, v = torch.randn(2, 12, 4, 8), torch.randn(2, 12, 2, 8), torch.ones(2, 12, 2, 8)
    dropped = krause.attend(q, k, v, None, 0, 0.5)
    assert not torch.allclose(dropped, torch.ones_like(dropped))


def test_copies_and_pickles_compute_the_same():
    tokens = tokens_of()
    for rank in (None, 4):
        model = with_shortcut(lora_rank=rank)
        expected = logits_of(model, tokens)
        twin = copy.deepcopy(model)
        assert torch.equal(logits_of(pickle.loads(pickle.dumps(model)), tokens), expected)
        disturb(model, seed=5)
        assert torch.equal(logits_of(twin, tokens), expected)
        assert not torch.equal(logits_of(model, tokens), expected)


# Files.


@pytest.mark.parametrize("rank", [None, 4])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_files_hold_all_that_was_added(tmp_path, family, rank, dtype):
    model = with_shortcut(family, dtype=dtype, lora_rank=rank, layers=[1])
    model.save_pretrained(tmp_path)
    again = gat.from_pretrained(tmp_path)
    before, kept = dict(model.named_parameters()), dict(again.named_parameters())
    assert before.keys() == kept.keys()
    for name, parameter in before.items():
        assert parameter.dtype == kept[name].dtype, name
        assert torch.equal(parameter, kept[name]), name
    assert trainable(again) == trainable(model)
    tokens = tokens_of()
    assert torch.equal(logits_of(again, tokens), logits_of(model, tokens))
    assert type(again) is type(model)
    step = {
        "call": "add_krause_shortcut",
        "window": 8,
        "top_k": 3,
        "lora_rank": rank,
        "lora_alpha": 32,
        "init_sigma": 2.0,
        "layers": [1],
    }
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["graphattn"]["steps"] == [step]
    again.save_pretrained(tmp_path / "twice")
    config = json.loads((tmp_path / "twice" / "config.json").read_text())
    assert config["graphattn"]["steps"] == [step]


def test_it_stands_beside_configured_attention_in_files_too(tmp_path):
    model = with_shortcut(lora_rank=4)
    gat.configure(model, mixer="krause", window=6, top_k=2, layers=[0])
    model.save_pretrained(tmp_path)
    again = gat.from_pretrained(tmp_path)
    tokens = tokens_of()
    assert torch.equal(logits_of(again, tokens), logits_of(model, tokens))


def test_peft_keeps_its_own_adapters_of_a_shortcut(tmp_path):
    """PEFT adds the adapters to a shortcut made without any, and keeps them in its small files."""
    config = peft.LoraConfig(
        r=4,
        target_modules=r".*self_attn\.(krause\.)?[qkvo]_proj",
        modules_to_save=list(KEPT),
    )

    def base():
        model = tiny_model()
        gat.add_krause_shortcut(model, window=8, top_k=3, lora_rank=None)
        return model

    model = peft.get_peft_model(base(), config)
    names = trainable(model)
    assert len([n for n in names if "lora_" in n]) == 2 * 8 * 2
    assert len([n for n in names if "log_sigma" in n]) == 2
    disturb(model)
    model.save_pretrained(tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    again = peft.PeftModel.from_pretrained(base(), tmp_path)
    tokens = tokens_of()
    assert torch.equal(logits_of(again, tokens), logits_of(model, tokens))
    merged = again.merge_and_unload()
    torch.testing.assert_close(logits_of(merged, tokens), logits_of(model, tokens))


def test_adapters_alone_travel_by_pefts_state_dict():
    """lora_rank= adds the same adapters that PEFT would: its functions read and write them."""
    model = with_shortcut(lora_rank=4)
    small = peft.get_peft_model_state_dict(model)
    assert any("log_sigma" in name for name in small)
    assert not any("base_layer" in name for name in small)
    other = tiny_model()
    gat.add_krause_shortcut(other, window=8, top_k=3, lora_rank=4)
    peft.set_peft_model_state_dict(other, small)
    tokens = tokens_of()
    assert torch.equal(logits_of(other, tokens), logits_of(model, tokens))


# Compiled.


@pytest.mark.long
def test_compiled_without_a_break_where_masks_are_plain():
    model = with_shortcut().requires_grad_(False)
    attention = model.model.layers[0].self_attn
    compiled = torch.compile(attention, fullgraph=True)
    for length in (9, 20, 33):
        x = torch.randn(2, length, 32)
        given = {
            "position_embeddings": model.model.rotary_emb(x, torch.arange(length)[None]),
            "attention_mask": None,
        }
        torch.testing.assert_close(compiled(x, **given)[0], attention(x, **given)[0])


def test_merged_adapters_are_not_saved_beside_the_weights_that_hold_them(tmp_path):
    """Loading would add them a second time."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    model, tokens = tiny_model("Llama"), tokens_of()
    gat.add_krause_shortcut(model, window=8, top_k=3, lora_rank=4)
    disturb(model)
    expected = logits_of(model, tokens)
    adapted = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for module in adapted:
        module.merge()
    torch.testing.assert_close(logits_of(model, tokens), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"merged into its weights.*q_proj"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    for module in adapted:
        module.unmerge()
    model.save_pretrained(tmp_path)
    again = gat.from_pretrained(tmp_path)
    torch.testing.assert_close(logits_of(again, tokens), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True, "bf16": True}])
def test_the_trainer_moves_adapters_bandwidths_and_gates_and_nothing_else(tmp_path, options):
    model = tiny_model()
    gat.add_krause_shortcut(model, window=8, top_k=3, lora_rank=4)
    before = {name: p.clone() for name, p in model.named_parameters()}
    settings = {"max_steps": 3, "learning_rate": 1e-2, "report_to": [], "use_cpu": True}
    quiet = {"disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
    arguments = transformers.TrainingArguments(
        str(tmp_path / "run"), **settings, **quiet, **options
    )
    texts = [{"input_ids": text, "labels": text} for text in tokens_of(8)]
    trainer = transformers.Trainer(model, arguments, train_dataset=texts)
    trainer.train()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == trainable(model)
    trainer.save_model(str(tmp_path / "saved"))
    again = gat.from_pretrained(tmp_path / "saved")
    kept = dict(again.named_parameters())
    assert all(torch.equal(p, kept[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("form", ["none", "window", "edges"])
def test_gradients_are_those_of_finite_differences(form):
    model = with_shortcut(dtype=torch.float64, window=5)
    attention = model.model.layers[0].self_attn
    torch.manual_seed(3)
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    keep = torch.ones(2, 9, 9, dtype=torch.bool).tril()
    if form == "window":
        keep = keep & left_padded([9, 6], 9).bool()[:, None]
    if form == "edges":
        keep = keep & ((torch.rand(2, 9, 9) < 0.6) | torch.eye(9, dtype=torch.bool))
    given = {
        "position_embeddings": model.model.rotary_emb(x, torch.arange(9)[None]),
        "attention_mask": None if form == "none" else keep[:, None],
    }
    real = keep.any(-1)[..., None]
    target = torch.randn(2, 9, 32, dtype=torch.float64)

    def loss():
        return (attention(x, **given)[0].where(real, 0) * target).sum()

    loss().backward()
    for name, parameter in attention.krause.named_parameters():
        direction, losses = torch.randn_like(parameter), []
        for step in (1e-6, -2e-6):
            with torch.no_grad():
                parameter.add_(direction, alpha=step)
                losses.append(loss())
        with torch.no_grad():
            parameter.add_(direction, alpha=1e-6)
        slope, gradient = (losses[0] - losses[1]) / 2e-6, (parameter.grad * direction).sum()
        torch.testing.assert_close(gradient, slope, rtol=1e-5, atol=1e-6, msg=name)

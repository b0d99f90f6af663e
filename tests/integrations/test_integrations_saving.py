"""Changed models as files: whole or not at all, and made again from them."""

import copy
import json
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from tiny_models import tiny

transformers = pytest.importorskip("transformers")

from graphattn.integrations import transformers as gat  # noqa: E402
from graphattn.integrations.transformers.files.saving import ADAPTER_MARK, MARK  # noqa: E402

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 19}
TOKENS = torch.arange(12)[None] % 19


def bert(cls=None, **more):
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, intermediate_size=8, **more)
    return (cls or transformers.BertModel)(config).eval()


def llama(**more):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, intermediate_size=8, **more)
    return transformers.LlamaForCausalLM(config).eval()


def configured(model=None, **options):
    model = llama() if model is None else model
    gat.configure(model, **(options or {"mixer": "krause", "window": 4, "layers": [1]}))
    return model


def out(model):
    with torch.no_grad():
        return model(TOKENS)[0]


def assert_same(model, other):
    assert torch.equal(out(model), out(other))
    mine, theirs = model.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def files(folder):
    return {str(path.relative_to(folder)) for path in Path(folder).rglob("*")}


# There and back.


def test_a_model_comes_back_as_it_was(tmp_path):
    model = configured()
    plain = llama()
    assert not torch.allclose(out(model), out(plain))
    model.save_pretrained(tmp_path)
    again = gat.from_pretrained(tmp_path)
    assert_same(model, again)
    assert type(again) is type(model)
    assert again.config.graphattn == model.config.graphattn
    again.save_pretrained(tmp_path / "second")
    assert_same(model, gat.from_pretrained(tmp_path / "second"))


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_stay_tied(tmp_path, tied):
    model = configured(llama(tie_word_embeddings=tied))
    model.save_pretrained(tmp_path)
    again = gat.from_pretrained(tmp_path)
    assert_same(model, again)
    shared = again.lm_head.weight is again.model.embed_tokens.weight
    assert shared == tied


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtype_is_that_of_transformers_and_the_mark_stays_an_integer(tmp_path, dtype):
    configured().save_pretrained(tmp_path)
    model = gat.from_pretrained(tmp_path, dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert getattr(model, MARK).item() == 1
    model.half()
    assert getattr(model, MARK).dtype == torch.int64


def test_places_to_load_from(tmp_path, monkeypatch):
    model = configured()
    model.save_pretrained(tmp_path / "a" / "b")
    assert_same(model, gat.from_pretrained(tmp_path / "a", subfolder="b"))
    monkeypatch.chdir(tmp_path)
    assert_same(model, gat.from_pretrained("a/b", local_files_only=True, revision="main"))
    config = transformers.AutoConfig.from_pretrained("a/b")
    assert_same(model, gat.from_pretrained("a/b", config=config))
    assert_same(model, gat.from_pretrained("a/b", config="a/b"))
    again, info = gat.from_pretrained("a/b", output_loading_info=True)
    assert_same(model, again)
    assert not info["missing_keys"]
    auto = transformers.AutoModelForCausalLM
    assert_same(model, gat.from_pretrained("a/b", model_class=auto))
    pytest.importorskip("accelerate")
    assert_same(model, gat.from_pretrained("a/b", device_map="cpu"))


def test_copies_and_pickles_save_themselves(tmp_path):
    model = configured()
    model.save_pretrained(tmp_path / "before")
    for number, change in enumerate((copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)))):
        other = change(gat.from_pretrained(tmp_path / "before"))
        with torch.no_grad():
            other.lm_head.weight.zero_()
        folder = tmp_path / str(number)
        other.save_pretrained(folder)
        assert_same(other, gat.from_pretrained(folder))
        assert other.save_pretrained.args[0] is other


def test_weights_of_the_plain_model_still_fit():
    model = configured()
    assert model.load_state_dict(llama().state_dict()).missing_keys == []
    with pytest.raises(RuntimeError, match="lm_head"):
        model.load_state_dict({})


# Other classes.


def test_a_base_model_gets_a_head_and_back(tmp_path):
    base = configured(bert(), mixer="rbf")
    base.save_pretrained(tmp_path / "base")
    head = gat.from_pretrained(tmp_path / "base", model_class=transformers.BertForMaskedLM)
    assert all(m.graphattn_options.mixer == "rbf" for m in _attention(head))
    assert torch.equal(
        head.bert.embeddings.word_embeddings.weight, base.embeddings.word_embeddings.weight
    )
    assert getattr(head, MARK).item() == 1
    head.save_pretrained(tmp_path / "head")
    assert_same(head, gat.from_pretrained(tmp_path / "head"))
    back = gat.from_pretrained(tmp_path / "head", model_class=transformers.BertModel)
    assert torch.equal(
        back.embeddings.word_embeddings.weight, base.embeddings.word_embeddings.weight
    )


def test_a_part_that_shares_the_config_of_the_whole(tmp_path):
    model = bert(transformers.BertForMaskedLM)
    gat.configure(model.bert, mixer="rbf")
    model.save_pretrained(tmp_path)
    assert torch.equal(out(model), out(gat.from_pretrained(tmp_path)))


def test_a_part_with_other_numbers_is_refused(tmp_path):
    model = tiny("bart", encoder_layers=1, decoder_layers=1).model
    gat.configure(model.decoder, mixer="rbf", layers=[0])
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="written for a model of 2 attention modules, but"):
        gat.from_pretrained(tmp_path)


def test_weights_of_ours_that_are_missing_are_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    configured().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.0.self_attn.q_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"do not fit the changes in config\.graphattn.*q_proj"):
        gat.from_pretrained(tmp_path)


def _attention(model):
    from graphattn.integrations.transformers.conversion.modules import attention_modules

    return [module for _, module in attention_modules(model)]


# Without this package.


@pytest.mark.long
def test_loading_without_gat_warns(tmp_path):
    configured().save_pretrained(tmp_path)
    code = (
        "import sys, transformers\ntransformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert MARK in done.stdout + done.stderr


def test_loading_by_transformers_with_our_name_raises(tmp_path):
    configured().save_pretrained(tmp_path)
    gat.register()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="graphattn"
    )
    with pytest.raises(ValueError, match=r"integrations\.transformers\.from_pretrained"):
        model(TOKENS)
    with pytest.raises(ValueError, match="contains changes that were not made to this model"):
        gat.configure(model, mixer="rbf")
    model.config.graphattn = None
    gat.configure(model, mixer="rbf")


def test_a_folder_of_transformers_is_refused(tmp_path):
    llama().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="directory must contain a model changed by graphattn"):
        gat.from_pretrained(tmp_path)


# Graphs that files do not hold.


def test_graphs_are_given_again(tmp_path):
    import graphattn as ga

    def ring(targets, sources):
        return ga.causal_window_graph(sources, 2)

    def wide(targets, sources):
        return ga.causal_window_graph(sources, 5)

    model = configured(graph=ring, layers=[0])
    gat.configure(model, graph=wide, layers=[1])
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="graph must be given"):
        gat.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="graph must be a list of 2 functions"):
        gat.from_pretrained(tmp_path, graph=ring)
    assert_same(model, gat.from_pretrained(tmp_path, graph=[ring, wide]))
    assert not torch.equal(out(model), out(gat.from_pretrained(tmp_path, graph=[wide, ring])))
    configured().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="graph must be None"):
        gat.from_pretrained(tmp_path, graph=ring)


# Configs.


def _edited(folder, change):
    path = Path(folder) / "config.json"
    kept = json.loads(path.read_text())
    change(kept["graphattn"])
    path.write_text(json.dumps(kept))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g: g.update(version=2), "written by a newer graphattn"),
        (lambda g: g.update(version="1"), "must contain a version >= 1 and steps"),
        (lambda g: g.update(version=True), "must contain a version >= 1 and steps"),
        (lambda g: g.pop("version"), "must contain a version >= 1 and steps"),
        (lambda g: g.update(steps="configure"), "must contain a version and steps, each"),
        (lambda g: g.update(steps=[3]), "must contain a version and steps, each"),
        (lambda g: g["steps"][0].update(layers=["x"]), "must contain a version and steps, each"),
        (lambda g: g["steps"][0].update(layers=[7]), r"layers must be numbers in -2 \.\. 1"),
        (lambda g: g["steps"][0].update(call="sing"), "contains a change 'sing'"),
        (lambda g: g["steps"][0].update(tempo=3), "tempo"),
        (lambda g: g["steps"][0].update(mixer="waltz"), "mixer must be one of"),
        (lambda g: g["steps"][0].update(modules=9), "a model of 9 attention modules"),
    ],
)
def test_configs_that_cannot_be_read_are_named(tmp_path, change, message):
    configured().save_pretrained(tmp_path)
    _edited(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        gat.from_pretrained(tmp_path)


# Whole or not at all.


def interrupted(monkeypatch, error, after):
    import transformers.modeling_utils as modeling

    write, count = modeling.safe_save_file, 0

    def failing(tensors, filename, *args, **kwargs):
        nonlocal count
        count += 1
        if count > after:
            Path(filename).write_bytes(b"half a file")
            raise error
        return write(tensors, filename, *args, **kwargs)

    monkeypatch.setattr(modeling, "safe_save_file", failing)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("size", ["10KB", "5GB"])
def test_an_interrupted_save_leaves_the_last_good_one(tmp_path, monkeypatch, error, size):
    model = configured()
    folder = tmp_path / "model"
    model.save_pretrained(folder, max_shard_size=size)
    (folder / "tokenizer.json").write_text("{}")
    before = files(tmp_path)
    other = configured(mixer="rbf")
    with torch.no_grad():
        other.lm_head.weight.add_(1)
    with monkeypatch.context() as patch:
        interrupted(patch, error, after=1 if size == "10KB" else 0)
        with pytest.raises(type(error)):
            other.save_pretrained(folder, max_shard_size=size)
        with pytest.raises(type(error)):
            other.save_pretrained(tmp_path / "new" / "folder")
    assert files(tmp_path) == before
    assert_same(model, gat.from_pretrained(folder))


@pytest.mark.parametrize("size", ["5KB", "10KB"])
def test_an_error_while_files_are_moved_puts_them_back(tmp_path, monkeypatch, size):
    """Files of other names, and of the same ones."""
    model = configured()
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    before = {name: (tmp_path / name).read_bytes() for name in files(tmp_path)}
    other = configured(mixer="rbf")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    replace = os.replace
    for good in range(4):
        calls = iter(range(100))

        def failing(source, target, good=good, calls=calls):
            if Path(source).parent.name.startswith(".saving-") and next(calls) >= good:
                raise KeyboardInterrupt
            replace(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", failing)
            with pytest.raises(KeyboardInterrupt):
                other.save_pretrained(tmp_path, max_shard_size=size)
        assert {name: (tmp_path / name).read_bytes() for name in files(tmp_path)} == before
    assert_same(model, gat.from_pretrained(tmp_path))


@pytest.mark.long
def test_a_killed_save_leaves_the_last_good_one_and_the_next_cleans_up(tmp_path):
    model = configured()
    model.save_pretrained(tmp_path)
    before = files(tmp_path)
    code = (
        "import os, signal, sys, transformers\n"
        "import transformers.modeling_utils as modeling\n"
        "from graphattn.integrations import transformers as gat\n"
        "model = gat.from_pretrained(sys.argv[1])\n"
        "modeling.safe_save_file = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)\n"
        "model.save_pretrained(sys.argv[1])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True)
    assert done.returncode == -9
    assert any(name.startswith(".saving-") for name in files(tmp_path) - before)
    assert_same(model, gat.from_pretrained(tmp_path))
    model.save_pretrained(tmp_path)
    assert files(tmp_path) == before


@pytest.mark.long
def test_shards_that_shrink_and_grow_and_variants(tmp_path):
    model = configured()
    (tmp_path / "tokenizer.json").write_text("{}")
    for size in ("5KB", "10KB", "5GB", "10KB", "5KB"):
        with torch.no_grad():
            model.lm_head.weight.add_(1)
        model.save_pretrained(tmp_path, max_shard_size=size)
        assert_same(model, gat.from_pretrained(tmp_path))
        weights = {name for name in files(tmp_path) if name.endswith(".safetensors")}
        shards = [name for name in weights if "-of-" in name]
        assert all(name.endswith(f"-of-{len(shards):05d}.safetensors") for name in shards)
        assert ("model.safetensors" in weights) == (size == "5GB") == (not shards)
    half = copy.deepcopy(model).half()
    for size in ("5GB", "5KB", "5GB"):
        half.save_pretrained(tmp_path, variant="fp16", max_shard_size=size)
        assert_same(model, gat.from_pretrained(tmp_path, dtype=torch.float32))
        assert_same(half, gat.from_pretrained(tmp_path, variant="fp16", dtype=torch.float16))
    assert "tokenizer.json" in files(tmp_path)


def test_links_and_relative_folders(tmp_path, monkeypatch):
    model = configured()
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    model.save_pretrained(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert_same(model, gat.from_pretrained(tmp_path / "real"))
    monkeypatch.chdir(tmp_path)
    for folder in ("here", "./deep/er", "../" + tmp_path.name + "/up", "."):
        model.save_pretrained(folder)
        assert_same(model, gat.from_pretrained(folder))


def test_what_save_pretrained_takes(tmp_path):
    model = configured()
    state = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    state[MARK] = torch.tensor(1)
    model.save_pretrained(tmp_path / "a", state_dict=state)
    again = gat.from_pretrained(tmp_path / "a")
    assert torch.equal(again.lm_head.weight, model.lm_head.weight + 1)
    model.save_pretrained(tmp_path / "b", False)
    llama().save_pretrained(tmp_path / "c", False)  # a process that is not the main one
    assert files(tmp_path / "b") == files(tmp_path / "c")


# With what else people use.


def test_adapters_before_and_after(tmp_path):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=["q_proj"], r=2)
    expected = out(configured())
    after = configured(peft.get_peft_model(llama(), lora).eval())
    before = peft.get_peft_model(configured(), lora).eval()
    for model in (after, before):
        assert torch.equal(out(model), expected)
        merged = model.merge_and_unload()
        folder = tmp_path / str(id(model))
        merged.save_pretrained(folder)
        torch.testing.assert_close(out(gat.from_pretrained(folder)), expected)


def test_loading_adapters_of_a_changed_model_onto_a_plain_one_warns(tmp_path):
    """The warning is that of peft: this package need not be installed."""
    peft = pytest.importorskip("peft")
    llama().save_pretrained(tmp_path / "base")

    def plain():
        return transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")

    def save(model, name):
        lora = peft.LoraConfig(target_modules=["q_proj"], r=2, task_type="CAUSAL_LM")
        peft.get_peft_model(model, lora).save_pretrained(tmp_path / name)
        return tmp_path / name

    changed = plain()
    gat.configure(changed, mixer="krause", window=3, top_k=2)
    folders = save(changed, "changed"), save(plain(), "plain")
    for folder, warns in zip(folders, (True, False), strict=True):
        for load in (
            peft.AutoPeftModelForCausalLM.from_pretrained,
            transformers.AutoModelForCausalLM.from_pretrained,
            lambda folder: peft.PeftModel.from_pretrained(plain(), folder),
        ):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                load(folder)
            assert any(ADAPTER_MARK in str(w.message) for w in caught) == warns


def test_settings_of_adapters_that_two_models_share_are_marked_once(tmp_path):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=["q_proj"], r=2)
    changed, plain = (peft.get_peft_model(model, lora) for model in (configured(), llama()))
    for model, name in ((changed, "changed"), (plain, "plain")):
        model.save_pretrained(tmp_path / name)
        settings = json.loads((tmp_path / name / "adapter_config.json").read_text())
        assert (ADAPTER_MARK in settings) == (name == "changed")
        assert settings["target_modules"] == ["q_proj"]


@pytest.mark.long
def test_trainer_resumes_to_equal_weights(tmp_path):
    pytest.importorskip("accelerate")

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 16

        def __getitem__(self, index):
            ids = (torch.arange(10) * (index + 1)) % 19
            return {"input_ids": ids, "labels": ids}

    def trainer(steps, folder):
        arguments = transformers.TrainingArguments(
            output_dir=str(folder),
            max_steps=steps,
            save_steps=3,
            per_device_train_batch_size=4,
            report_to=[],
            use_cpu=True,
            seed=0,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
        )
        return transformers.Trainer(configured(), arguments, train_dataset=Data())

    whole = trainer(6, tmp_path / "whole")
    whole.train()
    first = trainer(3, tmp_path / "parts")
    first.train()
    second = trainer(6, tmp_path / "parts")
    second.train(resume_from_checkpoint=True)
    assert_same(whole.model.eval(), second.model.eval())
    again = gat.from_pretrained(tmp_path / "parts" / "checkpoint-6")
    assert_same(again, second.model)


def test_code_beside_the_weights(tmp_path):
    (tmp_path / "own_model.py").write_text(
        "from transformers import BertConfig, BertModel\n"
        "class OwnConfig(BertConfig):\n    model_type = 'own-bert'\n"
        "class OwnModel(BertModel):\n    config_class = OwnConfig\n"
    )
    config = transformers.BertConfig(**SIZES, intermediate_size=8).to_dict()
    config |= {
        "model_type": "own-bert",
        "architectures": ["OwnModel"],
        "auto_map": {"AutoConfig": "own_model.OwnConfig", "AutoModel": "own_model.OwnModel"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    taken = {"trust_remote_code": True}
    loaded = transformers.AutoConfig.from_pretrained(tmp_path, **taken)
    model = transformers.AutoModel.from_config(loaded, **taken).eval()
    gat.configure(model, mixer="rbf")
    model.save_pretrained(tmp_path / "changed")
    assert (tmp_path / "changed" / "own_model.py").exists()
    for more in ({}, {"model_class": transformers.AutoModel}):
        again = gat.from_pretrained(tmp_path / "changed", **taken, **more)
        assert torch.equal(out(again), out(model))


@pytest.mark.long
def test_two_processes_of_ddp_learn_as_one(tmp_path):
    code = """
import sys, torch, torch.distributed as dist
sys.path.insert(0, sys.argv[4])
import test_integrations_saving as t
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]),
                        world_size=2)
model = t.configured().train()
wrapped = torch.nn.parallel.DistributedDataParallel(model)
tokens = torch.arange(24).reshape(2, 12) % 19
wrapped(tokens[int(sys.argv[2])][None], labels=tokens[int(sys.argv[2])][None]).loss.backward()
if int(sys.argv[2]) == 0:
    model.save_pretrained(sys.argv[3])
    torch.save({n: p.grad for n, p in model.named_parameters()}, sys.argv[3] + "/grads.pt")
dist.destroy_process_group()
"""
    folder = tmp_path / "saved"
    here = str(Path(__file__).parent)
    arguments = [sys.executable, "-c", code, str(tmp_path / "store")]
    running = [subprocess.Popen([*arguments, str(rank), str(folder), here]) for rank in range(2)]
    assert [process.wait(timeout=300) for process in running] == [0, 0]
    model = configured().train()
    assert_same(model.eval(), gat.from_pretrained(folder))
    tokens = torch.arange(24).reshape(2, 12) % 19
    model(tokens, labels=tokens).loss.backward()
    gradients = torch.load(folder / "grads.pt")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)

"""Models and layers become files and come back from them alone, in another process."""

import json
import os
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import graphattn as ga
from graphattn.nn.files.pretrained import no_larger_than

V, D, H = 11, 16, 4
TOKENS = torch.randint(V, (2, 9), generator=torch.Generator().manual_seed(1))


def encoder(**options):
    torch.manual_seed(0)
    options = {"edge_hidden": 8, "mixer": "mix", **options}
    return ga.models.SequenceEncoder(V, D, 4, H, **options)


def mixed():
    """Layers of several kinds, one with a rotary embedding of its own."""
    rotary = ga.nn.RotaryEmbedding(D // H, base=500.0)
    return encoder(
        mixer=[
            ga.nn.KrauseAttention(D, H, top_k=3, rope=rotary),
            "dot",
            ga.nn.GaussianKernelAttention(D, H, normalize=True, rope=True),
            "consensus",
        ],
        step_size="learned",
        dropout=0.5,
    )


MODELS = {"SA": lambda: encoder(mixer="dot"), "MIX": encoder, "several": mixed}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_model_comes_back_with_every_bit(name, dtype, tmp_path):
    model = MODELS[name]().to(dtype).eval()
    drawn = torch.get_rng_state()
    ga.save(model, tmp_path / "new" / "folder")
    twin = ga.load(tmp_path / "new" / "folder")
    assert torch.equal(torch.get_rng_state(), drawn)  # nothing was drawn on the way
    assert type(twin) is type(model)
    assert repr(twin) == repr(model)
    assert twin.config == model.config
    assert not twin.training
    assert torch.equal(twin(TOKENS), model(TOKENS))
    for parameter in twin.parameters():
        assert type(parameter) is torch.nn.Parameter
        assert parameter.requires_grad
        assert parameter.dtype == dtype


LAYERS = {
    "krause": lambda: ga.nn.KrauseAttention(D, H, top_k=3, init_sigma=0.7),
    "dot": lambda: ga.nn.DotProductAttention(D, H, kv_heads=2, rope=True),
    "gaussian": lambda: ga.nn.GaussianKernelAttention(D, H, eps=0.1),
    "consensus": lambda: ga.nn.SelfConsensus(D, H, edge_hidden=8, step_size="learned"),
    "block": lambda: ga.nn.PreNormBlock(ga.nn.KrauseAttention(D, H, top_k=3), mlp_ratio=2),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_comes_back_too_and_the_methods_are_the_same(name, tmp_path):
    layer = LAYERS[name]()
    x, graph = torch.randn(2, 9, D), ga.window_path_graph(9, 2)
    layer.save_pretrained(tmp_path)
    for twin in (ga.load(tmp_path), type(layer).from_pretrained(str(tmp_path))):
        assert torch.equal(twin(x, graph), layer(x, graph))


def test_the_files_are_those_of_hugging_face(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model = encoder()
    ga.save(model, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]
    tensors = safetensors.load_file(tmp_path / "model.safetensors")
    assert {name: t.shape for name, t in tensors.items()} == {
        name: p.shape for name, p in model.named_parameters()
    }
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("class") == "SequenceEncoder"
    assert config.pop("graphattn_version") == ga.__version__
    assert config == model.config
    twin = encoder()  # safetensors itself reads it into a model
    twin.reset_parameters()
    safetensors.load_model(twin, tmp_path / "model.safetensors")
    assert torch.equal(twin(TOKENS), model(TOKENS))


def test_weights_under_two_names_stay_one(tmp_path):
    model = encoder(mixer="dot")
    model.head.weight = model.embedding.weight
    model.blocks[3].mlp = model.blocks[1].mlp  # a whole part of two blocks
    ga.save(model, tmp_path)
    twin = ga.load(tmp_path)
    assert twin.head.weight is twin.embedding.weight
    assert twin.blocks[3].mlp[0].weight is twin.blocks[1].mlp[0].weight
    assert torch.equal(twin(TOKENS), model(TOKENS))
    assert len(list(twin.parameters())) == len(list(model.parameters()))
    twin(TOKENS).sum().backward()
    assert twin.embedding.weight.grad is twin.head.weight.grad


def test_parts_of_one_storage_that_are_not_one_tensor_come_apart(tmp_path):
    model = ga.nn.DotProductAttention(D, H)
    both = torch.randn(2 * D, D)
    model.query_proj.weight = torch.nn.Parameter(both[:D])
    model.key_proj.weight = torch.nn.Parameter(both[D:])
    ga.save(model, tmp_path)
    twin = ga.load(tmp_path)
    assert torch.equal(twin.query_proj.weight, both[:D])
    assert torch.equal(twin.key_proj.weight, both[D:])


def test_what_was_set_later_comes_back(tmp_path):
    layer = ga.nn.KrauseAttention(D, H, top_k=2)
    layer.top_k = 5
    ga.save(layer, tmp_path)
    assert ga.load(tmp_path).top_k == 5


def test_saving_again_replaces_the_files(tmp_path):
    first, second = encoder(), encoder(mixer="dot")
    ga.save(first, tmp_path)
    held = ga.load(tmp_path)
    ga.save(second, tmp_path)
    assert torch.equal(held(TOKENS), first(TOKENS))  # it does not read the file any more
    assert torch.equal(ga.load(tmp_path)(TOKENS), second(TOKENS))
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]


# Classes of one's own.


class Near(ga.nn.KrauseAttention):
    def __init__(self, width, near=2):
        super().__init__(width, H, top_k=near)


class Stepped(ga.models.SequenceEncoder):
    """Computes with numbers while it is made, and keeps some that are not saved."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.rates = torch.linspace(0, 1, 4).tolist()
        self.register_buffer("scale", torch.full((3,), 2.0), persistent=False)


class Bare(ga.nn.KrauseAttention):
    """Says nothing of what it hands on."""

    def __init__(self, *args):
        super().__init__(*args, top_k=3)


class Mean(torch.nn.Module):
    dim = D

    def forward(self, x, graph, *, valid=None, positions=None):
        return x


def test_a_class_of_one_s_own_is_made_by_its_own_from_pretrained_only(tmp_path):
    layer = Near(D, near=3)
    ga.save(layer, tmp_path)
    twin = Near.from_pretrained(tmp_path)
    assert (type(twin), twin.top_k) == (Near, 3)
    with pytest.raises(ValueError, match=r"a class of graphattn, got '.*test_models_files\.Near'"):
        ga.load(tmp_path)
    with pytest.raises(ValueError, match="must be of a KrauseAttention"):
        ga.nn.KrauseAttention.from_pretrained(tmp_path)


def test_a_constructor_that_computes_is_run_with_numbers(tmp_path):
    model = Stepped(V, D, 2, H, mixer="dot")
    ga.save(model, tmp_path)
    drawn = torch.get_rng_state()
    twin = Stepped.from_pretrained(tmp_path)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert torch.equal(twin(TOKENS), model(TOKENS))
    assert twin.scale.tolist() == [2.0] * 3


REFUSED = {
    "another module": (lambda: torch.nn.Linear(2, 2), "layer or model of graphattn, got Linear"),
    "a module around ours": (lambda: torch.nn.Sequential(encoder()), "got Sequential"),
    "a mixer of one's own": (
        lambda: encoder(mixer=["dot", Mean(), "dot", "dot"]),
        r"contains .*\.Mean in 'mixer'",
    ),
    "a nameless constructor": (lambda: Bare(D, H), "cannot be made again from its config"),
    "a meta model": (lambda: encoder().to("meta"), "on the meta device"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_files_alone_cannot_make_again_is_refused(name, tmp_path):
    make, says = REFUSED[name]
    with pytest.raises(ValueError, match=says):
        ga.save(make(), tmp_path / "folder")
    assert not (tmp_path / "folder" / "config.json").exists()


def test_a_model_rebuilt_by_hand_is_refused_not_saved_wrongly(tmp_path):
    model = encoder(mixer="dot")
    model.blocks[1].mixer = ga.nn.KrauseAttention(D, H)
    with pytest.raises(ValueError, match="has been changed since its constructor made it"):
        ga.save(model, tmp_path)
    model = encoder(mixer="dot")
    model.blocks[1].mixer.rotary = None
    with pytest.raises(ValueError, match=r"'blocks\.1\.mixer\.rotary' is missing"):
        ga.save(model, tmp_path)


# Files that are not as they should be.


@pytest.fixture
def folder(tmp_path):
    ga.save(encoder(rope=False), tmp_path)
    return tmp_path


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_missing_folders_and_files_are_named(folder):
    with pytest.raises(FileNotFoundError, match=r"no/such/folder.*does not exist"):
        ga.load("no/such/folder")
    with pytest.raises(FileNotFoundError, match="is a file"):
        ga.load(folder / "config.json")
    with pytest.raises(ValueError, match="directory must be a path, got 3"):
        ga.load(3)
    (folder / "model.safetensors").rename(folder / "elsewhere")
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors is missing"):
        ga.load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        ga.load(folder)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is not valid JSON"),
        ("{", "is not valid JSON"),
        ("[1]", "must contain an object with a 'class'"),
        ('{"model_type": "bert"}', "must contain an object with a 'class'"),
        ('{"class": ["SequenceEncoder"]}', "must contain an object with a 'class'"),
        ('{"class": "os.system", "command": "true"}', "a class of graphattn, got 'os.system'"),
        ('{"class": "SequenceEncoder"}', "missing 4 required positional arguments"),
        ("[" * 100_000, "is not valid JSON"),
    ],
)
def test_a_broken_config_is_named(folder, text, says):
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=rf"(?s)config\.json.*{says}"):
        ga.load(folder)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rope": True}, "rope=False, but this one has rope=True"),
        ({"heads": 2}, "heads=4, but this one has heads=2"),
        ({"window": 5}, "window=2, but this one has window=5"),
        ({"dim": 32}, "size mismatch"),
        ({"dim": -1}, "dim must be >= 1"),
        ({"layers": 3}, "here it is called 'depth'"),
        ({"class": "KrauseAttention"}, "has no argument 'vocab_size'"),
        (
            {"mixer": ["dot", {"class": "evil.Layer"}, "dot", "dot"]},
            "a class of graphattn, got 'evil.Layer'",
        ),
    ],
)
def test_a_config_that_does_not_fit_the_numbers_is_refused(folder, changes, says):
    edit(folder, **changes)
    with pytest.raises(ValueError, match=rf"(?s)config\.json.*{says}"):
        ga.load(folder)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"depth": 9999}, r"depth must be at most \d+, the number of tensors"),
        ({"mlp_ratio": 30_000}, "its class makes more parameters than the file of weights has"),
        ({"depth": 10**8}, "depth must be at most"),
        ({"depth": 10**400}, "depth must be at most"),
        *(({"dim": dim}, "") for dim in (10**6, 10**9, 10**12, 10**20, 10**400)),
        ({"vocab_size": 10**12}, ""),
    ],
)
def test_a_config_cannot_make_more_than_the_weights(folder, changes, says):
    """A constructor would take all memory, or never end."""
    edit(folder, **changes)
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=rf"(?s)config\.json.*{says}"):
        ga.load(folder)
    assert time.monotonic() - began < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB


def test_a_model_that_another_thread_makes_is_not_counted(folder):
    """Hooks on parameters are for all threads."""
    with no_larger_than({"weight": torch.zeros(1)}):
        with ThreadPoolExecutor(1) as pool:
            made = pool.submit(lambda: torch.nn.Linear(2000, 2000)).result()
        with pytest.raises(ValueError, match="more parameters than the file of weights has"):
            torch.nn.Linear(2000, 2000)
    assert made.weight.shape == torch.nn.Linear(2000, 2000).weight.shape  # and it ends


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_cut_file_of_numbers_is_named(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a complete safetensors file"):
        ga.load(folder)


def test_numbers_without_a_config_load_as_before(folder):
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = safetensors.load_file(folder / "model.safetensors")
    safetensors.save_file(tensors, folder / "model.safetensors")  # of another program
    assert torch.equal(ga.load(folder)(TOKENS), encoder(rope=False)(TOKENS))


def test_half_a_file_is_never_left(folder, monkeypatch):
    before = {path: Path(folder, path).read_bytes() for path in os.listdir(folder)}

    def fails(*args, **kwargs):
        raise OSError("the disk is full")

    monkeypatch.setattr("safetensors.torch.save_file", fails)
    with pytest.raises(OSError, match="disk is full"):
        ga.save(encoder(mixer="dot"), folder)
    assert {path: Path(folder, path).read_bytes() for path in os.listdir(folder)} == before


def test_a_folder_is_not_mistaken_for_a_file(tmp_path):
    layer = ga.nn.KrauseAttention(8, heads=2)
    with pytest.raises(ValueError, match=r"directory must be a folder.*model.pt', the name of a"):
        ga.save(layer, tmp_path / "model.pt")
    assert not (tmp_path / "model.pt").exists()
    (tmp_path / "there").write_text("mine")
    with pytest.raises(ValueError, match=r"directory must be a folder.*there', which is a file"):
        ga.save(layer, tmp_path / "there")
    assert (tmp_path / "there").read_text() == "mine"
    for name in ("model-1.5", "deit.v2", "folder.pt"):
        if name == "folder.pt":
            (tmp_path / name).mkdir()  # of this name already
        ga.save(layer, tmp_path / name)
        assert type(ga.load(tmp_path / name)) is ga.nn.KrauseAttention

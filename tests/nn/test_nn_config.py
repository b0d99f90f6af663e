"""Layers know what they were made with, state dicts carry it, and loading compares it."""

import copy
import inspect
import io
import json
import pickle
from collections import OrderedDict

import pytest
import torch
from nn_by_hand import CASES, DIM, HEADS, ONE_OF_EACH, graph_of, run, tokens_of

import graphattn as ga

Rotary = ga.nn.RotaryEmbedding


def made(kind, **options):
    if kind.endswith("Consensus"):
        options = {"edge_hidden": 8, **options}
    return getattr(ga.nn, kind)(DIM, HEADS, **options)


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_layer_made_from_the_config_is_its_like(case):
    layer = case.make()
    assert json.loads(json.dumps(layer.config)) == layer.config
    assert set(layer.config) == set(inspect.signature(type(layer)).parameters)
    twin = type(layer)(**layer.config).double()
    assert repr(twin) == repr(layer)
    twin.load_state_dict(layer.state_dict())
    graph = graph_of(case)
    tokens = tokens_of(case, graph)
    assert torch.equal(run(twin, tokens, graph), run(layer, tokens, graph))


def test_the_config_is_what_was_said_and_the_defaults():
    layer = ga.nn.KrauseAttention(DIM, heads=HEADS, top_k=3, rope=Rotary(4, base=100))
    assert layer.config == {
        "dim": DIM,
        "heads": HEADS,
        "top_k": 3,
        "init_sigma": None,
        "sigma_per_head": True,
        "kv_heads": None,
        "rope": {"class": "RotaryEmbedding", "dim": 4, "base": 100.0},
        "bias": True,
        "backend": "auto",
        "attention_dropout": 0.0,
        "sink": False,
        "value_embeddings": None,
    }
    block = ga.nn.PreNormBlock(layer, dropout=0.5)
    assert block.config == {
        "mixer": {"class": "KrauseAttention", **layer.config},
        "mlp_ratio": 4.0,
        "dropout": 0.5,
        "drop_path": 0.0,
        "norm": "layer",
        "norm_affine": True,
        "activation": "gelu",
        "bias": True,
        "condition_dim": None,
    }


def test_numbers_of_numpy_and_tensors_become_plain():
    np = pytest.importorskip("numpy")
    layer = ga.nn.KrauseAttention(
        np.int64(DIM), torch.tensor(HEADS), top_k=np.int32(2), init_sigma=np.float32(0.5)
    )
    config = layer.config
    assert [type(config[name]) for name in ("dim", "heads", "top_k")] == [int, int, int]
    assert (config["top_k"], config["init_sigma"]) == (2, 0.5)
    json.dumps(config)


def test_what_is_changed_later_is_in_the_config():
    layer = made("KrauseAttention", top_k=2)
    layer.top_k, layer.backend = 8, "reference"
    assert (layer.config["top_k"], layer.config["backend"]) == (8, "reference")
    assert layer.config["kv_heads"] is None  # resolved by the constructor, not changed
    consensus = made("SelfConsensus")
    consensus.update_rule, consensus.step_size = "target", 0.2
    assert (consensus.config["update"], consensus.config["step_size"]) == ("target", 0.2)
    block = ga.nn.PreNormBlock(made("DotProductAttention"))
    block.mixer = layer
    assert block.config["mixer"]["class"] == "KrauseAttention"


def test_the_config_cannot_be_written_into():
    layer = made("KrauseAttention", rope=Rotary(4))
    layer.config["rope"]["base"] = 3
    layer.config["top_k"] = 5
    assert layer.config["rope"]["base"] == 10000.0
    assert layer.config["top_k"] is None


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=str)
def test_copies_and_pickles_keep_the_config(case):
    layer = case.make()
    assert copy.deepcopy(layer).config == layer.config
    assert pickle.loads(pickle.dumps(layer)).config == layer.config
    assert copy.copy(layer).config == layer.config


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=str)
def test_a_state_dict_carries_the_config_in_its_metadata_and_no_more_keys(case):
    layer = case.make()
    state = through_a_file(layer.state_dict())
    assert state._metadata[""]["config"] == layer.config
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    assert set(state) == {name for name, _ in layer.named_parameters()}


# (layer, options of the file, options of the layer): the weights fit, the mathematics do not.
OTHER_MATHEMATICS = [
    ("KrauseAttention", {"top_k": 2}, {"top_k": 8}, "top_k"),
    ("KrauseAttention", {"top_k": 2}, {}, "top_k"),
    ("KrauseAttention", {"rope": True}, {"rope": False}, "rope"),
    ("KrauseAttention", {"rope": Rotary(4, base=500.0)}, {"rope": True}, "rope"),
    ("DotProductAttention", {"top_k": 2, "rope": True}, {"top_k": 8}, "top_k"),
    ("DotProductAttention", {"qk_norm": True}, {}, "qk_norm"),
    ("DotProductAttention", {"scaling": "sq_inplace"}, {}, "scaling"),
    ("GaussianKernelAttention", {"top_k": 2}, {}, "top_k"),
    ("GaussianKernelAttention", {"eps": 0.5}, {}, "eps"),
    ("GaussianKernelAttention", {"normalize": True}, {}, "normalize"),
    ("SelfConsensus", {"update": "target"}, {}, "update"),
    ("SelfConsensus", {"step_size": 0.1}, {"step_size": 0.2}, "step_size"),
    ("SelfConsensus", {"step_size": 0.1}, {"step_size": "auto"}, "step_size"),
    ("SelfConsensus", {"rope": True}, {"rope": "isometric"}, "rope"),
    ("CrossConsensus", {"rope": "isometric"}, {}, "rope"),
]


@pytest.mark.parametrize(("kind", "saved", "options", "named"), OTHER_MATHEMATICS)
@pytest.mark.parametrize("strict", [True, False])
def test_weights_of_other_mathematics_are_refused(kind, saved, options, named, strict):
    state = through_a_file(made(kind, **saved).state_dict())
    with pytest.raises(RuntimeError, match=rf"saved with {named}=.*, but this one has {named}="):
        made(kind, **options).load_state_dict(state, strict=strict)


@pytest.mark.parametrize(("kind", "saved", "options", "named"), OTHER_MATHEMATICS)
def test_a_plain_dict_loads_the_numbers_alone_as_files_without_a_config_do(
    kind, saved, options, named
):
    source, layer = made(kind, **saved), made(kind, **options)
    layer.load_state_dict(dict(source.state_dict()))
    older = source.state_dict()
    for entry in older._metadata.values():
        for key in ("class", "config"):
            entry.pop(key, None)
    made(kind, **options).load_state_dict(older)
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter, source.get_parameter(name))


def test_the_number_of_heads_is_compared_though_no_shape_shows_it():
    state = ga.nn.DotProductAttention(16, heads=2).state_dict()
    with pytest.raises(RuntimeError, match="saved with heads=2, but this one has heads=4"):
        ga.nn.DotProductAttention(16, heads=4).load_state_dict(state)


@pytest.mark.parametrize(
    ("kind", "saved", "options"),
    [
        ("KrauseAttention", {"backend": "reference"}, {}),
        ("KrauseAttention", {"init_sigma": 0.5}, {}),
        ("KrauseAttention", {"rope": Rotary(4)}, {"rope": True}),
        ("KrauseAttention", {"kv_heads": HEADS}, {}),
        ("DotProductAttention", {"context_dim": DIM}, {}),
        ("KrauseAttention", {"top_k": 2}, {"top_k": 2.0 and 2}),
    ],
)
def test_options_that_change_no_mathematics_load(kind, saved, options):
    source, layer = made(kind, **saved), made(kind, **options)
    layer.load_state_dict(source.state_dict())
    source.load_state_dict(layer.state_dict())


def test_the_weights_of_another_layer_are_refused_where_they_would_fit():
    class Twice(ga.nn.DotProductAttention):
        def log_affinity(self, query_i, key_j):
            return 2 * super().log_affinity(query_i, key_j)

    dot, krause = made("DotProductAttention"), made("KrauseAttention")
    with pytest.raises(RuntimeError, match="those of a KrauseAttention"):
        dot.load_state_dict(krause.state_dict(), strict=False)
    Twice(DIM, HEADS).load_state_dict(dot.state_dict())  # what it is made of


def nested(**options):
    torch.manual_seed(0)
    part = torch.nn.ModuleDict({"mixer": made("KrauseAttention", **options)})
    return torch.nn.Sequential(torch.nn.Linear(4, DIM), part)


def test_layers_inside_any_module_of_torch_are_compared():
    state = through_a_file(nested(top_k=2).state_dict())
    with pytest.raises(RuntimeError, match=r"at '1\.mixer' .*top_k=2, but this one has top_k=8"):
        nested(top_k=8).load_state_dict(state)
    nested(top_k=2).load_state_dict(state)
    without = OrderedDict(state)  # as files were written before
    nested(top_k=8).load_state_dict(without)


def test_assigned_and_compiled_state_dicts_are_compared_too():
    state = nested(top_k=2).state_dict()
    with pytest.raises(RuntimeError, match="top_k=2"):
        nested(top_k=8).load_state_dict(state, assign=True)
    compiled = torch.compile(nested(top_k=2), backend="eager")
    with pytest.raises(RuntimeError, match="top_k=2"):
        torch.compile(nested(top_k=8), backend="eager").load_state_dict(compiled.state_dict())


# Classes of one's own.


class Fixed(ga.nn.KrauseAttention):
    """Has a constructor with parameters of its own."""

    def __init__(self, width, near=2):
        super().__init__(width, HEADS, top_k=near)


class Passing(ga.nn.KrauseAttention):
    """Hands everything on."""

    def __init__(self, *args, scale=2.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.scale = scale


class Quiet(ga.nn.KrauseAttention):
    """No constructor."""


def test_a_subclass_is_described_by_its_own_constructor():
    assert Fixed(DIM).config == {"width": DIM, "near": 2}
    assert Passing(DIM, HEADS, top_k=3).config == {
        "dim": DIM,
        "heads": HEADS,
        "top_k": 3,
        "scale": 2.0,
    }
    assert Quiet(DIM, HEADS).config == ga.nn.KrauseAttention(DIM, HEADS).config
    for layer in (Fixed(DIM), Passing(DIM, HEADS, top_k=3), Quiet(DIM, HEADS)):
        assert repr(type(layer)(**layer.config)) == repr(layer)


@pytest.mark.parametrize("make", [lambda k: Fixed(DIM, k), lambda k: Passing(DIM, HEADS, top_k=k)])
def test_a_subclass_is_compared_with_itself_and_with_the_layer_it_is_made_of(make):
    state = make(2).state_dict()
    make(2).load_state_dict(state)
    made("KrauseAttention", top_k=2).load_state_dict(state)
    make(2).load_state_dict(made("KrauseAttention", top_k=2).state_dict())
    for other in (make(8), made("KrauseAttention", top_k=8)):
        with pytest.raises(RuntimeError, match="trained with other options"):
            other.load_state_dict(state)
        with pytest.raises(RuntimeError, match="trained with other options"):
            make(2).load_state_dict(other.state_dict())


def test_an_option_that_the_file_does_not_know_is_at_its_default():
    state = made("KrauseAttention").state_dict()
    del state._metadata[""]["config"]["top_k"]
    made("KrauseAttention").load_state_dict(state)
    with pytest.raises(RuntimeError, match="top_k=None, but this one has top_k=3"):
        made("KrauseAttention", top_k=3).load_state_dict(state)


def test_an_option_that_only_the_file_knows_is_refused_unless_it_is_off():
    state = made("KrauseAttention").state_dict()
    state._metadata[""]["config"]["softcap"] = None
    made("KrauseAttention").load_state_dict(state)
    state._metadata[""]["config"]["softcap"] = 30.0
    with pytest.raises(RuntimeError, match=r"saved with softcap=30\.0"):
        made("KrauseAttention").load_state_dict(state)


def test_making_a_layer_twice_over_remembers_the_second_time():
    layer = made("KrauseAttention", top_k=2)
    layer.__init__(DIM, HEADS, top_k=5)
    assert layer.config["top_k"] == 5


def test_a_layer_unpickled_from_before_says_that_it_has_no_config():
    layer = made("KrauseAttention")
    for name in ("_arguments", "_base_arguments", "_at_first"):
        del vars(layer)[name]
    with pytest.raises(RuntimeError, match="config of this KrauseAttention is not known"):
        layer.config  # noqa: B018
    assert "config" not in layer.state_dict()._metadata[""]
    layer.load_state_dict(made("KrauseAttention", top_k=2).state_dict())


def test_a_block_prints_its_norms_and_its_perceptron():
    text = repr(ga.nn.PreNormBlock(made("KrauseAttention", top_k=3), dropout=0.25))
    for part in (
        "(mixer): KrauseAttention(16, heads=4, top_k=3)",
        "(mixer_norm): LayerNorm((16,)",
        "(mlp_norm): LayerNorm((16,)",
        "Linear(in_features=16, out_features=64",
        "GELU",
        "Dropout(p=0.25",
    ):
        assert part in text
    model = ga.models.SequenceEncoder(9, DIM, 2, HEADS)
    assert repr(model).count("LayerNorm((16,)") >= 3
    assert "Linear(in_features=16, out_features=64" in repr(model)

"""Mixers by name: which layer a name stands for, its options, and what is refused."""

import typing

import numpy
import pytest
import torch

import graphattn as ga
from graphattn.models.mixers import (
    HALVES,
    KINDS,
    NAMES,
    Halves,
    Kind,
    MixerName,
    mixers,
    one_per_block,
)

DIM, HEADS = 16, 4
LAYERS = {
    "dot": ("DotProductAttention", "all"),
    "dot-window": ("DotProductAttention", "window"),
    "vlt": ("DotProductAttention", "all"),
    "linear": ("LinearAttention", "all"),
    "gka": ("GaussianKernelAttention", "all"),
    "krause": ("KrauseAttention", "window"),
    "dot+krause": ("GatedKrauseAttention", "all"),
    "consensus": ("SelfConsensus", "near"),
}


def made(mixer, depth=4, **options):
    """(layer's class name, reach) of every block."""
    mixings = mixers(mixer, depth, DIM, HEADS, **options)
    return [(type(layer).__name__, reach) for layer, reach in mixings]


def layers_of(mixer, depth=4, **options):
    return [layer for layer, _ in mixers(mixer, depth, DIM, HEADS, **options)]


@pytest.mark.parametrize(
    ("mixer", "meant"),
    [
        ("kruase", "krause"),
        ("GKA", "gka"),
        ("KrauseAttention", "krause"),
        ("SelfConsensus", "consensus"),
        ("dot-consensus", "mix"),
        ("krause_consensus", "krause-consensus"),
    ],
)
def test_a_wrong_name_is_answered_with_the_nearest(mixer, meant):
    for model in (ga.models.CausalLM, ga.models.SequenceEncoder):
        with pytest.raises(ValueError, match=rf"got '{mixer}': did you mean '{meant}'\?$"):
            model(9, 8, 2, 2, mixer=mixer)
    with pytest.raises(ValueError, match=r"got 'zzzz'$"):
        ga.models.CausalLM(9, 8, 2, 2, mixer="zzzz")


def test_the_table_here_is_the_table_there():
    assert set(LAYERS) == set(KINDS) == set(typing.get_args(MixerName))
    assert set(HALVES) == set(typing.get_args(Halves))
    assert (*KINDS, *HALVES) == NAMES


@pytest.mark.parametrize("name", LAYERS)
def test_a_name_is_one_layer_per_block(name):
    assert made(name, 3) == [LAYERS[name]] * 3
    layers = layers_of(name, 3)
    assert len({id(layer) for layer in layers}) == 3
    assert all((layer.dim, layer.heads) == (DIM, HEADS) for layer in layers)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("rope", [False, True, "isometric"])
def test_rope_reaches_every_layer_and_isometric_the_consensus_alone(name, rope):
    (layer,) = layers_of(name, 1, rope=rope)
    assert layer.config["rope"] == (True if rope and name != "consensus" else rope)


@pytest.mark.parametrize("depth", [1, 2, 5, 6])
@pytest.mark.parametrize(
    ("name", "first"), [("mix", "dot"), ("gka-consensus", "gka"), ("krause-consensus", "krause")]
)
def test_of_an_odd_number_of_blocks_the_second_half_has_one_more(name, first, depth):
    half = depth // 2
    expected = [LAYERS[first]] * half + [LAYERS["consensus"]] * (depth - half)
    assert made(name, depth) == expected


def test_the_value_less_transformer_has_no_values_and_takes_no_heads_for_them():
    (layer,) = layers_of("vlt", 1)
    assert layer.value_proj is None
    assert "kv_heads" in KINDS["dot"].options
    assert "kv_heads" not in KINDS["vlt"].options
    assert "value_projection" not in KINDS["dot"].options


def test_a_list_holds_names_and_layers_of_ones_own_one_per_block():
    layer, plain = ga.nn.LinearAttention(DIM, HEADS), torch.nn.Linear(DIM, DIM)
    mixer = ["dot-window", layer, "consensus", plain]
    assert made(mixer) == [
        ("DotProductAttention", "window"),
        ("LinearAttention", "all"),
        ("SelfConsensus", "near"),
        ("Linear", "all"),
    ]
    layers = layers_of(mixer)
    assert layers[1] is layer
    assert layers[3] is plain
    assert layers_of(tuple(mixer))[1] is layer
    assert layers_of(torch.nn.ModuleList([layer]), 1) == [layer]
    assert layers_of(layer, 1) == [layer]
    assert one_per_block("krause", 2) == ["krause", "krause"]


def test_a_layer_of_consensus_sees_what_is_near_under_its_own_name_too():
    layer = ga.nn.SelfConsensus(DIM, HEADS, edge_hidden=4)
    assert made([layer, "consensus"], 2) == [("SelfConsensus", "near")] * 2


def test_every_layer_takes_the_options_that_it_has():
    options = {"kv_heads": 2, "top_k": 3, "eps": 0.1}
    dot, linear, gka, krause = layers_of(["dot", "linear", "gka", "krause"], options=options)
    assert (dot.kv_heads, dot.top_k) == (2, 3)
    assert (linear.kv_heads, linear.eps) == (2, 0.1)
    assert gka.eps == 0.1
    assert (krause.kv_heads, krause.top_k) == (2, 3)


@pytest.mark.parametrize("values", [[1, 2, 3, 4], (4, 3, 2, 1)])
def test_a_list_of_options_holds_one_value_per_block(values):
    layers = layers_of("krause", options={"top_k": values})
    assert [layer.top_k for layer in layers] == list(values)
    # Of a model with other layers between, the places are still those of the blocks.
    mixed = layers_of(["krause", "gka", "krause", "gka"], options={"top_k": values})
    assert [mixed[0].top_k, mixed[2].top_k] == [values[0], values[2]]


def test_options_are_left_as_they_were_given():
    options = {"rank": 2}
    layers_of("consensus", 1, options=options, causal=True)
    assert options == {"rank": 2}


def test_a_causal_model_moves_the_targets_of_consensus_alone():
    assert [layer.config["update"] for layer in layers_of("mix", 4, causal=True)[2:]] == [
        "target"
    ] * 2
    assert layers_of("consensus", 1)[0].config.get("update", "energy") == "energy"
    with pytest.raises(ValueError, match="update must be 'target' in a causal model, got 'energy'"):
        mixers("mix", 4, DIM, HEADS, options={"update": "energy"}, causal=True)
    # Where there is no consensus there is nothing to say of it.
    assert made("dot", 1, causal=True) == [LAYERS["dot"]]


@pytest.mark.parametrize("mixer", ["attention", 3, None, ["dot", "mix"], ["dot", "attention"]])
def test_an_unknown_mixer_is_answered_with_all_names(mixer):
    with pytest.raises(ValueError, match=r"mixer must be one of 'dot', 'dot-window'.*got"):
        mixers(mixer, 2, DIM, HEADS)


def test_a_class_as_the_mixer_is_answered_with_how_its_layers_are_given():
    class Mean(torch.nn.Module):
        dim = DIM

    advice = r"for your own class, give its layers: \[Mean\(\.\.\.\) for _ in range\(depth\)\]"
    with pytest.raises(ValueError, match=advice):
        mixers(Mean, 2, DIM, HEADS)


@pytest.mark.parametrize(
    ("mixer", "options", "message"),
    [
        ("dot", {"rank": 4}, "got 'rank': 'dot' takes .*kv_heads.*softcap"),
        ("vlt", {"kv_heads": 2}, "got 'kv_heads': 'vlt' takes"),
        ("linear", {"top_k": 2}, "got 'top_k': 'linear' takes kv_heads, eps, bias, backend$"),
        ("mix", {"sigma": 1.0}, "got 'sigma': 'dot' takes .*; 'consensus' takes .*rank"),
        ("krause", {"topk": 2}, "did you mean 'top_k'"),
        ("dot", {"rope": True}, "got 'rope'"),
        ("dot", {"context_dim": 8}, "got 'context_dim'"),
        ("dot", {3: 1}, "got 3"),
        ([torch.nn.Identity()], {"top_k": 2}, "layers that were given as modules take none"),
    ],
)
def test_an_option_that_no_layer_has_is_refused_with_those_there_are(mixer, options, message):
    depth = len(mixer) if isinstance(mixer, list) else 2
    with pytest.raises(ValueError, match=f"mixer_options must contain options.*{message}"):
        mixers(mixer, depth, DIM, HEADS, options=options)


def test_an_option_that_one_layer_has_is_enough():
    made("mix", 2, options={"rank": 2, "softcap": 5.0})


@pytest.mark.parametrize(
    ("mixer", "depth", "message"),
    [
        (["dot"], 2, r"one entry per block \(2\), got 1"),
        (["dot", "dot", "dot"], 2, r"one entry per block \(2\), got 3"),
        (ga.nn.LinearAttention(DIM, HEADS), 2, "whose weights all blocks would share"),
        (ga.nn.CrossConsensus(DIM, HEADS), 1, "one sequence, got 'CrossConsensus'|Cross"),
        ({"dot"}, 1, "be one of 'dot', .* got {'dot'}"),
    ],
)
def test_lists_and_layers_that_do_not_fit_are_refused(mixer, depth, message):
    with pytest.raises(ValueError, match=f"mixer must .*{message}"):
        mixers(mixer, depth, DIM, HEADS)


def test_one_layer_does_not_serve_two_blocks_nor_one_of_another_width():
    layer = ga.nn.LinearAttention(DIM, HEADS)
    with pytest.raises(ValueError, match="same layer twice"):
        mixers([layer, layer], 2, DIM, HEADS)
    narrow = ga.nn.LinearAttention(8, 2)
    with pytest.raises(ValueError, match="of width dim = 16, got a LinearAttention of width 8"):
        layers_of([narrow], 1)
    with pytest.raises(ValueError, match=r"read one sequence, got a DotProductAttention .* 8 .dim"):
        layers_of([ga.nn.DotProductAttention(DIM, HEADS, context_dim=8)], 1)


@pytest.mark.parametrize("make", [ga.models.CausalLM, ga.models.SequenceEncoder])
def test_numbers_may_be_those_of_numpy(make):
    torch.manual_seed(0)
    plain = make(7, DIM, 2, HEADS, mixer="mix")
    torch.manual_seed(0)
    model = make(*(numpy.int64(number) for number in (7, DIM, 2, HEADS)), mixer="mix")
    tokens = torch.arange(6)
    assert torch.equal(model(tokens), plain(tokens))


def test_edge_features_need_a_layer_that_the_model_makes_for_them():
    with pytest.raises(ValueError, match=r"edge_features must be 0 in a model without .* got 3"):
        ga.models.SequenceEncoder(7, DIM, 2, HEADS, mixer="dot", edge_features=3)
    layer = ga.nn.SelfConsensus(DIM, HEADS, edge_features=3)
    model = ga.models.SequenceEncoder(7, DIM, 2, HEADS, mixer=["dot", layer])
    edges = model.graphs(6)[1].num_edges
    assert model(torch.arange(6), edge_features=torch.rand(edges, 3)).shape == (6, 7)


def test_a_list_of_options_has_as_many_as_there_are_blocks():
    with pytest.raises(ValueError, match=r"'top_k'\] must be .*per block \(4\), got 3"):
        layers_of("krause", options={"top_k": [1, 2, 3]})


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_an_encoder(name):
    torch.manual_seed(0)
    small = {"edge_hidden": 4, "rank": 2}
    model = ga.models.SequenceEncoder(7, DIM, 3, HEADS, mixer=name, **small)
    logits = model(torch.randint(7, (2, 9)))
    logits.square().mean().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
    again = ga.models.SequenceEncoder(**model.config)
    assert [type(block.mixer) for block in again.blocks] == [
        type(block.mixer) for block in model.blocks
    ]


@pytest.mark.parametrize(("first", "last"), [(2, 4), (8, 16), (16, 8), (1, 1), (5, 6), (1, 100)])
@pytest.mark.parametrize("depth", [1, 2, 3, 6, 12, 13, 24])
def test_top_k_grows_like_a_rounded_linspace(first, last, depth):
    expected = numpy.round(numpy.linspace(first, last, depth)).astype(int).tolist()
    assert ga.models.top_k_schedule(first, last, depth) == expected


@pytest.mark.parametrize("name", ["first", "last", "depth"])
def test_a_schedule_of_nothing_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be"):
        ga.models.top_k_schedule(**{"first": 2, "last": 4, "depth": 6, name: 0})


class Cosine(ga.nn.KrauseAttention):
    """A layer of one's own, as the page on mechanisms writes it."""

    def __init__(self, dim, heads, *, warmth=1.0, **options):
        super().__init__(dim, heads, **options)
        self.warmth = warmth


class CosineOfCosine(Cosine):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)


@pytest.mark.parametrize("layer", [Cosine, CosineOfCosine])
def test_a_class_that_passes_its_options_on_has_those_of_its_base(layer, monkeypatch):
    monkeypatch.setitem(KINDS, "cosine", Kind(layer, "window"))
    options = {"top_k": 3, "warmth": 0.5}
    model = ga.models.SequenceEncoder(
        9, DIM, 2, HEADS, mixer=["dot", "cosine"], mixer_options=options
    )
    assert (model.blocks[1].mixer.top_k, model.blocks[1].mixer.warmth) == (3, 0.5)
    assert set(KINDS["cosine"].options) == {*KINDS["krause"].options, "warmth"}
    with pytest.raises(ValueError, match=r"'cosine' takes warmth, .*did you mean 'top_k'\?"):
        ga.models.SequenceEncoder(9, DIM, 2, HEADS, mixer=["cosine"] * 2, mixer_options={"topk": 3})
    with pytest.raises(TypeError, match="'top_k': it is an argument of the constructor"):
        model.blocks[1].mixer(torch.randn(5, DIM), ga.causal_graph(5), top_k=3)

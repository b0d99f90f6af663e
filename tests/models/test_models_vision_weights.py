"""Weights of Hugging Face's ViT and DeiT: the same logits, and other mixers from the same maps."""

import pytest
import torch

import graphattn as ga

transformers = pytest.importorskip("transformers")

CLASSES = {
    "ViTModel": "ViT",
    "ViTForImageClassification": "ViT",
    "DeiTModel": "DeiT",
    "DeiTForImageClassification": "DeiT",
    "DeiTForImageClassificationWithTeacher": "DeiT",
}
SHAPE = {
    "image_size": 12,
    "patch_size": 4,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 72,
    "num_labels": 7,
}
DRAWN = {  # of config options, by hand
    "plain": {},
    "no biases": {"qkv_bias": False},
    "one channel, a wide epsilon": {"num_channels": 1, "layer_norm_eps": 1e-2},
    "odd widths": {"hidden_size": 12, "num_attention_heads": 3, "intermediate_size": 25},
    "one patch, deep": {"image_size": 4, "num_hidden_layers": 4},
}
LOAD = ga.models.VisionTransformer.from_transformers


def theirs(name="ViTForImageClassification", **options):
    """Make a model of transformers with weights so large that nothing is nearly linear."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{CLASSES[name]}Config")(**{**SHAPE, **options})
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def images_of(model, *size, batch=3):
    size = size or (model.config.image_size,) * 2
    drawn = torch.Generator().manual_seed(1)
    return torch.randn(batch, model.config.num_channels, *size, generator=drawn)


@torch.no_grad()
def output(model, images, **options):
    outputs = model(images, **options)
    return outputs.logits if hasattr(outputs, "logits") else outputs.last_hidden_state[:, 0]


@pytest.mark.every_case
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("options", DRAWN)
def test_logits_are_those_of_transformers(name, options):
    model = theirs(name, **DRAWN[options])
    ours, images = LOAD(model), images_of(model)
    assert not ours.training
    expected = output(model, images)
    assert expected.abs().max() > 0.3
    torch.testing.assert_close(ours(images), expected, rtol=0, atol=1e-5)


@pytest.mark.every_case
@pytest.mark.parametrize("name", CLASSES)
def test_so_are_those_of_images_of_another_size(name):
    model = theirs(name)
    ours = LOAD(model)
    for size in ((20, 8), (4, 4), (12, 24)):
        images = images_of(model, *size)
        expected = output(model, images, interpolate_pos_encoding=True)
        actual = ours(images, interpolate_pos_encoding=True)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def test_tokens_are_the_last_hidden_state():
    model = theirs("DeiTModel")
    ours, images = LOAD(model), images_of(model)
    assert ours.num_classes == 0
    with torch.no_grad():
        expected = model(images).last_hidden_state
    torch.testing.assert_close(ours.encode(images), expected, rtol=0, atol=1e-5)


def test_patches_and_images_may_be_rectangles():
    model = theirs("ViTModel", image_size=[8, 12], patch_size=[2, 4])
    ours, images = LOAD(model), images_of(model, 8, 12)
    torch.testing.assert_close(ours(images), output(model, images), rtol=0, atol=1e-5)


@pytest.mark.every_case
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes_stay(dtype):
    model = theirs().to(dtype)
    ours, images = LOAD(model), images_of(model).to(dtype)
    logits = ours(images)
    assert logits.dtype == dtype
    tolerance = 1e-12 if dtype == torch.float64 else 0.1
    torch.testing.assert_close(logits, output(model, images), rtol=tolerance, atol=tolerance)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("mixer", "options", "kept"),
    [
        ("krause", {"radius": 1, "mixer_options": {"top_k": 3}}, ["query", "key", "value"]),
        ("dot-window", {"radius": 1}, ["query", "key", "value"]),
        ("vlt", {}, ["query", "key"]),
        ("gka", {}, []),
    ],
)
@pytest.mark.parametrize("name", ["ViTForImageClassification", "DeiTForImageClassification"])
def test_other_mixers_start_from_the_projections_that_they_have(name, mixer, options, kept):
    model = theirs(name)
    ours = LOAD(model, mixer=mixer, **options)
    base = model.vit if name.startswith("ViT") else model.deit
    for block, layer in zip(ours.blocks, base.layers, strict=True):
        for part in [*kept, "output"]:
            here = getattr(block.mixer, f"{part}_proj")
            there = getattr(layer.attention, f"{part[0]}_proj")
            assert torch.equal(here.weight, there.weight)
            assert torch.equal(here.bias, there.bias)
    assert ours(images_of(model)).isfinite().all()


def test_by_distance_it_computes_the_same_where_all_keys_are_equally_long():
    """exp(-|q - k|^2 / 2 sqrt(D)) is exp(q k / sqrt(D)) then, up to what a row has in common."""
    model = theirs()
    D = 32 // 4
    with torch.no_grad():
        for layer in model.vit.layers:  # one key for all: averages, of equal weights
            layer.attention.k_proj.weight.zero_()
    images = images_of(model)
    ours = LOAD(model, mixer="krause")
    torch.testing.assert_close(ours.blocks[0].mixer.log_sigma.exp(), torch.full((4,), D**0.25))
    torch.testing.assert_close(ours(images), output(model, images), rtol=0, atol=1e-5)


def test_names_of_earlier_versions_are_read():
    from graphattn.models.vision.weights import our_names

    old = {
        "layers.": "encoder.layer.",
        "attention.q_proj": "attention.attention.query",
        "attention.k_proj": "attention.attention.key",
        "attention.v_proj": "attention.attention.value",
        "attention.o_proj": "attention.output.dense",
        "mlp.fc1": "intermediate.dense",
        "mlp.fc2": "output.dense",
    }
    state = theirs("DeiTForImageClassification").state_dict()
    renamed = {}
    for name, value in state.items():
        for new, before in old.items():
            name = name.replace(new, before)
        renamed[name] = value
    assert renamed.keys() != state.keys()
    expected, actual = our_names(state), our_names(renamed)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in actual)
    with pytest.raises(ValueError, match=r"it has a weight 'embeddings\.word_embeddings\.weight'"):
        our_names({"embeddings.word_embeddings.weight": torch.zeros(2, 2)})


def test_shares_that_training_drops_come_along():
    ours = LOAD(theirs(hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.1))
    assert ours.blocks[0].dropout.p == ours.dropout.p == 0.2
    assert ours.blocks[1].mixer.attention_dropout == 0.1


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("make", "changes", "says"),
    [
        (lambda: torch.nn.Linear(2, 2), {}, "model must be an instance of ViTModel, .* got Linear"),
        (
            lambda: transformers.ViTForMaskedImageModeling(
                transformers.ViTConfig(**SHAPE, encoder_stride=4)
            ),
            {},
            "got ViTForMaskedImageModeling",
        ),
        (lambda: theirs(hidden_act="relu"), {}, "must have hidden_act='gelu', got 'relu'"),
        (theirs, {"depth": 1}, "must keep the shape .* no parameter for the weight 'blocks.1"),
        (theirs, {"depth": 3}, "have none for the parameter 'blocks.2"),
        (
            theirs,
            {"num_classes": 3},
            r"'head.weight' has shape \[7, 32\], the parameter has \[3, 32\]",
        ),
        (theirs, {"mixer": "consensus"}, "pooling must be 'mean'"),
        (theirs, {"radius": 1}, "radius must be None in a model without windows"),
    ],
)
def test_what_does_not_fit_is_refused(make, changes, says):
    with pytest.raises(ValueError, match=says):
        LOAD(make(), **changes)

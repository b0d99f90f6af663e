"""VisionTransformer: its numbers written out, the papers' counts, graphs of patches, training."""

import copy

import pytest
import torch
from torch.nn import functional

import graphattn as ga
from graphattn.graphs.token_graph import TokenGraph

DIM, HEADS, DEPTH = 16, 4, 2
SIZE, PATCH = (8, 12), (4, 2)  # 2 x 6 patches
MIXERS = {
    "dot": {},
    "vlt": {},
    "gka": {},
    "krause": {"radius": 1, "mixer_options": {"top_k": [2, 3]}},
    "dot-window": {"radius": (1, 2)},
    "consensus": {"pooling": "mean", "mixer_options": {"edge_hidden": 8}},
    "mix": {"pooling": "mean", "class_token": False, "mixer_options": {"edge_hidden": 8}},
}


def vision(mixer="dot", **options) -> ga.models.VisionTransformer:
    torch.manual_seed(0)
    options = {"mixer": mixer, **MIXERS.get(mixer, {}), **options}
    return ga.models.VisionTransformer(SIZE, PATCH, 5, DIM, DEPTH, HEADS, **options).double()


def pictures(*shape: int, seed: int = 1) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, 3, *SIZE, generator=drawn, dtype=torch.float64)


def by_hand(model, images):
    """Cut, embed, and mix with the layers as they are, over the model's graphs."""
    down, right = model.embedding.patch_size
    tokens = []
    for image in images:
        rows = [image[:, i : i + down] for i in range(0, image.shape[1], down)]
        cut = [r[:, :, j : j + right] for r in rows for j in range(0, image.shape[2], right)]
        weight = model.embedding.projection.weight
        x = [torch.einsum("cij,dcij->d", p, weight) + model.embedding.projection.bias for p in cut]
        if model.embedding.class_token is not None:
            x = [model.embedding.class_token, *x]
        tokens.append(torch.stack(x) + model.embedding.positions)
    x = torch.stack(tokens)
    for block, graph in zip(model.blocks, model.graphs(), strict=True):
        x = x + block.mixer(block.mixer_norm(x), graph)
        x = x + block.mlp[2](functional.gelu(block.mlp[0](block.mlp_norm(x))))
    x = functional.layer_norm(x, (DIM,), model.norm.weight, model.norm.bias, model.norm.eps)
    first = model.embedding.leading
    return model.head(x[:, first:].mean(1) if model.pooling == "mean" else x[:, 0])


@pytest.mark.parametrize("mixer", MIXERS)
def test_the_model_is_its_blocks_over_patches_one_after_the_other(mixer):
    model, images = vision(mixer), pictures(3)
    out = model(images)
    assert out.shape == (3, 5)
    torch.testing.assert_close(out, by_hand(model, images), rtol=0, atol=1e-12)
    torch.testing.assert_close(out, model(images, model.graphs()), rtol=0, atol=0)


# The papers' counts.

COUNTS = {  # dot and gka: Projection-Free Transformers, Table 2, to the last parameter
    "deit-tiny": {"dot": 5_717_416, "gka": 4_383_436, "vlt": 5_272_744},
    "deit-small": {"dot": 22_050_664, "gka": 16_728_496},
    "deit-base": {"dot": 86_567_656, "gka": 65_306_488},
}
OPERATIONS = {  # its Tables 2, 3 and 5, in 10^9 operations per image
    "deit-tiny": {"dot": 2.51, "gka": 1.98, "vlt": 2.33},
    "deit-small": {"dot": 9.20, "gka": 7.11},
    "deit-base": {"dot": 35.13, "gka": 26.76},
}


def on_meta(name, mixer):
    with torch.device("meta"):
        return ga.models.VisionTransformer.from_preset(name, mixer=mixer)


def counted(model) -> int:
    images = torch.empty(1, 3, 224, 224, device="meta")
    return ga.diagnostics.flops(model, images)


@pytest.mark.long
@pytest.mark.parametrize("name", COUNTS)
def test_parameters_and_operations_are_those_of_the_paper(name):
    for mixer, parameters in COUNTS[name].items():
        model = on_meta(name, mixer)
        assert model.num_parameters() == parameters
        assert counted(model) == pytest.approx(OPERATIONS[name][mixer] * 1e9, rel=0.003)


@pytest.mark.long
@pytest.mark.parametrize("name", COUNTS)
def test_operations_are_the_products_of_the_formula(name):
    """Two per multiply-add; GKA does without three projections, value-less models without one."""
    dim, N = on_meta(name, "dot").norm.weight.numel(), 197
    perceptron, pairs, one_projection = 8 * N * dim**2, 2 * N**2 * dim, N * dim**2
    ends = 196 * 768 * dim + 1000 * dim
    for mixer, projections in {"dot": 4, "vlt": 3, "gka": 1}.items():
        block = perceptron + pairs + projections * one_projection
        assert counted(on_meta(name, mixer)) == 2 * (12 * block + ends)


def test_the_value_less_model_of_the_paper_keeps_the_biases_of_its_values():
    """5.28 M in its Table 5 are 5,275,048; without those 12 x 192 biases there are 5.27 M."""
    weights, biases = 12 * 192 * 192, 12 * 192
    ours = on_meta("deit-tiny", "vlt").num_parameters()
    assert ours == 5_717_416 - weights - biases == 5_272_744
    assert ours + biases == 5_275_048
    assert (round(ours / 1e6, 2), round((ours + biases) / 1e6, 2)) == (5.27, 5.28)


@pytest.mark.long
def test_a_krause_model_has_the_published_settings_and_one_bandwidth_per_head_more():
    model = on_meta("deit-tiny", "krause")
    assert model.num_parameters() == 5_717_416 + 12 * 3
    assert [block.mixer.top_k for block in model.blocks] == ga.models.top_k_schedule(8, 16, 12)
    assert all(4.5 <= block.mixer.init_sigma <= 9 for block in model.blocks)
    degree = model.graphs()[0].to("cpu").in_degree()
    assert degree[0] == 197
    assert degree[1:].max() == 25 + 1  # and the class token
    kept = counted(model)
    # All edges are scored, and of every token the nearest kept, or all where there are fewer.
    whole = (14 * 5 - 6) ** 2 + 2 * 197 - 1  # 5 x 5 cut at the border, and the class token's
    edges = sum(whole + int(degree.clamp(max=block.mixer.top_k).sum()) for block in model.blocks)
    pairs = 2 * 192 * edges
    assert kept == counted(on_meta("deit-tiny", "dot")) - 2 * 12 * 2 * 197**2 * 192 + pairs
    assert on_meta("deit-tiny", "gka").radius is None


def test_arguments_replace_what_a_preset_holds_for_a_mixer():
    model = ga.models.VisionTransformer.from_preset(
        "digits", mixer="krause", radius=2, mixer_options={"top_k": 5}
    )
    assert model.radius == 2
    assert [block.mixer.top_k for block in model.blocks] == [5, 5, 5]
    other = ga.models.VisionTransformer.from_preset("digits", num_classes=3)
    assert other(torch.zeros(2, 1, 8, 8)).shape == (2, 3)


@pytest.mark.every_case
@pytest.mark.parametrize("name", ["deit-tiny", "digits"])
@pytest.mark.parametrize(
    "mixer", ["krause", "dot-window", "consensus", "mix", "gka-consensus", "krause-consensus"]
)
def test_every_mixer_has_what_it_needs_from_a_preset(name, mixer):
    model = on_meta(name, mixer)
    assert {*model.reaches} - {"all"}


# Graphs.


@pytest.mark.parametrize(("name", "first", "last"), [("deit-tiny", 8, 16), ("digits", 2, 4)])
@pytest.mark.parametrize("depth", [1, 2, 5, 12])
def test_a_schedule_of_neighbours_is_as_long_as_the_model(name, first, last, depth):
    model = ga.models.VisionTransformer.from_preset(
        name, mixer="krause", depth=depth, dim=8, heads=2
    )
    schedule = [block.mixer.top_k for block in model.blocks]
    expected = torch.linspace(first, last, depth, dtype=torch.float64).round().int().tolist()
    assert schedule == expected


@pytest.mark.parametrize("leading", [0, 1, 2])
def test_a_window_sees_patches_within_the_radius_and_leading_tokens(leading):
    model = vision(
        "krause",
        radius=(1, 2),
        class_token=leading > 0,
        distillation_token=leading > 1,
        pooling="mean",
    )
    graph = model.graphs()[0]
    places = [(i, j) for i in range(2) for j in range(6)]
    N = leading + len(places)
    expected = torch.ones(N, N, dtype=torch.bool)
    for a, (i, j) in enumerate(places):
        for b, (k, m) in enumerate(places):
            expected[leading + a, leading + b] = abs(i - k) <= 1 and abs(j - m) <= 2
    assert graph == ga.from_mask(expected)


@pytest.mark.parametrize("leading", [0, 1, 2])
def test_consensus_moves_patches_alone(leading):
    model = vision("consensus", class_token=leading > 0, distillation_token=leading > 1)
    graph = model.graphs()[0]
    near = ga.grid_window_graph(2, 6, 1)
    assert torch.equal(graph.edge_index, near.edge_index + leading)
    images, before = pictures(2), model.encode(pictures(2))
    if leading:
        with torch.no_grad():
            model.embedding.class_token.fill_(float("nan"))
        assert torch.equal(model.encode(images)[:, leading:], before[:, leading:])


def test_graphs_are_those_of_the_images_and_made_once():
    model = vision("krause")
    assert [graph.num_tokens for graph in model.graphs()] == [13, 13]
    assert [graph.num_tokens for graph in model.graphs((16, 8))] == [17, 17]
    assert model.graphs(16)[0].num_tokens == 4 * 8 + 1
    assert model.graphs()[0] is model.graphs()[1]
    assert model.graphs()[0] is model.graphs(SIZE)[0]
    for side in range(4, 80, 4):
        model.graphs((side, 2))
    assert len(model._graphs) <= 8
    assert isinstance(model.graphs()[0], TokenGraph)
    with pytest.raises(ValueError, match=r"image_size must be a multiple of the patch size"):
        model.graphs(9)


def test_a_pixel_changes_no_bit_of_patches_that_do_not_see_it():
    model = vision("krause", class_token=False, pooling="mean", radius=1)
    images = pictures(2)
    broken = images.clone()
    broken[..., 0, 11] = float("nan")  # in the last column of patches
    before, after = model.encode(images), model.encode(broken)
    # Two blocks of radius 1: the patches of columns 3, 4 and 5 are reached.
    reached = (torch.arange(12) % 6) >= 3
    assert torch.equal(after[:, ~reached], before[:, ~reached])
    assert after[:, :6][:, reached[:6]].isnan().any(-1).all()


@pytest.mark.parametrize("mixer", MIXERS)
def test_images_of_a_batch_do_not_see_each_other(mixer):
    model, images = vision(mixer), pictures(3)
    broken = images.clone()
    broken[1] = float("nan")
    before, after = model(images), model(broken)
    assert torch.equal(after[[0, 2]], before[[0, 2]])
    assert after[1].isnan().all()


# Shapes and sizes.


def test_images_may_have_any_number_of_leading_dimensions():
    model, images = vision("krause"), pictures(2, 3)
    out = model(images)
    assert out.shape == (2, 3, 5)
    torch.testing.assert_close(out[1], model(images[1]), rtol=0, atol=1e-12)
    torch.testing.assert_close(out[1, 2], model(images[1, 2]), rtol=0, atol=1e-12)
    assert model.encode(images[1, 2]).shape == (13, DIM)
    assert model(images[:0]).shape == (0, 3, 5)
    assert model(images[0, :0]).shape == (0, 5)


def test_layout_of_images_in_memory_does_not_matter():
    model, images = vision("krause"), pictures(2)
    for other in (
        images.to(memory_format=torch.channels_last),
        images.transpose(0, 1).contiguous().transpose(0, 1),
        images.repeat_interleave(2, dim=-1)[..., ::2],
    ):
        torch.testing.assert_close(model(other), model(images), rtol=0, atol=1e-12)


def test_positions_are_interpolated_between_those_of_the_own_grid():
    model = vision("krause")
    images = torch.randn(2, 3, 16, 8, dtype=torch.float64)
    with pytest.raises(
        ValueError, match=r"images must have \[8, 12\] pixels .* got \[16, 8\]: .*pass"
    ):
        model(images)
    positions = model.embedding.positions
    plane = positions[1:].T.view(1, DIM, 2, 6)
    plane = functional.interpolate(plane, size=(4, 4), mode="bicubic")
    expected = torch.cat([positions[:1], plane.flatten(2)[0].T])
    torch.testing.assert_close(model.embedding.positions_of((4, 4)), expected)
    out = model(images, interpolate_pos_encoding=True)
    assert out.shape == (2, 5)
    twin = copy.deepcopy(model)
    twin.embedding.positions = torch.nn.Parameter(expected)
    twin.embedding.image_size, twin.embedding.grid = (16, 8), (4, 4)
    torch.testing.assert_close(out, twin(images))
    images = pictures(2)
    assert torch.equal(model(images, interpolate_pos_encoding=True), model(images))
    constant = vision("dot")
    with torch.no_grad():
        constant.embedding.positions[:] = 3.0
    torch.testing.assert_close(
        constant.embedding.positions_of((5, 7)), torch.full((36, DIM), 3.0).double()
    )
    with pytest.raises(ValueError, match="images must be a multiple of the patch size"):
        model(torch.zeros(1, 3, 10, 12).double(), interpolate_pos_encoding=True)


def test_without_a_head_the_pooled_features_come_out():
    model = ga.models.VisionTransformer(SIZE, PATCH, 0, DIM, DEPTH, HEADS).double()
    images = pictures(2)
    assert torch.equal(model(images), model.encode(images)[:, 0])


def test_two_heads_are_averaged():
    model, images = vision(distillation_token=True, pooling="distilled"), pictures(2)
    x = model.encode(images)
    assert x.shape == (2, 14, DIM)
    expected = (model.head(x[:, 0]) + model.distillation_head(x[:, 1])) / 2
    torch.testing.assert_close(model(images), expected)


def test_an_edge_bias_reaches_the_attention_layers():
    model, images = vision("dot"), pictures(2)
    graph = model.graphs()[0]
    bias = torch.randn(graph.num_edges, HEADS, dtype=torch.float64)
    bias[graph.edge_index[0] == 3] = float("-inf")  # nobody sees token 3, as if it had no edges
    away = ga.from_edge_index(graph.edge_index[:, graph.edge_index[0] != 3], graph.num_tokens)
    kept = bias[graph.edge_index[0] != 3]
    torch.testing.assert_close(
        model(images, edge_bias=bias), model(images, away, edge_bias=kept), rtol=0, atol=1e-12
    )


# Training.


@pytest.mark.long
def test_paths_are_dropped_more_often_in_later_blocks():
    model = ga.models.VisionTransformer.from_preset("deit-base")
    rates = [block.drop_path for block in model.blocks]
    assert rates == pytest.approx([0.2 * i / 11 for i in range(12)])
    alone = ga.models.VisionTransformer(8, 4, 2, 8, 1, 2, drop_path=0.3)
    assert alone.blocks[0].drop_path == 0


@pytest.mark.parametrize("leading", [1, 2])
@pytest.mark.parametrize("mixer", ["dot", "krause", "consensus"])
def test_a_path_is_dropped_for_a_whole_image(mixer, leading):
    """A path is dropped for all tokens of an image, even leading ones that consensus leaves out."""
    model = vision(mixer, drop_path=0.5, distillation_token=leading > 1).train()
    block, graph = model.blocks[-1], model.graphs()[-1]
    x = model.embedding(pictures(64))
    block.mlp.register_forward_hook(lambda *_: torch.zeros_like(x))  # the first part alone
    block.mixer.register_forward_hook(lambda *_: torch.ones_like(x))
    parts = (block(x, graph) - x).mean(-1).round(decimals=6)
    assert {tuple(row) for row in parts.unique(dim=0).tolist()} == {
        (added,) * graph.num_tokens for added in (0.0, 2.0)
    }


@pytest.mark.parametrize("share", [{"dropout": 0.4}, {"drop_path": 0.6}])
def test_dropping_is_for_training_alone(share):
    model, images = vision(**share), pictures(8)
    assert not torch.equal(model(images), model(images))
    assert torch.equal(model.eval()(images), vision()(images))


def test_position_and_class_tokens_do_not_decay():
    model = vision("gka", distillation_token=True)
    _, free = ga.train.parameter_groups(model)
    kept = {id(p) for p in free["params"]}
    for name in ("class_token", "distillation_token", "positions"):
        assert id(getattr(model.embedding, name)) in kept


def test_weights_of_other_mathematics_are_refused():
    state = vision("krause").state_dict()
    for change in ({"radius": 2}, {"norm_eps": 1e-3}, {"pooling": "mean"}):
        with pytest.raises(RuntimeError, match=f"saved with {next(iter(change))}="):
            vision("krause", **change).load_state_dict(state)
    vision("krause", radius=(1, 1)).load_state_dict(state)  # the same, said otherwise


@pytest.mark.parametrize("anew", [False, True])
def test_what_is_read_and_what_leads_is_drawn_as_deit_draws_it(anew):
    """Deviation 0.02 and biases 0; DeiT's patches are PyTorch's, uniform up to 1 / sqrt(inputs)."""
    torch.manual_seed(4)
    options = {"distillation_token": True, "pooling": "distilled"}
    vit = ga.models.VisionTransformer(32, 2, 200, 192, 1, 3, **options)
    swin = ga.models.SwinTransformer(32, 4, 200, 192, (1,), (6,), window_size=4)

    def deviation(parameter):
        return float(parameter.detach().std())

    for model in (vit, swin) if anew else ():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7)
        model.reset_parameters()
    for head in (vit.head, vit.distillation_head, swin.head):
        assert deviation(head.weight) == pytest.approx(0.02, rel=0.02)
        assert not head.bias.any()
    assert not torch.equal(vit.head.weight, vit.distillation_head.weight)
    assert deviation(vit.embedding.positions) == pytest.approx(0.02, rel=0.02)
    assert deviation(swin.blocks[0].position_bias.table) == pytest.approx(0.02, rel=0.1)
    for token in (vit.embedding.class_token, vit.embedding.distillation_token):
        assert deviation(token) == pytest.approx(0.02, rel=0.2)
    most = (3 * 2 * 2) ** -0.5
    assert float(vit.embedding.projection.weight.detach().abs().max()) == pytest.approx(
        most, rel=0.02
    )


def test_a_model_on_the_meta_device_becomes_one_with_numbers():
    with torch.device("meta"):
        model = ga.models.VisionTransformer(SIZE, PATCH, 5, DIM, DEPTH, HEADS)
    torch.manual_seed(5)
    model.to_empty(device="cpu").reset_parameters()
    assert model(pictures(2).float()).isfinite().all()


@pytest.mark.long
@pytest.mark.parametrize("mixer", ["krause", "mix"])
def test_it_compiles_whole_for_batches_and_sizes(mixer):
    torch._dynamo.reset()
    model = vision(mixer)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for batch, size in ((2, SIZE), (3, (16, 8)), (4, (12, 20))):
        images = torch.randn(batch, 3, *size, dtype=torch.float64)
        given = {"interpolate_pos_encoding": True}
        torch.testing.assert_close(compiled(images, **given), model(images, **given))
    torch._dynamo.reset()


# What is refused.


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"image_size": 9}, r"image_size must be a multiple of the patch size \[4, 2\] .*\[9, 9\]"),
        ({"image_size": (8, 8, 8)}, r"image_size must be an integer or \(height, width\)"),
        ({"image_size": (8, 0)}, r"image_size\[1\] must be >= 1, got 0"),
        ({"patch_size": 0}, "patch_size must be >= 1, got 0"),
        ({"num_classes": -1}, "num_classes must be >= 0, got -1"),
        ({"channels": 0}, "channels must be >= 1, got 0"),
        ({"heads": 3}, "heads must divide dim = 16, got 3"),
        ({"pooling": "max"}, "pooling must be one of 'class', 'mean', 'distilled', got 'max'"),
        ({"class_token": False}, "pooling='class' needs class_token=True"),
        ({"pooling": "distilled"}, "pooling='distilled' needs distillation_token=True"),
        (
            {"class_token": False, "distillation_token": True, "pooling": "mean"},
            "distillation_token must be False without class_token",
        ),
        ({"radius": 2}, "radius must be None in a model without windows, got 2"),
        ({"mixer": "dot-window"}, "radius must be given for 'dot-window', got None"),
        ({"mixer": ("dot", "dot-window")}, "radius must be given for 'dot-window', got None"),
        ({"mixer": "krause", "radius": 0}, "radius must be >= 1"),
        ({"mixer": "mix"}, "pooling must be 'mean' if the last layer is consensus, got 'class'"),
        ({"drop_path": 1.0}, "drop_path must be"),
        ({"norm_eps": -1.0}, "norm_eps must be a finite number >= 0"),
    ],
)
def test_bad_arguments_are_named(change, says):
    options = {
        "image_size": SIZE,
        "patch_size": PATCH,
        "num_classes": 5,
        "dim": DIM,
        "depth": DEPTH,
        "heads": HEADS,
        **change,
    }
    with pytest.raises(ValueError, match=says):
        ga.models.VisionTransformer(**options)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("images", "says"),
    [
        (torch.zeros(2, 8, 12).double(), r"shape \[\*, 3, height, width\], got \[2, 8, 12\]"),
        (torch.zeros(2, 1, 8, 12).double(), r"got \[2, 1, 8, 12\]"),
        (torch.zeros(8, 12).double(), r"got \[8, 12\]"),
        ([1.0], "got list"),
        (torch.zeros(2, 3, 0, 12).double(), r"got \[2, 3, 0, 12\]"),
        (torch.zeros(2, 3, 8, 12, dtype=torch.uint8), "dtype torch.float64, got torch.uint8"),
        (torch.zeros(2, 3, 8, 12), "dtype torch.float64, got torch.float32"),
    ],
)
def test_bad_images_are_named(images, says):
    for interpolate in (False, True):
        with pytest.raises(ValueError, match=says):
            vision()(images, interpolate_pos_encoding=interpolate)


@pytest.mark.parametrize(
    ("name", "dim", "heads", "pixels", "patch", "classes"),
    [
        ("krause-vit-small-cifar", 384, 6, 32, 4, 10),
        ("krause-vit-base-cifar", 768, 12, 32, 4, 10),
        ("krause-vit-small", 384, 6, 224, 16, 1000),
        ("krause-vit-base", 768, 12, 224, 32, 1000),
    ],
)
def test_krause_models_are_those_of_the_authors_code(name, dim, heads, pixels, patch, classes):
    with torch.device("meta"):
        model = ga.models.VisionTransformer.from_preset(name)
    assert all(isinstance(block, ga.nn.PostNormBlock) for block in model.blocks)
    assert [block.mixer.heads for block in model.blocks] == [heads] * 12
    block = 4 * (dim + 1) * dim + (dim + 1) * 4 * dim + (4 * dim + 1) * dim + 4 * dim + 1
    ends = (3 * patch**2 + 1) * dim + dim + ((pixels // patch) ** 2 + 1) * dim
    assert model.num_parameters() == ends + 12 * block + 2 * dim + (dim + 1) * classes


def test_patches_of_the_authors_small_images_see_four_neighbours():
    with torch.device("meta"):
        model = ga.models.VisionTransformer.from_preset("krause-vit-small-cifar")
    expected = ga.grid_window_graph(8, 8, 1, metric="manhattan", class_token=True)
    assert model.graphs()[0] == expected
    two = ga.models.VisionTransformer(
        12, 2, 3, 8, 1, 2, mixer="krause", radius=2, neighborhood="plus",
        distillation_token=True,
    )  # fmt: skip
    window = ga.grid_window_graph(6, 6, 2, metric="manhattan").to_mask()
    mask = two.graphs()[0].to_mask()
    assert torch.equal(mask[2:, 2:], window)
    assert mask[:2].all()
    assert mask[:, :2].all()


def test_a_post_norm_block_normalises_what_it_has_added():
    torch.manual_seed(0)
    mixer, graph = ga.nn.KrauseAttention(8, heads=2, top_k=2), ga.causal_graph(5)
    block, x = ga.nn.PostNormBlock(mixer, norm="rms", activation="relu2"), torch.randn(2, 5, 8)
    middle = block.mixer_norm(x + mixer(x, graph))
    torch.testing.assert_close(block(x, graph), block.mlp_norm(middle + block.mlp(middle)))
    assert [name for name, _ in block.named_parameters()] == [
        name for name, _ in ga.nn.PreNormBlock(mixer, norm="rms").named_parameters()
    ]
    with pytest.raises(ValueError, match="PostNormBlock has no step"):
        block.init_cache(2, None)
    with pytest.raises(ValueError, match="norm must be"):
        ga.models.VisionTransformer(8, 2, 3, 8, 1, 2, norm="last")
    with pytest.raises(ValueError, match="neighborhood must be"):
        ga.models.VisionTransformer(8, 2, 3, 8, 1, 2, neighborhood="round")
    plus = {"neighborhood": "plus", "mixer": "krause"}
    with pytest.raises(ValueError, match=r"radius must be one number with neighborhood='plus'"):
        ga.models.VisionTransformer(8, 2, 3, 8, 1, 2, radius=(1, 2), **plus)
    with pytest.raises(ValueError, match="neighborhood must be 'square' in a model without wind"):
        ga.models.VisionTransformer(8, 2, 3, 8, 1, 2, **plus)

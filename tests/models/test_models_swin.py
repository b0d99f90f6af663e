"""SwinTransformer: Swin of transformers to rounding, its counts, any mixer, what users combine."""

import math
import re
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import graphattn as ga
from graphattn.models.vision.swin_parts import PatchMerging, WindowBlock, stage_graph

MIXERS = ("dot", "vlt", "gka", "krause", "mix")
SMALL = {"dim": 8, "depths": (2, 2), "heads": (2, 4), "window_size": 4}


def swin(image_size=16, **options) -> ga.models.SwinTransformer:
    torch.manual_seed(0)
    model = ga.models.SwinTransformer(image_size, 2, 5, **{**SMALL, **options})
    return shaken(model).eval()


def shaken(model):
    """Parameters that are nowhere 0 or 1, so that each of them shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def images_of(*shape, seed=1, **options):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), **options)


# What transformers computes.


def theirs(seed: int):
    """A random tiny Swin of transformers, and the size of its images."""
    from transformers import SwinConfig, SwinForImageClassification

    draw = torch.Generator().manual_seed(seed)

    def between(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=draw))

    stages, window, patch = between(1, 3), between(2, 4), between(1, 3)
    least = window * patch * 2 ** (stages - 1)
    size = least + between(0, 9), least + between(0, 9)
    config = SwinConfig(
        image_size=size,
        patch_size=patch,
        num_channels=between(1, 3),
        embed_dim=8,
        depths=[between(1, 3) for _ in range(stages)],
        num_heads=[between(1, 2) for _ in range(stages)],
        window_size=window,
        mlp_ratio=2.0,
        num_labels=5,
    )
    torch.manual_seed(seed)
    return shaken(SwinForImageClassification(config)).eval(), size


@pytest.mark.parametrize("seed", range(16))
def test_weights_of_transformers_give_its_logits(seed):
    """Sizes that windows or patches do not divide among them, and grids of one window."""
    model, size = theirs(seed)
    ours = ga.models.SwinTransformer.from_transformers(model)
    images = images_of(3, model.config.num_channels, *size)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), model(images).logits, rtol=1e-5, atol=1e-5)
    assert not ours.training
    assert ours.num_parameters() == model.num_parameters()


@pytest.mark.parametrize("larger", [(0, 8), (13, 5)])
def test_larger_images_too(larger):
    model, size = theirs(3)
    images = images_of(2, model.config.num_channels, size[0] + larger[0], size[1] + larger[1])
    ours = ga.models.SwinTransformer.from_transformers(model)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), model(images).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"use_mask_token": True}])
def test_the_features_of_a_model_without_a_head_are_its_pooler_s(options):
    import transformers

    whole, size = theirs(9)
    torch.manual_seed(9)
    model = shaken(transformers.SwinModel(whole.config, **options)).eval()
    ours = ga.models.SwinTransformer.from_transformers(model)
    images = images_of(2, whole.config.num_channels, *size)
    with torch.no_grad():
        expected = model(images)
        torch.testing.assert_close(ours(images), expected.pooler_output, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            ours.encode(images), expected.last_hidden_state, rtol=1e-5, atol=1e-5
        )
    assert ours.num_classes == 0


def of_transformers(**options):
    """16 x 16 pixels, 8 x 8 tokens in windows of 4, then 4 x 4."""
    from transformers import SwinConfig, SwinForImageClassification

    options = {"depths": [2, 1], "num_heads": [2, 4], "embed_dim": 8, "num_labels": 5, **options}
    torch.manual_seed(2)
    config = SwinConfig(image_size=16, patch_size=2, window_size=4, **options)
    return shaken(SwinForImageClassification(config)).eval()


def test_biases_that_there_are_none_of_are_0():
    model, images = of_transformers(qkv_bias=False), images_of(3, 3, 16, 16)
    ours = ga.models.SwinTransformer.from_transformers(model)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), model(images).logits, rtol=1e-5, atol=1e-5)
    assert not any(block.mixer.key_proj.bias.any() for block in ours.blocks)


@pytest.mark.parametrize(
    ("mixer", "kept"),
    [("krause", "qkvo"), ("vlt", "qko"), ("gka", "o"), ("linear", "qkvo"), ("mix", "qkvo")],
)
def test_other_mixers_start_from_the_projections_that_they_have(mixer, kept):
    model = of_transformers()
    ours = ga.models.SwinTransformer.from_transformers(model, mixer=mixer, drop_path=0.3)
    blocks = [block for stage in model.swin.encoder.layers for block in stage.blocks]
    names = {"q": "query_proj", "k": "key_proj", "v": "value_proj", "o": "output_proj"}
    for block, there in zip(ours.blocks, blocks, strict=True):
        if isinstance(block.mixer, ga.nn.SelfConsensus):
            assert block.position_bias is None
            continue
        for letter in kept:
            mine, other = (
                getattr(block.mixer, names[letter]),
                getattr(there.attention, f"{letter}_proj"),
            )
            assert torch.equal(mine.weight, other.weight)
            assert torch.equal(mine.bias, other.bias)
        if mixer != "linear":
            table = there.attention.relative_position_bias.relative_position_bias_table
            assert torch.equal(block.position_bias.table.flip(0), table)
        assert torch.equal(block.mlp[0].weight, there.mlp.fc1.weight)
    assert ours.blocks[-1].drop_path == 0.3
    assert not ours.training
    assert ours(images_of(2, 3, 16, 16)).isfinite().all()


def test_shares_that_training_drops_come_along_and_nothing_is_drawn():
    model = of_transformers(attention_probs_dropout_prob=0.1, hidden_dropout_prob=0.2)
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    ours = ga.models.SwinTransformer.from_transformers(model)
    assert torch.equal(torch.rand(3), expected)
    assert ours.blocks[1].mixer.attention_dropout == 0.1
    assert ours.blocks[1].dropout.p == ours.dropout.p == 0.2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"depths": (2, 2)},
            "changes must keep the shape of the model: depths must be (2, 1), got",
        ),
        (
            {"window_size": 2},
            "changes must keep the shape of the model: the loaded weight 'blocks.0.position_bias",
        ),
        (
            {"num_classes": 0},
            "changes must keep the shape of the model, but with them it has no parameter",
        ),
    ],
)
def test_changes_that_the_weights_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        ga.models.SwinTransformer.from_transformers(of_transformers(), **change)


def test_gradients_are_those_of_transformers():
    model, size = theirs(5)
    ours = ga.models.SwinTransformer.from_transformers(model.double())
    images = images_of(2, model.config.num_channels, *size, dtype=torch.float64)
    for logits in (ours(images), model(images).logits):
        logits.square().sum().backward()
    of_table = model.swin.encoder.layers[0].blocks[0].attention.relative_position_bias
    torch.testing.assert_close(
        ours.blocks[0].position_bias.table.grad,
        of_table.relative_position_bias_table.grad.flip(0),
    )
    projection = model.swin.embeddings.patch_embeddings.projection
    torch.testing.assert_close(ours.patches.weight.grad, projection.weight.grad)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "relu"}, "model.config.hidden_act must be 'gelu', got 'relu'"),
        ({"layer_norm_eps": 1e-6}, "model.config.layer_norm_eps must be 1e-05, got 1e-06"),
        ({"use_absolute_embeddings": True}, "model.config.use_absolute_embeddings must be False"),
        ({"patch_size": [2, 4]}, "model.config.patch_size must be one number, got [2, 4]"),
        (
            {"window_size": 5},
            "model.config.window_size must be at most the number of "
            "tokens along each axis of every stage",
        ),
    ],
)
def test_what_this_model_does_not_have_is_refused_by_name(change, message):
    from transformers import SwinConfig, SwinForImageClassification

    options = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1]}
    config = SwinConfig(**{**options, "num_heads": [1, 1], "window_size": 4, **change})
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        ga.models.SwinTransformer.from_transformers(SwinForImageClassification(config))


def test_other_models_are_refused():
    with pytest.raises(ValueError, match="model must be a transformers"):
        ga.models.SwinTransformer.from_transformers(nn.Linear(2, 2))


def test_names_of_earlier_versions_of_transformers_are_known():
    from graphattn.models.vision.weights import weights_of

    model, _ = theirs(2)
    earlier = {
        "attention.q_proj": "attention.self.query",
        "attention.k_proj": "attention.self.key",
        "attention.v_proj": "attention.self.value",
        "attention.o_proj": "attention.output.dense",
        "attention.relative_position_bias.": "attention.self.",
        "mlp.fc1": "intermediate.dense",
        "mlp.fc2": "output.dense",
    }

    class Earlier:
        config = model.config

        @staticmethod
        def state_dict():
            results = {}
            for name, weight in model.state_dict().items():
                for new, old in earlier.items():
                    name = name.replace(new, old)
                results[name] = weight
            return results

    expected = weights_of(model)
    results = weights_of(Earlier())
    assert results.keys() == expected.keys()
    assert all(torch.equal(results[name], expected[name]) for name in expected)


# Its parts.


def by_hand(model, images):
    """Every block a plain pre-norm block over the edges of its graph, every merge a loop."""
    functional, patch = nn.functional, model.patch_size
    height, width = images.shape[-2:]
    images = functional.pad(images, (0, -width % patch, 0, -height % patch))
    x = model.patches(images)
    h, w = x.shape[-2:]
    x = model.patch_norm(x.flatten(-2).mT)
    blocks = iter(zip(model.blocks, model.graphs((height, width)), strict=True))
    for stage, depth in enumerate(model.depths):
        for _ in range(depth):
            block, graph = next(blocks)
            tall, wide = graph.structure.height, graph.structure.width
            source, target = graph.edge_index
            given = {}
            if block.position_bias is not None:
                side = math.isqrt(len(block.position_bias.table))
                down, right = source // wide - target // wide, source % wide - target % wide
                table = block.position_bias.table.view(side, side, -1)
                given["edge_bias"] = table[down + side // 2, right + side // 2][None]
            zeros = torch.zeros(len(x), tall, wide, x.shape[-1], dtype=x.dtype)
            zeros[:, :h, :w] = block.mixer_norm(x).view(-1, h, w, x.shape[-1])
            plain = ga.from_edge_index(graph.edge_index, tall * wide)
            mixed = block.mixer(zeros.flatten(1, 2), plain, **given)
            x = x + mixed.view(-1, tall, wide, x.shape[-1])[:, :h, :w].flatten(1, 2)
            x = x + block.mlp(block.mlp_norm(x))
        if stage < len(model.merges):
            merge, cells = model.merges[stage], x.view(-1, h, w, x.shape[-1])
            cells = functional.pad(cells, (0, 0, 0, w % 2, 0, h % 2))
            h, w = (h + 1) // 2, (w + 1) // 2
            tokens = []
            for i in range(h):
                for j in range(w):
                    four = [cells[:, 2 * i + a, 2 * j + b] for b in (0, 1) for a in (0, 1)]
                    tokens.append(merge.reduction(merge.norm(torch.cat(four, -1))))
            x = torch.stack(tokens, 1)
    return model.head(model.norm(x).mean(1))


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("size", [(16, 16), (13, 18), (8, 8), (3, 20)], ids=str)
def test_the_model_is_its_blocks_over_their_edges(mixer, size):
    model = swin(mixer=mixer).double()
    images = images_of(2, 3, *size, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(model(images), by_hand(model, images), rtol=1e-9, atol=1e-9)


def test_leading_dimensions_are_any():
    model = swin()
    images = images_of(2, 3, 3, 16, 16)
    together = model(images)
    assert together.shape == (2, 3, 5)
    torch.testing.assert_close(together[1, 2], model(images[1, 2]), rtol=1e-5, atol=1e-6)
    strided = images.transpose(-1, -2).contiguous().transpose(-1, -2)
    torch.testing.assert_close(model(strided), together, rtol=1e-5, atol=1e-6)


def test_windows_shift_in_turns_and_not_where_there_is_one():
    model = swin(image_size=(32, 16), depths=(3, 2), window_size=8)
    shifts = [(g.structure.height, g.structure.width, g.structure.shift[0]) for g in model.graphs()]
    assert shifts == [(16, 8, 0)] * 3 + [(8, 4, 0)] * 2
    assert [graph.structure.block[0] for graph in model.graphs()] == [8, 8, 8, 4, 4]
    assert [b.position_bias.table.shape[0] for b in model.blocks] == [15**2] * 3 + [7**2] * 2
    wider = model.graphs((32, 32))
    assert [graph.structure.shift[0] for graph in wider] == [0, 4, 0, 0, 2]


@pytest.mark.parametrize("mixer", ["dot", "krause"])
def test_a_part_of_an_image_reaches_its_window_and_no_other(mixer):
    """One block: NaN in a patch changes no bit in other windows, shifted or not."""
    for depths, shift in (((1,), 0), ((2,), 2)):
        model = swin(depths=depths, heads=(2,), mixer=mixer)
        graphs = model.graphs()
        images, spoiled = images_of(1, 3, 16, 16), images_of(1, 3, 16, 16)
        spoiled[..., 6:8, 4:6] = torch.nan  # the patch of token 3 * 8 + 2
        reached = torch.zeros(64, dtype=torch.bool)
        reached[26] = True
        for graph in graphs:
            reached = graph.to_mask()[:, reached].any(-1)
        before, after = model.encode(images), model.encode(spoiled)
        assert graphs[-1].structure.shift == (shift, shift)
        assert 0 < int(reached.sum()) < 64
        assert torch.equal(before[:, ~reached], after[:, ~reached])
        assert after[:, 26].isnan().all()


def test_graphs_of_a_call_may_be_any():
    """Windows as plain edges, and images whose tokens see all others."""
    model, images = swin(), images_of(2, 3, 16, 16)
    plain = [ga.from_edge_index(g.edge_index, g.num_tokens) for g in model.graphs()]
    torch.testing.assert_close(model(images, plain), model(images), rtol=1e-5, atol=1e-5)
    everything = [ga.complete_graph(g.num_tokens) for g in model.graphs()]
    over_grid = [ga.grid_block_graph(n, n, n) for n in (8, 8, 4, 4)]
    out = model(images, everything)
    torch.testing.assert_close(out, model(images, over_grid), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(out, model(images), atol=1e-3)
    with pytest.raises(ValueError, match=r"graph must be one graph, or one per block \(4\), got 3"):
        model(images, plain[:3])
    with pytest.raises(ValueError, match="graph must be over the 8 x 8 tokens of the grid"):
        model(images, [ga.complete_graph(9)] * 4)


def test_merging_takes_the_four_neighbours_in_swin_s_order():
    merge = PatchMerging(1)
    merge.norm, merge.reduction = nn.Identity(), nn.Identity()
    cells = torch.arange(12.0).view(12, 1)  # 3 x 4
    assert merge(cells, (3, 4)).tolist() == [
        [0, 4, 1, 5],
        [2, 6, 3, 7],
        [8, 0, 9, 0],
        [10, 0, 11, 0],
    ]


def test_a_padded_block_refuses_what_it_would_ignore():
    block, graph = (
        WindowBlock(ga.nn.DotProductAttention(8, 2), 3),
        stage_graph(7, 6, 4, shifted=True),
    )
    x = torch.randn(2, 42, 8)
    with pytest.raises(ValueError, match="context must be None on a padded grid, got Tensor"):
        block(x, graph, x, grid=(7, 6))
    with pytest.raises(TypeError, match="condition"):
        block(x, graph, grid=(7, 6), condition=x)
    assert type(block)(**{**block.config, "mixer": block.mixer}).config == block.config


# Counts.


def preset(name, **options):
    with torch.device("meta"):
        return ga.models.SwinTransformer.from_preset(name, **options)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "parameters", "published"),
    [
        ("swin-tiny", 28_288_354, 4.5e9),
        ("swin-small", 49_606_258, 8.7e9),
        ("swin-base", 87_768_224, 15.4e9),
    ],
)
def test_parameters_and_operations_are_swin_s(name, parameters, published):
    """The paper counts multiply-adds, of whole windows; here shifted ones count as they are cut."""
    model = preset(name)
    assert model.num_parameters() == parameters
    counted = ga.diagnostics.flops(model, torch.empty(1, 3, 224, 224, device="meta")) / 2
    assert counted == pytest.approx(published, rel=0.01)
    assert counted == multiply_adds(model)
    whole = multiply_adds(model, whole_windows=True)
    assert round(whole / 1e9, 1) == published / 1e9
    assert counted < whole < 1.006 * counted


def multiply_adds(model, whole_windows=False):
    """Count the multiply-adds of a Swin.

    They are of convolution, projections, products of attention, perceptrons, merges and head.
    """
    dim, patch = model.patches.out_channels, model.patch_size
    grids = model.grids()
    total = math.prod(grids[0]) * patch**2 * 3 * dim
    graphs = iter(model.graphs())
    for stage, depth in enumerate(model.depths):
        width, tokens = dim * 2**stage, math.prod(grids[stage])
        for _ in range(depth):
            graph = next(graphs)
            edges = tokens * math.prod(graph.structure.block) if whole_windows else graph.num_edges
            total += 12 * width**2 * tokens + 2 * edges * width
    for (height, width), stage in zip(grids[1:], range(len(grids)), strict=False):
        total += height * width * 8 * (dim * 2**stage) ** 2
    return total + model.dim * model.num_classes


@pytest.mark.long
def test_the_small_images_cost_what_padding_makes_them_cost():
    """Swin-S at 32 pixels: 0.17 G multiply-adds; 0.38 G where every stage is padded to windows.

    Krause Synchronization Transformers print 0.38 G for Swin-S and 0.18 G with Krause attention.
    """
    dot, krause = (preset("swin-small-cifar", mixer=mixer) for mixer in ("dot", "krause"))
    images = torch.empty(1, 3, 32, 32, device="meta")
    counted = [ga.diagnostics.flops(model, images) / 2 for model in (dot, krause)]
    assert counted == [174_438_912] * 2  # without top_k: the mixer changes nothing
    assert dot.num_parameters() == 48_800_164
    padded = 3 * 16 * 64 * 96 + 10 * 768
    for width, depth, tokens, in_windows in ((96, 2, 64, 64), (192, 2, 16, 16), (384, 18, 4, 16)):
        padded += depth * (4 * width**2 + 2 * 16 * width) * in_windows
        padded += depth * 8 * width**2 * tokens + tokens // 4 * 8 * width**2
    padded += 2 * ((4 * 768**2 + 2 * 16 * 768) * 16 + 8 * 768**2)
    assert padded == pytest.approx(0.38e9, abs=0.005e9)


@pytest.mark.parametrize("mixer", ["vlt", "gka", "krause"])
def test_other_mixers_leave_out_the_projections_that_they_do_not_have(mixer):
    model, dot = preset("swin-tiny", mixer=mixer), preset("swin-tiny")
    widths = [block.mixer.dim for block in dot.blocks]
    heads = sum(block.mixer.heads for block in dot.blocks)
    linear = sum(width * (width + 1) for width in widths)
    fewer = {"vlt": linear, "gka": 3 * linear - heads, "krause": -heads}[mixer]
    assert dot.num_parameters() - model.num_parameters() == fewer


def test_paths_are_dropped_more_and_more():
    rates = [block.drop_path for block in preset("swin-tiny").blocks]
    assert rates[0] == 0
    assert rates[-1] == 0.2
    assert all(b - a == pytest.approx(0.2 / 11) for a, b in pairwise(rates))


def test_a_path_is_dropped_for_a_whole_image():
    """Not window by window."""
    model = swin(drop_path=0.9, depths=(3,), heads=(2,)).train()
    block, x = model.blocks[-1], torch.randn(64, 64, 8)
    mixed = block(x, model.graphs()[0], grid=(8, 8)) - x
    dropped = (mixed.abs().amax(-1) == 0).float().mean(1)  # of every image, which share of tokens
    assert set(dropped.tolist()) == {0.0, 1.0}


# What users combine.


def test_weights_of_other_windows_are_refused_and_of_other_image_sizes_taken():
    state = swin().state_dict()
    swin(image_size=32).load_state_dict(state)
    with pytest.raises(RuntimeError):
        swin(window_size=3).load_state_dict(state)


@pytest.mark.long
@pytest.mark.parametrize(
    ("mixer", "depths"),
    [
        ("dot", (1,)),
        pytest.param("dot", (2, 1), marks=pytest.mark.nightly),
        pytest.param("krause", (2,), marks=pytest.mark.nightly),
    ],
)
def test_it_compiles_whole_for_all_sizes(mixer, depths):
    """One compilation for the first size, one for any that windows divide alike."""
    torch._dynamo.reset()
    model = swin(mixer=mixer, depths=depths, heads=(2, 4)[: len(depths)])
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for height, width in ((32, 32), (48, 64), (80, 32)):
        images = images_of(2, 3, height, width)
        torch.testing.assert_close(compiled(images), model(images), rtol=1e-4, atol=1e-5)
    assert counter.frame_count <= 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_size": 0}, "image_size must be >= 1, got 0"),
        ({"image_size": (4, 4, 4)}, "image_size must be one number or (height, width)"),
        ({"depths": 2}, "depths must be a list with one integer >= 1 per stage, got 2"),
        ({"depths": (2, 0)}, "depths must be >= 1, got 0"),
        ({"heads": (2,)}, "heads must have one number per stage (2), got 1"),
        ({"heads": (3, 4)}, "heads must divide dim = 8, got 3"),
        ({"window_size": 0}, "window_size must be >= 1, got 0"),
        ({"drop_path": 1.0}, "drop_path must be"),
        ({"dropout": -0.5}, "dropout must be"),
        ({"mixer": ["dot"]}, "mixer must have one entry per block (4), got 1"),
        ({"mixer_options": {"top_k": [2, 3]}}, "mixer_options['top_k'] must be one value, or one"),
    ],
)
def test_errors_name_the_argument(change, message):
    arguments = {"image_size": 16, "patch_size": 2, "num_classes": 5, **SMALL, **change}
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        ga.models.SwinTransformer(**arguments)


@pytest.mark.parametrize("shape", [(16, 16), (2, 1, 16, 16), (2, 3, 0, 16)], ids=str)
def test_images_of_other_shapes_are_refused(shape):
    with pytest.raises(
        ValueError, match=r"images must be a tensor of shape \[\*, 3, height, width"
    ):
        swin()(torch.zeros(shape))

"""SequenceEncoder: the paper's SA, SC, SW and MIX, graphs per layer, padding and packing."""

import pytest
import torch

import graphattn as ga

V, D, H = 11, 16, 4
MIXERS = {
    "SA": "dot",
    "SC": "consensus",
    "MIX": "mix",
    "own": lambda: [
        ga.nn.KrauseAttention(D, H, top_k=3),
        "dot",
        ga.nn.GaussianKernelAttention(D, H),
        "consensus",
    ],
}


def encoder(mixer="mix", **options) -> ga.models.SequenceEncoder:
    torch.manual_seed(0)
    mixer = mixer() if callable(mixer) else mixer
    options = {"edge_hidden": 8, "mixer": mixer, **options}
    return ga.models.SequenceEncoder(V, D, 4, H, **options).double()


def tokens_of(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(seed))


def by_hand(model, tokens, graphs, valid=None):
    """The pre-norm stack written out, with the layers as given."""
    x = model.embedding.weight[tokens]
    for block, graph in zip(model.blocks, graphs, strict=True):
        x = x + block.mixer(block.mixer_norm(x), graph, valid=valid)
        hidden = torch.nn.functional.gelu(block.mlp[0](block.mlp_norm(x)))
        x = x + block.mlp[2](hidden)
    return model.head(model.norm(x))


@pytest.mark.parametrize("name", MIXERS)
def test_the_model_is_its_blocks_one_after_the_other(name):
    model = encoder(MIXERS[name])
    tokens = tokens_of(3, 10)
    everything, near = ga.complete_graph(10), ga.window_path_graph(10, 2)
    graphs = {
        "SA": [everything] * 4,
        "SC": [near] * 4,
        "MIX": [everything, everything, near, near],
        "own": [everything, everything, everything, near],
    }[name]
    assert model.graphs(10) == graphs
    out = model(tokens)
    assert out.shape == (3, 10, V)
    torch.testing.assert_close(out, by_hand(model, tokens, graphs), rtol=0, atol=1e-12)
    torch.testing.assert_close(out, model(tokens, graphs), rtol=0, atol=0)


def test_one_graph_serves_all_layers():
    """Sliding-window attention: all attention over the window with self-loops."""
    model = encoder("dot")
    graph = ga.window_path_graph(12, 2, self_loops=True)
    tokens = tokens_of(12)
    out = model(tokens, graph)
    torch.testing.assert_close(out, by_hand(model, tokens, [graph] * 4), rtol=0, atol=1e-12)
    far = tokens.clone()
    far[9:] = (far[9:] + 1) % V  # four layers of window 2 reach 8 tokens
    assert torch.equal(model(far, graph)[0], out[0])
    assert not torch.equal(model(far, graph)[1], out[1])


@pytest.mark.parametrize("name", MIXERS)
def test_padding_is_never_read_whatever_number_it_holds(name):
    model = encoder(MIXERS[name])
    valid = torch.arange(9) < torch.tensor([[9], [6]])
    tokens = tokens_of(2, 9)
    out = model(tokens, valid=valid)
    for filler in (0, V - 1, -100, 10**9):
        padded = tokens.masked_fill(~valid, filler)
        assert torch.equal(model(padded, valid=valid)[valid], out[valid])
    # The shorter sequence alone, on graphs of its own length.
    alone = model(tokens[1, :6])
    torch.testing.assert_close(out[1, :6], alone, rtol=0, atol=1e-12)


def test_positions_shift_nothing_but_matter_when_they_spread():
    model = encoder("dot")
    tokens = tokens_of(7)
    out = model(tokens)
    shifted = model(tokens, positions=torch.arange(7) + 1000)  # rotary positions are relative
    torch.testing.assert_close(shifted, out, rtol=0, atol=1e-9)
    spread = model(tokens, positions=3 * torch.arange(7))
    assert (spread - out).abs().max() > 1e-4


def test_per_sequence_gradients_by_vmap():
    model = encoder("dot")
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters, tokens):
        return torch.func.functional_call(model, parameters, (tokens,)).square().sum()

    tokens = tokens_of(3, 6)
    together = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, tokens)
    for b in range(3):
        alone = torch.func.grad(loss)(parameters, tokens[b])
        for name in parameters:
            torch.testing.assert_close(together[name][b], alone[name], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"vocab_size": 0}, "vocab_size must be >= 1"),
        ({"depth": 0}, "depth must be >= 1"),
        ({"heads": 3}, "heads must divide dim"),
        ({"window": 0}, "window must be >= 1"),
        ({"mixer": ["dot", torch.nn.Linear(2, 2)]}, "mixer must be a layer .* got Linear"),
        ({"rope": "yes"}, "rope must be True, False or 'isometric'"),
        ({"mlp_ratio": 0}, "mlp_ratio must be a finite number > 0"),
        ({"mlp_ratio": 0.01}, r"hidden width mlp_ratio \* dim >= 1"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\)"),
        ({"step_size": "auto", "mixer": "consensus"}, "step_size='auto' needs rope"),
    ],
)
def test_bad_arguments_are_named(change, says):
    options = {"vocab_size": V, "dim": D, "depth": 2, "heads": H, "edge_hidden": 4, **change}
    with pytest.raises(ValueError, match=says):
        ga.models.SequenceEncoder(**options)


@pytest.mark.parametrize(
    ("tokens", "options", "says"),
    [
        (torch.zeros(3, 4), {}, "tokens must be an int32 or int64 tensor"),
        (torch.tensor(3), {}, "tokens must be an int32 or int64 tensor"),
        ([1, 2], {}, "tokens must be an int32 or int64 tensor"),
        (torch.tensor([0, V]), {}, f"tokens must be 0 .. {V - 1} .* got {V}"),
        (torch.tensor([0, -1]), {}, "got -1"),
        (torch.tensor([0, 1]), {"graph": [ga.causal_graph(2)]}, r"one per block \(4\), got 1"),
        (torch.tensor([0, 1]), {"graph": ga.complete_graph(3)}, "graph has 3 targets"),
        (torch.tensor([0, 1]), {"valid": torch.tensor([1, 0])}, "valid .* must be a bool tensor"),
        (torch.tensor([0, 1]), {"valid": torch.ones(3).bool()}, "valid .* must have shape"),
        (torch.tensor([0, 1]), {"valid": [True, True]}, "valid must be a bool tensor"),
    ],
)
def test_bad_inputs_are_named(tokens, options, says):
    with pytest.raises(ValueError, match=says):
        encoder("dot")(tokens, **options)


def test_a_causal_graph_is_refused_by_energy_consensus_inside_a_model_too():
    with pytest.raises(ValueError, match="leaks the future"):
        encoder("mix")(tokens_of(6), ga.causal_graph(6))


class Mean(torch.nn.Module):
    """A layer of one's own: every token becomes the mean of what it sees."""

    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, x, graph, *, valid=None, positions=None):
        q = torch.zeros_like(x)[..., None, :]
        return ga.dot_product_attention(q, q, x[..., None, :], graph, valid=valid).squeeze(-2)


def test_a_layer_of_one_s_own_is_a_mixer():
    model = encoder(lambda: ["dot", Mean(D), "consensus", Mean(D)])
    tokens = tokens_of(2, 7)
    out = model(tokens)
    torch.testing.assert_close(out, by_hand(model, tokens, model.graphs(7)), rtol=0, atol=1e-12)
    x = torch.randn(7, D).double()
    mean = model.blocks[1].mixer(x, ga.complete_graph(7))
    torch.testing.assert_close(mean, x.mean(0).expand(7, D), rtol=0, atol=1e-12)
    model.reset_parameters()  # what has none is passed over


def test_a_block_takes_a_second_track():
    block = ga.nn.PreNormBlock(ga.nn.CrossConsensus(D, H, edge_hidden=8, context_dim=24)).double()
    x, context = torch.randn(5, D).double(), torch.randn(9, 24).double()
    graph = ga.bipartite_complete_graph(5, 9)
    moved = x + block.mixer(block.mixer_norm(x), graph, context)
    expected = moved + block.mlp(block.mlp_norm(moved))
    torch.testing.assert_close(block(x, graph, context), expected, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="mixer must be a layer"):
        ga.nn.PreNormBlock(torch.nn.Linear(2, 2))


def test_trainable_parameters_are_counted_by_themselves():
    model = encoder("dot")
    whole = model.num_parameters(only_trainable=True)
    assert whole == model.num_parameters()
    model.embedding.requires_grad_(False)
    assert model.num_parameters(only_trainable=True) == whole - V * D
    assert model.num_parameters() == whole


# Features of edges.


def test_consensus_blocks_see_features_of_edges_and_attention_blocks_do_not():
    torch.manual_seed(0)
    graph = ga.window_path_graph(12, 2)
    model = ga.models.SequenceEncoder(
        9, 16, depth=4, heads=2, mixer="mix", edge_hidden=4, edge_features=3
    ).double()
    assert [getattr(block.mixer, "edge_features", 0) for block in model.blocks] == [0, 0, 3, 3]
    tokens = torch.randint(9, (2, 12))
    e = torch.randn(2, graph.num_edges, 3, dtype=torch.float64)
    x = model.embedding(tokens)
    for k, block in enumerate(model.blocks):
        x = block(x, graph) if k < 2 else block(x, graph, edge_features=e)
    expected = model.head(model.norm(x))
    torch.testing.assert_close(model(tokens, graph, edge_features=e), expected)
    torch.testing.assert_close(model(tokens, graph, edge_features=[None, None, e, e]), expected)
    # The consensus layers' own graph is this one, so their features fit it, too.
    assert model(tokens, edge_features=e).shape == (2, 12, 9)
    other = model(tokens, graph, edge_features=2 * e)
    assert not torch.allclose(other, expected)
    out = model(tokens, graph, edge_features=e.requires_grad_())
    out.sum().backward()
    assert e.grad.any()


def test_an_encoder_names_features_that_are_missing_or_not_expected():
    tokens, graph = torch.zeros(12, dtype=torch.long), ga.window_path_graph(12, 2)
    e = torch.zeros(graph.num_edges, 3)
    options = {"depth": 2, "heads": 2, "edge_hidden": 4}
    with pytest.raises(ValueError, match="edge_features must be None in a model without"):
        ga.models.SequenceEncoder(9, 16, mixer="mix", **options)(tokens, graph, edge_features=e)
    model = ga.models.SequenceEncoder(9, 16, mixer="mix", edge_features=3, **options)
    with pytest.raises(ValueError, match=r"edge_features must be a tensor of shape .* got None"):
        model(tokens, graph)
    with pytest.raises(ValueError, match=r"one per block \(2\), got 1"):
        model(tokens, graph, edge_features=[e])


def test_options_of_consensus_are_spelled_as_in_every_model(tmp_path):
    of_consensus = {"rank": 2, "edge_hidden": 6, "step_size": "auto"}
    for mixer in ("consensus", "mix"):
        options = {"depth": 2, "heads": H, "mixer": mixer, "rope": False}
        models = [
            ga.models.SequenceEncoder(V, D, **options, **of_consensus),
            ga.models.SequenceEncoder(V, D, **options, mixer_options=of_consensus),
        ]
        models[1].load_state_dict(models[0].state_dict())
        tokens = torch.randint(V, (2, 7))
        assert torch.equal(models[0](tokens), models[1](tokens))
        ga.save(models[1], tmp_path / mixer)
        assert torch.equal(ga.load(tmp_path / mixer)(tokens), models[0](tokens))
    with pytest.raises(ValueError, match="'edge_hidden'"):  # no layer has it
        ga.models.SequenceEncoder(V, D, depth=2, heads=H, mixer_options={"edge_hidden": 6})

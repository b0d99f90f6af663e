"""Recorded weights, bandwidth tables and effective ranks of whole models."""

import copy

import pytest
import torch
from torch import nn

import graphattn as ga
from graphattn import diagnostics

V, D, H = 11, 16, 4


def encoder(mixer="dot", depth=2, **options):
    torch.manual_seed(0)
    options = {"edge_hidden": 8, **options}
    return ga.models.SequenceEncoder(V, D, depth, H, mixer=mixer, **options)


def own_mixers():
    return [
        ga.nn.KrauseAttention(D, H, top_k=3),
        ga.nn.GaussianKernelAttention(D, H, rope=True),
        ga.nn.DotProductAttention(D, H, kv_heads=2),
        ga.nn.SelfConsensus(D, H, edge_hidden=8),
    ]


def tokens_of(*shape):
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(1))


def state_of(model):
    """Every tensor, its address, every hook and mode: what "left as found" is about."""
    tensors = {name: (t.data_ptr(), t.clone()) for name, t in model.state_dict().items()}
    hooks = [
        (len(m._forward_hooks), len(m._forward_pre_hooks), m.training) for m in model.modules()
    ]
    return tensors, hooks


def assert_as_found(model, before):
    tensors, hooks = state_of(model)
    assert hooks == before[1]
    for name, (address, value) in before[0].items():
        assert tensors[name][0] == address
        assert torch.equal(tensors[name][1], value)


def test_recorded_weights_are_those_of_the_layers_called_by_hand():
    model = encoder(own_mixers(), depth=4)
    tokens = tokens_of(2, 10)
    with diagnostics.record_attention(model) as records:
        model(tokens)
    assert [r.name for r in records] == [f"blocks.{n}.mixer" for n in range(3)]
    x = model.embedding(tokens)
    for record, block, graph in zip(records, model.blocks, model.graphs(10), strict=False):
        y, weights = block.mixer(block.mixer_norm(x), graph, return_attention_weights=True)
        assert record.graph == graph
        assert torch.equal(record.weights, weights)
        assert torch.equal(record.output, y)
        assert not any(t.requires_grad for t in (record.weights, record.output))
        x = block(x, graph)


def test_recording_changes_no_bit_of_results_or_gradients_and_leaves_no_hook():
    model = encoder(own_mixers(), depth=4)
    before = state_of(model)
    tokens = tokens_of(2, 10)

    def run():
        out = model(tokens)
        return [out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))]

    alone = run()
    with diagnostics.record_attention(model) as records:
        recorded = run()
    assert len(records) == 3
    assert all(map(torch.equal, alone, recorded))
    assert_as_found(model, before)
    assert all(map(torch.equal, alone, run()))
    assert len(records) == 3  # and no more


def test_other_hooks_and_other_recordings_get_what_the_caller_gets():
    layer = ga.nn.DotProductAttention(D, H)
    graph, x, seen = ga.causal_graph(5), torch.randn(5, D), []
    layer.register_forward_hook(lambda m, args, y: seen.append(y))
    with diagnostics.record_attention(layer) as outer, diagnostics.record_attention(layer) as inner:
        y = layer(x, graph)
        both = layer(x, graph, return_attention_weights=True)
    assert torch.equal(seen[0], y)
    assert [len(outer), len(inner)] == [2, 2]
    assert outer[0].name == "DotProductAttention"
    assert isinstance(both, tuple)
    assert torch.equal(both[0], y)
    assert torch.equal(both[1], outer[1].weights)
    assert torch.equal(inner[1].weights, outer[1].weights)


def test_recording_ends_with_an_exception_and_a_failed_call_does_not_disturb_the_next():
    layer = ga.nn.GaussianKernelAttention(D, H)
    graph, x = ga.causal_graph(5), torch.randn(5, D)
    with diagnostics.record_attention(layer) as records:
        with pytest.raises(ValueError, match="graph has 5 targets"):
            layer(x[:4], graph)
        _, weights = layer(x, graph, return_attention_weights=True)
        assert isinstance(layer(x, graph), torch.Tensor)
        assert torch.equal(records[0].weights, weights)
    with pytest.raises(RuntimeError, match="mine"), diagnostics.record_attention(layer):
        raise RuntimeError("mine")
    layer(x, graph)
    assert len(records) == 2


def test_edge_lists_and_other_tracks_are_recorded_with_their_graph():
    cross = ga.nn.DotProductAttention(D, H, context_dim=8)
    graph = ga.bipartite_complete_graph(3, 5)
    with diagnostics.record_attention(cross) as records:
        cross(torch.randn(3, D), graph.edge_index, context=torch.randn(5, 8))
    assert records[0].graph == graph
    assert diagnostics.sink_share(records[0].weights, records[0].graph).shape == (H,)


def test_sinks_per_layer_is_the_mean_over_the_batch():
    model = encoder("mix", depth=4).train()
    before = state_of(model)
    tokens = tokens_of(3, 9)
    values, names = diagnostics.sinks_per_layer(model, tokens)
    assert names == ("blocks.0.mixer", "blocks.1.mixer")  # consensus layers have no weights
    with diagnostics.record_attention(model) as records:
        model(tokens)
    by_hand = [
        torch.stack([diagnostics.sink_share(w, r.graph) for w in r.weights]) for r in records
    ]
    torch.testing.assert_close(values, torch.stack([each.mean(0) for each in by_hand]))
    assert_as_found(model, before)


def test_a_layer_that_attends_to_its_first_token_alone_is_a_sink():
    """q . k grows with the first feature of the key, and only token 0 has it."""
    layer = ga.nn.DotProductAttention(8, 2, bias=False)
    with torch.no_grad():
        layer.query_proj.weight.fill_(5.0)
        layer.key_proj.weight.zero_()[:, 0] = 5.0
    x = torch.rand(6, 8)
    x[:, 0] = torch.tensor([1.0, 0, 0, 0, 0, 0])
    values, _ = diagnostics.sinks_per_layer(layer, x, ga.causal_graph(6))
    assert (values > 0.999).all()
    values, _ = diagnostics.sinks_per_layer(layer, x, ga.causal_graph(6), token=1)
    assert (values < 1e-3).all()


def test_bandwidths_are_exp_of_every_log_sigma_with_layers_of_few_heads_filled_up():
    model = nn.ModuleDict(
        {
            "vision": ga.nn.GaussianKernelAttention(16, 4),
            "plain": ga.nn.DotProductAttention(16, 4),
            "shared": ga.nn.KrauseAttention(16, 4, sigma_per_head=False, init_sigma=2.5),
            "few": ga.nn.KrauseAttention(16, 2, init_sigma=5.0),
        }
    )
    with torch.no_grad():
        model["vision"].log_sigma.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]).log())
    sigma, names = diagnostics.bandwidths(model)
    assert names == ("vision", "shared", "few")
    nan = torch.nan
    expected = [[1.0, 2.0, 3.0, 4.0], [2.5] * 4, [5.0, 5.0, nan, nan]]
    torch.testing.assert_close(sigma, torch.tensor(expected), equal_nan=True)


# Effective rank.


def covariance_spectrum(x):
    centred = x - x.mean(0)
    return torch.linalg.eigvalsh(centred.T @ centred / len(x)).clamp_min(0)


@pytest.mark.parametrize("shape", [(40, 6), (5, 12), (7, 1)])
def test_effective_ranks_are_functions_of_the_covariance_spectrum(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = x * torch.arange(1, shape[1] + 1) + 100
    spectrum = covariance_spectrum(x)
    p = spectrum / spectrum.sum()
    participation = diagnostics.effective_rank(x)
    assert participation.item() == pytest.approx(1 / p.square().sum().item(), rel=1e-9)
    p = p[p > 1e-12]
    entropy = diagnostics.effective_rank(x, method="entropy")
    assert entropy.item() == pytest.approx((-(p * p.log()).sum()).exp().item(), rel=1e-9)
    assert 1 - 1e-9 <= participation <= entropy + 1e-9 <= min(shape[0] - 1, shape[1]) + 1e-6


@pytest.mark.parametrize("method", ["participation", "entropy"])
@pytest.mark.parametrize("n", [1, 3, 8])
def test_n_equal_directions_have_rank_n_wherever_they_point(method, n):
    rotation = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64)).Q
    x = torch.cat([torch.eye(8)[:n], -torch.eye(8)[:n]]).double() @ rotation * 7 + 3
    assert diagnostics.effective_rank(x, method=method).item() == pytest.approx(n)


def test_equal_tokens_have_rank_0_whatever_the_rounding_of_their_mean():
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = (torch.randn(2, 1, 5) * 1000).to(dtype).expand(2, 777, 5)
        assert diagnostics.effective_rank(x).tolist() == [0, 0]
    assert diagnostics.effective_rank(torch.full((3, 2), torch.nan)).isnan()


def test_ranks_per_layer_are_those_of_the_hidden_states():
    model = encoder("mix", depth=4, dropout=0.5).train()
    before, random = state_of(model), torch.get_rng_state()
    tokens = tokens_of(3, 20)
    values, names = diagnostics.effective_rank_per_layer(model, tokens)
    assert names == tuple(f"blocks.{n}" for n in range(4))
    assert_as_found(model, before)
    assert torch.equal(torch.get_rng_state(), random)
    model.eval()
    x = model.embedding(tokens)
    for value, block, graph in zip(values, model.blocks, model.graphs(20), strict=True):
        x = block(x, graph)
        torch.testing.assert_close(value, diagnostics.effective_rank(x).mean())


def softmax_attention(x):
    """softmax(x x^T / sqrt(D)) x per head, nothing learned."""
    heads = x.unflatten(-1, (H, D // H)).transpose(-2, -3)
    out = (heads @ heads.mT / (D // H) ** 0.5).softmax(-1) @ heads
    return out.transpose(-2, -3).flatten(-2)


@pytest.mark.parametrize("normalization", ["enabled", "disabled"])
def test_without_weights_a_block_adds_attention_of_its_input_to_it(normalization):
    """Attention Clusters, Figures 12 and 14: no Q, K, V; with and without layer normalisation."""
    model = encoder(depth=3, rope=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))  # norms and biases must matter
    before = state_of(model)
    tokens = tokens_of(2, 20)
    states = []
    handles = [b.register_forward_hook(lambda m, a, y: states.append(y)) for b in model.blocks]
    values, _ = diagnostics.effective_rank_per_layer(
        model, tokens, weights="disabled", normalization=normalization
    )
    for handle in handles:
        handle.remove()
    assert_as_found(model, before)
    x = model.embedding(tokens)
    for value, state in zip(values, states, strict=True):
        normal = nn.functional.layer_norm(x, (D,)) if normalization == "enabled" else x
        x = x + softmax_attention(normal)
        torch.testing.assert_close(state, x)
        torch.testing.assert_close(value, diagnostics.effective_rank(x).mean())


def test_torch_transformers_lose_their_weights_too():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(D, H, 32, dropout=0.1, batch_first=True)  # post-norm
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    before = state_of(model)
    x = torch.randn(3, 12, D)
    ranks = diagnostics.effective_rank_per_layer(model, x, weights="disabled")
    assert ranks.names == ("layers.0", "layers.1")
    assert_as_found(model, before)
    for value in ranks.values:
        for _ in range(2):  # norm1 after attention, norm2 after a perceptron that adds nothing
            x = nn.functional.layer_norm(x + softmax_attention(x) * (_ == 0), (D,))
        torch.testing.assert_close(value, diagnostics.effective_rank(x).mean(), rtol=1e-4, atol=0)


class Foreign(nn.Module):
    """Attention whose projections only their names give away."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(D, D) for _ in range(3))
        self.up, self.down = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        scores = self.query(x) @ self.key(x).mT / D**0.5
        x = x + scores.softmax(-1) @ self.value(x)
        return x + self.down(self.up(x).relu())


def test_foreign_attention_is_told_by_the_names_of_its_projections():
    model, x = nn.Sequential(Foreign()), torch.randn(9, D)
    values, names = diagnostics.effective_rank_per_layer(
        model, x, weights="disabled", layers=Foreign, projections=("query", "key", "value")
    )
    expected = x + (x @ x.T / D**0.5).softmax(-1) @ x
    assert names == ("0",)
    torch.testing.assert_close(values[0], diagnostics.effective_rank(expected))
    with pytest.raises(ValueError, match=r"projections must be the ends of the names .* got \(\)"):
        diagnostics.effective_rank_per_layer(model, x, weights="disabled", layers=["0"])


def test_bandwidths_go_back_to_their_start():
    model = encoder([ga.nn.GaussianKernelAttention(D, H) for _ in range(2)])
    tokens = tokens_of(20)
    start = diagnostics.effective_rank_per_layer(model, tokens, weights="disabled").values
    x, graph = model.embedding(tokens), ga.complete_graph(20)
    for value in start:
        heads = nn.functional.layer_norm(x, (D,)).unflatten(-1, (H, D // H))
        x = x + ga.rbf_attention(heads, heads, heads, graph, (D / H) ** 0.5).flatten(-2)
        torch.testing.assert_close(value, diagnostics.effective_rank(x))
    with torch.no_grad():
        for block in model.blocks:
            block.mixer.log_sigma.add_(1.0)
    again = diagnostics.effective_rank_per_layer(model, tokens, weights="disabled").values
    assert torch.equal(start, again)
    learned = diagnostics.effective_rank_per_layer(model, tokens).values
    assert not torch.allclose(start, learned, rtol=1e-3)


def test_a_model_is_left_as_found_after_an_exception():
    model = encoder().train()
    before = state_of(model)

    def fail(*_):
        raise RuntimeError("mine")

    handle = model.blocks[1].mixer.output_proj.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="mine"):
        diagnostics.effective_rank_per_layer(
            model, tokens_of(9), weights="disabled", normalization="disabled"
        )
    handle.remove()
    assert_as_found(model, before)


def test_layers_are_chosen_by_name_or_type_in_the_order_of_the_calls():
    model, tokens = encoder(), tokens_of(9)
    by_name = diagnostics.effective_rank_per_layer(model, tokens, layers=["norm", "embedding"])
    assert by_name.names == ("embedding", "norm")
    by_type = diagnostics.effective_rank_per_layer(model, tokens, layers=ga.nn.DotProductAttention)
    assert by_type.names == ("blocks.0.mixer", "blocks.1.mixer")


TOKENS = tokens_of(9)
rank = diagnostics.effective_rank_per_layer


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: diagnostics.bandwidths(encoder()), "got a SequenceEncoder without any"),
        (lambda: diagnostics.bandwidths([1]), "model must be a torch.nn.Module"),
        (
            lambda: diagnostics.sinks_per_layer(encoder("consensus"), TOKENS),
            "model must have attention layers of graphattn.nn",
        ),
        (
            lambda: diagnostics.effective_rank(torch.ones(3)),
            r"x must be .* got torch.float32 \[3\]",
        ),
        (lambda: diagnostics.effective_rank(torch.ones(3, 2), method="svd"), "method must be one"),
        (lambda: rank(encoder(), TOKENS, weights="off"), "weights must be one of"),
        (lambda: rank(nn.Linear(2, 2), torch.ones(3, 2)), "layers must be given"),
        (lambda: rank(encoder(), TOKENS, layers=["block"]), "layers must be names .* 'block'"),
        (
            lambda: rank(encoder(), TOKENS, layers=nn.Conv1d),
            "layers must be types of modules in the model",
        ),
        (lambda: rank(encoder(), TOKENS, layers=[3]), "layers must be names or types"),
        (lambda: rank(encoder("consensus"), TOKENS, weights="disabled"), "EdgeNetwork"),
        (
            lambda: rank(encoder(own_mixers()[2:], 2), TOKENS, weights="disabled"),
            r"unless projections are square.*key_proj' of shape \[8, 16\]",
        ),
    ],
)
def test_bad_input_is_named(call, says):
    with pytest.raises(ValueError, match=says):
        call()


def test_a_model_can_be_copied_after_it_was_recorded():
    model = encoder()
    diagnostics.sinks_per_layer(model, TOKENS)
    torch.testing.assert_close(copy.deepcopy(model)(TOKENS), model(TOKENS))

"""The encoder's further parts: noise level, zero head, stochastic depth, norms, every mixer."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphattn as ga

V, D, H, C = 11, 16, 4, 6
CLOSE = {"rtol": 0.0, "atol": 1e-11}
ROW = ("dot", "dot-window", "vlt", "linear", "gka", "krause", "consensus")
MIXERS: dict[str, Any] = {
    **{name: lambda name=name: name for name in ROW},
    "mix": lambda: "mix",
    "gka-consensus": lambda: "gka-consensus",
    "krause-consensus": lambda: "krause-consensus",
    "a list": lambda: ["vlt", "krause", ga.nn.GaussianKernelAttention(D, H, rope=True), "dot"],
}
EVERY_MIXER = pytest.mark.parametrize("mixer", MIXERS)


def encoder(mixer: str = "mix", *, trained: bool = True, **options: Any) -> Any:
    """A model in float64; with `trained`, what starts at 0 has moved away from there."""
    torch.manual_seed(0)
    options = {"noise_dim": C, "zero_head": True, "edge_hidden": 8, "rank": 2, **options}
    model = ga.models.SequenceEncoder(V, D, 4, H, mixer=MIXERS[mixer](), **options).double().eval()
    if trained:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def tokens_of(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(seed))


def levels_of(*shape: int, seed: int = 1) -> Tensor:
    return 5 * torch.rand(*shape, generator=torch.Generator().manual_seed(seed)).double()


# The backbone of Lou et al. (2024), from its formulas.


def layer_norm(x: Tensor, norm: Any) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return x * norm.weight + norm.bias


def rotated(x: Tensor) -> Tensor:
    """[B, H, N, d]: feature k turns with feature k + d/2 by position * 10000^(-2k/d)."""
    n, d = x.shape[-2:]
    frequency = 1 / 10000 ** (torch.arange(0, d, 2).double() / d)
    angle = torch.arange(n).double()[:, None] * frequency
    cos, sin = (torch.cat([f(angle)] * 2, -1) for f in (torch.cos, torch.sin))
    halves = torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1)
    return x * cos + halves * sin


def ddit(model: Any, tokens: Tensor, sigma: Tensor) -> Tensor:
    """DDiT with this model's weights: adaLN on the noise level, attention, perceptron, adaLN."""
    p = dict(model.named_parameters())
    batch, n = tokens.shape
    half = 128
    waves = torch.exp(-math.log(10000) * torch.arange(half).double() / half) * sigma[:, None]
    waves = torch.cat([torch.cos(waves), torch.sin(waves)], -1)
    silu = nn.functional.silu
    hidden = silu(waves @ p["noise.mlp.0.weight"].T + p["noise.mlp.0.bias"])
    c = silu(hidden @ p["noise.mlp.2.weight"].T + p["noise.mlp.2.bias"])[:, None]
    x = p["embedding.weight"][tokens]
    for block in model.blocks:
        adaln = c @ block.modulation.weight.T + block.modulation.bias
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = adaln.chunk(6, -1)
        a = layer_norm(x, block.mixer_norm) * (1 + scale_1) + shift_1
        weights_of = dict(block.mixer.named_parameters())
        q, k, v = (
            (a @ weights_of[f"{name}_proj.weight"].T + weights_of[f"{name}_proj.bias"])
            .view(batch, n, H, D // H)
            .transpose(1, 2)
            for name in ("query", "key", "value")
        )
        weights = (rotated(q) @ rotated(k).transpose(-1, -2) / math.sqrt(D // H)).softmax(-1)
        y = (weights @ v).transpose(1, 2).reshape(batch, n, D)
        x = x + gate_1 * (y @ weights_of["output_proj.weight"].T + weights_of["output_proj.bias"])
        m = layer_norm(x, block.mlp_norm) * (1 + scale_2) + shift_2
        m = block.mlp[0](m)
        m = m * 0.5 * (1 + torch.erf(m / math.sqrt(2)))
        x = x + gate_2 * block.mlp[2](m)
    shift, scale = (c @ p["head_modulation.weight"].T + p["head_modulation.bias"]).chunk(2, -1)
    return (layer_norm(x, model.norm) * (1 + scale) + shift) @ p["head.weight"].T + p["head.bias"]


def test_the_model_is_the_backbone_of_lou_et_al():
    model = encoder("dot")
    tokens, sigma = tokens_of(3, 9), torch.tensor([1e-3, 0.7, 6.9]).double()
    out = model(tokens, noise_level=sigma)
    assert out.abs().max() > 0.5
    torch.testing.assert_close(out, ddit(model, tokens, sigma), **CLOSE)
    # Its perceptrons approximate GELU by tanh, which is not the same to rounding, and is close.
    approximate = copy.deepcopy(model)
    for block in approximate.blocks:
        block.mlp[1] = nn.GELU(approximate="tanh")
    off = (approximate(tokens, noise_level=sigma) - out).abs().max()
    assert 1e-7 < off < 1e-2


def test_a_new_model_thinks_all_tokens_equally_likely_and_learns_from_there():
    model = encoder(trained=False)
    tokens, sigma = tokens_of(2, 7), levels_of(2)
    assert torch.equal(model(tokens, noise_level=sigma), torch.zeros(2, 7, V).double())
    # With gates at 0 every block is the identity: features are the embedding, normalised.
    features = model.encode(tokens, noise_level=sigma)
    torch.testing.assert_close(features, model.norm(model.embedding(tokens)), **CLOSE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    moved: set[str] = set()
    for _ in range(4):
        loss = nn.functional.cross_entropy(
            model(tokens, noise_level=sigma).flatten(0, 1), tokens.flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        moved |= {n for n, p in model.named_parameters() if p.grad is not None and p.grad.any()}
        optimizer.step()
    assert loss < math.log(V)
    still = {n for n, _ in model.named_parameters()} - moved
    assert all("source_proj.bias" in name for name in still)  # which may cancel


# One level per sequence, or per token.


@EVERY_MIXER
def test_levels_of_sequences_are_levels_of_their_tokens(mixer):
    model = encoder(mixer)
    tokens, sigma = tokens_of(2, 3, 9), levels_of(2, 3)
    out = model(tokens, noise_level=sigma)
    assert out.shape == (2, 3, 9, V)
    every = sigma[..., None].expand(2, 3, 9)
    torch.testing.assert_close(model(tokens, noise_level=every), out, **CLOSE)
    for b in range(2):
        torch.testing.assert_close(model(tokens[b], noise_level=sigma[b]), out[b], **CLOSE)
    torch.testing.assert_close(model(tokens[0, 0], noise_level=sigma[0, 0]), out[0, 0], **CLOSE)
    assert (model(tokens, noise_level=2 * sigma) - out).abs().max() > 1e-3


@EVERY_MIXER
def test_packed_sequences_have_a_level_each(mixer):
    model = encoder(mixer)
    lengths = torch.tensor([5, 1, 8])
    tokens, sigma = tokens_of(14), levels_of(3)
    graphs = [
        ga.batch(of_block) for of_block in zip(*map(model.graphs, lengths.tolist()), strict=True)
    ]
    out = model(tokens, graphs, noise_level=sigma.repeat_interleave(lengths))
    parts = zip(tokens.split(lengths.tolist()), out.split(lengths.tolist()), sigma, strict=True)
    for sequence, packed, level in parts:
        torch.testing.assert_close(packed, model(sequence, noise_level=level), **CLOSE)


@EVERY_MIXER
def test_padding_is_never_read_nor_its_level(mixer):
    model = encoder(mixer)
    valid = torch.arange(9) < torch.tensor([[9], [6], [0]])
    tokens, sigma = tokens_of(3, 9), levels_of(3)
    sigma[2] = float("nan")  # of a sequence that has no token
    out = model(tokens, noise_level=sigma, valid=valid)
    torch.testing.assert_close(out[1, :6], model(tokens[1, :6], noise_level=sigma[1]), **CLOSE)
    every = sigma[:, None].expand(3, 9)
    by_filler = []
    for filler, level in ((0, 0.0), (10**9, float("nan"))):
        model.zero_grad()
        y = model(
            tokens.masked_fill(~valid, filler),
            noise_level=every.masked_fill(~valid, level),
            valid=valid,
        )[valid]
        y.square().sum().backward()
        by_filler.append([y.detach(), *(p.grad.clone() for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*by_filler, strict=True))
    torch.testing.assert_close(by_filler[0][0], out[valid], **CLOSE)


@pytest.mark.parametrize(
    ("mixer", "graph"),
    [
        ("dot", ga.complete_graph),
        ("vlt", ga.complete_graph),
        ("gka", ga.complete_graph),
        ("dot-window", lambda n: ga.window_path_graph(n, 3, self_loops=True)),
        ("krause", lambda n: ga.window_path_graph(n, 3, self_loops=True)),
        ("consensus", lambda n: ga.window_path_graph(n, 3)),
    ],
)
def test_every_name_has_its_graph(mixer, graph):
    model = encoder(mixer, window=3)
    assert model.graphs(12) == [graph(12)] * 4
    tokens, sigma = tokens_of(2, 12), levels_of(2)
    out = model(tokens, noise_level=sigma)
    assert torch.equal(out, model(tokens, graph(12), noise_level=sigma))
    shorter = ga.window_path_graph(12, 1, self_loops=mixer != "consensus")
    assert (model(tokens, [shorter] * 4, noise_level=sigma) - out).abs().max() > 1e-6


# Together with what users combine.


def test_weights_do_not_care_whether_the_head_began_at_zero_but_which_norm_it_is():
    model = encoder(zero_head=False)
    other = encoder(zero_head=True, trained=False)
    other.load_state_dict(model.state_dict())
    tokens, sigma = tokens_of(2, 9), levels_of(2)
    assert torch.equal(other(tokens, noise_level=sigma), model(tokens, noise_level=sigma))
    layer_norms = encoder(bias=False)
    with pytest.raises(RuntimeError, match="saved with norm='layer', but this one has norm='rms'"):
        encoder(bias=False, norm="rms").load_state_dict(layer_norms.state_dict())


def test_a_window_is_compared_where_a_layer_asks_for_it():
    for mixer, asks in (("vlt", False), ("gka", False), ("krause", True), ("dot-window", True)):
        state = encoder(mixer, window=2).state_dict()
        other = encoder(mixer, window=4)
        if asks:
            with pytest.raises(
                RuntimeError, match="saved with window=2, but this one has window=4"
            ):
                other.load_state_dict(state)
        else:
            other.load_state_dict(state)


# Norms, biases, stochastic depth.


def test_rms_norms_and_no_biases():
    model = encoder("mix", norm="rms", bias=False, activation="relu2")
    names = [n for n, _ in model.named_parameters() if "bias" in n]
    owners = ("noise", "modulation", "edge_net")  # conditions and edge networks keep theirs
    assert all(any(owner in name for owner in owners) for name in names)
    norms = [m for m in model.modules() if "Norm" in type(m).__name__ and not hasattr(m, "mlp")]
    assert {type(m) for m in norms} == {nn.RMSNorm}
    assert len(norms) == 9
    assert {type(b.mlp[1]).__name__ for b in model.blocks} == {"ReLU2"}
    kept = encoder("mix", bias=False, mixer_options={"bias": True})
    assert kept.blocks[0].mixer.query_proj.bias is not None
    assert kept.head.bias is None


def test_stochastic_depth_grows_with_the_blocks_and_divides_by_what_is_kept():
    model = encoder("dot", drop_path=0.3)
    rates = [block.drop_path for block in model.blocks]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3])
    assert ga.models.SequenceEncoder(V, D, 1, H, drop_path=0.3).blocks[0].drop_path == 0.3
    tokens = tokens_of(1, 5).expand(4000, 5)
    block = model.blocks[3].train()
    x = model.embedding(tokens)
    c = torch.zeros(4000, C).double()
    torch.manual_seed(0)
    with torch.no_grad():
        trained, whole = block(x, ga.complete_graph(5), condition=c), None
        block.eval()
        whole = block(x[:1], ga.complete_graph(5), condition=c[:1])
    untouched = (trained == x).flatten(1).all(-1).double().mean()
    assert untouched == pytest.approx(0.3**2, abs=0.02)  # both parts were left out
    assert (trained.mean(0) - whole[0]).abs().max() < 0.2 * (whole[0] - x[0]).abs().max()


# What is refused.


class OwnEncode(ga.models.SequenceEncoder):
    def encode(self, tokens, graph=None, *, valid=None, positions=None):
        return self.embedding(tokens)


class OwnForward(ga.models.SequenceEncoder):
    def forward(self, tokens, graph=None, *, noise_level=None, valid=None, positions=None):
        return -super().forward(tokens, graph, noise_level=noise_level, valid=valid)


def test_subclasses_replace_what_they_replace():
    tokens = tokens_of(2, 5)
    replaced = OwnEncode(V, D, 2, H)
    assert torch.equal(replaced(tokens), replaced.head(replaced.embedding(tokens)))
    with pytest.raises(ValueError, match=r"step does not run the encode\(\)"):
        replaced.init_cache(2)
    torch.manual_seed(0)
    negative = OwnForward(V, D, 2, H, noise_dim=C)
    torch.manual_seed(0)
    model = ga.models.SequenceEncoder(V, D, 2, H, noise_dim=C)
    sigma = torch.rand(2)
    assert torch.equal(negative(tokens, noise_level=sigma), -model(tokens, noise_level=sigma))


@pytest.mark.parametrize(
    ("level", "says"),
    [
        (None, r"shape \[2\] .* or \[2, 5\] .* noise_dim=6, got None"),
        (0.5, "got 0.5"),
        (torch.zeros(5), r"got torch.float32 of shape \[5\]"),
        (torch.zeros(2, 1), r"of shape \[2, 1\]"),
        (torch.zeros(2, dtype=torch.int64), "got torch.int64 of shape"),
    ],
)
def test_a_noise_level_of_another_shape_is_named(level, says):
    with pytest.raises(ValueError, match="noise_level must be a floating-point tensor.*" + says):
        encoder("dot")(tokens_of(2, 5), noise_level=level)


@pytest.mark.parametrize("wrong", [-0.1, math.nan, math.inf])
def test_noise_levels_that_are_none_are_refused_but_in_padding(wrong):
    model, tokens = encoder(), tokens_of(2, 7)
    level = levels_of(2, 7)
    level[1, 6] = wrong
    with pytest.raises(ValueError, match=f"finite numbers >= 0 where tokens are real, got {wrong}"):
        model(tokens, noise_level=level)
    valid = torch.ones(2, 7, dtype=torch.bool)
    valid[1, 6] = False
    assert model(tokens, noise_level=level, valid=valid)[valid].isfinite().all()


def test_what_does_not_fit_is_named():
    plain = ga.models.SequenceEncoder(V, D, 2, H)
    with pytest.raises(
        ValueError, match="noise_level must be None in a model made without noise_dim"
    ):
        plain(tokens_of(2, 5), noise_level=torch.zeros(2))
    with pytest.raises(ValueError, match="noise_dim=6 cannot generate token by token"):
        encoder("dot").init_cache(2)
    for change, says in (
        ({"noise_dim": 0}, "noise_dim must be >= 1"),
        ({"drop_path": 1.0}, "drop_path must be"),
        ({"norm": "batch"}, "norm must be one of 'layer', 'rms'"),
        ({"activation": "silu"}, "activation must be one of"),
    ):
        with pytest.raises(ValueError, match=says):
            ga.models.SequenceEncoder(V, D, 2, H, **change)


# The embedding of levels by itself.


def test_waves_are_cosines_then_sines_of_falling_frequencies():
    noise = ga.nn.NoiseEmbedding(3, features=6, max_period=100.0)
    waves = noise.waves(torch.tensor([[2.0]]))
    angles = [2.0 * 100 ** (-k / 3) for k in range(3)]
    expected = [*map(math.cos, angles), *map(math.sin, angles)]
    torch.testing.assert_close(waves[0, 0], torch.tensor(expected))
    assert noise(torch.rand(4, 2)).shape == (4, 2, 3)
    before = noise.mlp[0].weight.clone()
    noise.reset_parameters()
    assert not torch.equal(noise.mlp[0].weight, before)
    low = ga.nn.NoiseEmbedding(3).bfloat16()  # whose waves are not rounded before they turn
    level = torch.tensor([6.897])
    torch.testing.assert_close(low.waves(level), ga.nn.NoiseEmbedding(3).waves(level))
    with pytest.raises(ValueError, match="features must be even, got 5"):
        ga.nn.NoiseEmbedding(3, features=5)
    with pytest.raises(ValueError, match="noise_level must be a floating-point tensor"):
        noise(torch.tensor([1]))

"""Mixers of converted modules, and converted modules in what people do with models."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import graphattn as ga
from graphattn.integrations import torch as gtorch

B, N, E, H = 2, 9, 16, 4
MIXERS = ["dot", "rbf", "krause", "gka", "vlt", "consensus"]
PAD = torch.arange(N) >= torch.tensor([[N], [6]])  # True is padding
CAUSAL = torch.triu(torch.ones(N, N), 1).bool()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def attention(**options):
    old = nn.MultiheadAttention(E, H, batch_first=True, **options).double()
    nn.init.normal_(old.in_proj_bias)
    return old


def model(mixer, dropout=0.0, depth=2, **options):
    layer = nn.TransformerEncoderLayer(E, H, 32, dropout=dropout, batch_first=True)
    return gtorch.convert(nn.TransformerEncoder(layer, depth), mixer, **options)


def graph_of(num_targets, num_sources):
    return ga.causal_window_graph(num_sources, 3)


def assert_same(a, b, tolerance=1e-10):
    torch.testing.assert_close(a, b, atol=tolerance, rtol=0)


def by_hand(old, x, sigma, seen, bias, top_k):
    """Attention by distance, one target and one head after the other."""
    D = E // H
    q, k, v = (
        t.unflatten(-1, (H, D))
        for t in nn.functional.linear(x, old.in_proj_weight, old.in_proj_bias).chunk(3, -1)
    )
    out, weights = torch.zeros(B, N, H, D).double(), torch.zeros(B, H, N, N).double()
    for b in range(B):
        for h in range(H):
            for i in range(N):
                logits = -(q[b, i, h] - k[b, :, h]).square().sum(-1) / (2 * sigma[h] ** 2)
                logits = (logits + bias[b, i]).masked_fill(~seen[b, i], -torch.inf)
                kept = logits.topk(min(top_k, int(seen[b, i].sum()))).indices
                w = torch.zeros(N).double()
                w[kept] = logits[kept].softmax(0)
                weights[b, h, i] = w
                out[b, i, h] = w @ v[b, :, h]
    return old.out_proj(out.flatten(-2)), weights


@pytest.mark.parametrize("mixer", ["rbf", "krause"])
def test_distances_by_hand(mixer):
    old = attention()
    new = gtorch.convert(copy.deepcopy(old), mixer=mixer, top_k=3, window=4, sigma=1.3)
    sigma = torch.full((H,), 1.3, dtype=torch.float64)
    if mixer == "krause":
        sigma = torch.linspace(0.5, 3, H).double()
        new.log_sigma.data = sigma.log()
    x, bias = torch.randn(B, N, E).double(), torch.randn(N, N).double()
    place = torch.arange(N)
    near = (place[:, None] - place).abs() <= 4
    seen = near & ~CAUSAL & ~PAD[:, None]
    mask = bias.masked_fill(CAUSAL, -torch.inf)
    actual = new(x, x, x, attn_mask=mask, key_padding_mask=PAD, average_attn_weights=False)
    expected = by_hand(old, x, sigma, seen, bias.expand(B, -1, -1), top_k=3)
    assert_same(actual[0], expected[0])
    assert_same(actual[1], expected[1])


def test_the_default_bandwidth_differs_from_dot_products_by_lengths_alone():
    old = attention()
    new = gtorch.convert(copy.deepcopy(old), mixer="rbf")
    x = torch.randn(B, N, E).double()
    q, k, _ = nn.functional.linear(x, old.in_proj_weight, old.in_proj_bias).chunk(3, -1)
    q, k = (t.unflatten(-1, (H, E // H)).transpose(1, 2) for t in (q, k))
    D = E // H
    logits = q @ k.mT / D**0.5 - k.square().sum(-1)[:, :, None] / (2 * D**0.5)
    expected = logits.softmax(-1)  # what depends on the target alone cancels
    assert_same(new(x, x, x, average_attn_weights=False)[1], expected)
    krause = gtorch.convert(copy.deepcopy(old), mixer="krause")
    assert_same(krause(x, x, x)[0], new(x, x, x)[0])


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("mixer", ["gka", "vlt", "consensus"])
def test_layers_are_those_of_the_library(mixer, batch_first):
    old = attention()
    old.batch_first = batch_first
    new = gtorch.convert(copy.deepcopy(old), mixer=mixer, window=3)
    x = torch.randn(B, N, E).double()
    given = x if batch_first else x.transpose(0, 1)
    actual, _ = new(given, given, given, attn_mask=CAUSAL, key_padding_mask=PAD, need_weights=False)
    actual = actual if batch_first else actual.transpose(0, 1)
    W, b = old.in_proj_weight.chunk(3), old.in_proj_bias.chunk(3)
    if mixer == "gka":
        layer = ga.nn.GaussianKernelAttention(E, H)
        parts = {}
    elif mixer == "vlt":
        layer = ga.nn.DotProductAttention(E, H, value_projection=False)
        parts = {"query_proj": 0, "key_proj": 1}
    else:
        layer = ga.nn.SelfConsensus(E, H, step_size="auto", update="target")
        layer.edge_net.load_state_dict(new.layer.edge_net.state_dict())
        parts = {"source_proj": 2}
    layer = layer.double()
    for name, part in parts.items():
        getattr(layer, name).load_state_dict({"weight": W[part], "bias": b[part]})
    layer.output_proj.load_state_dict(old.out_proj.state_dict())
    graph = ga.causal_window_graph(N, 4)
    expected = layer(x, graph, valid=~PAD)
    assert_same(actual[~PAD], expected[~PAD])


@pytest.mark.parametrize("mixer", ["gka", "vlt"])
def test_layers_give_their_weights_and_take_biases(mixer):
    new = gtorch.convert(attention(), mixer=mixer)
    x = torch.randn(B, N, E).double()
    bias = torch.randn(B * H, N, N).double()
    bias[H:, 2, 5] = -torch.inf  # of one sample alone
    out, weights = new(x, x, x, attn_mask=bias, average_attn_weights=False)
    assert_same(weights.sum(-1), torch.ones(B, H, N).double())
    values = x.unflatten(-1, (H, E // H)).transpose(1, 2)
    mixed = (weights @ values).transpose(1, 2).flatten(-2)
    assert_same(out, new.layer.output_proj(mixed))
    assert not weights[1, :, 2, 5].any()
    plain = new(x, x, x, average_attn_weights=False)[1]
    logits = plain.log() + bias.view(B, H, N, N)
    assert_same(weights, logits.softmax(-1))


def test_what_a_mixer_cannot_serve_is_refused_when_it_is_called():
    x = torch.randn(B, N, E).double()
    consensus = gtorch.convert(attention(), mixer="consensus")
    gka = gtorch.convert(attention(), mixer="gka")
    with pytest.raises(ValueError, match=r"need_weights must be False .*got need_weights=True"):
        consensus(x, x, x)
    with pytest.raises(ValueError, match="no logits"):
        consensus(x, x, x, attn_mask=torch.randn(N, N).double(), need_weights=False)
    with pytest.raises(ValueError, match="must be the same tensor"):
        gka(x, x + 1, x)
    masks = torch.stack([CAUSAL.roll(i, 0) for i in range(B * H)])
    with pytest.raises(ValueError, match="the same for all heads"):
        gka(x, x, x, attn_mask=masks)
    with pytest.raises(ValueError, match="already converted to mixer='gka'"):
        gtorch.convert(gka)


def test_parameters_that_stay_are_the_same_tensors():
    for mixer in MIXERS:
        old = attention()
        new = gtorch.convert(old, mixer=mixer)
        kept = {id(p) for p in old.parameters()} & {id(p) for p in new.parameters()}
        assert len(kept) == (4 if mixer in ("dot", "rbf", "krause") else 2)
    frozen = attention().requires_grad_(False)
    assert not gtorch.convert(frozen, mixer="vlt").layer.query_proj.weight.requires_grad


def test_converted_again_it_keeps_its_weights():
    krause = gtorch.convert(attention(), mixer="krause", window=2)
    krause.log_sigma.data += 0.3
    again = gtorch.convert(krause, mixer="krause", window=4)
    assert again.log_sigma is krause.log_sigma
    old = attention()
    back = gtorch.convert(gtorch.convert(copy.deepcopy(old), mixer="rbf", top_k=2))
    x = torch.randn(B, N, E).double()
    assert_same(back(x, x, x)[0], old(x, x, x)[0])


def test_hooks_and_buffers_of_the_mode_stay():
    old = attention().eval()
    seen = []
    old.register_forward_hook(lambda module, args, out: seen.append(module))
    new = gtorch.convert(old, window=2)
    x = torch.randn(B, N, E).double()
    new(x, x, x)
    assert seen == [new]
    assert not any(m.training for m in gtorch.convert(attention().eval(), mixer="gka").modules())


# What people do with models.


@pytest.mark.parametrize("mixer", MIXERS)
def test_state_dicts_copies_and_pickles(mixer):
    first, twin = (model(mixer, graph=graph_of) for _ in range(2))
    x = torch.randn(B, N, E)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    twin.load_state_dict(torch.load(file, weights_only=True))
    y = first(x, src_key_padding_mask=PAD)
    for same in (twin, copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert torch.equal(same(x, src_key_padding_mask=PAD), y)
    keys = {
        "dot": {"in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"},
        "gka": {"layer.log_sigma", "layer.output_proj.weight", "layer.output_proj.bias"},
    }
    keys["rbf"] = keys["dot"]
    keys["krause"] = keys["dot"] | {"log_sigma"}
    if mixer in keys:
        assert set(first.layers[0].self_attn.state_dict()) == keys[mixer]


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_half_precision(mixer, dtype):
    net = model(mixer, window=3, depth=1).eval()
    x = torch.randn(B, N, E)
    y = net(x, src_key_padding_mask=PAD)
    with torch.autocast("cpu", dtype=dtype):
        cast = net(x, src_key_padding_mask=PAD)
    half = copy.deepcopy(net).to(dtype)(x.to(dtype), src_key_padding_mask=PAD)
    eps = torch.finfo(dtype).eps
    assert half.dtype == dtype
    assert (cast.float() - y)[~PAD].abs().max() < 16 * eps
    assert (half.float() - y)[~PAD].abs().max() < 16 * eps


@pytest.mark.parametrize("mixer", MIXERS)
def test_inputs_that_are_not_contiguous(mixer):
    net = gtorch.convert(attention(), mixer=mixer, window=3)
    x = torch.randn(N, B, 2 * E).double()[..., ::2].transpose(0, 1)
    mask = torch.zeros(N, 2 * N).bool()[:, ::2]
    y, _ = net(x, x, x, need_weights=False)
    z = x.contiguous()
    assert_same(y, net(z, z, z, attn_mask=mask, need_weights=False)[0])


def test_dropout_drops_weights_and_keeps_the_mean():
    old = attention(dropout=0.5)
    new = gtorch.convert(old, window=3)
    x = torch.randn(1, N, E).double()
    many = x.expand(1000, N, E)  # every sample draws for itself
    drawn = new(many, many, many, need_weights=False)[0]
    assert not torch.equal(drawn[0], drawn[1])
    new.eval()
    y = new(x, x, x)[0]
    assert torch.equal(new(x, x, x)[0], y)
    assert ((drawn.mean(0) - y[0]).abs() < 6 * drawn.std(0) / 1000**0.5).all()


@pytest.mark.long
@pytest.mark.parametrize(("mixer", "window"), [("dot", None), ("krause", 3), ("consensus", 3)])
def test_compiled_at_three_lengths(mixer, window):
    torch._dynamo.reset()
    net = model(mixer, depth=1, window=window)
    run = torch.compile(net, fullgraph=True)
    for n in (9, 12, 17):
        x = torch.randn(B, n, E)
        assert_same(run(x), net(x), 1e-5)
        run(x).sum().backward()


@pytest.mark.long
@pytest.mark.parametrize("mixer", ["krause", "gka"])
def test_compiled_with_masks(mixer):
    torch._dynamo.reset()
    net = gtorch.convert(attention().float(), mixer, window=3)
    x, n = torch.randn(B, N, E), N

    def call(net, **masks):
        return net(x, x, x, need_weights=False, **masks)[0]

    whole = torch.compile(call, fullgraph=True)
    assert_same(whole(net, key_padding_mask=PAD), call(net, key_padding_mask=PAD), 1e-5)
    hinted = {"attn_mask": CAUSAL, "is_causal": True}
    assert_same(whole(net, **hinted), call(net, **hinted), 1e-5)
    torch._dynamo.reset()
    broken = torch.compile(call)
    mask = CAUSAL.roll(1, 0)
    padding = torch.zeros(B, n).masked_fill(PAD, -torch.inf)
    both = {"attn_mask": mask, "key_padding_mask": padding}
    assert_same(broken(net, **both), call(net, **both), 1e-5)


@pytest.mark.long
def test_exported():
    net = model("krause", window=3, top_k=2, depth=1).eval()
    x = torch.randn(B, N, E)
    program = torch.export.export(net, (x,))
    assert_same(program.module()(x), net(x), 1e-5)


@pytest.mark.parametrize("mixer", ["dot", "krause"])
def test_inference_mode_before_training(mixer):
    """A mask that was read in inference mode, and remembered, can be trained with."""
    net = gtorch.convert(attention().float(), mixer, window=3)
    x, mask = torch.randn(B, N, E), CAUSAL.roll(1, 0)
    with torch.inference_mode():
        y = net(x, x, x, attn_mask=mask)[0].clone()
    again = net(x, x, x, attn_mask=mask)[0]
    again.sum().backward()
    assert torch.equal(again, y)


def test_empty_batches():
    x = torch.randn(0, N, E).double()
    for mixer in ("dot", "rbf"):
        out, weights = gtorch.convert(attention(), mixer=mixer, window=2)(x, x, x)
        assert out.shape == (0, N, E)
        assert weights.shape == (0, N, N)


@pytest.mark.parametrize("targets", ["self_attn", "out_proj"])
@pytest.mark.parametrize("first", ["convert", "peft"])
def test_lora_around_and_inside(targets, first):
    peft = pytest.importorskip("peft")
    layer = nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=True)
    plain = nn.TransformerEncoder(layer, 2).double()
    config = peft.LoraConfig(target_modules=[targets], init_lora_weights=False)
    if first == "convert" and targets == "self_attn":
        with pytest.raises(ValueError, match="not supported"):  # no layer that peft knows
            peft.get_peft_model(gtorch.convert(plain), config)
        return
    net = gtorch.convert(copy.deepcopy(plain)) if first == "convert" else copy.deepcopy(plain)
    net = peft.get_peft_model(net, config).double()
    if first == "peft" and targets == "self_attn":
        with pytest.raises(ValueError, match="inside an adapter"):
            gtorch.convert(net, mixer="gka")
    if first == "peft":
        net = gtorch.convert(net)
    x = torch.randn(B, N, E).double()
    result = net(x)
    result.square().sum().backward()
    trained = [p for name, p in net.named_parameters() if "lora" in name]
    assert trained
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in trained)
    assert_same(result, net.merge_and_unload()(x))
    assert not torch.allclose(result, plain(x), atol=1e-3)

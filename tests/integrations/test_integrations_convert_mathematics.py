"""Converted layers compute what their papers say, in every family, against dense attention."""

import math

import pytest
import torch
import transformers
from convertible import (
    GROUPABLE,
    NAMES,
    attention_of,
    dense,
    inputs_of,
    logits,
    make_identity,
    model_of,
)

from graphattn.integrations import transformers as gat
from graphattn.integrations.transformers.conversion.families import FAMILIES
from graphattn.integrations.transformers.conversion.modules import attention_modules

D = 8  # features per head


def with_attention(model, **options):
    """The model with dense attention of the test's own, on the masks of "eager"."""

    def attend(module, query, key, value, mask, **kwargs):
        return dense(module, query, key, value, mask, **{**kwargs, **options})

    transformers.AttentionInterface.register("of_the_test", attend)
    transformers.AttentionMaskInterface.register(
        "of_the_test", transformers.masking_utils.eager_mask
    )
    model.config._attn_implementation = "of_the_test"  # a setter that some classes refuse
    return model


def assert_same_model(mine, theirs, inputs):
    a, b = logits(mine, inputs), logits(theirs, inputs)
    assert (a - b).norm() <= 1e-5 * b.norm()


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("name", NAMES)
def test_gka_is_the_model_whose_projections_are_the_identity(name, padding):
    """Attention by distance among the features that the model turns by position, which it averages.

    Sigma starts at the root of the number of features per head (GKA paper, Eq. 3-5, 11).
    """
    theirs = model_of(name)
    make_identity(theirs, queries_and_keys=True)
    mine = model_of(name)
    gat.convert(mine, mixer="gka")
    inputs = inputs_of(name, padding=padding)
    assert_same_model(mine, with_attention(theirs, sigma=D**0.5, of_keys=True), inputs)


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("name", NAMES)
def test_vlt_is_the_model_whose_value_projection_is_the_identity(name, padding):
    theirs = model_of(name)
    make_identity(theirs, queries_and_keys=False)
    mine = model_of(name)
    gat.convert(mine, mixer="vlt")
    assert_same_model(mine, theirs, inputs_of(name, padding=padding))


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("name", NAMES)
def test_krause_is_the_model_with_its_own_weights_by_distance(name, padding):
    """Sigma starts where logits differ from the model's own by squared lengths alone."""
    grouped = {"num_key_value_heads": 2} if name in GROUPABLE else {}
    theirs, mine = model_of(name, **grouped), model_of(name, **grouped)
    gat.convert(mine, mixer="krause")
    module = attention_modules(theirs)[0][1]
    scaling = getattr(module, "scaling", D**-0.5)
    sigma = (D**-0.5 if scaling == 1.0 else scaling) ** -0.5
    assert_same_model(mine, with_attention(theirs, sigma=sigma), inputs_of(name, padding=padding))


@pytest.mark.every_case
def test_every_family_of_the_table_is_tried_here_or_shares_its_forward():
    tried = {attention_of(name).__name__ for name in NAMES}
    copies = {  # of BERT's module, by transformers' own "copied from"
        "XLMRobertaSelfAttention",
        "CamembertSelfAttention",
    }
    versions = {"ViTAttention", "ViTSelfAttention", "DeiTAttention", "DeiTSelfAttention"}
    versions |= {"EsmcAttention", "Olmo2Attention"}
    assert set(FAMILIES) - copies - versions == tried - versions


def loop(query, key, value, sigma, sees, top_k=None):
    """Krause attention, one target and head at a time, in float64: [N, H, D] each."""
    out = torch.zeros_like(value)
    for i in range(query.shape[0]):
        for h in range(query.shape[1]):
            sources = [j for j in range(key.shape[0]) if sees(i, j)]
            near = [-float((query[i, h] - key[j, h]).square().sum()) for j in sources]
            kept = sorted(range(len(sources)), key=lambda s: (-near[s], s))[:top_k]
            top = max(near[s] for s in kept)
            weights = [math.exp((near[s] - top) / (2 * sigma[h] ** 2)) for s in kept]
            for s, weight in zip(kept, weights, strict=True):
                out[i, h] += weight / sum(weights) * value[sources[s], h]
    return out


@pytest.mark.parametrize("top_k", [None, 3])
def test_krause_in_a_window_keeps_the_nearest(top_k):
    model = model_of("GPT2").double()
    before = attention_modules(model)[0][1]
    gat.convert(model, mixer="krause", window=5, top_k=top_k, layers=[0], init_sigma=1.7)
    after = attention_modules(model)[0][1]
    with torch.no_grad():
        after.bandwidth.log_sigma += torch.tensor([-0.5, 0.0, 0.3, 0.8]).double()
        x = torch.randn(1, 12, 32, dtype=torch.float64)
        q, k, v = (t[0].unflatten(-1, (4, 8)) for t in before.c_attn(x).split(32, dim=-1))
        sigma = after.bandwidth.log_sigma.exp().tolist()
        expected = loop(q, k, v, sigma, lambda i, j: i - 5 < j <= i, top_k)
        mine, weights = after(x)
        torch.testing.assert_close(mine, before.c_proj(expected.flatten(-2))[None])
    assert weights is None


def test_gka_options_are_those_of_the_paper():
    """Eq. 3-5 with eps, and the root-mean-square norm of the language-model variant."""
    model = model_of("Bert").double()
    gat.convert(model, mixer="gka", window=2, normalize=True, eps=0.3, init_sigma=1.1)
    layer = attention_modules(model)[1][1]
    x = torch.randn(1, 9, 32, dtype=torch.float64)
    heads = x[0].unflatten(-1, (4, 8))
    heads = heads / heads.square().mean(-1, keepdim=True).sqrt()
    expected = torch.zeros_like(heads)
    for i in range(9):
        for h in range(4):
            near = range(max(0, i - 2), min(9, i + 3))
            affinity = {
                j: math.exp(-float((heads[i, h] - heads[j, h]).square().sum()) / (2 * 1.1**2))
                for j in near
            }
            total = 0.3 + sum(affinity.values())
            expected[i, h] = sum(a / total * heads[j, h] for j, a in affinity.items())
    torch.testing.assert_close(layer(x)[0], expected.flatten(-2)[None], rtol=1e-6, atol=1e-8)


def consensus_by_hand(layer, x, edges, energy, step, u=None):
    """Algorithms 1 and 2 (energy) or 3 (target) edge by edge, matrices formed, in float64."""
    net, N = layer.edge_net, x.shape[0]
    u = layer.source_proj(x).unflatten(-1, (4, 8)) if u is None else u
    y = x.unflatten(-1, (4, 8))
    gradient = torch.zeros_like(u)
    degree = torch.zeros(N, 4, dtype=x.dtype)
    for i, j in edges:
        for h in range(4):
            hidden = net.target.weight[h] @ y[i, h] + net.target.bias[h]
            hidden = torch.nn.functional.gelu(hidden + net.source.weight[h] @ y[j, h])
            alpha = torch.nn.functional.softplus(net.alpha[h] @ hidden + net.alpha_bias[h])
            beta = torch.nn.functional.softplus(net.beta[h] @ hidden + net.beta_bias[h])
            shear = net.shear[h] @ hidden + net.shear_bias[h]
            shear = shear / shear.norm(dim=-1, keepdim=True) / shear.shape[0] ** 0.5
            R = alpha * torch.eye(8, dtype=x.dtype) + beta * shear.T @ shear
            pull = R @ (u[i, h] - u[j, h])
            gradient[i, h] += pull
            if not energy or i != j:
                degree[i, h] += alpha + beta
            if energy:
                gradient[j, h] -= pull
                degree[j, h] += (alpha + beta) * (i != j)
    if step == "auto":
        eta = 1 / (2 * degree.amax(0, keepdim=True)) if energy else 1 / degree
    else:
        eta = torch.full_like(degree, step)
    return u - eta[..., None] * gradient


@pytest.mark.parametrize("step", ["auto", 0.07])
@pytest.mark.parametrize("update", ["energy", "target"])
def test_consensus_is_the_step_of_the_paper(update, step):
    model = model_of("Bert").double()
    gat.convert(model, mixer="consensus", edge_hidden=6, rank=2, update=update, step_size=step)
    layer = attention_modules(model)[0][1]
    with torch.no_grad():
        x = torch.randn(7, 32, dtype=torch.float64)
        edges = [(i, j) for i in range(7) for j in range(7) if abs(i - j) <= 2]
        expected = consensus_by_hand(layer, x, edges, update == "energy", step)
        torch.testing.assert_close(layer(x[None])[0], expected.flatten(-2)[None])


def test_consensus_without_a_step_is_values_of_the_token_itself():
    """A new consensus layer with a step near 0 equals the model's value and output projections."""
    for name, grouped in (("Llama", {"num_key_value_heads": 2}), ("GPTNeoX", {}), ("GPT2", {})):
        theirs, mine = model_of(name, **grouped), model_of(name, **grouped)
        gat.convert(mine, mixer="consensus", step_size=1e-30, edge_hidden=4)

        def own_values(module, query, key, value, mask, **_):
            value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
            return value.transpose(1, 2).contiguous(), None

        transformers.AttentionInterface.register("own_values", own_values)
        theirs.set_attn_implementation("own_values")
        assert_same_model(mine, theirs, inputs_of(name, padding=None))


def turn(x, angle, back=False):
    """Rotary positions, half-split: x [N, H, 8], angle [N, 4]."""
    cos, sin = angle.cos()[:, None], (-angle if back else angle).sin()[:, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def test_consensus_steps_in_the_frame_of_the_models_positions_and_back():
    """u - eta P' g, with g from rotated states: the repaired form of Eq. 42."""
    model = model_of("Llama").double()
    gat.convert(model, mixer="consensus", edge_hidden=4, window=3, step_size=0.1, layers=[0])
    layer = attention_modules(model)[0][1]
    x = torch.randn(6, 32, dtype=torch.float64)
    angle = torch.arange(6)[:, None] * 10000.0 ** (-torch.arange(4).double() / 4)
    cos, sin = (torch.cat([t, t], dim=-1)[None] for t in (angle.cos(), angle.sin()))
    edges = [(i, j) for i in range(6) for j in range(i + 1) if j > i - 3]
    with torch.no_grad():
        u = turn(layer.source_proj(x).unflatten(-1, (4, 8)), angle)
        moved = turn(consensus_by_hand(layer, x, edges, False, 0.1, u), angle, back=True)
        expected = layer.o_proj(moved.flatten(-2))[None]
        for scale in (1.0, 1.3):  # YaRN scales cosines and sines: the way back undoes that too
            torch.testing.assert_close(layer(x[None], (cos * scale, sin * scale))[0], expected)


def test_rotation_is_the_models_own_and_can_be_left_out():
    """Unrotated "gka" does not know the order of what it sees: two earlier tokens may swap."""
    x = torch.randn(1, 5, 32)
    swapped = x[:, [1, 0, 2, 3, 4]]
    for rope, same in ((False, True), (None, False), (True, False)):
        model = model_of("Llama")
        gat.convert(model, mixer="gka", rope=rope)
        layer = attention_modules(model)[0][1]
        positions = model.model.rotary_emb(x, torch.arange(5)[None])
        a, b = (layer(t, positions)[0][:, -1] for t in (x, swapped))
        assert torch.allclose(a, b, atol=1e-6) == same


@pytest.mark.parametrize("name", ["Mistral", "Gemma3"])
def test_the_models_own_window_stays(name):
    """Token 2 changes tokens 2 to 7, which see it in their window of 6, and no bit of any other."""
    model = model_of(name)
    gat.convert(model, mixer="gka", layers=[0])
    layer = attention_modules(model)[0][1]
    inputs = inputs_of(name, length=20, padding=None)
    results = []
    layer.register_forward_hook(lambda module, args, output: results.append(output[0]))
    for token in (7, 9):
        inputs["input_ids"][:, 2] = token
        logits(model, inputs)
    same = (results[0] == results[1]).all(-1).all(0)
    assert same[[0, 1, *range(8, 20)]].all()
    assert not same[2:8].any()

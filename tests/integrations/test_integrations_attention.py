"""The attention function beside attention written out pair by pair, whatever mask it is given."""

import itertools
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional

import graphattn as ga

pytest.importorskip("transformers")

from graphattn.integrations.transformers.attention import graph_attention
from graphattn.integrations.transformers.masks import graphs as edges
from graphattn.integrations.transformers.masks import once
from graphattn.integrations.transformers.options import checked_options

B, H, HK, D, DV = 2, 4, 2, 8, 6


class Layer(nn.Module):
    def __init__(self, causal=False, mixer="dot", window=None, top_k=None, sigma=None, graph=None):
        super().__init__()
        self.is_causal = causal
        self.graphattn_options = checked_options(mixer, window, top_k, sigma, graph)


def inputs(Q=7, K=9, dtype=torch.float64, grad=False, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = (B, H, Q, D), (B, HK, K, D), (B, HK, K, DV)
    return tuple(
        torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_(grad)
        for s in shapes
    )


def random_mask(Q, K, heads=1, share=0.6, seed=1):
    mask = torch.rand(B, heads, Q, K, generator=torch.Generator().manual_seed(seed)) < share
    if Q > 1:
        mask[:, :, 1] = False  # a row that sees nothing
    return mask


def plain(q, k, v, allowed, *, score="dot", scale=D**-0.5, bias=0, top_k=None, softcap=None,
          sink=None):  # fmt: skip
    """Pair by pair."""
    k, v = (x.repeat_interleave(H // HK, 1) for x in (k, v))
    if score == "dot":
        logits = scale * torch.einsum("bhqd,bhkd->bhqk", q, k)
    else:
        logits = -scale / 2 * (q[:, :, :, None] - k[:, :, None]).square().sum(-1)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits + bias
    allowed = allowed.expand(logits.shape)
    logits = logits.masked_fill(~allowed, -torch.inf)
    if top_k is not None and top_k < k.shape[2]:
        smallest = logits.topk(top_k, -1).values[..., -1:]
        allowed = allowed & (logits >= smallest)
    e = logits.exp().masked_fill(~allowed, 0)
    total = e.sum(-1, keepdim=True) + (0 if sink is None else sink.exp()[:, None, None])
    weights = torch.where(total > 0, e / total, 0)
    return torch.einsum("bhqk,bhkd->bqhd", weights, v), weights


def given(mask, kind):
    """Return a mask as it is, or as floats: 0 where True, else the least number of float64."""
    if kind == "float":
        return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(
            ~mask, torch.finfo(torch.float64).min
        )
    return mask


MIXERS = {
    "dot": ({}, {}),
    "top_k": ({"top_k": 3}, {"top_k": 3}),
    "rbf": ({"mixer": "rbf", "sigma": 2.0}, {"score": "rbf", "scale": 0.25}),
    "krause": ({"mixer": "krause", "top_k": 3}, {"score": "rbf", "top_k": 3}),
}


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("share", [0.6, 0.02])
@pytest.mark.parametrize("Q", [7, 1])
def test_dense_masks_are_what_they_say(mixer, kind, share, Q):
    options, kwargs = MIXERS[mixer]
    q, k, v = inputs(Q, 9)
    for heads in (1, H):
        mask = random_mask(Q, 9, heads, share)
        out, weights = graph_attention(
            Layer(**options), q, k, v, given(mask, kind), output_attentions=True
        )
        expected, dense = plain(q, k, v, mask, **kwargs)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(weights, dense)
        torch.testing.assert_close(
            graph_attention(Layer(**options), q, k, v, given(mask, kind))[0], expected
        )


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("Q", [7, 1])
@pytest.mark.parametrize("has_mask", [True, False])
def test_biases_sinks_and_caps(mixer, Q, has_mask):
    options, kwargs = MIXERS[mixer]
    q, k, v = inputs(Q, 9)
    sink, bias = torch.randn(H, dtype=q.dtype), torch.randn(1, H, Q, 9, dtype=q.dtype)
    mask = random_mask(Q, 9) if has_mask else None
    allowed = torch.ones(1, 1, Q, 9, dtype=torch.bool) if mask is None else mask
    softcap = 1.5 if kwargs.get("score", "dot") == "dot" else None
    out, weights = graph_attention(
        Layer(**options), q, k, v, mask, s_aux=sink, position_bias=bias, softcap=softcap,
        output_attentions=True,
    )  # fmt: skip
    expected, dense = plain(q, k, v, allowed, sink=sink, bias=bias, softcap=softcap, **kwargs)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(weights, dense)
    again = graph_attention(
        Layer(**options), q, k, v, mask, s_aux=sink, position_bias=bias, softcap=softcap
    )[0]
    torch.testing.assert_close(again, expected)


def test_biases_of_a_float_mask_are_added():
    q, k, v = inputs()
    mask = random_mask(7, 9)
    distance = (torch.arange(7)[:, None] - torch.arange(9)).abs().double()
    slopes = -torch.tensor([0.5, 0.25, 0.1, 0.05], dtype=torch.float64)
    alibi = (slopes[:, None, None] * distance)[None].expand(B, -1, -1, -1)
    shared = (-0.3 * distance)[None, None].expand(B, -1, -1, -1)
    for bias in (alibi, shared):
        floats = bias.masked_fill(~mask, -torch.inf)
        for options, kwargs in MIXERS.values():
            out = graph_attention(Layer(**options), q, k, v, floats)[0]
            torch.testing.assert_close(out, plain(q, k, v, mask, bias=bias, **kwargs)[0])


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("Q", [4, 1])
def test_gradients_are_those_of_attention(mixer, Q):
    q, k, v = inputs(Q, 5, grad=True)
    mask = random_mask(Q, 5)
    sink = torch.randn(H, dtype=q.dtype, requires_grad=True)
    bias = torch.randn(1, H, Q, 5, dtype=q.dtype, requires_grad=True)
    layer = Layer(**MIXERS[mixer][0])

    def attend(q, k, v, sink, bias):
        return graph_attention(layer, q, k, v, mask, s_aux=sink, position_bias=bias)[0]

    assert torch.autograd.gradcheck(attend, (q, k, v, sink, bias), fast_mode=True)
    assert torch.autograd.gradcheck(
        lambda *x: graph_attention(layer, *x, mask)[0], (q, k, v), fast_mode=True
    )


PATHS = {
    "dense": lambda mask: mask,
    "sparse": lambda mask: mask & (torch.arange(mask.shape[-1]) == 2),
    "by head": lambda mask: mask.expand(-1, H, -1, -1),
    "float": lambda mask: given(mask, "float"),
}


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("Q", [7, 1])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_hidden_changes_no_bit(mixer, path, Q, bad):
    layer = Layer(**MIXERS[mixer][0])
    mask = random_mask(Q, 9)
    mask[..., 5] = False  # hidden from all
    mask[:, :, 2 % Q, 4] = False  # and another from one row, where there are several
    mask = PATHS[path](mask)
    for grad, result in itertools.product([False, True], [mask]):
        q, k, v = inputs(Q, 9)
        rows = []
        for value in (0.5, bad):
            tensors = [x.clone() for x in (q, k, v)]
            tensors[1][:, :, 5], tensors[2][:, :, 5] = value, value
            if Q > 1:
                tensors[0][:, :, 1] = value  # a query that sees nothing
                tensors[1][:, :, 4], tensors[2][:, :, 4] = value, value
            tensors = [x.requires_grad_(grad) for x in tensors]
            out = graph_attention(layer, *tensors, result)[0]
            row = 2 % Q
            grads = []
            if grad:
                grads = torch.autograd.grad(out[:, row].sum(), tensors, allow_unused=True)
                grads = [g[:, :, [i for i in range(g.shape[2]) if i != 4]] for g in grads]
            rows.append([out[:, row].detach(), *grads])
            if Q > 1:
                assert not out[:, 1].any()
        for one, other in zip(*rows, strict=True):
            assert torch.equal(one, other)
            assert one.isfinite().all()


def test_what_is_seen_is_not_hidden():
    q, k, v = inputs()
    for name, (options, _) in MIXERS.items():
        if "top_k" not in options:
            v[:, :, 3] = torch.nan
            mask = random_mask(7, 9)
            out = graph_attention(Layer(**options), q, k, v, mask)[0]
            assert torch.equal(out.isnan().any(-1)[..., 0], mask[:, 0, :, 3]), name


def test_sizes_that_are_empty():
    for Q, K, batch in itertools.product([0, 1, 3], [1, 4], [0, 2]):
        q, k, v = (x[:batch] for x in inputs(Q, K))
        for options, _ in MIXERS.values():
            out, _ = graph_attention(Layer(**options), q, k, v, None)
            assert out.shape == (batch, Q, H, DV)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_full(dtype):
    q, k, v = inputs(dtype=dtype)
    mask = random_mask(7, 9)
    for options, kwargs in MIXERS.values():
        if "top_k" in options:
            continue
        out = graph_attention(Layer(**options), q, k, v, mask)[0]
        assert out.dtype == dtype
        expected, _ = plain(*(x.double() for x in (q, k, v)), mask, **kwargs)
        torch.testing.assert_close(out, expected.to(dtype), atol=1e-2, rtol=1e-2)
        mixed = graph_attention(Layer(**options), q.float(), k, v, mask)[0]
        assert mixed.dtype == torch.float32


def test_tensors_need_not_be_contiguous():
    q, k, v = inputs()
    mask = random_mask(7, 9)
    strided = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    turned = mask.transpose(2, 3).contiguous().transpose(2, 3)
    out = graph_attention(Layer(), *strided, turned)[0]
    torch.testing.assert_close(out, plain(q, k, v, mask)[0])


@pytest.mark.parametrize("mixer", MIXERS)
def test_dropout_follows_the_seed_and_keeps_the_mean(mixer):
    q, k, v = (x.detach() for x in inputs(3, 5))
    mask = random_mask(3, 5, share=1.0)
    layer, kwargs = Layer(**MIXERS[mixer][0]), MIXERS[mixer][1]

    def drop(seed):
        torch.manual_seed(seed)
        return graph_attention(layer, q, k, v, mask, dropout=0.4)[0]

    assert torch.equal(drop(0), drop(0))
    assert not torch.equal(drop(0), drop(1))
    mean = torch.stack([drop(seed) for seed in range(150)]).mean(0)
    torch.testing.assert_close(mean, plain(q, k, v, mask, **kwargs)[0], atol=0.4, rtol=0)


def test_a_window_and_a_cache_read_the_newest_keys():
    q, k, v = inputs(1, 40)
    out, weights = graph_attention(
        Layer(causal=True, window=4), q, k, v, None, output_attentions=True
    )
    seen = torch.arange(40) >= 36
    torch.testing.assert_close(out, plain(q, k, v, seen)[0])
    assert weights.shape == (B, H, 1, 40)
    assert not weights[..., :36].any()
    k[:, :, :36], v[:, :, :36] = torch.nan, torch.nan
    assert graph_attention(Layer(causal=True, window=4), q, k, v, None)[0].isfinite().all()


@pytest.mark.parametrize("Q", [9, 2, 1])
def test_a_configured_graph_beside_a_cache(Q):
    q, k, v = inputs(Q, 9)
    whole = ga.window_path_graph(9, 2, self_loops=True)
    layer = Layer(graph=lambda targets, sources: whole)
    allowed = whole.to_mask()[-Q:]
    torch.testing.assert_close(graph_attention(layer, q, k, v, None)[0], plain(q, k, v, allowed)[0])
    mask = random_mask(Q, 9)
    for options, kwargs in MIXERS.values():
        layer = Layer(**options, graph=lambda targets, sources: whole)
        out = graph_attention(layer, q, k, v, mask)[0]
        torch.testing.assert_close(out, plain(q, k, v, mask & allowed, **kwargs)[0])


def test_a_new_function_is_a_new_graph():
    q, k, v = inputs(9, 9)
    mask = random_mask(9, 9)
    for window in (1, 2, 3):
        layer = Layer(graph=lambda t, s, w=window: ga.window_path_graph(s, w, self_loops=True))
        allowed = ga.window_path_graph(9, window, self_loops=True).to_mask()
        torch.testing.assert_close(
            graph_attention(layer, q, k, v, mask)[0], plain(q, k, v, mask & allowed)[0]
        )


def test_masks_of_other_kinds_are_refused():
    with pytest.raises(ValueError, match=r"attention_mask must be bool .* got torch.int64"):
        graph_attention(Layer(), *inputs(), torch.ones(B, 1, 7, 9, dtype=torch.long))
    with pytest.raises(ValueError, match="attention_mask must have the shape"):
        graph_attention(Layer(), *inputs(), torch.ones(3, 1, 7, 9, dtype=torch.bool))
    with pytest.raises(ValueError, match="attention_mask must have 1 or 4 heads"):
        graph_attention(Layer(), *inputs(), torch.ones(B, 3, 7, 9, dtype=torch.bool))


# What is kept of a mask.


@pytest.fixture
def counted(monkeypatch):
    calls = []
    made = edges._seen_in_mask
    monkeypatch.setattr(edges, "_seen_in_mask", lambda *a, **k: calls.append(1) or made(*a, **k))
    return calls


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("inference", [False, True])
def test_edges_are_found_once_for_all_layers(counted, kind, inference):
    q, k, v = inputs()
    with torch.inference_mode(inference):
        mask = given(random_mask(7, 9), kind)
        for _ in range(5):
            graph_attention(Layer(top_k=2), q, k, v, mask)
            graph_attention(Layer(top_k=2), q, k, v, mask.detach())
    assert len(counted) == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_finds_the_same_edges(counted, reentrant):
    q, k, v = inputs(grad=True)
    mask = random_mask(7, 9)
    layer = Layer(top_k=2)
    for _ in range(2):
        out = torch.utils.checkpoint.checkpoint(
            lambda *x: graph_attention(layer, *x)[0], q, k, v, mask, use_reentrant=reentrant
        )
        out.sum().backward()
    assert len(counted) == 1


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"window": 3}])
def test_a_mask_that_is_written_to_is_another_mask(inference, options):
    q, k, v = inputs()
    with torch.inference_mode(inference):
        mask = random_mask(7, 9)
        graph_attention(Layer(**options), q, k, v, mask)
        mask[:, :, 2] = True
        result = graph_attention(Layer(**options), q, k, v, mask)[0]
        assert torch.equal(result, graph_attention(Layer(**options), q, k, v, mask.clone())[0])


def test_nothing_is_kept_of_a_mask_that_is_gone():
    q, k, v = inputs()
    for options in ({}, {"top_k": 2}, {"window": 3}):
        for kind in ("bool", "float"):
            mask = given(random_mask(7, 9), kind)
            graph_attention(Layer(**options), q, k, v, mask)
            graph_attention(Layer(**options), q[:, :, :1], k, v, mask[:, :, :1])
            assert once._kept.entries
            gone = weakref.ref(mask)
            del mask
            assert gone() is None
            assert not once._kept.entries


def test_two_models_take_turns(counted):
    q, k, v = inputs()
    one, other = random_mask(7, 9, seed=1), random_mask(7, 9, seed=2)
    for _ in range(3):
        for mask in (one, other):
            out = graph_attention(Layer(top_k=3), q, k, v, mask)[0]
            torch.testing.assert_close(out, plain(q, k, v, mask, top_k=3)[0])
    assert len(counted) == 2


def test_threads_do_not_share_what_they_keep():
    q, k, v = inputs()
    wrong = []

    def work(seed):
        for step in range(20):
            mask = random_mask(7, 9, seed=seed * 100 + step)
            out = graph_attention(Layer(top_k=3), q, k, v, mask)[0]
            if not torch.allclose(out, plain(q, k, v, mask, top_k=3)[0]):
                wrong.append(seed)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    [w.start() for w in workers]
    [w.join() for w in workers]
    assert not wrong


# Around it.


@pytest.mark.long
@pytest.mark.parametrize(
    "mixer", ["dot", *(pytest.param(name, marks=pytest.mark.long) for name in ("top_k", "krause"))]
)
def test_compiled_without_a_graph_break(mixer):
    torch._dynamo.reset()
    layer = Layer(**MIXERS[mixer][0])
    compiled = torch.compile(
        lambda *x: graph_attention(layer, *x)[0], fullgraph=True, backend="aot_eager"
    )
    for Q in (5, 7, 1):
        q, k, v = inputs(Q, 9, grad=True)
        mask = random_mask(Q, 9)
        out = compiled(q, k, v, mask)
        expected = plain(q, k, v, mask, **MIXERS[mixer][1])[0]
        torch.testing.assert_close(out, expected)
        out.sum().backward()
        torch.testing.assert_close(q.grad, torch.autograd.grad(
            plain(q, k, v, mask, **MIXERS[mixer][1])[0].sum(), q)[0])  # fmt: skip


def test_functorch_and_fake_tensors_follow():
    q, k, v = inputs()
    mask = random_mask(7, 9)

    def total(q):
        return graph_attention(Layer(), q, k, v, mask)[0].sum()

    torch.testing.assert_close(
        torch.func.grad(total)(q), torch.func.grad(lambda q: plain(q, k, v, mask)[0].sum())(q)
    )
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        fake = (torch.empty(x.shape) for x in (q, k, v))
        assert graph_attention(Layer(), *fake, None)[0].shape == (B, 7, H, DV)


def test_dot_products_are_torchs_own():
    q, k, v = inputs(7, 7, dtype=torch.float32)
    causal = graph_attention(Layer(causal=True), q, k, v, None)[0]
    expected = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(causal, expected.transpose(1, 2))

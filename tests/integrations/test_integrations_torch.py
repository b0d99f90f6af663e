"""Converted modules of PyTorch give what the modules they replace give."""

import copy
import itertools
import warnings

import pytest
import torch
from torch import nn

import graphattn as ga
from graphattn.integrations import torch as gtorch

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*nested tensors", "ignore:Support for mismatched", "ignore:enable_nested_tensor"
)

B, L, S, E, H = 2, 7, 5, 16, 4


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def pair(**options):
    """An `nn.MultiheadAttention` in float64 with biases that are not zero, and its conversion."""
    old = nn.MultiheadAttention(E, H, **options).double()
    for name, parameter in old.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter)
    return old, gtorch.convert(copy.deepcopy(old))


def encoder(depth=2, **options):
    options = {"dropout": 0.0, "batch_first": True} | options
    layer = nn.TransformerEncoderLayer(E, H, 32, **options)
    nested = options["batch_first"] and not options.get("norm_first")
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=nested).double()


def assert_same(a, b, tolerance=1e-10):
    torch.testing.assert_close(a, b, atol=tolerance, rtol=0)


def outputs_and_gradients(module, inputs, **call):
    inputs = [x.clone().requires_grad_() for x in inputs]
    module.zero_grad()
    out = module(*inputs, **call)
    out = out[0] if isinstance(out, tuple) else out
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    gradients = {name: p.grad for name, p in module.named_parameters()}
    return out, [x.grad for x in inputs], gradients


PAD = torch.arange(S) >= torch.tensor([[5], [3]])  # True is padding
SOME = torch.tensor([[(i * 3 + j) % 4 == 0 for j in range(S)] for i in range(L)])
MASKS = {
    "nothing": {},
    "padding": {"key_padding_mask": PAD},
    "float padding": {"key_padding_mask": torch.linspace(-1, 1, B * S).view(B, S).double()},
    "mask": {"attn_mask": SOME},
    "float mask": {"attn_mask": torch.linspace(-1, 1, L * S).view(L, S).double()},
    "both": {"attn_mask": SOME, "key_padding_mask": PAD},
    "float mask with holes": {
        "attn_mask": torch.randn(L, S).double().masked_fill(SOME, -torch.inf),
        "key_padding_mask": torch.zeros(B, S).double().masked_fill(PAD, -torch.inf),
    },
    "per sample": {"attn_mask": torch.stack([SOME] * H + [SOME.flip(0)] * H)},
    "per head": {"attn_mask": torch.stack([SOME.roll(k, 0) for k in range(B * H)])},
    "per head, floats": {
        "attn_mask": torch.randn(B * H, L, S)
        .double()
        .masked_fill(torch.stack([SOME.roll(k, 0) for k in range(B * H)]), -torch.inf),
        "key_padding_mask": torch.linspace(-1, 1, B * S).view(B, S).double(),
    },
    "per head, one support": {"attn_mask": torch.randn(B * H, L, S).double()},
}


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("batch_first", [True, False])
def test_dot_is_the_module_that_was_replaced(masks, batch_first):
    call = MASKS[masks]
    old, new = pair(batch_first=batch_first)
    shape = (lambda n: (B, n, E)) if batch_first else (lambda n: (n, B, E))
    inputs = [torch.randn(shape(n)).double() for n in (L, S, S)]
    a, b = (outputs_and_gradients(m, inputs, **call) for m in (old, new))
    for x, y in zip((a[0], *a[1]), (b[0], *b[1]), strict=True):
        assert_same(x, y)
    assert a[2].keys() == b[2].keys()
    for name in a[2]:
        assert_same(a[2][name], b[2][name])
    for average in (True, False):
        expected = old(*inputs, **call, average_attn_weights=average)[1]
        assert_same(new(*inputs, **call, average_attn_weights=average)[1], expected)
    assert new(*inputs, **call, need_weights=False)[1] is None


@pytest.mark.parametrize("options", [{"bias": False}, {"kdim": 6, "vdim": 10}, {"vdim": 3}])
def test_other_projections(options):
    old, new = pair(batch_first=True, **options)
    inputs = torch.randn(B, L, E), torch.randn(B, S, old.kdim), torch.randn(B, S, old.vdim)
    inputs = [x.double() for x in inputs]
    assert_same(new(*inputs)[0], old(*inputs)[0])
    assert list(new.state_dict()) == list(old.state_dict())
    new.load_state_dict(old.state_dict())


def test_unbatched_inputs():
    old, new = pair()
    q, k = torch.randn(L, E).double(), torch.randn(S, E).double()
    for call in ({}, {"key_padding_mask": PAD[1]}, {"attn_mask": torch.randn(H, L, S).double()}):
        for x, y in zip(new(q, k, k, **call), old(q, k, k, **call), strict=True):
            assert_same(x, y)


def test_gradients_reach_a_mask_that_is_learned():
    old, new = pair(batch_first=True)
    x = torch.randn(B, L, E).double()
    masks = [torch.zeros(L, L).double().requires_grad_() for _ in range(2)]
    for module, mask in zip((old, new), masks, strict=True):
        module(x, x, x, attn_mask=mask)[0].square().sum().backward()
    assert masks[0].grad.abs().max() > 1e-3
    assert_same(masks[0].grad, masks[1].grad)


@pytest.mark.parametrize("norm_first", [True, False])
def test_encoders_in_training_and_evaluation(norm_first):
    old = encoder(norm_first=norm_first)
    new = gtorch.convert(copy.deepcopy(old))
    x = torch.randn(B, L, E).double()
    pad = torch.arange(L) >= torch.tensor([[L], [4]])
    causal = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
    for train, grad, mask, padded in itertools.product((True, False), repeat=4):
        old.train(train), new.train(train)
        call = {"mask": causal} if mask else {}
        if padded:
            call["src_key_padding_mask"] = pad
        with torch.set_grad_enabled(grad):
            real = ~pad if padded else torch.ones_like(pad)  # the fused path zeroes the others
            assert_same(new(x, **call)[real], old(x, **call)[real])


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_whole_transformer_with_cross_attention(batch_first):
    old = nn.Transformer(E, H, 1, 1, 32, dropout=0.0, batch_first=batch_first).double().eval()
    new = gtorch.convert(copy.deepcopy(old))
    assert len(gtorch.converted(new)) == 3
    src, tgt = torch.randn(B, S, E).double(), torch.randn(B, L, E).double()
    if not batch_first:
        src, tgt = src.transpose(0, 1), tgt.transpose(0, 1)
    causal = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
    call = {"tgt_mask": causal, "tgt_is_causal": True}
    call |= {"src_key_padding_mask": PAD, "memory_key_padding_mask": PAD}
    a = outputs_and_gradients(old, [src, tgt], **call)
    b = outputs_and_gradients(new, [src, tgt], **call)
    assert_same(a[0], b[0])
    for x, y in zip(a[1], b[1], strict=True):
        assert_same(x, y)
    for name in a[2]:
        assert_same(a[2][name], b[2][name])
    with torch.no_grad():
        assert_same(new(src, tgt, **call), a[0].detach())


# The fused paths of evaluation.


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("layers", [None, 0, 1])
def test_no_fused_path_goes_round_a_converted_module(monkeypatch, padded, layers):
    model = gtorch.convert(encoder(), window=1, layers=layers).eval()
    x = torch.randn(B, L, E).double()
    call = {"src_key_padding_mask": torch.arange(L) >= torch.tensor([[L], [4]])} if padded else {}
    calls = []
    for name in gtorch.converted(model):
        attention = model.get_submodule(name)
        inner = attention.mix
        attention.mix = lambda *given, inner=inner: (calls.append(1), inner(*given))[1]
    fused, native = [], torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(
        torch, "_transformer_encoder_layer_fwd", lambda *a: (fused.append(1), native(*a))[1]
    )
    with torch.no_grad():
        model(x, **call)
    assert len(calls) == len(gtorch.converted(model))
    assert len(fused) == 2 - len(calls)  # layers that were not converted may go that way
    with torch.no_grad():
        nn.TransformerEncoder(model.layers[layers or 0], 2, enable_nested_tensor=False)(x, **call)


def test_nested_tensors_of_an_encoder_around_are_refused():
    model = encoder().eval()
    gtorch.convert(model.layers[0])
    pad = torch.arange(L) >= torch.tensor([[L], [4]])
    with torch.no_grad(), pytest.raises(ValueError, match="use_nested_tensor = False"):
        model(torch.randn(B, L, E).double(), src_key_padding_mask=pad)


def test_a_new_encoder_of_a_converted_layer_has_no_nested_tensors():
    layer = gtorch.convert(encoder().layers[0], window=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.TransformerEncoder(layer, 2).eval()
    assert not model.use_nested_tensor


# Graphs and windows.


def masked_by(graph, masks=None):
    """Return a graph as a mask of `nn.MultiheadAttention`, True where hidden; `masks` hide more."""
    hidden = ~graph.to_mask()
    return hidden if masks is None else hidden | masks


def banded(n, m):
    return ga.from_mask((torch.arange(n)[:, None] - torch.arange(m)).abs() <= 2)


@pytest.mark.parametrize("causal", [True, False])
def test_a_window_is_a_mask(causal):
    old, new = pair(batch_first=True)
    new = gtorch.convert(new, window=2)
    x = torch.randn(B, L, E).double()
    hidden = torch.triu(torch.ones(L, L), 1).bool() if causal else None
    graph = ga.window_path_graph(L, 2, self_loops=True)
    expected = old(x, x, x, attn_mask=masked_by(graph, hidden))
    for hint in (True, False) if causal else (False,):
        actual = new(x, x, x, attn_mask=hidden, is_causal=hint)
        assert_same(actual[0], expected[0])
        assert_same(actual[1], expected[1])


@pytest.mark.parametrize("masks", ["nothing", "padding", "both", "per sample", "per head, floats"])
@pytest.mark.parametrize("of", ["function", "graph"])
def test_a_graph_is_intersected_with_the_masks(masks, of):
    graph = banded(L, S)
    old, new = pair(batch_first=True)
    new = gtorch.convert(new, graph=graph if of == "graph" else banded)
    q, k = torch.randn(B, L, E).double(), torch.randn(B, S, E).double()
    call = dict(MASKS[masks])
    hidden, mask = ~graph.to_mask(), call.get("attn_mask")
    if mask is None:
        mask = hidden
    elif mask.dtype == torch.bool:
        mask = mask | hidden
    else:
        mask = mask.masked_fill(hidden, -torch.inf)
    actual = new(q, k, k, **call)
    call["attn_mask"] = mask
    expected = old(q, k, k, **call)
    rows = ~expected[0].isnan()  # a target that sees nothing is NaN in PyTorch
    assert rows.any()
    assert_same(actual[0][rows], expected[0][rows])
    assert actual[0].isfinite().all()


def test_masks_that_are_windows_list_no_edges():
    from graphattn.integrations.torch.masks import Places, seen_in_mask

    n = 50
    causal = torch.ones(n, n).tril().bool()
    [seen] = seen_in_mask(Places(), causal[None, None])
    assert seen.graph == ga.causal_graph(n)
    assert seen.graph.structure is not None
    [seen] = seen_in_mask(Places(window=3), causal[None, None])
    assert seen.graph == ga.causal_window_graph(n, 4)
    assert seen.graph.structure is not None
    assert seen_in_mask(Places(window=3), causal[None, None])[0].graph is seen.graph  # once


def test_a_mask_that_changed_is_read_again():
    old, new = pair(batch_first=True)
    x = torch.randn(1, L, E).double()
    mask = torch.zeros(L, L).bool()
    for row in range(3):
        mask.data[row, row + 1] = True  # which autograd's counter does not see
        assert_same(new(x, x, x, attn_mask=mask)[0], old(x, x, x, attn_mask=mask)[0])


def test_a_wrong_causal_hint_changes_nothing():
    _, new = pair(batch_first=True)
    x = torch.randn(B, L, E).double()
    mask = SOME.new_zeros(L, L)
    mask[:, 3] = True
    given = {"attn_mask": mask, "need_weights": False}
    assert torch.equal(new(x, x, x, **given, is_causal=True)[0], new(x, x, x, **given)[0])


def test_a_target_that_sees_nothing_gets_the_bias():
    _, new = pair(batch_first=True)
    x = torch.randn(1, L, E).double()
    hidden = torch.zeros(L, L).bool()
    hidden[2] = True
    out, weights = new(x, x, x, attn_mask=hidden)
    assert torch.equal(out[0, 2], new.out_proj.bias)
    assert not weights[0, 2].any()


# Nothing that is not seen matters.


@pytest.mark.parametrize("mixer", ["dot", "rbf", "krause", "gka", "vlt", "consensus"])
@pytest.mark.parametrize("what", ["padding", "future", "future per sample"])
def test_nan_that_is_not_seen_changes_no_bit(mixer, what):
    model = gtorch.convert(encoder(depth=1).float(), mixer=mixer, window=4)
    x = torch.randn(B, 20, E)
    broken = x.clone()
    broken[:, 12:] = torch.nan
    call = {"src_key_padding_mask": (torch.arange(20) >= 12).expand(B, -1)}
    if what == "future":
        call = {"mask": nn.Transformer.generate_square_subsequent_mask(20)}
    if what == "future per sample":
        mask = torch.triu(torch.ones(20, 20), 1).bool().repeat(B * H, 1, 1)
        mask[H:, 5, 2] = True
        call = {"mask": mask}
    for train in (True, False):
        model.train(train)
        with torch.no_grad():
            assert torch.equal(model(x, **call)[:, :12], model(broken, **call)[:, :12])


# Bad input.


def test_errors_name_what_is_wrong():
    _, new = pair(batch_first=True)
    x, other = torch.randn(B, L, E).double(), torch.randn(B, S, E).double()
    sized = gtorch.convert(new, graph=ga.causal_graph(9))
    with pytest.raises(ValueError, match=r"7 targets and 7 sources.*got 9 and 9"):
        sized(x, x, x)
    with pytest.raises(ValueError, match=r"graph\(7, 7\) must return a TokenGraph, got int"):
        gtorch.convert(new, graph=lambda n, m: 3)(x, x, x)
    with pytest.raises(ValueError, match="7 targets and 5 sources"):
        gtorch.convert(new, window=2)(x, other, other)
    for call, message in (
        ({"attn_mask": SOME}, r"attn_mask must have the shape \[7, 7\] or \[8, 7, 7\]"),
        ({"attn_mask": torch.zeros(L, L).long()}, "attn_mask must be bool"),
        ({"key_padding_mask": PAD}, r"key_padding_mask must have the shape \[2, 7\]"),
        ({"key_padding_mask": PAD.long()}, "key_padding_mask must be bool"),
        ({"is_causal": True}, "attn_mask=None"),
    ):
        with pytest.raises(ValueError, match=message):
            new(x, x, x, **call)
    with pytest.raises(ValueError, match=r"value must have the shape \[2, 7, 16\]"):
        new(x, x, other)
    with pytest.raises(ValueError, match="3 dimensions"):
        new(x, x[0], x[0])


class Own(nn.MultiheadAttention):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (lambda: nn.Linear(2, 2), {}, "must contain an nn.MultiheadAttention, got a Linear"),
        (lambda: nn.MultiheadAttention(E, H, add_bias_kv=True), {}, "add_bias_kv=False"),
        (lambda: nn.MultiheadAttention(E, H, add_zero_attn=True), {}, "add_zero_attn=False"),
        (lambda: Own(E, H), {}, "Own, whose own forward"),
        (lambda: nn.Transformer(E, H, 1, 1), {"window": 2}, r"cross-attention.*layer 2 \(decoder"),
        (lambda: nn.Transformer(E, H, 1, 1), {"mixer": "gka"}, "mixer='gka' must not be used in c"),
        (lambda: nn.MultiheadAttention(E, H, vdim=3), {"mixer": "vlt"}, "cross-attention"),
        (encoder, {"mixer": "linear"}, "mixer must be one of 'dot'"),
        (encoder, {"sigma": 1.0}, "sigma must be None for mixer='dot'"),
        (encoder, {"mixer": "rbf", "sigma": 0}, "sigma must be a finite number > 0"),
        (encoder, {"mixer": "gka", "top_k": 3}, "top_k must be None for mixer='gka'"),
        (encoder, {"top_k": 0}, "top_k must be >= 1"),
        (encoder, {"window": 2, "graph": ga.causal_graph(4)}, "window must be None if graph"),
        (encoder, {"graph": 3}, "graph must be a TokenGraph or a function"),
        (encoder, {"layers": [0, 2]}, r"layers must contain numbers of the 2.*got \[0, 2\]"),
        (encoder, {"layers": []}, "layers must contain numbers of the 2"),
        (encoder, {"layers": "0"}, "layers must be a number, a list or range of numbers"),
    ],
)
def test_what_cannot_be_converted_is_refused_and_nothing_changes(module, options, message):
    module = module()
    before = [type(child) for child in module.modules()]
    with pytest.raises(ValueError, match=message):
        gtorch.convert(module, **options)
    assert [type(child) for child in module.modules()] == before


def test_chosen_layers_and_shared_modules():
    model = nn.Transformer(E, H, 1, 2)
    assert gtorch.convert(model, mixer="consensus", layers=[0, 1, -2]) is model
    names = ["encoder.layers.0.self_attn", "decoder.layers.0.self_attn"]
    assert gtorch.converted(model) == [*names, "decoder.layers.1.self_attn"]
    shared = nn.MultiheadAttention(E, H)
    twice = nn.ModuleList([shared, nn.ModuleDict({"a": shared})])
    gtorch.convert(twice)
    assert twice[0] is twice[1]["a"]
    assert len(gtorch.converted(twice)) == 1


def test_converting_says_how_many(caplog):
    with caplog.at_level("INFO"):
        gtorch.convert(encoder(depth=3), layers=[0, 2])
    assert "converted 2 of 3 attention modules" in caplog.text


def test_hooks_with_keyword_arguments_are_called_as_before():
    layer, calls = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), []
    layer.self_attn.register_forward_hook(
        lambda module, args, kwargs, output: calls.append(sorted(kwargs)), with_kwargs=True
    )
    gtorch.convert(layer)(torch.randn(2, 5, 16))
    assert len(calls) == 1
    assert "need_weights" in calls[0]

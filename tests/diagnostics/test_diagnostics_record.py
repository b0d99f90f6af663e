"""Recording models that are not ours, against weights computed by hand."""

import threading
import warnings
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hidden_states import states_of
from torch import nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as imported
from torch.overrides import _get_current_function_mode_stack

import graphattn as ga
from graphattn import diagnostics

B, H, N, D = 2, 4, 7, 8


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


class Calls(nn.Module):
    """One call of SDPA with given arguments."""

    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, q, k=None):
        k = q if k is None else k
        return F.scaled_dot_product_attention(q, k, k, **self.options)


class SelfAttention(nn.Module):
    """A block of a vision transformer, as timm writes it."""

    def __init__(self, dim=H * D):
        super().__init__()
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v)
        return x + self.proj(out.transpose(1, 2).flatten(2))


def record_once(function, *args, model=None, **options):
    model = function if model is None else model
    with torch.no_grad(), diagnostics.record(model, **options) as recording:
        function(*args)
    return recording


MASK = torch.rand(N, N, generator=seeded(5)) < 0.6
MASK.fill_diagonal_(True)
CASES = {
    "plain": ({}, None),
    "causal": ({"is_causal": True}, torch.ones(N, N).tril().bool()),
    "bool mask": ({"attn_mask": MASK}, MASK),
    "float mask": (
        {"attn_mask": torch.randn(B, 1, N, N, generator=seeded(6)).double() * 2},
        None,
    ),
    "scale": ({"scale": 0.9}, None),
    "dropout": ({"dropout_p": 0.5}, None),
}


@pytest.mark.parametrize("case", CASES)
def test_weights_are_the_softmax_of_the_call(case):
    options, allowed = CASES[case]
    q, k = states_of(B, H, N, D), states_of(B, H, N, D, seed=2)
    logits = q @ k.mT * options.get("scale", D**-0.5)
    mask = options.get("attn_mask")
    if mask is not None and mask.dtype != torch.bool:
        logits = logits + mask
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    recording = record_once(Calls(**options), q, k)
    assert recording.names == ("Calls",)
    torch.testing.assert_close(recording[0].matrix, logits.softmax(-1))


def test_statistics_are_those_of_the_functions_on_edges(monkeypatch):
    q = states_of(B, H, N, D) * 2
    call = record_once(Calls(is_causal=True), q)[0]
    weights, graph = call.weights, call.graph
    expected = (
        diagnostics.sink_share(weights, graph),
        diagnostics.attention_entropy(weights, graph),
        diagnostics.head_diversity(weights, graph),
    )
    monkeypatch.setattr("graphattn.diagnostics.attention.operands.CHUNK", 2 * B * H * N)
    in_blocks = record_once(Calls(is_causal=True), q)[0]
    for recorded in (call, in_blocks):
        torch.testing.assert_close((recorded.sinks, recorded.entropy, recorded.diversity), expected)
    assert torch.equal(in_blocks.matrix, call.matrix)


def test_ranks_are_effective_ranks_of_the_outputs_of_real_tokens():
    q = states_of(B, H, N, D)
    real = torch.ones(B, N, dtype=torch.bool)
    real[0, :2] = False
    q[0, :, :2] = torch.nan  # padding must not be felt
    mask = real[:, None, None, :] & real[:, None, :, None]
    model = Calls(attn_mask=mask)
    call = record_once(model, q)[0]
    q = q.nan_to_num()
    out = F.scaled_dot_product_attention(q, q, q, attn_mask=mask).transpose(1, 2).flatten(2)
    for b in range(B):
        expected = diagnostics.effective_rank(out[b, real[b]])
        if b == 1:
            torch.testing.assert_close(call.effective_rank[b], expected)
        assert call.matrix[b][:, ~real[b]].sum() == 0
    share = call.matrix[0, :, 3:, 2].mean(-1)  # token 2 is the first real one
    torch.testing.assert_close(call.sinks[0], share)


def test_equal_outputs_have_rank_0():
    q = torch.ones(1, 2, 5, 4)
    assert record_once(Calls(), q)[0].effective_rank.tolist() == [0.0]


def test_rollout_is_that_of_the_edges():
    model = nn.Sequential(SelfAttention(), SelfAttention(), SelfAttention()).double()
    with torch.no_grad():
        model[0].qkv.weight.mul_(4)
    recording = record_once(model, states_of(B, N, H * D))
    assert recording.names == ("0", "1", "2")
    graph = ga.complete_graph(N)
    for options in ({}, {"residual": 0.2, "discard": 0.6}, {"residual": 0.0}):
        expected = diagnostics.rollout([call.weights for call in recording], graph, **options)
        torch.testing.assert_close(recording.rollout(**options), expected)
    with pytest.raises(ValueError, match="residual must be"):
        recording.rollout(residual=2)


# torch's own layers.


@contextmanager
def without_fast_path():
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


def multi_head(x, layer, mask=None):
    """Weights of a MultiheadAttention in a plain form."""
    q, k, _ = F.linear(x, layer.in_proj_weight, layer.in_proj_bias).chunk(3, dim=-1)
    q, k = (t.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2) for t in (q, k))
    logits = q @ k.mT * q.shape[-1] ** -0.5
    return (logits if mask is None else logits + mask).softmax(-1)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_multi_head_attention_is_recorded_on_every_path(need_weights, grad, training, masked):
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(H * D, H, dropout=0.3, batch_first=True).train(training)
    x = states_of(B, N, H * D).float()
    given, added = {}, None
    if masked:
        padding = torch.zeros(B, N, dtype=torch.bool)
        padding[0, -2:] = True
        given = {"key_padding_mask": padding, "attn_mask": torch.ones(N, N).triu(1).bool()}
        added = torch.zeros(B, 1, N, N).masked_fill(
            padding[:, None, None] | given["attn_mask"], -torch.inf
        )
    torch.manual_seed(1)
    with torch.set_grad_enabled(grad), without_fast_path():
        alone = layer(x, x, x, need_weights=need_weights, **given)
    torch.manual_seed(1)
    with torch.set_grad_enabled(grad), diagnostics.record(layer) as recording:
        watched = layer(x, x, x, need_weights=need_weights, **given)
    assert torch.equal(alone[0], watched[0])
    assert not need_weights or torch.equal(alone[1], watched[1])
    (call,) = recording
    expected = multi_head(x, layer, added)
    if masked:
        expected[0, :, -2:] = 0  # rows of padding
    torch.testing.assert_close(call.matrix, expected)


def test_sequences_first_extra_keys_and_separate_projections():
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(
        H * D, H, kdim=5, vdim=6, add_bias_kv=True, add_zero_attn=True
    ).double()
    x, k, v = states_of(N, B, H * D), states_of(4, B, 5), states_of(4, B, 6)
    nn.init.eye_(layer.out_proj.weight)  # The layer returns its averages.
    with diagnostics.record(layer) as recording:
        averages, weights = layer(x, k, v, average_attn_weights=False)
    torch.testing.assert_close(recording[0].matrix, weights)
    expected = diagnostics.effective_rank(averages.transpose(0, 1))
    torch.testing.assert_close(recording[0].effective_rank, expected)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_torchs_encoder_is_recorded_and_runs_without_its_fast_path(norm_first, nested, padded):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        H * D, H, 32, batch_first=True, norm_first=norm_first, activation="gelu"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()
    x = torch.randn(B, N, H * D)
    padding = torch.zeros(B, N, dtype=torch.bool)
    padding[0, -3:] = padded
    inputs = []
    model.layers[1].self_attn.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    given = {"src_key_padding_mask": padding} if padded else {}
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = model(x, **given)
        with diagnostics.record(model) as recording:
            watched = model(x, **given)
    torch.testing.assert_close(alone[~padding], watched[~padding])
    assert recording.names == ("layers.0.self_attn", "layers.1.self_attn")
    mask = torch.zeros(B, 1, 1, N).masked_fill(padding[:, None, None], -torch.inf)
    expected = multi_head(inputs[-1].clone(), model.layers[1].self_attn, mask).detach()
    expected[padding[:, None].expand(B, H, N)] = 0
    torch.testing.assert_close(recording[1].matrix, expected, rtol=1e-4, atol=1e-5)


def test_our_layers_are_recorded_with_their_graphs():
    model = ga.models.SequenceEncoder(11, 16, depth=2, heads=4)
    text = torch.randint(11, (3, 10), generator=seeded())
    recording = record_once(model, text)
    with diagnostics.record_attention(model) as records:
        model(text)
    assert recording.names == ("blocks.0.mixer", "blocks.1.mixer")
    for call, old in zip(recording, records, strict=True):
        assert call.graph == old.graph
        assert torch.equal(call.weights, old.weights)
    torch.testing.assert_close(
        recording.rollout(),
        diagnostics.rollout([r.weights for r in records], records[0].graph),
    )
    values, names = diagnostics.sinks_per_layer(model, text)
    torch.testing.assert_close(recording.sinks().values, values)
    assert "blocks.1.mixer" in str(recording)
    assert recording.sinks().names == names


# What recording leaves behind, and which calls it sees.


def test_no_hook_and_no_mode_stays_even_after_an_exception():
    def places():
        hooks = nn.modules.module
        modes = _get_current_function_mode_stack()
        return len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks), len(modes)

    before = places()
    model = SelfAttention()

    def fail():
        model(torch.randn(1, 3, H * D))
        assert all(map(int.__gt__, places(), before))
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"), diagnostics.record(model):
        fail()
    with pytest.raises(RuntimeError), diagnostics.record(model):
        model(torch.randn(1, 3, 5))  # a wrong width fails inside
    assert places() == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert len(record_once(model, torch.randn(1, 3, H * D))) == 1


def test_blocks_may_be_nested_and_each_sees_its_model():
    inner, x = SelfAttention(), torch.randn(1, 3, H * D)
    outer = nn.Sequential(inner, SelfAttention())
    with diagnostics.record(outer) as whole:
        with diagnostics.record(inner) as part:
            outer(x)
        inner(x)
    assert whole.names == ("0", "1", "0")
    assert part.names == ("SelfAttention",)


def test_only_the_thread_that_opened_the_block_is_recorded():
    model, x = SelfAttention(), torch.randn(1, 3, H * D)
    encoder = ga.models.SequenceEncoder(11, 16, depth=1, heads=4)
    both = nn.ModuleList([model, encoder])
    results = []

    def elsewhere():
        results.append((model(x), encoder(torch.arange(5))))

    with torch.no_grad():
        expected = model(x), encoder(torch.arange(5))
    with diagnostics.record(both) as recording:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        model(x)
    assert recording.names == ("0",)
    assert all(map(torch.equal, results[0], expected))


class Imported(nn.Module):
    def forward(self, q):
        return imported(q, q, q)


class HandWrittenAttention(nn.Module):
    def forward(self, q):
        return (q @ q.mT).softmax(-1) @ q


def test_functions_imported_by_name_are_seen_too():
    assert len(record_once(Imported(), states_of(1, 2, 3, 4))) == 1


@pytest.mark.parametrize("bias", [causal_upper_left, causal_lower_right])
def test_masks_of_torchs_causal_bias_are_read(bias):
    q, k = states_of(B, H, 3, D), states_of(B, H, 5, D)
    allowed = torch.ones(3, 5).tril(2 if bias is causal_lower_right else 0) > 0
    logits = (q @ k.mT * D**-0.5).masked_fill(~allowed, -torch.inf)
    call = record_once(Calls(attn_mask=bias(3, 5)), q, k)[0]
    torch.testing.assert_close(call.matrix, logits.softmax(-1))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(
    "transform", [torch.vmap, lambda model: torch.func.grad(lambda x: model(x).sum())]
)
def test_calls_inside_a_transform_of_torch_func_are_named(transform):
    model = Calls()
    with pytest.raises(ValueError, match="Calls: its tensors have no memory"):
        record_once(transform(model), states_of(B, H, N, D), model=model)


def test_attention_that_cannot_be_seen_is_named():
    model = nn.Sequential(Imported(), HandWrittenAttention())
    q = states_of(1, 2, 3, 4)
    with pytest.warns(UserWarning, match="could not record all attention of the model: 1: no call"):
        recording = record_once(model, q)
    assert recording.missed == {"1": "no call of attention was seen in it"}
    assert "not recorded" in str(recording)
    with pytest.raises(
        ValueError, match="the HandWrittenAttention made no known call of attention"
    ):
        record_once(HandWrittenAttention(), q)
    with pytest.raises(ValueError, match="the Linear made no known call of attention"):
        record_once(nn.Linear(4, 4), q.float())
    with pytest.raises(ValueError, match="was not called"), diagnostics.record(model):
        pass
    with pytest.raises(ValueError, match="meta"):
        record_once(Imported(), q.to("meta"))


def test_compiled_models_are_refused():
    model = SelfAttention()
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(ValueError, match="must not be compiled"), diagnostics.record(compiled):
        pass
    model.compile(backend="eager")
    with pytest.raises(ValueError, match="must not be compiled"), diagnostics.record(model):
        pass


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_compiled_function_is_run_as_it_is_written(fullgraph):
    model, x = SelfAttention(), torch.randn(1, 3, H * D)
    function = torch.compile(lambda x: 2 * model(x), backend="eager", fullgraph=fullgraph)
    expected = function(x)
    with diagnostics.record(model) as recording:
        assert torch.equal(function(x), expected)
    assert len(recording) == 1
    assert torch.equal(function(x), expected)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: record_once([1], 1), "model must be a torch.nn.Module"),
        (lambda: record_once(Calls(), states_of(1, 2, 3, 4), keep="all"), "keep must be one of"),
        (lambda: record_once(Calls(), states_of(1, 2, 3, 4), token=-1), "token must be"),
        (lambda: record_once(Calls(), states_of(1, 2, 3, 4), token=3), "one of the 3 real tokens"),
        (lambda: record_once(Calls(), states_of(1, 2, 3, 4)).select("q"), "text must be part"),
    ],
)
def test_bad_input_is_named(call, says):
    with pytest.raises(ValueError, match=says):
        call()

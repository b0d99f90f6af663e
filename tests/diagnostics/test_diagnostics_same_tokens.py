"""Padding that counts in a recorded call, and the outputs of the call, against plain formulas."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hidden_states import states_of
from torch import nn

from graphattn import diagnostics
from graphattn.diagnostics.attention import same_tokens

E, H, N = 16, 4, 6
PADDING = torch.tensor([[False, False, False, True, True, True]])


def multi_head(**options):
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64, **options)
    nn.init.normal_(layer.in_proj_bias)
    nn.init.normal_(layer.out_proj.weight)
    return layer


def averages(layer, q, k, v, padding=None):
    """Weights and their averages before the output projection."""
    parts = zip(layer.in_proj_weight.chunk(3), layer.in_proj_bias.chunk(3), strict=True)
    q, k, v = (
        (x @ w.T + b).unflatten(-1, (H, -1)).transpose(1, 2)
        for x, (w, b) in zip((q, k, v), parts, strict=True)
    )
    logits = q @ k.mT * (E // H) ** -0.5
    if padding is not None:
        logits = logits.masked_fill(padding[:, None, None], -torch.inf)
    weights = logits.softmax(-1)
    return weights, (weights @ v).transpose(1, 2).flatten(2)


def entropy_of(weights):
    return -torch.special.xlogy(weights, weights).sum(-1).mean(-1)


@pytest.mark.parametrize("need_weights", [True, False])
def test_queries_count_where_the_other_sequence_is_padded(need_weights):
    layer, q, k = multi_head().eval(), states_of(1, N, E), states_of(1, N, E, seed=2)
    with diagnostics.record(layer) as recording:
        layer(q, k, k, key_padding_mask=PADDING, need_weights=need_weights)
    weights, outputs = averages(layer, q, k, k, PADDING)
    call = recording[0]
    torch.testing.assert_close(call.matrix, weights)
    torch.testing.assert_close(call.entropy, entropy_of(weights))
    torch.testing.assert_close(call.sinks, weights[..., 0].mean(-1))  # no query is key 0 itself
    torch.testing.assert_close(call.effective_rank, diagnostics.effective_rank(outputs))


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("other_value", [True, False])
def test_one_tensor_as_queries_and_keys_is_self_attention(other_value, need_weights):
    layer, x = multi_head().eval(), states_of(1, N, E)
    value = states_of(1, N, E, seed=2) if other_value else x
    with diagnostics.record(layer) as recording:
        layer(x, x, value, key_padding_mask=PADDING, need_weights=need_weights)
    weights, outputs = averages(layer, x, x, value, PADDING)
    call, real = recording[0], weights[:, :, :3]
    assert call.same_tokens
    torch.testing.assert_close(call.matrix[:, :, :3], real)
    assert call.matrix[:, :, 3:].count_nonzero() == 0
    torch.testing.assert_close(call.entropy, entropy_of(real))
    torch.testing.assert_close(call.sinks, real[:, :, 1:, 0].mean(-1))
    torch.testing.assert_close(call.effective_rank, diagnostics.effective_rank(outputs[:, :3]))


def test_ranks_are_of_outputs_before_the_output_projection():
    layer, x = multi_head().eval(), states_of(2, 40, E)
    with torch.no_grad():
        layer.out_proj.weight.zero_()[0, 0] = 1.0  # one direction behind the projection
    with diagnostics.record(layer) as recording:
        layer(x, x, x)
        layer(x, x, x, need_weights=False)
    expected = diagnostics.effective_rank(averages(layer, x, x, x)[1])
    assert (expected > 2).all()
    for call in recording:
        torch.testing.assert_close(call.effective_rank, expected)


class Plain(nn.Module):
    def forward(self, q, k, mask=None, **options):
        return F.scaled_dot_product_attention(q, k, k, attn_mask=mask, **options)


class SelfAttention(Plain):
    """Told to be self-attention by its name alone."""


@pytest.mark.parametrize("kind", [Plain, SelfAttention])
def test_plain_calls_leave_out_rows_that_look_at_nothing_and_keys_only_where_they_are_tokens(kind):
    model, q, k = kind(), states_of(1, H, N, 4), states_of(1, H, N, 4, seed=2)
    mask = ~PADDING[:, None, None] & torch.ones(N, 1, dtype=torch.bool)
    mask[..., 1, :] = False
    with diagnostics.record(model) as recording:
        model(q, k, mask)
    rows = [0, 2] if kind is SelfAttention else [0, 2, 3, 4, 5]
    logits = (q @ k.mT / 2).masked_fill(PADDING[:, None, None], -torch.inf)[:, :, rows]
    weights, call = logits.softmax(-1), recording[0]
    torch.testing.assert_close(call.matrix[:, :, rows], weights)
    assert call.matrix.sum(-1).count_nonzero() == H * len(rows)
    torch.testing.assert_close(call.entropy, entropy_of(weights))
    outputs = (weights @ k).transpose(1, 2).flatten(2)
    torch.testing.assert_close(call.effective_rank, diagnostics.effective_rank(outputs))


def test_calls_named_cross_attention_have_no_rollout():
    model = nn.ModuleDict({"cross_attn": Plain()})
    q = states_of(1, H, N, 4)
    with diagnostics.record(model) as recording:
        model["cross_attn"](q, q + 1)
    assert recording[0].same_tokens is False
    with pytest.raises(ValueError, match="same tokens as queries and keys"):
        recording.rollout()


def test_names_mean_what_they_mean_to_the_plug_ins():
    modules = pytest.importorskip("graphattn.integrations.transformers.conversion.modules")
    assert same_tokens._CROSS == modules.CROSS


def test_attention_of_transformers_is_self_attention_unless_it_is_called_cross_attention():
    modeling = pytest.importorskip("transformers.models.gpt2.modeling_gpt2")
    config = modeling.GPT2Config(n_embd=E, n_head=H, n_layer=1, vocab_size=9)
    self_attention, cross = modeling.GPT2Attention(config), modeling.GPT2Attention(config, True)
    derived = type("Mine", (modeling.GPT2Attention,), {})(config)
    assert same_tokens.by_name("h.0.attn", self_attention) is True
    assert same_tokens.by_name("h.0.attn", derived) is True
    assert same_tokens.by_name("h.0.attn", cross) is False
    assert same_tokens.by_name("layers.0.encoder_attn.krause", self_attention) is False
    assert same_tokens.by_name("h.0.attn", nn.Linear(1, 1)) is None


def test_cross_attention_of_transformers_counts_every_query():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=20, d_model=E, encoder_layers=1, decoder_layers=1, encoder_attention_heads=H,
        decoder_attention_heads=H, encoder_ffn_dim=8, decoder_ffn_dim=8,
        max_position_embeddings=16, attn_implementation="sdpa",
    )  # fmt: skip
    model = transformers.BartModel(config).eval()
    source, target = torch.randint(3, 20, (1, N)), torch.randint(3, 20, (1, N))
    with torch.no_grad(), diagnostics.record(model) as recording:
        model(source, attention_mask=(~PADDING).long(), decoder_input_ids=target)
    within, crossing = "layers.0.self_attn", "layers.0.encoder_attn"
    calls = {call.name: (call.same_tokens, call.matrix) for call in recording}
    expected = {f"encoder.{within}": (True, 3), f"decoder.{within}": (True, N)}
    for name, (same, queries) in (expected | {f"decoder.{crossing}": (False, N)}).items():
        assert calls[name][0] is same
        sums = torch.tensor([1.0] * queries + [0.0] * (N - queries)).expand(1, H, N)
        torch.testing.assert_close(calls[name][1].sum(-1), sums)


# Inputs that torch takes and formulas must take too.


@pytest.mark.parametrize("cross", [True, False])
def test_weights_under_autocast_are_those_of_the_call(cross):
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(E, H, batch_first=True)
    q = torch.randn(2, N, E, dtype=torch.bfloat16)
    k = torch.randn(2, N, E, dtype=torch.bfloat16) if cross else q
    with torch.autocast("cpu", torch.bfloat16), diagnostics.record(layer) as recording:
        _, weights = layer(q, k, k, average_attn_weights=False)
    torch.testing.assert_close(recording[0].matrix, weights.float(), rtol=0.05, atol=0.02)
    exact = averages(layer.double(), q.double(), k.double(), k.double())[0]
    torch.testing.assert_close(recording[0].matrix.double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("queries", "keys", "gqa"),
    [
        ((2, 1, N, 4), (2, 2, N, 4), False),
        ((2, 3, N, 4), (2, 1, N, 4), False),
        ((1, 1, N, 4), (2, 3, 5, 4), False),
        ((3, 1, 2, N, 4), (1, 2, 1, N, 4), False),
        ((1, N, 4), (3, N, 4), False),
        ((N, 4), (N, 4), False),
        ((2, 4, N, 4), (2, 2, N, 4), True),
    ],
)
def test_queries_and_keys_of_any_rank_are_broadcast(queries, keys, gqa):
    q, k = states_of(*queries), states_of(*keys, seed=2)
    with diagnostics.record(model := Plain()) as recording:
        model(q, k, enable_gqa=gqa)
    logits = q @ (k.repeat_interleave(2, dim=1) if gqa else k).mT / 2
    matrix = recording[0].matrix
    torch.testing.assert_close(matrix, logits.softmax(-1).reshape(matrix.shape))
    assert matrix.shape[1] == (1 if q.dim() < 4 else max(q.shape[-3], k.shape[-3]))

"""Layers are good PyTorch citizens: they copy, pickle, load, reset, print and change dtype."""

import copy
import inspect
import io
import math
import pickle

import pytest
import torch
from nn_by_hand import CASES, DIM, HEAD_DIM, HEADS, ONE_OF_EACH, Case, graph_of, run, tokens_of
from torch.nn import functional

import graphattn as ga

BACKENDS = pytest.mark.parametrize("backend", ["auto", "reference"])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_deepcopy_computes_the_same_and_is_independent(case):
    layer, graph = case.make(), graph_of(case)
    tokens = tokens_of(case, graph)
    before = run(layer, tokens, graph)
    twin = copy.deepcopy(layer)
    assert torch.equal(run(twin, tokens, graph), before)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1)
    assert torch.equal(run(layer, tokens, graph), before)
    assert not torch.equal(run(twin, tokens, graph), before)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_layer_pickles_whole(case):
    layer, graph = case.make(), graph_of(case)
    tokens = tokens_of(case, graph)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    twin = torch.load(file, weights_only=False)
    assert torch.equal(run(twin, tokens, graph), run(layer, tokens, graph))
    assert repr(twin) == repr(layer)


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=str)
def test_a_pickled_layer_still_passes_messages(case):
    layer, graph = case.make(backend="reference"), graph_of(case)
    tokens = tokens_of(case, graph)
    twin = pickle.loads(pickle.dumps(layer))
    assert twin.uses_propagate()
    assert torch.equal(run(twin, tokens, graph), run(layer, tokens, graph))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_state_dict_carries_everything(case):
    layer, fresh, graph = case.make(seed=0), case.make(seed=1), graph_of(case)
    tokens = tokens_of(case, graph)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    assert not torch.equal(run(fresh, tokens, graph), run(layer, tokens, graph))
    missing, unexpected = fresh.load_state_dict(torch.load(file, weights_only=True))
    assert not missing
    assert not unexpected
    assert torch.equal(run(fresh, tokens, graph), run(layer, tokens, graph))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reset_parameters_draws_anew_and_returns_to_the_initial_scalars(case):
    layer = case.make()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(1e6)
    torch.manual_seed(0)
    layer.reset_parameters()
    first = {name: p.detach().clone() for name, p in layer.named_parameters()}
    layer.reset_parameters()
    sigma = case.options.get("init_sigma") or math.sqrt(HEAD_DIM)
    for name, parameter in layer.named_parameters():
        assert parameter.abs().max() < 5, name
        if name == "log_sigma":
            expected = torch.full_like(parameter, sigma)
            torch.testing.assert_close(parameter.exp(), expected, rtol=1e-6, atol=0)
        elif name == "raw_step_size":
            expected = torch.full_like(parameter, 0.1)
            torch.testing.assert_close(functional.softplus(parameter), expected)
        elif name == "sink":
            assert (parameter == 0).all()
        else:
            assert not torch.equal(parameter, first[name]), name


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reset_parameters_draws_at_the_scale_of_construction(case):
    layer = getattr(ga.nn, case.kind)(DIM, HEADS, **case.options)
    scale = {name: p.std().item() for name, p in layer.named_parameters() if p.numel() > 100}
    layer.reset_parameters()
    for name, parameter in layer.named_parameters():
        if name in scale:
            assert parameter.std().item() == pytest.approx(scale[name], rel=0.25), name


def test_sigma_starts_at_the_square_root_of_the_head_dimension_or_where_told():
    for kind in ("KrauseAttention", "GaussianKernelAttention"):
        default, given = (
            getattr(ga.nn, kind)(128, 2, init_sigma=sigma).log_sigma for sigma in (None, 2.5)
        )
        torch.testing.assert_close(default.exp(), torch.full((2,), 8.0))
        torch.testing.assert_close(given.exp(), torch.full((2,), 2.5))


@pytest.mark.parametrize("case", CASES, ids=str)
@BACKENDS
def test_gradients_reach_every_parameter(case, backend):
    layer, graph = case.make(), graph_of(case)
    with ga.use_backend(backend):
        run(layer, tokens_of(case, graph), graph).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        absorbed = case.kind == "DotProductAttention" and not case.options.get("rope")
        if not (absorbed and name == "key_proj.bias"):  # q_i . b is the same for all j
            assert parameter.grad.abs().max() > 1e-9, name


# What a layer prints.

FEW = [
    (Case("DotProductAttention"), "DotProductAttention(16, heads=4)"),
    (Case("KrauseAttention"), "KrauseAttention(16, heads=4)"),
    (Case("GaussianKernelAttention"), "GaussianKernelAttention(16, heads=4)"),
    (Case("SelfConsensus"), "SelfConsensus(16, heads=4)"),
    (Case("CrossConsensus"), "CrossConsensus(16, heads=4)"),
]


@pytest.mark.parametrize(("case", "text"), FEW, ids=lambda value: str(value))
def test_a_layer_with_default_options_prints_its_width_and_heads(case, text):
    assert repr(getattr(ga.nn, case.kind)(DIM, HEADS)) == text


NOT_DEFAULT = {
    "DotProductAttention": {
        "value_projection": False,
        "kv_heads": 2,
        "context_dim": 8,
        "rope": True,
        "qk_norm": True,
        "scaling": "sq_inplace",
        "top_k": 3,
        "bias": False,
        "backend": "reference",
        "attention_dropout": 0.25,
        "sink": True,
        "softcap": 5.5,
        "value_embeddings": 11,
    },
    "KrauseAttention": {
        "top_k": 3,
        "init_sigma": 2.5,
        "sigma_per_head": False,
        "kv_heads": 2,
        "rope": True,
        "bias": False,
        "backend": "reference",
        "attention_dropout": 0.25,
        "sink": True,
        "value_embeddings": 11,
    },
    "GaussianKernelAttention": {
        "init_sigma": 2.5,
        "rope": True,
        "normalize": True,
        "eps": 0.5,
        "top_k": 3,
        "bias": False,
        "backend": "reference",
        "attention_dropout": 0.25,
        "sink": True,
    },
    "SelfConsensus": {
        "rank": 2,
        "edge_hidden": 8,
        "step_size": "learned",
        "rope": "isometric",
        "edge_input": "full",
        "edge_networks": "shared",
        "trunk": "separate",
        "edge_features": 3,
        "iterations": 2,
        "learned_step": True,
        "share_alpha": True,
        "learned_beta": False,
        "update": "target",
        "bias": False,
        "backend": "reference",
    },
}
NOT_DEFAULT["CrossConsensus"] = {**NOT_DEFAULT["SelfConsensus"], "context_dim": 8}
del NOT_DEFAULT["CrossConsensus"]["update"]


@pytest.mark.parametrize("kind", NOT_DEFAULT)
def test_the_table_above_holds_every_option(kind):
    options = set(inspect.signature(getattr(ga.nn, kind)).parameters) - {"dim", "heads"}
    assert options - {"update"} == set(NOT_DEFAULT[kind]) - {"update"}


@pytest.mark.parametrize(
    ("kind", "option"),
    [(kind, option) for kind, options in NOT_DEFAULT.items() for option in options],
)
def test_repr_names_every_option_that_is_not_default(kind, option):
    value = NOT_DEFAULT[kind][option]
    needed = {"edge_input": "full"} if option in ("edge_networks", "share_alpha") else {}
    text = repr(getattr(ga.nn, kind)(DIM, HEADS, **{**needed, option: value}))
    assert f"{option}={value!r}" in text
    assert "\n" not in text
    assert text.startswith(f"{kind}(16, heads=4")


@pytest.mark.parametrize("kind", NOT_DEFAULT)
def test_repr_tells_one_rotary_base_from_another(kind):
    rotary = ga.nn.RotaryEmbedding(HEAD_DIM, base=500.0)
    layer = getattr(ga.nn, kind)(DIM, HEADS, rope=rotary)
    assert "500" in repr(layer)
    assert "\n" not in repr(layer)


def test_rotary_embedding_prints_one_line():
    assert repr(ga.nn.RotaryEmbedding(8)) == "RotaryEmbedding(8, base=10000)"


# Number formats.


@pytest.mark.parametrize("case", CASES, ids=str)
def test_double_is_the_float32_layer_with_more_digits(case):
    layer, graph = case.make(dtype=torch.float32), graph_of(case)
    tokens = tokens_of(case, graph, dtype=torch.float32)
    exact = run(copy.deepcopy(layer).double(), tuple(t.double() for t in tokens), graph)
    assert exact.dtype == torch.float64
    error = (run(layer, tokens, graph) - exact).norm() / exact.norm()
    assert error < 2e-6


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@BACKENDS
def test_half_precision_is_within_a_few_roundings_of_float64(case, dtype, backend):
    """Outputs are compared with those of float64 on the same rounded parameters and tokens.

    The operation itself works in float32.
    """
    if "top_k" in case.options:
        case = Case(case.kind, {})  # which edges are kept can turn on a rounding
    layer, graph = case.make().to(dtype), graph_of(case)
    tokens = tokens_of(case, graph, dtype=dtype)
    exact = run(copy.deepcopy(layer).double(), tuple(t.double() for t in tokens), graph)
    with ga.use_backend(backend):
        out = run(layer, tokens, graph)
    assert out.dtype == dtype
    assert (out - exact).norm() / exact.norm() < 3 * torch.finfo(dtype).eps


@pytest.mark.parametrize("case", CASES, ids=str)
@BACKENDS
def test_autocast_to_bfloat16_runs_forward_and_backward(case, backend):
    layer, graph = case.make(dtype=torch.float32), graph_of(case)
    tokens = tokens_of(case, graph, dtype=torch.float32)
    expected = run(layer, tokens, graph)
    with ga.use_backend(backend):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = run(layer, tokens, graph)
        out.float().square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.dtype == torch.float32
        assert parameter.grad.isfinite().all(), name
    if "top_k" not in case.options:
        assert (out.float() - expected).norm() / expected.norm() < 0.03


@pytest.mark.parametrize("case", [c for c in ONE_OF_EACH if not c.is_consensus], ids=str)
def test_autocast_gives_attention_weights_too(case):
    layer, graph = case.make(dtype=torch.float32), graph_of(case)
    tokens = tokens_of(case, graph, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, weights = run(layer, tokens, graph, return_attention_weights=True)
    assert weights.shape == (2, graph.num_edges, HEADS)
    assert weights.isfinite().all()


# Attention weights.

ATTENTION = [case for case in CASES if not case.is_consensus]


def row_sums(weights, graph):
    zeros = weights.new_zeros(*weights.shape[:-2], graph.num_targets, HEADS)
    return zeros.index_add(-2, graph.edge_index[1], weights)


@pytest.mark.parametrize("case", ATTENTION, ids=str)
@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
@BACKENDS
def test_attention_weights_sum_to_one_over_the_sources_of_a_target(case, batch, backend):
    layer, graph = case.make(), graph_of(case)
    tokens = tokens_of(case, graph, batch)
    with ga.use_backend(backend):
        out, weights = run(layer, tokens, graph, return_attention_weights=True)
        assert torch.equal(out, run(layer, tokens, graph))
    assert weights.shape == (*batch, graph.num_edges, HEADS)
    assert (weights >= 0).all()
    total = row_sums(weights, graph)
    has_edges = graph.in_degree() > 0
    assert (total[..., ~has_edges, :] == 0).all()
    if case.options.get("eps") or case.options.get("sink"):  # they take their share of every row
        assert (total[..., has_edges, :] < 1).all()
        assert (total[..., has_edges, :] > 0).all()
    else:
        torch.testing.assert_close(
            total[..., has_edges, :], torch.ones_like(total[..., has_edges, :])
        )
    top_k = case.options.get("top_k")
    if top_k is not None:
        kept = row_sums((weights > 0).double(), graph)
        expected = graph.in_degree().clamp(max=top_k)[:, None].expand(kept.shape)
        assert torch.equal(kept, expected.double())


@pytest.mark.parametrize("case", ATTENTION, ids=str)
def test_attention_weights_of_edges_that_touch_padding_are_zero(case):
    layer, graph = case.make(), graph_of(case)
    tokens = tokens_of(case, graph, (2,))
    masks = [torch.rand(2, t.shape[-2]) < 0.6 for t in tokens]
    given = masks[0] if len(masks) == 1 else tuple(masks)
    _, weights = run(layer, tokens, graph, valid=given, return_attention_weights=True)
    source, target = graph.edge_index
    touched = ~(masks[0][:, target] & masks[-1][:, source])
    assert (weights[touched] == 0).all()
    assert weights.isfinite().all()


@pytest.mark.parametrize("case", ATTENTION, ids=str)
def test_attention_weights_are_the_ones_the_output_is_made_with(case):
    """Random weights w on the edges: d(sum w a)/dx flows, and a rebuilds the output."""
    layer, graph = case.make(), graph_of(case)
    tokens = tokens_of(case, graph, ())
    out, weights = run(layer, tokens, graph, return_attention_weights=True)
    rotations = layer.rotations(tokens[0], tokens[-1], graph, None)
    _, _, value = layer.project(tokens[0], tokens[-1], rotations)
    value = value.repeat_interleave(HEADS // value.shape[-2], dim=-2)
    source, target = graph.edge_index
    mixed = torch.zeros(graph.num_targets, HEADS, HEAD_DIM, dtype=torch.float64)
    mixed = mixed.index_add(0, target, weights[..., None] * value[source])
    torch.testing.assert_close(layer.output_proj(mixed.flatten(-2)), out)


@pytest.mark.parametrize("kind", ["DotProductAttention", "KrauseAttention",
                                  "GaussianKernelAttention"])  # fmt: skip
@BACKENDS
def test_weights_over_raw_edges_in_another_order_are_refused_as_the_operation_refuses(
    kind, backend
):
    """Weights follow the sorted edges; without an error, callers would use their own order."""
    case = Case(kind)
    layer, graph = case.make(backend=backend), graph_of(case)
    tokens = tokens_of(case, graph)
    expected = run(layer, tokens, graph, return_attention_weights=True)[1]
    in_order = run(layer, tokens, graph.edge_index, return_attention_weights=True)[1]
    assert torch.equal(in_order, expected)
    with pytest.raises(ValueError, match="edge_index must be sorted"):
        run(layer, tokens, graph.edge_index.flip(1), return_attention_weights=True)

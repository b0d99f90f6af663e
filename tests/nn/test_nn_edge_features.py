"""Consensus layers with features of edges: the third input of the edge network's first layer."""

from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
from nn_by_hand import DIM, HEADS, Case, forward_by_hand, irregular_graph, run
from test_nn_checkpointing import WAYS
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import graphattn as ga

F = 3
TIGHT = {"rtol": 1e-9, "atol": 1e-10}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "target": {"update": "target"},
    "auto": {"step_size": "auto"},
    "auto, target": {"step_size": "auto", "update": "target"},
    "learned, full": {"step_size": "learned", "edge_input": "full"},
    "separate": {"trunk": "separate", "rope": True},
    "separate, full": {"trunk": "separate", "edge_input": "full", "rank": 1},
    "isometric": {"rope": "isometric", "step_size": "auto", "bias": False},
}
CASES = [("SelfConsensus", name) for name in OPTIONS] + [
    ("CrossConsensus", name) for name in OPTIONS if "target" not in name
]
EVERY = pytest.mark.parametrize(("kind", "option"), CASES)
FEW = pytest.mark.parametrize(
    ("kind", "option"),
    [("SelfConsensus", "plain"), ("SelfConsensus", "auto, target"), ("CrossConsensus", "separate")],
)
GRAPHS = {
    "irregular": irregular_graph,
    "window": lambda: ga.window_path_graph(9, 2, self_loops=True),
    "batch": lambda: ga.batch([ga.window_path_graph(n, 2) for n in (4, 1, 4)]),
    "longformer": lambda: ga.longformer_graph(9, 1, [0]),
    "no edges": lambda: ga.from_edge_index(torch.empty(2, 0, dtype=torch.long), 9),
}


def make(kind: str, option: str = "plain", dtype: torch.dtype = torch.float64, **more: Any) -> Any:
    """The layer, every parameter moved away from its initial value."""
    torch.manual_seed(0)
    options = {"edge_hidden": 6, "edge_features": F, **OPTIONS[option], **more}
    layer = getattr(ga.nn, kind)(DIM, HEADS, **options).to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer


def drawn(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def inputs(
    kind: str, graph: ga.TokenGraph, *batch: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, ...]:
    """(x,) or (x, context)."""
    x = drawn(*batch, graph.num_targets, DIM, dtype=dtype)
    if kind != "CrossConsensus":
        return (x,)
    return x, drawn(*batch, graph.num_sources, DIM, seed=2, dtype=dtype)


# Values.


@EVERY
@pytest.mark.parametrize("per_sequence", [False, True])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_layer_is_its_operation(kind: str, option: str, per_sequence: bool, backend: str) -> None:
    for name in GRAPHS:
        graph = irregular_graph(9, 6) if kind == "CrossConsensus" else GRAPHS[name]()
        layer, tokens = make(kind, option), inputs(kind, graph, 2)
        e = drawn(*([2] if per_sequence else []), graph.num_edges, F, seed=4)
        case = Case(kind, OPTIONS[option], DIM if kind == "CrossConsensus" else None)
        expected = forward_by_hand(case, layer.state_dict(), tokens, graph, edge_features=e)
        with ga.use_backend(backend):
            out = run(layer, tokens, graph, edge_features=e)
        torch.testing.assert_close(out, expected, **TIGHT)


def value_and_gradients(
    layer: Any, tokens: tuple[Tensor, ...], graph: Any, e: Tensor, **kw: Any
) -> Any:
    leaves = tuple(x.detach().clone().requires_grad_() for x in (*tokens, e))
    out = run(layer, leaves[:-1], graph, edge_features=leaves[-1], **kw)
    weight = drawn(*out.shape, seed=9).to(out.dtype)
    return out, *torch.autograd.grad((out * weight).sum(), [*leaves, *layer.parameters()])


@EVERY
@pytest.mark.parametrize("masked", [False, True], ids=["all valid", "padding"])
def test_message_and_operation_agree_in_value_and_every_gradient(
    kind: str, option: str, masked: bool
) -> None:
    layer = make(kind, option)
    for graph in (irregular_graph(9, 6 if kind == "CrossConsensus" else 9), GRAPHS["window"]()):
        tokens = inputs(kind, graph, 2)
        valid = None
        if masked:
            valid = torch.rand(2, graph.num_targets) < 0.7, torch.rand(graph.num_sources) < 0.7
        e = drawn(2, graph.num_edges, F, seed=4)
        mine = value_and_gradients(layer, tokens, graph, e, valid=valid)
        with ga.use_backend("reference"):
            theirs = value_and_gradients(layer, tokens, graph, e, valid=valid)
        torch.testing.assert_close(mine, theirs, **TIGHT)


def test_features_change_the_result_and_zero_features_change_nothing() -> None:
    graph = GRAPHS["window"]()
    layer, x = make("SelfConsensus"), drawn(9, DIM)
    e = drawn(graph.num_edges, F, seed=4)
    without = make("SelfConsensus", edge_features=0)
    without.load_state_dict(
        {name: x for name, x in layer.state_dict().items() if name != "edge_net.edge.weight"}
    )
    torch.testing.assert_close(layer(x, graph, edge_features=0 * e), without(x, graph), **TIGHT)
    assert not torch.allclose(layer(x, graph, edge_features=e), without(x, graph), atol=1e-3)


@FEW
def test_sequences_of_a_batch_have_each_their_own_features(kind: str, option: str) -> None:
    graph = irregular_graph()
    layer, tokens = make(kind, option), inputs(kind, graph, 2, 2)
    e = drawn(2, 2, graph.num_edges, F, seed=4)
    out = run(layer, tokens, graph, edge_features=e)
    for place in ((0, 1), (1, 0)):
        alone = run(layer, tuple(t[place] for t in tokens), graph, edge_features=e[place])
        torch.testing.assert_close(out[place], alone, **TIGHT)


@pytest.mark.parametrize("option", OPTIONS)
def test_packed_sequences_take_their_features_one_after_the_other(option: str) -> None:
    graphs = [ga.window_path_graph(5, 2), ga.window_path_graph(4, 2)]
    layer, x = make("SelfConsensus", option), [drawn(5, DIM), drawn(4, DIM, seed=2)]
    e = [drawn(g.num_edges, F, seed=4 + k) for k, g in enumerate(graphs)]
    together = layer(torch.cat(x), ga.batch(graphs), edge_features=torch.cat(e))
    alone = [layer(*pair, edge_features=f) for *pair, f in zip(x, graphs, e, strict=True)]
    torch.testing.assert_close(together, torch.cat(alone), **TIGHT)


# Padding.


@FEW
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("hooked", [False, True], ids=["plain", "with a hook"])
def test_features_of_edges_that_touch_padding_are_never_read(
    kind: str, option: str, backend: str, hooked: bool
) -> None:
    graph = GRAPHS["window"]()
    layer, tokens = make(kind, option), inputs(kind, graph, 2)
    if hooked:  # the first layer is then applied outside of the operation
        layer.edge_net.edge.register_forward_hook(lambda module, given, out: 1.0 * out)
    valid = torch.stack([torch.arange(9) < 6, torch.arange(9) > 1])
    source, target = graph.edge_index
    keep = (valid[:, source] & valid[:, target])[..., None]
    e = drawn(2, graph.num_edges, F, seed=4)
    with ga.use_backend(backend):
        clean, dirty = (
            value_and_gradients(layer, tokens, graph, given, valid=valid)
            for given in (e, torch.where(keep, e, torch.nan))
        )
    for a, b in zip(clean, dirty, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, rtol=0, atol=0)


# Parameters, files and words.


@pytest.mark.parametrize("kind", ["SelfConsensus", "CrossConsensus"])
@pytest.mark.parametrize("trunk", ["shared", "separate"])
@pytest.mark.parametrize("edge_input", ["head", "full"])
def test_f_is_one_parameter_drawn_like_the_rest_of_the_first_layer(
    kind: str, trunk: str, edge_input: str
) -> None:
    options: Any = {"edge_hidden": 8, "trunk": trunk, "edge_input": edge_input}
    layer = getattr(ga.nn, kind)(64, 4, edge_features=5, **options)
    plain = getattr(ga.nn, kind)(64, 4, **options)
    groups, width = (4 if edge_input == "head" else 1), 8 * (3 if trunk == "separate" else 1)
    names = {name for name, _ in layer.named_parameters()}
    assert names - {name for name, _ in plain.named_parameters()} == {"edge_net.edge.weight"}
    assert layer.edge_net.edge.weight.shape == (groups, width, 5)
    bound = 1 / math.sqrt(2 * 64 / groups + 5)
    for first in (layer.edge_net.target, layer.edge_net.source, layer.edge_net.edge):
        largest = first.weight.abs().max().item()
        assert 0.8 * bound < largest <= bound
    before = layer.edge_net.edge.weight.clone()
    layer.reset_parameters()
    assert not torch.equal(layer.edge_net.edge.weight, before)


@pytest.mark.parametrize("kind", ["SelfConsensus", "CrossConsensus"])
def test_a_layer_without_features_draws_and_loads_what_it_always_did(kind: str) -> None:
    torch.manual_seed(3)
    layer = getattr(ga.nn, kind)(DIM, HEADS, edge_hidden=8)
    assert not [name for name in layer.state_dict() if "edge_net.edge" in name]
    torch.manual_seed(3)
    same = getattr(ga.nn, kind)(DIM, HEADS, edge_hidden=8, edge_features=0)
    assert all(
        torch.equal(a, b) for a, b in zip(layer.parameters(), same.parameters(), strict=True)
    )
    same.load_state_dict(layer.state_dict())
    assert repr(layer) == repr(same)
    assert "edge_features=2" in repr(getattr(ga.nn, kind)(DIM, HEADS, edge_features=2))


@FEW
def test_copies_pickles_and_files_are_the_same_layer(kind: str, option: str, tmp_path: Any) -> None:
    layer, graph = make(kind, option), irregular_graph()
    tokens, e = inputs(kind, graph), drawn(graph.num_edges, F, seed=4)
    expected = run(layer, tokens, graph, edge_features=e)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    ga.save(layer, tmp_path)
    copies = [
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(buffer, weights_only=False),
        ga.load(tmp_path),
    ]
    for twin in copies:
        assert twin.edge_features == F
        torch.testing.assert_close(run(twin, tokens, graph, edge_features=e), expected, **TIGHT)


# What people put in the place of parts.


class Scaled(nn.Module):
    """Somebody's own map of features, as an adapter would be."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, y: Tensor) -> Tensor:
        return 2 * self.inner(y)


@pytest.mark.parametrize("way", ["module", "hook", "method"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_what_replaces_f_is_run(way: str, backend: str) -> None:
    graph, x = GRAPHS["window"](), drawn(2, 9, DIM)
    layer, e = make("SelfConsensus", "auto"), drawn(18 + 21, F, seed=4)
    assert graph.num_edges == 39
    expected = layer(x, graph, edge_features=2 * e)
    net = layer.edge_net
    if way == "module":
        net.edge = Scaled(net.edge)
    elif way == "hook":
        net.edge.register_forward_hook(lambda module, given, out: 2 * out)
    else:
        inner = net.edge.forward
        net.edge.forward = lambda y: 2 * inner(y)
    with ga.use_backend(backend):
        torch.testing.assert_close(layer(x, graph, edge_features=e), expected, **TIGHT)


class Deaf(ga.nn.SelfConsensus):
    """A message from before there were features."""

    def message(self, u_i, u_j, hidden_i, hidden_j, valid_i, valid_j):
        return 2 * super().message(u_i, u_j, hidden_i, hidden_j, valid_i, valid_j)


class DeafBound(ga.nn.SelfConsensus):
    def edge_update(self, hidden_i, hidden_j, valid_i, valid_j):
        return super().edge_update(hidden_i, hidden_j, valid_i, valid_j)


class Hearing(ga.nn.SelfConsensus):
    def message(self, u_i, u_j, hidden_i, hidden_j, valid_i, valid_j, edge_hidden):
        given = u_i, u_j, hidden_i, hidden_j, valid_i, valid_j, edge_hidden
        return 2 * super().message(*given)


def test_a_message_that_takes_no_features_refuses_them_by_name() -> None:
    graph, x = GRAPHS["window"](), drawn(2, 9, DIM)
    e = drawn(graph.num_edges, F, seed=4)
    options: Any = {"edge_hidden": 6}
    deaf = Deaf(DIM, HEADS, **options).double()
    assert deaf(x, graph).isfinite().all()  # as ever, without features
    deaf = Deaf(DIM, HEADS, edge_features=F, **options).double()
    with pytest.raises(ValueError, match=r"edge_features.*message\(\) of Deaf.*edge_hidden"):
        deaf(x, graph, edge_features=e)
    bound = DeafBound(DIM, HEADS, edge_features=F, step_size="auto", **options).double()
    with pytest.raises(ValueError, match=r"edge_features.*edge_update\(\) of DeafBound"):
        bound(x, graph, edge_features=e)
    plain = make("SelfConsensus")
    hearing = Hearing(DIM, HEADS, edge_features=F, **options).double()
    hearing.load_state_dict(plain.state_dict())
    still = plain.output_proj(plain.source_proj(x))
    moved = plain(x, graph, edge_features=e) - still
    torch.testing.assert_close(hearing(x, graph, edge_features=e) - still, 2 * moved, **TIGHT)


# Precision, memory, compilers.


@FEW
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_half_precision_loses_no_more_than_its_inputs(
    kind: str, option: str, dtype: torch.dtype, backend: str
) -> None:
    """Twice the error of a layer without features, and a band of rounding."""
    graph = irregular_graph()
    layer, tokens = make(kind, option), inputs(kind, graph, 2)
    e = drawn(graph.num_edges, F, seed=4)
    low = copy.deepcopy(layer).to(dtype)
    wide = copy.deepcopy(low).double()  # the same parameters
    tokens, e = tuple(t.to(dtype) for t in tokens), e.to(dtype)
    with ga.use_backend(backend):
        out = run(low, tokens, graph, edge_features=e)
        none = run(low, tokens, graph, edge_features=0 * e)
    tokens = tuple(t.double() for t in tokens)
    error = (out.double() - run(wide, tokens, graph, edge_features=e.double())).abs().max()
    usual = (none.double() - run(wide, tokens, graph, edge_features=0 * e.double())).abs().max()
    assert out.dtype == dtype
    assert error <= 2 * usual + torch.finfo(dtype).eps * out.abs().max()


@FEW
def test_autocast_runs_forward_and_backward_on_both_ways(kind: str, option: str) -> None:
    graph = irregular_graph()
    layer, tokens = make(kind, option, torch.float32), inputs(kind, graph, 2, dtype=torch.float32)
    e = drawn(graph.num_edges, F, seed=4, dtype=torch.float32)
    ways = []
    for backend in ("auto", "reference"):
        with ga.use_backend(backend), torch.autocast("cpu", torch.bfloat16):
            ways.append(value_and_gradients(layer, tokens, graph, e))
    assert ways[0][0].dtype == torch.bfloat16
    torch.testing.assert_close(ways[0], ways[1], rtol=2e-2, atol=2e-2)
    exact = value_and_gradients(layer, tokens, graph, e)
    torch.testing.assert_close(ways[0][0].float(), exact[0], rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", ["auto", "structured", "reference"])
def test_checkpointing_changes_no_bit(backend: str, way: str) -> None:
    graph = GRAPHS["window"]()
    layer = make("SelfConsensus", "auto", torch.float32, backend=backend)
    block = ga.nn.PreNormBlock(layer)
    results = []
    for call in (block, WAYS[way](lambda x, e: block(x, graph, edge_features=e))):
        x = drawn(2, 9, DIM, dtype=torch.float32).requires_grad_()
        e = drawn(graph.num_edges, F, seed=4, dtype=torch.float32).requires_grad_()
        block.zero_grad()
        out = call(x, graph, edge_features=e) if call is block else call(x, e)
        out.square().sum().backward()
        results.append([out, x.grad, e.grad, *(p.grad.clone() for p in block.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


COMPILED = {
    "path": lambda n: ga.window_path_graph(n, 2),
    "edge list": lambda n: ga.from_edge_index(ga.window_path_graph(n, 3).edge_index, n),
    "batch": lambda n: ga.batch([ga.window_path_graph(n, 2), ga.longformer_graph(9, 1, (0,))]),
}


@pytest.mark.long
@pytest.mark.parametrize("per_sequence", [False, True])
@pytest.mark.parametrize("graph", COMPILED)
def test_two_compilations_serve_all_lengths(graph: str, per_sequence: bool) -> None:
    torch._dynamo.reset()
    layer = make("SelfConsensus", "auto", torch.float32)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for n in (12, 17, 25, 40):
        edges = COMPILED[graph](n)
        x = drawn(2, edges.num_targets, DIM, dtype=torch.float32).requires_grad_()
        e = drawn(
            *([2] if per_sequence else []), edges.num_edges, F, dtype=torch.float32
        ).requires_grad_()
        leaves = [x, e, *layer.parameters()]
        results = []
        for call in (compiled, layer):
            out = call(x, edges, edge_features=e)
            results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    assert counter.frame_count <= 2
    torch._dynamo.reset()


def test_inputs_need_not_be_contiguous() -> None:
    graph = GRAPHS["window"]()
    layer, x = make("SelfConsensus", "auto"), drawn(2, DIM, 9).mT
    e = drawn(2, F, graph.num_edges, seed=4).mT
    expected = layer(x.contiguous(), graph, edge_features=e.contiguous())
    torch.testing.assert_close(layer(x, graph, edge_features=e), expected, **TIGHT)


def test_blocks_hand_features_on() -> None:
    graph = GRAPHS["window"]()
    block, x = ga.nn.PreNormBlock(make("SelfConsensus")).double(), drawn(2, 9, DIM)
    e = drawn(graph.num_edges, F, seed=4)
    mixed = x + block.mixer(block.mixer_norm(x), graph, edge_features=e)
    expected = mixed + block.mlp(block.mlp_norm(mixed))
    torch.testing.assert_close(block(x, graph, edge_features=e), expected, **TIGHT)
    attention = ga.nn.PreNormBlock(ga.nn.KrauseAttention(DIM, HEADS)).double()
    with pytest.raises(TypeError, match="edge_features"):
        attention(x, graph, edge_features=e)


# What is refused.


@pytest.mark.parametrize("kind", ["SelfConsensus", "CrossConsensus"])
def test_features_that_are_missing_or_not_expected_are_named(kind: str) -> None:
    graph = irregular_graph()
    tokens, e = inputs(kind, graph, 2), drawn(graph.num_edges, F)
    E = graph.num_edges
    with pytest.raises(
        ValueError, match=rf"edge_features must be a tensor of shape \[{E}, 3\].*{kind} was"
    ):
        run(make(kind), tokens, graph)
    with pytest.raises(ValueError, match=rf"this {kind}.*made with edge_features=0.*features=3"):
        run(make(kind, edge_features=0), tokens, graph, edge_features=e)


@pytest.mark.parametrize("kind", ["SelfConsensus", "CrossConsensus"])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([[0.0]], r"edge_features must be a tensor, got list"),
        (torch.zeros(5, F), r"edge_features must have shape \[\d+, 3\] or \[2, \d+, 3\].*\[5, 3\]"),
        (lambda E: torch.zeros(E, F + 1).double(), r"edge_features must have shape"),
        (lambda E: torch.zeros(3, E, F).double(), r"edge_features must have shape"),
        (lambda E: torch.zeros(E, F), r"edge_features must have the layer's dtype torch.float64"),
        (lambda E: torch.zeros(E, F).long(), r"edge_features must be floating-point"),
        (
            lambda E: torch.zeros(E, F, device="meta"),
            r"edge_features must be on the device of x, cpu, got meta",
        ),
    ],
)
def test_features_that_do_not_fit_are_refused_by_name(kind: str, given: Any, message: str) -> None:
    graph = irregular_graph()
    e = given(graph.num_edges) if callable(given) else given
    with pytest.raises(ValueError, match=message):
        run(make(kind), inputs(kind, graph, 2), graph, edge_features=e)


@pytest.mark.parametrize("value", [-1, 2.5, True, "3"])
def test_the_number_of_features_is_a_whole_number(value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="edge_features"):
        ga.nn.SelfConsensus(DIM, HEADS, edge_features=value)


def test_an_edge_list_must_be_sorted_where_edges_have_features() -> None:
    graph = irregular_graph()
    layer, x = make("SelfConsensus"), drawn(2, 9, DIM)
    e = drawn(graph.num_edges, F, seed=4)
    expected = layer(x, graph, edge_features=e)
    torch.testing.assert_close(layer(x, graph.edge_index, edge_features=e), expected, **TIGHT)
    with pytest.raises(ValueError, match="edge_index must be sorted"):
        layer(x, graph.edge_index.flip(1), edge_features=e)


def test_generation_says_that_a_step_knows_no_features() -> None:
    layer = make("SelfConsensus", "target")
    with pytest.raises(
        ValueError, match=r"init_cache needs a layer made with edge_features=0, got edge_features=3"
    ):
        layer.init_cache(2, window=4)


def test_kernels_are_not_asked_by_auto_and_refuse_by_name() -> None:
    graph, x = GRAPHS["window"](), drawn(9, DIM, dtype=torch.float32)
    e = drawn(graph.num_edges, F, dtype=torch.float32)
    layer = make("SelfConsensus", dtype=torch.float32, backend="triton")
    with pytest.raises(ValueError, match="backend 'triton' cannot run this case"):
        layer(x, graph, edge_features=e)

"""A layer whose message() somebody has replaced computes what that says, or says why it cannot."""

from __future__ import annotations

import copy
import pickle
import types
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from nn_by_hand import DIM, HEADS, ONE_OF_EACH, Case, graph_of, run, tokens_of
from torch import Tensor

import graphattn as ga
from graphattn.nn.base.overrides import (
    overridden_edges,
    overridden_forward,
    overridden_rows,
    overridden_weights,
)
from graphattn.nn.edges.network import EdgeNetwork

TIGHT = {"rtol": 1e-10, "atol": 1e-11}


def message(self, query_i, key_j, value_j, valid_i, valid_j, index, rowptr):
    """No message, of the shape of one: what a test puts into the place of another."""
    return torch.zeros_like(value_j)


def as_silent(case: Case, **options: Any) -> Any:
    """The layer of a case as a subclass that sends no messages."""
    base = getattr(ga.nn, case.kind)
    if case.is_consensus:  # (PyG keeps what it generates by the name of a class)

        class SilentConsensus(base):
            def message(self, u_i, u_j, hidden_i, hidden_j, valid_i, valid_j):
                return torch.zeros_like(u_j)

        kind = SilentConsensus
    else:
        kind = type("SilentAttention", (base,), {"message": message})
    layer = case.make(**options)
    mine = kind(DIM, HEADS, **case.options, **options).double()
    mine.load_state_dict(layer.state_dict())
    return mine


def without_messages(layer: Any, x: Tensor) -> Tensor:
    """Attention gives its bias, consensus its state."""
    if hasattr(layer, "source_proj"):
        return layer.output_proj(layer.source_proj(x))
    return layer.output_proj(torch.zeros_like(x))


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("case", ONE_OF_EACH, ids=str)
def test_the_message_of_a_subclass_is_the_layer(case: Case, backend: str) -> None:
    layer, graph = as_silent(case, backend=backend), graph_of(case)
    tokens = tokens_of(case, graph)
    expected = without_messages(layer, tokens[0])
    torch.testing.assert_close(run(layer, tokens, graph), expected, **TIGHT)


@pytest.mark.parametrize("how", ["constructor", "context manager"])
@pytest.mark.parametrize("backend", ["structured", "triton"])
@pytest.mark.parametrize("case", ONE_OF_EACH, ids=str)
def test_a_backend_that_does_not_know_it_refuses(case: Case, backend: str, how: str) -> None:
    named = how == "constructor"
    layer, graph = as_silent(case, backend=backend if named else "auto"), graph_of(case)
    said = rf"'{backend}' cannot run this Silent\w+.* its own message\(\).*'auto' or 'reference'"
    with (
        nullcontext() if named else ga.use_backend(backend),
        pytest.raises(ValueError, match=said),
    ):
        run(layer, tokens_of(case, graph), graph)


class Doubled(ga.nn.KrauseAttention):
    def message(self, query_i, key_j, value_j, valid_i, valid_j, index, rowptr):
        return 2 * super().message(query_i, key_j, value_j, valid_i, valid_j, index, rowptr)


class DoubledAgain(Doubled):
    """A subclass of a subclass, which replaces nothing more."""


class DoublesFeatures:
    """A mixin: it stands before the layer in the order of classes."""

    def update(self, inputs: Tensor) -> Tensor:
        return 2 * inputs


class Mixed(DoublesFeatures, ga.nn.KrauseAttention):
    pass


class ByAggregate(ga.nn.KrauseAttention):
    def aggregate(self, inputs, index, ptr=None, dim_size=None):
        return 2 * super().aggregate(inputs, index, ptr=ptr, dim_size=dim_size)


def twin_of(kind: type, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain = ga.nn.KrauseAttention(DIM, HEADS, top_k=3, rope=True, **options).double()
    mine = kind(DIM, HEADS, top_k=3, rope=True, **options).double()
    mine.load_state_dict(plain.state_dict())
    return mine, plain


def doubled(plain: Any, x: Tensor, graph: ga.TokenGraph, **keywords: Any) -> Tensor:
    """The output of the layer with its averages doubled: twice what it is, less one bias."""
    return 2 * plain(x, graph, **keywords) - plain.output_proj.bias


@pytest.mark.parametrize("copied", ["as it is", "deepcopy", "pickle"])
@pytest.mark.parametrize("kind", [Doubled, DoubledAgain, Mixed, ByAggregate])
def test_whatever_propagate_runs_can_be_replaced(kind: type, copied: str) -> None:
    mine, plain = twin_of(kind)
    if copied != "as it is":
        mine = copy.deepcopy(mine) if copied == "deepcopy" else pickle.loads(pickle.dumps(mine))
    x = torch.randn(2, DIM, 12, dtype=torch.float64).mT  # not contiguous
    valid = torch.rand(2, 12) < 0.8
    packed = ga.batch([ga.causal_window_graph(7, 4), ga.complete_graph(5)])
    for graph in (ga.window_path_graph(12, 2), packed):
        torch.testing.assert_close(mine(x, graph), doubled(plain, x, graph), **TIGHT)
        torch.testing.assert_close(
            mine(x, graph, valid=valid)[valid],
            doubled(plain, x, graph, valid=valid)[valid],
            **TIGHT,
        )


@pytest.mark.long
def test_and_under_autocast_and_torch_compile() -> None:
    mine, plain = twin_of(Doubled)
    mine, plain = mine.float(), plain.float()
    x, graph = torch.randn(2, 12, DIM), ga.window_path_graph(12, 2)
    compiled: Any = torch.compile(mine, backend="aot_eager")
    torch.testing.assert_close(compiled(x, graph), doubled(plain, x, graph), rtol=1e-4, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        out, expected = mine(x, graph), doubled(plain, x, graph)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.05)
    torch._dynamo.reset()


def test_a_message_put_into_an_instance_counts_in_it_and_its_copies() -> None:
    _, layer = twin_of(ga.nn.KrauseAttention)
    graph, x = ga.window_path_graph(12, 2), torch.randn(2, 12, DIM, dtype=torch.float64)
    other = copy.deepcopy(layer)
    layer.message = types.MethodType(message, layer)
    for patched in (layer, copy.deepcopy(layer)):
        torch.testing.assert_close(patched(x, graph), without_messages(layer, x), **TIGHT)
    assert not torch.allclose(other(x, graph), without_messages(layer, x))
    del layer.message
    torch.testing.assert_close(layer(x, graph), other(x, graph), rtol=0, atol=0)


@pytest.mark.parametrize("kind", [ga.nn.KrauseAttention, DoubledAgain])
def test_a_class_that_is_patched_later_counts_too(
    kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, _ = twin_of(kind)
    graph, x = ga.window_path_graph(12, 2), torch.randn(2, 12, DIM, dtype=torch.float64)
    before = layer(x, graph)
    with monkeypatch.context() as patch:
        patch.setattr(Doubled if kind is DoubledAgain else kind, "message", message)
        torch.testing.assert_close(layer(x, graph), without_messages(layer, x), **TIGHT)

        class MadeMeanwhile(kind):
            pass

        late, _ = twin_of(MadeMeanwhile)
        torch.testing.assert_close(late(x, graph), without_messages(layer, x), **TIGHT)
    torch.testing.assert_close(layer(x, graph), before, rtol=0, atol=0)


class ByManhattan(ga.nn.DotProductAttention):
    """An affinity that no operation knows."""

    def log_affinity(self, query_i: Tensor, key_j: Tensor) -> Tensor:
        return -(query_i - key_j).abs().sum(-1)


@torch.no_grad()
def weights_by_loop(layer: Any, x: Tensor, mask: Tensor, top_k: int | None) -> Tensor:
    """[N, M, H] in plain loops: exp(-|q_i - k_j|_1) over the edges, normalised."""
    query = layer.query_proj(x).view(len(x), HEADS, -1)
    key = layer.key_proj(x).view(len(x), layer.kv_heads, -1)
    weights = torch.zeros(len(x), len(x), HEADS, dtype=x.dtype)
    for i in range(len(x)):
        for h in range(HEADS):
            of_head = key[:, h // (HEADS // layer.kv_heads)]
            logits = {
                j: -float((query[i, h] - of_head[j]).abs().sum())
                for j in range(len(x))
                if mask[i, j]
            }
            kept = sorted(logits, key=lambda j: -logits[j])[:top_k]
            total = sum(torch.tensor(logits[j]).double().exp() for j in kept)
            for j in kept:
                weights[i, j, h] = torch.tensor(logits[j]).double().exp() / total
    return weights


@pytest.mark.parametrize("top_k", [None, 2])
def test_a_new_affinity_gives_its_averages_and_its_weights(top_k: int | None) -> None:
    torch.manual_seed(0)
    layer = ByManhattan(DIM, HEADS, kv_heads=2, top_k=top_k).double()
    graph, x = ga.causal_window_graph(9, 4), torch.randn(9, DIM, dtype=torch.float64)
    out, weights = layer(x, graph, return_attention_weights=True)
    expected = weights_by_loop(layer, x, graph.to_mask(), top_k)
    source, target = graph.edge_index
    torch.testing.assert_close(weights, expected[target, source], rtol=1e-6, atol=1e-7)
    value = layer.value_proj(x).view(9, 2, -1).repeat_interleave(2, dim=1)
    mixed = torch.einsum("ijh,jhd->ihd", expected, value)
    torch.testing.assert_close(out, layer.output_proj(mixed.flatten(1)), rtol=1e-6, atol=1e-7)


def test_weights_of_a_new_message_are_not_guessed() -> None:
    layer, _ = twin_of(Doubled)
    x = torch.randn(12, DIM, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"return_attention_weights.*message\(\).*edge_weights"):
        layer(x, ga.window_path_graph(12, 2), return_attention_weights=True)


class HalfTheBound(ga.nn.SelfConsensus):
    def edge_update(self, hidden_i, hidden_j, valid_i, valid_j):
        return 2 * super().edge_update(hidden_i, hidden_j, valid_i, valid_j)


@pytest.mark.parametrize("update", ["energy", "target"])
def test_a_new_bound_on_the_norm_changes_the_automatic_step(update: str) -> None:
    torch.manual_seed(0)
    options = {"edge_hidden": 6, "step_size": "auto", "update": update}
    plain = ga.nn.SelfConsensus(DIM, HEADS, **options).double()
    mine = HalfTheBound(DIM, HEADS, **options).double()
    mine.load_state_dict(plain.state_dict())
    graph, x = ga.window_path_graph(12, 2), torch.randn(2, 12, DIM, dtype=torch.float64)
    still = plain.output_proj(plain.source_proj(x))
    torch.testing.assert_close(mine(x, graph) - still, (plain(x, graph) - still) / 2, **TIGHT)


class OwnOperation(ga.nn.DotProductAttention):
    """Message and operation replaced together: the operation is believed."""

    def message(self, query_i, key_j, value_j, valid_i, valid_j, index, rowptr):
        raise AssertionError("fused() is there")

    def fused(self, query, key, value, graph, valid):
        return 3 * super().fused(query, key, value, graph, valid)


def test_an_operation_that_is_replaced_along_with_the_message_is_run() -> None:
    torch.manual_seed(0)
    layer = OwnOperation(DIM, HEADS, bias=False)
    plain = ga.nn.DotProductAttention(DIM, HEADS, bias=False)
    plain.load_state_dict(layer.state_dict())
    graph, x = ga.window_path_graph(12, 2), torch.randn(2, 12, DIM)
    torch.testing.assert_close(layer(x, graph), 3 * plain(x, graph))

    class Deeper(OwnOperation):  # now the operation is the older of the two
        def message(self, query_i, key_j, value_j, valid_i, valid_j, index, rowptr):
            return torch.zeros_like(value_j)

    torch.testing.assert_close(Deeper(DIM, HEADS, bias=False)(x, graph), torch.zeros_like(x))


class Blind(ga.nn.KrauseAttention):
    def message(self, value_j: Tensor) -> Tensor:
        return value_j


def test_a_message_that_knows_no_padding_is_not_given_any() -> None:
    layer, graph, x = Blind(DIM, HEADS), ga.window_path_graph(12, 2), torch.randn(12, DIM)
    summed = torch.stack([layer.value_proj(x)[graph.to_mask()[i]].sum(0) for i in range(12)])
    torch.testing.assert_close(layer(x, graph), layer.output_proj(summed), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"valid cannot be used with the message\(\) of Blind"):
        layer(x, graph, valid=torch.arange(12) < 9)


# What PyG offers for looking at messages.


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=str)
def test_hooks_of_pyg_see_the_messages_and_can_change_them(case: Case) -> None:
    layer, graph = case.make(), graph_of(case)
    tokens = tokens_of(case, graph)
    before = run(layer, tokens, graph)
    handle = layer.register_message_forward_hook(lambda _, __, out: torch.zeros_like(out))
    expected = without_messages(layer, tokens[0])
    torch.testing.assert_close(run(layer, tokens, graph), expected, **TIGHT)
    with (
        ga.use_backend("structured"),
        pytest.raises(ValueError, match=r"a hook \(register_message"),
    ):
        run(layer, tokens, graph)
    handle.remove()
    torch.testing.assert_close(run(layer, tokens, graph), before, rtol=0, atol=0)


def test_explainers_of_pyg_mask_the_edges() -> None:
    """Explainers' masks of 0 on all edges stop every message: the projection of zeros is left."""
    from torch_geometric.explain.algorithm.utils import clear_masks, set_masks

    torch.manual_seed(0)
    layer = ga.nn.KrauseAttention(DIM, HEADS)
    graph, x = ga.window_path_graph(6, 1), torch.randn(6, DIM)
    set_masks(layer, torch.zeros(graph.num_edges), graph.edge_index, apply_sigmoid=False)
    masked = layer(x, graph)
    torch.testing.assert_close(masked, layer.output_proj(torch.zeros(6, DIM)))
    clear_masks(layer)
    assert not torch.allclose(layer(x, graph), masked)


# Token by token.


class OwnTarget(ga.nn.SelfConsensus):
    def message(self, u_i, u_j, hidden_i, hidden_j, valid_i, valid_j):
        return 0.5 * super().message(u_i, u_j, hidden_i, hidden_j, valid_i, valid_j)


class OwnSigma(ga.nn.GaussianKernelAttention):
    def sigma(self) -> Tensor:
        return super().sigma() / 3


class OwnGaussian(ga.nn.GaussianKernelAttention):
    def log_affinity(self, query_i: Tensor, key_j: Tensor) -> Tensor:
        return -(query_i - key_j).abs().sum(-1)


class OwnEnd(ga.nn.SelfConsensus):
    def project_back(self, moved, rotations):
        return 2 * super().project_back(moved, rotations)


class OwnTurn(ga.nn.SelfConsensus):
    def rotate_back(self, u, rotations):
        return super().rotate_back(u, rotations) + 1


class OwnFirstLayer(EdgeNetwork):
    def target_hidden(self, y: Tensor) -> Tensor:
        return super().target_hidden(y).sin()

    def source_hidden(self, y: Tensor) -> Tensor:
        return 3 * super().source_hidden(y)


class OfOwnFirstLayer(ga.nn.SelfConsensus):
    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.edge_net.__class__ = OwnFirstLayer


STREAMS: dict[str, Any] = {
    "message": lambda: Doubled(DIM, HEADS, top_k=3, rope=True),
    "update": lambda: Mixed(DIM, HEADS, top_k=3, kv_heads=2),
    "aggregate": lambda: ByAggregate(DIM, HEADS),
    "affinity": lambda: ByManhattan(DIM, HEADS, kv_heads=2),
    "affinity, shared": lambda: OwnGaussian(DIM, HEADS, rope=True, eps=0.1),
    "sigma": lambda: OwnSigma(DIM, HEADS),
    "operation": lambda: OwnOperation(DIM, HEADS),
    "consensus": lambda: OwnTarget(DIM, HEADS, edge_hidden=6, update="target", rope="isometric"),
    "end of a step": lambda: OwnEnd(DIM, HEADS, edge_hidden=6, update="target"),
    "turned back": lambda: OwnTurn(DIM, HEADS, edge_hidden=6, update="target"),
    "first layer": lambda: OfOwnFirstLayer(DIM, HEADS, edge_hidden=6, update="target"),
    "consensus, auto": lambda: HalfTheBound(
        DIM, HEADS, edge_hidden=6, update="target", step_size="auto"
    ),
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("window", [5, None])
@pytest.mark.parametrize("name", STREAMS)
def test_steps_give_what_forward_gives(name: str, window: int | None, padded: bool) -> None:
    torch.manual_seed(0)
    layer, x = STREAMS[name]().double(), torch.randn(2, 14, DIM, dtype=torch.float64)
    graph = ga.causal_graph(14) if window is None else ga.causal_window_graph(14, window)
    valid = torch.arange(14) >= torch.tensor([[0], [4]]) if padded else None
    cache = layer.init_cache(2, window=window)
    rows = [layer.step(x[:, :6], cache, valid=None if valid is None else valid[:, :6])]
    for t in range(6, 14):
        rows.append(
            layer.step(x[:, t], cache, valid=None if valid is None else valid[:, t])[:, None]
        )
    real = torch.ones(2, 14, dtype=torch.bool) if valid is None else valid
    expected = layer(x, graph, valid=valid)
    torch.testing.assert_close(torch.cat(rows, 1)[real], expected[real], **TIGHT)


def test_a_patched_instance_steps_as_patched() -> None:
    layer = ga.nn.DotProductAttention(DIM, HEADS)
    layer.message = types.MethodType(message, layer)
    cache, x = layer.init_cache(2, window=4), torch.randn(2, DIM)
    for _ in range(3):
        out = layer.step(x, cache)
    torch.testing.assert_close(out, layer.output_proj(torch.zeros_like(x)))


class OwnForward(ga.nn.KrauseAttention):
    def forward(self, x, graph, **keywords):
        return super().forward(2 * x, graph, **keywords)


class OwnForwardAndStep(OwnForward):
    def step(self, x, cache, **keywords):
        return super().step(2 * x, cache, **keywords)


def test_steps_refuse_where_forward_was_replaced_and_step_was_not() -> None:
    with pytest.raises(ValueError, match=r"step does not run the forward\(\) of OwnForward"):
        OwnForward(DIM, HEADS).init_cache(2, window=4)
    layer, x = OwnForwardAndStep(DIM, HEADS).double(), torch.randn(2, 9, DIM, dtype=torch.float64)
    cache = layer.init_cache(2, window=4)
    steps = torch.stack([layer.step(x[:, t], cache) for t in range(9)], 1)
    torch.testing.assert_close(steps, layer(x, ga.causal_window_graph(9, 4)), **TIGHT)


def test_the_librarys_own_layers_have_replaced_nothing() -> None:
    """Otherwise they would all run message by message."""
    for case in ONE_OF_EACH:
        layer = case.make()
        assert overridden_edges(layer) == overridden_rows(layer) == overridden_weights(layer) == ()
        assert overridden_forward(layer) == ()

"""Fixed costs of a call: the operators that it calls, and what it makes anew every time."""

import copy
import gc
import pickle
import weakref
from collections import Counter

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import graphattn as ga
from graphattn.kernels.cpu import library
from graphattn.ops.attention.backends import PLANNED
from graphattn.ops.attention.native import KERNELS
from graphattn.ops.attention.structured import plans
from graphattn.ops.consensus.structured import sums as structured

N, DIM, HEADS = 32, 128, 4
GRAPHS = {
    "window": ga.causal_window_graph(N, 8),
    "complete": ga.complete_graph(N),
    "neighbors": ga.knn_graph(torch.randn(N, 3, generator=torch.Generator().manual_seed(0)), k=6),
}
IS_HERE = library.why_not() is None
compiled = pytest.mark.skipif(not IS_HERE, reason="what is counted is calls of compiled code")


def consensus(backend, **options):
    return ga.nn.SelfConsensus(DIM, HEADS, update="target", backend=backend, **options)


# By layer: how many operators of torch a forward pass may call, and one with its backward pass.
LAYERS = {
    "dot": (lambda: ga.nn.DotProductAttention(DIM, HEADS), 64, 182),
    "rope": (lambda: ga.nn.DotProductAttention(DIM, HEADS, rope=True), 72, 198),
    "gka": (lambda: ga.nn.GaussianKernelAttention(DIM, HEADS), 40, 115),
    "gka, eps": (lambda: ga.nn.GaussianKernelAttention(DIM, HEADS, eps=1e-3), 80, 170),
    "krause": (lambda: ga.nn.KrauseAttention(DIM, HEADS, top_k=4), 75, 205),
    "linear": (lambda: ga.nn.LinearAttention(DIM, HEADS), 171, 451),
    "target": (lambda: consensus("auto"), *((85, 210) if IS_HERE else (260, 720))),
    "automatic": (
        lambda: consensus("auto", step_size="auto"),
        *((105, 255) if IS_HERE else (330, 800)),
    ),
    "in chunks": (lambda: consensus("structured"), 260, 720),
}
OF_COMPILED_CODE = ("dot", "rope", "gka", "gka, eps", "krause")


def operators_of(work):
    """How often every operator of torch is called."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        work()
    names = (event.name for event in recorded.events())
    return Counter(name for name in names if name.startswith("aten::"))


def passes(layer, graph):
    """A forward pass without gradients, and one with the backward pass."""
    x = torch.randn(N, DIM)

    def forward():
        with torch.inference_mode():
            layer(x, graph)

    def both():
        out = layer(x, graph)
        out.backward(torch.ones_like(out))

    return forward, both


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("name", LAYERS)
def test_a_small_layer_calls_few_operators(name, graph):
    if not IS_HERE and name in OF_COMPILED_CODE:
        pytest.skip("these are limits of compiled code")
    make, *limits = LAYERS[name]
    for work, limit in zip(passes(make(), GRAPHS[graph]), limits, strict=True):
        work()  # what is made once
        called = operators_of(work)
        assert called.total() <= limit, called


@pytest.mark.parametrize("backend", ["auto", "structured"])
def test_windows_of_consensus_are_not_gone_over_hop_by_hop(backend):
    layer = ga.nn.SelfConsensus(DIM, HEADS, backend=backend)
    few, many = (
        operators_of(passes(layer, ga.window_path_graph(N, window))[0]).total() for window in (1, 8)
    )
    assert many <= few + 20


@compiled
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("top_k", [None, 4])
def test_the_second_call_on_a_graph_makes_no_plan(monkeypatch, graph, top_k):
    layer, kept = ga.nn.KrauseAttention(DIM, HEADS, top_k=top_k), copy.deepcopy(GRAPHS[graph])
    made = []
    kernels = plans.Kernels(
        lambda *given: made.append("rows") or KERNELS.rows(*given),
        lambda *given: made.append("tiles") or KERNELS.tiles(*given),
    )
    monkeypatch.setitem(PLANNED, "native", kernels)
    x = torch.randn(N, DIM)
    first = layer(x, kept)
    assert len(made) == 1
    assert torch.equal(layer(x, kept), first)
    assert len(made) == 1
    assert torch.equal(layer(x, copy.deepcopy(kept)), first)
    assert len(made) == 2  # a copy has none


def test_what_is_kept_with_a_graph_goes_with_it_and_not_into_files():
    graph = ga.window_path_graph(N, 2)
    size = len(pickle.dumps(graph))
    layer = ga.nn.SelfConsensus(DIM, HEADS, edge_hidden=8, rope=True)
    layer(torch.randn(N, DIM), graph)
    ga.nn.DotProductAttention(DIM, HEADS, rope=True)(torch.randn(N, DIM), graph)
    assert graph._derived
    assert not copy.copy(graph)._derived
    assert len(pickle.dumps(graph)) == size
    alive = weakref.ref(graph)
    del graph
    gc.collect()
    assert alive() is None


def test_a_graph_keeps_a_few_results_only():
    graph = ga.causal_window_graph(N, 8)
    for top_k in range(1, 60):
        ga.nn.KrauseAttention(8, 2, top_k=top_k)(torch.randn(N, 8), graph)
    assert len(graph._derived) <= 32


def test_a_list_that_was_changed_in_place_has_a_plan_of_its_own():
    graph = ga.from_edge_index(torch.tensor([[0, 1], [0, 1]]), 2, 2)
    counted = [0]

    def make():
        counted[0] += 1
        return counted[0]

    assert [graph.derived("key", make), graph.derived("key", make)] == [1, 1]
    graph.listed[0, 0] = 1
    assert graph.derived("key", make) == 2


def test_rotations_kept_with_a_graph_are_those_of_its_positions():
    """Rotations of two bases and dtypes are made in inference mode first, then used in training."""
    graph = ga.batch([ga.causal_graph(20), ga.causal_graph(12)])
    for base in (100.0, 10000.0):
        for dtype in (torch.float32, torch.float64):
            rotary = ga.nn.RotaryEmbedding(DIM // HEADS, base=base)
            layer = ga.nn.DotProductAttention(DIM, HEADS, rope=rotary).to(dtype)
            x = torch.randn(N, DIM, dtype=dtype)
            with torch.inference_mode():
                first = layer(x, graph)
            positions = torch.cat([torch.arange(20), torch.arange(12)])
            assert torch.equal(layer(x, graph, positions=positions), first)
            out = layer(x, graph)
            assert torch.equal(out, first)
            out.sum().backward()


def test_few_edges_kept_for_the_backward_give_what_they_give_computed_again(monkeypatch):
    """Twice from one forward pass, too: the first backward writes into what was kept."""
    graph = ga.window_path_graph(N, 2)
    layer = ga.nn.SelfConsensus(DIM, HEADS, backend="structured").double()
    x = torch.randn(N, DIM, dtype=torch.float64, requires_grad=True)

    def gradients(out, **options):
        return torch.autograd.grad(out.square().sum(), [x, *layer.parameters()], **options)

    out = layer(x, graph)
    kept, again = gradients(out, retain_graph=True), gradients(out)
    monkeypatch.setattr(structured, "MOST_STORED", 0)
    anew = gradients(layer(x, graph))
    for mine, second, other in zip(kept, again, anew, strict=True):
        assert torch.equal(mine, other)
        assert torch.equal(second, other)

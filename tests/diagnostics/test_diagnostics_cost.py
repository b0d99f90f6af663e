"""Operations and activation memory: from the edges, by hand, and the papers' own counts."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import graphattn as ga
from graphattn.bench.models.vision import vision_model

GRAPHS = {
    "complete": ga.complete_graph(12),
    "causal": ga.causal_graph(12),
    "window": ga.window_path_graph(12, 2),
    "packed": ga.batch([ga.causal_window_graph(7, 3), ga.complete_graph(5)]),
    "grid": ga.grid_window_graph(3, 4, 1),
    "listed": ga.from_edge_index(ga.longformer_graph(12, 1, (0,)).edge_index, 12),
}


def products(graph: ga.TokenGraph, D: int, top_k: int | None = None) -> int:
    """Multiply-adds of one head, edge by edge."""
    edges = graph.edge_index[1].tolist()
    scored = len(edges) * D
    degree = [edges.count(i) for i in range(graph.num_targets)]
    kept = sum(d if top_k is None else min(d, top_k) for d in degree)
    return scored + kept * D


def counted(run) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("top_k", [None, 2])
def test_attention_costs_two_products_per_edge_and_head(name, top_k):
    graph, (B, H, Hk, D) = GRAPHS[name], (3, 4, 2, 8)
    query, key, value = torch.randn(B, 12, H, D), *torch.randn(2, B, 12, Hk, D)
    expected = 2 * B * H * products(graph, D, top_k)
    assert expected == counted(lambda: ga.rbf_attention(query, key, value, graph, 1.0, top_k=top_k))
    assert expected == counted(
        lambda: ga.dot_product_attention(query, key, value, graph, top_k=top_k)
    )


def test_a_backward_pass_of_attention_forms_logits_again():
    q, k, v = torch.randn(3, 2, 12, 4, 8, requires_grad=True)
    graph = ga.window_path_graph(12, 2)
    forward = 2 * 2 * 4 * products(graph, 8)
    total = counted(lambda: ga.rbf_attention(q, k, v, graph, 1.0).sum().backward())
    assert total == forward + forward * 5 // 2  # as torch counts SDPA's


def test_an_own_width_of_values_counts():
    q, v = torch.randn(12, 1, 8), torch.randn(12, 1, 3)
    graph = ga.complete_graph(12)
    assert counted(lambda: ga.dot_product_attention(q, q, v, graph)) == 2 * 144 * (8 + 3)


@pytest.mark.parametrize(
    ("preset", "deit", "gka"),
    [((192, 3), 2.51, 1.98), ((384, 6), 9.20, 7.11), ((768, 12), 35.13, 26.76)],
)
def test_vision_transformers_cost_what_the_paper_says(preset, deit, gka):
    # Projection-Free Transformers via Gaussian Kernel Attention, in 10^9 operations per image.
    for mixer, expected in (("dot", deit), ("gka", gka)):
        model = vision_model(mixer, *preset, 12)
        operations = ga.diagnostics.flops(model, torch.randn(1, 3, 224, 224))
        assert operations == pytest.approx(expected * 1e9, rel=0.01)


@pytest.mark.long
def test_meta_tensors_count_without_computing():
    device = torch.device("meta")
    model = vision_model("gka", 768, 12, 12).to(device)
    operations = ga.diagnostics.flops(model, torch.empty(1, 3, 224, 224, device=device))
    assert operations == pytest.approx(26.76e9, rel=0.01)


def consensus(N=30, w=2, r=4, xi=16, **options) -> int:
    layer = ga.nn.SelfConsensus(8, heads=2, rank=r, edge_hidden=xi, **options)
    return ga.diagnostics.flops(layer, torch.randn(N, 8), ga.window_path_graph(N, w))


def test_consensus_grows_as_table_1_says():
    # O(N d w r (xi + 1)) per head; by hand, with d = 2 heads of 4, E = 2 w N - w (w + 1).
    def by_hand(N, w, r, xi):
        edges, D, heads = 2 * w * N - w * (w + 1), 4, 2
        first_layer = 2 * N * heads * xi * D  # of targets and of sources, on 4 features a head
        projections = 2 * N * 8 * 8
        return 2 * (first_layer + projections + heads * edges * (xi * (r * D + 2) + 2 * r * D))

    for change in ({}, {"N": 60}, {"w": 5}, {"r": 2}, {"xi": 32}, {"N": 77, "w": 3, "r": 1}):
        sizes = {"N": 30, "w": 2, "r": 4, "xi": 16} | change
        assert consensus(**sizes) == by_hand(**sizes)


@pytest.mark.parametrize("update", ["energy", "target"])
def test_a_backward_pass_of_consensus_counts_three_times_its_network(update):
    N, D, r, xi = 12, 8, 2, 16
    graph = ga.window_path_graph(N, 2)
    layer = ga.nn.SelfConsensus(D, heads=1, rank=r, edge_hidden=xi, update=update)
    x = torch.randn(N, D)
    with FlopCounterMode(display=False) as counter:
        layer(x, graph).sum().backward()
    of = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    E = graph.num_edges
    assert of["graphattn.consensus"] == 2 * E * (xi * (r * D + 2) + 2 * r * D)
    assert of["graphattn.consensus_backward"] == 2 * E * (3 * xi * (r * D + 2) + 5 * r * D)


LAYERS = {
    "dot": lambda **o: ga.nn.DotProductAttention(16, 4, top_k=3, **o),
    "krause": lambda **o: ga.nn.KrauseAttention(16, 4, **o),
    "gka": lambda **o: ga.nn.GaussianKernelAttention(16, 4, **o),
    "consensus": lambda **o: ga.nn.SelfConsensus(16, 4, edge_hidden=8, **o),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_count_is_that_of_the_mathematics_not_of_the_backend(name):
    x, graph = torch.randn(2, 12, 16), ga.window_path_graph(12, 2)
    counts = {
        backend: ga.diagnostics.flops(LAYERS[name](backend=backend), x, graph)
        for backend in ("auto", "reference", "structured")
    }
    assert len(set(counts.values())) == 1
    layer = LAYERS[name](backend="reference")
    ga.diagnostics.flops(layer, x, graph)
    assert layer.backend == "reference"  # left as it was


@pytest.mark.parametrize("name", LAYERS)
def test_counting_changes_no_bit_of_the_output(name):
    torch.manual_seed(0)
    layer, graph = LAYERS[name](), ga.window_path_graph(12, 2)
    x = torch.randn(2, 12, 16, requires_grad=True)

    def run():
        x.grad = None
        layer.zero_grad()
        out = layer(x, graph)
        out.square().sum().backward()
        return [out, x.grad, *(p.grad for p in layer.parameters())]

    plain = run()
    with FlopCounterMode(display=False):
        watched = run()
    assert torch.equal(plain[0], watched[0])
    for a, b in zip(plain, watched, strict=True):  # three gradients of one tensor have no order
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


class Watching(TorchDispatchMode):
    """A mode of the dispatcher (FlopCounterMode itself refuses autograd.grad)."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", LAYERS)
def test_second_derivatives_are_there_while_somebody_counts(name):
    torch.manual_seed(0)
    layer, graph = LAYERS[name]().double(), ga.window_path_graph(6, 1)
    x = torch.randn(6, 16, dtype=torch.float64, requires_grad=True)

    def second():
        (first,) = torch.autograd.grad(layer(x, graph).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    plain = second()
    with Watching() as mode:
        watched = second()
    assert any("graphattn" in name for name in mode.seen)
    torch.testing.assert_close(watched, plain)


def test_modules_are_told_apart():
    model = ga.models.SequenceEncoder(11, 16, depth=2, heads=4, mixer="mix", edge_hidden=8)
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(11, (2, 9)))
    of = counter.get_flop_counts()
    assert torch.ops.graphattn.attention in of["SequenceEncoder.blocks.0.mixer"]
    assert torch.ops.graphattn.consensus in of["SequenceEncoder.blocks.1.mixer"]


META = """
import torch, graphattn as ga
with torch.device("meta"):
    layer, x = ga.nn.GaussianKernelAttention(8, heads=2), torch.empty(10, 8)
graph = ga.complete_graph(10).to("meta")
assert ga.diagnostics.flops(layer, x, graph) == 2 * 10 * 8 * 8 + 4 * 100 * 8
"""


@pytest.mark.long
def test_meta_tensors_count_in_a_process_that_has_counted_nothing_yet():
    subprocess.run([sys.executable, "-c", META], check=True)


COUNT = """
from torch.utils.flop_counter import FlopCounterMode
{mode_first}
import torch, graphattn as ga
x = torch.randn(5, 1, 4)
{mode_later}
with mode:
    ga.rbf_attention(x, x, x, ga.complete_graph(5), 1.0)
assert mode.get_total_flops() == 2 * 2 * 25 * 4, mode.get_total_flops()
"""


@pytest.mark.long
@pytest.mark.parametrize("first", [True, False])
def test_a_counter_made_before_the_first_call_counts(first):
    make = "mode = FlopCounterMode(display=False)"
    script = COUNT.format(mode_first=make if first else "", mode_later="" if first else make)
    subprocess.run([sys.executable, "-c", script], check=True)


class Own(ga.nn.KrauseAttention):
    def log_affinity(self, query_i, key_j):
        return -(query_i - key_j).abs().sum(-1)


def test_what_nobody_can_count_is_named():
    layer, x, graph = Own(16, 4), torch.randn(12, 16), ga.window_path_graph(12, 2)
    with pytest.warns(UserWarning, match=r"Own with its own log_affinity\(\)"):
        operations = ga.diagnostics.flops(layer, x, graph)
    assert operations == 2 * 4 * 12 * 16 * 16  # its projections


def test_an_operation_by_name_of_reference_is_named():
    class Model(nn.Module):
        def forward(self, x):
            return ga.rbf_attention(x, x, x, ga.complete_graph(5), 1.0, backend="reference")

    with pytest.warns(UserWarning, match="backend='reference'"):
        assert ga.diagnostics.flops(Model(), torch.randn(5, 1, 4)) == 0


@pytest.mark.parametrize("training", [True, False])
def test_torchs_own_attention_counts_on_a_cpu(training):
    model = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).train(training)
    per_token = 2 * (4 * 16 * 16 + 2 * 16 * 32)
    operations = ga.diagnostics.flops(model, torch.randn(2, 10, 16))
    assert operations == 2 * (10 * per_token + 4 * 10 * 10 * 16)


def test_counting_leaves_random_numbers_and_gradients_alone():
    model = ga.models.SequenceEncoder(11, 16, depth=1, heads=4, dropout=0.5)
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    ga.diagnostics.flops(model, torch.randint(11, (1, 9), generator=torch.Generator()))
    assert torch.equal(torch.rand(3), expected)
    assert all(p.grad is None for p in model.parameters())


def test_bad_models_are_refused():
    for function in (ga.diagnostics.flops, ga.diagnostics.activation_memory):
        with pytest.raises(ValueError, match=r"model must be a torch\.nn\.Module"):
            function(lambda x: x, torch.randn(3))


# Memory.


def test_a_perceptron_keeps_what_its_backward_reads():
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    x = torch.randn(5, 8)
    # The input is there anyway; GELU keeps its input, the second product its output.
    assert ga.diagnostics.activation_memory(model, x) == 2 * 5 * 32 * 4
    assert ga.diagnostics.activation_memory(model.double(), x.double()) == 2 * 5 * 32 * 8


def test_attention_keeps_no_number_per_edge():
    layer = ga.nn.DotProductAttention(16, heads=4)
    x = torch.randn(2, 300, 16)
    narrow, wide = ga.window_path_graph(300, 2), ga.complete_graph(300)
    of = [ga.diagnostics.activation_memory(layer, x, graph) for graph in (narrow, wide)]
    assert max(of) < 2 * 300 * 4 * (6 * 16 + 3 * 4)  # a few tensors of the tokens
    by_message = ga.nn.DotProductAttention(16, heads=4, backend="reference")
    assert ga.diagnostics.activation_memory(by_message, x, wide) > 2 * wide.num_edges * 4 * 4 * 4


def test_activation_memory_is_what_autograd_saved_by_a_count_of_its_own():
    model = ga.models.SequenceEncoder(11, 16, depth=2, heads=4, mixer="mix", edge_hidden=8)
    tokens = torch.randint(11, (2, 9))
    weights = {p.data_ptr() for p in model.parameters()} | {tokens.data_ptr()}
    seen = {}

    def pack(x):
        if x.untyped_storage().data_ptr() not in weights:
            seen[x.untyped_storage().data_ptr()] = (x.untyped_storage().nbytes(), x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = model(tokens)
    assert out.requires_grad
    expected = sum(n for n, _ in seen.values())
    assert ga.diagnostics.activation_memory(model, tokens) == expected > 0


def test_checkpointing_keeps_less():
    class Checkpointed(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def forward(self, x, graph):
            return checkpoint(self.block, x, graph, use_reentrant=False)

    block, graph = ga.nn.PreNormBlock(ga.nn.SelfConsensus(16, 4)), ga.window_path_graph(20, 2)
    x = torch.randn(2, 20, 16, requires_grad=True)
    plain = ga.diagnostics.activation_memory(block, x, graph)
    assert ga.diagnostics.activation_memory(Checkpointed(block), x, graph) < plain / 4

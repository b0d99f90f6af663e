"""RotaryEmbedding turns pairs of features, and scores depend on relative positions only."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nn_by_hand import DIM, HEADS, rotate

import graphattn as ga


@pytest.mark.parametrize("dim", [2, 4, 64])
@pytest.mark.parametrize("base", [10000.0, 500000.0, 2.0])
def test_rotation_is_a_product_of_complex_numbers(dim, base):
    x = torch.randn(2, 7, 3, dim, dtype=torch.float64)
    rotary = ga.nn.RotaryEmbedding(dim, base=base)
    for positions in (torch.arange(7), torch.randint(0, 1000, (2, 7)), torch.rand(7) * 30):
        torch.testing.assert_close(rotary(x, positions), rotate(x, positions, base))
    torch.testing.assert_close(rotary(x), rotate(x, torch.arange(7), base))


@settings(max_examples=30, deadline=None)
@given(shift=st.integers(-(10**6), 10**6), seed=st.integers(0, 1000))
def test_scores_depend_on_the_difference_of_positions_only(shift, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 5, 1, 8, generator=generator, dtype=torch.float64)
    i, j = torch.randint(0, 500, (2, 5), generator=generator)
    rotary = ga.nn.RotaryEmbedding(8)
    near = (rotary(q, i) * rotary(k, j)).sum(-1)
    far = (rotary(q, i + shift) * rotary(k, j + shift)).sum(-1)
    torch.testing.assert_close(far, near, rtol=1e-8, atol=1e-8)


@settings(max_examples=30, deadline=None)
@given(position=st.integers(0, 10**6), seed=st.integers(0, 1000))
def test_rotation_keeps_norms_and_its_transpose_undoes_it(position, seed):
    x = torch.randn(1, 2, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rotary, positions = ga.nn.RotaryEmbedding(8), torch.tensor([position])
    turned = rotary(x, positions)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(rotary(turned, positions, back=True), x)


def test_position_zero_turns_nothing_bit_by_bit():
    x = torch.randn(4, 2, 8)
    assert torch.equal(ga.nn.RotaryEmbedding(8)(x, torch.zeros(4, dtype=torch.long)), x)


def test_float32_is_accurate_at_position_one_million():
    """An angle kept in float32 would be off by 0.03 there."""
    x, positions = torch.randn(4, 2, 64), torch.arange(10**6, 10**6 + 4)
    exact = rotate(x.double(), positions, 10000.0)
    error = (ga.nn.RotaryEmbedding(64)(x, positions) - exact).abs().max()
    assert error < 2e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_rounded_once(dtype):
    x, positions = torch.randn(50, 2, 64).to(dtype), torch.arange(50)
    out = ga.nn.RotaryEmbedding(64)(x, positions)
    assert out.dtype == dtype
    exact = rotate(x.double(), positions, 10000.0)
    assert ((out - exact).abs() <= torch.finfo(dtype).eps * exact.abs() + 1e-6).all()


def test_a_rotary_embedding_has_no_parameters_and_no_state():
    rotary = ga.nn.RotaryEmbedding(8, base=100.0)
    assert not list(rotary.parameters())
    assert rotary.state_dict() == {}
    x = torch.randn(3, 1, 8)
    assert torch.equal(copy.deepcopy(rotary)(x), rotary(x))


LAYERS = {
    "dot": (lambda: ga.nn.DotProductAttention(DIM, HEADS, rope=True)),
    "krause": (lambda: ga.nn.KrauseAttention(DIM, HEADS, rope=True, top_k=3)),
    "gaussian": (lambda: ga.nn.GaussianKernelAttention(DIM, HEADS, rope=True)),
    "consensus": (lambda: ga.nn.SelfConsensus(DIM, HEADS, rope=True, edge_hidden=6)),
    "isometric": (lambda: ga.nn.SelfConsensus(DIM, HEADS, rope="isometric", edge_hidden=6)),
}


def test_dot_product_attention_does_not_notice_that_all_positions_move_along():
    layer, graph = LAYERS["dot"]().double(), ga.window_path_graph(9, 2)
    x = torch.randn(2, 9, DIM, dtype=torch.float64)
    moved = layer(x, graph, positions=graph.positions + 12345)
    torch.testing.assert_close(moved, layer(x, graph), rtol=1e-8, atol=1e-8)


def test_krause_weights_do_not_notice_that_all_positions_move_along():
    layer, graph = LAYERS["krause"]().double(), ga.causal_window_graph(9, 5)
    x = torch.randn(2, 9, DIM, dtype=torch.float64)
    _, near = layer(x, graph, return_attention_weights=True)
    positions = graph.positions + 12345
    _, far = layer(x, graph, positions=positions, return_attention_weights=True)
    torch.testing.assert_close(far, near, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_positions_restart_in_every_part_of_a_batch(name, backend):
    layer = LAYERS[name]().double()
    sizes = (4, 1, 7)
    packed = ga.batch([ga.complete_graph(n) for n in sizes])
    x = torch.randn(sum(sizes), DIM, dtype=torch.float64)
    with ga.use_backend(backend):
        out = layer(x, packed).split(sizes)
        for part, alone, n in zip(out, x.split(sizes), sizes, strict=True):
            torch.testing.assert_close(part, layer(alone, ga.complete_graph(n)))


def test_sources_have_positions_of_their_own_on_a_bipartite_graph():
    """A context whose tokens sit at 0, 10, 20, ... is a context spread over a longer sequence."""
    layer = ga.nn.DotProductAttention(DIM, HEADS, rope=True).double()
    x, context = torch.randn(9, DIM).double(), torch.randn(6, DIM).double()
    places = (torch.arange(9), torch.arange(6) * 10)
    graph = ga.bipartite_complete_graph(9, 6)
    sparse = torch.zeros(60, DIM, dtype=torch.float64).index_copy(0, places[1], context)
    edges = torch.stack([places[1].repeat(9), torch.arange(9).repeat_interleave(6)])
    expected = layer(x, ga.from_edge_index(edges, 9, 60), sparse)
    torch.testing.assert_close(layer(x, graph, context, positions=places), expected)
    torch.testing.assert_close(layer(x, graph, context, positions=(None, places[1])), expected)


def test_true_is_the_embedding_of_base_10000():
    x, graph = torch.randn(9, DIM), ga.complete_graph(9)
    layers = [
        ga.nn.KrauseAttention(DIM, HEADS, rope=rope)
        for rope in (True, ga.nn.RotaryEmbedding(DIM // HEADS, base=10000.0))
    ]
    layers[1].load_state_dict(layers[0].state_dict())
    assert torch.equal(layers[0](x, graph), layers[1](x, graph))

"""Layers: what a token does not see changes no bit of what comes out, nor of its gradients."""

import os

import pytest
import torch

import graphattn as ga

CASES = int(os.environ.get("GRAPHATTN_CASES", "40"))
BAD = (torch.nan, torch.inf, 1e20, 1e10, 300.0)

LAYERS = {
    "Krause": lambda: ga.nn.KrauseAttention(8, 2, top_k=2, rope=True),
    "Krause, grouped queries": lambda: ga.nn.KrauseAttention(8, 4, kv_heads=2),
    "Gaussian kernel": lambda: ga.nn.GaussianKernelAttention(8, 2, normalize=True, eps=0.1),
    "dot product": lambda: ga.nn.DotProductAttention(8, 2, rope=True),
    "dot product, top-k": lambda: ga.nn.DotProductAttention(8, 2, top_k=2),
    "linear": lambda: ga.nn.LinearAttention(8, 2),
    "linear, grouped queries": lambda: ga.nn.LinearAttention(8, 4, kv_heads=2, rope=True),
    "consensus": lambda: ga.nn.SelfConsensus(8, 2, update="target"),
    "consensus, automatic step": lambda: ga.nn.SelfConsensus(
        8, 2, update="target", step_size="auto"
    ),
}


def graph_and_order(seed: int) -> tuple[ga.TokenGraph, torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    n, w = (
        int(torch.randint(low, high, (), generator=generator)) for low, high in ((8, 50), (1, 9))
    )
    graphs = (
        lambda: ga.causal_graph(n),
        lambda: ga.causal_window_graph(n, w),
        lambda: ga.window_path_graph(n, w, self_loops=True),
        lambda: ga.window_path_graph(n, w),
        lambda: ga.block_window_graph(n, w),
        lambda: ga.longformer_graph(n + 120, w, [0]),
        lambda: ga.knn_graph(torch.randn(n, 2, generator=generator), 3),
        lambda: ga.grid_window_graph(3, n // 3, 1),
        lambda: ga.batch([ga.complete_graph(n), ga.causal_window_graph(n, w), ga.causal_graph(5)]),
    )
    return graphs[seed % len(graphs)](), generator


@pytest.mark.filterwarnings("ignore:.*backward")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
def test_what_a_token_does_not_see_changes_no_bit_of_a_layer(name, dtype):
    for seed in range(-(-CASES // 3)):
        graph, generator = graph_and_order(seed)
        torch.manual_seed(seed)
        layer = LAYERS[name]().to(dtype)
        N = graph.num_targets
        x = torch.randn(2, N, 8, generator=generator).to(dtype)
        place = int(torch.randint(N, (), generator=generator))
        blind = ~graph.to_mask()[:, place]
        blind[place] = False
        results = []
        for content in (None, BAD[seed % len(BAD)]):
            leaf = x.clone()
            if content is not None:
                leaf[:, place] = content
            leaf.requires_grad_()
            y = layer(leaf, graph)[:, blind]
            (gradient,) = torch.autograd.grad(y.square().sum(), leaf)
            results.append((y, gradient))
        (y, gradient), (other, moved) = results
        there = torch.arange(N) != place
        if name == "linear":  # its products go another way beside a NaN, where not all bits agree
            torch.testing.assert_close(y, other)
            torch.testing.assert_close(gradient[:, there], moved[:, there])
            continue
        assert torch.equal(y, other), (name, seed)
        if "consensus" in name:
            continue  # promises no gradient beside a NaN
        assert torch.equal(gradient[:, there], moved[:, there]), (name, seed)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e30])
@pytest.mark.parametrize("name", ["Krause", "dot product", "dot product, top-k", "linear"])
def test_what_one_text_holds_changes_no_bit_of_another_that_is_generated_beside_it(name, bad):
    torch.manual_seed(0)
    layer = LAYERS[name]()
    prompt, steps = torch.randn(3, 9, 8), torch.randn(5, 3, 8)
    spoilt = prompt.clone()
    spoilt[1, 4] = bad
    results = []
    for x in (prompt, spoilt):
        cache = layer.init_cache(batch=3, window=6)
        with torch.no_grad():
            results.append([layer.step(x, cache), *(layer.step(step, cache) for step in steps)])
    for before, after in zip(*results, strict=True):
        assert torch.equal(before[[0, 2]], after[[0, 2]])


def test_a_value_that_is_not_kept_reaches_no_bit_of_the_text_or_of_others():
    """A NaN in the cache of one text sends no other another way."""
    torch.manual_seed(0)
    layer = ga.nn.KrauseAttention(128, 4, kv_heads=2, top_k=30)
    query, key, value = torch.randn(6, 2, 32), torch.randn(6, 90, 32), torch.randn(6, 90, 32)
    with torch.no_grad():
        clean = layer.fused_row(query, key, value, None)
        worst = layer.row_logits(query, key)[2].sum(0).argmin()
        value[2, worst] = torch.nan
        assert torch.equal(layer.fused_row(query, key, value, None), clean)

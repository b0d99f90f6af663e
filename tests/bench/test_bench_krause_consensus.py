"""Rows of `graphattn bench` for top-k in windows, consensus layers and streams of tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bench_helpers import CPU, error_of

import graphattn as ga
from graphattn.bench.cases import catalogue as cases
from graphattn.bench.cases import inputs
from graphattn.bench.cases import least_work as work
from graphattn.bench.contenders import consensus as consensus_contenders
from graphattn.bench.contenders import flex, ours
from graphattn.bench.contenders import peers as contenders
from graphattn.bench.measuring import correctness as gate
from graphattn.bench.measuring import memory

CASES = {case.name: case for case in cases.CASES}
KRAUSE = {"tokens": 300, "window": 40, "top_k": 12, "heads": 2, "features": 16}
LAYER = {"batch": 2, "tokens": 20, "window": 2, "dim": 24, "heads": 2, "edge_hidden": 8, "rank": 3}
STREAM = {"batch": 3, "window": 64, "top_k": 32, "dim": 64, "heads": 4, "early": 5, "late": 100}


def inputs_of(name: str, size: dict[str, int], dtype: torch.dtype = torch.float32):
    return CASES[name].make(size, CPU, dtype)


# Top-k in windows.


GRAPHS = {
    "causal": ga.causal_window_graph(300, 40),
    "centred": ga.window_path_graph(300, 20, self_loops=True),
    "others only": ga.window_path_graph(300, 20),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_what_is_chosen_before_are_the_sources_with_a_weight(name):
    x = replace(inputs_of("krause", KRAUSE), graph=GRAPHS[name], prepared={})
    weights = ga.attention_weights(x.query, x.key, x.graph, sigma=x.sigma, top_k=12)
    expected = torch.zeros(2, 300, 300, dtype=torch.bool)
    source, target = x.graph.edge_index
    expected[:, target, source] = (weights > 0).T

    kept = flex.kept_in_window(x)[0]
    chosen = torch.zeros_like(expected)
    head, i, place = kept.nonzero().T
    chosen[head, i, i + place - x.graph.structure.before] = True
    assert torch.equal(chosen, expected)
    assert chosen.sum(-1).unique().tolist()[-1] == 12


def test_of_equally_near_sources_the_first_are_chosen_before():
    x = inputs_of("krause", KRAUSE)
    same = [torch.ones_like(t) for t in (x.query, x.key)]
    kept = flex.kept_in_window(replace(x, query=same[0], key=same[1]))
    assert bool(kept[0, :, -1, :12].all())
    assert not bool(kept[0, :, -1, 12:].any())
    assert bool(kept[0, :, 0, -1].all())  # a token without a past sees itself
    assert kept[0, 0, 0].sum() == 1


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [None, 2])
def test_flex_attention_over_what_was_chosen_before_is_krause_attention(
    dtype, batch, flex_on_a_cpu
):
    size = KRAUSE if batch is None else {**KRAUSE, "batch": batch}
    x = inputs_of("krause", size, dtype)
    limit = 1e-5 if dtype == torch.float32 else gate.ALLOWED[dtype]
    assert error_of(flex.flex_kept, x) < limit
    assert error_of(flex.flex_rbf, x) > gate.ALLOWED[dtype]  # no top-k
    mask = x.prepared["kept_mask"]
    flex.flex_kept(x)
    assert x.prepared["kept_mask"] is mask  # made once


def test_what_is_chosen_before_is_looked_for_in_windows_only():
    x = replace(inputs_of("krause", KRAUSE), graph=ga.causal_graph(300).to_pyg())
    for graph in (ga.dilated_window_graph(300, 4, 2), ga.knn_graph(torch.randn(300, 3), 4)):
        with pytest.raises(inputs.MissingError, match="only in windows"):
            flex.kept_in_window(replace(x, graph=graph))


def test_masked_dense_chooses_by_distances_in_float32():
    """Masked dense attention in bfloat16 chooses its top-k by distances in float32.

    In bfloat16 alone, sources at different distances from a target seem equally far: more than k
    stay.
    """
    x = inputs_of("krause", {**KRAUSE, "tokens": 512, "window": 256, "top_k": 192}, torch.bfloat16)
    weight = contenders.masked_dense(
        replace(x, value=torch.eye(512, dtype=torch.bfloat16)[:, None].expand(-1, 2, -1))
    )
    sources = x.graph.in_degree().clamp(max=192)[:, None].expand(-1, 2)
    assert torch.equal((weight > 0).sum(-1), sources)
    logits = contenders._logits(*(t.transpose(0, 1) for t in (x.query, x.key)), x.sigma)
    logits = logits.masked_fill(~x.graph.to_mask(), -torch.inf)
    stay = (logits >= logits.topk(192).values[..., -1:]).sum(-1)
    assert (stay[:, 192:] > 192).any()


def test_products_in_tf32_are_those_of_before_afterwards():
    before = torch.get_float32_matmul_precision()
    with contenders.products_in_tf32():
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before


# Consensus layers.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_message_passing_is_the_layer_with_the_same_weights(dtype):
    x = inputs_of("consensus-layer", LAYER, dtype)
    limit = 1e-5 if dtype == torch.float32 else gate.ALLOWED[dtype]
    for run in (ours.layer, consensus_contenders.gather_scatter_layer):
        assert error_of(run, x) < limit


def test_the_truth_of_a_few_rows_of_a_layer_is_that_of_all():
    x = inputs_of("consensus-layer", {**LAYER, "tokens": 60})
    truth = gate.truth_of(x, backward=True)
    assert len(truth.rows) < 60
    twin = replace(x, layer=x.layer.double(), tokens=x.tokens.detach().double().requires_grad_())
    with ga.use_backend("reference"):
        out = twin.layer(twin.tokens, twin.graph)[:, truth.rows]
    torch.testing.assert_close(truth.out, out.detach(), rtol=0, atol=1e-12)
    gradients = torch.autograd.grad((out * truth.loss).sum(), twin.learned())
    torch.testing.assert_close(truth.gradients, list(gradients), rtol=0, atol=1e-10)


@pytest.mark.parametrize("part", ["source_proj.weight", "edge_net.target.bias", "edge_net.shear"])
def test_a_layer_without_the_gradient_of_a_weight_is_wrong(part):
    x = inputs_of("consensus-layer", LAYER)
    truth = gate.truth_of(x, backward=True)

    def stopped(x):
        parameters = dict(x.layer.named_parameters())
        parameters[part] = parameters[part].detach() + 0 * parameters[part]
        return torch.func.functional_call(x.layer, parameters, (x.tokens, x.graph))

    value, gradient = truth.errors_of(stopped)
    assert value < 1e-5
    assert gradient == pytest.approx(1.0)


def test_a_layer_whose_edges_would_not_fit_is_not_tried(monkeypatch):
    monkeypatch.setattr(contenders, "free_memory", lambda device: 1e4)
    with pytest.raises(inputs.MissingError, match="its edge networks would need about"):
        consensus_contenders.gather_scatter_layer(inputs_of("consensus-layer", LAYER))


@pytest.mark.long
def test_the_peak_of_a_layer_is_that_of_message_passing_over_its_edges():
    """Three times the matrices Lambda of all edges at least, in a process of its own."""
    size = {**LAYER, "tokens": 512, "dim": 128, "heads": 4, "edge_hidden": 64, "rank": 4}
    lambdas = 4 * 2 * ga.window_path_graph(512, 2).num_edges * 4 * 128
    peak = memory.Peak().of("consensus-layer", "gather/scatter", size, backward=True)
    assert peak is not None
    assert 3 * lambdas <= peak < 30 * lambdas


# Streams.


def test_the_same_seed_gives_a_stream_of_one_text_with_and_without_a_batch():
    alone = {name: n for name, n in STREAM.items() if name != "batch"}
    streams = [inputs_of("streaming-krause", size).late for size in (alone, {**alone, "batch": 1})]
    assert torch.equal(streams[0].tokens, streams[1].tokens)
    assert streams[0].cache.batch == (1,)


def test_a_batch_of_streams_is_right_in_every_text_and_wrong_if_one_is():
    x = inputs_of("streaming-krause", STREAM)
    truth = gate.truth_of(x, backward=False)
    assert truth.errors_of(ours.late_step)[0] < 1e-5
    assert truth.errors_of(ours.early_step)[0] < 1e-5

    def first_text_everywhere(x):
        return x.late.step()[:1].expand(3, -1)

    assert truth.errors_of(first_text_everywhere)[0] > 0.1


@pytest.mark.long
def test_which_keys_a_stream_is_to_keep_is_decided_by_what_its_cache_holds():
    """Keys in bfloat16 have other neighbours than they would have without rounding."""
    size = {"batch": 8, "window": 128, "top_k": 16, "dim": 128, "heads": 16, "early": 1,
            "late": 130}  # fmt: skip
    x = inputs_of("streaming-krause", size, torch.bfloat16)
    truth = gate.truth_of(x, backward=False)
    rounded = truth.errors_of(ours.late_step)[0]
    assert rounded < 1e-2
    for projection in (truth.layer.query_proj, truth.layer.key_proj):
        projection._forward_hooks.clear()
    assert truth.errors_of(ours.late_step)[0] > 2 * rounded


# Work.


def test_the_bound_of_a_layer_is_that_of_its_step_and_four_projections():
    """Two of [dim, dim], and two of [dim / H, xi] per head."""
    size = {**LAYER, "tokens": 100}
    tokens, weights = 2 * 100, 2 * 24 * 24 + 2 * 24 * 8 + 2 * 3 * 12 * 8
    for backward in (False, True):
        step, _ = work.consensus(size, 2, backward)
        flops, moved = work.consensus_layer(size, 2, backward)
        products = 2 * tokens * (2 * 24 * 24 + 2 * 24 * 8)
        assert flops - step == (3 if backward else 1) * products
        tensors = 5 if backward else 2  # read x, write y; read x and dy, write dx
        assert moved == 2 * (tensors * tokens * 24 + (3 if backward else 1) * weights)


def test_the_bound_of_a_batch_of_tokens_reads_the_weights_once():
    one, many = (work.stream_step({**STREAM, "batch": n}, 2, False) for n in (1, 5))
    assert many[0] == 5 * one[0]
    weights = 2 * 4 * 64**2
    assert many[1] - weights == 5 * (one[1] - weights)

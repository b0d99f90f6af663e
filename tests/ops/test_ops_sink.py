"""Attention sinks: a logit per head that joins the denominator and brings no value."""

import pytest
import torch
from cases_ops import BACKENDS, FEW, GRAPHS, SIGMA, attend, qkv
from oracle_ops import attention, per_edge

import graphattn as ga

TIGHT = {"rtol": 1e-12, "atol": 1e-12}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("score", SIGMA)
@pytest.mark.parametrize("name", GRAPHS)
def test_a_sink_joins_the_denominator_on_every_graph(name, score, backend):
    graph = GRAPHS[name]()
    q, k, v = qkv(graph, batch=(2,), heads=4, kv_heads=2)
    sink = torch.tensor([0.3, -2.0, 5.0, -torch.inf], dtype=torch.float64)
    for top_k in (None, 2):
        given = {"top_k": top_k, "sink": sink}
        found, lse = attend(score, q, k, v, graph, backend=backend, return_lse=True, **given)
        expected = attention(q, k, v, graph.to_mask(), **SIGMA[score], **given)
        # without the sink
        torch.testing.assert_close((found, lse), expected[:2], **TIGHT)
        weights = ga.attention_weights(q, k, graph, **SIGMA[score], **given)
        torch.testing.assert_close(weights, per_edge(expected.weights, graph.to_mask()), **TIGHT)


@pytest.mark.parametrize("eps", [0.0, 0.2])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FEW)
def test_gradients_reach_the_sink_and_pass_through_the_log_sums(name, backend, eps):
    graph = GRAPHS[name]()
    q, k, v = (x.requires_grad_() for x in qkv(graph))
    sink = torch.tensor([0.4, -1.1], dtype=torch.float64, requires_grad=True)

    def run(q, k, v, sink):
        out, lse = ga.rbf_attention(
            q, k, v, graph, 1.1, eps=eps, sink=sink, return_lse=True, backend=backend
        )
        return out, lse.masked_fill(lse == -torch.inf, 0)

    assert torch.autograd.gradcheck(run, (q, k, v, sink))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("eps", [0.0, 0.5])
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_edges_and_heads_without_sinks_stay_what_they_are(backend, eps, dtype):
    graph = GRAPHS["isolated targets"]()
    q, k, v = (x.requires_grad_() for x in qkv(graph, dtype=dtype))
    sink = torch.tensor([-torch.inf, 0.5]).to(dtype).requires_grad_()
    out = ga.rbf_attention(q, k, v, graph, 1.0, eps=eps, sink=sink, backend=backend)
    without = ga.rbf_attention(q, k, v, graph, 1.0, eps=eps, backend=backend)
    torch.testing.assert_close(out[:, 0], without[:, 0])
    assert (out[[0, 3, 7]] == 0).all()
    out.float().square().sum().backward()
    for x in (q, k, v, sink):
        assert x.grad.isfinite().all()
    assert sink.grad[0] == 0
    assert sink.grad[1] != 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_sinks_far_above_and_below_all_logits(backend):
    graph = ga.complete_graph(4)
    q, k, v = (x.float().requires_grad_() for x in qkv(graph))
    for number, share in ((1e30, 0.0), (-1e30, 1.0)):
        sink = torch.full((2,), number, requires_grad=True)
        out = ga.dot_product_attention(q, k, v, graph, sink=sink, backend=backend)
        plain = ga.dot_product_attention(q, k, v, graph, backend=backend)
        torch.testing.assert_close(out, share * plain)
        gradients = torch.autograd.grad(out.sum(), (q, k, v, sink))
        assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_number_serves_all_heads_and_half_precision_is_rounded_once(backend):
    graph = ga.window_path_graph(9, 2)
    q, k, v = qkv(graph, dtype=torch.bfloat16)
    one = ga.dot_product_attention(q, k, v, graph, sink=0.25, backend=backend)
    assert torch.equal(
        one,
        ga.dot_product_attention(q, k, v, graph, sink=torch.tensor([0.25]), backend=backend),
    )
    exact = ga.dot_product_attention(*(x.float() for x in (q, k, v)), graph, sink=0.25)
    torch.testing.assert_close(one, exact.bfloat16(), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("sink", "says"),
    [
        (float("nan"), "sink must be finite, or -inf for none, got nan"),
        (torch.tensor([0.0, torch.inf]), r"sink must be finite, .* got \[0.0, inf\]"),
        (torch.zeros(3), r"sink must be .* broadcastable to \[2\] \(heads\), got shape \[3\]"),
        ("none", "sink must be a number or a tensor, got 'none'"),
        (True, "sink must be a number or a tensor, got True"),
    ],
    ids=str,
)
def test_sinks_that_are_refused(sink, says):
    graph = ga.complete_graph(3)
    q, k, v = qkv(graph)
    with pytest.raises(ValueError, match=says):
        ga.dot_product_attention(q, k, v, graph, sink=sink)
    with pytest.raises(ValueError, match=says):
        ga.rbf_attention(q, k, v, graph, 1.0, sink=sink)
    with pytest.raises(ValueError, match=says):
        ga.attention_weights(q, k, graph, sink=sink)


@pytest.mark.parametrize("given", [{"sink": 0.3}, {"eps": 0.7}], ids=str)
@pytest.mark.parametrize("kind", ["window", "list"])
def test_the_rest_of_the_batch_changes_no_bit_of_a_row(kind, given):
    generator = torch.Generator().manual_seed(0)
    graph = ga.causal_window_graph(21, 5)
    if kind == "list":
        graph = ga.knn_graph(torch.randn(21, 2, generator=generator), 5)
    for samples in (2, 3, 5):
        q, k, v = (torch.randn(samples, 21, 3, 8, generator=generator) for _ in range(3))
        whole = ga.rbf_attention(q, k, v, graph, 1.0, **given)
        for b in range(samples):
            alone = ga.rbf_attention(q[b], k[b], v[b], graph, 1.0, **given)
            assert torch.equal(whole[b], alone)

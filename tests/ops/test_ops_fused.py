"""Torch's fused attention as a backend: what it computes, what it refuses, what "auto" knows.

`pytest tests/ops/test_ops_fused.py --device cuda` compares values and gradients on a GPU.
"""

import pytest
import torch
from cases_ops import Largest, qkv, random
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import graphattn as ga
from graphattn.ops.attention import fused
from graphattn.ops.attention.backends import BACKENDS
from graphattn.ops.attention.calls import AttentionCall
from graphattn.ops.attention.logits.score import GaussianKernel
from graphattn.ops.backends import choose

GRAPHS = {
    "complete": lambda: ga.complete_graph(20),
    "fewer targets": lambda: ga.bipartite_complete_graph(7, 13),
    "causal": lambda: ga.causal_graph(33),
    "equal sequences": lambda: ga.batch([ga.complete_graph(5)] * 3),
    "equal causal sequences": lambda: ga.batch([ga.causal_graph(6)] * 2),
    "one token": lambda: ga.complete_graph(1),
    "one causal token": lambda: ga.causal_graph(1),
    "no tokens": lambda: ga.complete_graph(0),
    "no sources": lambda: ga.bipartite_complete_graph(3, 0),
}
OTHERS = {
    "more sources than targets": lambda: ga.causal_graph(9, past=3),
    "window": lambda: ga.causal_window_graph(9, 4),
    "no self loops": lambda: ga.complete_graph(9, self_loops=False),
    "listed": lambda: ga.from_edge_index(ga.complete_graph(9).edge_index, 9),
    "sequences of two lengths": lambda: ga.batch([ga.complete_graph(4), ga.complete_graph(5)]),
    "of two kinds": lambda: ga.batch([ga.complete_graph(4), ga.causal_graph(4)]),
}
# Heads, heads of keys, features, features of values; whether all heads have one scale, a number.
SIZES = [(4, 4, 8, 8, True), (4, 2, 5, 3, False), (2, 1, 16, 24, True), (3, 3, 64, 64, False)]


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    return "cuda" if request.config.getoption("--device") == "cuda" else "cpu"


def results(
    score: str,
    graph: ga.TokenGraph,
    tensors: list[Tensor],
    per_head: Tensor | float,
    backend: str,
    device: str = "cpu",
) -> list[Tensor]:
    """The output and all gradients; `per_head` is sigma, or 1 / scale."""
    graph = graph.to(device)
    leaves = [x.detach().clone().to(device).requires_grad_() for x in tensors]
    if isinstance(per_head, Tensor):
        dtype = torch.promote_types(tensors[0].dtype, torch.float32)
        per_head = per_head.detach().to(device, dtype)
        leaves.append(per_head.requires_grad_())
    if score == "rbf":
        out = ga.rbf_attention(*leaves[:3], graph, per_head, backend=backend)
    else:
        out = ga.dot_product_attention(*leaves[:3], graph, scale=1 / per_head, backend=backend)
    upstream = random(*out.shape, seed=7).to(out)
    found = torch.autograd.grad(out, leaves, upstream, materialize_grads=True)
    return [x.detach().cpu() for x in (out, *found)]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("score", ["dot", "rbf"])
def test_values_and_gradients_are_those_of_the_reference(score, name, sizes, device):
    heads, kv_heads, features, of_values, alike = sizes
    graph = GRAPHS[name]()
    tensors = [
        x + 3 * (score == "rbf")  # an offset that distances do not have
        for x in qkv(
            graph, batch=(2,), heads=heads, kv_heads=kv_heads, features=features,
            value_features=of_values,
        )
    ]  # fmt: skip
    per_head = 2.5 if alike else features**0.5 + random(heads, seed=5).abs()
    exact = results(score, graph, tensors, per_head, "reference")
    tolerances = {torch.float64: 1e-12, torch.float32: 3e-5}
    if device == "cuda":
        del tolerances[torch.float64]
    for dtype, tolerance in tolerances.items():
        mine = results(score, graph, [x.to(dtype) for x in tensors], per_head, "fused", device)
        for got, truth in zip(mine, exact, strict=True):
            # The gradient of a number per head is a sum over all edges whose terms cancel.
            error = tolerance * (20 if truth.dim() == 1 else 1)
            torch.testing.assert_close(got.double(), truth, rtol=error, atol=error)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["complete", "causal"])
def test_half_squares_keep_the_digits_of_float32_in_half_precision(name, dtype, device):
    """The error is at most twice that of differences computed in half precision, and a rounding.

    Half squares are up to 300 here; rounded to bfloat16 they would be wrong by 1.
    """
    graph = GRAPHS[name]()
    q, k, v = (x.to(dtype) for x in qkv(graph, features=64))
    k *= 0.5 + 2.5 * random(*k.shape[:2], 1, seed=9).sigmoid().to(dtype)  # of different lengths
    sigma = 1.0
    exact = ga.rbf_attention(*(x.double() for x in (q, k, v)), graph, sigma, backend="reference")
    mask = torch.as_tensor(graph.to_mask())[None]
    gap = (q.transpose(0, 1)[:, :, None] - k.transpose(0, 1)[:, None]).square().sum(-1)
    weights = (gap / (-2 * sigma**2)).masked_fill(~mask, -torch.inf).softmax(-1)
    plain = (weights @ v.transpose(0, 1)).transpose(0, 1)
    here = (x.to(device) for x in (q, k, v))
    mine = ga.rbf_attention(*here, graph.to(device), sigma, backend="fused").cpu()
    error, of_plain = ((x.double() - exact).norm() for x in (mine, plain))
    band = torch.finfo(dtype).eps * exact.norm()
    assert mine.dtype is dtype
    assert error <= 2 * (of_plain + band)


def test_half_squares_beyond_the_largest_number_of_float16_are_finite():
    x = 40 * random(12, 1, 64, seed=1).half()
    x[0] += 300  # half squares of up to 3e6
    out = ga.rbf_attention(x, x, x, ga.complete_graph(12), 1.0, backend="fused")
    torch.testing.assert_close(out, x)  # every token is far from all others


@pytest.mark.parametrize("scale", [-0.4, 0.0])
def test_a_scale_that_is_not_positive_is_no_matter(scale):
    q, k, v = qkv(ga.causal_graph(9))
    q = 300 * q  # the smallest product of a row is far from the largest
    mine, truth = (
        ga.dot_product_attention(q, k, v, ga.causal_graph(9), scale=scale, backend=backend)
        for backend in ("fused", "reference")
    )
    torch.testing.assert_close(mine, truth)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("score", ["dot", "rbf"])
def test_no_logits_of_all_pairs_are_stored(score, sizes):
    """Torch would store them for features that do not lie side by side, or of several widths."""
    heads, kv_heads, features, of_values, _ = sizes
    graph = ga.causal_graph(512)
    tensors = qkv(
        graph, heads=heads, kv_heads=kv_heads, features=features, value_features=of_values
    )
    apart = [x.transpose(0, 2).contiguous().transpose(0, 2) for x in tensors]
    assert all(x.stride(-1) != 1 for x in apart)
    with Largest() as largest:
        mine = results(score, graph, apart, 4.0, "fused")
    assert largest.numel < 512 * 512
    for got, truth in zip(mine, results(score, graph, tensors, 4.0, "structured"), strict=True):
        torch.testing.assert_close(got, truth)


@pytest.mark.parametrize("score", ["dot", "rbf"])
def test_gradients_can_be_differentiated(score):
    graph, found = ga.causal_graph(9), {}
    tensors = [*qkv(graph, kv_heads=1), torch.tensor([1.5, 2.0], dtype=torch.float64)]
    for backend in ("fused", "reference"):
        leaves = [x.detach().requires_grad_() for x in tensors]
        if score == "rbf":
            out = ga.rbf_attention(*leaves[:3], graph, leaves[3], backend=backend)
        else:
            out = ga.dot_product_attention(*leaves[:3], graph, scale=leaves[3], backend=backend)
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(d.square().sum() for d in first), leaves)
        found[backend] = [*first, *second]
    for mine, truth in zip(found["fused"], found["reference"], strict=True):
        torch.testing.assert_close(mine, truth)


@pytest.mark.parametrize("which", ["query", "key", "value"])
@pytest.mark.parametrize("score", ["dot", "rbf"])
def test_over_a_complete_graph_nan_reaches_the_rows_that_see_it(score, which):
    graph = ga.complete_graph(20)
    tensors = dict(zip(("query", "key", "value"), qkv(graph), strict=True))
    tensors[which][7, 1, 0] = torch.nan
    mine, truth = (
        results(score, graph, list(tensors.values()), 2.0, backend)
        for backend in ("fused", "reference")
    )
    assert torch.equal(mine[0].isnan().any(-1), truth[0].isnan().any(-1))
    for got, exact in zip(mine[1:], truth[1:], strict=True):
        assert not (exact.isnan() & ~got.isnan()).any()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"top_k": 2}, "no top_k"),
        ({"eps": 0.1}, "no log-sums"),
        ({"sink": 0.0}, "no log-sums"),
        ({"return_lse": True}, "no log-sums"),
        ({"dropout": 0.1}, "no dropout"),
        ({"valid": torch.arange(9) < 5}, "no mask of valid tokens"),
        ({"valid": (None, torch.arange(9) < 5)}, "no mask of valid tokens"),
        ({"edge_bias": torch.zeros(45, 2, dtype=torch.float64)}, "no edge_bias"),
    ],
)
def test_options_are_refused_with_the_reason(options, says):
    graph = ga.causal_graph(9)
    q, k, v = qkv(graph)
    plain = ga.rbf_attention(q, k, v, graph, 1.0, backend="fused")
    with pytest.raises(ValueError, match=f"'fused' cannot run this case: .*{says}"):
        ga.rbf_attention(q, k, v, graph, 1.0, backend="fused", **options)
    # What was found out about one call is not taken for the other.
    assert torch.equal(ga.rbf_attention(q, k, v, graph, 1.0, backend="fused"), plain)


@pytest.mark.parametrize("name", OTHERS)
def test_other_graphs_are_refused(name):
    graph = OTHERS[name]()
    query = torch.zeros(graph.num_targets, 2, 4)
    assert "complete and causal graphs" in str(ga.backends("rbf_attention", graph, query)["fused"])


def test_scores_of_your_own_and_steps_are_refused():
    class Own(ga.Score):
        def edges(self, query, key):
            return -(query - key).abs().sum(-1)

    q, k, v = qkv(ga.causal_graph(9))
    with pytest.raises(ValueError, match="not the score Own"):
        ga.score_attention(q, k, v, ga.causal_graph(9), Own(), backend="fused")
    layer = ga.nn.DotProductAttention(8, heads=2, backend="fused")
    with pytest.raises(ValueError, match="no steps of generation"):
        layer.step(torch.zeros(1, 8), layer.init_cache(1, window=4))


@pytest.mark.parametrize(
    ("op", "dtype", "features", "says"),
    [
        ("dot_product_attention", torch.float64, 64, "float64 on a CPU alone"),
        ("dot_product_attention", torch.float32, 257, "256 features, not 264"),
        ("dot_product_attention", torch.bfloat16, 256, None),
        ("rbf_attention", torch.bfloat16, 254, None),  # as far as its support can tell
    ],
)
def test_on_other_devices_no_logits_are_stored(op, dtype, features, says):
    query = torch.zeros(9, 2, features, dtype=dtype, device="meta")
    reason = ga.backends(op, ga.causal_graph(9), query)["fused"]
    assert says in reason if says else reason is None


def test_auto_takes_what_was_measured_to_be_the_fastest(monkeypatch):
    """A GPU of which there is a record, from so many tokens on, over complete graphs."""
    monkeypatch.setattr(fused, "capability", lambda device: (9, 0))

    def chosen(graph: ga.TokenGraph, query: Tensor) -> str:
        call = AttentionCall(query, query, query, graph, GaussianKernel(1.0))
        return choose(BACKENDS, call, "auto").name

    assert chosen(ga.complete_graph(64), torch.zeros(64, 2, 8)) in ("native", "structured")
    with FakeTensorMode(allow_non_fake_inputs=True):
        many = torch.empty(64, 2, 8, device="cuda")
    complete, causal = ga.complete_graph(64), ga.causal_graph(64)
    assert chosen(complete, many) != "fused"  # nothing was measured
    monkeypatch.setitem(fused.FEWEST, ((9, 0), "rbf"), 64)
    assert chosen(complete, many) == "fused"
    assert chosen(causal, many) != "fused"
    assert chosen(ga.batch([ga.complete_graph(32)] * 2), many) != "fused"  # of 32 tokens each
    monkeypatch.setitem(fused.FEWEST, ((9, 0), "rbf"), 65)
    assert chosen(complete, many) != "fused"
    monkeypatch.setattr(fused, "capability", lambda device: (8, 0))
    assert chosen(complete, many) != "fused"


@pytest.mark.long
@pytest.mark.parametrize("build", [ga.causal_graph, lambda n: ga.batch([ga.complete_graph(n)] * 2)])
@pytest.mark.parametrize("kind", [ga.nn.GaussianKernelAttention, ga.nn.DotProductAttention])
def test_a_layer_is_compiled_twice_for_all_lengths_and_exported(kind, build):
    layer = kind(16, heads=2, backend="fused")
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for n in (8, 12, 20):
        graph = build(n)
        x = torch.randn(2, graph.num_targets, 16, requires_grad=True)
        mine, theirs = compiled(x, graph), layer(x, graph)
        torch.testing.assert_close(mine, theirs)
        for a, b in zip(*(torch.autograd.grad(y.sum(), x) for y in (mine, theirs)), strict=True):
            torch.testing.assert_close(a, b)
    assert counter.frame_count <= 2

    class Whole(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return layer(x, graph)

    whole = Whole()
    whole.layer = layer  # a trace takes the parameters of a module
    programs = torch.export.export(whole, (x,)).module(), torch.jit.trace(whole, (x,))
    for program in programs:
        torch.testing.assert_close(program(x), layer(x, graph))


def test_checkpoints_and_autocast_change_nothing():
    graph, layer = ga.causal_graph(12), ga.nn.GaussianKernelAttention(16, 2, backend="fused")
    x = torch.randn(2, 12, 16, requires_grad=True)

    def gradient(run) -> Tensor:
        x.grad = None
        run(x, graph).square().sum().backward()
        return x.grad

    plain = gradient(layer)
    for reentrant in (False, True):
        again = gradient(lambda *xs, r=reentrant: checkpoint(layer, *xs, use_reentrant=r))
        assert torch.equal(again, plain)
    q, k, v = qkv(graph, dtype=torch.float32)
    out = ga.rbf_attention(q, k, v, graph, 1.0, backend="fused")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(ga.rbf_attention(q, k, v, graph, 1.0, backend="fused"), out)

"""Complete and causal graphs by fused attention: values, gradients, what a bad number reaches."""

import pytest
import torch

import graphattn as ga
from graphattn.kernels.cpu import library
from graphattn.ops.attention.calls import Inputs
from graphattn.ops.attention.structured import whole

FAST = ["structured"] + ["native"] * (library.library() is not None)
SIZES = {  # targets, sources, heads, heads of keys, features, features of values
    "complete": (20, 20, 2, 2, 8, 8),
    "more targets": (33, 17, 4, 2, 16, 24),
    "few targets": (5, 40, 3, 3, 5, 3),
    "causal": (40, 40, 4, 2, 16, 16),
    "causal, heads alike": (40, 40, 4, 2, 16, 16),
    "heads alike": (20, 20, 2, 2, 8, 8),
}


@pytest.fixture(autouse=True)
def always_fused(monkeypatch):
    """Few tokens, too, are computed by fused attention."""
    monkeypatch.setattr(whole, "FEWEST", dict.fromkeys(whole.FEWEST, (1, 1, 1, 1)))


def problem(name, seed=0):
    """A graph, query, key and value of two samples, and a number per head."""
    N, M, heads, kv_heads, D, Dv = SIZES[name]
    generator = torch.Generator().manual_seed(seed)
    shapes = (2, N, heads, D), (2, M, kv_heads, D), (2, M, kv_heads, Dv)
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    per_head = 1.5 + torch.rand(heads, generator=generator, dtype=torch.float64)
    if "alike" in name:
        per_head[:] = 1.7
    graph = ga.causal_graph(N) if "causal" in name else ga.bipartite_complete_graph(N, M)
    return graph, tensors, per_head


def results(score, graph, tensors, per_head, backend, dtype=torch.float64, used="out", **options):
    """Output, log-sums and all gradients."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in (*tensors, per_head)]
    operation, name = {
        "rbf": (ga.rbf_attention, "sigma"),
        "dot": (ga.dot_product_attention, "scale"),
    }[score]
    out, lse = operation(
        *leaves[:3], graph, **{name: leaves[3]}, backend=backend, return_lse=True, **options
    )
    lse = lse.masked_fill(lse == -torch.inf, -9)
    generator = torch.Generator().manual_seed(1)
    parts = {"out": [out], "lse": [lse], "both": [out, lse]}[used]
    loss = sum(
        (x * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum() for x in parts
    )
    return out, lse, *torch.autograd.grad(loss, leaves, materialize_grads=True)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("masked", ["all valid", "some", "none in a sample"])
@pytest.mark.parametrize("used", ["out", "lse", "both"])
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("score", ["dot", "rbf"])
def test_values_and_gradients_are_those_of_the_reference(score, name, used, masked, backend):
    case = problem(name)
    options = {}
    if masked != "all valid":
        generator = torch.Generator().manual_seed(2)
        valid = [torch.rand(2, n, generator=generator) > 0.3 for n in SIZES[name][:2]]
        valid[1][1] &= masked == "some"
        options["valid"] = tuple(valid)
    exact = results(score, *case, "reference", used=used, **options)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 3e-5)):
        mine = results(score, *case, backend, dtype, used=used, **options)
        for got, truth in zip(mine, exact, strict=True):
            # The gradient of a number per head is a sum over all edges whose terms cancel.
            error = tolerance * (20 if truth.dim() == 1 else 1)
            torch.testing.assert_close(got.double(), truth, rtol=error, atol=error)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("score", ["dot", "rbf"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e5])
@pytest.mark.parametrize("which", ["query", "key", "value"])
@pytest.mark.parametrize("name", ["complete", "causal"])
def test_a_bad_number_changes_no_bit_of_rows_that_do_not_see_it(name, score, bad, which, backend):
    graph, tensors, per_head = problem(name)
    tensors, per_head, where = [x.float() for x in tensors], per_head.float(), 12
    clean = results(score, graph, tensors, per_head, backend, torch.float32)
    tensors[["query", "key", "value"].index(which)][1, where, 1, 2] = bad
    dirty = results(score, graph, tensors, per_head, backend, torch.float32)
    exact = results(score, graph, tensors, per_head, "reference", torch.float32)
    heads, kv_heads = SIZES[name][2:4]
    unseen = torch.ones(2, len(clean[0][0]), heads, dtype=torch.bool)
    of_head = slice(1, 2) if which == "query" else slice(heads // kv_heads, 2 * heads // kv_heads)
    rows = slice(where, where + 1) if which == "query" else slice(where * (name == "causal"), None)
    unseen[1, rows, of_head] = False
    for mine, before in zip(dirty[:3], clean[:3], strict=True):
        assert torch.equal(mine[unseen], before[unseen])
    for mine, truth in zip(dirty[:2], exact[:2], strict=True):
        if bad == torch.inf:  # weights of infinite logits are NaN, and fast backends say so for all
            mine, truth = mine.isfinite(), truth.isfinite() & mine.isfinite()
        torch.testing.assert_close(mine, truth, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("number", [3.0, 5.0])
def test_many_features_of_moderate_size_are_too_large_together(number):
    """Products of 64 features are 9 * 64 = 576 or 1,600, beside a bound of 1,024."""
    tensor = torch.full((1, 4, 2, 64), number)
    operands = whole._Operands.of(Inputs(tensor, -tensor, tensor, torch.ones(2)), "dot", False)
    sound = operands.sound_rows()
    assert sound is None if number == 3 else not sound.any()


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("score", ["dot", "rbf"])
def test_features_need_not_lie_side_by_side(score, backend):
    graph, tensors, per_head = problem("causal")
    apart = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in tensors]
    assert all(x.stride(-1) != 1 for x in apart)
    for mine, truth in zip(
        results(score, graph, apart, per_head, backend),
        results(score, graph, tensors, per_head, backend),
        strict=True,
    ):
        torch.testing.assert_close(mine, truth)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("name", ["complete", "causal"])
def test_keys_far_from_each_other_keep_their_digits(name, backend):
    """Products would lose them; the sizes are seen, and the distances computed by differences."""
    graph, tensors, per_head = problem(name)
    for x in tensors[:2]:
        x[:, ::2] += 1e4
    exact = results("rbf", graph, tensors, per_head, "reference")
    mine = results("rbf", graph, tensors, per_head, backend, torch.float32)
    rounded = results("rbf", graph, [x.float() for x in tensors], per_head.float(), "reference")
    for got, truth, least in zip(mine[:5], exact[:5], rounded[:5], strict=True):
        assert (got.double() - truth).norm() <= 2 * (least - truth).norm() + 1e-4 * truth.norm()


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("score", ["dot", "rbf"])
@pytest.mark.parametrize("name", ["more targets", "causal"])
def test_second_derivatives_are_those_of_the_reference(name, score, backend):
    graph, tensors, per_head = problem(name)
    found = []
    for name in ("reference", backend):
        leaves = [x.clone().requires_grad_() for x in tensors]
        operation = ga.rbf_attention if score == "rbf" else ga.dot_product_attention
        out = (
            operation(*leaves, graph, per_head, backend=name)
            if score == "rbf"
            else operation(*leaves, graph, scale=per_head, backend=name)
        )
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(x.square().sum() for x in first), leaves))
    for mine, truth in zip(*reversed(found), strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-9, atol=1e-9)


def test_it_is_used(monkeypatch):
    """All of the above would pass without it."""
    calls = []
    fused = whole.FUSED
    monkeypatch.setattr(whole, "FUSED", lambda *a, **k: calls.append(1) or fused(*a, **k))
    graph, tensors, per_head = problem("complete")
    for backend in FAST:
        results("rbf", graph, tensors, per_head, backend)
    assert len(calls) == len(FAST)


@pytest.mark.skipif(library.library() is None, reason=str(library.why_not()))
def test_few_sources_are_left_to_compiled_code(monkeypatch):
    """Many tokens that see a few global ones take longer by fused attention."""
    calls = []
    fused = whole.FUSED
    monkeypatch.setattr(whole, "FUSED", lambda *a, **k: calls.append(1) or fused(*a, **k))
    monkeypatch.setattr(whole, "FEWEST", dict.fromkeys(whole.FEWEST, (16, 16, 16, 16)))
    for num_sources, expected in ((4, 0), (16, 1)):
        x = torch.randn(1, 64, 2, 8)
        key = torch.randn(1, num_sources, 2, 8)
        graph = ga.bipartite_complete_graph(64, num_sources)
        ga.rbf_attention(x, key, key, graph, 2.0, backend="native")
        assert len(calls) == expected

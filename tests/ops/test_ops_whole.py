"""Complete graphs by torch's fused attention: values, gradients, and what a bad number reaches."""

import pytest
import torch

import graphattn as ga
from graphattn.kernels.cpu import library
from graphattn.ops.attention.structured import whole

FAST = ["structured"] + ["native"] * (library.library() is not None)
SIZES = [(20, 20, 2, 2, 8, 8), (33, 17, 4, 2, 16, 24), (5, 40, 3, 3, 5, 3)]


@pytest.fixture(autouse=True)
def always_fused(monkeypatch):
    """Few tokens, too, are computed by fused attention."""
    monkeypatch.setattr(whole, "FEWEST", dict.fromkeys(whole.FEWEST, (1, 1)))


def problem(N, M, heads, kv_heads, D, Dv, seed=0):
    """A graph, query, key and value of two samples, and a number per head."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (2, N, heads, D), (2, M, kv_heads, D), (2, M, kv_heads, Dv)
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    per_head = 1.5 + torch.rand(heads, generator=generator, dtype=torch.float64)
    return ga.bipartite_complete_graph(N, M), tensors, per_head


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
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("score", ["dot", "rbf"])
def test_values_and_gradients_are_those_of_the_reference(score, sizes, used, masked, backend):
    case = problem(*sizes)
    options = {}
    if masked != "all valid":
        generator = torch.Generator().manual_seed(2)
        valid = [torch.rand(2, n, generator=generator) > 0.3 for n in sizes[:2]]
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
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_bad_number_changes_no_bit_of_other_heads(score, bad, which, backend):
    graph, tensors, per_head = problem(20, 20, 2, 2, 8, 8)
    tensors = [x.float() for x in tensors]
    clean = results(score, graph, tensors, per_head.float(), backend, torch.float32)
    tensors[which][1, 3, 1, 2] = bad
    dirty = results(score, graph, tensors, per_head.float(), backend, torch.float32)
    exact = results(score, graph, tensors, per_head, "reference", torch.float32)
    untouched = torch.ones(2, 20, 2, dtype=torch.bool)
    untouched[1, :, 1] = False
    for mine, before in zip(dirty[:5], clean[:5], strict=True):
        assert torch.equal(mine[untouched], before[untouched])
    for mine, truth in zip(dirty[:2], exact[:2], strict=True):
        if bad == torch.inf:  # weights of infinite logits are NaN, and fast backends say so for all
            mine, truth = mine.isfinite(), truth.isfinite() & mine.isfinite()
        torch.testing.assert_close(mine, truth, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("backend", FAST)
def test_keys_far_from_each_other_keep_their_digits(backend):
    """Products would lose them; the sizes are seen, and the distances computed by differences."""
    graph, tensors, per_head = problem(20, 20, 2, 2, 8, 8)
    for x in tensors[:2]:
        x[:, ::2] += 1e4
    exact = results("rbf", graph, tensors, per_head, "reference")
    mine = results("rbf", graph, tensors, per_head, backend, torch.float32)
    rounded = results("rbf", graph, [x.float() for x in tensors], per_head.float(), "reference")
    for got, truth, least in zip(mine[:5], exact[:5], rounded[:5], strict=True):
        assert (got.double() - truth).norm() <= 2 * (least - truth).norm() + 1e-4 * truth.norm()


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("score", ["dot", "rbf"])
def test_second_derivatives_are_those_of_the_reference(score, backend):
    graph, tensors, per_head = problem(9, 7, 2, 1, 4, 4)
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
    """Without this, all of the above would pass, too."""
    calls = []
    fused = whole.FUSED
    monkeypatch.setattr(whole, "FUSED", lambda *a, **k: calls.append(1) or fused(*a, **k))
    graph, tensors, per_head = problem(20, 20, 2, 2, 8, 8)
    for backend in FAST:
        results("rbf", graph, tensors, per_head, backend)
    assert len(calls) == len(FAST)

"""The structured backend is the reference: in value, gradient, and in what it never reads."""

import os

import pytest
import torch
from cases_ops import FAST, attend
from random_ops import Problem
from random_ops import differentiated as run

import graphattn as ga
from graphattn.graphs.structures.composites import Union
from graphattn.graphs.structures.structure import Band, Blocks, Complete, GlobalTokens
from graphattn.ops.attention import structured
from graphattn.ops.attention.structured import chunked, chunks

EACH = pytest.mark.parametrize("backend", FAST)
CASES = int(os.environ.get("GRAPHATTN_SWEEP", "500"))


@pytest.fixture
def short_chunks(monkeypatch):
    """Take so few numbers at a time that most cases take several rounds."""
    monkeypatch.setattr(chunked, "PAIRS", 256)
    monkeypatch.setattr(chunked, "FEATURES", 256)
    monkeypatch.setattr(chunks, "EXACT", 1)


@EACH
@pytest.mark.long
@pytest.mark.parametrize("quarter", range(4))
def test_values_and_gradients_are_those_of_the_reference(backend, quarter, request):
    if quarter % 2:
        request.getfixturevalue("short_chunks")
    for seed in range(quarter, CASES, 4):
        problem = Problem(seed, torch.float64, offset=0.0)
        results = problem.run(backend), problem.run("reference")
        torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10, msg=f"seed {seed}")


@pytest.mark.long
@EACH
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_float32_keeps_its_accuracy_under_a_common_offset(backend, offset):
    compared = 0
    for seed in range(max(100, CASES // 2)):
        problem = Problem(seed, torch.float32, offset=offset)
        if "sigma" not in problem.options or problem.options["top_k"] is not None:
            continue  # of near ties, float32 and float64 may choose differently
        exact, mine = problem.run("reference", dtype=torch.float64), problem.run(backend)
        for got, truth in zip(mine[:1] + mine[2:], exact[:1] + exact[2:], strict=True):
            error = (got.double() - truth).norm() / truth.norm().clamp_min(1e-2)
            # The gradient of sigma, [H], is a sum over all edges whose terms cancel.
            assert error < (5e-5 if truth.dim() == 1 else 1e-5), seed
        compared += 1
    assert compared > 15


@EACH
@pytest.mark.parametrize("distance", [1e2, 1e4])
@pytest.mark.parametrize("name", ["complete", "causal", "window", "blocks"])
def test_tokens_far_from_each_other_cost_no_digits(backend, name, distance):
    """Two crowds far apart in units of sigma, mixed: products alone would lose their neighbours."""
    graph = {
        "complete": ga.complete_graph(60),
        "causal": ga.causal_graph(60),
        "window": ga.causal_window_graph(60, 40),
        "blocks": ga.block_window_graph(60, 20),
    }[name]
    torch.manual_seed(0)
    x = torch.randn(60, 2, 4)
    x[torch.rand(60) < 0.5] += distance
    value = torch.randn(60, 2, 4)
    options = {"sigma": torch.tensor([1.0, 0.5]), "eps": 1e-3}
    exact_options = {**options, "sigma": options["sigma"].double()}
    exact = run("reference", graph, [t.double() for t in (x, x, value)], exact_options)
    mine = run(backend, graph, [x, x, value], options)
    for got, truth in zip(mine[:5], exact[:5], strict=True):
        assert (got.double() - truth).norm() <= 1e-5 * truth.norm()


@EACH
@pytest.mark.parametrize("graph", [ga.causal_window_graph(90, 70), ga.complete_graph(90)])
def test_a_common_offset_beyond_products_costs_no_digits(backend, graph):
    """One feature of 1e8: beside its square even float64 has no digits left for the others."""
    torch.manual_seed(0)
    x, value = torch.randn(90, 2, 4), torch.randn(90, 2, 4)
    x[..., 0] = 1e8
    options = {"sigma": torch.tensor([2.0, 4.0])}
    exact = run("reference", graph, [t.double() for t in (x, x, value)],
                {"sigma": options["sigma"].double()})  # fmt: skip
    for got, truth in zip(run(backend, graph, [x, x, value], options)[:5], exact, strict=False):
        assert (got.double() - truth).norm() <= 1e-5 * truth.norm()


BAD = {"nan": torch.nan, "inf": torch.inf}
OPTIONS = {
    "rbf": {"sigma": torch.ones(2)},
    "dot": {"scale": torch.ones(2)},
    "top-k": {"scale": torch.ones(2), "top_k": 2},
}


@EACH
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("build", [ga.causal_graph, lambda n: ga.causal_window_graph(n, 70)])
def test_a_bad_token_changes_no_bit_before_it_and_none_beyond_its_window(
    backend, build, bad, options
):
    graph = build(200)
    mask = graph.to_mask()
    torch.manual_seed(0)
    tensors = [torch.randn(200, 2, 4) for _ in range(3)]
    clean = run(backend, graph, tensors, options)
    for place in (0, 63, 150, 199):
        spoilt = [x.clone().index_fill_(0, torch.tensor([place]), bad) for x in tensors]
        dirty = run(backend, graph, spoilt, options)
        blind = ~mask[:, place]
        assert torch.equal(clean[0][blind], dirty[0][blind])
        assert torch.equal(clean[1][blind], dirty[1][blind])
        if bad != bad:
            seeing = mask[:, place] if "top_k" not in options else torch.arange(200) == place
            assert dirty[0][seeing].isnan().all()
        # A gradient is spoilt where a row sees the token, and in what those rows see.
        reached = mask[mask[:, place]].any(0) | mask[:, place]
        for before, after in zip(clean[2:5], dirty[2:5], strict=True):
            torch.testing.assert_close(before[~reached], after[~reached])


@pytest.mark.parametrize("graph", [ga.causal_window_graph(40, 4), ga.window_cycle_graph(40, 2)])
@pytest.mark.parametrize("top_k", [None, 3])
def test_a_bad_gradient_reaches_only_the_tokens_its_row_sees(graph, top_k):
    torch.manual_seed(0)
    q, k, v = (torch.randn(40, 1, 3, requires_grad=True) for _ in range(3))
    d_out = torch.zeros(40, 1, 3)
    d_out[20] = torch.nan
    out = ga.rbf_attention(q, k, v, graph, 1.0, top_k=top_k, backend="structured")
    seen = set(graph.to_mask()[20].nonzero().flatten().tolist())
    for gradient in torch.autograd.grad(out, (q, k, v), d_out):
        touched = gradient.isnan().flatten(1).any(1).nonzero().flatten().tolist()
        assert touched
        assert set(touched) <= seen | {20}


TWICE = {
    "batch of paths": lambda: ga.batch(
        [ga.window_path_graph(n, 2, self_loops=True) for n in (18, 3)]
    ),
    "complete": lambda: ga.complete_graph(7),
    "causal": lambda: ga.causal_graph(7),
    "wide": lambda: ga.causal_window_graph(90, 70),
    "dilated": lambda: ga.dilated_window_graph(9, 2, 3),
    "longformer": lambda: ga.longformer_graph(9, 1, (0, 4)),
    "grid": lambda: ga.grid_window_graph(3, 3, 1, class_token=True),
}


@pytest.mark.long
@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("kind", ["rbf", "dot"])
@pytest.mark.parametrize("top_k", [None, 2])
@pytest.mark.parametrize("name", TWICE)
def test_it_can_be_differentiated_twice(name, kind, top_k):
    torch.manual_seed(0)
    graph = TWICE[name]()
    N = graph.num_targets
    inputs = [torch.randn(N, 2, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    inputs.append(torch.tensor([0.7, 1.3], dtype=torch.float64, requires_grad=True))
    operation = ga.rbf_attention if kind == "rbf" else ga.dot_product_attention
    name = "sigma" if kind == "rbf" else "scale"

    def attend(q, k, v, strength):
        return operation(
            q, k, v, graph, top_k=top_k, backend="structured", return_lse=True, **{name: strength}
        )

    torch.autograd.gradcheck(attend, inputs, fast_mode=True)
    torch.autograd.gradgradcheck(attend, inputs, fast_mode=True)


def test_a_product_with_the_hessian_is_that_of_the_reference():
    graph = ga.batch([ga.complete_graph(30), ga.longformer_graph(20, 3, (0,))])
    torch.manual_seed(0)
    x = torch.randn(50, 2, 4, dtype=torch.float64, requires_grad=True)
    direction = torch.randn_like(x)
    products = []
    for backend in ("structured", "reference"):
        loss = ga.rbf_attention(x, x, x, graph, 2.0, eps=0.1, backend=backend).square().sum()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        products.append(torch.autograd.grad((gradient * direction).sum(), x)[0])
    torch.testing.assert_close(*products, rtol=1e-10, atol=1e-10)


def test_no_edge_is_ever_listed(monkeypatch):
    def listed(*_):
        raise AssertionError("the edges were listed")

    for kind in (Band, Complete, Blocks, GlobalTokens, Union):
        monkeypatch.setattr(kind, "edges", listed)
    graph = ga.batch(
        [
            ga.causal_window_graph(300, 5),
            ga.causal_window_graph(50, 5),
            ga.complete_graph(100),
            ga.causal_graph(80),
            ga.block_window_graph(70, 16, shift=3),
            ga.dilated_window_graph(60, 3, 4),
        ]
    )
    N = graph.num_targets
    x = torch.randn(N, 2, 4, requires_grad=True)
    valid = torch.rand(N) < 0.9
    for top_k in (None, 3):
        out = ga.rbf_attention(x, x, x, graph, 1.0, top_k=top_k, valid=valid)
        out.sum().backward()
    ga.nn.KrauseAttention(8, 2, top_k=3)(torch.randn(N, 8), graph, valid=valid).sum().backward()
    x = torch.randn(320, 2, 4, requires_grad=True)
    graph = ga.batch([ga.longformer_graph(170, 3, (0,)), ga.longformer_graph(150, 3, (0, 7))])
    ga.dot_product_attention(x, x, x, graph).sum().backward()


def test_auto_takes_it_for_every_graph(monkeypatch):
    """Backend "auto" takes the structured backend, or compiled code, for every graph.

    Compiled code is taken where there is some; it has the same planner.
    """
    used, plan_of = [], structured.plan_of
    monkeypatch.setattr(structured, "plan_of", lambda *given: used.append(0) or plan_of(*given))
    x = torch.randn(90, 1, 2)
    for graph in (
        ga.window_path_graph(90, 3),
        ga.complete_graph(90),
        ga.window_cycle_graph(90, 3),
        ga.from_edge_index(torch.tensor([[0], [1]]), 90),
    ):
        used.clear()
        ga.rbf_attention(x, x, x, graph, 1.0)
        assert used
        assert ga.backends("rbf_attention", graph, x)["structured"] is None
        used.clear()
        with ga.use_backend("reference"):
            ga.rbf_attention(x, x, x, graph, 1.0)
        assert not used


@pytest.mark.parametrize(("before", "after"), [(40, 0), (255, 0), (100, 100)])
def test_a_wide_window_is_sdpa_with_its_mask(before, after):
    """700 tokens: tiles at both ends and several between, whole and cut."""
    graph = ga.causal_window_graph(700, before + 1)
    if after:
        graph = ga.window_path_graph(700, before, self_loops=True)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 700, 3, 8, requires_grad=True) for _ in range(3))
    mine = ga.dot_product_attention(q, k, v, graph, backend="structured")
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=graph.to_mask()
    ).transpose(1, 2)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    d_out = torch.randn_like(mine)
    gradients = (torch.autograd.grad(out, (q, k, v), d_out) for out in (mine, theirs))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "graph",
    [
        ga.window_path_graph(8, 2),
        ga.window_cycle_graph(8, 1),
        ga.complete_graph(8),
        ga.batch([ga.window_cycle_graph(4, 1)] * 2),
    ],
    ids=str,
)
def test_tokens_need_not_lie_side_by_side(graph):
    """[B, H, N, D] transposed, and expanded, as other libraries hand them over."""
    torch.manual_seed(0)
    x, y = (torch.randn(2, 3, 8, 4, dtype=torch.float64).transpose(1, 2) for _ in range(2))
    z = torch.randn(8, 1, 4, dtype=torch.float64).expand(2, 8, 3, 4)
    results = []
    for backend in ("structured", "reference"):
        leaves = [t.detach().requires_grad_() for t in (x, y, z)]
        out = ga.rbf_attention(*leaves, graph, 1.0, backend=backend)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)


def test_packed_sequences_without_sources_give_zeros():
    graph = ga.batch([ga.bipartite_complete_graph(1, 0)] * 3)
    out = ga.rbf_attention(torch.randn(3, 1, 2), *[torch.randn(0, 1, 2)] * 2, graph, 1.0)
    assert torch.equal(out, torch.zeros(3, 1, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("features", [1, 2, 7, 64])
@pytest.mark.parametrize("score", ["rbf", "dot"])
def test_equal_keys_tie_wherever_they_stand_in_a_tile(score, features, dtype):
    """Products round equal columns apart, by where they stand; the first of them must win."""
    torch.manual_seed(0)
    N = 37
    points = torch.randn(3, 1, features, dtype=dtype)
    kind = torch.randint(3, (N,))
    key, query = points[kind], torch.randn(N, 1, features, dtype=dtype)
    value = torch.arange(N, dtype=dtype).view(N, 1, 1)
    for graph in (ga.complete_graph(N), ga.causal_window_graph(N, 30)):
        for top_k in (1, 4):
            outs = (
                attend(score, query, key, value, graph, top_k=top_k, backend=backend)
                for backend in ("structured", "reference")
            )
            torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("score", ["rbf", "dot"])
def test_near_ties_are_decided_as_in_the_reference(score, dtype):
    """Keys have the same features in other orders, so sums and products differ in last bits."""
    torch.manual_seed(0)
    N = 60
    features = torch.randn(32, dtype=dtype)
    key = torch.stack([features[torch.randperm(32)] for _ in range(N)])[:, None]
    query, value = torch.ones(N, 1, 32, dtype=dtype), torch.arange(N, dtype=dtype).view(N, 1, 1)
    for graph in (ga.complete_graph(N), ga.causal_window_graph(N, 30)):
        outs = (
            attend(score, query, key, value, graph, top_k=1, backend=backend)
            for backend in ("structured", "reference")
        )
        torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-4)


@EACH
@pytest.mark.parametrize("size", [1e6, 1e8, 1e10])
@pytest.mark.parametrize("build", [ga.window_path_graph, lambda n, _: ga.complete_graph(n)])
def test_an_enormous_key_costs_nobody_else_a_digit(backend, build, size):
    """An enormous key costs no digit of any output or gradient.

    It weighs nothing in the rows that see it. In a window without self-loops its own row does not
    see it.
    """
    graph = build(40, 3)
    torch.manual_seed(0)
    query, key, value = (torch.randn(40, 1, 4) for _ in range(3))
    for place in (0, 7, 20):
        far = key.clone()
        far[place] = size
        options = {"sigma": torch.tensor([0.5])}
        exact = run("reference", graph, [t.double() for t in (query, far, value)],
                    {"sigma": options["sigma"].double()})  # fmt: skip
        mine = run(backend, graph, [query, far, value], options)
        torch.testing.assert_close(mine[0].double(), exact[0], rtol=1e-5, atol=1e-5)
        for got, truth in zip(mine[2:5], exact[2:5], strict=True):
            assert got.isfinite().all()
            torch.testing.assert_close(got.double(), truth, rtol=1e-4, atol=1e-4)


def test_numbers_that_overflow_together_spoil_only_the_rows_that_see_both():
    graph = ga.window_path_graph(40, 4)
    query, key, value = (torch.randn(40, 1, 4) for _ in range(3))
    query[10] = key[15] = 3e20
    out = ga.dot_product_attention(query, key, value, graph, backend="structured")
    truth = ga.dot_product_attention(query, key, value, graph, backend="reference")
    torch.testing.assert_close(out, truth, equal_nan=True)
    assert out[10].isfinite().all()


def test_an_infinite_key_is_infinitely_far():
    torch.manual_seed(0)
    query, key, value = (torch.randn(9, 1, 3, dtype=torch.float64) for _ in range(3))
    key[3] = torch.inf
    for graph in (ga.complete_graph(9), ga.causal_graph(9), ga.window_path_graph(9, 4)):
        out = ga.rbf_attention(query, key, value, graph, 1.0, backend="structured")
        truth = ga.rbf_attention(query, key, value, graph, 1.0, backend="reference")
        torch.testing.assert_close(out, truth)


def test_log_sums_alone_do_not_read_values():
    query, key, value = (torch.randn(9, 1, 3, requires_grad=True) for _ in range(3))
    with torch.no_grad():
        value[4] = torch.nan
    for graph in (ga.causal_graph(9), ga.window_cycle_graph(9, 2)):
        _, lse = ga.rbf_attention(
            query, key, value, graph, 1.0, return_lse=True, backend="structured"
        )
        for gradient in torch.autograd.grad(lse.sum(), (query, key)):
            assert gradient.isfinite().all()


def test_forward_mode_differentiation_takes_the_reference():
    graph = ga.causal_graph(6)
    x, direction = torch.randn(2, 6, 1, 3, dtype=torch.float64)

    def attend(x):
        return ga.rbf_attention(x, x, x, graph, 1.0)

    _, slope = torch.autograd.functional.jvp(attend, x, direction)
    with torch.autograd.forward_ad.dual_level():
        dual = attend(torch.autograd.forward_ad.make_dual(x, direction))
        found = torch.autograd.forward_ad.unpack_dual(dual).tangent
    torch.testing.assert_close(found, slope)

"""The structured backend is the reference: in value, gradient, and in what it never reads."""

import os

import pytest
import torch

import graphattn as ga
from graphattn.graphs.structure import Band
from graphattn.ops.attention import structured

CASES = int(os.environ.get("GRAPHATTN_SWEEP", "500"))


def random_case(seed: int, dtype: torch.dtype, offset: float = 0.0):
    """A graph of bands, tensors and options, all drawn from one seed."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*options):
        return options[int(torch.randint(len(options), (), generator=generator))]

    window = draw(1, 2, 3, 8)
    build = draw(
        lambda n: ga.window_path_graph(n, window),
        lambda n: ga.window_path_graph(n, window, self_loops=True),
        lambda n: ga.causal_window_graph(n, window),
        lambda n: ga.dilated_window_graph(n, window, draw_dilation, self_loops=draw_loops),
        lambda n: ga.bipartite_window_graph(n, window),
    )
    draw_dilation, draw_loops = draw(2, 5), draw(True, False)
    lengths = draw((9,), (40,), (2,), (5, 17, 1), (30, 30))
    parts = [build(n) for n in lengths]
    graph = parts[0] if len(parts) == 1 else ga.batch(parts)
    batch, kv_heads = draw((), (2,), (2, 1)), draw(1, 2)
    heads, features = kv_heads * draw(1, 3), draw(1, 5, 8)
    N = graph.num_targets

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) + offset

    options = {"top_k": draw(None, None, 1, 3, 50)}
    if draw(False, True):
        options["valid"] = torch.rand((*batch, N), generator=generator) < 0.8
    sigma = 0.5 + torch.rand(heads, generator=generator, dtype=torch.float64).to(dtype)
    if draw(True, False):
        options["sigma"], options["eps"] = sigma * features**0.5, draw(0.0, 0.1)
    else:
        options["scale"] = sigma
    tensors = [
        random(*batch, N, heads, features),
        random(*batch, N, kv_heads, features),
        random(*batch, N, kv_heads, draw(1, 4)) - offset,
    ]
    return graph, tensors, options


def run(backend: str, graph, tensors, options, *, loss_seed: int = 0):
    """Output, log-sums and all gradients."""
    options = dict(options)
    strength = "sigma" if "sigma" in options else "scale"
    leaves = [x.detach().clone().requires_grad_() for x in (*tensors, options.pop(strength))]
    operation = ga.rbf_attention if strength == "sigma" else ga.dot_product_attention
    options[strength] = leaves[3]
    out, lse = operation(*leaves[:3], graph, backend=backend, return_lse=True, **options)
    generator = torch.Generator().manual_seed(loss_seed)
    seen = lse.isfinite()
    loss = (out * torch.randn(out.shape, generator=generator, dtype=torch.float64)).sum()
    loss = loss + (lse[seen] * torch.randn(lse.shape, generator=generator)[seen]).sum()
    return (out, lse, *torch.autograd.grad(loss, leaves, allow_unused=True))


@pytest.fixture
def short_chunks(monkeypatch):
    """16 targets a chunk: most cases then have several."""
    monkeypatch.setattr(structured, "CHUNK", 1)


@pytest.mark.usefixtures("short_chunks")
def test_values_and_gradients_are_those_of_the_reference():
    compared = 0
    for seed in range(CASES):
        graph, tensors, options = random_case(seed, torch.float64)
        if ga.backends("rbf_attention", graph, tensors[0])["structured"] is not None:
            continue
        pairs = zip(
            run("structured", graph, tensors, options),
            run("reference", graph, tensors, options),
            strict=True,
        )
        for mine, theirs in pairs:
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10, msg=f"seed {seed}")
        compared += 1
    assert compared > 0.9 * CASES


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_float32_keeps_its_accuracy_under_a_common_offset(offset):
    for seed in range(max(20, CASES // 10)):
        graph, tensors, options = random_case(seed, torch.float32, offset)
        if "sigma" not in options or options["top_k"] is not None:
            continue  # of near ties, float32 and float64 may choose differently
        if ga.backends("rbf_attention", graph, tensors[0])["structured"] is not None:
            continue
        doubled = [x.double() for x in tensors]
        exact = run("reference", graph, doubled, {**options, "sigma": options["sigma"].double()})
        mine = run("structured", graph, tensors, options)
        for got, truth in zip(mine[:1] + mine[2:], exact[:1] + exact[2:], strict=True):
            error = (got.double() - truth).norm() / truth.norm().clamp_min(1e-3)
            assert error < 1e-5, seed


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_seen_changes_no_bit_of_values_and_gradients(bad):
    """A sequence of a batch turns bad; the outputs and gradients of the others stay."""
    graph = ga.batch([ga.causal_window_graph(n, 6) for n in (20, 3, 18)])
    torch.manual_seed(0)
    tensors = [torch.randn(2, 41, 2, 4) for _ in range(3)]
    others = (torch.arange(41) < 20) | (torch.arange(41) >= 23)
    for options in ({"sigma": torch.ones(2)}, {"scale": torch.ones(2), "top_k": 2}):
        clean = run("structured", graph, tensors, options)
        spoilt = [x.clone() for x in tensors]
        for x in spoilt:
            x[:, 20:23] = bad
        dirty = run("structured", graph, spoilt, options)
        for before, after in zip(clean[:5], dirty[:5], strict=True):
            assert torch.equal(before[:, others], after[:, others])


@pytest.mark.usefixtures("short_chunks")
def test_a_bad_gradient_reaches_only_the_tokens_its_row_sees():
    graph = ga.causal_window_graph(40, 4)
    torch.manual_seed(0)
    q, k, v = (torch.randn(40, 1, 3, requires_grad=True) for _ in range(3))
    d_out = torch.zeros(40, 1, 3)
    d_out[20] = torch.nan
    out = ga.rbf_attention(q, k, v, graph, 1.0, backend="structured")
    for gradient in torch.autograd.grad(out, (q, k, v), d_out):
        touched = gradient.isnan().flatten(1).any(1).nonzero().flatten().tolist()
        assert set(touched) <= {17, 18, 19, 20}
        assert 20 in touched


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("kind", ["rbf", "dot"])
@pytest.mark.parametrize("top_k", [None, 2])
def test_it_can_be_differentiated_twice(kind, top_k):
    torch.manual_seed(0)
    graph = ga.batch(
        [ga.window_path_graph(18, 2, self_loops=True), ga.window_path_graph(3, 2, self_loops=True)]
    )
    inputs = [torch.randn(21, 2, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    inputs.append(torch.tensor([0.7, 1.3], dtype=torch.float64, requires_grad=True))
    operation = ga.rbf_attention if kind == "rbf" else ga.dot_product_attention
    name = "sigma" if kind == "rbf" else "scale"

    def attend(q, k, v, strength):
        return operation(
            q, k, v, graph, top_k=top_k, backend="structured", return_lse=True, **{name: strength}
        )

    torch.autograd.gradcheck(attend, inputs, fast_mode=True)
    torch.autograd.gradgradcheck(attend, inputs, fast_mode=True)


def test_no_edge_is_ever_listed(monkeypatch):
    def listed(*_):
        raise AssertionError("the edges were listed")

    monkeypatch.setattr(Band, "edges", listed)
    graph = ga.batch([ga.causal_window_graph(n, 5) for n in (300, 50)])
    x = torch.randn(350, 2, 4, requires_grad=True)
    valid = torch.rand(350) < 0.9
    ga.rbf_attention(x, x, x, graph, 1.0, top_k=3, valid=valid).sum().backward()
    ga.nn.KrauseAttention(8, 2, top_k=3)(torch.randn(350, 8), graph, valid=valid).sum().backward()


def test_auto_takes_it_where_it_can_and_the_reference_elsewhere(monkeypatch):
    used = []
    original = structured.attend

    def spy(*arguments, **options):
        used.append(True)
        return original(*arguments, **options)

    monkeypatch.setattr(structured, "attend", spy)
    x = torch.randn(90, 1, 2)
    for graph, expected in (
        (ga.window_path_graph(90, 3), True),
        (ga.batch([ga.causal_window_graph(45, 8)] * 2), True),
        (ga.causal_window_graph(90, 64), True),
        (ga.causal_window_graph(90, 65), False),
        (ga.complete_graph(90), False),
        (ga.window_cycle_graph(90, 3), False),
        (ga.batch([ga.window_path_graph(45, 1), ga.window_path_graph(45, 2)]), False),
        (ga.from_edge_index(torch.tensor([[0], [1]]), 90), False),
    ):
        used.clear()
        ga.rbf_attention(x, x, x, graph, 1.0)
        assert bool(used) == expected, graph
        why_not = ga.backends("rbf_attention", graph, x)["structured"]
        assert (why_not is None) == expected
        used.clear()
        with ga.use_backend("reference"):
            ga.rbf_attention(x, x, x, graph, 1.0)
        assert not used
    bias = torch.zeros(7, 1)
    with pytest.raises(ValueError, match="'structured' cannot run this case: no edge_bias"):
        ga.rbf_attention(
            x, x, x, ga.window_path_graph(90, 3, self_loops=True), 1.0, edge_bias=bias,
            backend="structured",
        )  # fmt: skip

"""The operator behind backend="triton": promises to torch.library and torch.compile, refusals."""

import re
from collections import Counter

import pytest
import torch
from cases_kernels import Case, attend, check, exact, kernels
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import graphattn as ga

pytestmark = pytest.mark.usefixtures("device")


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class TwoLayers(nn.Module):
    """A Krause layer, which has projections, and a Gaussian one, which shares its tensor."""

    def __init__(self, backend: str = "auto") -> None:
        super().__init__()
        self.first = ga.nn.KrauseAttention(12, 2, kv_heads=1, backend=backend)
        self.second = ga.nn.GaussianKernelAttention(12, 2, backend=backend)

    def forward(self, x: torch.Tensor, graph: ga.TokenGraph) -> torch.Tensor:
        return self.second(self.first(x, graph), graph)


def operators(graph: torch.fx.GraphModule) -> dict[str, int]:
    """Our operators in a traced graph, by name."""
    names = (str(node.target) for node in graph.graph.nodes)
    return dict(Counter(name for name in names if "graphattn" in name))


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        Case(ga.causal_window_graph(18, 5), kv_heads=1, batch=(2,)),
        Case(ga.complete_graph(18), score="dot", valid="both"),
        Case(ga.window_path_graph(18, 3), table=True),
        Case(ga.complete_graph(18), shared=True),
        Case(ga.causal_graph(18), shared=True),
        Case(ga.bipartite_complete_graph(5, 18), score="dot", valid="sources"),
    ],
    ids=["rbf", "padding", "table", "one tensor", "one tensor, causal", "rectangle"],
)
def test_the_operator_keeps_the_promises_of_torch_library(case: Case, device: str) -> None:
    leaves = {n: x.to(device).requires_grad_() for n, x in case.tensors().items()}
    query = leaves["query"]
    tensors = (query, leaves.get("key", query), leaves.get("value", query))
    masks = (None if m is None else m.to(device) for m in case.masks)
    torch.library.opcheck(
        torch.ops.graphattn.attention.default,
        (
            *tensors, leaves["strength"], leaves.get("table"), *masks, case.graph.code, None,
            None, case.score, None, case.table, None, 0.0, 1, "triton", case.shared,
        ),
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    "build",
    [lambda n: ga.causal_window_graph(n, 6), ga.complete_graph],
    ids=["causal window", "complete"],
)
def test_two_compiled_layers_are_two_nodes_of_one_graph(build, device: str) -> None:
    """Forward and backward each hold one operator per layer, and give what eager ones give."""
    model, graph = TwoLayers("triton").to(device), build(20).to(device)
    traced = []

    def note(module: torch.fx.GraphModule, _: object):
        traced.append(operators(module))
        return make_boxed_func(module.forward)

    backend = aot_autograd(fw_compiler=note, bw_compiler=note)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    x = torch.randn(2, 20, 12, device=device, requires_grad=True)
    d_y = torch.randn(2, 20, 12, device=device)
    leaves = [x, *model.parameters()]
    mine, theirs = compiled(x, graph), model(x, graph)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    for a, b in zip(
        torch.autograd.grad(mine, leaves, d_y),
        torch.autograd.grad(theirs, leaves, d_y),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert traced == [
        {"graphattn.attention.default": 2},
        {"graphattn.attention_backward.default": 2},
    ]


@pytest.mark.long
def test_two_compilations_serve_all_lengths_and_windows(device: str) -> None:
    model = TwoLayers("triton").to(device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for n in (12, 17, 21, 9):
        graph = ga.causal_window_graph(n, n // 4 + 1).to(device)
        x = torch.randn(1, n, 12, device=device, requires_grad=True)
        mine, theirs = compiled(x, graph), model(x, graph)
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert counter.frame_count <= 2


def test_on_a_gpu_auto_takes_kernels_one_node_per_layer() -> None:
    """Fake tensors say what happens on a device that is not there."""
    model = TwoLayers()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        graph = ga.causal_window_graph(20, 6).to("cuda")
        parameters = {
            n: torch.empty_like(p, device="cuda").detach() for n, p in model.named_parameters()
        }
        x = torch.empty(2, 20, 12, device="cuda")

        def run(x: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(model, parameters, (x, graph))

        traced = make_fx(run)(x)
    assert operators(traced) == {"graphattn.attention.default": 2}
    nodes = [n for n in traced.graph.nodes if "graphattn" in str(n.target)]
    assert all("triton" in node.args for node in nodes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_have_shapes_dtypes_and_devices_before_they_exist(dtype: torch.dtype) -> None:
    """Fake tensors tell the shape, dtype and device of every result before it is computed.

    The forward and the backward pass are asked, for a GPU that is not there, grouped heads, and a
    value of another width than the query.
    """
    B, N, M, H, Hk, D, Dv = 2, 5, 9, 4, 2, 8, 6
    graph = ga.bipartite_complete_graph(N, M)
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = (
            torch.empty(B, *shape, dtype=dtype, device="cuda")
            for shape in ((N, H, D), (M, Hk, D), (M, Hk, Dv))
        )
        scale = torch.empty(H, device="cuda")
        inputs = (q, k, v, scale, None, None, None, graph.code, None, None)
        options = ("rbf", None, False, None, 0.0, 1, "triton", False)
        out, lse, saved = torch.ops.graphattn.attention(*inputs, *options)
        assert (out.shape, lse.shape, saved.shape) == ((B, N, H, Dv), (B, H, N), (B, H, N))
        assert (out.dtype, lse.dtype, saved.dtype) == (dtype, torch.float32, torch.float32)
        gradients = torch.ops.graphattn.attention_backward(
            *inputs, *options, [out, lse, saved], [out, lse], [True] * 4 + [False]
        )
        for x, gradient in zip((q, k, v, scale), gradients, strict=False):
            assert (gradient.shape, gradient.dtype) == (x.shape, x.dtype)
        assert gradients[4].numel() == 0  # there is no table
        assert {x.device.type for x in (out, lse, saved, *gradients)} == {"cuda"}


@pytest.mark.long
@pytest.mark.parametrize("shared", [False, True], ids=["three tensors", "one tensor"])
@pytest.mark.parametrize("score", ["rbf", "dot"])
def test_second_derivatives_are_those_of_the_reference(
    score: str, shared: bool, device: str
) -> None:
    """Hessian-vector products, through outputs and log-sums."""
    case = Case(
        ga.causal_window_graph(17, 4), score=score, shared=shared, kv_heads=2 if shared else 1,
        table=not shared,
    )  # fmt: skip
    found = []
    for backend, where, dtype in (
        ("triton", device, torch.float32),
        ("reference", "cpu", torch.float64),
    ):
        leaves = {n: x.to(where, dtype).requires_grad_() for n, x in case.tensors().items()}
        out, lse = attend(case, leaves, backend=backend, device=where)
        loss = out.square().sum() + lse.square().sum()
        first = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
        along = sum(g.square().sum() for g in first)
        second = torch.autograd.grad(along, list(leaves.values()))
        found.append({n: g.detach().cpu() for n, g in zip(leaves, second, strict=True)})
    check(*found, 1e-5)


def test_torch_func_is_told_to_take_the_reference(device: str) -> None:
    graph = ga.causal_graph(6).to(device)
    x = torch.randn(6, 2, 4, device=device)

    def loss(x: torch.Tensor, backend: str) -> torch.Tensor:
        return ga.rbf_attention(x, x, x, graph, 1.0, backend=backend).square().sum()

    for transform in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd, torch.func.vmap):
        argument = x[None] if transform is torch.func.vmap else x
        with pytest.raises(ValueError, match='use backend="reference"'):
            transform(lambda x: loss(x, "triton"))(argument)
    expected = torch.func.grad(lambda x: loss(x, "reference"))(x)
    torch.testing.assert_close(torch.func.grad(lambda x: loss(x, "auto"))(x), expected)


N = 7
REFUSED = {
    "float64": (ga.causal_graph(N), {"dtype": torch.float64}, "not float64"),
    "wide heads": (ga.causal_graph(N), {"features": 257}, "1 to 256 features, not of 257"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_kernels_cannot_do_they_refuse_with_the_reason(name: str, device: str) -> None:
    graph, options, says = REFUSED[name]
    options, graph = dict(options), graph.to(device)
    dtype, features = options.pop("dtype", torch.float32), options.pop("features", 4)
    x = torch.randn(N, 2, features, dtype=dtype, device=device)
    with pytest.raises(ValueError, match=f"backend 'triton' cannot run .*{says}"):
        ga.rbf_attention(x, x, x, graph, 1.0, backend="triton", **options)
    why_not = ga.backends("rbf_attention", graph, x)["triton"]
    if options:  # it sees graph and query only
        assert why_not is None
    else:
        assert says in why_not
    assert ga.rbf_attention(x, x, x, graph, 1.0, **options).shape == x.shape


@pytest.mark.long
def test_kernels_take_what_they_are_said_to_take(device: str) -> None:
    graph = ga.batch([ga.causal_graph(4), ga.window_path_graph(3, 1)]).to(device)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = torch.randn(N, 2, 4, device=device, dtype=dtype)
        assert ga.backends("rbf_attention", graph, x)["triton"] is None
        assert ga.rbf_attention(x, x, x, graph, 1.0, backend="triton").dtype == dtype


def test_a_wide_value_is_refused_too(device: str) -> None:
    x, v = torch.randn(N, 2, 4, device=device), torch.randn(N, 2, 300, device=device)
    with pytest.raises(ValueError, match="not of 300"):
        ga.dot_product_attention(x, x, v, ga.causal_graph(N).to(device), backend="triton")


def test_on_a_cpu_kernels_are_only_interpreted_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x, graph = torch.randn(N, 2, 4), ga.causal_graph(N)
    why_not = ga.backends("rbf_attention", graph, x)["triton"]
    assert why_not == "its kernels run on CUDA and HIP devices, not on cpu"
    with pytest.raises(ValueError, match=re.escape(why_not)):
        ga.rbf_attention(x, x, x, graph, 1.0, backend="triton")


def test_auto_does_not_interpret(device: str) -> None:
    """Backend "auto" never interprets kernels on a CPU; asked for by name they run.

    Torch is faster than interpreted kernels.
    """
    from graphattn.kernels.shared.launch import recording

    if device != "cpu":
        pytest.skip("a GPU takes kernels")
    x, graph = torch.randn(N, 2, 4), ga.causal_graph(N)
    with recording() as launches:
        ga.rbf_attention(x, x, x, graph, 1.0)
        assert not launches
        ga.rbf_attention(x, x, x, graph, 1.0, backend="triton")
        assert launches


def test_a_block_with_kernels_as_the_default_takes_them(device: str) -> None:
    case = Case(ga.causal_graph(9))
    with ga.use_backend("triton"):
        x = {n: t.to(device) for n, t in case.tensors().items()}
        out, _ = attend(case, x, backend="auto", device=device)
    assert torch.equal(out.cpu(), kernels(case, device)["out"])
    check({"out": out.cpu()}, {"out": exact(case)["out"]}, 5e-6)

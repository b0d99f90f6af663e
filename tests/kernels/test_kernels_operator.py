"""The operator behind backend="triton": promises to torch.library and torch.compile, refusals."""

import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
from cases_edges import CASES, nearest, some
from cases_kernels import Case, check, hessian_products
from compiling import check_compilations, check_compiled
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import graphattn as ga
from graphattn.kernels.shared.launch import recording

pytestmark = pytest.mark.usefixtures("device", "edge_tiles", "fresh_compiler")


class TwoLayers(nn.Module):
    """A Krause layer, which has projections, and a Gaussian one, which shares its tensor."""

    def __init__(self, backend: str = "auto") -> None:
        super().__init__()
        self.first = ga.nn.KrauseAttention(12, 2, kv_heads=1, backend=backend)
        self.second = ga.nn.GaussianKernelAttention(12, 2, backend=backend)

    def forward(self, x: torch.Tensor, graph: ga.TokenGraph) -> torch.Tensor:
        return self.second(self.first(x, graph), graph)


PROMISES = {
    "rbf": Case(ga.causal_window_graph(18, 5), kv_heads=1, batch=(2,)),
    "padding": Case(ga.complete_graph(18), score="dot", valid="both"),
    "table": Case(ga.window_path_graph(18, 3), table=True),
    "one tensor": Case(ga.complete_graph(18), shared=True),
    "one tensor, causal": Case(ga.causal_graph(18), shared=True),
    "rectangle": Case(ga.bipartite_complete_graph(5, 18), score="dot", valid="sources"),
    "top_k": Case(ga.causal_window_graph(18, 7), valid="both", options={"top_k": 3}),
    "bias": Case(some(12, 12), per_edge=True, batch=(2,), kv_heads=1),
    "bias per sample": Case(some(12, 12), per_edge=True, per_sample=True, batch=(2,)),
    "neighbours": Case(nearest(12, 3), score="dot", valid="both"),
    "top_k of a list": Case(some(5, 12), valid="sources", options={"top_k": 2}),
    "longformer": Case(ga.longformer_graph(12, 1, [3])),
    "one tensor of neighbours": Case(nearest(12, 3), shared=True),
}


@pytest.mark.long
@pytest.mark.parametrize("name", PROMISES)
def test_the_operator_keeps_the_promises_of_torch_library(name: str, device: str) -> None:
    case = PROMISES[name]
    leaves = {n: x.to(device).requires_grad_() for n, x in case.tensors().items()}
    query, graph = leaves["query"], case.graph.to(device)
    edges = graph.neighbors
    if edges is None and graph.structure is None:
        edges = graph.edge_index
    masks = (None if m is None else m.to(device) for m in case.masks)
    torch.library.opcheck(
        torch.ops.graphattn.attention.default,
        (
            query, leaves.get("key", query), leaves.get("value", query), leaves["strength"],
            leaves.get("table", leaves.get("edge_bias")), *masks, graph.code, edges, None,
            case.score, case.options.get("top_k"), case.table, None, 0.0, 1, "triton", case.shared,
        ),
    )  # fmt: skip


COMPILED = {
    "causal window": (lambda: ga.causal_window_graph(20, 6), None),
    "complete": (lambda: ga.complete_graph(20), None),
    "list": (lambda: some(20, 20), {}),
    "neighbours": (lambda: nearest(20, 5), {}),
    "list, top 3": (lambda: some(20, 20), {"top_k": 3}),
    "neighbours, top 3": (lambda: nearest(20, 5), {"top_k": 3}),
}


@pytest.mark.long
@pytest.mark.parametrize("name", COMPILED)
def test_every_compiled_layer_is_one_node_and_gives_what_an_eager_one_gives(
    name: str, device: str
) -> None:
    """Forward and backward each hold one operator per layer: two over bands, one over a list."""
    build, options = COMPILED[name]
    if options is None:
        model: nn.Module = TwoLayers("triton")
    else:
        model = ga.nn.KrauseAttention(12, 2, backend="triton", **options)
    x = torch.randn(2, 20, 12, device=device)
    calls = check_compiled(model.to(device), x, build().to(device))
    layers = 2 if options is None else 1
    assert [[str(target) for target, *_ in of_pass] for of_pass in calls] == [
        ["graphattn.attention.default"] * layers,
        ["graphattn.attention_backward.default"] * layers,
    ]


@pytest.mark.long
def test_two_compilations_serve_all_lengths_and_windows(device: str) -> None:
    check_compilations(TwoLayers("triton").to(device), 12, device)


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
    nodes = [n for n in traced.graph.nodes if "graphattn" in str(n.target)]
    assert Counter(str(n.target) for n in nodes) == {"graphattn.attention.default": 2}
    assert all("triton" in node.args for node in nodes)


SECOND = {
    "RBF": Case(ga.causal_window_graph(17, 4), kv_heads=1, table=True),
    "dot": Case(ga.causal_window_graph(17, 4), score="dot", kv_heads=1, table=True),
    "RBF of one tensor": Case(ga.causal_window_graph(17, 4), shared=True),
    "dot of one tensor": Case(ga.causal_window_graph(17, 4), score="dot", shared=True),
    "top 3": Case(ga.causal_window_graph(17, 6), kv_heads=1, options={"top_k": 3}),
    **{
        name: replace(CASES[name], batch=(1,))
        for name in ("bias of fewer neighbours than k", "hubs", "top 3 of a list")
    },
}


@pytest.mark.long
@pytest.mark.parametrize("name", SECOND)
def test_second_derivatives_are_those_of_the_reference(name: str, device: str) -> None:
    check(*hessian_products(SECOND[name], device), 1e-5)


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


@pytest.mark.parametrize(
    ("features", "dtype", "says"),
    [(4, torch.float64, "not float64"), (257, torch.float32, "1 to 256 features, not of 257")],
    ids=["float64", "wide heads"],
)
def test_what_kernels_cannot_do_they_refuse_with_the_reason(
    features: int, dtype: torch.dtype, says: str, device: str
) -> None:
    graph = ga.causal_graph(N).to(device)
    x = torch.randn(N, 2, features, dtype=dtype, device=device)
    with pytest.raises(ValueError, match=f"backend 'triton' cannot run .*{says}"):
        ga.rbf_attention(x, x, x, graph, 1.0, backend="triton")
    assert says in ga.backends("rbf_attention", graph, x)["triton"]
    assert ga.rbf_attention(x, x, x, graph, 1.0).shape == x.shape


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
    if device != "cpu":
        pytest.skip("a GPU takes kernels")
    x, graph = torch.randn(N, 2, 4), ga.causal_graph(N)
    with recording() as launches:
        ga.rbf_attention(x, x, x, graph, 1.0)
        assert not launches
        ga.rbf_attention(x, x, x, graph, 1.0, backend="triton")
        assert launches

"""The operator over any edges: bands stay bands, torch.library and torch.compile, derivatives."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from cases_edges import CASES, large_tiles, nearest, some
from cases_kernels import Case, attend, check
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

import graphattn as ga
from graphattn.kernels.shared.launch import recording

pytestmark = pytest.mark.usefixtures("device")


@pytest.fixture(autouse=True)
def _tiles(device: str) -> Iterator[None]:
    with large_tiles(device):
        yield


def test_a_union_with_a_window_keeps_its_window_a_band(device: str) -> None:
    """Band kernels compute the window of a graph that joins a window with other edges.

    The other edges are gathered, and the two results are merged. If there is a bias per edge, or no
    window (the grid), all edges are gathered.
    """
    if device != "cpu":
        pytest.skip("what is recorded does not run")
    for name, bands in (("longformer", 1), ("bias of a longformer", 0), ("grid", 0)):
        case = CASES[name]
        with recording() as launches:
            attend(case, case.tensors(), backend="triton")
        first = [one for one in launches if not one.arguments.get("CAREFUL")]
        names = [one.kernel.fn.__name__ for one in first]
        assert names.count("band_forward_kernel") == bands, names
        assert names.count("edges_forward_kernel") == 1, names


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        Case(some(12, 12), per_edge=True, batch=(2,), kv_heads=1),
        Case(some(12, 12), per_edge=True, per_sample=True, batch=(2,)),
        Case(nearest(12, 3), score="dot", valid="both"),
        Case(some(5, 12), valid="sources", options={"top_k": 2}),
        Case(ga.longformer_graph(12, 1, [3])),
        Case(nearest(12, 3), shared=True),
    ],
    ids=["bias", "bias per sample", "neighbours", "top_k", "longformer", "one tensor"],
)
def test_the_operator_keeps_the_promises_of_torch_library(case: Case, device: str) -> None:
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
            leaves.get("edge_bias"), *masks, graph.code, edges, None, case.score,
            case.options.get("top_k"), False, None, 0.0, 1, "triton", case.shared,
        ),
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.parametrize("build", [lambda: some(20, 20), lambda: nearest(20, 5)])
def test_a_compiled_layer_is_one_node_and_gives_what_an_eager_one_gives(
    build, top_k: int | None, device: str
) -> None:
    torch._dynamo.reset()
    model = ga.nn.KrauseAttention(12, 2, top_k=top_k, backend="triton").to(device)
    graph, nodes = build().to(device), []

    def note(module: torch.fx.GraphModule, _: object):
        names = (str(node.target) for node in module.graph.nodes)
        nodes.append([name for name in names if "graphattn" in name])
        return make_boxed_func(module.forward)

    backend = aot_autograd(fw_compiler=note, bw_compiler=note)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    x = torch.randn(2, 20, 12, device=device, requires_grad=True)
    d_y, leaves = torch.randn(2, 20, 12, device=device), [x, *model.parameters()]
    mine, theirs = compiled(x, graph), model(x, graph)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    for a, b in zip(
        torch.autograd.grad(mine, leaves, d_y),
        torch.autograd.grad(theirs, leaves, d_y),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert nodes == [["graphattn.attention.default"], ["graphattn.attention_backward.default"]]
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["bias of fewer neighbours than k", "hubs", "top 3 of a list"])
def test_second_derivatives_are_those_of_the_reference(name: str, device: str) -> None:
    """Hessian-vector products, through outputs and log-sums."""
    case, found = replace(CASES[name], batch=(1,)), []
    for backend, where, dtype in (
        ("triton", device, torch.float32),
        ("reference", "cpu", torch.float64),
    ):
        leaves = {n: x.to(where, dtype).requires_grad_() for n, x in case.tensors().items()}
        out, lse = attend(case, leaves, backend=backend, device=where)
        loss = out.square().sum() + lse[lse.isfinite()].square().sum()
        first = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
        along = sum(g.square().sum() for g in first)
        second = torch.autograd.grad(along, list(leaves.values()))
        found.append({n: g.detach().cpu() for n, g in zip(leaves, second, strict=True)})
    check(*found, 1e-5)

"""Gaussian kernel attention: one tensor is query, key and value, and is read once."""

from dataclasses import replace

import pytest
import torch
from cases_kernels import (
    Case,
    attend,
    check,
    check_half,
    errors,
    exact,
    kernels,
    kernels_and_exact,
    solve,
)

import graphattn as ga
from graphattn.kernels.shared.launch import recording

pytestmark = pytest.mark.usefixtures("device")

SINGLE = 4e-6  # relative RMS of float32; measured: at most 1e-6
HALF = (torch.float16, torch.bfloat16)


def gaussian(graph: ga.TokenGraph, **changes) -> Case:
    return Case(graph, **{"shared": True, "features": 6, **changes})


CASES = {
    "complete": gaussian(ga.complete_graph(63)),
    "complete, of many tiles": gaussian(ga.complete_graph(111), heads=1, kv_heads=1, features=9),
    "path with self loops": gaussian(ga.window_path_graph(50, 20, self_loops=True), batch=(2,)),
    "causal window": gaussian(ga.causal_window_graph(63, 10)),
    "causal": gaussian(ga.causal_graph(40), batch=(2,)),
    "dilated": gaussian(ga.dilated_window_graph(50, 2, 3)),
    "blocks": gaussian(ga.block_window_graph(50, 17, shift=5)),
    "sequences of many kinds, symmetric": gaussian(
        ga.batch([ga.complete_graph(20), ga.window_path_graph(15, 2, self_loops=True)])
    ),
    "sequences of many kinds": gaussian(ga.batch([ga.causal_graph(20), ga.complete_graph(17)])),
    "without self loops": gaussian(ga.window_path_graph(40, 4)),
    "padding": gaussian(ga.complete_graph(40), valid="both", batch=(2,)),
    "padding, causal": gaussian(ga.causal_window_graph(40, 9), valid="both", batch=(2,)),
    "masked targets": gaussian(ga.complete_graph(30), valid="targets"),
    "table": gaussian(ga.window_path_graph(40, 4, self_loops=True), table=True),
    "eps": gaussian(ga.complete_graph(20), eps=0.3),
    "one token": gaussian(ga.complete_graph(1)),
    "one feature": gaussian(ga.complete_graph(20), features=1),
    "wide": gaussian(ga.complete_graph(20), features=256, heads=1, kv_heads=1),
    "dot products of one tensor": gaussian(ga.causal_graph(30), score="dot"),
}
SYMMETRIC = [
    "complete",
    "path with self loops",
    "dilated",
    "blocks",
    "sequences of many kinds, symmetric",
    "eps",
]
ASYMMETRIC = ["causal window", "causal", "sequences of many kinds"]
ORDINARY = ["without self loops", "masked targets", "table", "dot products of one tensor"]


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_float64(name: str, device: str) -> None:
    check(kernels(CASES[name], device), exact(CASES[name]), SINGLE)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", ["complete", "causal", "padding", "wide", "one feature"])
def test_half_precision_costs_at_most_twice_what_it_must(
    name: str, dtype: torch.dtype, device: str
) -> None:
    check_half(CASES[name], dtype, device)


def launched(case: Case, device: str) -> list[str]:
    """The kernels of a forward and a backward, which do not run."""
    with recording() as launches:
        leaves = {n: x.to(device).requires_grad_() for n, x in case.tensors().items()}
        out, lse = attend(case, leaves, backend="triton", device=device)
        torch.autograd.grad(out.sum() + lse.sum(), list(leaves.values()))
    # A second launch of a kernel, with CAREFUL, ends at once if nothing is NaN.
    return [one.kernel.fn.__name__ for one in launches if not one.arguments.get("CAREFUL")]


@pytest.mark.parametrize("name", [*SYMMETRIC, "padding"])
def test_symmetric_graphs_take_the_five_product_backward(name: str, device: str) -> None:
    names = [n for n in launched(CASES[name], device) if n != "row_dots_kernel"]
    assert names == ["shared_forward_kernel", "shared_backward_kernel"]


@pytest.mark.parametrize("name", [*ASYMMETRIC, "padding, causal"])
def test_other_graphs_take_the_seven_product_backward(name: str, device: str) -> None:
    names = [n for n in launched(CASES[name], device) if n != "row_dots_kernel"]
    assert names == ["shared_forward_kernel", "d_query_kernel", "d_source_kernel"]


@pytest.mark.parametrize("name", ORDINARY)
def test_where_a_token_may_not_see_itself_nothing_is_shared(name: str, device: str) -> None:
    names = [n for n in launched(CASES[name], device) if n not in ("row_dots_kernel",)]
    assert names[:3] == ["band_forward_kernel", "d_query_kernel", "d_source_kernel"]


def test_equal_tensors_that_are_not_one_are_not_shared(device: str) -> None:
    x = CASES["complete"].tensors()["query"].to(device)
    graph = CASES["complete"].graph.to(device)
    with recording() as launches:
        ga.rbf_attention(x, x.clone(), x, graph, 1.0, backend="triton")
    assert [launch.kernel.fn.__name__ for launch in launches] == ["band_forward_kernel"]


@pytest.mark.parametrize("eps", [0.0, 0.1])
@pytest.mark.parametrize("build", [ga.complete_graph, ga.causal_graph])
def test_the_layer_learns_the_same_from_kernels(build, eps: float, device: str) -> None:
    graph = build(20)
    layer = ga.nn.GaussianKernelAttention(12, 2, rope=True, eps=eps, init_sigma=1.5)
    x = torch.randn(2, 20, 12)
    d_y = torch.randn(2, 20, 12)
    both = []
    for backend, where, dtype in kernels_and_exact(device):
        layer.to(where, dtype)
        leaf = x.to(where, dtype).requires_grad_()
        with ga.use_backend(backend):
            y = layer(leaf, graph.to(where))
        leaves = {"x": leaf, **dict(layer.named_parameters())}
        gradients = torch.autograd.grad(y, list(leaves.values()), d_y.to(where, dtype))
        both.append({"y": y, **dict(zip(leaves, gradients, strict=True))})
    kernel, expected = ({n: g.detach().cpu() for n, g in f.items()} for f in both)
    assert "log_sigma" in expected
    check(kernel, expected, SINGLE)


@pytest.mark.long
@pytest.mark.parametrize("name", ["complete", "causal window", "path with self loops"])
def test_a_common_offset_costs_outputs_nothing_and_gradients_what_it_must(
    name: str, device: str
) -> None:
    """A common offset of 100 costs outputs in float32 no digits, and gradients what it must.

    Values are large, too, and d_out . (value - out) loses digits in any program: gradients may err
    twice as much as those of the reference backend in float32.
    """
    case = replace(CASES[name], features=16, strength=(4.0, 4.0), offset=100.0)
    expected = exact(case)
    in_torch = solve(case, case.tensors(), case.upstream(), backend="reference")
    allowed = {n: 2 * e + 1e-6 for n, e in errors(in_torch, expected).items()}
    allowed |= {"out": 1e-6, "lse": 1e-6}
    got = errors(kernels(case, device), expected)
    assert all(got[n] <= allowed[n] for n in got), (got, allowed)

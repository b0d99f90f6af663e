"""Fused consensus takes tensors as they come: any strides, none at all, autocast, far addresses."""

from dataclasses import replace

import pytest
import torch
from cases_consensus import BACKEND, CASES, HALF, Case, check, differentiated, exact, kernels, move
from cases_edges import only
from torch import Tensor

import graphattn as ga

pytestmark = pytest.mark.usefixtures("device")

SINGLE = 5e-6


# Strides.


def reversed_order(x: Tensor) -> Tensor:
    """Return the numbers of `x` with the first dimension varying fastest in memory."""
    return x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))


def every_second(x: Tensor) -> Tensor:
    """Return the numbers of `x` with a NaN after each of them in memory."""
    wide = torch.full((*x.shape, 2), torch.nan, dtype=x.dtype, device=x.device)
    wide[..., 0] = x
    return wide[..., 0]


@pytest.mark.long
@pytest.mark.parametrize("laid_out", [reversed_order, every_second])
@pytest.mark.parametrize("name", ["path", "list, target", "rotated list", "padding of a list"])
def test_strides_change_no_result(name: str, laid_out, device: str) -> None:
    """Strides of the inputs, and of the gradient that comes in, change no result."""
    case = CASES[name]
    leaves = {n: laid_out(x.to(device)).requires_grad_() for n, x in case.tensors().items()}
    assert not leaves["target_hidden"].is_contiguous()
    d_new = laid_out(case.upstream().to(device))
    results = differentiated(move(case, leaves, device=device), leaves, d_new)
    check(results, exact(case), case, SINGLE)


@pytest.mark.long
def test_what_all_entries_of_a_batch_share_may_be_expanded(device: str) -> None:
    """A tensor that all entries of a batch share may be passed as an expanded view.

    The caller need not copy it. Its gradient is the sum over the batch.
    """
    for name in ("path", "list, target", "rotated rectangle"):
        case = CASES[name]
        tensors = {n: x.to(device).requires_grad_() for n, x in case.tensors().items()}
        expanded = {
            n: x.expand(3, *x.shape[1:]) if x.dim() == 4 and n != "shear" else x
            for n, x in tensors.items()
        }
        wider = replace(case, batch=(3,))
        d_new = case.upstream().expand(3, -1, -1, -1) / 3
        results = differentiated(move(wider, expanded, device=device), tensors, d_new)
        expected = exact(case)
        expected["new"] = expected["new"].expand(3, -1, -1, -1)
        check(results, expected, case, SINGLE)


# Nothing.

EMPTY = {
    "no tokens": ga.window_path_graph(0, 2),
    "no tokens, no list": only(0, 0),
    "no targets": only(0, 7),
    "no sources": only(7, 0),
    "no edges": only(12, 12),
    "no edges between others": only(5, 12),
    "single tokens": ga.batch([ga.window_path_graph(1, 2)] * 3),
    "an empty sequence": ga.batch([ga.window_path_graph(n, 2) for n in (0, 1, 0)]),
    "a table of nothing": ga.TokenGraph(
        neighbors=torch.full((12, 3), -1), num_targets=12, num_sources=12
    ),
}


@pytest.mark.parametrize("step", [0.1, "auto"])
@pytest.mark.parametrize("name", EMPTY)
def test_without_edges_nothing_moves(name: str, step: float | str, device: str) -> None:
    """All gradients are there, and zero but for that of the states, which is what comes in."""
    graph = EMPTY[name]
    for update in ("energy", "target"):
        if update == "energy" and graph.num_targets != graph.num_sources:
            continue
        case = Case(graph, update, step=step, other_states=True, xi=3)
        results = kernels(case, device)
        assert torch.equal(results.pop("new"), case.tensors()["state"])
        assert torch.equal(results.pop("state"), case.upstream())
        assert all((x == 0).all() for x in results.values())


@pytest.mark.parametrize("name", ["path", "list, target", "rotated rectangle", "padding"])
def test_an_empty_batch_is_no_work(name: str, device: str) -> None:
    case = replace(CASES[name], batch=(0,))
    results = kernels(case, device)
    assert results["new"].shape == case.tensors()["state"].shape
    assert all((x == 0).all() for x in results.values())


# Autocast.


@pytest.mark.long
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", ["path", "list"])
def test_under_autocast_a_layer_costs_no_more_than_in_torch(
    name: str, dtype: torch.dtype, device: str
) -> None:
    """Projections in half precision, the network's parameters in float32."""
    graph = CASES[name].graph.to(device)
    x = torch.randn(2, 20, 12, device=device)
    d_y = torch.randn(2, 20, 12, device=device)

    def run(backend: str, *, wide: bool = False) -> list[Tensor]:
        torch.manual_seed(0)
        layer = ga.nn.SelfConsensus(
            12, 2, rank=2, edge_hidden=6, step_size="learned", backend=backend
        )
        kind = torch.float64 if wide else torch.float32
        layer, leaf = layer.to(device, kind), x.to(kind).requires_grad_()
        with torch.autocast(device, dtype=dtype, enabled=not wide):
            y = layer(leaf, graph)
        assert y.dtype == (kind if wide else dtype)
        return [y, *torch.autograd.grad(y, [leaf, *layer.parameters()], d_y.to(y.dtype))]

    results = zip(run(BACKEND), run("structured"), run("reference", wide=True), strict=True)
    for mine, in_torch, expected in results:
        size = expected.norm().clamp(min=1e-2)
        got, of_torch = ((t.double() - expected).norm() / size for t in (mine, in_torch))
        # What torch computes in float32 inside, kernels may multiply in half precision.
        assert got <= 2 * of_torch + 4 * torch.finfo(dtype).eps

"""Kernels in float32 keep what the mathematics promises of a consensus step."""

import pytest
import torch
from cases_consensus import BACKEND, CASES, NETWORK, Case, kernels, move, solve
from cases_edges import hubs, some
from cases_kernels import random

import graphattn as ga

pytestmark = pytest.mark.usefixtures("device")

GRAPHS = {
    "path": ga.window_path_graph(16, 2),
    "list": some(16, 16),
    "hubs": hubs(),
    "side by side": ga.batch([ga.window_path_graph(9, 2), ga.complete_graph(5)]),
}


def energy(case: Case, tensors: dict[str, torch.Tensor], u: torch.Tensor) -> torch.Tensor:
    """1/2 the sum of (u_i - u_j)^T R_ij (u_i - u_j), per head, in float64."""
    source, target = case.graph.edge_index
    hidden = (tensors[n].double()[0] for n in ("target_hidden", "source_hidden"))
    network = ga.EdgeNetworkParameters(*(tensors[n].double() for n in NETWORK))
    R = ga.consensus_edge_matrices(*hidden, network, case.graph)
    apart = u.double()[0, target] - u.double()[0, source]
    return torch.einsum("nhd,nhde,nhe->h", apart, R, apart) / 2


@pytest.mark.long
@pytest.mark.parametrize("scale", [0.1, 1.0, 20.0])
@pytest.mark.parametrize("name", GRAPHS)
def test_the_energy_never_rises_under_the_automatic_step(
    name: str, scale: float, device: str
) -> None:
    """The energy falls in every automatic step, whether weights are small, ordinary or large.

    Three steps are taken with the same matrices.
    """
    case = Case(GRAPHS[name], step="auto", xi=4)
    tensors = case.tensors()
    for n in NETWORK:
        tensors[n] = tensors[n] * scale
    before = energy(case, tensors, tensors["state"])
    for _ in range(3):
        moved = move(case, {n: x.to(device) for n, x in tensors.items()}, device=device)
        tensors["state"] = moved.cpu()
        after = energy(case, tensors, tensors["state"])
        assert (after <= before * (1 + 1e-6)).all()
        assert (after < before).all()
        before = after


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("step", [0.7, "auto"])
@pytest.mark.parametrize("name", GRAPHS)
def test_a_constant_is_a_fixed_point_to_the_last_bit(
    name: str, step: float | str, dtype: torch.dtype, device: str
) -> None:
    for update in ("energy", "target"):
        case = Case(GRAPHS[name], update, step=step, xi=3)
        tensors = {n: x.to(device) for n, x in case.tensors(dtype).items()}
        constant = tensors["state"][:, :1].expand_as(tensors["state"])
        assert torch.equal(move(case, {**tensors, "state": constant}, device=device), constant)


@pytest.mark.long
@pytest.mark.parametrize("name", GRAPHS)
def test_energy_conserves_the_mean(name: str, device: str) -> None:
    """Every edge moves its two ends by opposite amounts."""
    case = Case(GRAPHS[name], step=0.1)
    found = kernels(case, device)
    total, moved = case.tensors()["state"].double().sum(1), found["new"].double().sum(1)
    torch.testing.assert_close(moved, total, rtol=1e-5, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("step", [0.2, "auto"])
@pytest.mark.parametrize(
    "graph",
    [
        ga.causal_graph(6),
        ga.causal_window_graph(9, 3),
        ga.from_edge_index(ga.causal_window_graph(9, 3).edge_index, 9),
    ],
    ids=["causal", "window", "list"],
)
def test_target_on_a_causal_graph_never_sees_the_future(
    graph: ga.TokenGraph, step: float | str, device: str
) -> None:
    """NaN from token t on changes no bit before it; gradients of what is before never reach t."""
    case = Case(graph, "target", step=step, heads=1, xi=3)
    tensors, whole = case.tensors(), kernels(case, device)
    for t in (1, 3, graph.num_targets - 1):
        later = {
            n: x if n in NETWORK else torch.cat([x[:, :t], torch.full_like(x[:, t:], torch.nan)], 1)
            for n, x in tensors.items()
        }
        d_new = case.upstream()
        d_new[:, t:] = 0
        new = solve(case, later, d_new, device=device)["new"]
        assert torch.equal(new[:, :t], whole["new"][:, :t])
        gradients = solve(case, tensors, d_new, device=device)
        for n in ("state", "target_hidden", "source_hidden"):
            assert (gradients[n][:, t:] == 0).all()


@pytest.mark.long
def test_shifting_all_states_shifts_the_new_ones(device: str) -> None:
    """Differences only: 1000 everywhere costs what float32 loses there, and no more."""
    for name in ("path", "list", "complete"):
        case = CASES[name]
        tensors = {n: x.to(device) for n, x in case.tensors().items()}
        # Multiples of 2^-10, so that a thousand more is no rounding.
        tensors["state"] = (tensors["state"] * 1024).round() / 1024
        new = move(case, tensors, device=device) - tensors["state"]
        far = {**tensors, "state": tensors["state"] + 1000}
        moved = move(case, far, device=device) - far["state"]
        torch.testing.assert_close(moved, new, rtol=0, atol=1e-4)


def test_the_automatic_target_step_averages(device: str) -> None:
    """The automatic target step with R = c I makes a token the average of what it sees, for any c.

    A token that sees nobody keeps its state.
    """
    for graph in (ga.window_path_graph(9, 2), some(9, 9, share=0.5)):
        A = graph.to_mask().double()
        u = random(1, 9, 2, 3, seed=1)
        case = Case(graph, "target", step="auto", features=3)
        for c in (-3.0, 0.0, 5.0):
            tensors = {n: torch.zeros_like(x) for n, x in case.tensors().items()}
            tensors["state"] = u.float()
            tensors["alpha_bias"] += c
            tensors["beta_bias"] -= torch.inf
            tensors = {n: x.to(device) for n, x in tensors.items()}
            new = move(case, tensors, backend=BACKEND, device=device).cpu().double()
            degree = A.sum(1, keepdim=True)
            average = torch.einsum("ij,bjhd->bihd", A / degree.clamp(min=1), u)
            expected = torch.where(degree[None, :, :, None] > 0, average, u)
            torch.testing.assert_close(new, expected, rtol=1e-5, atol=1e-5)

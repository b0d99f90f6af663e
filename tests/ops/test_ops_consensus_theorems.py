"""Consensus steps keep what the mathematics promises: descent, stability, causality."""

import math
import warnings
from collections.abc import Iterator

import oracle_ops as oracle
import pytest
import torch
from cases_ops import (
    ENERGY,
    FAST,
    GRAPHS,
    as_matrix,
    consensus_inputs,
    identity_network,
)

import graphattn as ga

EXACT = {"rtol": 1e-10, "atol": 1e-10}


@pytest.fixture(autouse=True, params=FAST)
def backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let "auto" take each of the fast backends."""
    with ga.use_backend(request.param):
        yield


@pytest.mark.parametrize("name", ENERGY)
def test_energy_is_exactly_a_gradient_step_of_the_energy(name: str) -> None:
    graph = GRAPHS[name]()
    inputs = consensus_inputs(graph)
    R, _, _ = oracle.edge_matrices(*inputs[2:], graph.to_mask())
    u = inputs.state.clone().requires_grad_()
    (slope,) = torch.autograd.grad(oracle.energy(u, R, graph.to_mask()), u, allow_unused=True)
    slope = torch.zeros_like(u) if slope is None else slope
    for eta in (0.05, torch.tensor([0.3, 0.7], dtype=torch.float64)):
        expected = inputs.state - torch.as_tensor(eta, dtype=torch.float64)[..., None] * slope
        torch.testing.assert_close(
            ga.consensus_update(*inputs, graph, eta, update="energy"), expected, **EXACT
        )


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("name", ENERGY)
def test_the_automatic_energy_step_never_oscillates(name: str, scale: float) -> None:
    """H = I - 2 eta L_sym is symmetric with eigenvalues in [0, 1], whatever the weights."""
    graph = GRAPHS[name]()
    inputs = consensus_inputs(graph, features=2)
    network = ga.EdgeNetworkParameters(*(scale * x for x in inputs.network))
    H = as_matrix(inputs._replace(network=network), graph, "auto")
    torch.testing.assert_close(H, H.mT, **EXACT)
    values = torch.linalg.eigvalsh(H)
    assert values.min() >= -1e-12
    assert values.max() <= 1 + 1e-12


def star(leaves_look: bool) -> ga.TokenGraph:
    hub, leaf = torch.zeros(8, dtype=torch.int64), torch.arange(1, 9)
    return ga.from_edge_index(torch.stack([hub, leaf] if leaves_look else [leaf, hub]), 9)


@pytest.mark.parametrize("leaves_look", [True, False])
@pytest.mark.filterwarnings("ignore:all edges of this edge list point backward")
def test_eight_leaves_and_a_hub_get_the_step_of_a_sixteenth(leaves_look: bool) -> None:
    """Counting in-edges only would give 1/4 or so, beyond the exact limit of 1/9."""
    graph = star(leaves_look)
    inputs = consensus_inputs(graph, heads=1, features=1, hidden=2)
    inputs = inputs._replace(network=identity_network(1, 1))
    laplacian = torch.eye(9, dtype=torch.float64) - as_matrix(inputs, graph, 1.0)[0]
    limit = 1 / torch.linalg.eigvalsh(laplacian).max().item()
    assert math.isclose(limit, 1 / 9, rel_tol=1e-10)
    step = torch.eye(9, dtype=torch.float64) - as_matrix(inputs, graph, "auto")[0]
    torch.testing.assert_close(step, laplacian / 16, **EXACT)


def test_the_automatic_target_step_is_per_row() -> None:
    """The automatic target step with R = c I gives the average of the neighbours, for any c."""
    graph = ga.window_path_graph(7, 2)
    inputs = consensus_inputs(graph, heads=1, hidden=2)
    for shift in (-3.0, 0.0, 5.0):
        network = identity_network(1, 3)
        network = network._replace(alpha_bias=network.alpha_bias + shift)
        new = ga.consensus_update(*inputs._replace(network=network), graph, "auto", update="target")
        A = graph.to_mask().double()
        average = torch.einsum("ij,jhd->ihd", A / A.sum(1, keepdim=True), inputs.state)
        torch.testing.assert_close(new, average, **EXACT)


@pytest.mark.parametrize(
    "graph",
    [
        ga.causal_graph(5),
        ga.causal_window_graph(5, 3),
        ga.batch([ga.causal_graph(2), ga.causal_window_graph(3, 2)]),
        ga.union(ga.causal_window_graph(5, 2), ga.causal_window_graph(5, 3)),
    ],
    ids=["causal", "causal window", "batch", "union"],
)
def test_energy_on_a_causal_graph_is_refused(graph: ga.TokenGraph) -> None:
    inputs = consensus_inputs(graph)
    with pytest.raises(ValueError, match=r"(?s)causal.*future.*update='target'"):
        ga.consensus_update(*inputs, graph, 0.1, update="energy")
    with pytest.raises(ValueError, match="update='target'"):
        ga.consensus_update(*inputs, graph, 0.1)  # energy is the default


@pytest.mark.parametrize(
    "graph",
    [ga.window_cycle_graph(n, 1) for n in (0, 1)]
    + [ga.complete_graph(n, self_loops=False) for n in (0, 1)],
    ids=["cycle 0", "cycle 1", "complete 0", "complete 1"],
)
@pytest.mark.parametrize("step", [0.1, "auto"])
def test_energy_runs_on_the_shortest_graphs_that_are_not_causal(
    graph: ga.TokenGraph, step: float | str
) -> None:
    """A loop over sequences of all lengths must not stop at one token."""
    inputs = consensus_inputs(graph)
    assert torch.equal(ga.consensus_update(*inputs, graph, step), inputs.state)


def test_energy_needs_one_set_of_tokens() -> None:
    graph = ga.bipartite_complete_graph(3, 4)
    with pytest.raises(ValueError, match=r"3 targets and 4 sources.*update='target'"):
        ga.consensus_update(*consensus_inputs(graph), graph, 0.1)


def test_a_foreign_edge_list_that_points_backward_warns_and_names_both_readings() -> None:
    graph = ga.from_edge_index(ga.causal_graph(5).edge_index, 5)
    inputs = consensus_inputs(graph)
    with pytest.warns(UserWarning, match=r"(?s)time.*update='target'.*update='energy'") as seen:
        new = ga.consensus_update(*inputs, graph, 0.1)
    assert seen[0].filename == __file__
    expected = oracle.consensus(*inputs, graph.to_mask(), 0.1)
    torch.testing.assert_close(new, expected, **EXACT)
    with pytest.warns(UserWarning, match="point backward"):
        ga.consensus_update(*inputs, graph.edge_index, 0.1)


@pytest.mark.parametrize("update", ["energy", "target"])
def test_other_edge_lists_do_not_warn(update: str) -> None:
    both_ways = ga.from_edge_index(torch.tensor([[0, 1], [1, 0]]), 2)
    only_loops = ga.from_edge_index(torch.tensor([[0, 1], [0, 1]]), 2)
    nothing = ga.from_edge_index(torch.zeros(2, 0, dtype=torch.int64), 2)
    forward = ga.from_edge_index(torch.tensor([[1], [0]]), 2)
    graphs = [both_ways, only_loops, nothing, forward, ga.window_path_graph(2, 1)]
    if update == "target":
        graphs.append(ga.from_edge_index(ga.causal_graph(2).edge_index, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for graph in graphs:
            ga.consensus_update(*consensus_inputs(graph), graph, 0.1, update=update)

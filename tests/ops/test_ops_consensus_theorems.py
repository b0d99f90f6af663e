"""Consensus steps are gradient steps, see no future, and refuse graphs that would need it.

That an automatic step is stable is a claim of `graphattn verify`.
"""

import warnings
from collections.abc import Iterator

import oracle_ops as oracle
import pytest
import torch
from cases_ops import (
    ENERGY,
    FAST,
    GRAPHS,
    consensus_inputs,
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


def test_self_loops_exert_no_force_and_do_not_shorten_the_automatic_energy_step() -> None:
    inputs = consensus_inputs(ga.window_path_graph(9, 2))
    without = ga.consensus_update(*inputs, ga.window_path_graph(9, 2), "auto")
    graph = ga.window_path_graph(9, 2, self_loops=True)
    torch.testing.assert_close(ga.consensus_update(*inputs, graph, "auto"), without, **EXACT)


@pytest.mark.parametrize("step", [0.2, "auto"])
@pytest.mark.parametrize("graph", [ga.causal_graph(8), ga.causal_window_graph(8, 3)])
def test_target_on_a_causal_graph_never_sees_the_future(
    graph: ga.TokenGraph, step: float | str
) -> None:
    inputs = consensus_inputs(graph, batch=(2,))
    leaves = [x.requires_grad_() for x in (inputs.state, *inputs[2:4])]
    old = ga.consensus_update(*inputs, graph, step, update="target")
    for t in range(8):
        later = [
            torch.cat([x[:, :t], torch.full_like(x[:, t:], torch.nan)], dim=1)
            for x in (inputs.state, inputs.state, *inputs[2:4])
        ]
        new = ga.consensus_update(*later, inputs.network, graph, step, update="target")
        assert torch.equal(new[:, :t], old[:, :t])
        if t:
            for gradient in torch.autograd.grad(old[:, :t].sum(), leaves, retain_graph=True):
                assert (gradient[:, t:] == 0).all()


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

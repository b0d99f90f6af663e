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
    ConsensusInputs,
    consensus_inputs,
    identity_network,
    random_mask,
)
from torch import Tensor

import graphattn as ga

EXACT = {"rtol": 1e-10, "atol": 1e-10}


@pytest.fixture(autouse=True, params=FAST)
def backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let "auto" take each of the fast backends."""
    with ga.use_backend(request.param):
        yield


def as_matrix(inputs: ConsensusInputs, graph: ga.TokenGraph, step: str | float, **kw) -> Tensor:
    """The step as matrices [H, ND, ND], from the op itself on the basis vectors."""
    N, H, D = inputs.state.shape
    basis = torch.eye(N * D, dtype=torch.float64).view(N * D, N, 1, D).expand(-1, -1, H, -1)
    hidden = (x.expand(N * D, *x.shape) for x in inputs[2:4])
    columns = ga.consensus_update(basis, basis, *hidden, inputs.network, graph, step, **kw)
    return columns.permute(2, 1, 3, 0).reshape(H, N * D, N * D)


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


@pytest.mark.parametrize("seed", range(10))
def test_energy_on_asymmetric_graphs_descends_the_energy(seed: int) -> None:
    """The energy update descends the energy on graphs whose in- and out-degrees differ.

    D_out - W would not do there (the paper's slip).
    """
    mask = random_mask(7, 7, 0.35, seed=seed)
    mask[0] = True
    graph = ga.from_mask(mask)
    inputs = consensus_inputs(graph, seed=seed)
    R, _, _ = oracle.edge_matrices(*inputs[2:], mask)
    u = inputs.state.clone().requires_grad_()
    before = oracle.energy(u, R, mask)
    (slope,) = torch.autograd.grad(before, u)
    torch.testing.assert_close(
        ga.consensus_update(*inputs, graph, 0.01), inputs.state - 0.01 * slope, **EXACT
    )
    after = oracle.energy(ga.consensus_update(*inputs, graph, "auto"), R, mask)
    assert after < before


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("seed", range(6))
def test_the_automatic_energy_step_never_oscillates(seed: int, scale: float) -> None:
    """H = I - 2 eta L_sym is symmetric with eigenvalues in [0, 1], whatever the weights."""
    mask = random_mask(7, 7, 0.2 + 0.1 * seed, seed=seed)
    graph = ga.from_mask(mask)
    inputs = consensus_inputs(graph, features=2, shared_network=seed % 2 == 0, seed=seed)
    network = ga.EdgeNetworkParameters(*(scale * x for x in inputs.network))
    H = as_matrix(inputs._replace(network=network), graph, "auto")
    torch.testing.assert_close(H, H.mT, **EXACT)
    values = torch.linalg.eigvalsh(H)
    assert values.min() >= -1e-12
    assert values.max() <= 1 + 1e-12


@pytest.mark.parametrize("name", ENERGY)
def test_the_automatic_energy_step_is_safe_on_every_graph(name: str) -> None:
    graph = GRAPHS[name]()
    values = torch.linalg.eigvalsh(as_matrix(consensus_inputs(graph, features=2), graph, "auto"))
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


def test_self_loops_exert_no_force_and_do_not_shorten_the_automatic_energy_step() -> None:
    inputs = consensus_inputs(ga.window_path_graph(9, 2))
    without = ga.consensus_update(*inputs, ga.window_path_graph(9, 2), "auto")
    graph = ga.window_path_graph(9, 2, self_loops=True)
    torch.testing.assert_close(ga.consensus_update(*inputs, graph, "auto"), without, **EXACT)


def test_the_automatic_energy_step_is_per_head() -> None:
    """A stiff second head must not slow down the first."""
    graph = ga.window_path_graph(6, 1)
    inputs = consensus_inputs(graph)
    stiff = inputs.network._replace(
        alpha_bias=inputs.network.alpha_bias + torch.tensor([0.0, 50.0], dtype=torch.float64)
    )
    plain = ga.consensus_update(*inputs, graph, "auto")
    other = ga.consensus_update(*inputs._replace(network=stiff), graph, "auto")
    assert torch.equal(plain[:, 0], other[:, 0])
    assert not torch.equal(plain[:, 1], other[:, 1])


def test_the_automatic_energy_step_is_per_sequence() -> None:
    """The automatic energy step of a sequence does not depend on the rest of the batch.

    That holds for a packed batch and for a leading dimension alike.
    """
    parts = [ga.window_path_graph(5, 1), ga.complete_graph(7), ga.window_path_graph(1, 1)]
    packed = ga.batch(parts)
    inputs = consensus_inputs(packed)
    together = ga.consensus_update(*inputs, packed, "auto")
    start = 0
    for part in parts:
        own = slice(start, start + part.num_targets)
        alone = [x[own] for x in inputs[:4]]
        torch.testing.assert_close(
            together[own], ga.consensus_update(*alone, inputs.network, part, "auto"), **EXACT
        )
        start += part.num_targets
    graph = parts[0]
    inputs = consensus_inputs(graph, batch=(3,))
    together = ga.consensus_update(*inputs, graph, "auto")
    for b in range(3):
        alone = ga.consensus_update(*(x[b] for x in inputs[:4]), inputs.network, graph, "auto")
        torch.testing.assert_close(together[b], alone, **EXACT)


def test_the_automatic_energy_step_forgets_invalid_tokens() -> None:
    """A padded sequence takes the step it would take without its padding."""
    inputs = consensus_inputs(ga.window_path_graph(9, 2))
    valid = torch.arange(9) < 6
    new = ga.consensus_update(*inputs, ga.window_path_graph(9, 2), "auto", valid=valid)
    short = [x[:6] for x in inputs[:4]]
    alone = ga.consensus_update(*short, inputs.network, ga.window_path_graph(6, 2), "auto")
    torch.testing.assert_close(new[:6], alone, **EXACT)
    assert torch.equal(new[6:], inputs.state[6:])


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

"""Consensus gives the numbers of its equations, over every kind of graph."""

from collections.abc import Iterator

import oracle_ops as oracle
import pytest
import torch
from cases_ops import (
    ENERGY,
    FAST,
    FEW,
    GRAPHS,
    consensus_inputs,
    edge_network,
    isolated_mask,
    random,
    valid_tokens,
)
from torch import Tensor

import graphattn as ga

EXACT = {"rtol": 1e-10, "atol": 1e-10}
CASES = [(name, "energy") for name in ENERGY] + [(name, "target") for name in GRAPHS]
SOME = [*FEW, "random rectangle"]

OPTIONS = {
    "plain": {},
    "one batch dimension": {"batch": (2,)},
    "two batch dimensions": {"batch": (2, 2), "heads": 1, "hidden": 2},
    "one network for all heads": {"shared_network": True, "heads": 3, "hidden": 2},
    "separate trunks": {"separate_trunks": True},
    "separate trunks, one network": {"separate_trunks": True, "shared_network": True},
    "rank 1": {"rank": 1},
    "rank above the features": {"rank": 3, "features": 2},
    "one feature": {"features": 1, "rank": 2},
}


@pytest.fixture(autouse=True, params=FAST)
def backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let "auto" take each of the fast backends."""
    with ga.use_backend(request.param):
        yield


def check(inputs, graph: ga.TokenGraph, step: float | Tensor | str, **arguments) -> None:
    lengths = tuple(targets for targets, _ in graph.sizes)
    expected = oracle.consensus(*inputs, graph.to_mask(), step, lengths=lengths, **arguments)
    torch.testing.assert_close(
        ga.consensus_update(*inputs, graph, step, **arguments), expected, **EXACT
    )


@pytest.mark.parametrize(
    ("name", "update", "option"),
    [
        (name, update, option)
        for name, update in CASES
        for option in OPTIONS
        if option == "plain" or name in SOME
    ],
)
def test_one_step_is_its_equation(name: str, update: str, option: str) -> None:
    graph = GRAPHS[name]()
    check(consensus_inputs(graph, **OPTIONS[option]), graph, 0.1, update=update)


@pytest.mark.parametrize(("name", "update"), CASES)
def test_the_automatic_step_is_its_equation(name: str, update: str) -> None:
    graph = GRAPHS[name]()
    check(consensus_inputs(graph, heads=1, batch=(2,)), graph, "auto", update=update)


@pytest.mark.parametrize("shape", [(), (1,), (2,), (8, 1), (8, 2), (3, 1, 1), (3, 8, 2)], ids=str)
@pytest.mark.parametrize("update", ["energy", "target"])
def test_a_step_broadcasts_to_tokens_and_heads(update: str, shape: tuple[int, ...]) -> None:
    graph = ga.from_mask(isolated_mask())
    step = random(*shape, seed=3).abs()
    check(consensus_inputs(graph, batch=(3,)), graph, step, update=update)


@pytest.mark.parametrize("step", [0.2, "auto"])
@pytest.mark.parametrize(("name", "update"), [("grid", "energy"), ("random rectangle", "target")])
def test_disagreement_replaces_both_states_inside_the_differences_only(
    name: str, update: str, step: float | str
) -> None:
    graph = GRAPHS[name]()
    inputs = consensus_inputs(graph, batch=(2,))
    pair = random(*inputs.state.shape, seed=6), random(*inputs.neighbor_state.shape, seed=7)
    check(inputs, graph, step, update=update, disagreement=pair)


@pytest.mark.parametrize("step", [0.2, "auto"])
@pytest.mark.parametrize("kind", ["shared", "per batch", "nothing valid"])
@pytest.mark.parametrize(
    ("name", "update"),
    [("path", "energy"), ("mixed batch", "energy"), ("causal", "target"), ("grid", "target")],
)
def test_an_edge_that_touches_an_invalid_token_is_no_edge(
    name: str, update: str, kind: str, step: float | str
) -> None:
    graph = GRAPHS[name]()
    N = graph.num_targets
    valid = {
        "shared": valid_tokens(N),
        "per batch": valid_tokens(2, N),
        "nothing valid": torch.zeros(2, N, dtype=torch.bool),
    }[kind]
    check(consensus_inputs(graph, batch=(2,)), graph, step, update=update, valid=valid)


@pytest.mark.parametrize("step", [0.2, "auto"])
def test_cross_consensus_takes_a_pair_of_valid_masks(step: float | str) -> None:
    graph = GRAPHS["random rectangle"]()
    inputs = consensus_inputs(graph, batch=(2,))
    for valid in (
        (valid_tokens(5), valid_tokens(2, 8, seed=1)),
        (None, valid_tokens(8)),
        (valid_tokens(2, 5), None),
    ):
        check(inputs, graph, step, update="target", valid=valid)


@pytest.mark.parametrize("option", ["plain", "one batch dimension", *list(OPTIONS)[3:]])
@pytest.mark.parametrize("name", ["path", "grid with class token", "random rectangle"])
def test_edge_matrices_are_their_equation_and_positive_definite(name: str, option: str) -> None:
    graph = GRAPHS[name]()
    _, _, a, b, network = consensus_inputs(graph, **OPTIONS[option])
    expected, alpha, beta = oracle.edge_matrices(a, b, network, graph.to_mask())
    R = ga.consensus_edge_matrices(a, b, network, graph)
    torch.testing.assert_close(R, expected, **EXACT)
    assert torch.equal(R, R.mT)
    values = torch.linalg.eigvalsh(R)
    slack = 1e-12 * (alpha + beta)
    assert (values[..., 0] >= alpha - slack).all()
    assert (values[..., -1] <= alpha + beta + slack).all()


def test_a_zero_row_of_lambda_stays_zero() -> None:
    """Rows [0, 0, 0] and [3, 0, 4]: R = alpha I + beta / 2 times the second one's projector."""
    network = edge_network(1, 3, 2, rank=2)
    zero = torch.zeros_like(network.shear)
    rows = torch.tensor([[[0.0, 0.0, 0.0], [3.0, 0.0, 4.0]]], dtype=torch.float64)
    network = network._replace(shear=zero, shear_bias=rows.requires_grad_())
    hidden = torch.zeros(2, 1, 2, dtype=torch.float64)
    graph = ga.window_path_graph(2, 1)
    R = ga.consensus_edge_matrices(hidden, hidden, network, graph)
    alpha, beta = (torch.log1p(x.exp()) for x in (network.alpha_bias[0], network.beta_bias[0]))
    unit = torch.tensor([0.6, 0.0, 0.8], dtype=torch.float64)
    expected = alpha * torch.eye(3, dtype=torch.float64) + beta / 2 * torch.outer(unit, unit)
    torch.testing.assert_close(R, expected.expand(2, 1, 3, 3), **EXACT)
    u = random(2, 1, 3, seed=1)
    new = ga.consensus_update(u, u, hidden, hidden, network, graph, 0.1)
    (gradient,) = torch.autograd.grad(new.square().sum(), rows)
    assert gradient.isfinite().all()
    assert (gradient[0, 0] == 0).all()


@pytest.mark.parametrize("step", [0.3, "auto"])
@pytest.mark.parametrize("update", ["energy", "target"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_token_without_edges_keeps_its_state_to_the_last_bit(
    dtype: torch.dtype, update: str, step: float | str
) -> None:
    mask = isolated_mask()
    graph = ga.from_mask(mask)
    inputs = consensus_inputs(graph, dtype=dtype)
    leaves = [x.requires_grad_() for x in (inputs.state, *inputs[2:4], *inputs.network)]
    new = ga.consensus_update(*inputs, graph, step, update=update)
    still = ~mask.any(1) if update == "target" else ~(mask.any(1) | mask.any(0))
    assert still.any()
    assert new.dtype == dtype
    assert torch.equal(new[still], inputs.state[still])
    gradients = torch.autograd.grad(new[still].sum(), leaves)
    assert torch.equal(gradients[0], still[:, None, None].expand_as(new).to(dtype))
    assert all((gradient == 0).all() for gradient in gradients[1:])

"""Fused consensus by kernels: new states and all gradients are those of float64.

Everything the kernels allocate is NaN before they write it (see `device`), so an element left out
fails.
"""

import copy

import pytest
import torch
from cases_consensus import (
    BACKEND,
    CASES,
    HALF,
    NETWORK,
    Case,
    check,
    check_half,
    exact,
    in_float64,
    kernels,
    solve,
)
from cases_edges import nearest, some
from cases_kernels import coins, random
from torch import Tensor
from watched_memory import watched_memory

import graphattn as ga

pytestmark = pytest.mark.usefixtures("device")

SINGLE = 5e-6  # relative RMS of float32; torch in float32: at most 1.4e-6


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_float64(name: str, device: str) -> None:
    with watched_memory(device):
        results = kernels(CASES[name], device)
    check(results, exact(CASES[name]), CASES[name], SINGLE)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(
    "name",
    ["path", "path with self loops, target", "dilated", "windows side by side",
     "tokens without edges", "hubs", "more sources", "rotated, target", "padding, target",
     "one network for all heads"],
)  # fmt: skip
def test_half_precision_costs_at_most_twice_what_it_must(
    name: str, dtype: torch.dtype, device: str
) -> None:
    check_half(CASES[name], dtype, device)


@pytest.mark.long
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_new_states_and_gradients_keep_their_dtypes(dtype: torch.dtype, device: str) -> None:
    """States in half precision, a network in float32: what layers under autocast give."""
    case = CASES["path"]
    tensors = {n: x if n in NETWORK else x.to(dtype) for n, x in case.tensors().items()}
    results = solve(case, tensors, case.upstream(dtype), device=device)
    assert {n: x.dtype for n, x in results.items()} == {
        "new": dtype, **{n: x.dtype for n, x in tensors.items()}
    }  # fmt: skip
    # A network rounded once more may cost what that costs.
    allowed = 4 * torch.finfo(dtype).eps
    check(results, in_float64(case, tensors, case.upstream(dtype)), case, allowed)


@pytest.mark.long
@pytest.mark.parametrize(
    ("features", "rank", "xi"),
    [(1, 1, 1), (1, 4, 3), (16, 1, 16), (17, 3, 5), (3, 5, 40), (40, 2, 33), (64, 4, 8)],
)
def test_any_width_rank_and_hidden_width(features: int, rank: int, xi: int, device: str) -> None:
    for graph in (ga.window_path_graph(9, 2), some(9, 9)):
        case = Case(graph, heads=1, features=features, rank=rank, xi=xi, step="auto")
        check(kernels(case, device), exact(case), case, SINGLE)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [(256, 1, 3), (100, 4, 20), (24, 11, 70)], ids=str)
def test_wide_heads(size: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    """Rows of Lambda of more numbers than a tile holds, and a hidden vector of several chunks."""
    features, rank, xi = size
    case = Case(
        ga.window_path_graph(5, 1), "target", heads=1, features=features, rank=rank, xi=xi
    )  # fmt: skip
    if dtype == torch.float32:
        check(kernels(case, device), exact(case), case, 1e-5)  # the wider, the longer the sums
    else:
        check_half(case, dtype, device)


# Layers.

LAYERS = {
    "learned step": {"step_size": "learned"},
    "automatic step": {"step_size": "auto"},
    "target": {"update": "target", "step_size": "auto"},
    "rotated": {"rope": True},
    "rotated, target": {"rope": True, "update": "target", "step_size": "learned"},
    "isometric": {"rope": "isometric", "step_size": "auto"},
    "one network for all heads": {"edge_input": "full"},
}
GRAPHS = {
    "path": ga.window_path_graph(14, 2),
    "side by side": ga.batch([ga.window_path_graph(9, 2), ga.window_path_graph(5, 2)]),
    "neighbours": nearest(14, 3),
}


def same_outputs_and_gradients(layer: torch.nn.Module, device: str, *inputs, **options) -> None:
    """Assert that a layer on kernels gives what its copy on the reference backend gives in float64.

    Every output and gradient is right to 1e-5, relative to its norm.
    """
    twin = copy.deepcopy(layer).double()
    twin.backend, layer.backend = "reference", BACKEND
    layer.to(device)
    graph, tokens = inputs[1], [x for x in inputs if isinstance(x, Tensor)]
    results = []
    for model, where, dtype in ((layer, device, torch.float32), (twin, "cpu", torch.float64)):
        leaves = [x.to(where, dtype).requires_grad_() for x in tokens]
        moved = {n: x.to(where) for n, x in options.items()}
        y = model(leaves[0], graph.to(where), *leaves[1:], **moved)
        d_y = random(*y.shape, seed=9).to(y)
        gradients = torch.autograd.grad(y, [*leaves, *model.parameters()], d_y)
        names = [*(f"input {i}" for i in range(len(leaves))), *dict(model.named_parameters())]
        results.append({"y": y, **dict(zip(names, gradients, strict=True))})
    for name, theirs in results[1].items():
        off = results[0][name].detach().cpu().double() - theirs.detach()
        assert off.norm() <= 1e-5 * theirs.detach().norm().clamp(min=1e-2), name


@pytest.mark.long
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_gives_the_numbers_and_gradients_of_the_reference(
    name: str, graph: str, device: str
) -> None:
    layer = ga.nn.SelfConsensus(12, 2, rank=2, edge_hidden=6, **LAYERS[name])
    options = {"valid": coins(2, 14, seed=2, share=0.8)} if graph == "path" else {}
    x = random(2, 14, 12, seed=1).float()
    same_outputs_and_gradients(layer, device, x, GRAPHS[graph], **options)


@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize(
    "graph", [ga.bipartite_window_graph(14, 2), some(14, 9)], ids=["window", "list"]
)
def test_cross_consensus_does_too(graph: ga.TokenGraph, rope: bool, device: str) -> None:
    layer = ga.nn.CrossConsensus(
        12, 2, rank=2, edge_hidden=6, context_dim=8, rope=rope, step_size="learned"
    )
    x, context = random(2, 14, 12, seed=1), random(2, graph.num_sources, 8, seed=2)
    same_outputs_and_gradients(layer, device, x.float(), graph, context.float())


@pytest.mark.long
def test_tokens_one_by_one_are_a_forward_over_all(device: str) -> None:
    layer = ga.nn.SelfConsensus(
        8, 2, rank=2, edge_hidden=4, update="target", step_size="auto", backend=BACKEND
    ).to(device)
    x = torch.randn(2, 13, 8, device=device)
    with torch.no_grad():
        whole = layer(x, ga.causal_window_graph(13, 4).to(device))
        cache = layer.init_cache(batch=2, window=4)
        steps = [layer.step(x[:, :6], cache), *(layer.step(x[:, t], cache) for t in range(6, 13))]
    outputs = torch.cat([y if y.dim() == 3 else y[:, None] for y in steps], dim=1)
    torch.testing.assert_close(outputs, whole, rtol=1e-5, atol=1e-5)

"""Fused consensus by kernels: new states and all gradients are those of float64.

Everything the kernels allocate is NaN before they write it (see `device`), so an element left out
fails.
"""

import copy
import math
from dataclasses import replace

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
    errors,
    exact,
    in_float64,
    kernels,
    move,
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
        found = kernels(CASES[name], device)
    check(found, exact(CASES[name]), CASES[name], SINGLE)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(
    "name",
    [
        "path",
        "path with self loops, target",
        "dilated",
        "windows side by side",
        "tokens without edges",
        "hubs",
        "more sources",
        "rotated, target",
        "padding, target",
        "one network for all heads",
    ],
)
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
    found = solve(case, tensors, case.upstream(dtype), device=device)
    assert {n: x.dtype for n, x in found.items()} == {
        "new": dtype, **{n: x.dtype for n, x in tensors.items()}
    }  # fmt: skip
    # A network rounded once more may cost what that costs.
    allowed = 4 * torch.finfo(dtype).eps
    check(found, in_float64(case, tensors, case.upstream(dtype)), case, allowed)


# Closed forms.


def constant_network(
    heads: int, features: int, xi: int, alpha: float, beta: float, rows: Tensor
) -> ga.EdgeNetworkParameters:
    """Make a network with the same R on every edge.

    R is alpha I + beta / r times the sum of the rows' projectors.
    """
    zeros = [torch.zeros(heads, xi), torch.zeros(heads, len(rows), features, xi)]
    to_softplus = [torch.full((heads,), math.log(math.expm1(x))) for x in (alpha, beta)]
    return ga.EdgeNetworkParameters(
        zeros[0], to_softplus[0], zeros[0], to_softplus[1], zeros[1],
        rows.expand(heads, *rows.shape).contiguous(),
    )  # fmt: skip


@pytest.mark.parametrize("update", ["energy", "target"])
@pytest.mark.parametrize(
    "graph",
    [ga.window_path_graph(20, 3), some(20, 20), nearest(20, 4)],
    ids=["path", "list", "neighbours"],
)
def test_with_one_matrix_for_all_edges_a_step_is_a_laplacian(
    graph: ga.TokenGraph, update: str, device: str
) -> None:
    """u' = u - eta L u R with L = D - W, of the symmetrised weights for "energy"."""
    rows = torch.tensor([[3.0, 0.0, 4.0], [0.0, 2.0, 0.0]])
    network = constant_network(2, 3, 4, alpha=0.7, beta=1.3, rows=rows)
    unit = rows / rows.norm(dim=1, keepdim=True)
    R = 0.7 * torch.eye(3) + 1.3 / 2 * unit.T @ unit
    W = graph.to_mask().double()
    W = W + W.T if update == "energy" else W
    L = W.sum(1).diag() - W
    u, hidden = random(20, 2, 3, seed=1), random(20, 2, 4, seed=2).float()
    expected = u - 0.1 * torch.einsum("ij,jhd,de->ihe", L, u, R.double())
    new = ga.consensus_update(
        *(x.float().to(device) for x in (u, u, hidden, hidden)),
        ga.EdgeNetworkParameters(*(x.to(device) for x in network)),
        graph.to(device), 0.1, update=update, backend=BACKEND,
    )  # fmt: skip
    torch.testing.assert_close(new.cpu().double(), expected, rtol=1e-5, atol=1e-5)


def test_one_edge_by_hand(device: str) -> None:
    """D = xi = r = 1: h = gelu(a + b), R = softplus(h) + softplus(2 h), Lambda = +-1."""
    a, b, eta = 0.3, 0.4, 0.25
    h = (a + b) / 2 * (1 + math.erf((a + b) / math.sqrt(2)))
    R = math.log1p(math.exp(h)) + math.log1p(math.exp(2 * h))
    moved = eta * R * (5.0 - 2.0)
    one, zero = torch.ones(1, 1), torch.zeros(1)
    network = (one, zero, 2 * one, zero, one.view(1, 1, 1, 1), zero.view(1, 1, 1))
    graph = ga.from_edge_index(torch.tensor([[1], [0]]), 2)  # token 0 looks at token 1
    u = torch.tensor([5.0, 2.0]).view(2, 1, 1)
    for update, expected in (("target", [5 - moved, 2.0]), ("energy", [5 - moved, 2 + moved])):
        new = ga.consensus_update(
            u.to(device), u.to(device),
            torch.full((2, 1, 1), a, device=device), torch.full((2, 1, 1), b, device=device),
            ga.EdgeNetworkParameters(*(x.to(device) for x in network)),
            graph.to(device), eta, update=update, backend=BACKEND,
        )  # fmt: skip
        torch.testing.assert_close(new.flatten().cpu(), torch.tensor(expected))


@pytest.mark.parametrize("who_looks", ["hub", "leaves"])
def test_eight_leaves_and_a_hub_get_the_step_of_a_sixteenth(who_looks: str, device: str) -> None:
    """R = I: the hub has degree 8, so "auto" is 1 / (2 * 8) for all tokens."""
    hub, leaf = torch.zeros(8, dtype=torch.int64), torch.arange(1, 9)
    edges = torch.stack([leaf, hub] if who_looks == "hub" else [hub, leaf])
    graph = ga.from_edge_index(edges, 9).to(device)
    network = constant_network(1, 1, 2, alpha=1.0, beta=1e-30, rows=torch.zeros(1, 1))
    network = network._replace(beta_bias=torch.full((1,), -1e9))
    u = torch.arange(9.0, device=device).view(9, 1, 1)
    new = ga.consensus_update(
        u, u, u.new_zeros(9, 1, 2), u.new_zeros(9, 1, 2),
        ga.EdgeNetworkParameters(*(x.to(device) for x in network)), graph, "auto", backend=BACKEND,
    ).flatten()  # fmt: skip
    expected = torch.arange(9.0) - torch.arange(9.0) / 16
    expected[0] = 36 / 16
    torch.testing.assert_close(new.cpu(), expected)


# Step sizes.


@pytest.mark.long
@pytest.mark.parametrize("shape", [(), (2,), (5, 1), (2, 1, 1), (2, 5, 2)], ids=str)
@pytest.mark.parametrize("update", ["energy", "target"])
def test_a_step_broadcasts_to_tokens_and_heads_and_gets_its_gradient(
    update: str, shape: tuple[int, ...], device: str
) -> None:
    for graph in (ga.window_path_graph(5, 1), some(5, 5)):
        case = Case(graph, update, batch=(2,), step=shape, valid="both", xi=3)
        check(kernels(case, device), exact(case), case, SINGLE)


@pytest.mark.long
def test_the_automatic_energy_step_is_per_sequence_and_per_head(device: str) -> None:
    """A stiff head, a stiff sequence of a batch and a stiff entry slow down nobody else."""
    packed = ga.batch([ga.window_path_graph(6, 2), ga.complete_graph(5), some(7, 7, share=0.5)])
    case = Case(packed, batch=(2,), step="auto")
    tensors = {n: x.to(device) for n, x in case.tensors().items()}
    before = move(case, tensors, device=device)
    stiff = {**tensors, "alpha_bias": tensors["alpha_bias"] + torch.tensor([0.0, 50.0]).to(device)}
    after = move(case, stiff, device=device)
    assert torch.equal(after[:, :, 0], before[:, :, 0])
    assert not torch.equal(after[:, :, 1], before[:, :, 1])
    for own in (slice(0, 6), slice(6, 11), slice(11, 18)):
        stiff = {n: x.clone() for n, x in tensors.items()}
        stiff["target_hidden"][1, own] *= 20
        after = move(case, stiff, device=device)
        changed = torch.zeros(18, dtype=torch.bool)
        changed[own] = True
        assert torch.equal(after[0], before[0])
        assert torch.equal(after[1, ~changed], before[1, ~changed])
        assert not torch.equal(after[1, changed], before[1, changed])


@pytest.mark.long
@pytest.mark.parametrize("banded", [True, False])
def test_self_loops_exert_no_force_and_do_not_shorten_the_automatic_energy_step(
    banded: bool, device: str
) -> None:
    def graph(self_loops: bool) -> ga.TokenGraph:
        window = ga.window_path_graph(15, 2, self_loops=self_loops)
        return window if banded else ga.from_edge_index(window.edge_index, 15)

    with_loops, without = (Case(graph(loops), step="auto") for loops in (True, False))
    found = kernels(with_loops, device)
    check(found, exact(without), without, SINGLE)


# Sizes.


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


@pytest.mark.long
@pytest.mark.parametrize("batch", [(), (3,), (2, 1), (2, 2)], ids=str)
def test_any_leading_dimensions(batch: tuple[int, ...], device: str) -> None:
    for graph in (ga.window_path_graph(6, 1), some(6, 6)):
        case = Case(graph, heads=1, batch=batch, valid="both", step="auto", xi=3)
        check(kernels(case, device), exact(case), case, SINGLE)


@pytest.mark.long
@pytest.mark.parametrize("one_network", [False, True])
def test_a_batch_gives_what_each_sequence_gives_alone(one_network: bool, device: str) -> None:
    parts = [ga.window_path_graph(n, 1) for n in (9, 1, 6)]
    for packed in (ga.batch(parts), ga.batch([parts[0], parts[1], some(6, 6)])):
        case = Case(packed, "target", one_network=one_network, step="auto", xi=3)
        tensors, together = case.tensors(), kernels(case, device)
        for own in (slice(0, 9), slice(9, 10), slice(10, 16)):
            alone = replace(case, graph=ga.from_mask(packed.to_mask()[own, own]))
            x = {n: t if n in NETWORK else t[:, own] for n, t in tensors.items()}
            found = solve(alone, x, case.upstream()[:, own], device=device)
            for n in ("new", "state", "target_hidden", "source_hidden"):
                torch.testing.assert_close(found[n], together[n][:, own], rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_a_window_and_the_list_of_its_edges_give_the_same(device: str) -> None:
    for name in ("dilated, target", "causal window", "windows side by side, target"):
        case = CASES[name]
        N = case.graph.num_targets
        listed = replace(case, graph=ga.from_edge_index(case.graph.edge_index, N))
        check(kernels(listed, device), exact(case), case, SINGLE)


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
        found = torch.autograd.grad(y, [*leaves, *model.parameters()], d_y)
        names = [*(f"input {i}" for i in range(len(leaves))), *dict(model.named_parameters())]
        results.append({"y": y, **dict(zip(names, found, strict=True))})
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
    found = torch.cat([y if y.dim() == 3 else y[:, None] for y in steps], dim=1)
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5)


def test_the_measure_of_errors_sees_a_wrong_bias_and_a_wrong_step() -> None:
    """Otherwise those that cancel could be anything."""
    case = replace(CASES["path"], step=(2,))
    right = exact(case)
    for name in ("alpha_bias", "beta_bias", "shear_bias", "step_size"):
        wrong = {**right, name: 1.01 * right[name] + 1e-3 * right[name].norm()}
        assert errors(wrong, right, case, floor=0.1)[name] > 10 * SINGLE


def test_the_gelu_of_half_precision_is_right_to_5e_5(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels' GELU for half precision is right to 5e-5, and its slope to 5e-4.

    256 numbers go through the kernels' own functions. Errors of GELU are relative to |x| where that
    is above 1. For single precision both are right to 2e-6.
    """
    import triton
    import triton.language as tl

    from graphattn.kernels.consensus.math import gelu, gelu_slope

    for name, known in (("tl", tl), ("gelu", gelu), ("gelu_slope", gelu_slope)):
        monkeypatch.setitem(globals(), name, known)  # a kernel sees nothing else

    @triton.jit
    def both(p_x, p_gelu, p_slope, SIZE: tl.constexpr, HALF: tl.constexpr):
        o_x = tl.arange(0, SIZE)
        b_x = tl.load(p_x + o_x)
        tl.store(p_gelu + o_x, gelu(b_x, HALF))
        tl.store(p_slope + o_x, gelu_slope(b_x, HALF))

    x = torch.cat([torch.linspace(-9, 9, 254), torch.tensor([-200.0, 200.0])]).to(device)
    exact = x.double().cpu().requires_grad_()
    expected = torch.nn.functional.gelu(exact)
    (slope,) = torch.autograd.grad(expected.sum(), exact)
    for half, allowed, allowed_slope in ((True, 5e-5, 5e-4), (False, 2e-6, 2e-6)):
        found, found_slope = torch.empty_like(x), torch.empty_like(x)
        both[(1,)](x, found, found_slope, SIZE=256, HALF=half)
        error = (found.cpu() - expected).abs() / exact.abs().clamp(min=1)
        assert error.max() <= allowed
        assert (found_slope.cpu() - slope).abs().max() <= allowed_slope

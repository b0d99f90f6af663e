"""How many digits come out: half precision, large offsets, autocast."""

import oracle_ops as oracle
import pytest
import torch
from cases_ops import GRAPHS, consensus_inputs, qkv, random
from torch import Tensor

import graphattn as ga

HALF = [torch.float16, torch.bfloat16]
NAMES = ["path with self loops", "complete", "grid with class token", "isolated targets"]


def half_ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Half the distance between neighbouring numbers of `dtype` around x: one rounding."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(x.abs().clamp(min=info.tiny)).exponent - 1
    return torch.ldexp(torch.full_like(x, info.eps / 2), exponent)


def one_rounding(low: Tensor, single: Tensor, exact: Tensor) -> None:
    """`low` is `single` (float32) rounded once, and no further from `exact` than that explains."""
    assert single.dtype == torch.float32
    assert torch.equal(low, single.to(low.dtype))
    error = (low.double() - exact).abs()
    own = (single.double() - exact).abs()
    assert (error <= own + half_ulp(single.double(), low.dtype) * (1 + 1e-12)).all()
    # float32 itself is good to a few roundings, so the half-precision result is, too
    assert own.norm() <= 2e-6 * exact.norm()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("arguments", [{}, {"top_k": 2}, {"eps": 1e-3}], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_half_precision_attention_is_rounded_once(
    name: str, arguments: dict, dtype: torch.dtype
) -> None:
    graph = GRAPHS[name]()
    mask = graph.to_mask()
    half = qkv(graph, batch=(2,), heads=4, kv_heads=2, features=4, dtype=dtype)
    single = [x.float() for x in half]
    low, lse = ga.rbf_attention(*half, graph, 1.5, return_lse=True, **arguments)
    assert low.dtype == dtype
    assert lse.dtype == torch.float32
    exact = oracle.attention(*half, mask, sigma=1.5, **arguments)
    one_rounding(low, ga.rbf_attention(*single, graph, 1.5, **arguments), exact.out)
    weights = ga.attention_weights(*half[:2], graph, sigma=1.5, **arguments)
    one_rounding(
        weights,
        ga.attention_weights(*single[:2], graph, sigma=1.5, **arguments),
        oracle.per_edge(exact.weights, mask),
    )
    if "eps" not in arguments:
        low, lse = ga.dot_product_attention(*half, graph, return_lse=True, **arguments)
        assert lse.dtype == torch.float32
        exact = oracle.attention(*half, mask, **arguments)
        one_rounding(low, ga.dot_product_attention(*single, graph, **arguments), exact.out)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("step", [0.3, "auto"])
@pytest.mark.parametrize("update", ["energy", "target"])
@pytest.mark.parametrize("name", NAMES)
def test_half_precision_consensus_is_rounded_once(
    name: str, update: str, step: float | str, dtype: torch.dtype
) -> None:
    graph = GRAPHS[name]()
    half = consensus_inputs(graph, batch=(2,), dtype=dtype)
    single = [x.float() for x in half[:4]]
    network = ga.EdgeNetworkParameters(*(x.float() for x in half.network))
    low = ga.consensus_update(*half, graph, step, update=update)
    assert low.dtype == dtype
    if step == 0.3:  # the oracle's number, not float32's
        step = torch.tensor(0.3)
    exact = oracle.consensus(*half, graph.to_mask(), step, update=update)
    one_rounding(low, ga.consensus_update(*single, network, graph, step, update=update), exact)
    R = ga.consensus_edge_matrices(*half[2:], graph)
    one_rounding(
        R,
        ga.consensus_edge_matrices(*single[2:], network, graph),
        oracle.edge_matrices(*half[2:], graph.to_mask())[0],
    )


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_gradients_are_the_float32_ones_rounded_once(dtype: torch.dtype) -> None:
    graph = ga.window_path_graph(9, 2)
    half = [x.requires_grad_() for x in qkv(graph, dtype=dtype)]
    single = [x.detach().float().requires_grad_() for x in half]
    direction = random(9, 2, 3, seed=5, dtype=dtype)
    low = torch.autograd.grad(ga.rbf_attention(*half, graph, 1.5), half, direction)
    high = torch.autograd.grad(ga.rbf_attention(*single, graph, 1.5), single, direction.float())
    for a, b in zip(low, high, strict=True):
        assert a.dtype == dtype
        assert torch.equal(a, b.to(dtype))


def test_float16_distances_that_overflow_float16_do_not_overflow() -> None:
    """300 squared is beyond 65504."""
    x = torch.tensor([0.0, 300.0, 301.0, 900.0], dtype=torch.float16).view(4, 1, 1)
    graph = ga.complete_graph(4, self_loops=False)
    out = ga.rbf_attention(x, x, x, graph, 10.0)
    expected = oracle.attention(x, x, x, graph.to_mask(), sigma=10.0).out
    assert torch.equal(out, expected.to(torch.float16))


@pytest.mark.parametrize("name", ["complete", "causal", "path with self loops", "longformer"])
def test_rbf_in_float32_survives_a_common_offset_of_100(name: str) -> None:
    """q . k - ||k||^2 / 2 loses 1e-3 here; relative error <= 1e-5 is promised."""
    graph = GRAPHS[name]()
    q, k, v = qkv(graph, features=64, dtype=torch.float32)
    q, k = q + 100, k + 100
    out, lse = ga.rbf_attention(q, k, v, graph, 8.0, return_lse=True)
    exact = oracle.attention(q, k, v, graph.to_mask(), sigma=8.0)
    assert (out.double() - exact.out).norm() <= 1e-5 * exact.out.norm()
    assert (lse.double() - exact.lse).norm() <= 1e-5 * exact.lse.norm()


def test_an_offset_of_100_changes_no_choice_of_top_k() -> None:
    """An offset of 100 changes no choice of top-k in float32.

    The expanded square changed 32 % of top-192 sets.
    """
    graph = ga.complete_graph(256)
    x = random(256, 1, 64, seed=3, dtype=torch.float32) + 100
    weights = ga.attention_weights(x, x, graph, sigma=8.0, top_k=192).view(256, 256)
    distance = (x.double()[:, 0, None] - x.double()[None, :, 0]).square().sum(-1)
    kept = torch.zeros(256, 256, dtype=torch.bool)
    kept.scatter_(1, distance.argsort(dim=1, stable=True)[:, :192], True)
    assert torch.equal(weights > 0, kept)


def test_an_outlier_among_near_tokens_costs_no_precision() -> None:
    """One token 1e4 away from a cluster of width 1, as reference token or not."""
    graph = ga.causal_graph(8)
    x = random(8, 1, 16, seed=3, dtype=torch.float32)
    for place in range(8):
        y = x.clone()
        y[place] += 1e4
        out = ga.rbf_attention(y, y, x, graph, 4.0)
        exact = oracle.attention(y, y, x, graph.to_mask(), sigma=4.0).out
        assert (out.double() - exact).norm() <= 1e-5 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast_changes_nothing(dtype: torch.dtype) -> None:
    """Matrix products inside would run in bfloat16: distances, Lambda's rows and R must not."""
    graph = ga.window_path_graph(9, 2)
    q, k, v = qkv(graph, dtype=dtype)
    inputs = consensus_inputs(graph, dtype=dtype)

    def run() -> list[Tensor]:
        return [
            ga.rbf_attention(q, k, v, graph, 1.0),
            ga.dot_product_attention(q, k, v, graph),
            ga.consensus_update(*inputs, graph, 0.1),
            ga.consensus_edge_matrices(*inputs[2:], graph),
        ]

    plain = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = run()
    for a, b in zip(plain, cast, strict=True):
        assert torch.equal(a, b)


def test_an_operation_gives_the_same_bits_twice_and_leaves_its_inputs_alone() -> None:
    graph = ga.longformer_graph(200, 8, [0, 100])
    q, k, v = qkv(graph, batch=(2,), dtype=torch.float32)
    inputs = consensus_inputs(graph, batch=(2,), dtype=torch.float32)
    tensors = [q, k, v, *inputs[:4], *inputs.network]
    copies = [x.clone() for x in tensors]
    for run in (
        lambda: ga.rbf_attention(q, k, v, graph, 1.0, top_k=5),
        lambda: ga.consensus_update(*inputs, graph, "auto"),
    ):
        assert torch.equal(run(), run())
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))

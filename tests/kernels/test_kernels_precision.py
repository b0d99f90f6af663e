"""Offsets, outliers and extreme numbers: digits are kept, weights sum to 1, nothing overflows."""

from dataclasses import replace

import pytest
import torch
from cases_kernels import Case, check, error, errors, exact, in_float64, kernels, solve

import graphattn as ga

pytestmark = pytest.mark.usefixtures("device")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
D = 16
FAR = {"features": D, "value_features": 8, "strength": (D**0.5,) * 2, "offset": 100.0}
CASES = {
    "path": Case(ga.window_path_graph(20, 3), **FAR),
    "causal window": Case(ga.causal_window_graph(36, 20), **FAR),
    "causal": Case(ga.causal_graph(36), **FAR),
    "complete": Case(ga.complete_graph(36), **FAR),
    "rectangle": Case(ga.bipartite_complete_graph(10, 36), kv_heads=1, **FAR),
    "blocks": Case(ga.block_window_graph(36, 20, shift=4), **FAR),
    "dilated": Case(ga.dilated_window_graph(40, 2, 3), **FAR),
    "batch": Case(ga.batch([ga.causal_graph(18), ga.complete_graph(7)]), **FAR),
    "padding": Case(ga.causal_window_graph(36, 20), valid="both", **FAR),
    "table": Case(ga.causal_window_graph(20, 7), table=True, **FAR),
}


@pytest.mark.parametrize("name", CASES)
def test_a_common_offset_costs_no_digits(name: str, device: str) -> None:
    """Float32 at 100, sigma = sqrt(D): naive ||q||^2 - 2 q . k + ||k||^2 would keep two digits.

    Required: 1e-5; measured: at most 8e-7.
    """
    check(kernels(CASES[name], device), exact(CASES[name]), 1e-5)


def naive(case: Case) -> torch.Tensor:
    """Log-sums by squares written out, float32."""
    q, k = (case.tensors()[name].movedim(-2, -3) for name in ("query", "key"))
    squared = q.square().sum(-1)[..., None] - 2 * q @ k.mT + k.square().sum(-1)[..., None, :]
    logit = -squared / (2 * D)
    return logit.masked_fill(~case.edges[..., None, :, :], -torch.inf).logsumexp(-1).mT


def test_the_offset_is_one_that_costs_digits() -> None:
    """Otherwise the test above could not fail."""
    case = CASES["complete"]
    assert error(naive(case), exact(case)["lse"]) > 1e-4


@pytest.mark.parametrize("place", [0, 10])
@pytest.mark.parametrize("name", ["causal window", "complete", "dilated"])
def test_an_outlier_costs_its_own_tile_digits_and_nobody_else(
    name: str, place: int, device: str
) -> None:
    """One token at 1e4 among tokens at 0, float32.

    Where it is the centre of a tile, distances there are differences of numbers of its size
    squared: up to 1e8 * 2^-24 / sigma^2 in a logit. Allowed: an error of 1 in a tile's log-sums
    beside values of hundreds, none elsewhere, and NaN nowhere.
    """
    case = replace(CASES[name], offset=0.0)
    tensors, upstream = case.tensors(), case.upstream()
    for n in ("query", "key"):
        tensors[n][:, place] = 1e4
    found = solve(case, tensors, upstream, backend="triton", device=device)
    expected = in_float64(case, tensors, upstream)
    print(name, place, errors(found, expected))
    assert all(x.isfinite().all() for x in found.values())


@pytest.mark.parametrize("shared", [False, True], ids=["three tensors", "one tensor"])
@pytest.mark.parametrize(
    "build",
    [ga.complete_graph, ga.causal_graph, lambda n: ga.causal_window_graph(n, 6)],
    ids=["complete", "causal", "causal window"],
)
def test_left_padding_costs_no_digits(build, shared: bool, device: str) -> None:
    """The tokens that would be centres are padding, and hold numbers far away."""
    case = Case(build(36), shared=shared, **FAR)
    x = case.tensors()
    valid = torch.arange(36) >= 20
    for n in ("query", "key", "value"):
        if n in x:
            x[n][:, ~valid] = 1e6
    case = replace(case, options={"valid": valid.to(device)})
    cpu = replace(case, options={"valid": valid})
    found = solve(case, x, case.upstream(), backend="triton", device=device)
    expected = in_float64(cpu, x, case.upstream())
    got = errors(found, expected)
    if shared:  # values are at 100, too: gradients as good as in torch
        in_torch = errors(solve(cpu, x, cpu.upstream(), backend="reference"), expected)
        assert max(got["out"], got["lse"]) <= 1e-5
        assert all(got[n] <= 2 * in_torch[n] + 1e-5 for n in got), (got, in_torch)
    else:
        assert max(got.values()) <= 1e-5, got


EXTREMES = {
    "1e4, rbf": ("rbf", 1e4, 1.0),
    "1e4, dot": ("dot", 1e4, 0.5),
    "1e-30, rbf": ("rbf", 1e-30, 1.0),
    "1e-30, dot": ("dot", 1e-30, 1.0),
    "sigma 1e-9": ("rbf", 1.0, 1e-9),
    "sigma 1e9": ("rbf", 1.0, 1e9),
    "scale 1e9": ("dot", 1.0, 1e9),
    "scale -1e9": ("dot", 1.0, -1e9),
    "scale 1e-30": ("dot", 1.0, 1e-30),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shared", [False, True], ids=["three tensors", "one tensor"])
@pytest.mark.parametrize("name", EXTREMES)
def test_weights_sum_to_one_whatever_the_numbers(
    name: str, shared: bool, dtype: torch.dtype, device: str
) -> None:
    score, size, strength = EXTREMES[name]
    graph = ga.causal_window_graph(20, 18)
    case = Case(graph, score=score, shared=shared, heads=1, kv_heads=1, strength=(strength,))
    x = {n: t * size if n in ("query", "key") else t for n, t in case.tensors(dtype).items()}
    if not shared:
        x["value"] = torch.ones_like(x["value"])
    found = solve(case, x, case.upstream(dtype), backend="triton", device=device)
    assert not any(t.isnan().any() for t in (found["out"], found["lse"]))
    if shared:  # averages lie between the least and the largest
        of_x = x["query"].float()
        slack = 1 + 2 * torch.finfo(dtype).eps
        assert (found["out"].float().abs() <= of_x.abs().amax((1, 2)) * slack).all()
    else:
        assert (found["out"] - 1).abs().max() <= torch.finfo(dtype).eps
    assert not any(g.isnan().any() for n, g in found.items()), found

"""Attention over any edges keeps NaN where it is, reads nothing out of bounds, keeps digits."""

from dataclasses import replace

import pytest
import torch
from cases_edges import CASES
from cases_kernels import attend, check, exact, kernels, solve, solve_guarded, spoiled

pytestmark = pytest.mark.usefixtures("device", "edge_tiles")

SINGLE = 5e-6


GUARDED = ["list", "fewer neighbours than k", "longformer", "hubs", "bias of neighbours",
           "padding", "one tensor", "top 3 with a bias of neighbours"]  # fmt: skip


@pytest.mark.parametrize("name", GUARDED)
def test_nothing_is_read_out_of_bounds(name: str, device: str) -> None:
    """NaN all around every input, and around d_out and d_lse, reaches no result."""
    check(*solve_guarded(CASES[name], device), SINGLE, floor=0.1)


@pytest.mark.parametrize(
    ("name", "bad"),
    [("padding", torch.nan), ("padding", torch.inf), ("padding of neighbours", torch.nan),
     ("padding of neighbours", 1e30), ("padding of hubs", torch.nan),
     ("padding of a longformer", torch.nan), ("top 2 with padding", torch.nan),
     ("top 2 with padding", torch.inf)],
)  # fmt: skip
def test_what_padding_holds_is_never_read(name: str, bad: float, device: str) -> None:
    """No bit of outputs and gradients changes; padding's own are 0."""
    case = replace(CASES[name], kv_heads=2)
    mask = case.masks[0]
    assert mask is not None
    clean, (d_out, d_lse) = kernels(case, device), case.upstream()
    upstream = (
        d_out.masked_fill(~mask[..., None, None], bad),
        d_lse.masked_fill(~mask[..., None], bad),
    )
    results = solve(
        case, spoiled(case.tensors(), ~mask, bad), upstream, backend="triton", device=device
    )
    for n in results:
        assert torch.equal(results[n], clean[n]), n
    assert all((results[n][~mask] == 0).all() for n in ("out", "query", "key", "value"))


@pytest.mark.parametrize(
    ("name", "bad"),
    [("list", torch.nan), ("list", torch.inf), ("neighbours", torch.nan), ("longformer", torch.nan),
     ("hubs", torch.nan), ("hubs", torch.inf), ("top 3 of a list", torch.nan),
     ("one tensor", torch.nan)],
)  # fmt: skip
def test_a_row_knows_nothing_of_tokens_it_does_not_see(name: str, bad: float, device: str) -> None:
    """Rows that see NaN are NaN and spoil the gradients of what they see; no others change."""
    case, edges = CASES[name], CASES[name].graph.to_mask()
    hit = torch.zeros(40, dtype=torch.bool)
    hit[{"longformer": 25, "hubs": 22}.get(name, 17)] = True
    rows = (edges & hit).any(1) | hit
    sources = (edges & rows[:, None]).any(0) | hit
    assert not rows.all()
    clean = kernels(case, device)
    results = solve(
        case, spoiled(case.tensors(), hit, bad), case.upstream(), backend="triton", device=device
    )
    if bad != bad and "top_k" not in case.options:
        assert results["out"][:, rows & edges.any(1)].isnan().all(), "what is seen is not hidden"
    moved = {"out": rows, "lse": rows, "query": rows, "key": sources, "value": sources}
    if case.shared:
        moved["query"] = rows | sources
    for n in results.keys() & moved.keys():
        assert torch.equal(results[n][:, ~moved[n]], clean[n][:, ~moved[n]]), n


# Digits.

FAR = {"features": 16, "value_features": 8, "strength": (4.0, 4.0), "offset": 100.0}


@pytest.mark.parametrize(
    "name",
    ["list", "neighbours", "grid with a class token", "longformer", "hubs", "padding of hubs",
     "bias of a list", "union of a window and a list", "top 3 of a list"],
)  # fmt: skip
def test_a_common_offset_costs_no_digits(name: str, device: str) -> None:
    """Float32 at 100, sigma = sqrt(D): naive ||q||^2 - 2 q . k + ||k||^2 would keep two digits."""
    case = replace(CASES[name], score="rbf", **FAR)
    check(kernels(case, device), exact(case), 1e-5, floor=0.1)


@pytest.mark.parametrize("size", [1e-30, 1e4])
@pytest.mark.parametrize("score", ["rbf", "dot"])
@pytest.mark.parametrize("name", ["hubs", "fewer neighbours than k", "longformer"])
def test_weights_sum_to_one_whatever_the_numbers(
    name: str, score: str, size: float, device: str
) -> None:
    case = replace(CASES[name], score=score, strength=(1.0, 0.5))
    tensors = case.tensors()
    for n in ("query", "key"):
        tensors[n] = tensors[n] * size
    tensors["value"] = torch.ones_like(tensors["value"])
    leaves = {n: x.to(device) for n, x in tensors.items()}
    out, lse = attend(case, leaves, backend="triton", device=device)
    seen = case.graph.in_degree() > 0
    assert lse[:, seen].isfinite().all()
    assert (out[:, seen] - 1).abs().max() <= 1e-6

"""Fused consensus keeps NaN where it is, reads nothing out of bounds, and survives any numbers."""

from dataclasses import replace

import pytest
import torch
from cases_consensus import (
    CASES,
    NETWORK,
    Case,
    check,
    differentiated,
    in_float64,
    kernels,
    move,
    solve,
)
from cases_edges import hubs, some
from cases_kernels import Tensors, guarded
from torch import Tensor

import graphattn as ga

pytestmark = pytest.mark.usefixtures("device")

SINGLE = 5e-6
TOKENS = ("state", "neighbor_state", "u", "v", "target_hidden", "source_hidden")

GUARDED = [
    "path with self loops, target", "dilated", "windows side by side, target", "causal",
    "complete", "tokens without edges", "neighbours, target", "more targets", "rotated list",
    "padding", "padding of a list", "one network, list",
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", GUARDED)
def test_nothing_is_read_out_of_bounds(name: str, device: str) -> None:
    """NaN all around every input, and around d_new, reaches no result."""
    case = replace(CASES[name], batch=(1,))
    if isinstance(case.step, tuple):
        case = replace(case, step=case.step[-2:])
    tensors, d_new = case.tensors(), case.upstream()
    inside = {n: guarded(x, device).requires_grad_() for n, x in tensors.items()}
    results = differentiated(move(case, inside, device=device), inside, guarded(d_new, device))
    check(results, in_float64(case, tensors, d_new), case, SINGLE)


def spoiled(tensors: Tensors, hit: Tensor, bad: float) -> Tensors:
    """Tokens that are hit hold `bad` in everything that tokens hold."""
    return {
        n: x.masked_fill(hit[..., None, None], bad) if n in TOKENS else x
        for n, x in tensors.items()
    }


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e30], ids=str)
@pytest.mark.parametrize(
    "name",
    ["padding", "padding, target", "padding of windows side by side", "padding of a list",
     "one network, list"],
)  # fmt: skip
def test_what_padding_holds_is_never_read(name: str, bad: float, device: str) -> None:
    """No bit of the others' states and of any gradient changes; they keep what they are."""
    case = replace(CASES[name], heads=1, rank=1, xi=3)
    mask = case.masks[0]
    assert mask is not None
    assert not mask.all()
    clean = kernels(case, device)
    results = solve(case, spoiled(case.tensors(), ~mask, bad), case.upstream(), device=device)
    for n in results:
        kept_rows = mask if n in ("new", "state") else slice(None)
        assert torch.equal(results[n][kept_rows], clean[n][kept_rows]), n
    kept = 1e30 if bad == 1e30 else 0.0  # NaN and infinity read as 0
    assert (results["new"][~mask] == kept).all()
    assert all((results[n][~mask] == 0).all() for n in ("target_hidden", "source_hidden"))


@pytest.mark.long
@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("update", ["energy", "target"])
@pytest.mark.parametrize("step", [0.1, "auto"])
@pytest.mark.parametrize("name", ["path", "dilated", "list", "neighbours", "tokens without edges"])
def test_a_bad_token_reaches_its_neighbours_and_nobody_else(
    name: str, step: float | str, update: str, bad: float, device: str
) -> None:
    """NaN or infinity in one token spoils no new states but its own and those of its neighbours.

    With update "target" only the new states of tokens that see it are spoiled. Gradients are
    spoiled at most at it and all its neighbours, or one edge further under "auto", which is one
    step per row here.
    """
    if step == "auto" and update == "energy":
        pytest.skip("one step per sequence: see the next test")
    case = replace(CASES[name], update=update, step=step, heads=1, rank=1, xi=3)
    sees, t = case.graph.to_mask(), 12
    hit = torch.arange(len(sees)) == t
    lookers, seen = sees[:, t], sees[t]
    moved = lookers | hit | (seen if update == "energy" else False)
    touched = lookers | seen | hit
    if step == "auto":
        touched = moved | sees[moved].any(0)
    assert not touched.all()
    clean = kernels(case, device)
    results = solve(case, spoiled(case.tensors(), hit, bad), case.upstream(), device=device)
    # inf - inf and inf * 0 are NaN, inf * 1 is not.
    assert not results["new"][:, moved].isfinite().flatten(2).all(-1).any(), "it is hidden"
    for n, unmoved in (("new", ~moved), *((n, ~touched) for n in TOKENS if n in results)):
        assert torch.equal(results[n][:, unmoved], clean[n][:, unmoved]), n


@pytest.mark.long
@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("step", [0.1, "auto"])
@pytest.mark.parametrize("name", ["windows side by side", "many kinds side by side"])
def test_a_bad_sequence_changes_no_bit_of_the_others(
    name: str, step: float | str, bad: float, device: str
) -> None:
    """The first sequence of a batch, and the whole of an entry of a leading dimension."""
    case = replace(CASES[name], batch=(2,), step=step, heads=1, rank=1, xi=3)
    N, (first, _) = case.graph.num_targets, case.graph.sizes[0]
    hit = torch.zeros(2, N, dtype=torch.bool)
    hit[0], hit[1, :first] = True, True
    clean = kernels(case, device)
    results = solve(case, spoiled(case.tensors(), hit, bad), case.upstream(), device=device)
    assert results["new"][hit].isnan().any()
    for n in ("new", *TOKENS):
        if n in results:
            assert torch.equal(results[n][~hit], clean[n][~hit]), n


@pytest.mark.long
@pytest.mark.parametrize("step", [0.3, "auto"])
@pytest.mark.parametrize("update", ["energy", "target"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_token_without_edges_keeps_its_state_to_the_last_bit(
    dtype: torch.dtype, update: str, step: float | str, device: str
) -> None:
    """A token without edges keeps its state to the last bit, and its gradient is what comes in.

    NaN in all else that it holds changes no bit of any result.
    """
    singles = ga.batch([ga.window_path_graph(n, 2) for n in (1, 5, 1)])
    for graph in (CASES["tokens without edges"].graph, singles):
        case = Case(graph, update, step=step, heads=1, rank=1, other_states=True, xi=3)
        mask = graph.to_mask()
        alone = ~mask.any(1) & ~mask.any(0)
        still = ~mask.any(1) if update == "target" else alone
        assert alone.any()
        tensors, clean = case.tensors(dtype), kernels(case, device, dtype)
        assert torch.equal(clean["new"][:, still], tensors["state"][:, still])
        assert torch.equal(clean["state"][:, alone], case.upstream(dtype)[:, alone])
        bad = spoiled({n: x for n, x in tensors.items() if n != "state"}, alone, torch.nan)
        bad = {"state": tensors["state"], **bad}
        results = solve(case, bad, case.upstream(dtype), device=device)
        assert all(torch.equal(results[n], clean[n]) for n in results)
        if update == "target":  # nobody reads what a row without edges is compared by
            bad = {**tensors, "target_hidden": spoiled(tensors, still, torch.nan)["target_hidden"]}
            results = solve(case, bad, case.upstream(dtype), device=device)
            assert all(torch.equal(results[n], clean[n]) for n in results)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("step", [0.7, "auto"])
@pytest.mark.parametrize(
    "graph", [ga.window_path_graph(16, 2), some(16, 16), hubs()], ids=["path", "list", "hubs"]
)
def test_a_constant_is_a_fixed_point_to_the_last_bit(
    graph: ga.TokenGraph, step: float | str, dtype: torch.dtype, device: str
) -> None:
    for update in ("energy", "target"):
        case = Case(graph, update, step=step, xi=3)
        tensors = {n: x.to(device) for n, x in case.tensors(dtype).items()}
        constant = tensors["state"][:, :1].expand_as(tensors["state"])
        assert torch.equal(move(case, {**tensors, "state": constant}, device=device), constant)


# Rows of Lambda.

SMALL = [Case(ga.window_path_graph(9, 2), step="auto"), Case(some(9, 9), "target")]


@pytest.mark.long
@pytest.mark.parametrize("case", SMALL, ids=["path", "list"])
def test_a_zero_row_of_lambda_stays_zero(case: Case, device: str) -> None:
    """A zero row of Lambda has a gradient of exactly 0, and so stays zero.

    The gradients of the other rows are those of float64.
    """
    tensors = case.tensors()
    for n in ("shear", "shear_bias"):
        tensors[n][:, 0] = 0
        tensors[n][0] = 0  # and all rows of one head
    results = solve(case, tensors, case.upstream(), device=device)
    check(results, in_float64(case, tensors, case.upstream()), case, SINGLE)
    for n in ("shear", "shear_bias"):
        assert (results[n][:, 0] == 0).all()
        assert (results[n][0] == 0).all()
        assert (results[n][1, 1] != 0).all()


@pytest.mark.long
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20, 1e30])
@pytest.mark.parametrize("case", SMALL, ids=["path", "list"])
def test_rows_of_lambda_of_any_size_are_normalised(case: Case, scale: float, device: str) -> None:
    """1e-30 squared is 0 in float32, 1e30 squared is infinite; one head is scaled, one is not."""
    plain, tensors = kernels(case, device), case.tensors()
    for n in ("shear", "shear_bias"):
        tensors[n][1] *= scale
    scaled = solve(case, tensors, case.upstream(), device=device)
    close = {"rtol": 1e-5, "atol": 1e-5}
    for n in ("shear", "shear_bias"):
        torch.testing.assert_close(scaled[n][1] * scale, plain[n][1], **close)
        scaled[n][1] = plain[n][1]
    torch.testing.assert_close(scaled, plain, **close)
    assert torch.equal(scaled["new"][..., 0, :], plain["new"][..., 0, :])


# Numbers.


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [0.0, 1e-30, 30.0, 1e4])
@pytest.mark.parametrize("case", SMALL, ids=["path", "list"])
def test_hidden_vectors_of_any_size(
    case: Case, size: float, dtype: torch.dtype, device: str
) -> None:
    """GELU far from 0, where a polynomial in it would overflow, and softplus of large logits."""
    tensors = case.tensors(dtype)
    for n in ("target_hidden", "source_hidden"):
        tensors[n] = tensors[n] * size
    results = solve(case, tensors, case.upstream(dtype), device=device)
    expected = in_float64(case, tensors, case.upstream(dtype))
    for n in results:
        largest = expected[n].abs().max().clamp(min=1e-2)
        rounding = 2e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
        assert (results[n].double() - expected[n]).abs().max() <= rounding * largest, n


@pytest.mark.parametrize("logit", [-1e4, -90.0, 90.0, 1e4])
@pytest.mark.parametrize("which", ["alpha_bias", "beta_bias"])
@pytest.mark.parametrize("case", SMALL, ids=["path", "list"])
def test_softplus_neither_overflows_nor_loses_its_tail(
    case: Case, which: str, logit: float, device: str
) -> None:
    tensors = case.tensors()
    case = replace(case, step=0.1)  # beside 1e4 all degrees are equally large, but for rounding
    tensors[which] = torch.full_like(tensors[which], logit)
    results = solve(case, tensors, case.upstream(), device=device)
    check(results, in_float64(case, tensors, case.upstream()), case, 2e-5)


@pytest.mark.long
def test_edges_that_hardly_pull_still_give_an_automatic_step(device: str) -> None:
    """alpha + beta = 2e-39 would have the reciprocal infinity: here 1e-30, and 1e30."""
    for logit in (-69.0, 1e30):
        case = replace(SMALL[0], step="auto")
        tensors = case.tensors()
        for n in NETWORK:
            tensors[n] = torch.zeros_like(tensors[n])
        tensors["alpha_bias"] = torch.full_like(tensors["alpha_bias"], logit)
        tensors["beta_bias"] = torch.full_like(tensors["beta_bias"], -torch.inf)
        new = move(case, {n: x.to(device) for n, x in tensors.items()}, device=device).cpu()
        wide = {n: x.double() for n, x in tensors.items()}
        expected = move(case, wide, backend="reference")
        torch.testing.assert_close(new.double(), expected, rtol=1e-5, atol=1e-5)
        assert (new - tensors["state"]).abs().max() > 0.1

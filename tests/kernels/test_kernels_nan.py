"""NaN and infinity stay where they are, and nothing out of bounds is read."""

import pytest
import torch
from cases_kernels import (
    Case,
    Tensors,
    attend,
    check,
    exact,
    in_float64,
    kernels,
    solve,
    solve_guarded,
    spoiled,
)
from torch import Tensor

import graphattn as ga

pytestmark = pytest.mark.usefixtures("device")

SINGLE = 5e-6
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

CASES = {
    "path": Case(ga.window_path_graph(35, 3), features=5, batch=(2,)),
    "causal window of many tiles": Case(
        ga.causal_window_graph(55, 34), score="dot", features=5, kv_heads=1
    ),
    "complete": Case(ga.complete_graph(40), score="dot", kv_heads=1),
    "rectangle": Case(ga.bipartite_complete_graph(5, 35)),
    "dilated": Case(ga.dilated_window_graph(41, 2, 3), value_features=7),
    "sequences": Case(
        ga.batch([ga.causal_graph(20), ga.complete_graph(3), ga.window_path_graph(18, 2)]),
        score="dot",
    ),
    "table and padding": Case(
        ga.causal_window_graph(35, 5), table=True, valid="both", batch=(2,)
    ),
    "one tensor": Case(ga.complete_graph(35), shared=True, features=5, batch=(2,)),
    "one tensor, causal": Case(ga.causal_window_graph(35, 20), shared=True, features=5),
}  # fmt: skip


def test_memory_is_nan_until_a_kernel_writes_it(device: str) -> None:
    assert torch.empty(1000, device=device).isnan().all()
    assert torch.ones(10, device=device).new_empty(10, dtype=torch.bfloat16).isnan().all()


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_read_out_of_bounds(name: str, device: str) -> None:
    """NaN all around every input, and around d_out and d_lse, reaches no result."""
    check(*solve_guarded(CASES[name], device), SINGLE)


def touched(edges: Tensor, hit: Tensor) -> tuple[Tensor, Tensor]:
    """Mark the rows that see or are a token that is hit, and the sources that such rows see."""
    rows = (edges & hit[None, :]).any(1)
    if edges.shape[0] == edges.shape[1]:
        rows = rows | hit
    return rows, (edges & rows[:, None]).any(0) | hit


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    "name", ["path", "causal window of many tiles", "sequences", "one tensor, causal"]
)
def test_a_row_knows_nothing_of_tokens_it_does_not_see(name: str, bad: float, device: str) -> None:
    """Outputs and gradients of rows that do not see a bad token; rows that see NaN are NaN.

    A bad row spoils the gradients of the sources it sees; the others keep theirs.
    """
    case = CASES[name]
    hit = torch.zeros(case.graph.num_sources, dtype=torch.bool)
    hit[[17, case.graph.num_sources - 2]] = True
    tensors, upstream = case.tensors(), case.upstream()
    clean = in_float64(case, tensors, upstream)
    results = solve(case, spoiled(tensors, hit, bad), upstream, backend="triton", device=device)
    rows, sources = touched(case.graph.to_mask(), hit)
    assert not rows.all()
    if bad != bad:
        assert results["out"][:, rows].isnan().all(), "what is seen is not hidden"
    for n in ("out", "lse") if case.shared else ("out", "lse", "query"):
        check({n: results[n][:, ~rows]}, {n: clean[n][:, ~rows]}, SINGLE)
    for n in ("query",) if case.shared else ("key", "value"):
        check({n: results[n][:, ~sources]}, {n: clean[n][:, ~sources]}, SINGLE)


@pytest.mark.parametrize("name", ["path", "causal window of many tiles", "complete"])
def test_an_infinite_value_that_is_seen_is_not_hidden(name: str, device: str) -> None:
    case = CASES[name]
    tensors, place = case.tensors(), 17
    tensors["value"][:, place, :, 0] = torch.inf
    leaves = _on(tensors, device)
    out, _ = attend(case, leaves, backend="triton", device=device)
    seen = case.graph.to_mask()[:, place]
    assert not out.cpu()[:, seen][..., 0].isfinite().any()
    assert out.cpu()[:, ~seen].isfinite().all()


MANY = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30])


@pytest.mark.long
@pytest.mark.parametrize("shared", [False, True], ids=["three tensors", "one tensor"])
@pytest.mark.parametrize("score", ["rbf", "dot"])
@pytest.mark.parametrize(
    "build",
    [ga.causal_graph, lambda n: ga.causal_window_graph(n, 12)],
    ids=["causal", "causal window"],
)
def test_no_bit_changes_with_the_future(build, score: str, shared: bool, device: str) -> None:
    case = Case(build(35), score=score, shared=shared)
    clean = case.tensors()
    changed = spoiled(clean, torch.arange(35) >= 20, MANY.repeat(9)[:35])
    for x, y in zip(
        attend(case, _on(clean, device), backend="triton", device=device),
        attend(case, _on(changed, device), backend="triton", device=device),
        strict=True,
    ):
        assert x[:, :20].isfinite().all()
        assert torch.equal(x[:, :20], y[:, :20])


def _on(tensors: Tensors, device: str) -> Tensors:
    return {n: x.to(device) for n, x in tensors.items()}


@pytest.mark.long
@pytest.mark.parametrize("score", ["rbf", "dot"])
def test_no_bit_changes_with_another_sequence(score: str, device: str) -> None:
    """Forward and backward; one sequence after the other holds something else."""
    sizes = (19, 22, 5)
    case = Case(ga.batch([ga.complete_graph(n) for n in sizes]), score=score)
    clean = kernels(case, device)
    for start, stop in ((0, 19), (19, 41), (41, 46)):
        others = torch.ones(46, dtype=torch.bool)
        others[start:stop] = False
        tensors = spoiled(case.tensors(), ~others, MANY.repeat(12)[:46])
        results = solve(case, tensors, case.upstream(), backend="triton", device=device)
        for n in ("out", "lse", "query", "key", "value"):
            assert torch.equal(results[n][:, others], clean[n][:, others]), n


@pytest.mark.long
@pytest.mark.parametrize("bad", [torch.nan, 1e4])
def test_no_bit_changes_with_another_sequence_where_this_one_begins_with_padding(
    bad: float, device: str
) -> None:
    graph = ga.batch([ga.causal_graph(20), ga.causal_graph(20)]).to(device)
    x = torch.randn(40, 1, 8, device=device)
    valid = torch.ones(40, dtype=torch.bool, device=device)
    valid[20:24] = False
    y = x.clone()
    y[:20] = bad
    out, other = (
        ga.rbf_attention(t, t.clone(), t.clone(), graph, 2.0, valid=valid, backend="triton")
        for t in (x, y)
    )
    assert torch.equal(out[20:], other[20:])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e30], ids=["nan", "inf", "1e30"])
@pytest.mark.parametrize("shared", [False, True], ids=["three tensors", "one tensor"])
def test_what_padding_holds_is_never_read(shared: bool, bad: float, device: str) -> None:
    _padding_is_never_read(torch.float32, shared, torch.full((25,), bad), device)


@pytest.mark.long
@pytest.mark.parametrize("shared", [False, True], ids=["three tensors", "one tensor"])
def test_what_padding_holds_is_never_read_in_half_precision(shared: bool, device: str) -> None:
    _padding_is_never_read(torch.bfloat16, shared, MANY.repeat(7)[:25], device)


def _padding_is_never_read(dtype: torch.dtype, shared: bool, content: Tensor, device: str) -> None:
    """No bit of outputs or gradients changes, those of sigma and the padding's own (0) included."""
    case = Case(ga.causal_window_graph(25, 9), valid="both", shared=shared)
    mask = case.masks[0]
    assert mask is not None
    clean, tensors = kernels(case, device, dtype), spoiled(case.tensors(dtype), ~mask, content)
    d_out, d_lse = case.upstream(dtype)
    bad = content[None, :, None]
    d_out = torch.where(mask[..., None, None], d_out, bad[..., None].to(dtype))
    d_lse = torch.where(mask[..., None], d_lse, bad)
    results = solve(case, tensors, (d_out, d_lse), backend="triton", device=device)
    for n in results:
        assert torch.equal(results[n], clean[n]), n
    for n in ("out", "query") if shared else ("out", "query", "key", "value"):
        assert (results[n][~mask] == 0).all(), n


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("score", ["rbf", "dot"])
def test_rows_without_edges_are_exactly_empty(score: str, dtype: torch.dtype, device: str) -> None:
    """Lone tokens that do not see themselves, and rows whose sources are all masked."""
    parts = [ga.window_path_graph(1, 1), ga.window_path_graph(20, 2), ga.window_path_graph(1, 4)]
    graph = ga.batch(parts)
    case = Case(graph, score=score)
    results = kernels(case, device, dtype)
    check(results, exact(case, dtype), SINGLE if dtype == torch.float32 else 0.05)
    for token in (0, 21):
        assert (results["out"][:, token] == 0).all()
        assert (results["lse"][:, token] == -torch.inf).all()
        assert all((results[n][:, token] == 0).all() for n in ("query", "key", "value"))


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shared", [False, True], ids=["three tensors", "one tensor"])
def test_where_all_is_padding_all_is_zero(shared: bool, dtype: torch.dtype, device: str) -> None:
    case = Case(ga.complete_graph(20), shared=shared, batch=(2,))
    leaves = {n: x.to(device).requires_grad_() for n, x in case.tensors(dtype).items()}
    mask = torch.zeros(20, dtype=torch.bool, device=device)
    out, lse = attend(case, leaves, backend="triton", device=device, valid=(mask, mask))
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    upstream = torch.ones_like(out), torch.ones_like(lse)
    for gradient in torch.autograd.grad((out, lse), list(leaves.values()), upstream):
        assert (gradient == 0).all()


@pytest.mark.long
@pytest.mark.parametrize("name", ["path", "complete", "one tensor"])
def test_a_bad_gradient_reaches_only_what_its_row_sees(name: str, device: str) -> None:
    """NaN in d_out of one row: d_key and d_value of the sources it does not see stay finite."""
    case = CASES[name]
    d_out, d_lse = case.upstream()
    hit = torch.zeros(case.graph.num_targets, dtype=torch.bool)
    hit[3] = True
    d_out[:, hit] = torch.nan
    results = solve(case, case.tensors(), (d_out, d_lse), backend="triton", device=device)
    clean = kernels(case, device)
    seen = case.graph.to_mask()[3] | hit
    for n in ("query",) if case.shared else ("key", "value"):
        assert torch.equal(results[n][:, ~seen], clean[n][:, ~seen]), n
        assert results[n][:, case.graph.to_mask()[3]].isnan().all(), n
    if not case.shared:
        assert torch.equal(results["query"][:, ~hit], clean["query"][:, ~hit])

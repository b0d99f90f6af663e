"""Attention on bands by kernels: outputs, log-sums and all gradients are those of float64.

Random gradients come in through outputs and log-sums. Everything the kernels allocate is NaN
before they write it (see `device`), so an element left out fails.
"""

import pytest
import torch
from cases_kernels import (
    Case,
    attend,
    check,
    check_half,
    differentiated,
    exact,
    in_float64,
    kernels,
    random,
    solve,
    tiles,
)

import graphattn as ga
from graphattn.kernels.shared import tuning

pytestmark = pytest.mark.usefixtures("device")

SINGLE = 5e-6  # relative RMS of float32; measured: mostly under 1e-6, d_strength up to 4e-6
HALF = (torch.float16, torch.bfloat16)

CASES = {
    "path": Case(ga.window_path_graph(25, 3), batch=(2,), kv_heads=1),
    "path with self loops": Case(ga.window_path_graph(40, 20, self_loops=True), score="dot"),
    "path longer than the sequence": Case(ga.window_path_graph(9, 50), score="dot"),
    "causal window": Case(ga.causal_window_graph(35, 5), score="dot"),
    "causal window of many tiles": Case(ga.causal_window_graph(70, 40), kv_heads=1),
    "causal window longer than the sequence": Case(ga.causal_window_graph(17, 50)),
    "causal": Case(ga.causal_graph(35), score="dot", kv_heads=1),
    "complete": Case(ga.complete_graph(40)),
    "more sources": Case(ga.bipartite_complete_graph(20, 40), heads=4),
    "more targets": Case(ga.bipartite_complete_graph(35, 20), score="dot"),
    "blocks": Case(ga.block_window_graph(35, 12, shift=5)),
    "blocks of many tiles": Case(ga.block_window_graph(70, 40, shift=20), score="dot"),
    "dilated": Case(ga.dilated_window_graph(50, 2, 3)),
    "dilated without self loops": Case(
        ga.dilated_window_graph(44, 9, 2, self_loops=False), score="dot", kv_heads=1
    ),
    "dilation beyond the sequence": Case(ga.dilated_window_graph(9, 2, 30)),
    "sequences of many kinds": Case(
        ga.batch([
            ga.causal_graph(20),
            ga.complete_graph(1),
            ga.window_path_graph(30, 1),
            ga.dilated_window_graph(19, 1, 4),
            ga.block_window_graph(21, 6),
        ]),
        kv_heads=1,
    ),
    "rectangles side by side": Case(
        ga.batch([ga.bipartite_complete_graph(5, 21), ga.bipartite_complete_graph(18, 3)]),
        score="dot",
        batch=(2,),
    ),
    "table": Case(ga.causal_window_graph(25, 7), table=True, batch=(2,), kv_heads=1),
    "table of a complete graph": Case(ga.complete_graph(37), score="dot", table=True),
    "table of a wide causal window": Case(ga.causal_window_graph(60, 36), table=True),
    "table of a dilated window without self loops": Case(
        ga.dilated_window_graph(41, 2, 3, self_loops=False), score="dot", table=True
    ),
    "table of blocks": Case(ga.block_window_graph(40, 11, shift=3), table=True, valid="both"),
    "table that sequences share": Case(
        ga.batch([ga.window_path_graph(30, 4), ga.window_path_graph(17, 4)]), table=True
    ),
    "padding": Case(ga.causal_window_graph(25, 5), valid="both", batch=(2,)),
    "padding of a complete graph": Case(
        ga.complete_graph(25), score="dot", valid="both", batch=(2,), kv_heads=1
    ),
    "masked targets": Case(ga.window_path_graph(25, 9), valid="targets"),
    "masked sources": Case(ga.bipartite_complete_graph(20, 40), valid="sources"),
    "both masked, differently": Case(
        ga.bipartite_complete_graph(35, 20), score="dot", valid="both"
    ),
    "eps": Case(ga.window_path_graph(33, 4), eps=0.3, valid="both"),
    "negative scale": Case(ga.causal_graph(33), score="dot", strength=(-0.7, -0.1)),
    "scale 0": Case(ga.causal_window_graph(33, 9), score="dot", strength=(0.0, 0.4)),
    "sigma per head": Case(ga.complete_graph(33), strength=(1.5, 9.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_float64(name: str, device: str) -> None:
    check(kernels(CASES[name], device), exact(CASES[name]), SINGLE)


@pytest.mark.long
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(
    "name",
    ["path", "causal window", "causal window of many tiles", "complete", "more sources", "dilated",
     "sequences of many kinds", "table", "padding of a complete graph", "eps"],
)  # fmt: skip
def test_half_precision_costs_at_most_twice_what_it_must(
    name: str, dtype: torch.dtype, device: str
) -> None:
    check_half(CASES[name], dtype, device)


@pytest.mark.parametrize("score", ["rbf", "dot"])
@pytest.mark.parametrize(
    ("D", "Dv"), [(1, 1), (7, 48), (48, 7), (64, 64), (80, 128), (128, 80), (256, 256), (1, 256)]
)
def test_any_width_of_a_head(D: int, Dv: int, score: str, device: str) -> None:
    case = Case(ga.causal_window_graph(21, 6), score=score, features=D, value_features=Dv)
    check(kernels(case, device), exact(case), SINGLE)


@pytest.mark.parametrize(
    "case",
    [Case(ga.causal_graph(20), batch=(0,)), Case(ga.causal_graph(0)),
     Case(ga.bipartite_complete_graph(3, 0)), Case(ga.bipartite_complete_graph(0, 3))],
    ids=["no batch", "no tokens", "no sources", "no targets"],
)  # fmt: skip
def test_nothing_to_do_is_done(case: Case, device: str) -> None:
    check(kernels(case, device), exact(case), 0.0)


@pytest.mark.long
@pytest.mark.parametrize("heads", [(4, 1), (6, 2), (3, 3)], ids=str)
def test_query_heads_share_key_heads_in_order(heads: tuple[int, int], device: str) -> None:
    case = Case(ga.causal_window_graph(20, 9), heads=heads[0], kv_heads=heads[1])
    check(kernels(case, device), exact(case), SINGLE)


@pytest.mark.long
@pytest.mark.parametrize("size", [(16, 32), (32, 16), (64, 16)], ids=str)
@pytest.mark.parametrize(
    "name", ["causal window of many tiles", "dilated without self loops", "padding"]
)
def test_sizes_of_tiles_change_no_result(name: str, size: tuple[int, int], device: str) -> None:
    with tuning.override(**tiles(*size)):
        check(kernels(CASES[name], device), exact(CASES[name]), SINGLE)


@pytest.mark.long
def test_a_tile_needs_no_mask_only_where_all_its_rows_see_it(device: str) -> None:
    """Windows whose ends meet the borders of tiles in every way there is."""
    x = torch.randn(80, 1, 2, dtype=torch.float64)
    for window in range(16, 32):
        graph = ga.window_path_graph(80, window, self_loops=True)
        wanted = ga.dot_product_attention(x, x, x, graph, backend="reference")
        q, k = x.float().to(device), x.float().to(device)
        out = ga.dot_product_attention(q, k, k, graph.to(device), backend="triton")
        torch.testing.assert_close(out.cpu().double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_sizes_of_tiles_change_no_gradient_of_a_table(device: str) -> None:
    case = CASES["table of a wide causal window"]
    with tuning.override(**tiles(32, 32)):
        check(kernels(case, device), exact(case), SINGLE)


def _one_projection(x: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.stack([x, x + 1, x * x], dim=-3).unbind(-3))


LAYOUTS = {
    "views of one projection": _one_projection,
    "heads first": lambda x: [
        y.transpose(-2, -3).contiguous().transpose(-2, -3) for y in (x, x + 1, x * x)
    ],
    "every second feature": lambda x: [x.repeat_interleave(2, -1)[..., ::2], x + 1, x * x],
    "batches far apart": lambda x: [
        torch.cat([y, y], dim=1)[:, : x.shape[1]] for y in (x, x + 1, x * x)
    ],
    "one batch for all": lambda x: [x, x[:1].expand_as(x), x[:1].expand_as(x) * 2],
    "one key head for all": lambda x: [x, x[:, :, :1].expand_as(x), x[..., :1].expand_as(x)],
    "one token for all": lambda x: [x, x + 1, x[:, :1].expand_as(x)],
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_of_the_inputs_does_not_matter(layout: str, device: str) -> None:
    case = Case(ga.causal_window_graph(21, 6), batch=(2,), features=6, value_features=6)
    names, x = ("query", "key", "value"), case.tensors()["query"].to(device)
    tensors = dict(zip(names, LAYOUTS[layout](x), strict=True))
    tensors["strength"] = case.tensors()["strength"]
    if layout != "views of one projection":
        assert any(not y.is_contiguous() for y in tensors.values())
    results = solve(case, tensors, case.upstream(), backend="triton", device=device)
    check(results, in_float64(case, tensors, case.upstream()), SINGLE)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["one number for all", "heads first", "features reversed"])
def test_the_layout_of_the_upstream_gradient_does_not_matter(layout: str, device: str) -> None:
    case = Case(ga.causal_window_graph(21, 6), batch=(2,))
    d_out, d_lse = case.upstream()
    if layout == "one number for all":
        d_out, d_lse = torch.tensor(0.5).expand_as(d_out), torch.tensor(-1.0).expand_as(d_lse)
    elif layout == "heads first":
        d_out, d_lse = (d.movedim(2, 0).contiguous().movedim(0, 2) for d in (d_out, d_lse))
    else:
        d_out = d_out.mT.contiguous().mT
    assert not d_out.is_contiguous()
    results = solve(case, case.tensors(), (d_out, d_lse), backend="triton", device=device)
    check(results, in_float64(case, case.tensors(), (d_out, d_lse)), SINGLE)


@pytest.mark.long
@pytest.mark.parametrize("only", ["out", "lse"])
@pytest.mark.parametrize("name", ["path", "table", "padding of a complete graph"])
def test_a_loss_on_one_result_alone(name: str, only: str, device: str) -> None:
    case = CASES[name]
    upstream = tuple(
        d if wanted == only else torch.zeros_like(d)
        for wanted, d in zip(("out", "lse"), case.upstream(), strict=True)
    )
    gradients = []
    for backend, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        where = device if backend == "triton" else "cpu"
        leaves = {name: x.to(where, dtype).requires_grad_() for name, x in case.tensors().items()}
        result = attend(case, leaves, backend=backend, device=where)[only == "lse"]
        d = upstream[only == "lse"].to(where, dtype)
        given = torch.autograd.grad(result, list(leaves.values()), d, materialize_grads=True)
        gradients.append({name: g.cpu() for name, g in zip(leaves, given, strict=True)})
    check(*gradients, SINGLE)


def test_gradients_are_given_to_those_who_ask(device: str) -> None:
    case = Case(ga.causal_window_graph(21, 6), table=True)
    expected = exact(case)
    for wanted in (["query"], ["value"], ["table"], ["key", "strength"]):
        leaves = {name: x.to(device) for name, x in case.tensors().items()}
        for name in wanted:
            leaves[name].requires_grad_()
        out, lse = attend(case, leaves, backend="triton", device=device)
        results = differentiated(out, lse, {n: leaves[n] for n in wanted}, case.upstream())
        check(results, {name: expected[name] for name in results}, SINGLE)


def test_log_sums_of_half_precision_are_float32_and_outputs_what_came_in(device: str) -> None:
    graph = ga.causal_graph(5).to(device)
    for dtype in (torch.float32, *HALF):
        x = random(5, 1, 4, seed=0).to(device, dtype)
        out, lse = ga.dot_product_attention(x, x, x, graph, backend="triton", return_lse=True)
        assert (out.dtype, lse.dtype) == (dtype, torch.float32)

"""Kernels keep exactly k sources of a window, or of a row of edges; of equal ones, the smaller."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from cases_edges import CASES as EDGE_CASES
from cases_edges import EVERY, cut_at, only
from cases_kernels import (
    Case,
    Tensors,
    attend,
    check,
    check_half,
    exact,
    in_float64,
    kernels,
    solve,
)
from cases_top_k import chosen, inputs_of, largest, logits_in_float64, pairs_of, with_ties
from test_kernels_sweep import CASES as SWEEP
from test_kernels_sweep import case_over_bands, check_random

import graphattn as ga
from graphattn.kernels.bands import top_k as selection
from graphattn.kernels.shared import tuning

pytestmark = pytest.mark.usefixtures("device", "edge_tiles")

SINGLE = 5e-6


@pytest.fixture(autouse=True)
def _tiles(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter is slow to start a program: few of them. It holds all ranks in any dtype."""
    if device == "cpu":
        monkeypatch.setattr(selection, "HELD", {dtype: {256: 192} for dtype in selection.HELD})
    names = set(tuning.KERNELS) - set(tuning.OF_EDGES)
    large = {name: tuning.Choice(64, 64, 4, 1) for name in names}
    with tuning.override(**(large if device == "cpu" else {})):
        yield


def top(k: int, graph: ga.TokenGraph, **options: object) -> Case:
    return Case(graph, options={"top_k": k}, **{"heads": 1, "kv_heads": 1, **options})


CASES = {
    "causal window": top(9, ga.causal_window_graph(50, 20), heads=2, batch=(2,)),
    "causal window, dot": top(5, ga.causal_window_graph(45, 33), score="dot"),
    "path": top(4, ga.window_path_graph(45, 5), score="dot", heads=2),
    "path with self loops": top(1, ga.window_path_graph(40, 20, self_loops=True)),
    "causal": top(12, ga.causal_graph(40)),
    "complete": top(7, ga.complete_graph(40), heads=2, features=20, value_features=17),
    "more sources": top(3, ga.bipartite_complete_graph(20, 40), score="dot"),
    "more targets": top(11, ga.bipartite_complete_graph(35, 20)),
    "blocks": top(6, ga.block_window_graph(45, 12, shift=5)),
    "dilated": top(4, ga.dilated_window_graph(50, 4, 3)),
    "dilated without self loops": top(
        5, ga.dilated_window_graph(44, 9, 2, self_loops=False), score="dot", heads=2
    ),
    "sequences of many kinds": top(
        3,
        ga.batch([
            ga.causal_graph(20),
            ga.complete_graph(1),
            ga.window_path_graph(30, 3),
            ga.dilated_window_graph(19, 2, 2),
            ga.block_window_graph(21, 12),
        ]),
    ),
    "table": top(5, ga.causal_window_graph(40, 9), table=True, heads=2),
    "table of a wide window": top(20, ga.window_path_graph(40, 36), table=True, score="dot"),
    "padding": top(4, ga.causal_window_graph(40, 9), valid="both", batch=(2,)),
    "masked targets": top(4, ga.window_path_graph(40, 9), valid="targets"),
    "masked sources": top(6, ga.bipartite_complete_graph(20, 40), valid="sources"),
    "eps": top(4, ga.causal_window_graph(40, 9), eps=0.3),
    "negative scale": top(4, ga.causal_graph(33), score="dot", strength=(-0.7,)),
    "one tensor": top(6, ga.causal_window_graph(40, 20), shared=True, batch=(2,)),
}  # fmt: skip


def check_choice(case: Case, tensors: Tensors, device: str) -> None:
    kept = chosen(case, tensors, device)
    expected = largest(case, logits_in_float64(case, tensors))
    assert torch.equal(kept, expected), f"{(kept != expected).sum()} pairs differ"


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_float64(name: str, device: str) -> None:
    check(kernels(CASES[name], device), exact(CASES[name]), SINGLE, floor=0.1)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("causal window", torch.bfloat16), ("path", torch.float16), ("masked sources", torch.bfloat16),
     ("table", torch.float16)],
    ids=str,
)  # fmt: skip
def test_half_precision_costs_at_most_twice_what_it_must(
    name: str, dtype: torch.dtype, device: str
) -> None:
    check_half(CASES[name], dtype, device)


@pytest.mark.long
@pytest.mark.parametrize("held", [True, False], ids=["held", "streamed"])
@pytest.mark.parametrize(
    "graph",
    [ga.causal_window_graph(90, 40), ga.window_path_graph(70, 33),
     ga.bipartite_complete_graph(20, 100),
     ga.batch([ga.dilated_window_graph(75, 18, 2, self_loops=False), ga.causal_graph(37)])],
    ids=["causal window", "path", "more sources", "sequences"],
)  # fmt: skip
def test_sizes_of_tiles_change_no_choice(
    graph: ga.TokenGraph, held: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows that begin and end anywhere in tiles and in words of 32 bits."""
    if not held:
        monkeypatch.setattr(selection, "HELD", {dtype: {} for dtype in selection.HELD})
    case = top(13, graph)
    for rows, columns in ((16, 32), (32, 64)) if held else ((32, 32),):
        with tuning.override(band_select=tuning.Choice(rows, columns, 4, 1)):
            check_choice(case, case.tensors(), device)


@pytest.mark.long
@pytest.mark.parametrize("size", [(16, 16), (32, 64), (64, 32)], ids=str)
@pytest.mark.parametrize("table", [False, True], ids=["no table", "table"])
def test_tiles_of_any_size_read_the_choice(size: tuple[int, int], table: bool, device: str) -> None:
    """Forward and backward, with parts of words, and several."""
    graph = ga.causal_window_graph(75, 30)
    case = top(11, graph, table=table)
    names = set(tuning.KERNELS) - {"band_select", *tuning.OF_EDGES}
    with tuning.override(**{name: tuning.Choice(*size, 4, 1) for name in names}):
        check(kernels(case, device), exact(case), SINGLE, floor=0.1)


@pytest.mark.long
@pytest.mark.parametrize(("k", "held"), [(1, True), (32, True), (45, True), (33, False)], ids=str)
@pytest.mark.parametrize("score", ["rbf", "dot"])
def test_of_equal_sources_the_smaller_index_is_kept(
    k: int, score: str, held: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine different keys: the k-th has equals on both sides of tiles and words."""
    if not held:
        monkeypatch.setattr(selection, "HELD", {dtype: {} for dtype in selection.HELD})
    case = top(k, ga.causal_window_graph(100, 70), score=score)
    with tuning.override(band_select=tuning.Choice(32, 32, 4, 1)):
        check_choice(case, with_ties(case), device)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "score", "k", "longest"),
    [("list of many edges", "rbf", 1, 512), ("list of many edges", "dot", 5, 24),
     ("grid with a class token", "rbf", 2, 512), ("grid with a class token", "dot", 5, 512),
     ("hubs", "rbf", 2, 8), ("hubs", "dot", 1, 512), ("bias of neighbours", "rbf", 2, 512),
     ("bias of neighbours", "dot", 1, 8), ("bias of every sample", "dot", 3, 512)],
)  # fmt: skip
def test_of_equal_edges_of_a_row_the_first_are_kept(
    name: str, score: str, k: int, longest: int, device: str
) -> None:
    case = replace(EDGE_CASES[name], strength=(0.5, 2.0), features=2)
    tensors = case.tensors()
    for n in tensors.keys() & {"query", "key", "edge_bias"}:
        tensors[n] = tensors[n].clamp(-1.4, 1.4).round()
    case = replace(case, options={"top_k": k}, score=score)
    with cut_at(longest):
        results = solve(case, tensors, case.upstream(), backend="triton", device=device)
    check(results, in_float64(case, tensors, case.upstream()), SINGLE, floor=0.1)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_list", [False, True], ids=["window", "list"])
def test_negative_zero_ties_with_zero(is_list: bool, dtype: torch.dtype, device: str) -> None:
    """Logits and biases are -0.0 for even sources and 0.0 for odd: the first two must win."""
    graph = only(1, 40, (0, EVERY)) if is_list else ga.bipartite_complete_graph(1, 40)
    graph = graph.to(device)
    q = torch.tensor([1.0, 0.0], dtype=dtype, device=device).view(1, 1, 2)
    k = torch.tensor([-0.0, 0.0] * 20, dtype=dtype, device=device).view(40, 1, 1).repeat(1, 1, 2)
    v = torch.arange(40, device=device).to(dtype).view(40, 1, 1)
    biases = ({}, {"edge_bias": k[:, :, 0]}) if is_list else ({},)
    for bias in biases:
        options = {"top_k": 2, "backend": "triton", **bias}
        for scale in (1.0, -1.0, 0.0):
            assert ga.dot_product_attention(q, k, v, graph, scale=scale, **options).item() == 0.5
        assert ga.rbf_attention(q, k, v, graph, 1.0, **options).item() == 0.5
        same = q.expand(40, 1, 2)  # distances 0, logits -0.0 plus the bias
        assert ga.rbf_attention(q, same, v, graph, 1.0, **options).item() == 0.5


@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_an_offset_of_all_tokens_changes_no_choice(offset: float, device: str) -> None:
    """Coordinates are multiples of 1 / 64, so that the offset itself loses no digit of them."""
    case = top(9, ga.causal_window_graph(80, 30), strength=(2.0,))
    tensors = case.tensors()
    for name in ("query", "key"):
        tensors[name] = (tensors[name] * 64).round() / 64 + offset
    check_choice(case, tensors, device)


@pytest.mark.parametrize("is_list", [False, True], ids=["window", "list"])
def test_top_1_is_the_nearest_source(is_list: bool, device: str) -> None:
    """The output with top_k=1 is exactly the value of the nearest source.

    No gradient flows through the one weight, which is always 1; only the log-sum, which is not used
    here, would bring one to query and key.
    """
    x, value = (torch.randn(40, 1, n, device=device, requires_grad=True) for n in (3, 4))
    within = None if is_list else ga.window_path_graph(40, 6).to(device)
    graph = ga.knn_graph(x[:, 0].detach(), 6) if within is None else within
    out = ga.rbf_attention(x, x, value, graph, 1.0, top_k=1, backend="triton")
    index, _ = ga.knn(x[:, 0].detach(), 1, within=within)
    assert torch.equal(out, value[index[:, 0]])
    d_x, d_value = torch.autograd.grad(out, (x, value), torch.ones_like(out))
    assert d_x.abs().max() <= 1e-6
    counts = torch.bincount(index[:, 0], minlength=40).to(d_value)
    torch.testing.assert_close(d_value, counts[:, None, None].expand_as(d_value))


@pytest.mark.long
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_knows_nothing_of_tokens_outside_its_window(bad: float, device: str) -> None:
    """No bit of its choice, output and log-sum; nor of gradients of what no bad row sees."""
    case = top(4, ga.causal_window_graph(60, 12))
    tensors, upstream = case.tensors(), case.upstream()
    clean = kernels(case, device)
    for name in ("query", "key", "value"):
        tensors[name][:, 30] = bad
    results = solve(case, tensors, upstream, backend="triton", device=device)
    for name in ("out", "lse", "query"):
        for rows in (slice(0, 30), slice(42, 60)):
            assert torch.equal(results[name][:, rows], clean[name][:, rows]), name
    for name in ("key", "value"):  # rows 30 to 41 are bad; they see the sources 19 to 41
        for rows in (slice(0, 19), slice(42, 60)):
            assert torch.equal(results[name][:, rows], clean[name][:, rows]), name


def test_what_is_not_kept_is_not_averaged_even_if_it_is_bad(device: str) -> None:
    """A source of a window that is not kept: its value may hold NaN."""
    case = top(3, ga.causal_window_graph(40, 10), score="dot", strength=(1.0,))
    tensors = case.tensors()
    x = inputs_of(case, tensors, device)
    kept = pairs_of(selection.select(x, 3), case, x.bands)[0, 0]
    expected = attend(case, {n: t.to(device) for n, t in tensors.items()}, backend="triton",
                      device=device)[0].cpu()  # fmt: skip
    seldom = int(kept.sum(0)[:30].argmin())
    tensors["value"][:, seldom] = torch.nan
    out = attend(case, {n: t.to(device) for n, t in tensors.items()}, backend="triton",
                   device=device)[0].cpu()  # fmt: skip
    without = ~kept[:, seldom]
    assert (without & case.graph.to_mask()[:, seldom]).any()
    assert torch.equal(out[:, without, 0], expected[:, without, 0])
    assert out[:, ~without, 0].isnan().all()


def test_a_key_that_is_not_a_number_is_the_first_to_be_kept(device: str) -> None:
    """A key of NaN is kept before all others, as torch sorts NaN first.

    So a row that sees NaN shows it.
    """
    case = top(2, ga.causal_window_graph(40, 10))
    tensors = case.tensors()
    tensors["key"][:, 20] = torch.nan
    out, _ = attend(
        case, {n: t.to(device) for n, t in tensors.items()}, backend="triton", device=device
    )
    assert out[:, 20:30].isnan().all()
    assert out[:, :20].isfinite().all()
    assert out[:, 30:].isfinite().all()


@pytest.mark.parametrize("seed", range(1000, 1000 + SWEEP))
def test_random_problems_are_solved(
    seed: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random problems, drawn as in the sweep over bands, are solved with a top-k."""
    draw, case = random.Random(seed), case_over_bands(seed)
    top_k = {"top_k": draw.choice([1, 2, 3, 8, 20])}
    case = replace(case, heads=case.heads // case.kv_heads, kv_heads=1, options=top_k)
    if draw.random() < 0.3:
        monkeypatch.setattr(selection, "HELD", {dtype: {} for dtype in selection.HELD})
    check_random(case, draw, device)

"""Attention over any edges by kernels: outputs, log-sums and all gradients are those of float64.

Random gradients come in through outputs and log-sums. Everything the kernels allocate is NaN
before they write it (see `device`), so an element left out fails.
"""

from dataclasses import replace

import pytest
import torch
from cases_edges import CASES, EVERY, cut_at, gathering, nearest, only, some, top
from cases_kernels import Case, attend, check, check_half, exact, kernels
from watched_memory import watched_memory

import graphattn as ga
from graphattn.kernels.edges import schedule
from graphattn.kernels.shared import tuning
from graphattn.kernels.shared.launch import recording

pytestmark = pytest.mark.usefixtures("device", "edge_tiles")

SINGLE = 5e-6  # relative RMS of float32
HALF = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_float64(name: str, device: str) -> None:
    # Averages of one or few sources have small gradients: their rounding is measured beside 0.1.
    with watched_memory(device):
        results = kernels(CASES[name], device)
    check(results, exact(CASES[name]), SINGLE, floor=0.1)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(
    "name",
    ["more sources", "neighbours", "longformer", "hubs", "bias of fewer neighbours than k", "eps",
     "top 3 with a bias"],
)  # fmt: skip
def test_half_precision_costs_at_most_twice_what_it_must(
    name: str, dtype: torch.dtype, device: str
) -> None:
    check_half(CASES[name], dtype, device)


# Rows and columns longer than a segment are cut, and their parts merged.


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "longest"),
    [("list of many edges", 35), ("neighbours", 4), ("grid with a class token", 8),
     ("longformer", 8), ("hubs", 8), ("hubs", 37), ("all edges on one target", 8),
     ("all edges from one source", 1), ("bias of fewer neighbours than k", 5), ("bias of hubs", 16),
     ("padding of hubs", 12), ("top 6 of hubs", 8), ("top 3 with a bias and padding", 4)],
)  # fmt: skip
def test_where_rows_are_cut_changes_no_result(name: str, longest: int, device: str) -> None:
    case = replace(CASES[name], batch=(1,))
    with cut_at(longest), watched_memory(device):
        results = kernels(case, device)
    check(results, exact(case), SINGLE, floor=0.1)


def test_rows_are_cut_where_that_is_said(device: str) -> None:
    """Otherwise the test above could not fail."""
    for name in ("hubs", "longformer", "grid with a class token"):
        case = CASES[name]
        x = {n: t.to(device) for n, t in case.tensors().items()}
        for longest in (8, 512, 8):
            with cut_at(longest), recording() as launches:
                attend(case, x, backend="triton", device=device)
            names = [launch.kernel.fn.__name__ for launch in launches]
            assert ("merge_averages_kernel" in names) == (longest == 8), names


@pytest.mark.long
@pytest.mark.parametrize("option", ["plain", "top 99"])
def test_hubs_of_more_than_one_real_segment(option: str, device: str) -> None:
    """A token that sees everybody and two that everybody sees, where rows are really cut."""
    N = schedule.LONGEST_SEGMENT + 90
    graph = only(N, N, (EVERY, 5), (17, EVERY), (EVERY, N - 1))
    case = Case(graph, heads=1, kv_heads=1, features=4, value_features=3, per_edge=True)
    if option != "plain":
        case = top(99, case)
    choices = gathering(64, 64) | {"edges_select": tuning.Choice(64, 1024, 4, 1)}
    with tuning.override(**(choices if device == "cpu" else {})):
        check(kernels(case, device), exact(case), SINGLE, floor=0.1)


@pytest.mark.long
@pytest.mark.parametrize("size", [(1, 1), (1, 16), (4, 2)], ids=str)
def test_tiles_may_be_as_small_as_one_edge(size: tuple[int, int], device: str) -> None:
    one_head = {"heads": 1, "kv_heads": 1}
    for case in (
        Case(some(5, 5, share=0.4), per_edge=True, **one_head),
        top(2, Case(nearest(4, 3), **one_head)),
    ):
        with tuning.override(**gathering(*size)), watched_memory(device):
            results = kernels(case, device)
        check(results, exact(case), SINGLE, floor=0.1)


# Sizes.


@pytest.mark.parametrize("score", ["rbf", "dot"])
@pytest.mark.parametrize(
    ("D", "Dv"), [(1, 1), (7, 48), (48, 7), (64, 64), (80, 128), (256, 256), (1, 256)]
)
def test_any_width_of_a_head(D: int, Dv: int, score: str, device: str) -> None:
    case = Case(some(15, 15), score=score, features=D, value_features=Dv)
    check(kernels(case, device), exact(case), 1e-5, floor=0.1)  # the wider, the longer the sums


EMPTY = {
    "no edges": only(20, 20),
    "no edges between others": only(5, 20),
    "no targets": only(0, 7),
    "no sources": only(7, 0),
    "no tokens": only(0, 0),
    "a table of nothing": ga.TokenGraph(
        neighbors=torch.full((20, 3), -1), num_targets=20, num_sources=20
    ),
    "a table without columns": ga.TokenGraph(
        neighbors=torch.full((20, 0), -1), num_targets=20, num_sources=9
    ),
    "a table without rows": ga.TokenGraph(
        neighbors=torch.full((0, 3), -1), num_targets=0, num_sources=9
    ),
}


@pytest.mark.parametrize("top_k", [None, 2])
@pytest.mark.parametrize("per_edge", [False, True])
@pytest.mark.parametrize("name", EMPTY)
def test_without_edges_everything_is_zero(
    name: str, per_edge: bool, top_k: int | None, device: str
) -> None:
    case = Case(EMPTY[name], per_edge=per_edge, options={"top_k": top_k})
    results = kernels(case, device)
    check(results, exact(case), 0.0)
    assert all((results[n] == 0).all() for n in results if n != "lse")
    assert (results["lse"] == -torch.inf).all()


@pytest.mark.parametrize("name", ["list", "neighbours", "longformer", "bias of a list"])
def test_an_empty_batch_is_no_work(name: str, device: str) -> None:
    case = replace(CASES[name], batch=(0,))
    check(kernels(case, device), exact(case), 0.0)


def test_a_union_with_a_window_keeps_its_window_a_band(device: str) -> None:
    """Band kernels compute the window of a graph that joins a window with other edges.

    The other edges are gathered, and the two results are merged. If there is a bias per edge, or no
    window (the grid), all edges are gathered.
    """
    if device != "cpu":
        pytest.skip("what is recorded does not run")
    for name, bands in (("longformer", 1), ("bias of a longformer", 0), ("grid", 0)):
        case = CASES[name]
        with recording() as launches:
            attend(case, case.tensors(), backend="triton")
        first = [one for one in launches if not one.arguments.get("CAREFUL")]
        names = [one.kernel.fn.__name__ for one in first]
        assert names.count("band_forward_kernel") == bands, names
        assert names.count("edges_forward_kernel") == 1, names

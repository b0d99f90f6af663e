"""Kernels over rows of a graph, and over graphs with a past: shifted windows, holes, tables."""

from typing import Any

import pytest
import torch
from cases_consensus import Case as ConsensusCase
from cases_consensus import check as check_consensus
from cases_consensus import exact as exact_consensus
from cases_consensus import kernels as kernels_of_consensus
from cases_kernels import Case, check, check_half, exact, kernels, tiles

import graphattn as ga
from graphattn.kernels.shared import tuning
from graphattn.ops.consensus.triton import edges_of

pytestmark = pytest.mark.usefixtures("device")

SINGLE = 5e-6


def rows(graph: ga.TokenGraph, start: int, stop: int, **options: Any) -> Case:
    return Case(graph.targets(start, stop)[0], **options)


PACKED = ga.batch([ga.causal_window_graph(20, 5), ga.window_path_graph(24, 3), ga.causal_graph(9)])
CASES = {
    "causal": rows(ga.causal_graph(60), 21, 57, score="dot", kv_heads=1),
    "causal window": rows(ga.causal_window_graph(90, 9), 30, 70, batch=(2,)),
    "past": Case(ga.causal_graph(20, past=25)),
    "past, dot": Case(ga.causal_graph(17, past=40), score="dot", valid="both"),
    "window far behind its past": Case(ga.causal_window_graph(20, 6, past=33), kv_heads=1),
    "window that reaches before its past": Case(ga.causal_window_graph(20, 30, past=9)),
    "window with a past, transposed": Case(
        ga.causal_window_graph(20, 6, past=33).transpose(), score="dot"
    ),
    "past, transposed": Case(ga.causal_graph(20, past=25).transpose()),
    "path": rows(ga.window_path_graph(70, 3), 20, 61),
    "path at its start": rows(ga.window_path_graph(70, 20), 0, 17, score="dot"),
    "path, padded": rows(ga.window_path_graph(70, 3), 20, 61, valid="both", score="dot"),
    "dilated": rows(ga.dilated_window_graph(90, 2, 3), 10, 71),
    "dilated without self-loops": rows(
        ga.dilated_window_graph(90, 3, 4, self_loops=False), 5, 50, score="dot", kv_heads=1
    ),
    "blocks": rows(ga.block_window_graph(70, 12, shift=5), 9, 52),
    "complete": rows(ga.complete_graph(40), 11, 30, score="dot"),
    "complete without self-loops": rows(ga.complete_graph(40, self_loops=False), 11, 30),
    "batch": rows(PACKED, 7, 49),
    "longformer": rows(ga.longformer_graph(70, 2, [0, 40]), 13, 59),
    "top-k": rows(ga.window_path_graph(80, 9), 20, 57, options={"top_k": 4}),
    "top-k far behind": Case(
        ga.causal_window_graph(33, 20, past=47), score="dot", options={"top_k": 7}
    ),
    "top-k of a past": Case(ga.causal_graph(20, past=50), options={"top_k": 11}, valid="both"),
    "top-k, transposed": Case(
        ga.causal_window_graph(20, 9, past=33).transpose(), options={"top_k": 3}
    ),
    "table": rows(ga.causal_window_graph(60, 7), 21, 57, table=True, kv_heads=1),
    "table of a path": rows(ga.window_path_graph(60, 5), 3, 40, table=True, score="dot"),
    "table of a past": Case(ga.causal_window_graph(20, 9, past=13), table=True, valid="both"),
    "table of a complete graph": rows(ga.complete_graph(40), 11, 30, table=True),
    "table of a dilated window": rows(ga.dilated_window_graph(70, 2, 3), 21, 60, table=True),
    "table of blocks": rows(ga.block_window_graph(60, 11, shift=3), 7, 50, table=True),
    "table and top-k": rows(
        ga.window_path_graph(80, 9), 20, 57, table=True, options={"top_k": 4}
    ),
    "rows of a batch": rows(
        ga.batch([ga.window_path_graph(30, 4), ga.window_path_graph(27, 4)]), 9, 44, table=True
    ),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_float64(name: str, device: str) -> None:
    check(kernels(CASES[name], device), exact(CASES[name]), SINGLE)


@pytest.mark.parametrize("size", [(32, 16), (64, 64)], ids=str)
@pytest.mark.parametrize("name", ["window far behind its past", "path", "top-k of a past", "table"])
def test_sizes_of_tiles_change_no_result(name: str, size: tuple[int, int], device: str) -> None:
    with tuning.override(**tiles(*size)):
        check(kernels(CASES[name], device), exact(CASES[name]), SINGLE)


@pytest.mark.parametrize("name", ["causal window", "window with a past, transposed", "table"])
def test_half_precision_costs_at_most_twice_what_it_must(name: str, device: str) -> None:
    check_half(CASES[name], torch.bfloat16, device)


@pytest.mark.long
def test_one_tensor_over_rows_that_are_as_many_as_their_sources(device: str) -> None:
    """Gaussian kernel attention reads one tensor: target i is source i, wherever both stand."""
    from graphattn.graphs.structures.composites import Section
    from graphattn.graphs.structures.structure import Band

    for loops in (True, False):
        graph = ga.TokenGraph(structure=Section(Band(60, 4, 6, 1, loops), 21, 51, 20, 50))
        case = Case(graph, features=5, value_features=5, shared=True)
        check(kernels(case, device), exact(case), SINGLE)


CONSENSUS = {
    "path": ga.window_path_graph(40, 2).targets(11, 33)[0],
    "causal": ga.causal_window_graph(40, 4).targets(3, 30)[0],
    "past": ga.causal_window_graph(15, 4, past=17),
    "dilated": ga.dilated_window_graph(40, 2, 3).targets(4, 31)[0],
    "batch": ga.batch([ga.causal_window_graph(n, 3) for n in (9, 12)]).targets(4, 17)[0],
}


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"step": "auto", "valid": "both"}], ids=str)
@pytest.mark.parametrize("name", CONSENSUS)
def test_consensus_over_rows_is_that_of_float64(name: str, options: Any, device: str) -> None:
    case = ConsensusCase(CONSENSUS[name], update="target", **options)
    check_consensus(kernels_of_consensus(case, device), exact_consensus(case), case, SINGLE)


def test_consensus_lists_no_edge_of_rows_of_a_window(device: str) -> None:
    edges = edges_of(CONSENSUS["past"], loops=True)
    assert edges.edge_index is None
    assert edges.moves == (14, 15, 16, 17)
    assert (edges.num_targets, edges.num_sources) == (15, 32)
    assert edges_of(CONSENSUS["batch"], loops=True).edge_index is not None


def test_nearest_neighbours_within_rows_without_self_loops_are_for_the_reference(
    device: str,
) -> None:
    x = torch.randn(30, 3, device=device)
    part, seen = ga.window_path_graph(30, 4).targets(9, 21)
    options = {"source": x[seen.start : seen.stop], "within": part.to(device)}
    with pytest.raises(ValueError, match="a section of a window without self-loops"):
        ga.knn(x[9:21], 2, backend="triton", **options)
    part, seen = ga.window_path_graph(30, 4, self_loops=True).targets(9, 21)
    options = {"source": x[seen.start : seen.stop], "within": part.to(device)}
    index, _ = ga.knn(x[9:21], 2, backend="triton", **options)
    expected, _ = ga.knn(x[9:21], 2, backend="reference", **options)
    assert torch.equal(index, expected)

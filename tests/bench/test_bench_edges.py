"""Rows of `graphattn bench` over arbitrary edges: graphs, the gate, crossings, the bound, FAISS."""

from __future__ import annotations

import types
from dataclasses import replace

import pytest
import torch
from bench_helpers import CPU, error_of, measured, quick_runs
from torch.nn.attention import SDPBackend

import graphattn as ga
from graphattn.bench.cases import catalogue as cases
from graphattn.bench.cases import edges as edge_cases
from graphattn.bench.cases import inputs
from graphattn.bench.cases import least_work as work
from graphattn.bench.contenders import flex, fused_attention, ours
from graphattn.bench.contenders import peers as contenders
from graphattn.bench.measuring import correctness as gate
from graphattn.bench.measuring import passes as measure
from graphattn.bench.measuring import runner
from graphattn.bench.reporting import record, tables
from graphattn.cli import bench

SIZES = {
    "knn-graph": {"tokens": 60, "k": 4},
    "knn-graph-reordered": {"tokens": 60, "k": 4},
    "radius-graph": {"tokens": 60, "degree": 6},
    "bipartite": {"tokens": 40, "sources": 60, "degree": 5},
    "grid": {"tokens": 50, "radius": 1},
    "longformer": {"tokens": 60, "window": 2, "global_tokens": 1},
    "crossover": {"tokens": 60, "degree": 6},
}
CASES = {case.name: case for case in edge_cases.OVER_EDGES}


def inputs_of(name: str) -> inputs.AttentionInputs:
    return CASES[name].make({"heads": 2, "features": 8, **SIZES[name]}, CPU, torch.float32)


# Graphs.


@pytest.mark.parametrize("degree", [1, 4, 16])
def test_random_edges_are_as_many_different_ones_as_asked_for(degree):
    graph = edge_cases.random_edges({"tokens": 30, "sources": 16, "degree": degree})
    assert (graph.num_targets, graph.num_sources) == (30, 16)
    assert graph.in_degree().tolist() == [degree] * 30
    if degree == 16:
        assert bool(graph.to_mask().all())


@pytest.mark.parametrize("name", CASES)
def test_the_bound_counts_the_edges_of_the_graph_itself(name):
    """4 operations per edge and feature, over the graph that the inputs are made with."""
    size = {"heads": 2, "features": 8, **SIZES[name]}
    flops, _ = CASES[name].work(size, 4, False)
    assert flops == 4 * inputs_of(name).graph.num_edges * 2 * 8


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", CASES)
def test_every_size_makes_the_graph_that_it_says(name, device):
    for size_name in ("small", "paper", "long"):
        for entry in CASES[name].entries(size_name, device).values():
            size = entry.size
            if name == "grid":
                assert edge_cases.image(size).num_tokens == size["tokens"]
            if name in ("bipartite", "crossover"):
                assert size["degree"] <= size.get("sources", size["tokens"])
                assert size.get("sources", size["tokens"]) % size["degree"] == 0


def test_irregular_stands_for_all_of_them_and_the_search_that_makes_such_graphs():
    assert [case.name for case in bench.chosen(["irregular"])] == [*CASES, "knn"]


# The gate.


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("is_dot", [False, True], ids=["distance", "dot product"])
def test_attention_without_one_edge_of_the_first_target_is_wrong(name, is_dot):
    """Attention without one edge of the first target is found to be wrong.

    Of all targets that one is always looked at: it is the class token or a global one, if there is
    any.
    """
    x = inputs_of(name)
    truth = gate.truth_of(x, backward=True, dot_product=is_dot)
    attend = ours.dot_product if is_dot else ours.rbf
    assert x.graph.edge_index[1, 0] == 0
    fewer = ga.from_edge_index(x.graph.edge_index[:, 1:], x.graph.num_targets, x.graph.num_sources)

    def without_it(x):
        return attend(replace(x, graph=fewer))

    assert max(truth.errors_of(attend)) < 1e-5
    assert min(truth.errors_of(without_it)) > gate.ALLOWED[torch.float32]


@pytest.mark.parametrize("count", [0, 1, 5, 1000])
def test_a_sample_has_the_first_row_and_no_row_twice(count):
    rows = gate.sample(count, torch.Generator().manual_seed(0)).tolist()
    assert len(rows) == len(set(rows)) == min(count, gate.SAMPLED_ROWS)
    assert all(0 <= row < count for row in rows)
    assert rows[:1] == [0][:count]


# By degree.


def small_crossover(monkeypatch) -> None:
    case, size = CASES["crossover"], {"tokens": 48, "heads": 2, "features": 4}
    few = {name: run for name, run in case.dot_products.items() if "Flex" not in name}
    degrees = {"small": (2, 12, 48)}
    quick_runs(monkeypatch, replace(case, dot_products=few, sizes={"small": size}, degrees=degrees))


def test_a_ratio_is_to_graphattn_at_the_same_degree(monkeypatch, tmp_path):
    small_crossover(monkeypatch)

    def takes(timings, **_):  # graphattn a second per edge of a target, SDPA always 6 seconds
        def seconds(name):
            return float(name.split("degree ")[1]) if name.startswith("graphattn") else 6.0

        return {name: measure.Timing([seconds(name)] * 3) for name in timings}, {}

    monkeypatch.setattr(runner, "time_interleaved", takes)
    results, output = measured(tmp_path, "crossover")
    rows = [row for row in results.rows if row.passes == "forward"]
    assert {row.contender: row.ratio for row in rows} == {
        **{f"graphattn, degree {degree}": None for degree in (2, 12, 48)},
        **{f"SDPA, masked, degree {degree}": 6 / degree for degree in (2, 12, 48)},
    }
    assert all(row.size["degree"] == int(row.contender.split()[-1]) for row in rows)
    assert "forward: SDPA, masked is faster from degree 6 on (12.5% of all)" in output


def row_at(degree: int, ratio: float, contender: str = "dense") -> record.Row:
    size, name = {"tokens": 1000, "degree": degree}, f"{contender}, degree {degree:,}"
    return record.Row("c", "forward", name, size, 1.0, 0.0, 3, ratio, None, None, None)


@pytest.mark.parametrize(
    ("ratios", "says"),
    [
        ((10.0, 1.0, 0.1), "forward: dense is faster from degree 100 on (10.0% of all)"),
        ((4.0, 4.0, 0.25), "forward: dense is faster from degree 316 on (31.6% of all)"),
        ((3.0, 0.9, 2.0), "forward: dense is slower even at degree 1,000"),
        ((0.9, 0.5, 0.1), "forward: dense is faster at every degree"),
    ],
)
def test_curves_cross_where_a_power_of_the_degree_does(ratios, says):
    rows = [row_at(d, r) for d, r in zip((10, 100, 1000), ratios, strict=True)]
    assert list(tables.crossings(rows)) == [says]


def test_one_degree_is_no_curve():
    assert list(tables.notes([row_at(32, 2.0)])) == []


# Peers.


def test_masked_sdpa_makes_its_mask_once():
    x = inputs_of("crossover")
    run = fused_attention.masked_sdpa(SDPBackend.EFFICIENT_ATTENTION)
    assert error_of(run, x, is_dot=True) < 1e-5
    mask = x.prepared["additive_mask"]
    assert torch.equal(mask.exp().bool(), x.graph.to_mask())
    run(x)
    assert x.prepared["additive_mask"] is mask


def test_a_mask_that_would_not_fit_is_not_made(monkeypatch):
    monkeypatch.setattr(contenders, "free_memory", lambda device: 1e3)
    for peer in (fused_attention.masked_sdpa(SDPBackend.EFFICIENT_ATTENTION),
                 flex.block_mask):  # fmt: skip
        with pytest.raises(inputs.MissingError, match="its mask would need about"):
            peer(inputs_of("crossover"))


def stand_in_for_faiss(monkeypatch, **members):
    """`knn` as FAISS has it: squared distances and indices, a point its own nearest."""

    def knn(queries, points, k):
        return (queries[:, None] - points).square().sum(-1).topk(k, largest=False)

    module = types.SimpleNamespace(knn=knn, **members)
    monkeypatch.setattr(contenders, "installed", lambda _: module)


def test_faiss_is_asked_for_one_neighbour_more_which_is_the_point_itself(monkeypatch):
    stand_in_for_faiss(monkeypatch)
    x = cases.points({"tokens": 50, "features": 8, "k": 4}, CPU, torch.float32)
    truth = gate.truth_of(x, backward=False)
    assert max(truth.errors_of(contenders.faiss_flat)) < 1e-5


def test_faiss_without_its_gpu_part_is_missing_on_a_gpu(monkeypatch):
    stand_in_for_faiss(monkeypatch)
    points = types.SimpleNamespace(device=torch.device("cuda"))
    with pytest.raises(inputs.MissingError, match="without GPU support"):
        contenders.faiss_flat(inputs.NeighborInputs(points, 4))


# The bound.


def test_the_bound_of_two_tracks_counts_the_tokens_of_each():
    """Queries, outputs and their gradients of the targets, keys and values of the sources."""
    size = {"tokens": 10, "sources": 30, "heads": 2, "features": 4}
    _, moved = work.attention(lambda _: 0)(size, 2, False)
    assert moved == 2 * 8 * (2 * 10 + 2 * 30)
    _, moved = work.attention(lambda _: 0)(size, 2, True)
    assert moved == 2 * 8 * ((2 + 3 + 1) * 10 + (2 + 2 + 2) * 30)


def test_listed_edges_are_read_once_per_pass():
    """Forward, and backward once for the targets and once for the sources."""
    size = {"tokens": 10, "heads": 1, "features": 1}
    listed, unlisted = (work.attention(lambda _: 100, listed=is_listed) for is_listed in (1, 0))
    for backward, reads in ((False, 1), (True, 3)):
        read = listed(size, 4, backward)[1] - unlisted(size, 4, backward)[1]
        assert read == reads * 100 * 4


def test_a_search_reads_its_points_and_writes_what_it_found():
    flops, moved = work.neighbors({"tokens": 100, "features": 8, "k": 5}, 2, False)
    assert flops == 2 * 100**2 * 8
    assert moved == 100 * 8 * 4 + 100 * 5 * (8 + 4)  # float32, int64

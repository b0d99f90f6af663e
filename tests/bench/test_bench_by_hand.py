"""Peers of compiled attention on a CPU: right on every graph they take, and clear where not."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy
import pytest
import torch

import graphattn as ga
from graphattn.bench.cases import catalogue as cases
from graphattn.bench.cases import edges as edge_cases
from graphattn.bench.cases import inputs
from graphattn.bench.contenders import ours
from graphattn.bench.contenders import peers as contenders
from graphattn.bench.contenders import sparse_matrices as listed
from graphattn.bench.contenders.by_hand import loops
from graphattn.bench.contenders.by_hand import offset_slices as slices
from graphattn.bench.contenders.by_hand import sliding_chunks as chunks
from graphattn.bench.contenders.by_hand import window_blocks as blocks
from graphattn.bench.measuring import correctness as gate
from graphattn.bench.measuring import passes as measure
from graphattn.bench.reporting import record

CPU = torch.device("cpu")
CASES = {case.name: case for case in cases.CASES}
NEEDS_COMPILER = pytest.mark.skipif(
    shutil.which("c++") is None, reason="torch.compile needs a C++ compiler on a CPU"
)
WINDOWS = {
    "causal": ga.causal_window_graph(150, 9),
    "both sides": ga.window_path_graph(150, 3, self_loops=True),
    "whole blocks": ga.window_path_graph(2 * blocks.BLOCK, 4, self_loops=True),
    "wider than the sequence": ga.causal_window_graph(20, 40),
}
WITH_GLOBAL_TOKENS = {
    "the first ones": ga.longformer_graph(300, 9, range(4)),
    "any": ga.longformer_graph(2 * chunks.CHUNK, 70, [5, 2 * chunks.CHUNK - 1]),
    "wider than the sequence": ga.longformer_graph(20, 40, [0]),
}
LISTS = {
    "nearest": ga.knn_graph(torch.rand(40, 3, generator=torch.Generator().manual_seed(0)), 5),
    "class token": ga.grid_window_graph(6, 6, 1, class_token=True),
    "without edges": ga.from_edge_index(torch.tensor([[0, 2, 2, 8, 5], [3, 0, 3, 3, 1]]), 5, 9),
}
SELECTIONS = [blocks.largest_by_topk, blocks.largest_by_numpy]


def inputs_of(graph: ga.TokenGraph, top_k: int | None = None) -> inputs.AttentionInputs:
    return inputs.attention_inputs(graph, 2, 8, CPU, torch.float32, top_k)


@pytest.fixture
def uncompiled(monkeypatch):
    monkeypatch.setattr(slices, "compile_once", lambda function: function)
    monkeypatch.setattr(slices, "needs_compiler", lambda device: None)


@pytest.fixture
def interpreted(monkeypatch):
    """numba's loops as Python runs them."""
    numba = SimpleNamespace(
        config=SimpleNamespace(NUMBA_NUM_THREADS=1), set_num_threads=lambda count: None
    )
    monkeypatch.setattr(listed, "installed", lambda name: numba)
    monkeypatch.setattr(listed, "compiled_loops", lambda: (loops.forward, loops.backward))


# Windows.


@pytest.mark.parametrize("name", WINDOWS)
def test_blocks_by_sdpa_are_attention_in_the_window(name):
    x = inputs_of(WINDOWS[name])
    truth = gate.truth_of(x, backward=True, dot_product=True)
    assert max(truth.errors_of(blocks.blocks_sdpa)) < 1e-5


@pytest.mark.parametrize("is_dot", [False, True])
@pytest.mark.parametrize("name", WITH_GLOBAL_TOKENS)
def test_chunks_by_sdpa_are_attention_in_the_window_and_to_and_from_global_tokens(name, is_dot):
    x = inputs_of(WITH_GLOBAL_TOKENS[name])
    truth = gate.truth_of(x, backward=True, dot_product=is_dot)
    run = chunks.chunks_dot if is_dot else chunks.chunks_rbf
    assert max(truth.errors_of(run)) < 1e-5


@pytest.mark.parametrize("is_dot", [False, True])
def test_every_row_of_chunks_is_right_and_not_a_sample(is_dot):
    x = inputs_of(ga.longformer_graph(150, 20, [3, 80]))
    run, given = (chunks.chunks_dot if is_dot else chunks.chunks_rbf), x.learned()
    doubled = [t.detach().double().requires_grad_() for t in given]
    truth = gate.in_float64(x.like(doubled, x.graph), dot_product=is_dot)
    out, loss = run(x), torch.randn(truth.shape, generator=torch.Generator().manual_seed(2))
    assert gate.relative_error(out, truth.detach()) < 1e-5
    expected = torch.autograd.grad(truth, doubled, loss.double())
    for found, true in zip(torch.autograd.grad(out, given, loss), expected, strict=True):
        assert gate.relative_error(found, true) < 1e-5


def test_what_has_no_global_tokens_has_no_chunks():
    with pytest.raises(inputs.MissingError, match="only windows with global tokens"):
        chunks.chunks_rbf(inputs_of(WINDOWS["causal"]))
    dilated = ga.longformer_graph(30, 3, [0], dilation=2)
    with pytest.raises(inputs.MissingError, match="only windows with global tokens"):
        chunks.chunks_dot(inputs_of(dilated))


@pytest.mark.parametrize("select", SELECTIONS)
@pytest.mark.parametrize("top_k", [1, 3, 30])
@pytest.mark.parametrize("name", WINDOWS)
def test_blocks_keep_the_nearest_of_the_window(name, top_k, select):
    x = inputs_of(WINDOWS[name], top_k)
    truth = gate.truth_of(x, backward=True)
    assert max(truth.errors_of(blocks.blocks_top_k(select))) < 1e-5


@pytest.mark.parametrize("name", WINDOWS)
def test_offsets_one_by_one_are_attention_in_the_window(name, uncompiled):
    x = inputs_of(WINDOWS[name])
    truth = gate.truth_of(x, backward=True)
    assert max(truth.errors_of(slices.compiled_slices)) < 1e-5


@NEEDS_COMPILER
@pytest.mark.long
def test_compiled_offsets_are_right_and_add_nothing_atomically():
    from torch._inductor.utils import run_and_get_code

    slices.compile_once.cache_clear()
    torch.compiler.reset()
    x = inputs_of(ga.window_path_graph(70, 2, self_loops=True))
    run = slices.compiled_slices
    _, codes = run_and_get_code(lambda: measure.one_pass(run, x, backward=True))
    kernels = "".join(codes)
    assert "for(" in kernels  # there are loops
    assert "atomic_add" not in kernels
    assert max(gate.truth_of(x, backward=True).errors_of(run)) < 1e-5
    torch.compiler.reset()


def test_the_threshold_is_the_smallest_number_kept():
    logits = torch.tensor([[3.0, 1.0, -torch.inf, 2.0], [-torch.inf, 5.0, -torch.inf, -torch.inf]])
    for select in SELECTIONS:
        assert select(logits, 2).tolist() == [[2.0], [-torch.inf]]


@pytest.mark.parametrize(
    ("graph", "says"),
    [
        (ga.complete_graph(9), "only windows whose tokens see themselves"),
        (ga.window_path_graph(9, 2), "only windows whose tokens see themselves"),
        (ga.window_path_graph(200, 40, self_loops=True), "only windows of at most 64 tokens"),
    ],
)
def test_what_is_no_narrow_window_has_no_slices(graph, says, uncompiled):
    with pytest.raises(inputs.MissingError, match=says):
        slices.compiled_slices(inputs_of(graph))


# Lists of edges.


@pytest.mark.parametrize("name", [*WINDOWS, *LISTS])
def test_sparse_matrices_are_attention_over_the_edges(name):
    """Targets and sources without an edge too."""
    x = inputs_of({**WINDOWS, **LISTS}[name])
    assert max(gate.truth_of(x, backward=True).errors_of(listed.torch_sparse)) < 1e-5


@pytest.mark.parametrize("name", LISTS)
def test_the_loops_that_numba_compiles_are_attention_over_the_edges(name, interpreted):
    x = inputs_of(LISTS[name])
    assert max(gate.truth_of(x, backward=True).errors_of(listed.numba_rows)) < 1e-5


def test_numba_compiles_them():
    pytest.importorskip("numba")
    x = inputs_of(LISTS["class token"])
    assert max(gate.truth_of(x, backward=True).errors_of(listed.numba_rows)) < 1e-5


def test_numba_is_listed_as_missing(monkeypatch):
    monkeypatch.setattr(contenders.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "numba", raising=False)
    with pytest.raises(inputs.MissingError, match="numba is not installed"):
        listed.numba_rows(inputs_of(LISTS["nearest"]))


# What stands where.


@pytest.mark.parametrize(("value", "says"), [(None, "as the system"), ("1", "asked for")])
def test_a_record_says_whether_tensors_were_to_lie_in_huge_pages(monkeypatch, value, says):
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    if value is not None:
        monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", value)
    facts = record.provenance(CPU, "small")
    assert facts["huge pages"].startswith(says)
    assert facts["compiled kernels"] in (None, "baseline", "AVX2", "AVX-512")


def test_the_structured_backend_beside_ours_is_that_one(monkeypatch):
    taken = []
    monkeypatch.setattr(ga, "rbf_attention", lambda *_, **options: taken.append(options["backend"]))
    ours.rbf_structured(inputs_of(LISTS["nearest"]))
    assert taken == ["structured"]


def test_peers_of_a_cpu_are_missing_on_a_gpu():
    x = inputs_of(WINDOWS["causal"], 3)
    meta = replace(x, **{n: getattr(x, n).to("meta") for n in ("query", "key", "value")})
    runs = [blocks.blocks_sdpa, *map(blocks.blocks_top_k, SELECTIONS), ours.rbf_structured,
            slices.compiled_slices, chunks.chunks_rbf, chunks.chunks_dot,
            listed.torch_sparse, listed.numba_rows]  # fmt: skip
    for run in runs:
        with pytest.raises(inputs.MissingError, match="written only for CPUs"):
            run(meta)


def test_reverse_cuthill_mckee_brings_neighbours_together_and_keeps_the_graph():
    size = {"tokens": 300, "k": 6}
    graph = ga.knn_graph(edge_cases.points_in_a_cube(size), size["k"])
    other, _ = graph.reorder()
    far, near = ((g.edge_index[0] - g.edge_index[1]).abs().double().mean() for g in (graph, other))
    assert near < far / 3

    def spectrum(graph):
        mask = graph.to_mask().double()
        return numpy.linalg.svd(mask.numpy(), compute_uv=False)

    assert spectrum(other) == pytest.approx(spectrum(graph), abs=1e-9)
    assert sorted(other.in_degree().tolist()) == sorted(graph.in_degree().tolist())


def test_a_point_has_as_many_neighbours_within_the_radius_as_asked_for():
    """A few fewer, because of the faces of the cube."""
    size = {"tokens": 4000, "degree": 16}
    mean = edge_cases.within_a_radius(size).num_edges / size["tokens"]
    assert 0.7 * 16 < mean < 16

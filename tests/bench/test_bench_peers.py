"""Peers of attention: right on every graph they take, clear where not, and without atomic adds."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import types
from dataclasses import replace

import numpy
import pytest
import torch
from bench_helpers import CPU, NEEDS_COMPILER, error_of, inputs_over
from torch import Tensor

import graphattn as ga
from graphattn.bench.cases import catalogue as cases
from graphattn.bench.cases import edges as edge_cases
from graphattn.bench.cases.inputs import MissingError
from graphattn.bench.contenders import ours, peers
from graphattn.bench.contenders import sparse_matrices as listed
from graphattn.bench.contenders.by_hand import gathered
from graphattn.bench.contenders.by_hand import offset_slices as slices
from graphattn.bench.contenders.by_hand import sliding_chunks as chunks
from graphattn.bench.contenders.by_hand import window_blocks as blocks
from graphattn.bench.measuring import correctness as gate
from graphattn.bench.measuring.passes import one_pass
from graphattn.bench.reporting import record

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
TABLES = {
    **LISTS,
    "window": ga.window_path_graph(40, 3, self_loops=True),
    "one edge": ga.from_edge_index(torch.tensor([[1], [2]]), 4, 3),
}
SELECTIONS = [blocks.largest_by_topk, blocks.largest_by_numpy]
# A contender, whether it computes dot products, and the graphs that it takes.
PEERS = {
    "blocks": (blocks.blocks_sdpa, True, WINDOWS),
    "chunks": (chunks.chunks_rbf, False, WITH_GLOBAL_TOKENS),
    "chunks, dot products": (chunks.chunks_dot, True, WITH_GLOBAL_TOKENS),
    "slices": (slices.compiled_slices, False, WINDOWS),
    "sparse": (listed.torch_sparse, False, {**WINDOWS, **LISTS}),
    "numba": (listed.numba_rows, False, LISTS),
    "gathered": (gathered.compiled, False, TABLES),
}


@pytest.fixture
def uncompiled(monkeypatch):
    """Hand-written code as PyTorch runs it, and numba's loops as Python runs them."""
    for module in (slices, gathered):
        monkeypatch.setattr(module, "compile_once", lambda function: function)
        monkeypatch.setattr(module, "needs_compiler", lambda device: None)
    threads = types.SimpleNamespace(NUMBA_NUM_THREADS=1)
    numba = types.SimpleNamespace(config=threads, set_num_threads=lambda count: None)
    loops = listed.forward_loops, listed.backward_loops
    monkeypatch.setattr(listed, "installed", lambda name: numba)
    monkeypatch.setattr(listed, "compiled_loops", lambda: loops)


@pytest.mark.parametrize(
    ("peer", "name"), [(peer, name) for peer, (_, _, graphs) in PEERS.items() for name in graphs]
)
def test_a_peer_is_attention_over_the_graphs_that_it_takes(peer, name, uncompiled):
    """Targets and sources without an edge too."""
    contender, is_dot, graphs = PEERS[peer]
    assert error_of(contender, inputs_over(graphs[name]), is_dot=is_dot) < 1e-5


@pytest.mark.parametrize("is_dot", [False, True])
def test_every_row_of_chunks_is_right_and_not_a_sample(is_dot):
    x = inputs_over(ga.longformer_graph(150, 20, [3, 80]))
    run, given = (chunks.chunks_dot if is_dot else chunks.chunks_rbf), x.learned()
    doubled = [t.detach().double().requires_grad_() for t in given]
    truth = gate.in_float64(x.like(doubled, x.graph), dot_product=is_dot)
    out, loss = run(x), torch.randn(truth.shape, generator=torch.Generator().manual_seed(2))
    assert gate.relative_error(out, truth.detach()) < 1e-5
    expected = torch.autograd.grad(truth, doubled, loss.double())
    for gradient, true in zip(torch.autograd.grad(out, given, loss), expected, strict=True):
        assert gate.relative_error(gradient, true) < 1e-5


@pytest.mark.parametrize("select", SELECTIONS)
@pytest.mark.parametrize("top_k", [1, 3, 30])
@pytest.mark.parametrize("name", WINDOWS)
def test_blocks_keep_the_nearest_of_the_window(name, top_k, select):
    assert error_of(blocks.blocks_top_k(select), inputs_over(WINDOWS[name], top_k)) < 1e-5


def test_the_threshold_is_the_smallest_number_kept():
    logits = torch.tensor([[3.0, 1.0, -torch.inf, 2.0], [-torch.inf, 5.0, -torch.inf, -torch.inf]])
    for select in SELECTIONS:
        assert select(logits, 2).tolist() == [[2.0], [-torch.inf]]


@pytest.mark.parametrize(
    ("contender", "graph", "says"),
    [
        (slices.compiled_slices, ga.complete_graph(9), "only windows whose tokens see themselves"),
        (slices.compiled_slices, ga.window_path_graph(9, 2), "only windows whose tokens see"),
        (slices.compiled_slices, ga.causal_window_graph(200, 80), "windows of at most 64 tokens"),
        (chunks.chunks_rbf, WINDOWS["causal"], "only windows with global tokens"),
        (chunks.chunks_dot, ga.longformer_graph(30, 3, [0], dilation=2), "with global tokens"),
    ],
)
def test_other_graphs_are_refused(contender, graph, says, uncompiled):
    with pytest.raises(MissingError, match=says):
        contender(inputs_over(graph))


def test_peers_of_a_cpu_are_missing_on_a_gpu():
    x = inputs_over(WINDOWS["causal"], 3)
    meta = replace(x, **{n: getattr(x, n).to("meta") for n in ("query", "key", "value")})
    runs = [blocks.blocks_sdpa, *map(blocks.blocks_top_k, SELECTIONS), ours.rbf_structured,
            slices.compiled_slices, chunks.chunks_rbf, chunks.chunks_dot,
            listed.torch_sparse, listed.numba_rows]  # fmt: skip
    for run in runs:
        with pytest.raises(MissingError, match="written only for CPUs"):
            run(meta)


@pytest.mark.parametrize(
    ("contender", "package"), [(listed.numba_rows, "numba"), (peers.keops, "pykeops")]
)
def test_without_its_package_a_peer_is_missing(contender, package, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, package, raising=False)
    with pytest.raises(MissingError, match=f"{package} is not installed"):
        contender(inputs_over(LISTS["nearest"]))


def test_without_a_compiler_it_is_missing(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(MissingError, match="needs a C\\+\\+ compiler"):
        gathered.compiled(inputs_over(TABLES["window"]))


# Compiled.


def test_numba_compiles_the_loops():
    pytest.importorskip("numba")
    assert error_of(listed.numba_rows, inputs_over(LISTS["class token"])) < 1e-5


@pytest.mark.long
@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("module", "graph"),
    [
        (slices, ga.window_path_graph(70, 2, self_loops=True)),
        (gathered, LISTS["nearest"]),
        (gathered, LISTS["class token"]),
    ],
)
def test_compiled_code_adds_nothing_atomically_and_is_right(module, graph, monkeypatch):
    """Compiled code that gathers, or reads slices, has no atomic adds, with two threads.

    One thread that adds alone needs none anyhow. A compiled index_add has them, so they would be
    seen.
    """
    from torch._inductor.utils import run_and_get_code

    monkeypatch.setattr(module, "needs_compiler", lambda device: None)
    peers.compile_once.cache_clear()
    torch.compiler.reset()
    x, before = inputs_over(graph), torch.get_num_threads()
    contender = slices.compiled_slices if module is slices else gathered.compiled
    torch.set_num_threads(2)
    try:
        _, codes = run_and_get_code(lambda: one_pass(contender, x, backward=True))
        source, target = x.graph.edge_index
        messages = x.value.detach().index_select(0, source)
        add = torch.compile(peers._add)
        _, scattered = run_and_get_code(lambda: add(messages, target, x.graph.num_targets))
        assert error_of(contender, x) < 1e-5
    finally:
        torch.set_num_threads(before)
        torch.compiler.reset()
    kernels = "".join(codes)
    assert "for(" in kernels  # there are loops
    assert "atomic_add" not in kernels
    assert "index_put" not in kernels
    assert "atomic_add" in "".join(scattered)


# Tables of edges.


@pytest.mark.parametrize("name", TABLES)
def test_every_edge_stands_in_one_place_of_a_table(name):
    graph = TABLES[name]
    source, target = graph.edge_index
    for rows, ends, count in (
        (target, source, graph.num_targets),
        (source, target, graph.num_sources),
    ):
        tables = gathered.tables_of(rows, ends, count)
        members = torch.cat([table.rows for table in tables.tables])
        assert torch.equal(members[tables.place], torch.arange(count))
        edges = []
        for table in tables.tables:
            row = table.rows[:, None].expand_as(table.ends)[table.is_edge]
            edges.append(table.edges[table.is_edge])
            assert torch.equal(rows[edges[-1]], row)
            assert torch.equal(ends[edges[-1]], table.ends[table.is_edge])
        assert torch.equal(torch.cat(edges).sort().values, torch.arange(graph.num_edges))


def test_a_few_wide_rows_do_not_widen_the_others():
    """One table of a class token's graph would have as many places as there are pairs."""
    graph = ga.grid_window_graph(20, 20, 1, class_token=True)
    source, target = graph.edge_index
    tables = gathered.tables_of(target, source, graph.num_targets)
    assert tables.places < 2 * graph.num_edges < graph.num_tokens**2 / 4
    source, target = ga.window_path_graph(100, 4).edge_index
    assert len(gathered.tables_of(target, source, 100).tables) == 1


def test_wherever_gather_scatter_stands_so_does_the_compiled_one():
    standing = [case for case in cases.CASES if "torch-scatter" in case.contenders]
    assert {case.name for case in standing} == {"window", "knn-graph", "bipartite", "grid"}
    assert all(case.contenders["compiled"] is gathered.compiled for case in standing)


# KeOps.


class DenseLazyTensor:
    """A symbolic tensor [*batch, N, M, D] by the rules of KeOps' manual, held in full.

    `ndim` is D, a vector's number of entries, and reductions over N or M are asked for by the
    number of batch dimensions and 0 or 1.
    """

    def __init__(self, x: Tensor, *, is_variable: bool = True) -> None:
        assert not is_variable or x.is_contiguous()
        assert not is_variable or 1 in x.shape[-3:-1], "a variable has no entry per pair"
        self.x, self.ndim = x, x.shape[-1]

    def __sub__(self, other: DenseLazyTensor) -> DenseLazyTensor:
        return DenseLazyTensor(self.x - other.x, is_variable=False)

    def __neg__(self) -> DenseLazyTensor:
        return DenseLazyTensor(-self.x, is_variable=False)

    def __truediv__(self, number: float) -> DenseLazyTensor:
        return DenseLazyTensor(self.x / number, is_variable=False)

    def square(self) -> DenseLazyTensor:
        return DenseLazyTensor(self.x.square(), is_variable=False)

    def sum(self, axis: int) -> DenseLazyTensor:
        assert axis in (-1, self.x.dim() - 1), "other sums are reductions"
        return DenseLazyTensor(self.x.sum(-1, keepdim=True), is_variable=False)

    def sumsoftmaxweight(self, weight: DenseLazyTensor, axis: int) -> Tensor:
        if axis - (self.x.dim() - 3) not in (0, 1):
            raise ValueError("'axis' must be equal to the number of batch dimensions + 0 or 1")
        assert self.ndim == 1
        return (self.x.softmax(axis) * weight.x).sum(axis)


@pytest.mark.parametrize("batch", [None, 2], ids=["one sequence", "a batch"])
def test_the_call_is_one_that_keops_takes(batch, monkeypatch):
    """KeOps' rules about axes, written down here: they hold where it is not installed."""
    module = types.SimpleNamespace(LazyTensor=DenseLazyTensor)
    monkeypatch.setattr(peers, "installed", lambda name: module)
    assert error_of(peers.keops, inputs_over(ga.complete_graph(20), batch=batch)) < 1e-5


@pytest.mark.parametrize("batch", [None, 2], ids=["one sequence", "a batch"])
def test_keops_itself_agrees(batch):
    pytest.importorskip("pykeops.torch", reason="KeOps is an optional peer: pip install pykeops")
    assert error_of(peers.keops, inputs_over(ga.complete_graph(20), batch=batch)) < 1e-5


@pytest.mark.parametrize("axis", [0, 3])
def test_the_stand_in_refuses_the_axes_that_keops_refuses(axis):
    lazy = DenseLazyTensor(torch.ones(2, 4, 1, 1))
    with pytest.raises(ValueError, match="number of batch dimensions"):
        lazy.sumsoftmaxweight(lazy, axis=axis)


# Facts that a record has, and the graphs of points.


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
    ours.rbf_structured(inputs_over(LISTS["nearest"]))
    assert taken == ["structured"]


def test_reverse_cuthill_mckee_brings_neighbours_together_and_keeps_the_graph():
    size = {"tokens": 300, "k": 6}
    graph = ga.knn_graph(edge_cases.points_in_a_cube(size), size["k"])
    other, _ = graph.reorder()
    far, near = ((g.edge_index[0] - g.edge_index[1]).abs().double().mean() for g in (graph, other))
    assert near < far / 3
    one, two = (numpy.linalg.svd(g.to_mask().double(), compute_uv=False) for g in (graph, other))
    assert two == pytest.approx(one, abs=1e-9)
    assert sorted(other.in_degree().tolist()) == sorted(graph.in_degree().tolist())


def test_a_point_has_as_many_neighbours_within_the_radius_as_asked_for():
    """A few fewer, because of the faces of the cube."""
    size = {"tokens": 4000, "degree": 16}
    mean = edge_cases.within_a_radius(size).num_edges / size["tokens"]
    assert 0.7 * 16 < mean < 16

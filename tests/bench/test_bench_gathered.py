"""Compiled gather/scatter in `graphattn bench`: right on every graph, and without atomic adds."""

from __future__ import annotations

import shutil

import pytest
import torch

import graphattn as ga
from graphattn.bench.cases import catalogue as cases
from graphattn.bench.cases import inputs
from graphattn.bench.contenders import peers as contenders
from graphattn.bench.contenders.by_hand import gathered
from graphattn.bench.measuring import correctness as gate
from graphattn.bench.measuring import passes as measure

CPU = torch.device("cpu")
NEEDS_COMPILER = pytest.mark.skipif(
    shutil.which("c++") is None, reason="torch.compile needs a C++ compiler on a CPU"
)
GRAPHS = {
    "window": ga.window_path_graph(40, 3, self_loops=True),
    "nearest": ga.knn_graph(torch.rand(40, 3, generator=torch.Generator().manual_seed(0)), 5),
    "class token": ga.grid_window_graph(6, 6, 1, class_token=True),
    "two tracks": ga.from_edge_index(torch.tensor([[0, 2, 2, 8, 5], [3, 0, 3, 3, 1]]), 5, 9),
    "one edge": ga.from_edge_index(torch.tensor([[1], [2]]), 4, 3),
}


def inputs_of(graph: ga.TokenGraph) -> inputs.AttentionInputs:
    return inputs.attention_inputs(graph, 2, 8, CPU, torch.float32)


@pytest.fixture
def uncompiled(monkeypatch):
    monkeypatch.setattr(gathered, "compile_once", lambda function: function)
    monkeypatch.setattr(gathered, "needs_compiler", lambda device: None)


@pytest.mark.parametrize("name", GRAPHS)
def test_it_is_attention_over_the_edges(name, uncompiled):
    """Targets and sources without an edge too."""
    x = inputs_of(GRAPHS[name])
    truth = gate.truth_of(x, backward=True)
    assert max(truth.errors_of(gathered.compiled)) < 1e-5


@pytest.mark.parametrize("name", GRAPHS)
def test_every_edge_stands_in_one_place_of_a_table(name):
    graph = GRAPHS[name]
    source, target = graph.edge_index
    for rows, ends, count in (
        (target, source, graph.num_targets),
        (source, target, graph.num_sources),
    ):
        tables = gathered.tables_of(rows, ends, count)
        members = torch.cat([table.rows for table in tables.tables])
        assert torch.equal(members[tables.place], torch.arange(count))
        found = []
        for table in tables.tables:
            row = table.rows[:, None].expand_as(table.ends)[table.is_edge]
            edge = table.edges[table.is_edge]
            assert torch.equal(rows[edge], row)
            assert torch.equal(ends[edge], table.ends[table.is_edge])
            found.append(edge)
        assert torch.equal(torch.cat(found).sort().values, torch.arange(graph.num_edges))


def test_a_few_wide_rows_do_not_widen_the_others():
    """One table of a class token's graph would have as many places as there are pairs."""
    graph = ga.grid_window_graph(20, 20, 1, class_token=True)
    source, target = graph.edge_index
    tables = gathered.tables_of(target, source, graph.num_targets)
    assert tables.places < 2 * graph.num_edges < graph.num_tokens**2 / 4
    window = ga.window_path_graph(100, 4)
    source, target = window.edge_index
    assert len(gathered.tables_of(target, source, 100).tables) == 1


@pytest.mark.long
@NEEDS_COMPILER
@pytest.mark.parametrize("name", ["nearest", "class token"])
def test_what_is_compiled_adds_nothing_atomically(name, monkeypatch):
    """The compiled contender that gathers has no atomic adds, with two threads.

    One thread that adds alone needs none anyhow. A compiled index_add has them, so they would be
    found.
    """
    from torch._inductor.utils import run_and_get_code

    monkeypatch.setattr(gathered, "needs_compiler", lambda device: None)
    gathered.compile_once.cache_clear()
    torch.compiler.reset()
    x = inputs_of(GRAPHS[name])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        _, codes = run_and_get_code(lambda: measure.one_pass(gathered.compiled, x, backward=True))
        source, target = x.graph.edge_index
        messages = x.value.detach().index_select(0, source)
        add = torch.compile(contenders._add)
        _, scattered = run_and_get_code(lambda: add(messages, target, x.graph.num_targets))
    finally:
        torch.set_num_threads(before)
        torch.compiler.reset()
    kernels = "".join(codes)
    assert "for(" in kernels  # there are loops
    assert "atomic_add" not in kernels
    assert "index_put" not in kernels
    assert "atomic_add" in "".join(scattered)  # what is looked for would be found


@pytest.mark.long
@NEEDS_COMPILER
def test_compiled_it_is_still_right():
    truth = gate.truth_of(inputs_of(GRAPHS["class token"]), backward=True)
    assert max(truth.errors_of(gathered.compiled)) < 1e-5


def test_without_a_compiler_it_is_missing(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(inputs.MissingError, match="needs a C\\+\\+ compiler"):
        gathered.compiled(inputs_of(GRAPHS["window"]))


def test_wherever_gather_scatter_stands_so_does_the_compiled_one():
    standing = [case for case in cases.CASES if "torch-scatter" in case.contenders]
    assert {case.name for case in standing} == {"window", "knn-graph", "bipartite", "grid"}
    assert all(case.contenders["compiled"] is gathered.compiled for case in standing)

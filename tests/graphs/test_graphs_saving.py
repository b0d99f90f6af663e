"""A saved graph is numbers and tensors: torch reads it without running anybody's code."""

import pickle
import subprocess
import sys
from dataclasses import fields, is_dataclass

import pytest
import torch
from kinds_of_graphs import GRAPHS

import graphattn as ga
from graphattn.graphs.structures.graph_code import KINDS


def kinds_in(structure) -> set[type]:
    """The classes of a structure and of those inside it."""
    if isinstance(structure, tuple):
        return set().union(*map(kinds_in, structure)) if structure else set()
    if not is_dataclass(structure):
        return set()
    inner = (kinds_in(getattr(structure, field.name)) for field in fields(structure))
    return {type(structure)}.union(*inner)


def facts(graph: ga.TokenGraph):
    return (graph.is_causal, graph.has_causal_part, graph.sizes, graph.code.tolist(), repr(graph))


def test_every_kind_of_structure_is_saved_here():
    assert set().union(*(kinds_in(make().structure) for make in GRAPHS.values())) == set(KINDS)


def test_a_fresh_process_reads_every_graph_with_weights_only(tmp_path):
    made = {name: make() for name, make in GRAPHS.items()}
    torch.save(made, tmp_path / "graphs.pt")
    script = (
        "import sys, torch, graphattn\n"
        "read = torch.load(sys.argv[1], weights_only=True)\n"
        "assert all(type(graph) is graphattn.TokenGraph for graph in read.values())\n"
        "assert 'torch_geometric' not in sys.modules and 'networkx' not in sys.modules\n"
        "torch.save({name: (graph.edge_index, repr(graph)) for name, graph in read.items()}, "
        "sys.argv[2])\n"
    )
    command = [sys.executable, "-c", script, tmp_path / "graphs.pt", tmp_path / "edges.pt"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name, (edge_index, text) in torch.load(tmp_path / "edges.pt").items():
        assert torch.equal(edge_index, made[name].edge_index), name
        assert text == repr(made[name])


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_read_back_equals_the_one_saved(name, tmp_path):
    graph = GRAPHS[name]()
    _ = graph.rowptr, graph.positions, graph.transpose()
    torch.save(graph, tmp_path / "graph.pt")
    for twin in (
        torch.load(tmp_path / "graph.pt", weights_only=True),
        pickle.loads(pickle.dumps(graph)),
    ):
        assert twin == graph
        assert twin.structure == graph.structure
        assert facts(twin) == facts(graph)
        assert torch.equal(twin.positions, graph.positions)


@pytest.mark.parametrize("name", ["path", "table", "list"])
def test_map_location_moves_a_graph_with_what_it_will_list(name, tmp_path):
    torch.save(GRAPHS[name](), tmp_path / "graph.pt")
    moved = torch.load(tmp_path / "graph.pt", map_location="meta", weights_only=True)
    assert moved.device.type == "meta"


@pytest.mark.parametrize("name", ["list", "table"])
def test_a_file_whose_edges_lead_nowhere_is_refused(name):
    graph = GRAPHS[name]()
    state = graph.__getstate__()
    key = "_neighbors" if name == "table" else "_edge_index"
    state[key] = state[key].clone()
    state[key][0, 0] = 10**6
    with pytest.raises(
        ValueError,
        match=r"edge_index\[0, 0\] = 1000000|neighbors must hold -1 \(no source\) or sources",
    ):
        object.__new__(ga.TokenGraph).__setstate__(state)


def test_saving_a_graph_in_inference_mode_leaves_it_fit_for_training(tmp_path):
    torch.save(GRAPHS["list"](), tmp_path / "graph.pt")
    with torch.inference_mode():
        graph = torch.load(tmp_path / "graph.pt", weights_only=True)
    assert not graph.edge_index.is_inference()

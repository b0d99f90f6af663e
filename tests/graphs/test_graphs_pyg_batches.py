"""A batch of graphs as PyG's Batch: field by field what PyG joins from the parts."""

import pytest
import torch
from torch_geometric.data import Batch, Data, HeteroData

import graphattn as ga

READS = ("dna", "reads", "protein")
BINDS = ("protein", "binds", "protein")


def lists(*sizes: tuple[int, int]) -> list[ga.TokenGraph]:
    generator = torch.Generator().manual_seed(0)
    masks = [torch.rand(size, generator=generator) < 0.4 for size in sizes]
    return [ga.from_mask(mask) for mask in masks]


PARTS = {
    "lists": lambda: lists((3, 3), (5, 5), (1, 1), (4, 4)),
    "empty parts": lambda: lists((0, 0), (3, 3), (0, 0), (0, 0)),
    "structures": lambda: [ga.causal_graph(3), ga.window_path_graph(6, 2)],
    "tables": lambda: [ga.knn_graph(torch.rand(n, 2), 2) for n in (5, 4)],
    "a list and a structure": lambda: [*lists((4, 4)), ga.complete_graph(3)],
}
APART = {
    "rectangles": lambda: lists((3, 5), (4, 6), (0, 4), (4, 0)),
    "two sides": lambda: [ga.bipartite_complete_graph(2, 3), ga.bipartite_complete_graph(1, 4)],
}


def values_of(count: int, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    made = {"edge_attr": torch.rand(count, 3), "edge_weight": torch.rand(count)}
    return {name: made[name] for name in names}


def by_hand(graphs, edge_type, values):
    """Build the batch as a user of PyG would."""
    parts, first = [], 0
    for graph in graphs:
        edges_of_part = slice(first, first + graph.num_edges)
        first += graph.num_edges
        if edge_type is None:
            data = Data(edge_index=graph.edge_index, num_nodes=graph.num_tokens)
            edges = data
        else:
            data = HeteroData()
            data[edge_type[2]].num_nodes = graph.num_targets
            data[edge_type[0]].num_nodes = graph.num_sources
            edges = data[edge_type]
            edges.edge_index = graph.edge_index
        for name, value in values.items():
            edges[name] = value[edges_of_part]
        parts.append(data)
    return Batch.from_data_list(parts)


def same(fields, expected):
    """Equal dicts of tensors and numbers, in the same order of names."""
    assert list(fields) == list(expected)
    for name in expected:
        a, b = fields[name], expected[name]
        if isinstance(b, torch.Tensor):
            assert (a.dtype, a.shape) == (b.dtype, b.shape), name
            assert torch.equal(a, b), name
        else:
            assert a == b, name


CASES = [
    *((name, None) for name in PARTS),
    *((name, BINDS) for name in PARTS),
    *((name, READS) for name in (*PARTS, *APART)),
]


@pytest.mark.parametrize(("name", "edge_type"), CASES)
@pytest.mark.parametrize("names", [("edge_weight",), ("edge_attr", "edge_weight")])
def test_a_batch_is_the_batch_that_pyg_makes_of_its_parts(name, edge_type, names):
    graphs = (PARTS | APART)[name]()
    packed = ga.batch(graphs)
    values = values_of(packed.num_edges, names)
    batch = packed.to_pyg(edge_type, **values)
    expected = by_hand(graphs, edge_type, values)
    assert batch.num_graphs == expected.num_graphs == len(graphs)
    assert batch.num_nodes == expected.num_nodes
    assert type(batch) is type(expected)
    for mine, theirs in zip(batch.stores, expected.stores, strict=True):
        assert mine._key == theirs._key
        same(dict(mine.items()), dict(theirs.items()))
        assert getattr(mine, "_num_nodes", None) == getattr(theirs, "_num_nodes", None)
    if edge_type is None:
        same(batch._slice_dict, expected._slice_dict)
        same(batch._inc_dict, expected._inc_dict)
    else:
        same(batch._slice_dict[edge_type], expected._slice_dict[edge_type])
        same(batch._inc_dict[edge_type], expected._inc_dict[edge_type])
    assert ga.from_pyg(batch, return_permutation=True)[0].sizes == packed.sizes


@pytest.mark.parametrize(("name", "edge_type"), CASES)
def test_a_batch_comes_apart_again(name, edge_type):
    graphs = (PARTS | APART)[name]()
    packed = ga.batch(graphs)
    weight = torch.rand(packed.num_edges)
    parts = packed.to_pyg(edge_type, edge_weight=weight).to_data_list()
    assert len(parts) == len(graphs)
    first = 0
    for part, graph in zip(parts, graphs, strict=True):
        edges = part if edge_type is None else part[edge_type]
        assert torch.equal(edges.edge_index, graph.edge_index)
        assert torch.equal(edges.edge_weight, weight[first : first + graph.num_edges])
        first += graph.num_edges
        ends = (part, part) if edge_type is None else (part[edge_type[2]], part[edge_type[0]])
        assert [end.num_nodes for end in ends] == [graph.num_targets, graph.num_sources]


def test_weights_of_a_batch_are_differentiated_through_it():
    packed = ga.batch(lists((3, 3), (5, 5)))
    weight = torch.rand(packed.num_edges, requires_grad=True)
    data = packed.to_pyg(edge_weight=weight)
    data[1].edge_weight.square().sum().backward()
    borders = data._slice_dict["edge_weight"]
    expected = torch.where(torch.arange(len(weight)) >= borders[1], 2 * weight, 0)
    assert torch.equal(weight.grad, expected)


def test_writing_into_the_batch_leaves_the_graph():
    packed = ga.batch(lists((3, 3), (5, 5)))
    before = packed.edge_index.clone()
    packed.to_pyg(edge_weight=torch.zeros(packed.num_edges)).edge_index.zero_()
    assert torch.equal(packed.edge_index, before)

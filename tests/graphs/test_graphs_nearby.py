"""Edges between tokens that are near in their sequence: the same as a filter of all pairs."""

import pytest
import torch

import graphattn as ga
from graphattn.graphs.nearby import nearby_edges

GRAPHS = {
    "causal": lambda: ga.causal_graph(12),
    "causal window": lambda: ga.causal_window_graph(12, 5),
    "later part of a causal graph": lambda: ga.causal_graph(5, past=7),
    "window": lambda: ga.window_path_graph(12, 4),
    "window with loops": lambda: ga.window_path_graph(12, 4, self_loops=True),
    "dilated": lambda: ga.dilated_window_graph(12, 2, dilation=3),
    "complete": lambda: ga.complete_graph(12),
    "complete without loops": lambda: ga.complete_graph(12, self_loops=False),
    "packed": lambda: ga.batch([ga.causal_graph(7), ga.complete_graph(5)]),
    "packed, one empty": lambda: ga.batch([ga.causal_graph(0), ga.causal_window_graph(5, 3)]),
    "longformer": lambda: ga.longformer_graph(12, 2, [0]),
    "packed with another kind": lambda: ga.batch(
        [ga.causal_graph(6), ga.longformer_graph(6, 1, [0])]
    ),
    "listed": lambda: ga.from_mask(torch.rand(12, 12, generator=torch.Generator()) < 0.5),
    "neighbours": lambda: ga.knn_graph(torch.arange(12.0)[:, None] * 7 % 5, k=3),
    "in another order": lambda: ga.causal_graph(12).permute(torch.randperm(12)),
    "nothing": lambda: ga.causal_graph(0),
}
OF_BANDS = [*list(GRAPHS)[:6], "complete", "packed", "packed, one empty", "nothing"]


@pytest.mark.parametrize("window", [1, 2, 4, 100])
@pytest.mark.parametrize("name", GRAPHS)
def test_near_edges_are_those_of_a_filter(name, window):
    graph = GRAPHS[name]()
    near = nearby_edges(graph, window)
    apart = graph.positions[:, None] - graph.source_positions
    assert torch.equal(near.to_mask(), graph.to_mask() & (apart.abs() < window))
    assert (near.sizes, near.starts) == (graph.sizes, graph.starts)
    assert torch.equal(near.positions, graph.positions)
    assert near.is_causal or not graph.is_causal


@pytest.mark.parametrize("name", OF_BANDS)
def test_of_bands_no_edge_is_listed_and_the_result_is_stored(name):
    graph = GRAPHS[name]()
    near = nearby_edges(graph, 3)
    assert near.structure is not None
    assert nearby_edges(graph, 3) is near
    assert nearby_edges(graph, 4) is not near


def test_of_a_causal_graph_they_are_a_causal_window():
    assert (
        nearby_edges(ga.causal_graph(100), 8).structure == ga.causal_window_graph(100, 8).structure
    )
